"""Notebook 02: spread, flat groups, and what to change first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev

from rlhelpers.advantages import FLAT_SPREAD, sample_std
from rlhelpers.analysis import expected_flat_share
from rlhelpers.checks.marking import answers_by_name, check_choices, check_number


def check_spread(groups: Sequence[Sequence[float]], answer: object) -> bool:
    """The within-group spread of some groups, to two decimals."""
    everything = [reward for rewards in groups for reward in rewards]
    return check_number(
        answer,
        fmean(sample_std(rewards) for rewards in groups),
        wanted="one number",
        well="right: the mean over groups of each group's own spread (n - 1)",
        slips=[
            (
                sample_std(everything),
                "that is the spread over the whole batch; take it group by group",
            ),
            (
                fmean(pstdev(rewards) for rewards in groups),
                "close: that divides by n; here it is n - 1",
            ),
            (
                fmean([s for g in groups if (s := sample_std(g)) > 0] or [0.0]),
                "that leaves the flat groups out; each counts, with spread 0",
            ),
        ],
        hint="each group's sample standard deviation, then their mean",
    )


#: What calibration can see, and what to change first.
REMEDIES: Mapping[str, str] = {
    "mean 0.97, most groups flat": "larger operands",
    "mean 0.02, half of the replies wrong integers": "smaller operands",
    "mean 0.05, nearly all replies cut off": "more tokens",
    "mean 0, every reply ends in a sentence": "worked examples",
    "mean 0.50, every group all right or all wrong": "other tasks or larger groups",
}

_REMEDY_HINTS: Mapping[str, str] = {
    "larger operands": "nearly all rollouts are right: nothing is left to compare",
    "smaller operands": "the form is fine and the arithmetic is beyond the policy",
    "more tokens": "a reply that is cut off says nothing about difficulty",
    "worked examples": "no reply ever shows the ending that the grader asks for",
    "other tasks or larger groups": "the mean is fine, and yet no group is mixed",
}


def check_remedies(answers: object) -> bool:
    """Each calibration finding beside what to change first.

    Args:
        answers: Finding, from :data:`REMEDIES`, → the remedy chosen; ``...`` where not
            tried yet.
    """
    return check_choices(
        answers,
        REMEDIES,
        {finding: f"think: {_REMEDY_HINTS[r]}" for finding, r in REMEDIES.items()},
        options=list(_REMEDY_HINTS),
        wanted="one of the remedies",
    )


def check_flat_share(p: float, group_size: int, answer: object) -> bool:
    """Notebook 04 too: the expected share of flat groups, to two decimals."""
    right = expected_flat_share(p, group_size)
    return check_number(
        answer,
        right,
        wanted="a number between 0 and 1",
        well=f"right: p^G + (1 - p)^G = {right:.3f}",
        slips=_flat_slips([group_size], p),
        hint="how likely are G right answers in a row, or G wrong ones?",
        is_share=True,
    )


def _flat_slips(sizes: Sequence[int], p: float) -> list[tuple[float, str]]:
    """Likely slips in the expected share of flat groups, over groups of some sizes."""
    right = fmean(expected_flat_share(p, size) for size in sizes)
    return [
        (
            fmean(p**size for size in sizes),
            "that counts groups that are all right; groups all wrong are flat too",
        ),
        (
            fmean((1 - p) ** size for size in sizes),
            "that counts groups that are all wrong; groups all right are flat too",
        ),
        (
            1 - right,
            "that is the share of groups that do teach something: take the rest",
        ),
        (
            fmean(p ** (size - 1) + (1 - p) ** (size - 1) for size in sizes),
            "that is a group with one rollout less: the exponent is G",
        ),
    ]


def check_flat_groups(groups: Sequence[Sequence[float]], answers: object) -> bool:
    """Flat groups among those just sampled: worked out from the mean, then counted.

    Args:
        groups: The rewards of each group, 0 or 1.
        answers: ``expected``, the share of flat groups if every rollout were right with
            the mean reward of all, and ``measured``, the share that is flat; to two
            decimals, ``...`` where not tried yet.

    Returns:
        Whether both are right.
    """
    given = answers_by_name(answers, ("expected", "measured"))
    if given is None:
        return False
    sizes = [len(rewards) for rewards in groups]
    p = fmean(reward for rewards in groups for reward in rewards)
    expected = fmean(expected_flat_share(p, size) for size in sizes)
    passed = check_number(
        given["expected"],
        expected,
        name="expected",
        wanted="a number between 0 and 1",
        well=f"right: p^G + (1 - p)^G = {expected:.3f} with p = {p:.3f}",
        slips=_flat_slips(sizes, p),
        hint="p is the mean reward of all rollouts, G the rollouts of one group",
        is_share=True,
    )
    flat = [rewards for rewards in groups if sample_std(rewards) < FLAT_SPREAD]
    measured = len(flat) / len(groups)
    all_right = sum(min(rewards) > 0 for rewards in flat) / len(groups)
    measured_passed = check_number(
        given["measured"],
        measured,
        name="measured",
        wanted="a number between 0 and 1",
        well=f"right: {len(flat)} of {len(groups)} groups = {measured:.3f}",
        slips=[
            (1 - measured, "that is the share of groups that can teach: take the rest"),
            (all_right, "that counts groups all right; groups all wrong are flat too"),
            (
                measured - all_right,
                "that counts groups all wrong; groups all right are flat too",
            ),
        ],
        hint="a group is flat if all its rewards are equal",
        is_share=True,
    )
    return passed and measured_passed
