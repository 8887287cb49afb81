"""The KL to the base model, against numbers worked out without the service."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fireworks.training.sdk import Datum
from noise_policy import plain

from rlhelpers.datums import RolloutFailed, check_run, make_datum, make_training_batch
from rlhelpers.kl import kl_penalised, kl_per_token, measure_kl
from rlhelpers.metrics import read_metrics, read_resume_state
from rlhelpers.models import PRESETS
from rlhelpers.service import TrainingSession
from rlhelpers.training import TrainConfig, train, train_step
from rlhelpers.usage import TokenLimitReached

TASKS = [plain(n) for n in range(4)]


def test_by_hand() -> None:
    # Twice as probable, half as probable, equally probable: log 2 − log 2 + 0.
    two = float(np.log(2))
    assert kl_per_token([-1.0, -1.0 - two, -3.0], [-1.0 - two, -1.0, -3.0]) == (
        pytest.approx(0.0)
    )
    assert kl_per_token([-0.5], [-2.0]) == 1.5


@pytest.mark.parametrize("pair", [([], []), ([-1.0], []), ([-1.0], [-1.0, -2.0])])
def test_both_sides_need_the_same_tokens(pair: tuple[list[float], list[float]]) -> None:
    with pytest.raises(ValueError, match="same tokens, at least one"):
        kl_per_token(*pair)


def test_the_mean_is_the_kl_and_steadier_than_k3() -> None:
    """Two models of one token: a policy that made a habit of the base rare."""
    policy, base = np.array([0.999, 0.001]), np.array([0.3, 0.7])
    exact = float((policy * np.log(policy / base)).sum())
    ratio = base / policy
    single = {
        "k1": np.log(policy / base),
        "k3": ratio - 1 - np.log(ratio),
    }
    spread = {}
    for name, value in single.items():
        assert float((policy * value).sum()) == pytest.approx(exact)  # no bias
        spread[name] = float((policy * (value - exact) ** 2).sum())
    assert spread["k3"] > 10 * spread["k1"]


def by_transformers(folder: Path, runs: Any) -> float:
    """The same mean, with the base model's part from transformers in float64."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    gaps: list[float] = []
    for run in runs:
        sample = check_run(run)
        prompt, output = sample.prompt_token_ids, sample.output_token_ids
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*prompt, *output]])).logits[0]
        table = torch.log_softmax(logits, -1)
        for i, token in enumerate(output):
            base = float(table[len(prompt) + i - 1, token])
            gaps.append(sample.output_logprobs[i] - base)
    return sum(gaps) / len(gaps)


async def test_measured_on_rollouts(
    session: TrainingSession, policy_folder: Path, tmp_path: Path
) -> None:
    config = TrainConfig.from_preset(
        session.preset, tasks_per_step=4, group_size=8, learning_rate=5e-2
    )
    results = [
        await train_step(
            session, TASKS, step=n, config=config, run_dir=tmp_path / "run"
        )
        for n in (1, 2)
    ]
    assert all(result.updated for result in results)
    before = session.usage.counts
    fresh, moved = [await measure_kl(session, result.runs) for result in results]
    assert fresh == pytest.approx(0.0, abs=1e-4)  # a fresh adapter changes nothing
    assert moved > 0.01
    assert moved == pytest.approx(by_transformers(policy_folder, results[1].runs), 1e-3)
    # Read once more, all but the last token of each rollout; nothing else was used.
    used = session.usage.counts - before
    lengths = [
        len(sample.prompt_token_ids) + len(sample.output_token_ids) - 1
        for result in results
        for sample in map(check_run, result.runs)
    ]
    assert (used.prefill, used.sampled, used.trained) == (sum(lengths), 0, 0)


async def test_it_stops_at_the_token_limit_and_refuses_failed_runs(
    session: TrainingSession, graded_run: Any
) -> None:
    run = graded_run("g", 1.0, prompt=(5, 6), output=(7, 8))  # three tokens to read
    session.usage.limit = 2
    with pytest.raises(TokenLimitReached):
        await measure_kl(session, [run])
    session.usage.limit = None
    with pytest.raises(RolloutFailed):
        await measure_kl(session, [run, graded_run("g", 1.0, status="error")])
    assert session.usage.counts.total == 0


# -- in training ------------------------------------------------------------------


def test_how_often_and_for_how_many_rollouts() -> None:
    config = TrainConfig(max_tokens=16, steps=11, kl_every=5)
    measured = [step for step in range(1, 12) if config.measures_kl(step)]
    assert measured == [5, 10]
    assert config.kl_rollouts == 2 * 64
    never = dataclasses.replace(config, kl_every=0)
    assert not any(map(never.measures_kl, range(1, 12)))
    assert never.kl_rollouts == 0
    with pytest.raises(ValueError, match="kl_every must be at least 0, got -1"):
        TrainConfig(max_tokens=16, kl_every=-1)


def test_what_is_paid_for_is_off_unless_asked_for() -> None:
    for preset in PRESETS.values():
        config = TrainConfig.from_preset(preset)
        assert (config.kl_rollouts == 0) == (preset.backend == "fireworks")


async def test_a_run_records_it_where_asked(
    session: TrainingSession, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    config = TrainConfig.from_preset(session.preset, steps=4, kl_every=2)
    await train(session, TASKS, config=config, run_dir=run_dir, progress=False)
    rows = read_metrics(run_dir / "metrics.jsonl")
    assert [row.kl is None for row in rows] == [True, False, True, False]
    # A measured step reads every rollout a second time, and that is in its row.
    assert rows[1].prefill_tokens > rows[0].prefill_tokens + rows[1].sampled_tokens / 2
    # Resuming opens another session, which needs a reference client of its own.
    session.resume(read_resume_state(run_dir / "resume.json").checkpoint)
    every = dataclasses.replace(config, kl_every=1)
    again = await train_step(session, TASKS[:2], config=every, run_dir=tmp_path / "on")
    assert again.metrics.kl is not None


# -- a penalty that holds the policy ------------------------------------------------


def test_the_penalty_by_hand() -> None:
    two = make_datum([1, 2], [3, 4], [-0.25, -0.5], 1.0)
    one = make_datum([1], [5], [-1.0], -1.0)
    base = [np.array([-7.0, -1.25, -0.5]), np.array([-3.0])]
    # d is 1, 0 and 2, their mean 1; the prompt's −7 is masked.
    held = kl_penalised([two, one], base, 0.25)
    rows = [datum.loss_fn_inputs["advantages"].tolist() for datum in held]
    assert rows == [[0.0, 1.0, 1.25], [-1.25]]
    for before, after in zip((two, one), held, strict=True):
        for name in ("target_tokens", "logprobs"):
            kept = after.loss_fn_inputs[name].tolist()
            assert kept == before.loss_fn_inputs[name].tolist()
        assert after.model_input.to_ints() == before.model_input.to_ints()
    assert kl_penalised([], [], 0.25) == []
    with pytest.raises(ValueError):
        kl_penalised([two], [], 0.25)


def test_a_token_of_advantage_0_is_held_too() -> None:
    middle = make_datum([1, 2], [3], [-0.5], 0.0)  # rewards 0, 0.5, 1: the middle one
    other = make_datum([1, 2], [4], [-0.5], 1.0)
    base = [np.array([-1.0, -2.5]), np.array([-1.0, -0.5])]
    held, _ = kl_penalised([middle, other], base, 1.0)
    assert held.loss_fn_inputs["advantages"].tolist() == [0.0, -1.0]


def test_its_expected_push_is_minus_the_gradient_of_the_kl() -> None:
    """One token of three words, whose KL torch differentiates."""
    import torch

    logits = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64, requires_grad=True)
    base = torch.log_softmax(torch.tensor([1.0, 0.5, -0.5], dtype=torch.float64), 0)
    policy = torch.log_softmax(logits, 0)
    kl = (policy.exp() * (policy - base)).sum()
    (exact,) = torch.autograd.grad(kl, logits, retain_graph=True)
    expected = torch.zeros(3, dtype=torch.float64)
    # One datum for each word; the baseline is a constant for this purpose.
    datums = [make_datum([1], [w], [float(policy[w])], 0.0) for w in range(3)]
    rows = kl_penalised(datums, [np.array([float(b)]) for b in base], 0.5)
    for word, datum in enumerate(rows):
        (advantage,) = datum.loss_fn_inputs["advantages"].tolist()
        (push,) = torch.autograd.grad(policy[word], logits, retain_graph=True)
        expected += float(policy[word].exp()) * advantage * push
    assert expected.numpy() == pytest.approx(-0.5 * exact.numpy(), abs=1e-6)


def test_a_coefficient_that_cannot_work() -> None:
    for value in (-0.1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="kl_coefficient must be a number of at"):
            TrainConfig(max_tokens=16, kl_coefficient=value)
    config = TrainConfig(max_tokens=16, steps=10, kl_every=5, kl_coefficient=0.1)
    assert config.kl_rollouts == (2 + 10) * 64


async def test_off_it_changes_nothing_and_asks_nothing(
    session: TrainingSession, tmp_path: Path
) -> None:
    assert TrainConfig(max_tokens=16).kl_coefficient == 0
    config = TrainConfig.from_preset(session.preset, tasks_per_step=4, group_size=8)
    result = await train_step(session, TASKS, config=config, run_dir=tmp_path / "run")
    built, _ = make_training_batch(result.runs)

    def rows(datums: Iterable[Datum]) -> list[dict[str, Any]]:
        return [{k: v.data for k, v in d.loss_fn_inputs.items()} for d in datums]

    assert result.updated
    assert rows(result.datums) == rows(built)
    prompts = sum(len(check_run(run).prompt_token_ids) for run in result.runs)
    assert session.usage.counts.prefill == prompts


async def test_it_holds_the_policy(session: TrainingSession, tmp_path: Path) -> None:
    """The same step from the same rollouts ends nearer the base model."""
    moved = {}
    for coefficient in (0.0, 5.0):
        session.new_policy()
        config = TrainConfig.from_preset(
            session.preset,
            steps=6,
            tasks_per_step=4,
            group_size=8,
            learning_rate=2e-2,
            kl_every=1,
            kl_coefficient=coefficient,
        )
        result = await train(
            session,
            TASKS,
            config=config,
            run_dir=tmp_path / f"beta-{coefficient:g}",
            progress=False,
        )
        rows = result.metrics
        assert all(row.kl is not None for row in rows)
        moved[coefficient] = rows[-1].kl or 0.0
        # The base model reads each rollout for the KL, and each datum for the penalty.
        read = rows[-1].prefill_tokens
        assert read > rows[-1].sampled_tokens
    assert 0 < moved[5.0] < moved[0.0] / 2


async def test_the_penalty_reads_the_datums_once_more(
    session: TrainingSession, tmp_path: Path
) -> None:
    config = TrainConfig.from_preset(
        session.preset, tasks_per_step=4, group_size=8, kl_coefficient=0.1
    )
    result = await train_step(session, TASKS, config=config, run_dir=tmp_path / "run")
    prompts = sum(len(check_run(run).prompt_token_ids) for run in result.runs)
    read = sum(datum.model_input.length for datum in result.datums)
    assert result.metrics.prefill_tokens == prompts + read
    # A fresh adapter is the base model: nothing to hold yet.
    for datum, record in zip(
        result.datums,
        [record for record in result.records if record.advantage is not None],
        strict=True,
    ):
        weights = datum.loss_fn_inputs["advantages"].to_numpy()
        assert weights[-record.output_tokens :] == pytest.approx(
            record.advantage, abs=1e-4
        )
