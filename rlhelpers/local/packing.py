"""A group's prompt computed once in training: sequences that begin alike share a row.

The rollouts of a group have one prompt, and often a long one. In a packed row their
common beginning stands once, and the rest of each follows; a token attends to the
common beginning and to its own sequence, never to a sibling. Each token so sees what
it would see alone, and the gradient of the common part is the sum over its siblings,
as it would be apart: the result is the same but for rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

WORTH_PACKING = 0.7  # pack if the work is at most this share of the unpacked work
AGREEMENT = 1e-4  # of logits, relative to the largest
MAX_ROW = 2_048  # tokens of a packed row: its mask has the square of it


@dataclass(frozen=True)
class Row:
    """Sequences in one row: the first ``shared`` tokens once, then the rest of each.

    ``members`` are indices into the batch; a lone member shares nothing.
    """

    members: tuple[int, ...]
    shared: int
    length: int


@dataclass(frozen=True)
class Work:
    """Arithmetic of a forward pass: ``per_token``, and ``per_pair`` of positions."""

    per_token: float
    per_pair: float

    @classmethod
    def of(cls, model: PreTrainedModel) -> Work:
        """Floating-point operations as in Kaplan et al. 2020, table 1: twice the
        weights for each token, and four times layers times width for each pair."""
        config = model.config.get_text_config()
        weights = sum(parameter.numel() for parameter in model.parameters())
        if not config.tie_word_embeddings:  # the input table is looked up, not used
            table = model.get_input_embeddings()
            weights -= sum(parameter.numel() for parameter in table.parameters())
        width = config.num_hidden_layers * config.hidden_size
        return cls(2.0 * weights, 4.0 * width)

    def row(self, length: int) -> float:
        """Work of one row of ``length`` tokens."""
        return length * (self.per_token + self.per_pair * length)


def apart(sequences: Sequence[Sequence[int]]) -> list[Row]:
    """A row for each sequence."""
    return [Row((i,), 0, len(tokens)) for i, tokens in enumerate(sequences)]


def plan_rows(sequences: Sequence[Sequence[int]], work: Work) -> list[Row]:
    """Lay out ``sequences`` in rows; one each unless sharing saves much work.

    Neighbours in sorted order join a row as long as that is less work than a row of
    their own. The plan depends on the sequences alone, so the same data always give
    the same sums, bit for bit.
    """
    alone, rows = apart(sequences), list[Row]()
    for index in sorted(range(len(sequences)), key=lambda i: (sequences[i], i)):
        if rows:
            joined = _join(rows[-1], index, sequences)
            separate = work.row(rows[-1].length) + work.row(alone[index].length)
            if joined.length <= MAX_ROW and work.row(joined.length) < separate:
                rows[-1] = joined
                continue
        rows.append(alone[index])
    total, unshared = (sum(work.row(r.length) for r in each) for each in (rows, alone))
    return rows if total <= WORTH_PACKING * unshared else alone


def _join(row: Row, index: int, sequences: Sequence[Sequence[int]]) -> Row:
    """``row`` with one more member, sharing what all members have in common."""
    last, new = sequences[row.members[-1]], sequences[index]
    # In sorted order, what all have in common is what each has with the one before.
    common = _common(last, new)
    shared = common if len(row.members) == 1 else min(row.shared, common)
    members = (*row.members, index)
    rest = sum(len(sequences[member]) - shared for member in members)
    return Row(members, shared, shared + rest)


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two sequences have in common at the beginning."""
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count


@dataclass(frozen=True)
class PackedInput:
    """What the model is fed, and where each sequence is in what it gives.

    Attributes:
        tokens: [rows, longest], padded on the right.
        real: [rows, longest], false for padding.
        positions, mask: Position ids, [rows, longest], and the additive attention mask,
            [rows, 1, longest, longest]. None if nothing is shared: attention is causal,
            so no real token sees the padding.
        members: The sequences, as indices into the batch.
        where: For each of ``members``, the place of each of its positions among the
            real ones, row after row.
    """

    tokens: Tensor
    real: Tensor
    positions: Tensor | None
    mask: Tensor | None
    members: list[int]
    where: list[Tensor]


def pack(rows: Sequence[Row], sequences: Sequence[Sequence[int]]) -> PackedInput:
    """Lay out ``rows`` for one forward pass."""
    shape = len(rows), max(row.length for row in rows)
    tokens, positions = (torch.zeros(shape, dtype=torch.long) for _ in range(2))
    owner = torch.full(shape, _PADDING)
    members, where, begin = list[int](), list[Tensor](), 0
    for number, row in enumerate(rows):
        layout = _lay_out(row, sequences)
        tokens[number, : row.length] = layout.tokens
        positions[number, : row.length] = layout.positions
        owner[number, : row.length] = layout.owner
        members += row.members
        where += [begin + places for places in layout.where]
        begin += row.length
    real = owner != _PADDING
    if all(len(row.members) == 1 for row in rows):
        return PackedInput(tokens, real, None, None, members, where)
    return PackedInput(tokens, real, positions, _mask(owner), members, where)


_PADDING, _COMMON = -1, 0  # owners of a position; members are 1, 2, …


@dataclass(frozen=True)
class _Layout:
    """One row: tokens, position ids and owner of each place, [length of the row]."""

    tokens: Tensor
    positions: Tensor
    owner: Tensor
    where: list[Tensor]


def _lay_out(row: Row, sequences: Sequence[Sequence[int]]) -> _Layout:
    tokens = list(sequences[row.members[0]][: row.shared])
    common = torch.arange(row.shared)
    positions, owner = [common], [torch.full_like(common, _COMMON)]
    where = []
    for rank, member in enumerate(row.members, 1):
        rest = sequences[member][row.shared :]
        own = torch.arange(len(rest))
        where.append(torch.cat([common, len(tokens) + own]))
        positions.append(row.shared + own)
        owner.append(torch.full_like(own, rank))
        tokens += rest
    return _Layout(torch.tensor(tokens), torch.cat(positions), torch.cat(owner), where)


def _mask(owner: Tensor) -> Tensor:
    """0 where a token may attend: earlier, and of its own sequence or common to all."""
    length = owner.shape[1]
    earlier = torch.ones(length, length, dtype=torch.bool).tril()
    query, key = owner[:, :, None], owner[:, None, :]
    allowed = earlier & ((query == key) | (key == _COMMON))
    mask = torch.zeros(allowed.shape).masked_fill_(~allowed, -torch.inf)
    return mask[:, None]


def run_model(model: nn.Module, packed: PackedInput) -> Tensor:
    """Logits of every real position of ``packed``, row after row, float32."""
    device = next(model.parameters()).device
    extra = {}
    if packed.mask is not None and packed.positions is not None:
        extra["attention_mask"] = packed.mask.to(device)
        extra["position_ids"] = packed.positions.to(device)
    logits: Tensor = model(
        input_ids=packed.tokens.to(device), use_cache=False, **extra
    ).logits
    return logits[packed.real.to(device)].float()


@torch.inference_mode()
def rows_agree(model: PreTrainedModel, vocab_size: int) -> bool:
    """Whether ``model`` gives a packed row's logits as it does those of rows apart.

    Whether a model takes any mask and positions depends on its code, so it is asked,
    not assumed.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(vocab_size, (3, 8), generator=generator).tolist()
    sequences = [drawn[0] + drawn[1], drawn[0] + drawn[2][:5]]
    single = pack(apart(sequences), sequences)
    shared = pack([Row((0, 1), 8, 8 + 8 + 5)], sequences)
    try:
        plain = run_model(model, single)
        packed = run_model(model, shared)
    except Exception:  # it refuses such a mask, in whatever way
        return False
    places = torch.cat(shared.where).to(packed.device)
    difference = (plain - packed[places]).abs().max()
    return bool(difference <= AGREEMENT * plain.abs().max())
