"""Gradients and optimizer steps, against plain torch in double precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from local_helpers import make_training_datum, random_adapter
from torch import Tensor
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from rlhelpers.local.adapters import (
    PEFT_PREFIX,
    AdapterError,
    AdapterWeights,
    LoraSettings,
    linear_weights,
    merge_into,
)
from rlhelpers.local.batches import TrainingDatum
from rlhelpers.local.decoding import Completion, Decoder, Sequence
from rlhelpers.local.loading import BaseModel, load_base_model
from rlhelpers.local.packing import Work, plan_rows
from rlhelpers.local.sampling import SamplingParams
from rlhelpers.local.trainer import (
    AdamSettings,
    PolicyTrainer,
    TrainingError,
    plan_passes,
)

pytest_plugins = ("local_fixtures",)

SETTINGS = LoraSettings(rank=4, alpha=8, seed=3)
HUGE = 1e8
# With an epsilon far above every gradient, Adam's first step is -gradient itself.
PLAIN_DESCENT = AdamSettings(learning_rate=HUGE, eps=HUGE)


class PlainLora:
    """LoRA without PEFT: every adapted weight is ``W + alpha / rank * B @ A``."""

    def __init__(self, folder: Path, weights: AdapterWeights) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, local_files_only=True
        ).eval()
        self.scale = weights.settings.alpha / weights.settings.rank
        self.leaves = {
            name: tensor.double().requires_grad_(True)
            for name, tensor in weights.tensors.items()
        }
        self.modules = sorted(
            name.removeprefix(PEFT_PREFIX).removesuffix(".lora_A.weight")
            for name in self.leaves
            if name.endswith(".lora_A.weight")
        )

    def logprobs(self, datum: TrainingDatum) -> Tensor:
        merged = {}
        for module in self.modules:
            a = self.leaves[f"{PEFT_PREFIX}{module}.lora_A.weight"]
            b = self.leaves[f"{PEFT_PREFIX}{module}.lora_B.weight"]
            weight = self.model.get_submodule(module).weight.detach()
            merged[f"{module}.weight"] = weight + self.scale * (b @ a)
        arguments = {"input_ids": torch.tensor([datum.tokens]), "use_cache": False}
        output = functional_call(self.model, merged, (), arguments, tie_weights=False)
        table = output.logits[0].log_softmax(-1)
        return table.gather(1, datum.inputs["target_tokens"][:, None])[:, 0]

    def loss(self, data: list[TrainingDatum], name: str) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for datum in data:
            lp = self.logprobs(datum)
            inputs = {key: value.double() for key, value in datum.inputs.items()}
            if name == "cross_entropy":
                total = total - (inputs["weights"] * lp).sum()
            else:
                ratio = (lp - inputs["logprobs"]).exp()
                total = total - (ratio * inputs["advantages"]).sum()
        return total

    def gradients(self, data: list[TrainingDatum], name: str) -> dict[str, Tensor]:
        grads = torch.autograd.grad(self.loss(data, name), list(self.leaves.values()))
        return dict(zip(self.leaves, grads, strict=True))


def policy_data(seed: int, lengths: tuple[int, ...]) -> list[TrainingDatum]:
    """Off-policy datums; the first third of each is prompt without advantage."""
    random = np.random.default_rng(seed)
    data = []
    for length in lengths:
        ids = random.integers(0, 256, length + 1).tolist()
        advantages = random.normal(size=length)
        advantages[: length // 3] = 0.0
        data.append(
            make_training_datum(
                ids[:-1],
                ids[1:],
                logprobs=random.uniform(-8, -3, length).tolist(),
                advantages=advantages.tolist(),
            )
        )
    return data


def weighted_data(seed: int, lengths: tuple[int, ...]) -> list[TrainingDatum]:
    return [
        replace(
            datum,
            inputs={
                "target_tokens": datum.inputs["target_tokens"],
                "weights": datum.inputs["advantages"],
            },
        )
        for datum in policy_data(seed, lengths)
    ]


def make_trainer(
    base: BaseModel, settings: LoraSettings = SETTINGS
) -> tuple[PolicyTrainer, AdapterWeights]:
    """A trainer with one model "m" whose A and B are both random."""
    trainer = PolicyTrainer(base)
    trainer.create("m", settings)
    weights = random_adapter(trainer.weights("m"), seed=1, scale=0.15)
    trainer.load("m", weights, None)
    return trainer, weights


def backward(
    trainer: PolicyTrainer,
    data: list[TrainingDatum],
    name: str = "importance_sampling",
    model_id: str = "m",
) -> dict[str, float]:
    return trainer.run(model_id, data, name, {}, backward=True).metrics


def applied_gradient(
    trainer: PolicyTrainer, normalization: str = "none", clip: float = 0.0
) -> dict[str, Tensor]:
    """What the next step would apply, read off a step of plain descent."""
    before = trainer.weights("m").tensors
    trainer.optim_step("m", replace(PLAIN_DESCENT, grad_clip_norm=clip), normalization)
    after = trainer.weights("m").tensors
    return {name: before[name] - after[name] for name in before}


def assert_close(
    actual: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    relative: float = 1e-3,
) -> None:
    """Equal per tensor, relative to the tensor's largest entry."""
    assert set(actual) == set(expected)
    for name, tensor in expected.items():
        atol = relative * float(tensor.abs().max())
        torch.testing.assert_close(
            actual[name].double(), tensor.double(), atol=atol, rtol=0.0, msg=name
        )


@pytest.mark.parametrize("loss", ["importance_sampling", "cross_entropy"])
@pytest.mark.parametrize("tied", [True, False])
def test_gradients_are_those_of_a_plain_lora_forward(
    tiny_folder: Path, untied_folder: Path, loss: str, tied: bool
) -> None:
    folder = tiny_folder if tied else untied_folder
    trainer, weights = make_trainer(load_base_model("x", {"x": folder}, "cpu"))
    make = policy_data if loss == "importance_sampling" else weighted_data
    data = make(5, (9, 23, 14, 1))
    plain = PlainLora(folder, weights)
    result = trainer.run("m", data, loss, {}, backward=True)
    for datum, logprobs in zip(data, result.logprobs, strict=True):
        expected = plain.logprobs(datum).detach().numpy()
        np.testing.assert_allclose(logprobs, expected, atol=1e-4)
    total = float(plain.loss(data, loss).detach())
    assert result.metrics["loss:sum"] == pytest.approx(total, rel=1e-4)
    assert result.metrics["total_tokens:sum"] == 9 + 23 + 14 + 1
    trained = sum(n - n // 3 for n in (9, 23, 14, 1))
    assert result.metrics["num_loss_tokens:sum"] == trained
    assert_close(applied_gradient(trainer), plain.gradients(data, loss))


@pytest.mark.parametrize("loss", ["importance_sampling", "cross_entropy"])
def test_a_prompt_computed_once_gives_the_same_gradients(
    tiny_folder: Path, loss: str
) -> None:
    """Against the oracle that runs every datum alone, in double precision."""
    trainer, weights = make_trainer(load_base_model("x", {"x": tiny_folder}, "cpu"))
    data = grouped_data(policy_data if loss == "importance_sampling" else weighted_data)
    rows = plan_rows([datum.tokens for datum in data], Work.of(trainer.base.trainable))
    assert sorted(len(row.members) for row in rows) == [1, 3, 4]
    plain = PlainLora(tiny_folder, weights)
    result = trainer.run("m", data, loss, {}, backward=True, top_k=2)
    for datum, logprobs, top in zip(data, result.logprobs, result.top_k, strict=True):
        np.testing.assert_allclose(
            logprobs, plain.logprobs(datum).detach().numpy(), atol=1e-4
        )
        alone = trainer.run("m", [datum], loss, {}, backward=False, top_k=2).top_k[0]
        assert top.tokens == alone.tokens
        np.testing.assert_allclose(top.logprobs, alone.logprobs, atol=1e-4)
    total = float(plain.loss(data, loss).detach())
    assert result.metrics["loss:sum"] == pytest.approx(total, rel=1e-4)
    assert_close(applied_gradient(trainer), plain.gradients(data, loss))


def grouped_data(
    make: Callable[[int, tuple[int, ...]], list[TrainingDatum]],
) -> list[TrainingDatum]:
    """Groups of four and three with prompts of 60 tokens, mixed, and a loner."""
    data = make(7, (66, 61, 70, 75, 64, 69, 63, 20))
    prompts = [datum.tokens[:60] for datum in data[:2]]
    for index, group in enumerate((0, 1, 0, 1, 0, 1, 0)):
        data[index].tokens[:60] = prompts[group]
    return data


@pytest.mark.parametrize(
    ("flags", "layers"),
    [
        ({"train_mlp": False, "train_unembed": False}, {"q_proj", "k_proj"}),
        ({"train_attn": False, "train_unembed": False}, {"gate_proj", "down_proj"}),
        ({"train_attn": False, "train_mlp": False}, {"lm_head"}),
    ],
)
def test_the_train_flags_choose_the_layers(
    tiny_base: BaseModel, flags: dict[str, bool], layers: set[str]
) -> None:
    trainer = PolicyTrainer(tiny_base)
    trainer.create("m", replace(SETTINGS, **flags))
    trained = {name.rsplit(".", 1)[-1] for name in trainer.weights("m").modules()}
    groups = [
        {"q_proj", "k_proj", "v_proj", "o_proj"},
        {"gate_proj", "up_proj", "down_proj"},
        {"lm_head"},
    ]
    assert trained == next(group for group in groups if layers <= group)


def test_two_calls_add_up_to_one_with_both(tiny_base: BaseModel) -> None:
    trainer, weights = make_trainer(tiny_base)
    data = policy_data(2, (12, 7, 20, 5))
    backward(trainer, data)
    once = applied_gradient(trainer)
    trainer.load("m", weights, None)
    backward(trainer, data[:1])
    backward(trainer, data[1:])
    assert_close(applied_gradient(trainer), once, relative=1e-5)


def test_a_forward_pass_leaves_no_gradient_and_spoils_none(
    tiny_base: BaseModel,
) -> None:
    trainer, weights = make_trainer(tiny_base)
    data = policy_data(2, (12, 7))
    trainer.run("m", data, "importance_sampling", {}, backward=False)
    with pytest.raises(TrainingError, match="call forward_backward first"):
        trainer.optim_step("m", PLAIN_DESCENT, "none")
    backward(trainer, data)
    once = applied_gradient(trainer)
    trainer.load("m", weights, None)
    backward(trainer, data)
    trainer.run("m", data, "importance_sampling", {}, backward=False)
    again = applied_gradient(trainer)
    assert all(torch.equal(once[name], again[name]) for name in once)


def test_gradients_are_cleared_by_a_step(tiny_base: BaseModel) -> None:
    trainer, _ = make_trainer(tiny_base)
    backward(trainer, policy_data(2, (12, 7)))
    applied_gradient(trainer)
    with pytest.raises(TrainingError, match="call forward_backward first"):
        trainer.optim_step("m", PLAIN_DESCENT, "none")


@pytest.mark.parametrize(
    ("normalization", "divisor"),
    [
        ("none", 1),
        ("num_sequences", 3),
        ("num_loss_tokens", (12 - 4) + (7 - 2) + (20 - 6)),
    ],
)
def test_normalisations_divide_the_accumulated_sum(
    tiny_folder: Path, tiny_base: BaseModel, normalization: str, divisor: int
) -> None:
    trainer, weights = make_trainer(tiny_base)
    data = policy_data(2, (12, 7, 20))
    expected = PlainLora(tiny_folder, weights).gradients(data, "importance_sampling")
    backward(trainer, data[:2])
    backward(trainer, data[2:])
    assert_close(
        applied_gradient(trainer, normalization),
        {name: gradient / divisor for name, gradient in expected.items()},
    )


def test_clipping_comes_after_normalisation(
    tiny_folder: Path, tiny_base: BaseModel
) -> None:
    trainer, weights = make_trainer(tiny_base)
    data = policy_data(2, (12, 7))
    plain = PlainLora(tiny_folder, weights).gradients(data, "importance_sampling")
    norm = math.sqrt(sum(float((g**2).sum()) for g in plain.values())) / 2
    count = sum(gradient.numel() for gradient in plain.values())
    for clip in (norm / 4, norm * 4):
        trainer.load("m", weights, None)
        backward(trainer, data)
        settings = replace(PLAIN_DESCENT, grad_clip_norm=clip)
        metrics = trainer.optim_step("m", settings, "num_sequences")
        kept = min(norm, clip)
        assert metrics["grad_norm:last"] == pytest.approx(norm, rel=1e-4)
        rms = norm / math.sqrt(count)
        assert metrics["grad_norm_rms:last"] == pytest.approx(rms, rel=1e-4)
        assert metrics["grad_norm_post_clip:last"] == pytest.approx(kept, rel=1e-4)
        after = trainer.weights("m").tensors
        moved = {name: weights.tensors[name] - after[name] for name in after}
        expected = {name: g / 2 * (kept / norm) for name, g in plain.items()}
        assert_close(moved, expected)


def test_the_first_adam_step_moves_each_weight_by_the_learning_rate(
    tiny_folder: Path, tiny_base: BaseModel
) -> None:
    trainer, weights = make_trainer(tiny_base)
    data = policy_data(2, (12, 7))
    plain = PlainLora(tiny_folder, weights).gradients(data, "importance_sampling")
    backward(trainer, data)
    trainer.optim_step("m", AdamSettings(learning_rate=1e-3), "none")
    for name, after in trainer.weights("m").tensors.items():
        clear = plain[name].abs() > 1e-3 * plain[name].abs().max()
        moved = (after - weights.tensors[name])[clear].double()
        expected = -1e-3 * plain[name][clear].sign()
        torch.testing.assert_close(moved, expected, atol=1e-7, rtol=0.0)


def test_three_steps_are_a_hand_written_adam_in_double(
    tiny_folder: Path, tiny_base: BaseModel
) -> None:
    """Decoupled weight decay, clipping, normalisation, and settings that change."""
    trainer, weights = make_trainer(tiny_base)
    plain = PlainLora(tiny_folder, weights)
    first = {name: torch.zeros_like(p) for name, p in plain.leaves.items()}
    second = {name: torch.zeros_like(p) for name, p in plain.leaves.items()}
    eps, clip, decay = 1e-2, 3.0, 0.5
    for step, (rate, betas) in enumerate(
        [(1e-2, (0.9, 0.95)), (5e-3, (0.9, 0.95)), (1e-2, (0.8, 0.99))], start=1
    ):
        data = policy_data(step, (12, 7, 9))
        backward(trainer, data)
        trainer.optim_step(
            "m", AdamSettings(rate, *betas, eps, decay, clip), "num_sequences"
        )
        gradients = plain.gradients(data, "importance_sampling")
        gradients = {name: g / 3 for name, g in gradients.items()}
        norm = math.sqrt(sum(float((g**2).sum()) for g in gradients.values()))
        assert norm > clip
        with torch.no_grad():
            for name, parameter in plain.leaves.items():
                g = gradients[name] * (clip / norm)
                first[name] = betas[0] * first[name] + (1 - betas[0]) * g
                second[name] = betas[1] * second[name] + (1 - betas[1]) * g**2
                mean = first[name] / (1 - betas[0] ** step)
                spread = (second[name] / (1 - betas[1] ** step)).sqrt()
                parameter -= rate * decay * parameter
                parameter -= rate * mean / (spread + eps)
    for name, parameter in plain.leaves.items():
        torch.testing.assert_close(
            trainer.weights("m").tensors[name].double(),
            parameter.detach(),
            atol=2e-5,
            rtol=0.0,
        )


def test_a_loss_that_is_not_finite_leaves_earlier_gradients_intact(
    tiny_base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, weights = make_trainer(tiny_base)
    good = policy_data(2, (12, 7))
    backward(trainer, good)
    expected = applied_gradient(trainer, "num_sequences")
    trainer.load("m", weights, None)
    backward(trainer, good)
    # The ratio exp(200) of the last pass overflows, after others have gone through.
    monkeypatch.setattr("rlhelpers.local.trainer.MAX_BATCH_TOKENS", 16)
    bad = policy_data(3, (15, 14, 3))
    bad[2].inputs["logprobs"].fill_(-200.0)
    bad[2].inputs["advantages"].fill_(1.0)
    with pytest.raises(TrainingError, match="importance_sampling loss"):
        backward(trainer, bad)
    actual = applied_gradient(trainer, "num_sequences")
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_gradients_that_overflow_are_refused_and_dropped(
    tiny_base: BaseModel,
) -> None:
    """A finite loss can still have an infinite gradient; it must not reach Adam."""
    trainer, weights = make_trainer(tiny_base)
    (datum,) = weighted_data(3, (6,))
    datum.inputs["weights"].copy_(torch.tensor([1e37, -1e37] * 3))
    trainer.run("m", [datum], "cross_entropy", {}, backward=True)
    with pytest.raises(TrainingError, match="gradient"):
        trainer.optim_step("m", AdamSettings(), "none")
    for name, tensor in trainer.weights("m").tensors.items():
        assert torch.equal(tensor, weights.tensors[name])
    data = policy_data(2, (12, 7))
    backward(trainer, data)
    after_refusal = applied_gradient(trainer)
    trainer.load("m", weights, None)
    backward(trainer, data)
    expected = applied_gradient(trainer)
    assert all(torch.equal(after_refusal[name], expected[name]) for name in expected)


@pytest.mark.parametrize("seed", range(6))
def test_plan_covers_every_index_once_within_the_limits(seed: int) -> None:
    random = np.random.default_rng(seed)
    high = [3, 40, 500, 3000, 20_000, 60][seed]
    lengths = random.integers(1, high + 1, 90).tolist()
    for vocab_size in (259, 150_000):
        plan = list(plan_passes(lengths, vocab_size))
        assert sorted(index for group in plan for index in group) == list(range(90))
        limit = min(16_384, 64_000_000 // vocab_size)
        for group in plan:
            longest = max(lengths[index] for index in group)
            assert len(group) == 1 or longest * len(group) <= limit


def test_plan_depends_on_lengths_alone() -> None:
    lengths = [5, 900, 30, 30, 700, 1, 30, 899]
    plan = list(plan_passes(lengths, 1000))
    assert plan == list(plan_passes(list(lengths), 1000))
    order = [3, 1, 0, 2, 7, 4, 6, 5]
    shuffled = list(plan_passes([lengths[index] for index in order], 1000))
    as_lengths = [[lengths[index] for index in group] for group in plan]
    assert as_lengths == [[lengths[order[i]] for i in group] for group in shuffled]


def test_splitting_into_passes_changes_no_sum(
    tiny_base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, weights = make_trainer(tiny_base)
    data = policy_data(8, (3, 30, 11, 8, 25, 2))
    whole = trainer.run("m", data, "importance_sampling", {}, backward=True)
    once = applied_gradient(trainer)
    trainer.load("m", weights, None)
    monkeypatch.setattr("rlhelpers.local.trainer.MAX_BATCH_TOKENS", 32)
    split = trainer.run("m", data, "importance_sampling", {}, backward=True)
    assert split.metrics == pytest.approx(whole.metrics, rel=1e-5)
    for one, other in zip(split.logprobs, whole.logprobs, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    assert_close(applied_gradient(trainer), once, relative=1e-5)


def train(trainer: PolicyTrainer, model_id: str, steps: range) -> None:
    for step in steps:
        backward(trainer, policy_data(step, (12, 7, 9)), model_id=model_id)
        trainer.optim_step(model_id, AdamSettings(learning_rate=1e-2), "none")


def test_resume_with_optimizer_is_not_stopping_to_the_last_bit(
    tiny_folder: Path,
) -> None:
    def fresh() -> PolicyTrainer:
        trainer = PolicyTrainer(load_base_model("x", {"x": tiny_folder}, "cpu"))
        trainer.create("m", SETTINGS)
        return trainer

    straight = fresh()
    train(straight, "m", range(2))
    saved, state = straight.weights("m"), straight.optimizer_state("m")
    train(straight, "m", range(2, 4))
    expected = straight.weights("m").tensors
    for optimizer_state, same in ((state, True), (None, False)):
        resumed = fresh()
        train(resumed, "m", range(7, 8))  # what was there before must not matter
        resumed.load("m", saved, optimizer_state)
        train(resumed, "m", range(2, 4))
        actual = resumed.weights("m").tensors
        assert all(torch.equal(actual[n], expected[n]) for n in expected) is same


def test_a_saved_copy_does_not_change_with_training(tiny_base: BaseModel) -> None:
    trainer, _ = make_trainer(tiny_base)
    train(trainer, "m", range(1))
    saved, state = trainer.weights("m"), trainer.optimizer_state("m")
    before = {name: tensor.clone() for name, tensor in saved.tensors.items()}
    moments = {name: tensor.clone() for name, tensor in state.items()}
    train(trainer, "m", range(1, 3))
    assert all(torch.equal(saved.tensors[name], before[name]) for name in before)
    assert all(torch.equal(state[name], moments[name]) for name in moments)


def test_loading_an_adapter_of_another_rank_is_refused(tiny_base: BaseModel) -> None:
    trainer, weights = make_trainer(tiny_base)
    trainer.create("wider", replace(SETTINGS, rank=8))
    with pytest.raises(AdapterError, match=r"rank 4.*rank 8"):
        trainer.load("wider", weights, None)


def test_adapters_of_one_base_do_not_touch_each_other(tiny_folder: Path) -> None:
    def fresh() -> PolicyTrainer:
        return PolicyTrainer(load_base_model("x", {"x": tiny_folder}, "cpu"))

    shared = fresh()
    shared.create("m", SETTINGS)
    shared.create("n", replace(SETTINGS, seed=9, rank=2))
    for step in range(3):
        backward(shared, policy_data(step, (12, 7, 9)), model_id="m")
        backward(shared, policy_data(step + 50, (5, 8)), model_id="n")
        for model_id in ("m", "n"):
            shared.optim_step(model_id, AdamSettings(learning_rate=1e-2), "none")
    shared.unload("n")
    alone = fresh()
    alone.create("m", SETTINGS)
    train(alone, "m", range(3))
    for name, tensor in alone.weights("m").tensors.items():
        assert torch.equal(shared.weights("m").tensors[name], tensor)


def test_a_model_can_be_created_after_the_last_one_was_unloaded(
    tiny_base: BaseModel,
) -> None:
    trainer = PolicyTrainer(tiny_base)
    trainer.create("m", SETTINGS)
    train(trainer, "m", range(2))
    trainer.unload("m")
    trainer.create("m", SETTINGS)
    for name, tensor in trainer.weights("m").tensors.items():
        assert name.endswith(("lora_A.weight", "lora_B.weight"))
        assert bool(tensor.any()) is name.endswith("lora_A.weight")
    train(trainer, "m", range(1))


def test_the_seed_fixes_the_first_weights_and_no_seed_does_not(
    tiny_base: BaseModel,
) -> None:
    trainer = PolicyTrainer(tiny_base)
    state = torch.random.get_rng_state()
    for model_id, seed in (("a", 3), ("b", 3), ("c", 4), ("d", None), ("e", None)):
        trainer.create(model_id, replace(SETTINGS, seed=seed))
    first = {m: trainer.weights(m).tensors for m in "abcde"}
    name = next(n for n in first["a"] if n.endswith("lora_A.weight"))
    assert torch.equal(first["a"][name], first["b"][name])
    for one, other in ("ac", "ad", "de"):
        assert not torch.equal(first[one][name], first[other][name])
    assert torch.equal(torch.random.get_rng_state(), state)  # the caller's own stream


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("train_unembed", [True, False])
def test_merged_weights_sample_what_the_trainer_computes(
    tiny_folder: Path, untied_folder: Path, tied: bool, train_unembed: bool
) -> None:
    folder = tiny_folder if tied else untied_folder
    base = load_base_model("x", {"x": folder}, "cpu")
    trainer, _ = make_trainer(base, replace(SETTINGS, train_unembed=train_unembed))
    train(trainer, "m", range(5))
    merge_into(base.sampling, trainer.base_weights, trainer.weights("m"))
    decoder = Decoder(base, lambda key: None)
    done: list[tuple[tuple[int, ...], Completion]] = []
    for index in range(8):
        prompt = tuple(range(40, 60 + index))
        params = SamplingParams(30, seed=index)
        decoder.add(
            "m",
            Sequence(
                prompt,
                params,
                lambda c, p=prompt: done.append((p, c)),
                lambda error: pytest.fail(str(error)),
            ),
        )
    while decoder.has_work:
        decoder.step()
    assert len(done) == 8
    for prompt, completion in done:
        full = [*prompt, *completion.tokens]
        datum = make_training_datum(full[:-1], full[1:])
        result = trainer.run("m", [datum], "cross_entropy", {}, backward=False)
        expected = result.logprobs[0][len(prompt) - 1 :]
        np.testing.assert_allclose(completion.sampling_logprobs, expected, atol=1e-4)


def test_merging_one_adapter_after_another_leaves_no_trace(
    tiny_base: BaseModel,
) -> None:
    trainer, weights = make_trainer(tiny_base)
    base = {n: w.clone() for n, w in linear_weights(tiny_base.sampling).items()}
    merge_into(tiny_base.sampling, trainer.base_weights, weights)
    once = {n: w.clone() for n, w in linear_weights(tiny_base.sampling).items()}
    other = random_adapter(weights, seed=5, scale=1.0)
    merge_into(tiny_base.sampling, trainer.base_weights, other)
    merge_into(tiny_base.sampling, trainer.base_weights, weights)
    for name, weight in linear_weights(tiny_base.sampling).items():
        assert torch.equal(weight, once[name])
        assert not torch.equal(weight, base[name])
    merge_into(tiny_base.sampling, trainer.base_weights, None)
    for name, weight in linear_weights(tiny_base.sampling).items():
        assert torch.equal(weight, base[name])
