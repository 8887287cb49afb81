"""Finding the run that a later notebook reads, or making one."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest

from rlhelpers.metrics import ResumeState, StepMetrics
from rlhelpers.models import PRESETS
from rlhelpers.runs import FinishedRun, find_run, short_run
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
