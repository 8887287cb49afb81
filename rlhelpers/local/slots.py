"""Keys and values of many sequences, each row at a position of its own.

A prompt is run through the model once, alone; what it leaves is copied into the row of
everyone who continues it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache
from transformers.modeling_utils import PreTrainedModel

LENGTH_STEP = 16  # attention runs over a whole number of these many positions
CAPACITY_STEP = 64  # rows are allocated in blocks of this many positions


@dataclass(frozen=True)
class Prefix:
    """A prompt run through the model once, for all who share it."""

    keys: list[Tensor]  # per layer, [1, heads, prompt, head dimension]
    values: list[Tensor]
    next_logits: Tensor  # [vocabulary]

    @cached_property
    def size(self) -> int:
        """Bytes of its keys and values."""
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))

    def size_of_tile(self, rows: int, capacity: int) -> int:
        """Bytes of a tile's keys and values, of this model."""
        return self.size // self.keys[0].shape[2] * rows * capacity


def read_prompt(model: PreTrainedModel, prompt: tuple[int, ...]) -> Prefix:
    """Run ``prompt`` through the model.

    Always alone in its batch, so that its numbers depend on nothing else.
    """
    cache = DynamicCache(config=model.config)
    output = model(
        input_ids=torch.tensor([prompt], device=model.device),
        cache=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    return Prefix(
        keys=[_tensor(layer, "keys") for layer in cache.layers],
        values=[_tensor(layer, "values") for layer in cache.layers],
        next_logits=output.logits[0, -1],
    )


def _tensor(layer: object, name: str) -> Tensor:
    value = getattr(layer, name, None)
    if not isinstance(value, Tensor):
        raise RuntimeError("only models with full attention in every layer can sample")
    return value


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, [rows, heads, capacity, head dimension].

    The buffers are allocated once; a forward pass sees the rows and the length that
    :class:`SlotCache` has opened.
    """

    def __init__(self, cache: SlotCache, like: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cache = cache
        shape = (cache.n_rows, like.shape[1], cache.capacity, like.shape[3])
        self.key_buffer, self.value_buffer = (
            like.new_zeros(shape),
            like.new_zeros(shape),
        )

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise RuntimeError("a slot layer is filled by SlotCache.insert")

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        rows, length = self.cache.open_rows, self.cache.open_length
        seen = []
        for buffer, states in (
            (self.key_buffer, key_states),
            (self.value_buffer, value_states),
        ):
            width = states.shape[-1]
            # One flat copy: a row's head and position are one line of the buffer.
            lines = states.reshape(-1, width)
            buffer.view(-1, width).index_copy_(0, self.cache.targets, lines)
            seen.append(buffer[:rows, :, :length])
        return seen[0], seen[1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.open_length, 0

    def get_seq_length(self) -> int:
        return self.cache.open_length

    def get_max_length(self) -> int:
        return self.cache.capacity


class SlotCache(Cache):
    """A key/value cache in which every row has a position of its own."""

    def __init__(self, n_rows: int, capacity: int, prefix: Prefix) -> None:
        self.n_rows, self.capacity = n_rows, capacity
        self.open_rows, self.open_length = n_rows, 0
        self._used_rows = self._used_length = 0  # what was written lies within
        self.targets = torch.empty(0, dtype=torch.long)
        self.slots = [SlotLayer(self, keys) for keys in prefix.keys]
        super().__init__(layers=list(self.slots))
        self.heads = prefix.keys[0].shape[1]
        self.device = prefix.keys[0].device

    def insert(self, row: int, prefix: Prefix) -> None:
        """Give ``row`` to a prompt."""
        end = prefix.keys[0].shape[2]
        self._use(row + 1, end)
        for slot, keys, values in zip(
            self.slots, prefix.keys, prefix.values, strict=True
        ):
            slot.key_buffer[row, :, :end] = keys[0]
            slot.value_buffer[row, :, :end] = values[0]

    def clear(self) -> None:
        """Forget what rows held: a masked NaN would still spoil a sum."""
        rows, length = self._used_rows, self._used_length
        if rows:
            for slot in self.slots:
                slot.key_buffer[:rows, :, :length] = 0
                slot.value_buffer[:rows, :, :length] = 0
        self._used_rows = self._used_length = 0

    def _use(self, rows: int, length: int) -> None:
        self._used_rows = max(self._used_rows, rows)
        self._used_length = max(self._used_length, length)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` positions of one row to another."""
        for slot in self.slots:
            slot.key_buffer[target, :, :length] = slot.key_buffer[source, :, :length]
            slot.value_buffer[target, :, :length] = slot.value_buffer[
                source, :, :length
            ]

    def open(self, positions: list[int]) -> tuple[Tensor, Tensor]:
        """Make the first ``len(positions)`` rows ready to write at ``positions``.

        Returns the positions, [rows, 1], and the additive attention mask,
        [rows, 1, 1, length]: 0 where a row may attend, minus infinity elsewhere.
        """
        self.open_rows = len(positions)
        self.open_length = round_up(max(positions) + 1, LENGTH_STEP)
        self._use(self.open_rows, self.open_length)
        where = torch.tensor(positions, device=self.device).unsqueeze(1)
        lines = torch.arange(self.open_rows * self.heads, device=self.device)
        self.targets = (lines.view(-1, self.heads) * self.capacity + where).flatten()
        steps = torch.arange(self.open_length, device=self.device)
        mask = torch.zeros(self.open_rows, self.open_length, device=self.device)
        mask.masked_fill_(steps > where, -torch.inf)
        return where, mask[:, None, None, :]


def round_up(value: int, step: int) -> int:
    """The smallest multiple of ``step`` that is at least ``value``."""
    return -(-value // step) * step
