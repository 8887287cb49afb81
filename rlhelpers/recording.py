"""Rollouts written down: what was collected is on disk before it is judged.

Calibration, training, evaluation and the watch prompts all collect rollouts through
:func:`roll_out`, which appends one row for each to the run's folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlhelpers.advantages import (
    Scale,
    group_relative_advantages,
    group_runs,
    run_reward,
)
from rlhelpers.analysis import CalibrationVerdict, calibration_verdict
from rlhelpers.datums import RolloutFailed, check_run
from rlhelpers.metrics import RolloutRecord, append_rollouts
from rlhelpers.sampling import (
    PolicySampler,
    RolloutPlan,
    collect_rollouts,
    to_record,
)
from rlhelpers.service import TrainingSession, keep_spans_in

if TYPE_CHECKING:
    from hud.eval import Taskset
    from hud.eval.run import Run
    from hud.eval.task import Task


@dataclass(frozen=True)
class Place:
    """Where a phase writes, and how its rows are labelled.

    Attributes:
        run_dir: The run's folder; its name is the run's id.
        attempt: Which try of a step this is, from 1.
    """

    run_dir: Path
    attempt: int = 1

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self.run_dir.name

    @property
    def tag(self) -> str | None:
        """Told apart in the names of checkpoints: a resumed run never reuses one."""
        return None if self.attempt == 1 else f"a{self.attempt}"

    @property
    def metrics(self) -> Path:
        """One row per step."""
        return self.run_dir / "metrics.jsonl"

    @property
    def resume(self) -> Path:
        """What a resume needs."""
        return self.run_dir / "resume.json"


def make_run_dir(
    session: TrainingSession, run_dir: str | Path | None, label: str
) -> Path:
    """``run_dir``, made if it does not exist; None: a new one under ``runs``."""
    folder = session.new_run_dir(label) if run_dir is None else Path(run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _is_valid(run: Run) -> bool:
    try:
        check_run(run)
        run_reward(run)
    except (RolloutFailed, ValueError):
        return False
    return True


def _records(
    runs: Sequence[Run], tasks: Sequence[Task], place: Place, scale: Scale | None
) -> list[RolloutRecord]:
    """Rows of the valid runs, with advantages where ``scale`` names a formula."""
    valid = [run for run in runs if _is_valid(run)]
    advantages: dict[int, float] = {}
    # With a failed run no group is complete, and nothing is trained on.
    if scale is not None and len(valid) == len(runs):
        for group in group_runs(valid).values():
            rewards = [run.grade.reward for run in group]
            values = group_relative_advantages(rewards, scale=scale)
            if any(values):
                advantages |= dict(zip(map(id, group), values, strict=True))
    return [
        to_record(
            run,
            tasks[int(str(run.trace.extra["task_index"]))],
            run_id=place.run_id,
            attempt=place.attempt,
            advantage=advantages.get(id(run)),
        )
        for run in valid
    ]


async def roll_out(
    session: TrainingSession,
    sampler: PolicySampler,
    tasks: Sequence[Task],
    *,
    plan: RolloutPlan,
    place: Place,
    scale: Scale | None = None,
    file: str = "rollouts.jsonl",
) -> tuple[list[Run], list[RolloutRecord]]:
    """Collect rollouts, writing what was collected before judging it.

    Returns:
        The HUD runs, and their rows in ``file``, both task by task.

    Raises:
        RolloutFailed: A rollout failed; the rows of the others are written.
    """
    keep_spans_in(place.run_dir)
    written: list[RolloutRecord] = []

    def save(runs: list[Run]) -> None:
        written.extend(_records(runs, tasks, place, scale))
        append_rollouts(place.run_dir / file, written)

    runs = await collect_rollouts(
        sampler,
        tasks,
        plan=plan,
        runtime=await session.runtime(),
        save=save,
        agent_type=session.agent_type,
    )
    return runs, written


def verdict_of(records: Sequence[RolloutRecord]) -> CalibrationVerdict | None:
    """The calibration verdict, or None for tasks without outcome classes."""
    if any(record.outcome is None for record in records):
        return None
    return calibration_verdict(records)


def need_tasks(tasks: Taskset | Sequence[Task], what: str) -> tuple[Task, ...]:
    """``tasks`` as a tuple; ValueError in the name of ``what`` if there are none."""
    chosen = tuple(tasks)
    if not chosen:
        raise ValueError(f"{what} got no tasks; make a taskset with at least one")
    return chosen
