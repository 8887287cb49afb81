"""Notebook 04: the size of a group, and what to do with a run."""

from __future__ import annotations

from collections.abc import Mapping

from rlhelpers.analysis import expected_flat_share
from rlhelpers.checks.marking import NOT_TRIED, check_choices, is_whole_number, shown


def check_group_size(p: float, most: float, answer: object) -> bool:
    """The smallest group size with at most a given expected share of flat groups.

    Args:
        p: How likely each rollout is right; between 0 and 1, neither of them.
        most: Largest share of flat groups allowed, above 0.
        answer: The learner's group size; ``...`` if not tried yet.
    """
    if answer is NOT_TRIED:
        print("… replace the ... with a whole number of rollouts")
        return False
    if not is_whole_number(answer) or answer < 2:
        print(f"✗ expected a whole number of rollouts from 2 on, got {shown(answer)}")
        return False
    share = expected_flat_share(p, answer)
    if share > most:
        print(
            f"✗ with groups of {answer}, {share:.1%} are flat, more than {most:.0%}: "
            "use larger ones"
        )
        return False
    if answer > 2 and expected_flat_share(p, answer - 1) <= most:
        print(
            f"✗ with groups of {answer}, {share:.1%} are flat: enough, but a smaller "
            "group would do, and every rollout costs"
        )
        return False
    print(f"✓ right: with groups of {answer}, {share:.1%} are flat")
    return True


#: The exercise's runs: what to do, and what a wrong choice overlooks.
_DECISIONS: Mapping[str, tuple[str, str]] = {
    "A": (
        "more tokens",
        "replies that are cut off say nothing of what the policy can do",
    ),
    "B": (
        "stop or harder tasks",
        "no group is kept any more, because nearly every rollout is right",
    ),
    "C": (
        "a lower learning rate",
        "the policy could do it, and then lost the arithmetic: its steps are too large",
    ),
    "D": (
        "go on",
        "reward rises and groups are kept; the loss tells only of lengths",
    ),
    "E": (
        "sample from the new snapshot",
        "on-policy every ratio is 1: these rollouts came from other weights",
    ),
}


def check_decisions(answers: object) -> bool:
    """What to do with each of five runs, read off a table.

    Args:
        answers: Run, A to E, → the decision; ``...`` where not tried yet.
    """
    return check_choices(
        answers,
        {run: decision for run, (decision, _) in _DECISIONS.items()},
        {run: hint for run, (_, hint) in _DECISIONS.items()},
        options=sorted(decision for decision, _ in _DECISIONS.values()),
        wanted="a decision",
    )
