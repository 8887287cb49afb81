"""The training data of a request, checked before any of it is computed on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .losses import check_inputs, get_loss

_LARGEST = torch.finfo(torch.float32).max


class BatchError(ValueError):
    """A datum that is malformed; the message says which one and where."""


@dataclass(frozen=True)
class TrainingDatum:
    """One sequence: position *i* of ``tokens`` predicts ``target_tokens[i]``.

    ``inputs`` holds the loss's tensors, each of shape [len(tokens)].
    """

    tokens: list[int]
    inputs: dict[str, Tensor]

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class BatchLimits:
    """What the base model can take."""

    vocab_size: int
    context_length: int


def parse_data(raw: Any, loss_fn: str, limits: BatchLimits) -> list[TrainingDatum]:
    """Datums from the wire form; :class:`BatchError` names the first bad one."""
    get_loss(loss_fn)
    if not isinstance(raw, list) or not raw:
        raise BatchError("data must be a list with at least one datum")
    return [_parse_datum(item, loss_fn, limits, i) for i, item in enumerate(raw)]


def _parse_datum(
    raw: Any, loss_fn: str, limits: BatchLimits, index: int
) -> TrainingDatum:
    where = f"data[{index}]"
    if not isinstance(raw, Mapping):
        raise BatchError(f"{where} must be an object, got {type(raw).__name__}")
    tokens = parse_tokens(raw.get("model_input"), limits, where)
    loss_inputs = raw.get("loss_fn_inputs")
    if not isinstance(loss_inputs, Mapping):
        raise BatchError(f"{where}.loss_fn_inputs must be an object")
    check_inputs(loss_fn, frozenset(loss_inputs))
    inputs = {
        name: _parse_tensor(value, len(tokens), f"{where}.{name}", name, limits)
        for name, value in loss_inputs.items()
    }
    return TrainingDatum(tokens, inputs)


def parse_tokens(raw: Any, limits: BatchLimits, where: str) -> list[int]:
    """Token ids from a ``model_input``: text chunks, joined in order."""
    chunks = raw.get("chunks") if isinstance(raw, Mapping) else None
    if not isinstance(chunks, list):
        raise BatchError(f"{where}.model_input must hold a list of chunks")
    tokens: list[int] = []
    for chunk in chunks:
        kind = chunk.get("type") if isinstance(chunk, Mapping) else None
        if kind != "encoded_text":
            raise BatchError(
                f"{where}.model_input has a chunk of type {kind!r}; the local service "
                "takes 'encoded_text' only"
            )
        tokens.extend(check_token_ids(chunk.get("tokens"), limits, where))
    if not tokens:
        raise BatchError(f"{where}.model_input holds no token")
    if len(tokens) > limits.context_length:
        raise BatchError(
            f"{where} has {len(tokens)} tokens, more than the model's context of "
            f"{limits.context_length}"
        )
    return tokens


def check_token_ids(raw: Any, limits: BatchLimits, where: str) -> list[int]:
    """``raw`` as a list of ids inside the vocabulary."""
    if not isinstance(raw, list):
        raise BatchError(f"{where} needs a list of token ids")
    for token in raw:
        if isinstance(token, bool) or not isinstance(token, int):
            raise BatchError(f"{where} has a token id that is no integer: {token!r}")
        if not 0 <= token < limits.vocab_size:
            raise BatchError(
                f"{where} has token id {token}, outside the vocabulary of "
                f"{limits.vocab_size}: is the tokenizer the base model's?"
            )
    return raw


def _parse_tensor(
    raw: Any, length: int, where: str, name: str, limits: BatchLimits
) -> Tensor:
    if not isinstance(raw, Mapping) or not isinstance(raw.get("data"), list):
        raise BatchError(f"{where} must be a tensor with a flat list of data")
    if raw.get("sparse_crow_indices") is not None:
        raise BatchError(f"{where} is sparse, which the local service does not support")
    shape = raw.get("shape")
    values = raw["data"]
    if shape is not None and list(shape) != [len(values)]:
        raise BatchError(f"{where} has shape {shape}; only one dimension is supported")
    if len(values) != length:
        raise BatchError(
            f"{where} has {len(values)} values for {length} input tokens: position i "
            "of the input predicts target i, so the lengths must agree"
        )
    if name == "target_tokens":
        return torch.tensor(check_token_ids(values, limits, where))
    if not all(_is_finite_number(value) for value in values):
        bad = next(value for value in values if not _is_finite_number(value))
        raise BatchError(f"{where} has a value that is no finite number: {bad!r}")
    return torch.tensor(values, dtype=torch.float32)


def _is_finite_number(value: Any) -> bool:
    """Whether ``value`` is a number that float32 can hold."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and abs(value) <= _LARGEST  # false for NaN
