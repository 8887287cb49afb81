"""Group-relative advantages: which rollouts of one prompt did better than the rest.

The variant this course uses, said once: (reward − group mean) / sample standard
deviation (n − 1). The group mean as baseline and the division by the spread are
those of GRPO (Shao et al., 2024, "DeepSeekMath"); ``scale="none"`` leaves the
division out, as Dr. GRPO does (Liu et al., 2025). Other libraries divide by the
population standard deviation (n), which gives larger numbers for the same rewards.

Pure: no I/O, no service.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, Protocol, TypeVar

#: Below this standard deviation a group counts as flat. Rewards are of order 1, so
#: a smaller spread is rounding, and dividing by it would blow the rounding up.
FLAT_SPREAD = 1e-8

Scale = Literal["std", "none"]


class HasReward(Protocol):
    """The part of a HUD ``Grade`` that is read here."""

    @property
    def reward(self) -> float: ...


class GradedRun(Protocol):
    """The part of a HUD ``Run`` that is read here; a stand-in in a toy example works.

    ``group_id`` names the prompt's group, ``grade.reward`` the score.
    """

    @property
    def group_id(self) -> Any: ...
    @property
    def grade(self) -> HasReward: ...


RunT = TypeVar("RunT", bound=GradedRun)


def group_relative_advantages(
    rewards: Sequence[float], *, scale: Scale = "std"
) -> list[float]:
    """Turn the rewards of ONE group (one prompt) into advantages that sum to zero.

    Args:
        rewards: One reward per rollout of the group, length G.
        scale: ``"std"`` divides the centred rewards by the sample standard deviation
            (n − 1); ``"none"`` only centres them.

    Returns:
        G advantages, in the order given. All zero if the group is flat (spread below
        ``FLAT_SPREAD``) or has fewer than two rollouts: there is nothing to compare.

    Raises:
        ValueError: A reward is missing or not finite, or ``scale`` is unknown.

    >>> group_relative_advantages([1, 0, 0, 0])
    [1.5, -0.5, -0.5, -0.5]
    >>> group_relative_advantages([0.1, 0.1, 0.1])
    [0.0, 0.0, 0.0]
    """
    if scale not in ("std", "none"):
        raise ValueError(
            f"scale is {scale!r}; use 'std' (divide by the sample standard "
            "deviation) or 'none' (centre only)"
        )
    values = [finite_reward(r, f"reward {i}") for i, r in enumerate(rewards)]
    spread = sample_std(values)
    if spread < FLAT_SPREAD:
        return [0.0] * len(values)
    centred = _centred(values)
    return centred if scale == "none" else [value / spread for value in centred]


def within_group_reward_std(runs: Iterable[GradedRun]) -> float:
    """Mean over groups of the sample standard deviation of the group's rewards.

    This, not the spread over the whole batch, is what a group-relative update can
    learn from: ``[1,1,1,1]`` and ``[0,0,0,0]`` differ a lot, yet give 0.0 here. A
    group of one has nothing to compare and counts as 0, like a flat group. No runs
    give 0.0.

    Raises:
        ValueError: A run has no group id, or its reward is missing or not finite.
    """
    groups = group_runs(runs)
    if not groups:
        return 0.0
    spreads = (
        sample_std([run_reward(run) for run in group]) for group in groups.values()
    )
    return math.fsum(spreads) / len(groups)


def sample_std(values: Sequence[float]) -> float:
    """Sample standard deviation (n − 1), exactly 0.0 for equal values or under two.

    Equality is tested first: ten times 0.1 does not average to 0.1 in floating
    point, and the textbook formula would then report a spread that is not there.
    """
    if len(values) < 2 or min(values) == max(values):
        return 0.0
    # hypot scales before it squares, so large rewards do not overflow.
    return math.hypot(*_centred(values)) / math.sqrt(len(values) - 1)


def group_runs(runs: Iterable[RunT]) -> dict[Any, list[RunT]]:
    """Collect runs by ``group_id``, groups and runs in order of first appearance."""
    groups: dict[Any, list[RunT]] = {}
    for run in runs:
        if run.group_id is None:
            raise ValueError(
                f"run of task {task_name(run)!r} has no group_id: collect rollouts "
                "with a group, so that attempts at one prompt can be compared"
            )
        groups.setdefault(run.group_id, []).append(run)
    return groups


def run_reward(run: GradedRun) -> float:
    """The run's reward as a finite float; the error names the task."""
    return finite_reward(run.grade.reward, f"reward of task {task_name(run)!r}")


def task_name(run: object) -> str:
    """The run's task slug, or its task id, for messages."""
    return str(getattr(run, "slug", None) or getattr(run, "task_id", None) or "unnamed")


def finite_reward(value: Any, name: str) -> float:
    """``value`` as a float, or a ``ValueError`` that names it."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, str) or not math.isfinite(number):
        raise ValueError(
            f"{name} is {value!r}, not a finite number: a rollout without a reward "
            "has failed and must not be trained on; fix the grader or rerun it"
        )
    return number


def _centred(values: Sequence[float]) -> list[float]:
    mean = math.fsum(values) / len(values)
    return [value - mean for value in values]
