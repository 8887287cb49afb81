"""Notebook 05: a test by hand, how many tasks it needs, and a transition table."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rlhelpers.analysis import exact_mcnemar
from rlhelpers.checks.marking import (
    NOT_TRIED,
    answers_by_name,
    check_number,
    is_whole_number,
    shown,
)


def check_mcnemar(fixed: int, regressed: int, answer: object) -> bool:
    """The exact two-sided p-value of a change, to two decimals."""
    n, few = fixed + regressed, min(fixed, regressed)
    right = exact_mcnemar(regressed, fixed)
    ways = " + ".join(str(math.comb(n, k)) for k in range(few + 1))
    return check_number(
        answer,
        right,
        wanted="a number between 0 and 1",
        well=f"right: 2 × ({ways}) / 2^{n} = {right:.4f}",
        slips=[
            (
                right / 2,
                "that is one side: a split as uneven the other way counts as well",
            ),
            (
                2 * math.comb(n, few) / 2**n,
                f"that is {few} of {n} alone: count the splits that are more uneven "
                "too",
            ),
        ],
        hint=f"toss {n} fair coins; how often do {few} or fewer, or\n"
        f"  {n - few} or more, fall on one side?",
        is_share=True,
    )


def check_tasks_needed(
    fixed: int, regressed: int, answer: object, *, per: int, below: float = 0.05
) -> bool:
    """How many held-out tasks a change needs before it stands out from luck.

    Args:
        fixed, regressed: Tasks that change among every ``per`` held-out tasks.
        answer: The smallest multiple of ``per`` at which the exact two-sided p-value
            is less than ``below``; ``...`` if not tried yet.
    """
    if answer is NOT_TRIED:
        print("… replace the ... with a whole number of tasks")
        return False
    if not is_whole_number(answer) or answer < 1:
        print(f"✗ expected a whole number of tasks, got {shown(answer)}")
        return False
    blocks, rest = divmod(answer, per)
    if rest:
        print(
            f"✗ {answer} is no multiple of {per}: count all held-out tasks, not only "
            "those that changed"
        )
        return False

    def p_of(count: int) -> float:
        return exact_mcnemar(count * regressed, count * fixed)

    seen = (
        f"{answer} tasks, {blocks * fixed} fixed and {blocks * regressed} regressed: "
        f"p = {p_of(blocks):.4f}"
    )
    if p_of(blocks) >= below:
        print(f"✗ {seen}, not below {below:g}")
    elif blocks > 1 and p_of(blocks - 1) < below:
        print(f"✗ {seen}; fewer tasks would do")
    else:
        print(f"✓ right: {seen}")
        return True
    return False


def check_transitions(
    transitions: Mapping[tuple[str, str], int], answer: object
) -> bool:
    """Four numbers read off a transition table.

    Args:
        transitions: (cause before, cause after) → tasks.
        answer: ``right_before``, ``right_after``, ``fixed`` and ``regressed``, in
            tasks; ``...`` where not tried yet.

    Returns:
        Whether all four are right.
    """

    def tasks(before: bool, after: bool) -> int:
        return sum(
            count
            for (old, new), count in transitions.items()
            if (old == "correct") == before and (new == "correct") == after
        )

    stayed, fixed, regressed = tasks(True, True), tasks(False, True), tasks(True, False)
    right = {
        "right_before": (stayed + regressed, "add up the row of tasks correct before"),
        "right_after": (stayed + fixed, "add up the column of tasks correct after"),
        "fixed": (fixed, "that column, without the tasks that were right all along"),
        "regressed": (regressed, "that row, without the tasks that stayed right"),
    }
    swapped = {"right_before": stayed + fixed, "right_after": stayed + regressed}
    swapped |= {"fixed": regressed, "regressed": fixed}
    answers = answers_by_name(answer, right)
    if answers is None:
        return False
    passed = True
    for name, (value, hint) in right.items():
        given = answers[name]
        if is_whole_number(given) and given == value:
            print(f"✓ {name}: {value}")
            continue
        passed = False
        if given is NOT_TRIED:
            print(f"… {name}: replace the ... with a number of tasks")
        elif is_whole_number(given) and given == swapped[name]:
            print(
                f"✗ {name}: {given} if rows were after; rows are before, columns after"
            )
        else:
            print(f"✗ {name}: not {shown(given)}; {hint}")
    return passed
