"""The training data of a request, checked before any of it is computed on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor

from .losses import check_inputs, get_loss

_LARGEST = torch.finfo(torch.float32).max
MAX_TARGETS = 8_000_000  # of one request; a sparse tensor can claim many in few bytes


class BatchError(ValueError):
    """A datum that is malformed; the message says which one and where."""


@dataclass(frozen=True)
class TrainingDatum:
    """One sequence: position *i* of ``tokens`` predicts ``target_tokens[i]``.

    ``inputs`` holds the loss's tensors, each of shape [len(tokens)]; for
    ``cross_entropy`` also [len(tokens), candidates], with the loss summed over both.
    """

    tokens: list[int]
    inputs: dict[str, Tensor]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def targets(self) -> Tensor:
        """The tokens to predict, int64."""
        return self.inputs["target_tokens"]

    def loss_tokens(self) -> int:
        """Positions that carry a gradient: those with a weight or an advantage."""
        weights = self.inputs.get("advantages", self.inputs.get("weights"))
        if weights is None:
            return len(self)
        return int((weights.reshape(len(self), -1) != 0).any(-1).sum())


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
    data, targets = [], 0
    for index, item in enumerate(raw):
        data.append(_parse_datum(item, loss_fn, limits, index))
        targets += data[-1].targets.numel()
        _check_total(targets)
    return data


def _check_total(targets: int) -> None:
    if targets > MAX_TARGETS:
        raise BatchError(
            f"the data hold more than {MAX_TARGETS} target tokens: split them over "
            "several calls; their gradients add up"
        )


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
    if loss_fn == "cross_entropy":  # one batch may hold datums with and without
        inputs.setdefault("weights", torch.ones(inputs["target_tokens"].shape))
    shapes = {name: list(tensor.shape) for name, tensor in inputs.items()}
    if any(shape != shapes["target_tokens"] for shape in shapes.values()):
        raise BatchError(f"{where} has loss_fn_inputs of different shapes: {shapes}")
    if loss_fn != "cross_entropy" and inputs["target_tokens"].dim() > 1:
        raise BatchError(
            f"{where} has several targets for a position, which only cross_entropy "
            f"takes, not {loss_fn}"
        )
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
    """A tensor of shape [length] or [length, candidates], dense or CSR on the wire."""
    if not isinstance(raw, Mapping) or not isinstance(raw.get("data"), list):
        raise BatchError(f"{where} must be a tensor with a flat list of data")
    values = _parse_values(raw["data"], where, name, limits)
    sparse = raw.get("sparse_crow_indices") is not None
    shape = raw.get("shape")
    if shape is None and not sparse:
        shape = [len(values)]
    if not _is_index_list(shape) or len(shape) not in (1, 2) or 0 in shape[1:]:
        raise BatchError(
            f"{where} has shape {shape!r}; it should be [tokens], or [tokens, "
            "candidates] for cross_entropy"
        )
    if shape[0] != length:
        raise BatchError(
            f"{where} has {shape[0]} values for {length} input tokens: position i "
            "of the input predicts target i, so the lengths must agree"
        )
    _check_total(math.prod(shape))
    if sparse:
        return _densify(raw, values, shape, where)
    if math.prod(shape) != len(values):
        raise BatchError(f"{where} has {len(values)} values for a shape of {shape}")
    return values.reshape(shape)


def _parse_values(raw: list[Any], where: str, name: str, limits: BatchLimits) -> Tensor:
    if name == "target_tokens":
        return torch.tensor(check_token_ids(raw, limits, where), dtype=torch.int64)
    if not all(_is_finite_number(value) for value in raw):
        bad = next(value for value in raw if not _is_finite_number(value))
        raise BatchError(f"{where} has a value that is no finite number: {bad!r}")
    return torch.tensor(raw, dtype=torch.float32)


def _densify(
    raw: Mapping[str, Any], values: Tensor, shape: list[int], where: str
) -> Tensor:
    """The dense form of a CSR tensor; what it leaves out is 0."""
    crow, columns = raw.get("sparse_crow_indices"), raw.get("sparse_col_indices")
    problem = f"{where} is no valid sparse tensor of shape {shape}"
    if len(shape) != 2 or not _is_index_list(crow) or not _is_index_list(columns):
        raise BatchError(problem)
    if len(crow) != shape[0] + 1 or len(columns) != len(values):
        raise BatchError(problem)
    starts = torch.tensor(crow)
    counts = starts.diff()
    if starts[0] != 0 or starts[-1] != len(values) or bool((counts < 0).any()):
        raise BatchError(problem)
    column = torch.tensor(columns, dtype=torch.int64)
    places = torch.arange(shape[0]).repeat_interleave(counts) * shape[1] + column
    if bool((column >= shape[1]).any()) or bool((places.diff() <= 0).any()):
        raise BatchError(problem)
    dense = torch.zeros(math.prod(shape), dtype=values.dtype)
    dense[places] = values
    return dense.reshape(shape)


def _is_index_list(raw: Any) -> TypeGuard[list[int]]:
    """Whether ``raw`` lists integers that can be a position or a length."""
    return isinstance(raw, list) and all(
        type(value) is int and 0 <= value < 2**31 for value in raw
    )


def _is_finite_number(value: Any) -> bool:
    """Whether ``value`` is a number that float32 can hold."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and abs(value) <= _LARGEST  # false for NaN
