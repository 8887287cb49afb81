"""Finding the run that a later notebook reads, or making one."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rlhelpers.checkpoints import CheckpointError
from rlhelpers.metrics import ResumeState, StepMetrics
from rlhelpers.models import PRESETS
from rlhelpers.runs import (
    FinishedRun,
    find_run,
    operands_around,
    published_run,
    short_run,
    unseen_tasks,
)
from rlhelpers.service import connect
from rlhelpers.training import TrainConfig


@pytest.fixture
async def run(preset: Any, tmp_path: Path) -> FinishedRun:
    with connect(model=preset, runs_dir=tmp_path, quiet=True) as session:
        return await short_run(session, steps=2, evaluation_tasks=3, progress=False)


async def test_a_short_run_is_found_again(
    run: FinishedRun, preset: Any, tmp_path: Path
) -> None:
    found = find_run(tmp_path, preset)
    assert found == run
    assert run.run_id.startswith("short-run-")
    assert (run.steps, run.max_tokens) == (2, 16)
    assert [r.task for r in run.before] == [r.task for r in run.after]
    assert [task.slug for task in run.held_out] == [r.task for r in run.before]
    assert len(run.held_out) == 3
    assert str(run) == f"{run.run_id}: 2 steps on noise, 3 held-out tasks"


async def test_held_out_tasks_were_not_trained_on(
    run: FinishedRun, tmp_path: Path
) -> None:
    from rlhelpers.metrics import read_rollouts

    rows = read_rollouts(run.run_dir / "rollouts.jsonl", phase="train")
    trained = {frozenset(row.args.values()) for row in rows}
    held = {frozenset(row.args.values()) for row in run.before}
    assert len(trained) == 4
    assert not trained & held


async def test_a_full_run_goes_before_a_newer_short_one(
    run: FinishedRun, preset: Any, tmp_path: Path
) -> None:
    full = tmp_path / "full-run-20200101-000000-abcd"
    shutil.copytree(run.run_dir, full)
    found = find_run(tmp_path, preset)
    assert found is not None
    assert found.run_dir == full
    (full / "metrics.jsonl").write_text("{", encoding="utf-8")  # damaged: passed over
    found = find_run(tmp_path, preset)
    assert found is not None
    assert found.run_dir == run.run_dir


async def test_unfinished_and_foreign_runs_are_passed_over(
    run: FinishedRun, preset: Any, tmp_path: Path
) -> None:
    assert find_run(tmp_path, PRESETS["tiny-arithmetic"]) is None
    assert find_run(tmp_path / "nowhere", preset) is None
    resume = run.run_dir / "resume.json"
    resume.write_text(
        resume.read_text(encoding="utf-8").replace('"next_step": 3', '"next_step": 2'),
        encoding="utf-8",
    )
    assert find_run(tmp_path, preset) is None


async def test_which_run_counts_as_full(run: FinishedRun, preset: Any) -> None:
    same = dataclasses.replace(preset, steps=2, evaluation_tasks=3)
    assert run.is_full(same)
    assert not run.is_full(preset)  # four steps
    assert not run.is_full(dataclasses.replace(same, evaluation_tasks=4))
    assert not run.is_full(dataclasses.replace(same, learning_rate=1e-3))
    assert not run.is_full(dataclasses.replace(same, operands=(10, 20)))


# -- other tasks for the same policy ----------------------------------------------


@pytest.mark.parametrize(
    ("trained", "ranges"),
    [
        ((10, 99), [(1, 9), (10, 99), (100, 300), (100, 999)]),
        ((1, 9), [(1, 9), (10, 30), (10, 99)]),
        ((1000, 9999), [(1, 999), (1000, 9999), (10000, 30000), (10000, 99999)]),
    ],
)
def test_ranges_around_the_trained_one(
    trained: tuple[int, int], ranges: list[tuple[int, int]]
) -> None:
    assert operands_around(trained) == ranges


def test_ranges_around_nonsense_are_refused() -> None:
    with pytest.raises(ValueError, match="9 to 1"):
        operands_around((9, 1))


async def test_unseen_tasks_were_not_trained_on(run: FinishedRun) -> None:
    trained = sorted(run.trained_pairs)
    assert len(trained) == 4  # two steps of two tasks
    assert all(low <= high for low, high in trained)
    tasks = unseen_tasks(run, (10, 99), 4095, seed=1)
    pairs = {tuple(sorted(task.args.values())) for task in tasks}
    assert len(tasks) == len(pairs) == 4095 - 4  # of 90 × 91 / 2 pairs
    assert not pairs & run.trained_pairs
    few = [task.slug for task in unseen_tasks(run, (10, 99), 5, seed=1)]
    assert few == [task.slug for task in unseen_tasks(run, (10, 99), 5, seed=1)]
    assert len(few) == 5
    assert len(unseen_tasks(run, (1, 9), 64, seed=1)) == 45  # 9 × 10 / 2
    with pytest.raises(ValueError, match="0 tasks"):
        unseen_tasks(run, (1, 9), 0, seed=1)
    squares = dataclasses.replace(run, run_dir=run.run_dir.with_name("squares"))
    squares.run_dir.mkdir()
    rows = (run.run_dir / "rollouts.jsonl").read_text(encoding="utf-8").splitlines()
    row = next(row for row in map(json.loads, rows) if row["phase"] == "train")
    row["args"] = {"a": 3, "b": 3}
    (squares.run_dir / "rollouts.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match="3 to 3 were asked for, and 0 were not"):
        unseen_tasks(squares, (3, 3), 1, seed=1)


async def test_a_later_session_resumes_the_policy_of_the_run(
    run: FinishedRun, preset: Any, tmp_path: Path
) -> None:
    with connect(model=preset, runs_dir=tmp_path, quiet=True) as session:
        session.resume(run.state.checkpoint)
        from rlhelpers.evaluation import evaluate
        from rlhelpers.sampling import SamplingSettings

        again = await evaluate(
            session,
            run.held_out,
            sampler=session.new_sampler("policy-0002"),
            settings=SamplingSettings.greedy(run.max_tokens),
        )
    assert [r.text for r in again.records] == [r.text for r in run.after]


async def test_a_run_without_its_service_state_says_so(
    run: FinishedRun, preset: Any, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(run.run_dir, elsewhere / run.run_id)
    copied = find_run(elsewhere, preset)
    assert copied is not None
    with (
        connect(model=preset, runs_dir=elsewhere, quiet=True) as session,
        pytest.raises(CheckpointError, match="runs folder that saved them"),
    ):
        session.resume(copied.state.checkpoint)


# -- the published run ------------------------------------------------------------


def test_published_figures_are_the_quoted_ones() -> None:
    run = published_run()
    assert (run.model, run.training_rollouts) == ("Qwen 3.8 27B", 512)
    before, after = run.before, run.after
    assert before.n == after.n == 128
    assert [f"{side.accuracy:.1%}" for side in (before, after)] == ["78.1%", "98.4%"]
    assert (before.invalid_final_line, after.invalid_final_line) == (19, 0)
    assert (before.wrong_integer, after.wrong_integer) == (9, 2)
    assert (before.token_limit, after.token_limit) == (20, 0)
    assert (before.mean_output_tokens, after.mean_output_tokens) == (1085, 704)


def test_damaged_published_figures_are_named(tmp_path: Path) -> None:
    from rlhelpers import runs

    values = json.loads(runs._PUBLISHED.read_text(encoding="utf-8"))
    path = tmp_path / "other.json"
    values["after"]["correct"] = 127
    path.write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(ValueError, match=r"other\.json, after: .* 129, not to the 128"):
        published_run(path)
    del values["after"]
    path.write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(ValueError, match="not a published run: 'after'"):
        published_run(path)


def test_checkpoints_of_an_interrupted_run(tmp_path: Path) -> None:
    """Steps 1 to 4 ran under one id of the service, 5 to 7 under another."""
    first, second = "local/run-" + "a" * 32, "local/run-" + "b" * 32
    metrics = tuple(
        StepMetrics.example(
            step=step,
            snapshot=f"{first if step <= 4 else second}/policy-{step - 1:04d}-0a1b2c3d",
        )
        for step in range(1, 8)
    )
    state = ResumeState(
        run_id="full-run",
        next_step=8,
        seed=0,
        pool_position=7,
        checkpoint=f"{second}/final-state",
        base_model="local/noise",
        model="noise",
        config={"steps": 7, "checkpoint_every": 2},
    )
    assert FinishedRun(tmp_path, state, metrics, (), ()).checkpoints == {
        2: f"{first}/state-0002",
        4: f"{first}/state-0004",
        6: f"{second}/state-0006",
        7: f"{second}/final-state",
    }


async def test_every_checkpoint_of_a_run_can_be_resumed(
    preset: Any, tmp_path: Path
) -> None:
    config = TrainConfig.from_preset(preset, steps=3, checkpoint_every=1)
    with connect(model=preset, runs_dir=tmp_path, quiet=True) as session:
        run = await short_run(
            session, config=config, evaluation_tasks=3, progress=False
        )
        assert list(run.checkpoints) == [1, 2, 3]
        for path in run.checkpoints.values():
            session.resume(path)
