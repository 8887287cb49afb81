"""Claims that a notebook proves, exercise checkers, and labelled answers.

A checker never raises for a wrong answer: it says what is wrong and what to think of.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev

from rlhelpers.advantages import group_relative_advantages, sample_std
from rlhelpers.analysis import (
    OUTCOMES,
    classify_outcome,
    exact_mcnemar,
    expected_flat_share,
)

_LABELLED = Path(__file__).resolve().parents[1] / "data" / "labelled_answers.jsonl"


class LessonFailed(AssertionError):
    """A claim that this notebook teaches did not hold in this run."""


@dataclass(frozen=True)
class Lesson:
    """Checks a notebook's claims against what was just measured.

    With the preset's own defaults a claim that fails stops the notebook. With other
    parameters, or another backend, nobody has promised it, so it is only reported.

    >>> Lesson(strict=False).check(2 > 1, "two is more than one")
    ✓ two is more than one
    """

    strict: bool = True

    def check(self, holds: bool, claim: str) -> None:
        """Print the claim; raise :class:`LessonFailed` if strict and it fails."""
        if holds:
            print(f"✓ {claim}")
        elif self.strict:
            raise LessonFailed(f"not seen in this run: {claim}")
        else:
            print(f"✗ not seen with these parameters: {claim}")


@dataclass(frozen=True)
class LabelledAnswer:
    """A reply whose outcome a person has decided.

    Attributes:
        answer: The reply, or None.
        expected: The right integer.
        outcome: One of :data:`rlhelpers.analysis.OUTCOMES`.
        why: What this row guards against.
    """

    answer: str | None
    expected: int
    outcome: str
    why: str


def labelled_answers(path: str | Path | None = None) -> list[LabelledAnswer]:
    """Good and bad answers with their right outcomes: the unit test of a reward.

    Args:
        path: A JSONL file; default: the course's own in ``data/``.

    Raises:
        ValueError: A row is damaged or has an unknown outcome; names the line.
    """
    source = Path(path) if path is not None else _LABELLED
    rows = []
    lines = source.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            row = LabelledAnswer(**json.loads(line))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{source.name}, line {number}: {error}") from error
        if row.outcome not in OUTCOMES:
            raise ValueError(
                f"{source.name}, line {number}: outcome {row.outcome!r}; use one of "
                f"{', '.join(OUTCOMES)}"
            )
        rows.append(row)
    return rows


def check_three_outcomes(answers: Mapping[str, object], expected: int) -> bool:
    """Notebook 01: one answer for each outcome of one task.

    Args:
        answers: Outcome name → the learner's answer; ``...`` where not done yet.
        expected: The task's right integer.

    Returns:
        Whether every answer has the outcome that it stands under.
    """
    passed = True
    for outcome in OUTCOMES:
        answer = answers.get(outcome, ...)
        if answer is ...:
            print(f"… {outcome}: replace the ... with an answer")
            passed = False
            continue
        found = classify_outcome(answer, expected)
        if found == outcome:
            print(f"✓ {outcome}: {answer!r}")
        else:
            last = str(answer).strip().splitlines()[-1:] or [""]
            print(
                f"✗ {outcome}: {answer!r} is graded {found}; the grader looks at the "
                f"last line, {last[0]!r}, and at nothing else"
            )
            passed = False
    return passed


def check_advantages(rewards: Sequence[float], answer: object) -> bool:
    """Notebook 04: the advantages of a group, worked out by hand to two decimals."""
    if answer is ...:
        print("… replace the ... with a list of numbers, one per rollout")
        return False
    right = group_relative_advantages(rewards)
    if not isinstance(answer, list | tuple) or len(answer) != len(right):
        print(f"✗ expected a list of {len(right)} numbers, one per rollout")
        return False
    values = [float(value) for value in answer]
    if all(abs(v - r) <= 0.011 for v, r in zip(values, right, strict=True)):
        print("✓ right: reward minus the group's mean, over its sample spread (n - 1)")
        return True
    n = len(rewards)
    population = [r * (n / (n - 1)) ** 0.5 for r in right]
    centred = [float(r) - sum(rewards) / n for r in rewards]
    if all(abs(v - p) <= 0.011 for v, p in zip(values, population, strict=True)):
        print("✗ close: that divides by the population spread (n); here it is n - 1")
    elif all(abs(v - c) <= 0.011 for v, c in zip(values, centred, strict=True)):
        print("✗ close: that is reward minus mean; now divide by the sample spread")
    elif abs(sum(values)) > 0.05:
        print(f"✗ advantages of a group add up to 0, yours to {sum(values):.2f}")
    else:
        print("✗ not yet: subtract the group's mean, then divide by its sample spread")
    return False


def check_flat_share(p: float, group_size: int, answer: object) -> bool:
    """Notebook 04: the expected share of flat groups, to two decimals."""
    if answer is ...:
        print("… replace the ... with a number between 0 and 1")
        return False
    if not isinstance(answer, int | float) or not 0 <= answer <= 1:
        print(f"✗ a share is a number between 0 and 1, got {answer!r}")
        return False
    right = expected_flat_share(p, group_size)
    if abs(answer - right) <= 0.006:
        print(f"✓ right: p^G + (1 - p)^G = {right:.3f}")
        return True
    if abs(answer - p**group_size) <= 0.006:
        print("✗ that counts groups that are all right; groups all wrong are flat too")
    elif abs(answer - (1 - right)) <= 0.006:
        print("✗ that is the share of groups that do teach something: take the rest")
    else:
        print("✗ not yet: how likely are G right answers in a row, or G wrong ones?")
    return False


#: Notebook 02: what calibration can see, and what to change first.
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


def check_remedies(answers: Mapping[str, object]) -> bool:
    """Notebook 02: each calibration finding beside what to change first.

    Args:
        answers: Finding, from :data:`REMEDIES`, → the remedy chosen; ``...`` where not
            done yet.
    """
    passed = True
    for finding, right in REMEDIES.items():
        answer = answers.get(finding, ...)
        if answer == right:
            print(f"✓ {finding}: {right}")
            continue
        passed = False
        if answer is ...:
            print(f"… {finding}: replace the ... with one of the remedies")
        elif answer not in _REMEDY_HINTS:
            print(f"✗ {finding}: {answer!r} is none of {', '.join(_REMEDY_HINTS)}")
        else:
            print(f"✗ {finding}: not {answer!r}; think: {_REMEDY_HINTS[right]}")
    return passed


def check_spread(groups: Sequence[Sequence[float]], answer: object) -> bool:
    """Notebook 02: the within-group spread of some groups, to two decimals."""
    if answer is ...:
        print("… replace the ... with one number")
        return False
    if isinstance(answer, bool) or not isinstance(answer, int | float):
        print(f"✗ the spread is one number, got {answer!r}")
        return False
    right = fmean(sample_std(rewards) for rewards in groups)
    everything = [reward for rewards in groups for reward in rewards]
    population = fmean(pstdev(rewards) for rewards in groups)
    if abs(answer - right) <= 0.006:
        print("✓ right: the mean over groups of each group's own spread (n - 1)")
        return True
    if abs(answer - sample_std(everything)) <= 0.006:
        print("✗ that is the spread over the whole batch; take it group by group")
    elif abs(answer - population) <= 0.006:
        print("✗ close: that divides by n; here it is n - 1")
    else:
        print("✗ not yet: each group's sample standard deviation, then their mean")
    return False


def check_datum_rows(
    prompt: Sequence[int],
    output: Sequence[int],
    advantage: float,
    answer: Mapping[str, object],
) -> bool:
    """Notebook 03: the rows of a datum, worked out by hand.

    Args:
        prompt, output: Token ids.
        advantage: The rollout's advantage.
        answer: ``input``, ``targets`` and ``advantages``; ``...`` where not done yet.
    """
    masked = [0.0] * (len(prompt) - 1)
    right: dict[str, list[float]] = {
        "input": [*prompt, *output[:-1]],
        "targets": [*prompt[1:], *output],
        "advantages": masked + [advantage] * len(output),
    }
    passed = True
    for row, wanted in right.items():
        given = answer.get(row, ...)
        if given is ...:
            print(f"… {row}: replace the ... with a list of {len(wanted)} numbers")
            passed = False
            continue
        values = list(given) if isinstance(given, list | tuple) else [given]
        if values == wanted:
            print(f"✓ {row}: {values}")
        else:
            print(f"✗ {row}: {_datum_hint(row, values, wanted)}")
            passed = False
    return passed


def _datum_hint(row: str, given: list[object], wanted: list[float]) -> str:
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
    """Notebook 03: the on-policy loss of some rollouts.

    Args:
        rollouts: (advantage, number of output tokens) of each.
        answer: The loss, a sum over tokens.
    """
    if answer is ...:
        print("… replace the ... with one number")
        return False
    if isinstance(answer, bool) or not isinstance(answer, int | float):
        print(f"✗ the loss is one number, got {answer!r}")
        return False
    right = -sum(advantage * tokens for advantage, tokens in rollouts)
    if abs(answer - right) <= 0.01:
        print("✓ right: minus the sum of advantage times length, every ratio being 1")
        return True
    if abs(answer + right) <= 0.01:
        print("✗ the sign: a loss goes down where an advantage above 0 gets likelier")
    elif abs(answer + sum(advantage for advantage, _ in rollouts)) <= 0.01:
        print("✗ that counts each rollout once; the loss is a sum over its tokens")
    else:
        print("✗ not yet: each token adds minus ratio times advantage; the ratio is 1")
    return False


def check_mcnemar(fixed: int, regressed: int, answer: object) -> bool:
    """Notebook 05: the exact two-sided p-value of a change, to two decimals."""
    if answer is ...:
        print("… replace the ... with a number between 0 and 1")
        return False
    if isinstance(answer, bool) or not isinstance(answer, int | float):
        print(f"✗ a p-value is a number between 0 and 1, got {answer!r}")
        return False
    if not 0 <= answer <= 1:
        print(f"✗ a p-value lies between 0 and 1, got {answer:g}")
        return False
    n, few = fixed + regressed, min(fixed, regressed)
    right = exact_mcnemar(regressed, fixed)
    if abs(answer - right) <= 0.006:
        ways = [math.comb(n, k) for k in range(few + 1)]
        total = " + ".join(map(str, ways))
        print(f"✓ right: 2 × ({total}) / 2^{n} = {right:.4f}")
        return True
    if abs(answer - right / 2) <= 0.003:
        print("✗ that is one side: a split as uneven the other way counts as well")
    elif abs(answer - 2 * math.comb(n, few) / 2**n) <= 0.003:
        print(
            f"✗ that is {few} of {n} alone: count the splits that are more uneven too"
        )
    else:
        print(f"✗ not yet: toss {n} fair coins; how often do {few} or fewer, or")
        print(f"  {n - few} or more, fall on one side?")
    return False


def check_transitions(
    transitions: Mapping[tuple[str, str], int], answer: Mapping[str, object]
) -> bool:
    """Notebook 05: four numbers read off a transition table.

    Args:
        transitions: (cause before, cause after) → tasks.
        answer: ``right_before``, ``right_after``, ``fixed`` and ``regressed``, in
            tasks; ``...`` where not done yet.

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
    passed = True
    for name, (value, hint) in right.items():
        given = answer.get(name, ...)
        if given == value and not isinstance(given, bool):
            print(f"✓ {name}: {value}")
            continue
        passed = False
        if given is ...:
            print(f"… {name}: replace the ... with a number of tasks")
        elif given == swapped[name]:
            print(
                f"✗ {name}: {given} if rows were after; rows are before, columns after"
            )
        else:
            print(f"✗ {name}: not {given!r}; {hint}")
    return passed


#: Notebook 06: what each purpose needs, and what the other kind lacks for it.
_PURPOSES: Mapping[str, tuple[str, str]] = {
    "go on training tomorrow": (
        "training",
        "a sampler checkpoint has no optimizer, and is gone by tomorrow",
    ),
    "sample the next step's rollouts": (
        "sampler",
        "a training checkpoint cannot be sampled until it is resumed",
    ),
    "evaluate step 15 a week later": (
        "training",
        "by then its session has ended, and its sampler checkpoints with it",
    ),
    "promote to a model": (
        "sampler",
        "a model has no optimizer; resume, save a sampler, and promote that",
    ),
}


def check_checkpoint_kinds(answers: Mapping[str, object]) -> bool:
    """Notebook 06: the kind of checkpoint to have for each purpose.

    Args:
        answers: Purpose → ``"sampler"`` or ``"training"``; ``...`` where not done yet.

    Returns:
        Whether every purpose has its kind.
    """
    passed = True
    for purpose, (right, hint) in _PURPOSES.items():
        answer = answers.get(purpose, ...)
        if answer == right:
            print(f"✓ {purpose}: {right}")
            continue
        passed = False
        if answer is ...:
            print(f"… {purpose}: replace the ...")
        elif answer in ("sampler", "training"):
            print(f"✗ {purpose}: {hint}")
        else:
            print(f"✗ {purpose}: {answer!r} is no kind; use 'sampler' or 'training'")
    return passed


def check_adam_step(
    gradients: Sequence[float], answer: object, *, beta1: float, beta2: float
) -> bool:
    """Notebook 06: the size of Adam's last step, in units of the learning rate.

    Args:
        gradients: All gradients of one parameter, the last step's included.
        answer: The learner's number, to two decimals; ``...`` if not done yet.
        beta1, beta2: The decay of Adam's two moments.
    """
    if answer is ...:
        print("… replace the ... with a number, to two decimals")
        return False
    if isinstance(answer, bool) or not isinstance(answer, int | float):
        print(f"✗ a step is a number, got {answer!r}")
        return False
    mean = square = 0.0
    for gradient in gradients:
        mean = beta1 * mean + (1 - beta1) * gradient
        square = beta2 * square + (1 - beta2) * gradient**2
    steps = len(gradients)
    right = mean / (1 - beta1**steps) / (square / (1 - beta2**steps)) ** 0.5
    last = gradients[-1]
    if abs(answer - right) <= 0.011:
        print(f"✓ right: a step of {right:.2f} learning rates")
        return True
    if abs(answer - (last > 0) + (last < 0)) <= 0.011:
        print("✗ that is a fresh Adam, which has forgotten the gradients before")
    elif abs(answer - mean / square**0.5) <= 0.011:
        print("✗ close: now correct both moments for their start at zero")
    elif abs(answer + right) <= 0.011:
        print("✗ the size is right, the sign is not: that of the corrected mean counts")
    else:
        print("✗ not yet: update both moments with the last gradient, correct, divide")
    return False
