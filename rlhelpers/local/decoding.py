"""Batched decoding: many completions of one snapshot, in rows that come and go.

Each row writes its keys and values at its own position, so finished sequences leave
and waiting ones join at any token. The forward pass runs on one of a few fixed numbers
of rows, whoever occupies them, chosen so that a row's logits do not depend on how full
the batch is: float32 results may change in the last digits with the shape of a batch,
and one changed digit can change a sampled token.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from .loading import BaseModel
from .passes import (
    OneTokenPass,
    interchangeable_sizes,
    rows_per_tile,
    sampling_passes,
)
from .sampling import SamplingParams, draw, pick
from .slots import CAPACITY_STEP, Prefix, SlotCache, round_up

FinishReason = Literal["stop", "length"]
PROMPT_STEP = 128  # positions of a prompt whose log-probabilities are made at a time
PREFIX_CACHE_SIZE = 256  # prompts whose keys and values are kept for their siblings
PREFIX_BYTES = 256 * 1024 * 1024  # and what they may take up together
TILE_BYTES = 512 * 1024 * 1024  # rows being decoded; one tile there is at any size


@dataclass(frozen=True)
class Completion:
    """One finished sequence; the token that ended it is included.

    ``prompt_logprobs`` are empty unless they were asked for; the first is 0, because
    nothing comes before it.
    """

    tokens: list[int]
    logprobs: list[float]
    sampling_logprobs: list[float]
    finish_reason: FinishReason
    prompt_logprobs: list[float] = field(default_factory=list)


@dataclass
class Sequence:
    """A sequence that is waiting for a row or being decoded in one."""

    prompt: tuple[int, ...]
    params: SamplingParams
    on_done: Callable[[Completion], None]
    on_failed: Callable[[Exception], None]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampling_logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    uniforms: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.uniforms = self.params.uniforms()

    @property
    def position(self) -> int:
        """Where the latest sampled token goes: it is not in the cache yet."""
        return len(self.prompt) + len(self.tokens) - 1

    @property
    def longest(self) -> int:
        """Positions that prompt and reply can take up together."""
        return len(self.prompt) + self.params.max_tokens


class _Tile:
    """Rows that are decoded together.

    A forward pass runs on one of a few fixed numbers of rows, ``sizes``, which give
    the same result for a row bit for bit (see :mod:`.passes`). As sequences end, the
    others move together and the pass gets smaller.
    """

    def __init__(
        self, one_token: OneTokenPass, sizes: list[int], capacity: int, prefix: Prefix
    ) -> None:
        self.one_token = one_token
        self.sizes = sizes
        self.rows: list[Sequence | None] = [None] * sizes[-1]
        self.cache = SlotCache(sizes[-1], capacity, prefix)
        self.size = prefix.size_of_tile(sizes[-1], capacity)

    @property
    def free(self) -> list[int]:
        return [index for index, row in enumerate(self.rows) if row is None]

    @property
    def active(self) -> list[int]:
        return [index for index, row in enumerate(self.rows) if row is not None]

    def forward(self) -> Tensor:
        """Feed each row's latest token; logits [rows of the pass, vocabulary]."""
        rows = self._compact()
        ids = [row.tokens[-1] if row else 0 for row in rows]
        positions, mask = self.cache.open([row.position if row else 0 for row in rows])
        tokens = torch.tensor(ids, device=self.cache.device)
        return self.one_token(tokens, positions, mask, self.cache)

    def _compact(self) -> list[Sequence | None]:
        """Move the active rows to the front if a smaller pass then holds them."""
        active = self.active
        size = next(size for size in self.sizes if size >= len(active))
        gaps = [row for row in self.free if row < size]
        for source in [row for row in active if row >= size]:
            target = gaps.pop(0)
            sequence = self.rows[source]
            assert sequence is not None
            self.cache.move(source, target, sequence.position)
            self.rows[target], self.rows[source] = sequence, None
        return self.rows[:size]


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
        self._passes = sampling_passes(base)
        self._sizes = interchangeable_sizes(
            base, self._passes, rows or rows_per_tile(base)
        )
        self._waiting: OrderedDict[str, deque[Sequence]] = OrderedDict()
        self._snapshot: str | None = None
        self._tiles: list[_Tile] = []
        self._prefixes: OrderedDict[tuple[int, ...], Prefix] = OrderedDict()
        self._pieces: dict[int, str] = {}

    def add(self, snapshot: str, sequence: Sequence) -> None:
        """Queue ``sequence`` to be decoded with the weights of ``snapshot``."""
        self._waiting.setdefault(snapshot, deque()).append(sequence)

    def needs(self, snapshot: str) -> bool:
        """Whether sequences wait for ``snapshot`` to be loaded."""
        return snapshot in self._waiting

    @property
    def has_work(self) -> bool:
        """Whether any sequence is waiting or being decoded."""
        return bool(self._waiting) or self._decoding

    @property
    def _decoding(self) -> bool:
        return any(tile.active for tile in self._tiles)

    @torch.inference_mode()
    def step(self) -> None:
        """Admit what fits, then decode one token in every occupied row."""
        self._admit()
        for tile in self._tiles:
            if tile.active:
                logits = tile.forward()  # may move rows, so ask for them afterwards
                self._advance(tile, logits, tile.active)
        # Fresh buffers cost more than a few passes, so one tile is kept.
        self._tiles = [t for t in self._tiles if t.active] or self._tiles[-1:]
        if not self._decoding:  # now, and not when others wait for another snapshot
            for tile in self._tiles:
                tile.cache.clear()

    def fail_all(self) -> None:
        """Drop every sequence; their callers have been told by other means."""
        self._waiting.clear()
        self._tiles.clear()

    def _admit(self) -> None:
        if not self._waiting:
            return
        while self._waiting and not self._decoding:
            snapshot = next(iter(self._waiting))
            if snapshot == self._snapshot or self._switch_to(snapshot):
                break
        # A snapshot that others wait behind gets no newcomers: its turn must end.
        crowded = len(self._waiting) > 1 and self._decoding
        queue = self._waiting.get(self._snapshot or "")
        if queue is None or crowded:
            return
        while queue and self._seat(queue):
            pass
        if not queue:
            del self._waiting[self._snapshot or ""]
        else:  # no room for all: other snapshots are next when these rows are through
            self._waiting.move_to_end(self._snapshot or "")

    def _switch_to(self, snapshot: str) -> bool:
        """Load other weights; if that fails, so do those who wait for them."""
        self._snapshot = None  # until all of it is loaded
        self._prefixes.clear()
        try:
            self._load(snapshot)
        except Exception as error:
            for sequence in self._waiting.pop(snapshot):
                sequence.on_failed(error)
            return False
        self._snapshot = snapshot
        return True

    def _seat(self, queue: deque[Sequence]) -> bool:
        """Move sequences into the free rows of one tile; sample their first token.

        False if there is no row to be had now.
        """
        tile = self._tile_for(queue[0])
        if tile is None:
            return False
        seated, logits = [], []
        for row in tile.free:
            if not queue or queue[0].longest > tile.cache.capacity:
                break
            sequence = queue.popleft()
            prefix = self._prefix(sequence.prompt)
            if sequence.params.echo:
                sequence.prompt_logprobs = self._prompt_logprobs(sequence.prompt)
            tile.rows[row] = sequence
            tile.cache.insert(row, prefix)
            seated.append(row)
            logits.append(prefix.next_logits)
        self._advance(tile, torch.stack(logits), seated, rows_are_seated=True)
        return True

    def _tile_for(self, sequence: Sequence) -> _Tile | None:
        """A tile with a free row, or a new one if no tile's rows are long enough.

        ``None`` if ``sequence`` has to wait for a row, or for the memory of others.
        Rows that are filled again as they end beat more tiles: a tile's last passes
        are over the few rows of its longest replies, and such passes are dear.
        """
        long_enough = [
            tile for tile in self._tiles if sequence.longest <= tile.cache.capacity
        ]
        for tile in long_enough:
            if tile.free:
                return tile
        if long_enough:
            return None
        prefix = self._prefix(sequence.prompt)
        capacity = round_up(sequence.longest, CAPACITY_STEP)
        size = prefix.size_of_tile(self._sizes[-1], capacity)
        if self._size_of_tiles() + size > TILE_BYTES:
            self._tiles = [tile for tile in self._tiles if tile.active]
        if self._tiles and self._size_of_tiles() + size > TILE_BYTES:
            return None
        tile = _Tile(self._passes.one_token, self._sizes, capacity, prefix)
        self._tiles.append(tile)
        return tile

    def _size_of_tiles(self) -> int:
        return sum(tile.size for tile in self._tiles)

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
                        sequence.prompt_logprobs,
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
        # Decoding a tail costs more than a row's share of the forward pass, and the
        # text of the latest token alone rules most stops out.
        piece = self._piece(sequence.tokens[-1])
        stops = [stop for stop in sequence.params.stop if _may_complete(piece, stop)]
        if not stops:
            return False
        longest = max(map(len, stops))
        # Every token decodes to at least one byte, so this tail holds any stop.
        tail = self.base.tokenizer.decode(sequence.tokens[-4 * longest :])
        before = self.base.tokenizer.decode(sequence.tokens[-4 * longest : -1])
        return any(stop in tail and stop not in before for stop in stops)

    def _piece(self, token: int) -> str:
        """The text of one token, decoded once."""
        if token not in self._pieces:
            self._pieces[token] = str(self.base.tokenizer.decode([token]))
        return self._pieces[token]

    def _prefix(self, prompt: tuple[int, ...]) -> Prefix:
        """Keys, values and next logits of ``prompt``: computed once per snapshot."""
        if prompt in self._prefixes:
            self._prefixes.move_to_end(prompt)
            return self._prefixes[prompt]
        prefix = self._passes.prompt(prompt)
        self._prefixes[prompt] = prefix
        self._forget_prefixes()
        return prefix

    def _forget_prefixes(self) -> None:
        """Drop the least recently used beyond the bounds; the newest stays."""
        size = sum(prefix.size for prefix in self._prefixes.values())
        while len(self._prefixes) > 1 and (
            len(self._prefixes) > PREFIX_CACHE_SIZE or size > PREFIX_BYTES
        ):
            size -= self._prefixes.popitem(last=False)[1].size

    def _prompt_logprobs(self, prompt: tuple[int, ...]) -> list[float]:
        """Log-probability of each token of ``prompt`` given those before it."""
        ids = torch.tensor([prompt], device=self.base.sampling.device)
        logits = self.base.sampling(input_ids=ids, use_cache=False).logits[0]
        found = [0.0]
        for start in range(0, len(prompt) - 1, PROMPT_STEP):
            stop = min(start + PROMPT_STEP, len(prompt) - 1)
            part = logits[start:stop].to("cpu", torch.float64)
            targets = torch.tensor(prompt[start + 1 : stop + 1])
            found += pick(torch.log_softmax(part, dim=-1), targets)
        return found


def _may_complete(piece: str, stop: str) -> bool:
    """Whether a token of text ``piece`` can be the one that completes ``stop``.

    It must then hold the stop's last character. A blank may be lost when a token is
    decoded alone, and a character that several tokens make up shows as U+FFFD.
    """
    last = stop[-1]
    return last in piece or last.isspace() or not piece or "\ufffd" in piece
