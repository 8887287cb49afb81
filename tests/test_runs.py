"""Finding the run that a later notebook reads, or making one."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest

from rlhelpers.models import PRESETS
from rlhelpers.runs import FinishedRun, find_run, short_run
from rlhelpers.service import connect


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
