"""Calibration: sampling tasks before training, and reading what it says.

:func:`calibrate` samples. Around it stand the settings that a slider or a parameter
cell fills in, the table that compares calibrations, and the reading of one
calibration by task and by operand range.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Protocol

from rlhelpers.advantages import FLAT_SPREAD, sample_std, within_group_reward_std
from rlhelpers.analysis import (
    CalibrationVerdict,
    OutcomeSummary,
    summarize_outcomes,
)
from rlhelpers.metrics import RolloutRecord
from rlhelpers.recording import (
    Place,
    make_run_dir,
    need_tasks,
    roll_out,
    verdict_of,
)
from rlhelpers.sampling import PolicySampler, RolloutPlan, SamplingSettings
from rlhelpers.service import TrainingSession
from rlhelpers.tasks import make_taskset

if TYPE_CHECKING:
    from hud.eval import Taskset
    from hud.eval.task import Task

Band = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class CalibrationSettings:
    """One calibration: which tasks, how many attempts, how long a reply may be.

    Attributes:
        a, b: Smallest and largest first and second operand, both included.
        tasks: How many tasks; each makes one group.
        group_size: Rollouts per task, at least 2, or no spread can be seen.
        max_tokens: Most tokens of one reply.
        seed: Of the tasks drawn and of the rollouts.

    Raises:
        ValueError: A value cannot work; the message names it and the remedy.

    Example:
        >>> CalibrationSettings(a=(10, 99), b=(10, 99), max_tokens=160).rollouts
        24
    """

    a: Band
    b: Band
    max_tokens: int
    tasks: int = 6
    group_size: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise ValueError(
                f"group_size must be at least 2, got {self.group_size}: one rollout of "
                "a task shows no spread"
            )
        for name in ("tasks", "max_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name} must be at least 1, got {getattr(self, name)}"
                )

    @property
    def rollouts(self) -> int:
        """Tasks times group size."""
        return self.tasks * self.group_size

    def token_bound(self, prompt_tokens: int) -> int:
        """Most tokens that this calibration can use, prompts included.

        Args:
            prompt_tokens: Length of one rendered prompt.
        """
        return self.rollouts * (prompt_tokens + self.max_tokens)

    def draw_tasks(self) -> Taskset:
        """The tasks to calibrate on; the same settings give the same tasks.

        Raises:
            ValueError: A range is inverted or holds fewer pairs than ``tasks``.
        """
        return make_taskset(
            self.tasks,
            min_a=self.a[0],
            max_a=self.a[1],
            min_b=self.b[0],
            max_b=self.b[1],
            seed=self.seed,
            name="calibration",
        )


@dataclass
class CalibrationHistory:
    """Calibrations one under the other, to compare; shows itself as a table."""

    entries: list[tuple[CalibrationSettings, CalibrationVerdict]] = field(
        default_factory=list
    )

    HEADER = (
        "a",
        "b",
        "group size",
        "max tokens",
        "mean reward",
        "within-group spread",
        "groups kept",
        "cut off",
        "verdict",
    )

    def add(self, settings: CalibrationSettings, verdict: CalibrationVerdict) -> None:
        """Append one calibration."""
        self.entries.append((settings, verdict))

    def rows(self) -> list[tuple[str, ...]]:
        """The table's cells as text, oldest calibration first."""
        return [
            (
                f"{settings.a[0]} to {settings.a[1]}",
                f"{settings.b[0]} to {settings.b[1]}",
                str(settings.group_size),
                str(settings.max_tokens),
                f"{verdict.reward_mean:.2f}",
                f"{verdict.within_group_std:.2f}",
                f"{verdict.kept_groups} of {verdict.groups}",
                f"{verdict.outcomes.token_limit} of {verdict.outcomes.n}",
                verdict.headline.rstrip("."),
            )
            for settings, verdict in self.entries
        ]

    def _repr_html_(self) -> str:
        def row(cells: Sequence[str], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{escape(c)}</{tag}>" for c in cells)

        lines = [row(self.HEADER, "th"), *(row(cells, "td") for cells in self.rows())]
        return "<table>" + "</tr>\n".join(lines) + "</tr></table>"

    def __repr__(self) -> str:
        table = [self.HEADER, *self.rows()]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(w) for cell, w in zip(cells, widths, strict=True))
            for cells in table
        )


class GroupedRollout(Protocol):
    """What is read from a rollout record here."""

    @property
    def task(self) -> str: ...
    @property
    def reward(self) -> float: ...


@dataclass(frozen=True)
class GroupSummary:
    """A set of groups in four numbers.

    Attributes:
        groups: How many.
        kept: How many of them have a reward spread.
        reward_mean: Mean reward of all rollouts.
        within_group_std: Mean over groups of the sample standard deviation.
    """

    groups: int
    kept: int
    reward_mean: float
    within_group_std: float

    @property
    def flat_share(self) -> float:
        """Share of groups that teach nothing, 0 to 1."""
        return 1 - self.kept / self.groups


def summarize_groups(
    records: Iterable[GroupedRollout], *, group_size: int | None = None
) -> GroupSummary:
    """Group rollouts by task and count the groups that can teach.

    Args:
        records: Rollouts; those of one task form a group.
        group_size: Cut every group into groups of this size, to see what smaller
            ones would have shown; what does not fill a group is left out.

    Raises:
        ValueError: There are no rollouts, or no group is large enough.
    """
    by_task: dict[str, list[float]] = {}
    for record in records:
        by_task.setdefault(record.task, []).append(float(record.reward))
    groups = [
        rewards[start : start + size]
        for rewards in by_task.values()
        for size in [group_size or len(rewards)]
        for start in range(0, len(rewards) - size + 1, size)
    ]
    if not groups:
        raise ValueError(
            "no group to summarise: calibrate first, with groups of at least "
            f"{group_size or 1}"
        )
    spreads = [sample_std(rewards) for rewards in groups]
    return GroupSummary(
        groups=len(groups),
        kept=sum(spread >= FLAT_SPREAD for spread in spreads),
        reward_mean=fmean(reward for rewards in groups for reward in rewards),
        within_group_std=fmean(spreads),
    )


def summarize_by_range(
    records: Sequence[RolloutRecord], bands: Sequence[Band]
) -> dict[tuple[Band, Band], GroupSummary]:
    """Read one calibration over many operand ranges, range by range.

    Args:
        records: Rollouts of multiplication tasks.
        bands: Ranges that do not overlap; a rollout belongs to the band of its ``a``
            and that of its ``b``.

    Returns:
        (band of a, band of b) → its summary, for those that have rollouts.

    Raises:
        ValueError: A rollout's operand lies in none of the bands.
    """
    cells: dict[tuple[Band, Band], list[RolloutRecord]] = {}
    for record in records:
        place = (_band(record.args["a"], bands), _band(record.args["b"], bands))
        cells.setdefault(place, []).append(record)
    return {place: summarize_groups(rollouts) for place, rollouts in cells.items()}


def _band(operand: int, bands: Sequence[Band]) -> Band:
    for low, high in bands:
        if low <= operand <= high:
            return low, high
    raise ValueError(f"operand {operand} lies in none of the ranges {list(bands)}")


@dataclass(frozen=True)
class CalibrationResult:
    """What a calibration found.

    Attributes:
        verdict: Whether there is anything to learn from, and why not; None for tasks
            without outcome classes.
        reward_mean: Mean reward of all rollouts.
        within_group_std: Mean over groups of the sample standard deviation.
        token_limit_share: Share of rollouts that the token limit cut off.
        records: Every rollout, task by task.
        run_dir: Where they are written.
    """

    verdict: CalibrationVerdict | None
    reward_mean: float
    within_group_std: float
    token_limit_share: float
    records: tuple[RolloutRecord, ...]
    run_dir: Path

    @property
    def outcomes(self) -> OutcomeSummary:
        """Outcome counts, token-limit hits and mean output tokens."""
        return summarize_outcomes(self.records)

    def samples(self, count: int = 4) -> list[RolloutRecord]:
        """Some rollouts to read beside their rewards, both kinds where both exist."""
        good = [record for record in self.records if record.reward > 0]
        bad = [record for record in self.records if record.reward <= 0]
        chosen = bad[: max(count // 2, count - len(good))]
        return [*chosen, *good[: count - len(chosen)]]


async def calibrate(
    session: TrainingSession,
    tasks: Taskset | Sequence[Task],
    *,
    group_size: int = 4,
    settings: SamplingSettings | None = None,
    sampler: PolicySampler | None = None,
    seed: int = 0,
    run_dir: str | Path | None = None,
) -> CalibrationResult:
    """Sample tasks before training, to see whether there is anything to learn from.

    Args:
        session: An open session.
        tasks: The tasks; each makes one group.
        group_size: Rollouts per task.
        settings: How to sample; default: as in training, with the preset's limit.
        sampler: What to sample; default: the policy as it is now.
        seed: Seed of the rollouts.
        run_dir: Where rollouts are written; default: a new folder under ``runs``.

    Raises:
        RolloutFailed: A rollout failed; the others are on disk.
        ValueError: No tasks, or a group of less than 1.

    Example:
        >>> result = await calibrate(session, tasks)  # doctest: +SKIP
        >>> print(result.verdict.headline)  # doctest: +SKIP
    """
    chosen = need_tasks(tasks, "calibrate")
    if group_size < 1:
        raise ValueError(f"group_size must be at least 1, got {group_size}")
    place = Place(make_run_dir(session, run_dir, "calibrate"))
    plan = RolloutPlan(
        phase="calibrate",
        step=0,
        seed=seed,
        group_size=group_size,
        settings=settings or SamplingSettings(session.preset.max_tokens),
        job_id=uuid.uuid4().hex,
    )
    if sampler is None:
        sampler = await asyncio.to_thread(session.current_sampler)
    runs, records = await roll_out(session, sampler, chosen, plan=plan, place=place)
    return CalibrationResult(
        verdict=verdict_of(records),
        reward_mean=sum(record.reward for record in records) / len(records),
        within_group_std=within_group_reward_std(runs),
        token_limit_share=sum(record.token_limit for record in records) / len(records),
        records=tuple(records),
        run_dir=place.run_dir,
    )
