"""Evaluation: one greedy rollout of every held-out task."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlhelpers.analysis import OutcomeSummary, summarize_outcomes
from rlhelpers.metrics import RolloutRecord
from rlhelpers.recording import Place, make_run_dir, need_tasks, roll_out
from rlhelpers.sampling import PolicySampler, RolloutPlan, SamplingSettings
from rlhelpers.service import TrainingSession

if TYPE_CHECKING:
    from hud.eval import Taskset
    from hud.eval.task import Task


@dataclass(frozen=True)
class EvaluationResult:
    """One greedy rollout of every held-out task.

    Attributes:
        phase: The name it was recorded under, such as "before" or "after".
        snapshot: What was evaluated.
        records: One rollout per task, in task order.
        run_dir: Where they are written.
    """

    phase: str
    snapshot: str
    records: tuple[RolloutRecord, ...]
    run_dir: Path

    @property
    def outcomes(self) -> OutcomeSummary:
        """Outcome counts, token-limit hits and mean output tokens."""
        return summarize_outcomes(self.records)

    @property
    def reward_mean(self) -> float:
        """Mean reward; with rewards of 0 and 1 this is the accuracy."""
        return sum(record.reward for record in self.records) / len(self.records)


async def evaluate(
    session: TrainingSession,
    tasks: Taskset | Sequence[Task],
    *,
    phase: str = "evaluate",
    sampler: PolicySampler | None = None,
    snapshot: str | None = None,
    settings: SamplingSettings | None = None,
    step: int = 0,
    seed: int = 0,
    run_dir: str | Path | None = None,
) -> EvaluationResult:
    """Roll out every task once, greedily unless told otherwise.

    Args:
        session: An open session.
        tasks: Held-out tasks.
        phase: Name in the records, such as "before" or "after".
        sampler, snapshot: What to evaluate: an open sampler, or the path of a sampler
            checkpoint of this session; default: the policy as it is now.
        settings: How to sample; default: greedy, with the preset's token limit.
        step: Updates behind the evaluated weights, for the records.
        seed: Seed of the rollouts; without effect on greedy ones.
        run_dir: Where rollouts are written; default: a new folder under ``runs``.

    Raises:
        CheckpointError: ``snapshot`` is not a sampler checkpoint.
        RolloutFailed: A rollout failed; the others are on disk.
        ValueError: No tasks, or both ``sampler`` and ``snapshot``.
    """
    chosen = need_tasks(tasks, "evaluate")
    if sampler is not None and snapshot is not None:
        raise ValueError("give evaluate either a sampler or a snapshot, not both")
    if snapshot is not None:
        sampler = await asyncio.to_thread(session.open_sampler, snapshot)
    elif sampler is None:
        sampler = await asyncio.to_thread(session.current_sampler)
    place = Place(make_run_dir(session, run_dir, phase))
    plan = RolloutPlan(
        phase=phase,
        step=step,
        seed=seed,
        group_size=1,
        settings=settings or SamplingSettings.greedy(session.preset.max_tokens),
        job_id=uuid.uuid4().hex,
    )
    _, records = await roll_out(session, sampler, chosen, plan=plan, place=place)
    return EvaluationResult(phase, sampler.snapshot, tuple(records), place.run_dir)
