"""Batched decoding: many completions of one snapshot, in rows that come and go.

The forward pass always runs on the same number of rows, whoever occupies them, and
each row writes its keys and values at its own position. Two things follow: finished
sequences leave and waiting ones join at any token, and a row's logits do not depend
on how full the batch is (float32 results change in the last digits with the shape of
a batch, and one changed digit can change a sampled token).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache
from transformers.modeling_utils import PreTrainedModel

from .loading import BaseModel
from .sampling import SamplingParams, draw

FinishReason = Literal["stop", "length"]
LENGTH_STEP = 64  # keys and values are stored in blocks of this many positions
PREFIX_CACHE_SIZE = 256  # prompts whose keys and values are kept for their siblings


@dataclass(frozen=True)
class Completion:
    """One finished sequence; the token that ended it is included."""

    tokens: list[int]
    logprobs: list[float]
    sampling_logprobs: list[float]
    finish_reason: FinishReason


@dataclass
class Sequence:
    """A sequence that is waiting for a row or being decoded in one."""

    prompt: tuple[int, ...]
    params: SamplingParams
    on_done: Callable[[Completion], None]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampling_logprobs: list[float] = field(default_factory=list)
    uniforms: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.uniforms = self.params.uniforms()

    @property
    def position(self) -> int:
        """Where the latest sampled token goes: it is not in the cache yet."""
        return len(self.prompt) + len(self.tokens) - 1


@dataclass(frozen=True)
class _Prefix:
    """A prompt run through the model once, for all who share it."""

    keys: list[Tensor]  # per layer, [1, heads, prompt, head dimension]
    values: list[Tensor]
    next_logits: Tensor  # [vocabulary]


class _SlotLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Keys and values of one layer, [rows, heads, length, head dimension]."""

    def __init__(self, positions: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.positions = positions
        self.rows = torch.arange(len(positions), device=positions.device)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise RuntimeError("a slot layer is filled by SlotCache.insert")

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        assert self.keys is not None
        assert self.values is not None
        self.keys[self.rows, :, self.positions] = key_states[:, :, 0]
        self.values[self.rows, :, self.positions] = value_states[:, :, 0]
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (0 if self.keys is None else self.keys.shape[2]), 0

    def get_seq_length(self) -> int:
        return 0 if self.keys is None else int(self.keys.shape[2])

    def get_max_length(self) -> int:
        return -1


class SlotCache(Cache):
    """A key/value cache in which every row has a position of its own."""

    def __init__(self, n_layers: int, n_rows: int, device: torch.device) -> None:
        self.positions = torch.zeros(n_rows, dtype=torch.long, device=device)
        self.slots = [_SlotLayer(self.positions) for _ in range(n_layers)]
        super().__init__(layers=list(self.slots))
        self.length = 0

    def insert(self, row: int, prefix: _Prefix) -> None:
        """Give ``row`` to a prompt."""
        end = prefix.keys[0].shape[2]
        if not self.length:
            self._allocate(prefix)
        self.reserve(end)
        for slot, keys, values in zip(
            self.slots, prefix.keys, prefix.values, strict=True
        ):
            assert slot.keys is not None
            assert slot.values is not None
            slot.keys[row, :, :end] = keys[0]
            slot.values[row, :, :end] = values[0]

    def reserve(self, length: int) -> None:
        """Make room for ``length`` positions, in whole blocks."""
        missing = -(-length // LENGTH_STEP) * LENGTH_STEP - self.length
        if missing <= 0:
            return
        for slot in self.slots:
            assert slot.keys is not None
            assert slot.values is not None
            slot.keys = torch.nn.functional.pad(slot.keys, (0, 0, 0, missing))
            slot.values = torch.nn.functional.pad(slot.values, (0, 0, 0, missing))
        self.length += missing

    def mask(self) -> Tensor:
        """[rows, 1, 1, length], true where a row may attend."""
        steps = torch.arange(self.length, device=self.positions.device)
        return (steps <= self.positions.unsqueeze(1))[:, None, None, :]

    def _allocate(self, prefix: _Prefix) -> None:
        rows = len(self.positions)
        for slot, keys, values in zip(
            self.slots, prefix.keys, prefix.values, strict=True
        ):
            heads, width = keys.shape[1], keys.shape[3]
            slot.keys = keys.new_zeros(rows, heads, LENGTH_STEP, width)
            slot.values = values.new_zeros(rows, heads, LENGTH_STEP, values.shape[3])
        self.length = LENGTH_STEP


class _Tile:
    """A fixed number of rows that are decoded together."""

    def __init__(self, model: PreTrainedModel, n_rows: int) -> None:
        self.model = model
        self.rows: list[Sequence | None] = [None] * n_rows
        self.cache = SlotCache(model.config.num_hidden_layers, n_rows, model.device)

    @property
    def free(self) -> list[int]:
        return [index for index, row in enumerate(self.rows) if row is None]

    @property
    def active(self) -> list[int]:
        return [index for index, row in enumerate(self.rows) if row is not None]

    def forward(self) -> Tensor:
        """Feed each row's latest token; logits [rows, vocabulary]."""
        ids = [row.tokens[-1] if row else 0 for row in self.rows]
        positions = [row.position if row else 0 for row in self.rows]
        self.cache.reserve(max(positions) + 1)
        self.cache.positions.copy_(torch.tensor(positions))
        output = self.model(
            input_ids=torch.tensor(ids, device=self.model.device).unsqueeze(1),
            attention_mask=self.cache.mask(),
            position_ids=self.cache.positions.unsqueeze(1),
            cache=self.cache,
            use_cache=True,
        )
        logits: Tensor = output.logits[:, -1]
        return logits


class Decoder:
    """Decodes for one base model, one snapshot of weights at a time.

    ``load`` is called with a snapshot's key whenever the weights must change. All
    methods run on the service's compute thread.
    """

    def __init__(
        self, base: BaseModel, load: Callable[[str], None], rows: int | None = None
    ) -> None:
        self.base = base
        self._load = load
        self._tile_rows = rows or rows_per_tile(base.sampling)
        self._waiting: OrderedDict[str, deque[Sequence]] = OrderedDict()
        self._snapshot: str | None = None
        self._tiles: list[_Tile] = []
        self._prefixes: OrderedDict[tuple[int, ...], _Prefix] = OrderedDict()

    def add(self, snapshot: str, sequence: Sequence) -> None:
        """Queue ``sequence`` to be decoded with the weights of ``snapshot``."""
        self._waiting.setdefault(snapshot, deque()).append(sequence)

    def forget(self, snapshot: str) -> None:
        """The weights behind ``snapshot`` are gone or changed: load them anew."""
        if self._snapshot == snapshot:
            self._snapshot = None

    @property
    def has_work(self) -> bool:
        """Whether any sequence is waiting or being decoded."""
        return bool(self._waiting) or any(tile.active for tile in self._tiles)

    @torch.inference_mode()
    def step(self) -> None:
        """Admit what fits, then decode one token in every occupied row."""
        self._admit()
        for tile in self._tiles:
            if tile.active:
                self._advance(tile, tile.forward(), tile.active)
        self._tiles = [tile for tile in self._tiles if tile.active]

    def fail_all(self) -> None:
        """Drop every sequence; their callers have been told by other means."""
        self._waiting.clear()
        self._tiles.clear()

    def _admit(self) -> None:
        if not self._waiting:
            return
        if not self._tiles:
            snapshot = next(iter(self._waiting))
            if snapshot != self._snapshot:
                self._load(snapshot)
                self._snapshot = snapshot
                self._prefixes.clear()
        # A snapshot that others wait behind gets no newcomers: its turn must end.
        crowded = len(self._waiting) > 1 and self._tiles
        queue = self._waiting.get(self._snapshot or "")
        if queue is None or crowded:
            return
        while queue:
            self._seat(queue)
        del self._waiting[self._snapshot or ""]

    def _seat(self, queue: deque[Sequence]) -> None:
        """Move sequences into the free rows of one tile; sample their first token."""
        tile = next((tile for tile in self._tiles if tile.free), None)
        if tile is None:
            tile = _Tile(self.base.sampling, self._tile_rows)
            self._tiles.append(tile)
        seated, logits = [], []
        for row in tile.free:
            if not queue:
                break
            sequence = queue.popleft()
            prefix = self._prefix(sequence.prompt)
            tile.rows[row] = sequence
            tile.cache.insert(row, prefix)
            seated.append(row)
            logits.append(prefix.next_logits)
        self._advance(tile, torch.stack(logits), seated, rows_are_seated=True)

    def _advance(
        self,
        tile: _Tile,
        logits: Tensor,
        rows: list[int],
        rows_are_seated: bool = False,
    ) -> None:
        """Sample one token for each of ``rows`` and retire those that ended.

        ``logits`` holds every row of the tile, or just ``rows`` in order.
        """
        chosen = logits if rows_are_seated else logits[rows]
        sequences = [row for index in rows if (row := tile.rows[index]) is not None]
        uniforms = torch.tensor(
            [seq.uniforms[len(seq.tokens)] for seq in sequences],
            dtype=torch.float64,
        )
        drawn = draw(chosen, [seq.params for seq in sequences], uniforms)
        for index, slot in enumerate(rows):
            sequence = sequences[index]
            sequence.tokens.append(drawn.tokens[index])
            sequence.logprobs.append(drawn.logprobs[index])
            sequence.sampling_logprobs.append(drawn.sampling_logprobs[index])
            if (reason := self._finish_reason(sequence)) is not None:
                tile.rows[slot] = None
                sequence.on_done(
                    Completion(
                        sequence.tokens,
                        sequence.logprobs,
                        sequence.sampling_logprobs,
                        reason,
                    )
                )

    def _finish_reason(self, sequence: Sequence) -> FinishReason | None:
        if sequence.tokens[-1] in self.base.end_token_ids:
            return "stop"
        if sequence.params.stop and self._ends_with_stop(sequence):
            return "stop"
        if len(sequence.tokens) >= sequence.params.max_tokens:
            return "length"
        return None

    def _ends_with_stop(self, sequence: Sequence) -> bool:
        """Whether the latest token completed one of the stop strings."""
        longest = max(len(stop) for stop in sequence.params.stop)
        # Every token decodes to at least one byte, so this tail holds any stop.
        tail = self.base.tokenizer.decode(sequence.tokens[-4 * longest :])
        before = self.base.tokenizer.decode(sequence.tokens[-4 * longest : -1])
        return any(stop in tail and stop not in before for stop in sequence.params.stop)

    def _prefix(self, prompt: tuple[int, ...]) -> _Prefix:
        """Keys, values and next logits of ``prompt``: computed once per snapshot.

        Always alone in its batch, so that its numbers depend on nothing else.
        """
        if prompt in self._prefixes:
            self._prefixes.move_to_end(prompt)
            return self._prefixes[prompt]
        model = self.base.sampling
        cache = DynamicCache(config=model.config)
        output = model(
            input_ids=torch.tensor([prompt], device=model.device),
            cache=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        prefix = _Prefix(
            keys=[_tensor(layer, "keys") for layer in cache.layers],
            values=[_tensor(layer, "values") for layer in cache.layers],
            next_logits=output.logits[0, -1],
        )
        self._prefixes[prompt] = prefix
        if len(self._prefixes) > PREFIX_CACHE_SIZE:
            self._prefixes.popitem(last=False)
        return prefix


def rows_per_tile(model: PreTrainedModel) -> int:
    """Rows decoded together: many for a small model, fewer for a large one.

    A row that nobody occupies still costs its share of the forward pass, which only
    a small model can afford.
    """
    parameters = sum(weight.numel() for weight in model.parameters())
    return 64 if parameters < 20_000_000 else 16


def _tensor(layer: object, name: str) -> Tensor:
    value = getattr(layer, name, None)
    if not isinstance(value, Tensor):
        raise RuntimeError("only models with full attention in every layer can sample")
    return value
