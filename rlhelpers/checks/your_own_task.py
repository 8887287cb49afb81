"""Notebook 07: the checkers of its exercises."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from rlhelpers.checks.marking import (
    answers_by_name,
    call,
    check_choices,
    check_number,
    is_function,
    is_number,
    shown,
)

TOOLS = ("prompt", "sample", "sft", "rl", "settle")

_RIGHT_TOOLS = {
    "invoices": "sft",
    "sql": "rl",
    "tone": "settle",
    "json": "prompt",
    "puzzles": "sample",
    "proofs": "sft",
}
_TOOL_HINTS = {
    "invoices": "the right answers are there to imitate; nothing has to be explored",
    "sql": "a program can score each reply, many replies are right and many wrong, and "
    "the query is asked every day",
    "tone": "three people who disagree are three rewards; which one would it learn?",
    "json": "one field, seldom forgotten: try the cheapest thing first",
    "puzzles": "a hundred answers, once: why train, if a check can choose?",
    "proofs": "64 attempts without a success make flat groups; what else is there?",
}


def check_tools(answers: object) -> bool:
    """Notebook 07: which tool fits which wish.

    Args:
        answers: Wish → one of :data:`TOOLS`; ``...`` where not tried yet.

    Returns:
        Whether every choice is right.
    """
    return check_choices(
        answers,
        _RIGHT_TOOLS,
        _TOOL_HINTS,
        options=TOOLS,
        wanted="one of " + ", ".join(TOOLS),
    )


#: Twenty replies: good to both, only to A, only to B, to neither.
_RATED = {"both": 9, "only_a": 4, "only_b": 2, "neither": 5}


def check_agreement(answers: object) -> bool:
    """Notebook 07: how far two people agree, by itself and beyond chance.

    Args:
        answers: ``{"share": …, "kappa": …}``; ``...`` where not tried yet.

    Returns:
        Whether both are right.
    """
    given = answers_by_name(answers, ("share", "kappa"))
    if given is None:
        return False
    n = sum(_RATED.values())
    share = (_RATED["both"] + _RATED["neither"]) / n
    a, b = (_RATED["both"] + _RATED[only] for only in ("only_a", "only_b"))
    chance = (a * b + (n - a) * (n - b)) / n**2
    kappa = (share - chance) / (1 - chance)
    checks = (
        check_number(
            given["share"],
            share,
            name="share",
            wanted="a share between 0 and 1",
            well=f"they agree on {share:.0%} of the replies",
            slips=(
                (_RATED["both"] / n, "they also agree where both say bad"),
                (1 - share, "that is how often they differ"),
            ),
            hint="count the replies on which both say the same, of all twenty",
            is_share=True,
        ),
        check_number(
            given["kappa"],
            kappa,
            name="kappa",
            wanted="a number up to 1",
            well="of what chance leaves open they settle two fifths: rewrite the rule "
            "before a grader is made of it",
            slips=(
                (share - chance, "divide by what chance leaves open, 1 − chance"),
                (chance, "that is the agreement by chance alone"),
                (
                    (share - 0.5) / 0.5,
                    "chance is one half only if both say good half of the time",
                ),
                (
                    (share - a * b / n**2) / (1 - a * b / n**2),
                    "chance makes them agree on bad, too",
                ),
            ),
            hint="(share − chance) / (1 − chance), chance being both good by chance "
            "plus both bad by chance",
        ),
    )
    return all(checks)


_NO_NUMBER = ("", "about 1700", "1,692", "47 * 36 = 1692\n1692", "-1692", "1692.0")
_TOO_FAR = ("0", "10", "9" * 400)


def check_estimate_grader(grader: object) -> bool:
    """Notebook 07: a grader of estimates that is fair to both sides.

    Five demands: a finite reward for every text; 0 for what is no plain number; 1 for
    the exact one; the closer, the more; twice too high and twice too low earn the same.

    Args:
        grader: The learner's function of a reply and the exact number; ``...`` if not
            done yet.

    Returns:
        Whether all hold.
    """
    if not is_function(grader, "my_grade"):
        return False
    paid: dict[str, float] = {}
    near = [str(1692 * k // 20) for k in range(10, 41)]  # from half to double
    for text in (*_NO_NUMBER, *_TOO_FAR, "846", "1692", "3384", *near):
        reward, problem = call(grader, text, 1692)
        if reward is ...:
            print("… replace the ... in my_grade with a reward")
            return False
        if problem is not None:
            print(f"✗ on {shown(text, 30)} it {problem}")
            return False
        if not is_number(reward):
            print(
                f"✗ on {shown(text, 30)} it returns {shown(reward)}, no finite number"
            )
            return False
        paid[text] = float(reward)
    demands: tuple[Callable[[dict[str, float], list[str]], bool], ...] = (
        _plain_numbers_only,
        _exact_earns_one,
        _closer_earns_more,
        _both_sides_alike,
    )
    print("✓ a finite reward for every text")
    return all(demand(paid, near) for demand in demands)


def _plain_numbers_only(paid: dict[str, float], _: Any) -> bool:
    for text in _NO_NUMBER:
        if paid[text] != 0:
            print(f"✗ {shown(text, 30)} is no plain number and earns {paid[text]:.3g}")
            return False
    print("✓ nothing for what is no plain number")
    return True


def _exact_earns_one(paid: dict[str, float], _: Any) -> bool:
    if abs(paid["1692"] - 1) > 1e-9 or max(paid.values()) > 1 + 1e-9:
        best = max(paid, key=lambda text: paid[text])
        print(f"✗ the exact 1692 earns {paid['1692']:.3g}; the most is earned by")
        print(f"  {shown(best, 30)}, with {paid[best]:.3g}")
        return False
    print("✓ 1 for the exact number, and no more for any")
    return True


def _closer_earns_more(paid: dict[str, float], near: list[str]) -> bool:
    below = [text for text in near if int(text) <= 1692]
    above = [text for text in reversed(near) if int(text) >= 1692]
    for side in (below, above):
        for far, close in pairwise(side[1:]):
            if not paid[far] < paid[close]:
                print(f"✗ {far} earns {paid[far]:.3g}, and the closer {close} earns")
                print(f"  {paid[close]:.3g}: a policy could not tell which way to go")
                return False
    for text in _TOO_FAR:
        if paid[text] > min(paid["846"], paid["3384"]) + 1e-9:
            print(f"✗ {shown(text, 20)} is farther off than a factor of 2 and earns")
            print(f"  {paid[text]:.3g}")
            return False
    print("✓ the closer, the more")
    return True


def _both_sides_alike(paid: dict[str, float], _: Any) -> bool:
    half, double = paid["846"], paid["3384"]
    low, high = paid["1353"], paid["2115"]  # 0.8 and 1.25 of it
    if abs(half - double) > 0.01 or abs(low - high) > 0.01:
        print(f"✗ half of it earns {half:.3g} and twice {double:.3g}; four fifths")
        print(f"  {low:.3g} and five fourths {high:.3g}: think of the quotient, not of")
        print("  the difference")
        return False
    print("✓ too high and too low by the same factor earn the same")
    return True
