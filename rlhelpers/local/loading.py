"""Loading base models: what a name stands for, and the model behind it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils import logging as hf_logging

SMALL = 20_000_000  # parameters
TINY_POLICY = "local/tiny-arithmetic"
_DATA = Path(__file__).resolve().parents[2] / "data"


def default_models() -> dict[str, Path]:
    """Base-model names that every local service knows, with their folders."""
    return {TINY_POLICY: _DATA / "tiny-policy"}


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


def load_base_model(name: str, models: dict[str, Path], device: str) -> BaseModel:
    """Load ``name``: a known name or a folder with a Hugging Face causal LM.

    Raises :class:`UnknownModel` with the names that would work. Weights are read
    with safetensors only: no pickle is ever loaded.
    """
    source = models.get(name) or Path(name)
    if not _is_file(source / "config.json"):
        known = ", ".join(sorted(models))
        raise UnknownModel(
            f"base_model {name!r} is not known to the local service; use one of "
            f"{known}, or the path of a folder with a Hugging Face causal LM"
        )
    trainable, sampling = (_load_weights(source, device) for _ in range(2))
    _untie(sampling)
    tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
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


def _load_weights(source: Path, device: str) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(source, local_files_only=True)
    with _no_progress_bar():
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            dtype=torch.float32,
            attn_implementation="sdpa",
            local_files_only=True,
            use_safetensors=True,
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
    """Models load in a blink here, and a bar would end up in a stored notebook."""
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
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
