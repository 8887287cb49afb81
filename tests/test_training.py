"""Calibration, one step, the loop, evaluation, and what interrupts them."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import warnings
from pathlib import Path
from typing import Any

import noise_policy
import numpy as np
import pytest
from hud.eval.runtime import LocalRuntime
from noise_policy import broken, env, flat, plain

from rlhelpers.calibration import calibrate
from rlhelpers.checkpoints import CheckpointError
from rlhelpers.datums import RolloutFailed
from rlhelpers.evaluation import evaluate
from rlhelpers.metrics import read_metrics, read_resume_state, read_rollouts
from rlhelpers.models import PRESETS, ModelPreset
from rlhelpers.sampling import SamplingSettings
from rlhelpers.service import TrainingSession, connect
from rlhelpers.tasks import TaskPool
from rlhelpers.training import (
    NoUpdate,
    StepResult,
    TrainConfig,
    train,
    train_step,
)
from rlhelpers.usage import TokenLimitReached

TASKS = [plain(n) for n in range(12)]


def config(session: TrainingSession, **changes: Any) -> TrainConfig:
    return TrainConfig.from_preset(session.preset, **changes)


# -- settings ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"group_size": 1}, "group_size must be at least 2, got 1"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"tasks_per_step": 0}, "tasks_per_step must be at least 1, got 0"),
        ({"checkpoint_every": 0}, "checkpoint_every"),
        ({"loss_fn": "mse"}, "unknown loss_fn 'mse'"),
        ({"loss_fn": "mse"}, "importance_sampling, ppo, cispo"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"learning_rate": float("nan")}, "nan"),
        ({"learning_rate": float("inf")}, "inf"),
        ({"temperature": 0.0}, "greedy"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
    ],
)
def test_settings_that_cannot_work(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as caught:
        TrainConfig(**{"max_tokens": 16, **changes})
    assert said in str(caught.value)


def test_biased_sampling_settings_warn() -> None:
    """A15: settings under which the stored log-probabilities are not the policy's."""
    with pytest.warns(UserWarning, match="ratios are biased"):
        TrainConfig(max_tokens=16, temperature=0.7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TrainConfig(max_tokens=16)


def test_none_means_the_presets_value() -> None:
    preset = PRESETS["qwen3p8-27b"]
    made = TrainConfig.from_preset(preset, steps=None, learning_rate=None, group_size=4)
    assert (made.steps, made.learning_rate) == (30, 2.5e-5)
    assert (made.group_size, made.max_tokens) == (4, 2048)
    with pytest.raises(TypeError, match="lerning_rate"):
        TrainConfig.from_preset(preset, lerning_rate=1.0)


def test_adam_is_the_courses() -> None:
    adam = TrainConfig(max_tokens=16, learning_rate=1e-3).adam
    assert (adam.learning_rate, adam.beta1, adam.beta2) == (1e-3, 0.9, 0.95)
    assert (adam.eps, adam.weight_decay) == (1e-8, 0.0)


# -- calibration ------------------------------------------------------------------


async def test_calibration_finds_a_spread(session: TrainingSession) -> None:
    result = await calibrate(session, TASKS[:6])
    assert len(result.records) == 24
    assert 0 < result.reward_mean < 1
    assert result.within_group_std > 0
    assert result.outcomes.n == 24
    assert result.verdict is not None
    samples = result.samples(4)
    assert len(samples) == 4
    assert len({sample.reward for sample in samples}) == 2
    on_disk = read_rollouts(result.run_dir / "rollouts.jsonl", phase="calibrate")
    assert on_disk == list(result.records)
    assert session.usage.counts.trained == 0


async def test_calibration_names_the_token_limit_first(
    session: TrainingSession,
) -> None:
    result = await calibrate(
        session, [flat(1), flat(2)], settings=SamplingSettings(max_tokens=1)
    )
    assert result.token_limit_share > 0.5
    assert result.verdict is not None
    assert result.verdict.code == "token_limit"
    assert result.within_group_std == 0.0


async def test_calibration_and_evaluation_need_tasks(session: TrainingSession) -> None:
    with pytest.raises(ValueError, match="no tasks"):
        await calibrate(session, [])
    with pytest.raises(ValueError, match="no tasks"):
        await evaluate(session, [])
    with pytest.raises(ValueError, match="got 0"):
        await calibrate(session, TASKS, group_size=0)


# -- one step ---------------------------------------------------------------------


async def test_a_step_updates_and_is_recorded(
    session: TrainingSession, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    settings = config(session, tasks_per_step=4, group_size=8)
    result = await train_step(session, TASKS[:4], config=settings, run_dir=run_dir)
    row = result.metrics
    assert result.updated
    assert result.reason is None
    assert session.updates == 1
    assert read_metrics(run_dir / "metrics.jsonl") == [row]
    assert (row.step, row.attempt, row.rollouts, row.valid_rollouts) == (1, 1, 32, 32)
    assert row.correct + row.wrong_integer + row.invalid_final_line == 32
    assert 0 < row.kept_groups <= 4
    assert row.datums == len(result.datums) == 8 * row.kept_groups
    assert row.snapshot is not None
    assert "/policy-0000-" in row.snapshot
    assert row.entropy is not None
    assert row.entropy > 0
    assert row.kl is None
    parts = (row.sampling_seconds, row.training_seconds, row.hud_seconds)
    assert all(part is not None and part >= 0 for part in parts)
    total = sum(part or 0.0 for part in (*parts, row.other_seconds))
    assert total == pytest.approx(row.seconds)
    used = session.usage.counts
    assert (row.prefill_tokens, row.sampled_tokens) == (used.prefill, used.sampled)
    assert used.trained == sum(d.model_input.length for d in result.datums)


async def test_the_update_is_on_policy_and_goes_the_right_way(
    session: TrainingSession, tmp_path: Path
) -> None:
    """A16: the loss is what it should be and no progress signal; the gain is one."""
    settings = config(session, tasks_per_step=4, group_size=8, learning_rate=1e-3)
    result = await train_step(
        session, TASKS[:4], config=settings, run_dir=tmp_path / "run"
    )
    assert result.max_ratio_error is not None
    assert result.max_ratio_error < 1e-4
    # On-policy the loss is minus the sum of advantages over tokens.
    advantages = [d.loss_fn_inputs["advantages"].to_numpy() for d in result.datums]
    expected = -sum(float(values.sum()) for values in advantages)
    assert result.metrics.loss == pytest.approx(expected, abs=1e-2)
    assert result.metrics.loss_per_token == pytest.approx(
        (result.metrics.loss or 0.0) / result.metrics.trained_tokens
    )
    after = session.training_client.forward(
        list(result.datums), "importance_sampling"
    ).result()
    gain = sum(
        float((values * (new["logprobs"].to_numpy() - old)).sum())
        for values, new, old in zip(
            advantages, after.loss_fn_outputs, result.logprobs, strict=True
        )
    )
    assert gain > 0


async def test_prompt_positions_carry_no_advantage(
    session: TrainingSession, tmp_path: Path
) -> None:
    result = await train_step(
        session, TASKS[:4], config=config(session), run_dir=tmp_path / "run"
    )
    by_group: dict[str, list[float]] = {}
    for record in result.records:
        if record.advantage is not None:
            by_group.setdefault(record.task, []).append(record.advantage)
    assert by_group
    for values in by_group.values():
        assert sum(values) == pytest.approx(0.0, abs=1e-9)
    for datum in result.datums:
        prompt = np.cumsum(datum.loss_fn_inputs["logprobs"].to_numpy() != 0) == 0
        assert not datum.loss_fn_inputs["advantages"].to_numpy()[prompt].any()


async def test_a_step_without_signal_changes_nothing(
    session: TrainingSession, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    result = await train_step(
        session, [flat(1), flat(2)], config=config(session), run_dir=run_dir
    )
    assert not result.updated
    assert result.reason is not None
    assert "every group is flat" in result.reason
    assert result.datums == ()
    assert result.max_ratio_error is None
    assert session.updates == 0
    assert session.usage.counts.trained == 0
    (row,) = read_metrics(run_dir / "metrics.jsonl")
    assert not row.updated
    assert row.kept_groups == row.datums == row.trained_tokens == 0
    assert row.loss is None
    assert row.note == result.reason


async def test_require_update_makes_that_an_error(
    session: TrainingSession, tmp_path: Path
) -> None:
    settings = config(session, require_update=True)
    with pytest.raises(NoUpdate, match="step 3: no update: every group is flat"):
        await train_step(
            session, [flat(1)], step=3, config=settings, run_dir=tmp_path / "run"
        )
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 1


async def test_a_failed_rollout_is_never_trained_on(
    session: TrainingSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(noise_policy._calls, "broken", 0)
    run_dir = tmp_path / "run"
    with pytest.raises(RolloutFailed, match="broken"):
        await train_step(
            session, [plain(1), broken(2)], config=config(session), run_dir=run_dir
        )
    assert session.updates == 0
    assert session.usage.counts.trained == 0
    assert not (run_dir / "metrics.jsonl").exists()
    kept = read_rollouts(run_dir / "rollouts.jsonl")
    assert len(kept) == 5
    assert all(record.advantage is None for record in kept)
    # The retry replaces them: nothing is counted twice.
    await train_step(
        session, [plain(1), plain(2)], config=config(session), run_dir=run_dir
    )
    again = [r for r in read_rollouts(run_dir / "rollouts.jsonl") if "plain" in r.task]
    assert len(again) == 8


async def test_every_step_samples_from_its_own_weights(
    session: TrainingSession, tmp_path: Path
) -> None:
    """S05: each step opens a sampler of its own, whose path is recorded."""
    settings = config(session, tasks_per_step=4)
    rows = [
        (
            await train_step(
                session, TASKS[:4], step=n, config=settings, run_dir=tmp_path / "run"
            )
        ).metrics
        for n in (1, 2)
    ]
    assert "/policy-0000-" in str(rows[0].snapshot)
    assert "/policy-0001-" in str(rows[1].snapshot)


@pytest.mark.parametrize("loss_fn", ["ppo", "cispo"])
async def test_the_other_losses(
    session: TrainingSession, tmp_path: Path, loss_fn: str
) -> None:
    settings = config(session, tasks_per_step=4, loss_fn=loss_fn)
    result = await train_step(
        session, TASKS[:4], config=settings, run_dir=tmp_path / "run"
    )
    assert result.updated
    assert result.metrics.loss_fn == loss_fn


# -- the loop ---------------------------------------------------------------------


async def test_training_learns_and_writes_everything(
    session: TrainingSession, tmp_path: Path
) -> None:
    run_dir, seen = tmp_path / "run", list[int]()
    held_out = [plain(n) for n in range(100, 116)]
    before = await evaluate(session, held_out, phase="before", run_dir=run_dir)

    async def note(result: StepResult) -> None:
        seen.append(result.metrics.step)

    settings = config(session, steps=8, tasks_per_step=4, group_size=8)
    result = await train(
        session,
        TASKS,
        config=settings,
        run_dir=run_dir,
        watch=TASKS[:2],
        on_step=note,
        progress=False,
    )
    after = await evaluate(
        session, held_out, phase="after", sampler=result.sampler, run_dir=run_dir
    )
    assert seen == [row.step for row in result.metrics] == list(range(1, 9))
    assert result.metrics[-1].reward_mean > result.metrics[0].reward_mean
    assert after.reward_mean >= before.reward_mean
    assert result.state.endswith("/final-state")
    assert "/final-" in result.final_snapshot
    looks = read_rollouts(run_dir / "watch.jsonl")
    assert sorted({look.step for look in looks}) == [0, 5, 8]
    phases = {record.phase for record in read_rollouts(run_dir / "rollouts.jsonl")}
    assert phases == {"before", "train", "after"}
    state = read_resume_state(run_dir / "resume.json")
    assert (state.next_step, state.checkpoint) == (9, result.state)


async def test_a_folder_that_holds_a_run_is_not_overwritten(
    session: TrainingSession, tmp_path: Path
) -> None:
    run_dir, settings = tmp_path / "run", config(session, steps=1)
    await train(session, TASKS, config=settings, run_dir=run_dir, progress=False)
    with pytest.raises(ValueError, match="already holds a run"):
        await train(session, TASKS, config=settings, run_dir=run_dir, progress=False)


async def test_a_finished_run_resumes_to_its_end_and_to_more_steps(
    session: TrainingSession, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    for steps in (2, 2, 3):
        result = await train(
            session,
            TASKS,
            config=config(session, steps=steps),
            run_dir=run_dir,
            resume=True,
            progress=False,
        )
        assert [row.step for row in result.metrics] == list(range(1, steps + 1))


def rewards(run_dir: Path) -> list[tuple[int, float]]:
    return [
        (row.step, row.reward_mean) for row in read_metrics(run_dir / "metrics.jsonl")
    ]


async def unbroken(
    session: TrainingSession, run_dir: Path, settings: TrainConfig
) -> Any:
    await train(session, TASKS, config=settings, run_dir=run_dir, progress=False)
    return rewards(run_dir)


@pytest.mark.parametrize("moment", ["between steps", "while sampling"])
async def test_an_interrupted_run_goes_on_without_losing_or_doubling(
    session: TrainingSession, tmp_path: Path, moment: str
) -> None:
    settings = config(session, steps=5, tasks_per_step=4, checkpoint_every=2)
    expected = await unbroken(session, tmp_path / "unbroken", settings)

    def interrupt(result: StepResult) -> None:
        if result.metrics.step == 3:
            if moment == "between steps":
                running.cancel()
            else:
                asyncio.get_running_loop().call_later(0.15, running.cancel)

    run_dir = tmp_path / "run"
    session.new_policy()
    running = asyncio.ensure_future(
        train(
            session,
            TASKS,
            config=settings,
            run_dir=run_dir,
            on_step=interrupt,
            progress=False,
        )
    )
    with pytest.raises(asyncio.CancelledError):
        await running
    done = len(read_metrics(run_dir / "metrics.jsonl"))
    # The checkpoint stands at the last recorded step, not at the last even one.
    assert read_resume_state(run_dir / "resume.json").next_step == done + 1
    result = await train(
        session, TASKS, config=settings, run_dir=run_dir, resume=True, progress=False
    )
    assert [row.step for row in result.metrics] == [1, 2, 3, 4, 5]
    assert [row.attempt for row in result.metrics] == [1] * done + [2] * (5 - done)
    assert rewards(run_dir) == expected
    trained = read_rollouts(run_dir / "rollouts.jsonl", phase="train")
    assert len(trained) == 5 * 16


async def test_a_crash_goes_back_to_the_last_checkpoint(
    session: TrainingSession, preset: ModelPreset, tmp_path: Path
) -> None:
    run_dir, saved = tmp_path / "run", tmp_path / "saved.json"
    settings = config(session, steps=4, tasks_per_step=4, checkpoint_every=2)

    def keep(result: StepResult) -> None:
        if result.metrics.step == 2:
            shutil.copy(run_dir / "resume.json", saved)

    await train(
        session, TASKS, config=settings, run_dir=run_dir, on_step=keep, progress=False
    )
    first = rewards(run_dir)
    # As a killed process leaves it: rows of steps 3 and 4, a checkpoint of step 2.
    shutil.copy(saved, run_dir / "resume.json")
    session.close()
    with connect(
        model=preset,
        runs_dir=tmp_path / "runs",
        task_runtime=LocalRuntime(env),
        quiet=True,
    ) as again:
        result = await train(
            again, TASKS, config=settings, run_dir=run_dir, resume=True, progress=False
        )
    assert [row.attempt for row in result.metrics] == [1, 1, 2, 2]
    assert rewards(run_dir) == first


async def test_an_error_in_the_callback_is_seen_and_loses_nothing(
    session: TrainingSession, tmp_path: Path
) -> None:
    run_dir, settings = tmp_path / "run", config(session, steps=3)

    def fail(result: StepResult) -> None:
        raise KeyError("plot")

    with pytest.raises(KeyError, match="plot"):
        await train(
            session,
            TASKS,
            config=settings,
            run_dir=run_dir,
            on_step=fail,
            progress=False,
        )
    assert read_resume_state(run_dir / "resume.json").next_step == 2


async def test_a_failure_in_step_one_can_be_resumed(
    session: TrainingSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(noise_policy._calls, "broken", 0)
    run_dir, settings = tmp_path / "run", config(session, steps=2)
    with pytest.raises(RolloutFailed):
        await train(
            session,
            [broken(1), broken(2)],
            config=settings,
            run_dir=run_dir,
            progress=False,
        )
    result = await train(
        session, TASKS, config=settings, run_dir=run_dir, resume=True, progress=False
    )
    assert [row.step for row in result.metrics] == [1, 2]


async def test_the_token_limit_ends_a_run_that_can_go_on(
    preset: ModelPreset, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"

    def opened(limit: int | None) -> TrainingSession:
        return connect(
            model=preset,
            runs_dir=tmp_path / "runs",
            task_runtime=LocalRuntime(env),
            token_limit=limit,
            quiet=True,
        )

    settings = TrainConfig.from_preset(preset, steps=6)
    with opened(2_000) as session:
        with pytest.raises(TokenLimitReached, match="token_limit=2,000"):
            await train(
                session, TASKS, config=settings, run_dir=run_dir, progress=False
            )
        assert session.usage.counts.total <= 2_000
    with opened(None) as session:
        result = await train(
            session,
            TASKS,
            config=settings,
            run_dir=run_dir,
            resume=True,
            progress=False,
        )
    assert [row.step for row in result.metrics] == [1, 2, 3, 4, 5, 6]


async def test_what_a_resume_refuses(
    session: TrainingSession, preset: ModelPreset, tmp_path: Path
) -> None:
    run_dir, settings = tmp_path / "run", config(session, steps=1)
    await train(session, TASKS, config=settings, run_dir=run_dir, progress=False)
    with pytest.raises(ValueError, match="resume=True needs run_dir"):
        await train(session, TASKS, config=settings, resume=True)
    with pytest.raises(ValueError, match="group_size=4, and the config now says 8"):
        await train(
            session,
            TASKS,
            config=config(session, group_size=8),
            run_dir=run_dir,
            resume=True,
        )
    other = dataclasses.replace(preset, name="other", base_model="local/other")
    with (
        connect(
            model=other,
            runs_dir=tmp_path / "runs",
            task_runtime=LocalRuntime(env),
            quiet=True,
        ) as wrong,
        pytest.raises(CheckpointError, match="'local/noise'.*'local/other'"),
    ):
        await train(wrong, TASKS, config=settings, run_dir=run_dir, resume=True)


async def test_a_pool_of_another_step_size_is_refused(session: TrainingSession) -> None:
    pool = TaskPool(TASKS, tasks_per_step=3, seed=0)
    with pytest.raises(ValueError, match="serves 3 tasks a step.*tasks_per_step=2"):
        await train(session, pool, config=config(session))


async def test_a_used_up_pool_is_noted(
    session: TrainingSession, tmp_path: Path
) -> None:
    result = await train(
        session,
        TASKS[:4],
        config=config(session, steps=3),
        run_dir=tmp_path / "run",
        progress=False,
    )
    notes = [row.note for row in result.metrics if row.updated]
    assert any(note is not None and "reshuffled" in note for note in notes)


# -- evaluation -------------------------------------------------------------------


async def test_greedy_evaluation_repeats(
    session: TrainingSession, tmp_path: Path
) -> None:
    sampler = session.new_sampler("policy-0000")
    first = await evaluate(session, TASKS, sampler=sampler, run_dir=tmp_path / "a")
    again = await evaluate(
        session, TASKS, snapshot=sampler.snapshot, seed=9, run_dir=tmp_path / "b"
    )
    assert [r.text for r in first.records] == [r.text for r in again.records]
    assert [r.task for r in first.records] == [task.slug for task in TASKS]
    assert first.snapshot == again.snapshot == sampler.snapshot


async def test_evaluation_arguments(session: TrainingSession) -> None:
    sampler = session.base_sampler()
    with pytest.raises(ValueError, match="not both"):
        await evaluate(session, TASKS, sampler=sampler, snapshot="x")
    with pytest.raises(CheckpointError, match="is a training checkpoint"):
        await evaluate(session, TASKS, snapshot=session.save_state("state-0000"))


async def test_a_resumed_run_never_reuses_a_name(
    session: TrainingSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three tries; the second dies before it has written a row."""
    run_dir, asked = tmp_path / "run", list[str]()
    named = session._unused
    monkeypatch.setattr(session, "_unused", lambda n: asked.append(n) or named(n))

    async def go(steps: int, stop: bool = False) -> None:
        def leave(result: StepResult) -> None:
            if stop:
                raise RuntimeError("stopped here")

        settings = config(session, steps=steps, checkpoint_every=1)
        await train(
            session,
            TASKS,
            config=settings,
            run_dir=run_dir,
            resume=True,
            on_step=leave,
            progress=False,
        )

    with pytest.raises(RuntimeError, match="stopped here"):
        await go(3, stop=True)
    session.usage.limit = session.usage.counts.total + 1  # no rollout fits
    with pytest.raises(TokenLimitReached):
        await go(3)
    session.usage.limit = None
    await go(3)
    assert [row.attempt for row in read_metrics(run_dir / "metrics.jsonl")] == [1, 3, 3]
    assert len(asked) == len(set(asked))
    assert {"policy-0000", "state-0001", "policy-0001-a2", "policy-0001-a3"} <= set(
        asked
    )
    assert {"state-0002-a3", "final-state-a3", "final-a3"} <= set(asked)
