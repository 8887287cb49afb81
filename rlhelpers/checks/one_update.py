"""Notebook 03: advantages, datums and the loss, by hand and as a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean, pstdev
from typing import Any

from rlhelpers.advantages import FLAT_SPREAD, group_relative_advantages, sample_std
from rlhelpers.checks.marking import (
    NOT_TRIED,
    answers_by_name,
    as_list,
    call,
    check_number,
    is_function,
    is_number,
    near,
    shown,
)

Groups = list[list[float]]


def check_datum_rows(
    prompt: Sequence[int],
    output: Sequence[int],
    advantage: float,
    answer: object,
) -> bool:
    """The rows of a datum, worked out by hand.

    Args:
        prompt, output: Token ids.
        advantage: The rollout's advantage.
        answer: ``input``, ``targets`` and ``advantages``; ``...`` where not tried yet.
    """
    masked = [0.0] * (len(prompt) - 1)
    right: dict[str, list[float]] = {
        "input": [*prompt, *output[:-1]],
        "targets": [*prompt[1:], *output],
        "advantages": masked + [advantage] * len(output),
    }
    answers = answers_by_name(answer, right)
    if answers is None:
        return False
    passed = True
    for row, wanted in right.items():
        given = answers[row]
        if given is NOT_TRIED:
            print(f"… {row}: replace the ... with a list of {len(wanted)} numbers")
            passed = False
            continue
        values = as_list(given)
        if values is None or not all(is_number(value) for value in values):
            print(f"✗ {row}: expected a list of numbers, got {shown(given)}")
            passed = False
        elif values == wanted:
            print(f"✓ {row}: {values}")
        else:
            print(f"✗ {row}: {_datum_hint(row, values, wanted)}")
            passed = False
    return passed


def _datum_hint(row: str, given: list[float], wanted: list[float]) -> str:
    if len(given) != len(wanted):
        return (
            f"{len(given)} entries, but prompt and output together have one token more "
            f"than there are predictions: {len(wanted)}"
        )
    if row == "advantages":
        masked = wanted.count(0.0)
        return f"the first {masked} targets belong to the prompt and carry 0"
    return (
        "position i of the input predicts target i, so the targets are the same "
        "tokens shifted by one"
    )


def check_on_policy_loss(rollouts: Sequence[tuple[float, int]], answer: object) -> bool:
    """The on-policy loss of some rollouts.

    Args:
        rollouts: (advantage, number of output tokens) of each.
        answer: The loss, a sum over tokens.
    """
    right = -sum(advantage * tokens for advantage, tokens in rollouts)
    tokens = sum(count for _, count in rollouts)
    return check_number(
        answer,
        right,
        wanted="one number",
        well="right: minus the sum of advantage times length, every ratio being 1",
        slips=[
            (
                -right,
                "the sign: a loss goes down where an advantage above 0 gets likelier",
            ),
            (
                -sum(advantage for advantage, _ in rollouts),
                "that counts each rollout once; the loss is a sum over its tokens",
            ),
            (right / tokens, "that is the mean per token; the loss is their sum"),
            (right / len(rollouts), "that is the mean per rollout; the loss is a sum"),
        ],
        hint="each token adds minus ratio times advantage; the ratio is 1",
        tolerance=0.01,
    )


def check_advantages(rewards: Sequence[float], answer: object) -> bool:
    """The advantages of one group, worked out by hand to two decimals."""
    if answer is NOT_TRIED:
        print("… replace the ... with a list of numbers, one per rollout")
        return False
    right = group_relative_advantages(rewards)
    values = as_list(answer)
    if (
        values is None
        or len(values) != len(right)
        or not all(is_number(value) for value in values)
    ):
        print(
            f"✗ expected a list of {len(right)} numbers, one per rollout, got "
            f"{shown(answer)}"
        )
        return False
    if _alike([values], [right]):
        print("✓ right: reward minus the group's mean, over its sample spread (n - 1)")
        return True
    if _alike([values], [_divided(rewards, pstdev(rewards))]):
        print("✗ close: that divides by the population spread (n); here it is n - 1")
    elif _alike([values], [_divided(rewards, 1.0)]):
        print("✗ close: that is reward minus mean; now divide by the sample spread")
    elif _alike([values], [[-advantage for advantage in right]]):
        print("✗ the sign: a reward above the mean has an advantage above 0")
    elif abs(sum(values)) > 0.05:
        print(f"✗ advantages of a group add up to 0, yours to {sum(values):.2f}")
    else:
        print("✗ not yet: subtract the group's mean, then divide by its sample spread")
    return False


def _divided(rewards: Sequence[float], spread: float) -> list[float]:
    """Rewards minus their mean, over a spread."""
    center = fmean(rewards)
    return [(reward - center) / (spread or 1.0) for reward in rewards]


def _alike(left: Sequence[Sequence[float]], right: Sequence[Sequence[float]]) -> bool:
    """Whether two lists of groups agree, to two decimals."""
    return [len(group) for group in left] == [len(group) for group in right] and all(
        near(mine, theirs, 0.011)
        for mine_group, theirs_group in zip(left, right, strict=True)
        for mine, theirs in zip(mine_group, theirs_group, strict=True)
    )


# A function under repair

#: What the function is called with, in this order; the flat groups come last.
_GROUPS: tuple[tuple[Groups, str], ...] = (
    ([[1.0, 0.0, 0.0, 0.0]], "one group"),
    ([[1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 1.0, 0.0]], "an easy and a hard group"),
    ([[1.0, 0.0], [0.0, 0.0, 1.0]], "two groups of different sizes"),
    ([[0.5, 0.25, 0.0, 0.25]], "a graded reward"),
    ([[1.0, 1.0], [1.0, 0.0]], "a flat group and a mixed one"),
    ([[0.0, 0.0], [1.0, 1.0]], "flat groups only"),
    ([[0.1] * 3, [1.0, 0.0]], "three times 0.1, whose spread is only rounding"),
)


def _teaching(groups: Groups) -> Groups:
    return [rewards for rewards in groups if sample_std(rewards) >= FLAT_SPREAD]


def _over_the_batch(groups: Groups) -> Groups:
    everything = [reward for rewards in groups for reward in rewards]
    center, spread = fmean(everything), sample_std(everything)
    return [[(r - center) / (spread or 1.0) for r in rewards] for rewards in groups]


def _from_the_batch_mean(groups: Groups) -> Groups:
    center = fmean(reward for rewards in groups for reward in rewards)
    return [[(r - center) / sample_std(g) for r in g] for g in groups]


#: Likely mistakes: (what the function would then return, what is wrong).
_MISTAKES: tuple[tuple[Callable[[Groups], Groups], str], ...] = (
    (
        lambda groups: [_divided(rewards, pstdev(rewards)) for rewards in groups],
        "divides by the population spread (n); here it is n - 1",
    ),
    (
        lambda groups: [_divided(rewards, 1.0) for rewards in groups],
        "only subtracts the mean; now divide by the group's sample spread",
    ),
    (
        _over_the_batch,
        "compares with the whole batch; mean and spread are those of the group",
    ),
    (
        _from_the_batch_mean,
        "subtracts the mean of the batch; the baseline is the group's own mean",
    ),
)


def check_advantage_function(answer: object) -> bool:
    """A function from the rewards of several groups to their advantages.

    Args:
        answer: ``function(groups)`` → the advantages of the groups that can teach, in
            order, flat ones left out; ``...`` if not tried yet.

    Returns:
        Whether it is right on hidden groups, flat ones among them.
    """
    if not is_function(answer, "broken_advantages"):
        return False
    for groups, what in _GROUPS:
        given, error = call(answer, groups)
        if error and len(_teaching(groups)) < len(groups):
            error += "; a flat group has no spread to divide by, so leave it out first"
        problem = error or _advantage_problem(groups, given)
        if problem:
            print(f"✗ {what}, {_few(groups)}: your function {problem}")
            return False
    print(f"✓ right on all {len(_GROUPS)} batches, flat groups among them")
    return True


def _advantage_problem(groups: Groups, given: Any) -> str | None:
    """What is wrong with the advantages returned for some groups, if anything."""
    try:
        values = [[float(value) for value in group] for group in given]
    except (TypeError, ValueError, OverflowError):
        return f"returns {shown(given)}, not a list of lists of numbers"
    kept = _teaching(groups)
    if _alike(values, [group_relative_advantages(rewards) for rewards in kept]):
        return None
    if len(values) > len(kept):
        return (
            f"returns {len(values)} groups and only {len(kept)} can teach: leave out "
            "those whose spread is below 1e-8"
        )
    if len(values) < len(kept):
        return f"returns {len(values)} groups and {len(kept)} can teach"
    for mistake, said in _MISTAKES:
        if _alike(values, mistake(kept)):
            return said
    return (
        f"returns {_few(values)}: subtract the group's mean, then divide by its "
        "sample spread"
    )


def _few(groups: Groups) -> str:
    """Groups as text, short enough for one line."""
    starts = [[round(value, 2) for value in group[:4]] for group in groups]
    parts = [
        str(start)[:-1] + (", ...]" if len(group) > 4 else "]")
        for start, group in zip(starts, groups, strict=True)
    ]
    return " ".join(parts)
