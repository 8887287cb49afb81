"""Passes that decode one token a row, against the model's pass over whole sequences."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from local_helpers import TINY, byte_tokenizer, write_tiny_model
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PreTrainedModel,
    Qwen2Config,
)

from rlhelpers.local import passes
from rlhelpers.local.adapters import linear_weights, merge_into
from rlhelpers.local.llama import LlamaPass
from rlhelpers.local.loading import BaseModel, load_base_model
from rlhelpers.local.passes import (
    OneTokenPass,
    lean_passes,
    own_passes,
    sampling_passes,
)
from rlhelpers.local.slots import (
    CAPACITY_STEP,
    Prefix,
    SlotCache,
    read_prompt,
    round_up,
)

SHAPE: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "eos_token_id": 257,
    "initializer_range": 0.2,
}


@pytest.fixture
def base(tmp_path: Path) -> BaseModel:
    """A random two-layer Llama in which two heads share their keys."""
    return load_base_model(TINY, {TINY: write_tiny_model(tmp_path / "llama")}, "cpu")


def of_config(config: Any, folder: Path) -> BaseModel:
    """A random model of another configuration."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return load_base_model(TINY, {TINY: folder}, "cpu")


@torch.inference_mode()
def last_logits(base: BaseModel, run: OneTokenPass, rows: list[list[int]]) -> Tensor:
    """Logits after each row's last token, fed token by token.

    Rows of unequal length end in the same pass, each at a position of its own.
    """
    longest = max(map(len, rows))
    cache = SlotCache(
        len(rows), round_up(longest, CAPACITY_STEP), read_prompt(base.sampling, (0,))
    )
    logits = torch.empty(0)
    for step in range(longest):
        # A row that has not begun writes its first token again and again.
        where = [max(0, step - longest + len(row)) for row in rows]
        tokens = torch.tensor([row[at] for row, at in zip(rows, where, strict=True)])
        positions, mask = cache.open(where)
        logits = run(tokens, positions, mask, cache)
    return logits


@torch.inference_mode()
def expected_logits(base: BaseModel, rows: list[list[int]]) -> Tensor:
    """The same from the model's pass over each whole sequence, alone."""
    return torch.stack(
        [base.sampling(torch.tensor([row])).logits[0, -1] for row in rows]
    )


def some_rows(lengths: tuple[int, ...]) -> list[list[int]]:
    """Random tokens, a row for each length."""
    drawn = torch.Generator().manual_seed(1)
    return [torch.randint(259, (n,), generator=drawn).tolist() for n in lengths]


@pytest.mark.parametrize("lengths", [(1,), (7, 7, 7), (40, 3, 17, 1, 33)])
def test_a_lean_pass_gives_the_logits_of_the_whole_sequence(
    base: BaseModel, lengths: tuple[int, ...]
) -> None:
    rows = some_rows(lengths)
    found = last_logits(base, LlamaPass(base.sampling), rows)
    assert torch.allclose(found, expected_logits(base, rows), rtol=0, atol=2e-5)


@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (8, 2)])
def test_a_lean_pass_knows_how_heads_share_keys(
    heads: tuple[int, int], tmp_path: Path
) -> None:
    shape = SHAPE | dict(
        zip(("num_attention_heads", "num_key_value_heads"), heads, strict=True)
    )
    base = of_config(LlamaConfig(**shape, head_dim=12), tmp_path / "heads")
    rows = some_rows((9, 4))
    found = last_logits(base, LlamaPass(base.sampling), rows)
    assert torch.allclose(found, expected_logits(base, rows), rtol=0, atol=2e-5)


@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (8, 2)])
@pytest.mark.parametrize("length", [1, 2, 33, 530])
@torch.inference_mode()
def test_a_lean_prompt_leaves_what_the_models_own_pass_leaves(
    heads: tuple[int, int], length: int, tmp_path: Path
) -> None:
    shape = SHAPE | dict(
        zip(("num_attention_heads", "num_key_value_heads"), heads, strict=True)
    )
    base = of_config(LlamaConfig(**shape, head_dim=12), tmp_path / "heads")
    prompt = tuple(some_rows((length,))[0])
    own = read_prompt(base.sampling, prompt)
    lean = LlamaPass(base.sampling).read(prompt)
    for name in ("keys", "values"):
        for found, expected in zip(
            getattr(lean, name), getattr(own, name), strict=True
        ):
            assert found.shape == expected.shape == (1, heads[1], length, 12)
            assert torch.allclose(found, expected, rtol=0, atol=5e-5)
    (expected_next,) = expected_logits(base, [list(prompt)])
    assert torch.allclose(lean.next_logits, expected_next, rtol=0, atol=5e-5)


@pytest.mark.parametrize("prompt", [(1,), (1, 2, 3)])
@torch.inference_mode()
def test_a_kept_prompt_keeps_nothing_else_in_memory(
    prompt: tuple[int, ...], base: BaseModel
) -> None:
    prefix = LlamaPass(base.sampling).read(prompt)
    for states in (*prefix.keys, *prefix.values):
        assert states.untyped_storage().nbytes() == states.nbytes


def test_positions_go_on_beyond_the_first_table_of_rotations(tmp_path: Path) -> None:
    base = of_config(LlamaConfig(**SHAPE), tmp_path / "long")
    rows = some_rows((530,))
    found = last_logits(base, LlamaPass(base.sampling), rows)
    assert torch.allclose(found, expected_logits(base, rows), rtol=0, atol=5e-5)


def test_weights_that_are_merged_later_are_the_ones_that_count(base: BaseModel) -> None:
    lean, rows = LlamaPass(base.sampling), some_rows((5, 8))
    before = last_logits(base, lean, rows)
    changed = {
        name: weight + 0.05 * torch.ones_like(weight)
        for name, weight in linear_weights(base.trainable).items()
    }
    merge_into(base.sampling, changed, None)
    after = last_logits(base, lean, rows)
    assert torch.allclose(after, expected_logits(base, rows), rtol=0, atol=2e-5)
    assert (after - before).abs().max() > 0.1


def test_what_is_loaded_for_a_plain_llama_is_the_lean_pass(base: BaseModel) -> None:
    assert isinstance(sampling_passes(base).one_token, LlamaPass)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attention_bias": True}, "its linear layers have biases"),
        ({"mlp_bias": True}, "its linear layers have biases"),
        ({"hidden_act": "gelu"}, "its activation is gelu, not silu"),
        (
            {
                "rope_parameters": {
                    "rope_type": "linear",
                    "rope_theta": 10000.0,
                    "factor": 2.0,
                }
            },
            "its rotary embedding is linear, not default",
        ),
    ],
)
def test_another_kind_of_llama_runs_its_own_pass(
    changes: Mapping[str, Any], reason: str, tmp_path: Path
) -> None:
    base = of_config(LlamaConfig(**SHAPE, **changes), tmp_path / "other")
    with pytest.raises(ValueError, match=reason):
        LlamaPass(base.sampling)
    rows = some_rows((6, 3))
    found = last_logits(base, sampling_passes(base).one_token, rows)
    assert torch.allclose(found, expected_logits(base, rows), rtol=0, atol=2e-5)


def test_another_architecture_runs_its_own_pass(tmp_path: Path) -> None:
    base = of_config(Qwen2Config(**SHAPE), tmp_path / "qwen")
    with pytest.raises(ValueError, match="Qwen2ForCausalLM is not LlamaForCausalLM"):
        LlamaPass(base.sampling)
    rows = some_rows((6, 3, 20))
    found = last_logits(base, sampling_passes(base).one_token, rows)
    assert torch.allclose(found, expected_logits(base, rows), rtol=0, atol=2e-5)


def test_a_lean_pass_that_disagrees_is_not_used(
    base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = LlamaPass.__call__

    def wrong(self: LlamaPass, *arguments: Any) -> Tensor:
        logits = right(self, *arguments)
        logits[:, 0] += 0.01
        return logits

    monkeypatch.setattr(LlamaPass, "__call__", wrong)
    assert not isinstance(sampling_passes(base).one_token, LlamaPass)
    monkeypatch.setattr(LlamaPass, "__call__", right)
    assert isinstance(sampling_passes(base).one_token, LlamaPass)


@pytest.mark.parametrize("spoilt", ["keys", "values", "next_logits"])
def test_a_lean_prompt_that_disagrees_is_not_used(
    spoilt: str, base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = LlamaPass.read

    def wrong(self: LlamaPass, prompt: tuple[int, ...]) -> Prefix:
        prefix = right(self, prompt)
        changed = getattr(prefix, spoilt)
        changed = changed if spoilt == "next_logits" else changed[0][0, 0]
        changed[0] += 0.05
        return prefix

    monkeypatch.setattr(LlamaPass, "read", wrong)
    assert not isinstance(sampling_passes(base).one_token, LlamaPass)


@pytest.mark.parametrize("context", [4, 12])
def test_a_very_short_context_is_enough_for_the_trial(
    context: int, tmp_path: Path
) -> None:
    config = GPT2Config(
        vocab_size=259,
        n_embd=16,
        n_layer=1,
        n_head=2,
        n_positions=context,
        bos_token_id=256,
        eos_token_id=257,
    )
    base = of_config(config, tmp_path / "short")
    sizes = passes.interchangeable_sizes(base, sampling_passes(base), 32)
    assert sizes[-1] == 32


@pytest.mark.parametrize("lean", [True, False])
def test_sizes_that_are_called_interchangeable_are(base: BaseModel, lean: bool) -> None:
    kind = (lean_passes if lean else own_passes)(base.sampling)
    run, sizes = kind.one_token, passes.interchangeable_sizes(base, kind, 64)
    assert sizes[-1] == 64
    assert sizes[0] >= passes.SMALLEST_PASS
    rows = some_rows((12,) * 64)
    whole = last_logits(base, run, rows)
    for size in sizes:
        assert torch.equal(last_logits(base, run, rows[:size]), whole[:size])


@torch.inference_mode()
def test_a_cleared_cache_holds_nothing_of_what_was_written(base: BaseModel) -> None:
    prefix = read_prompt(base.sampling, tuple(range(20)))
    cache = SlotCache(4, CAPACITY_STEP, prefix)
    run = LlamaPass(base.sampling)
    for use in ("a prompt alone", "tokens alone", "both"):
        if use != "tokens alone":
            cache.insert(2, prefix)
        if use != "a prompt alone":
            positions, mask = cache.open([25, 0, 20])
            run(torch.tensor([1, 2, 3]), positions, mask, cache)
            cache.move(2, 0, 21)
        buffers = [
            b for slot in cache.slots for b in (slot.key_buffer, slot.value_buffer)
        ]
        assert all(buffer.abs().sum() > 0 for buffer in buffers)
        cache.clear()
        assert all(buffer.abs().sum() == 0 for buffer in buffers)
