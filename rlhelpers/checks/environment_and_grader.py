"""Notebook 01: answers and outcomes, a grader, and the unit test of a reward."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rlhelpers.analysis import OUTCOMES, classify_outcome
from rlhelpers.checks.marking import (
    NOT_TRIED,
    answers_by_name,
    call,
    is_function,
    is_number,
    shown,
)

_LABELLED = Path(__file__).resolve().parents[2] / "data" / "labelled_answers.jsonl"


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


def check_three_outcomes(answers: object, expected: int) -> bool:
    """One answer for each outcome of one task.

    Args:
        answers: Outcome name → the learner's answer; ``...`` where not tried yet.
        expected: The task's right integer.

    Returns:
        Whether every answer has the outcome that it stands under.
    """
    given = answers_by_name(answers, OUTCOMES)
    if given is None:
        return False
    passed = True
    for outcome, answer in given.items():
        if answer is NOT_TRIED:
            print(f"… {outcome}: replace the ... with an answer")
            passed = False
            continue
        if not isinstance(answer, str):
            print(f"✗ {outcome}: an answer is text in quotes, got {shown(answer)}")
            passed = False
            continue
        found = classify_outcome(answer, expected)
        if found == outcome:
            print(f"✓ {outcome}: {answer!r}")
        else:
            last = answer.strip().splitlines()[-1:] or [""]
            print(
                f"✗ {outcome}: {answer!r} is graded {found}; the grader looks at the "
                f"last line, {last[0]!r}, and at nothing else"
            )
            passed = False
    return passed


#: (reply, expected, reward under the exercise's rule, what the reply tests)
_GRADED: tuple[tuple[str | None, int, float, str], ...] = (
    ("1692", 1692, 1.0, "the bare integer is right"),
    ("1693", 1692, 0.0, "another integer is wrong"),
    ("40 * 36 = 1440\n1692", 1692, 1.0, "only the last line counts"),
    ("1692\n\n  \n", 1692, 1.0, "blank lines after the last one do not count"),
    ("   1692 ", 1692, 1.0, "blanks around the last line do not count"),
    ("01692", 1692, 1.0, "integers are compared, not texts"),
    ("+1692", 1692, 1.0, "a sign may stand before the digits"),
    ("-1692", 1692, 0.0, "the sign is part of the integer"),
    ("-12", -12, 1.0, "the sign is part of the integer"),
    ("The answer is 1692.", 1692, 0.0, "a sentence is not a bare integer"),
    ("1692\nThat took 3 steps.", 3, 0.0, "a stray number in a sentence is no answer"),
    ("1692 1692", 1692, 0.0, "two integers are not one"),
    ("16920", 1692, 0.0, "a longer integer only contains the right one"),
    ("1692.0", 1692, 0.0, "a decimal point is neither sign nor digit"),
    ("9007199254740993", 9007199254740992, 0.0, "floats cannot tell these two apart"),
    ("1_692", 1692, 0.0, "int() reads an underscore; the rule does not"),
    ("\u0661\u0666", 16, 0.0, "int() reads other scripts' digits; the rule does not"),
    ("", 1692, 0.0, "an empty reply has no last line"),
    (None, 1692, 0.0, "a reply can be None"),
    ("9" * 5000, 1692, 0.0, "int() refuses more than 4300 digits: reward 0, no error"),
)


def check_grader(answer: object) -> bool:
    """A grader that reads one integer, whole, from the last line that is not empty.

    Args:
        answer: ``grader(reply, expected)`` → 1.0 or 0.0; ``...`` if not tried yet.

    Returns:
        Whether it grades every reply of a hidden table right.
    """
    if not is_function(answer, "broken_grader"):
        return False
    mistakes = []
    for reply, expected, reward, why in _GRADED:
        given, error = call(answer, reply, expected)
        if error is None and not isinstance(given, int | float):
            error = f"returns {shown(given)}, not 1.0 or 0.0"
        if error is not None or given != reward:
            said = error or f"gives {shown(given)}, not {reward}"
            mistakes.append(f"{shown(reply, 28)} for {expected}: {said}; {why}")
    if not mistakes:
        print(f"✓ all {len(_GRADED)} replies are graded right")
        return True
    print(f"✗ {len(mistakes)} of {len(_GRADED)} replies are graded wrong")
    for mistake in mistakes[:3]:
        print(f"  {mistake}")
    return False


def _integers(reply: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"-?\d+", _plain(reply))]


def _last_line(reply: str) -> str:
    return _plain(reply).strip().splitlines()[-1].strip()


def _plain(reply: str) -> str:
    """The reply without commas and decoration, which every flawed grader forgives."""
    return re.sub(r"[,$*`]", "", reply)


#: Graders that a good test catches: (grader, what it does wrong).
_FLAWED: tuple[tuple[Callable[[str, int], bool], str], ...] = (
    (
        lambda reply, expected: _integers(reply)[-1] == expected,
        "takes the last number of the text",
    ),
    (
        lambda reply, expected: expected in _integers(reply),
        "looks for the right number anywhere",
    ),
    (
        lambda reply, expected: _last_line(reply) == str(expected),
        "compares the last line as text",
    ),
    (
        lambda reply, expected: float(_last_line(reply)) == float(expected),
        "reads the last line as a float",
    ),
)


def check_reward_tests(answer: object, *, most: int = 3) -> bool:
    """A few labelled replies that catch every one of four flawed graders.

    Args:
        answer: (reply, expected integer, right reward) of each; ``...`` if not tried
            yet.
        most: How many rows are allowed.

    Returns:
        Whether the labels are right and every flawed grader fails at least one.
    """
    if answer is NOT_TRIED:
        print("… replace the ... with a list of (reply, expected, reward)")
        return False
    if not isinstance(answer, list | tuple):
        print(f"✗ expected a list of (reply, expected, reward), got {shown(answer)}")
        return False
    if not 1 <= len(answer) <= most:
        print(f"✗ {len(answer)} rows: use 1 to {most}, so that each has to count")
        return False
    problems = [_problem_of(row) for row in answer]
    if any(problems):
        for number, problem in enumerate(problems, start=1):
            if problem:
                print(f"✗ row {number}: {problem}")
        return False
    passed = True
    for grader, what in _FLAWED:
        caught = [r for r, row in enumerate(answer, start=1) if _fails(grader, row)]
        if caught:
            print(f"✓ row {caught[0]} catches the grader that {what}")
        else:
            print(f"✗ the grader that {what} passes all your rows")
            passed = False
    return passed


def _problem_of(row: object) -> str | None:
    """What is wrong with a labelled reply, under the course's own rule."""
    if not isinstance(row, list | tuple) or len(row) != 3:
        return f"expected (reply, expected, reward), got {shown(row)}"
    reply, expected, reward = row
    if not isinstance(reply, str) or type(expected) is not int:
        return f"the reply is text and the expected one an integer, got {shown(row)}"
    if not is_number(reward) or reward not in (0, 1):
        return f"the reward is 1.0 or 0.0, got {shown(reward)}"
    outcome = classify_outcome(reply, expected)
    if reward != (outcome == "correct"):
        return (
            f"labelled {reward:g}, but {shown(reply)} is {outcome} by the course's rule"
        )
    return None


def _fails(grader: Callable[[str, int], bool], row: tuple[str, int, float]) -> bool:
    """Whether a flawed grader gives another reward than the row's label."""
    reply, expected, reward = row
    given, error = call(grader, reply, expected)
    return bool(given if error is None else False) != bool(reward)
