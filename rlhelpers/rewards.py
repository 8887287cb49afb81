"""Rewards: testing one, and grading saved rollouts again with another.

A grader is a function of a reply and the right answer. Before it is trained on it is
held against labelled answers (:func:`misranked`); afterwards the texts of a run can be
graded again without sampling (:func:`regrade`), to see what another reward would have
taught. How a policy is trained on a grader of one's own:
:meth:`rlhelpers.service.TrainingSession.graded_by`.

Pure: no I/O, no service.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Protocol, TypeVar

from rlhelpers.advantages import (
    Scale,
    finite_reward,
    group_relative_advantages,
    sample_std,
)
from rlhelpers.analysis import LABELS, OUTCOMES
from rlhelpers.metrics import RolloutRecord
from rlhelpers.tables import markdown_table

#: (reply, right answer) -> a number, or a HUD ``EvaluationResult`` with one.
Grader = Callable[[Any, Any], Any]


class Labelled(Protocol):
    """A reply whose outcome a person has decided."""

    @property
    def answer(self) -> str | None: ...
    @property
    def expected(self) -> int: ...
    @property
    def outcome(self) -> str: ...


LabelledT = TypeVar("LabelledT", bound=Labelled)


def grader_name(grader: Grader) -> str:
    """What a grader is called in messages and names.

    >>> grader_name(len)
    'len'
    """
    return str(getattr(grader, "__name__", type(grader).__name__))


def reward_of(grader: Grader, answer: object, expected: object) -> float:
    """Grade one reply; the reward is a finite number or an error.

    Args:
        grader: Returns a number, or an object with the number in ``reward``.
        answer: The reply; ``None`` is no reply.
        expected: The right answer.

    Raises:
        ValueError: The grader returned nothing, NaN or infinity; it is named.

    >>> reward_of(lambda answer, expected: answer == str(expected), "42", 42)
    1.0
    """
    result = grader(answer, expected)
    reward = getattr(result, "reward", result)
    return finite_reward(reward, f"the reward of grader {grader_name(grader)!r}")


def misranked(
    grader: Grader, samples: Iterable[LabelledT]
) -> list[tuple[LabelledT, LabelledT]]:
    """Pairs of a right and a wrong reply where the right one does not earn more.

    The unit test of any reward, graded ones included: a policy climbs to whatever
    earns most, so every right reply has to earn more than every wrong one.

    Args:
        grader: The reward to test.
        samples: Labelled replies, as from :func:`rlhelpers.checks.labelled_answers`.

    Returns:
        ``(right, wrong)`` for each pair in the wrong order, or level; empty if the
        grader passes.

    Raises:
        ValueError: A reward is missing or not finite, or one kind of sample is missing.
    """
    graded = [(s, reward_of(grader, s.answer, s.expected)) for s in samples]
    right = [pair for pair in graded if pair[0].outcome == "correct"]
    wrong = [pair for pair in graded if pair[0].outcome != "correct"]
    if not right or not wrong:
        raise ValueError(
            f"{len(right)} right and {len(wrong)} wrong replies: a reward is tested on "
            "pairs of both; label at least one of each"
        )
    return [
        (good, bad)
        for good, earned in right
        for bad, paid in wrong
        if not earned > paid
    ]


# Grading again


def regrade(
    rollouts: Iterable[RolloutRecord], grader: Grader, *, scale: Scale = "std"
) -> list[RolloutRecord]:
    """Give saved rollouts another grader's rewards, and the advantages these make.

    Nothing is sampled: the texts are those that were written down. The outcome stays
    as it was, because it says what the reply is and not what is paid for it.

    Args:
        rollouts: Rows of ``rollouts.jsonl``.
        grader: The other reward.
        scale: See :func:`~rlhelpers.advantages.group_relative_advantages`.

    Returns:
        New rows in the same order. ``advantage`` is None where the group is flat
        under this grader: such rollouts would not be trained on.

    Raises:
        ValueError: A reward is missing or not finite; names task and rollout.
    """
    graded = [replace(row, reward=_again(row, grader)) for row in rollouts]
    advantages: dict[int, float] = {}
    for group in _groups(graded):
        values = group_relative_advantages([row.reward for row in group], scale=scale)
        if any(values):
            advantages |= dict(zip(map(id, group), values, strict=True))
    return [replace(row, advantage=advantages.get(id(row))) for row in graded]


def _again(row: RolloutRecord, grader: Grader) -> float:
    try:
        return reward_of(grader, row.text, row.expected)
    except ValueError as error:
        raise ValueError(
            f"task {row.task!r}, rollout {row.rollout_index}: {error}"
        ) from error


def _groups(rollouts: Iterable[RolloutRecord]) -> list[list[RolloutRecord]]:
    """Rollouts of one prompt in one batch, in order of first appearance."""
    groups: dict[Hashable, list[RolloutRecord]] = {}
    for row in rollouts:
        batch = (row.run_id, row.phase, row.step, row.attempt)
        groups.setdefault((*batch, row.task_index, row.task), []).append(row)
    return list(groups.values())


@dataclass(frozen=True)
class RewardSummary:
    """What a reward says of some rollouts, and what it would teach.

    Attributes:
        rollouts, groups: How many.
        mean: Mean reward.
        within_group_std: Mean over groups of the sample standard deviation.
        kept_groups: Groups with a reward spread: those that can teach.
        push: Outcome → mean advantage of its rollouts, flat groups counting 0; None
            where no rollout has the outcome.
        wrong_pushed_up: Rollouts that are not right and have an advantage above 0.
    """

    rollouts: int
    groups: int
    mean: float
    within_group_std: float
    kept_groups: int
    push: Mapping[str, float | None]
    wrong_pushed_up: int


def summarize_rewards(rollouts: Sequence[RolloutRecord]) -> RewardSummary:
    """Summarise graded rollouts, such as those of :func:`regrade`.

    Raises:
        ValueError: There are none.
    """
    if not rollouts:
        raise ValueError("no rollouts to summarise: read a run's rollouts.jsonl first")
    groups = _groups(rollouts)
    push = {
        outcome: [row.advantage or 0.0 for row in rollouts if row.outcome == outcome]
        for outcome in OUTCOMES
    }
    return RewardSummary(
        rollouts=len(rollouts),
        groups=len(groups),
        mean=fmean(row.reward for row in rollouts),
        within_group_std=fmean(
            sample_std([row.reward for row in group]) for group in groups
        ),
        kept_groups=sum(
            any(row.advantage is not None for row in group) for group in groups
        ),
        push={name: fmean(values) if values else None for name, values in push.items()},
        wrong_pushed_up=sum(
            row.outcome != "correct" and (row.advantage or 0.0) > 0 for row in rollouts
        ),
    )


@dataclass(frozen=True)
class RewardTable:
    """The same rollouts under several graders, side by side.

    Attributes:
        columns: Heading → summary, in the order shown.
    """

    columns: Mapping[str, RewardSummary]

    def to_markdown(self) -> str:
        """The table in Markdown; ``–`` where no rollout has an outcome."""
        summaries = list(self.columns.values())
        cells: dict[str, list[str]] = {
            "mean reward": [f"{s.mean:.2f}" for s in summaries],
            "within-group spread": [f"{s.within_group_std:.2f}" for s in summaries],
            "groups that can teach": [
                f"{s.kept_groups} of {s.groups}" for s in summaries
            ],
        }
        for outcome in OUTCOMES:
            cells[f"mean advantage, {LABELS[outcome]}"] = [
                "–" if (value := s.push[outcome]) is None else f"{value:+.2f}"
                for s in summaries
            ]
        cells["not right, and pushed up"] = [
            f"{s.wrong_pushed_up} of {s.rollouts}" for s in summaries
        ]
        return markdown_table(
            ["", *self.columns], [[name, *row] for name, row in cells.items()]
        )

    _repr_markdown_ = to_markdown
