"""Rows that share a beginning: the plan, the mask, and that nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlhelpers.local.packing import (
    MAX_ROW,
    Row,
    Work,
    apart,
    pack,
    plan_rows,
    rows_agree,
)

PER_TOKEN = Work(per_token=1.0, per_pair=0.0)


def test_a_group_shares_the_row_of_its_prompt() -> None:
    group = [[1, 2, 3, 4], [1, 2, 3, 5, 6], [1, 2, 3]]
    # Sorted: [1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 5, 6]; 3 common tokens, then 0 + 1 + 2.
    assert plan_rows(group, PER_TOKEN) == [Row((2, 0, 1), shared=3, length=6)]


def test_groups_stay_apart_where_joining_them_would_cost_more() -> None:
    group_a = [[1, 1, 1, 1, 1, 1, 7], [1, 1, 1, 1, 1, 1, 8]]
    group_b = [[2, 2, 2, 2, 2, 2, 7], [2, 2, 2, 2, 2, 2, 8]]
    # In whatever order they come; 8 tokens a row instead of 14.
    rows = plan_rows([group_a[0], group_b[0], group_b[1], group_a[1]], PER_TOKEN)
    assert rows == [Row((0, 3), 6, 8), Row((1, 2), 6, 8)]


def test_a_small_saving_is_not_worth_it() -> None:
    # 6 + 4 of 10 tokens stay: 8 / 10 is above the threshold of 0.7.
    pairs = [[1, 2, 3, 4, 5], [1, 2, 6, 7, 8]]
    assert plan_rows(pairs, PER_TOKEN) == apart(pairs)


def test_equal_sequences_are_one() -> None:
    assert plan_rows([[1, 2], [1, 2], [1, 2]], PER_TOKEN) == [Row((0, 1, 2), 2, 2)]


def test_attention_over_a_long_row_can_outweigh_what_is_shared() -> None:
    # With pairs alone counted, two rows of 10 cost 200, a joint row of 5 + 5 + 5 225.
    halves = [[1] * 5 + [2] * 5, [1] * 5 + [3] * 5]
    assert plan_rows(halves, Work(0.0, 1.0)) == apart(halves)


def test_a_row_has_a_largest_length() -> None:
    tail = [list(range(100 * n, 100 * n + 99)) for n in range(1, 60)]
    rows = plan_rows([[0] * 1000 + end for end in tail], PER_TOKEN)
    assert len(rows) > 1
    assert all(row.length <= MAX_ROW for row in rows)
    assert sorted(index for row in rows for index in row.members) == list(range(59))


def test_a_token_sees_the_common_part_and_its_own() -> None:
    sequences = [[5, 6, 7, 8], [5, 6, 9], [4]]
    packed = pack([Row((0, 1), shared=2, length=5), Row((2,), 0, 1)], sequences)
    assert packed.tokens.tolist() == [[5, 6, 7, 8, 9], [4, 0, 0, 0, 0]]
    assert packed.positions is not None
    assert packed.positions[0].tolist() == [0, 1, 2, 3, 2]
    assert packed.real.sum(1).tolist() == [5, 1]
    assert packed.members == [0, 1, 2]
    assert [w.tolist() for w in packed.where] == [[0, 1, 2, 3], [0, 1, 4], [5]]
    assert packed.mask is not None
    assert (packed.mask[0, 0] == 0).int().tolist() == [
        [1, 0, 0, 0, 0],  # 5
        [1, 1, 0, 0, 0],  # 6
        [1, 1, 1, 0, 0],  # 7 of the first
        [1, 1, 1, 1, 0],  # 8 of the first
        [1, 1, 0, 0, 1],  # 9 of the second, which sees neither 7 nor 8
    ]
    assert packed.mask[0, 0, 0, 1] == -torch.inf


def test_rows_without_siblings_need_no_mask() -> None:
    packed = pack(apart([[1, 2], [3]]), [[1, 2], [3]])
    assert packed.mask is None
    assert packed.positions is None


def test_work_is_counted_from_the_shapes() -> None:
    model = tiny_llama(tie_word_embeddings=False)
    # A layer: q 8x8, k and v 8x4, o 8x8, three of 8x16 in the MLP, two norms of 8;
    # then the last norm and the output layer of 50x8. The input table is looked up.
    layer = 64 + 2 * 32 + 64 + 3 * 128 + 2 * 8
    weights = 3 * layer + 8 + 400
    work = Work.of(model)
    assert work == Work(per_token=2.0 * weights, per_pair=4.0 * 3 * 8)
    assert work.row(10) == 10 * (2.0 * weights + 96.0 * 10)
    assert Work.of(tiny_llama(tie_word_embeddings=True)) == work


def test_a_model_is_tried_before_its_rows_are_shared() -> None:
    assert rows_agree(tiny_llama(), 50)
    assert not rows_agree(IgnoresPositions(tiny_config()), 50)
    assert not rows_agree(RefusesMasks(tiny_config()), 50)


class IgnoresPositions(LlamaForCausalLM):
    """Counts positions along the row, whatever it is told."""

    def forward(self, *args: Any, position_ids: object = None, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class RefusesMasks(LlamaForCausalLM):
    """Takes the usual mask of ones and zeros only."""

    def forward(self, *args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        if attention_mask is not None and attention_mask.dim() != 2:
            raise ValueError("attention_mask must be [batch, length]")
        return super().forward(*args, attention_mask=attention_mask, **kwargs)


def tiny_config(**changes: Any) -> LlamaConfig:
    shape = {
        "vocab_size": 50,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "initializer_range": 0.3,
    }
    return LlamaConfig(**(shape | changes))


def tiny_llama(**changes: Any) -> LlamaForCausalLM:
    return LlamaForCausalLM(tiny_config(**changes)).eval()


@pytest.fixture(autouse=True)
def _same_weights() -> None:
    torch.manual_seed(0)
