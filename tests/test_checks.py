"""Notebook claims, exercise checkers and labelled answers.

Every checker is held against the right answer and against the wrong ones that a learner
is likely to give, each with what it says of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from statistics import mean, pstdev, stdev
from typing import Any

import numpy as np
import pytest

from rlhelpers import classify_outcome, grade_final_integer
from rlhelpers.analysis import OUTCOMES
from rlhelpers.checks import (
    REMEDIES,
    LabelledAnswer,
    Lesson,
    LessonFailed,
    check_adam_step,
    check_advantage_function,
    check_advantages,
    check_agreement,
    check_checkpoint_kinds,
    check_datum_rows,
    check_decisions,
    check_estimate_grader,
    check_flat_groups,
    check_flat_share,
    check_grader,
    check_group_size,
    check_knobs,
    check_mcnemar,
    check_on_policy_loss,
    check_ppo_loss,
    check_pushes,
    check_remedies,
    check_resume_plan,
    check_reward_tests,
    check_spread,
    check_tasks_needed,
    check_three_outcomes,
    check_tools,
    check_transitions,
    labelled_answers,
)

Capture = pytest.CaptureFixture[str]


def test_a_claim_that_holds_is_printed(capsys: Capture) -> None:
    Lesson(strict=True).check(True, "it holds")
    assert capsys.readouterr().out == "✓ it holds\n"


def test_a_claim_that_fails_stops_a_run_at_the_defaults() -> None:
    with pytest.raises(LessonFailed, match="accuracy rose"):
        Lesson(strict=True).check(False, "accuracy rose")


def test_with_other_parameters_a_claim_that_fails_is_reported(capsys: Capture) -> None:
    Lesson(strict=False).check(False, "accuracy rose")
    assert capsys.readouterr().out.startswith("✗ ")


# -- labelled answers -------------------------------------------------------------


@pytest.mark.parametrize("row", labelled_answers(), ids=lambda row: row.why)
def test_the_grader_agrees_with_every_label(row: LabelledAnswer) -> None:
    assert classify_outcome(row.answer, row.expected) == row.outcome
    reward = grade_final_integer(row.answer, row.expected).reward
    assert reward == (1.0 if row.outcome == "correct" else 0.0)


def test_every_outcome_is_represented() -> None:
    assert {row.outcome for row in labelled_answers()} == set(OUTCOMES)


def test_a_damaged_label_is_named_by_line(tmp_path: Path) -> None:
    good = '{"answer": "4", "expected": 4, "outcome": "correct", "why": "fine"}\n'
    path = tmp_path / "labels.jsonl"
    path.write_text(good + good.replace("correct", "right"))
    with pytest.raises(ValueError, match=r"line 2: outcome 'right'"):
        labelled_answers(path)
    path.write_text(good + '{"answer": "4"}\n')
    with pytest.raises(ValueError, match="line 2"):
        labelled_answers(path)


# -- exercises --------------------------------------------------------------------

SOLVED = {
    "correct": "**4,234**",
    "wrong_integer": "4234\n4235",
    "invalid_final_line": "The answer is 4234",
}


def test_three_outcomes_solved() -> None:
    assert check_three_outcomes(SOLVED, expected=4234)


@pytest.mark.parametrize(
    ("outcome", "answer", "said"),
    [
        ("correct", ..., "replace the ..."),
        ("correct", "4234 is it", "graded invalid_final_line"),
        ("wrong_integer", "4234", "graded correct"),
        ("invalid_final_line", "4233", "graded wrong_integer"),
        ("wrong_integer", 4235, "an answer is text in quotes, got 4235"),
    ],
)
def test_three_outcomes_rejects(
    outcome: str, answer: object, said: str, capsys: Capture
) -> None:
    assert not check_three_outcomes({**SOLVED, outcome: answer}, expected=4234)
    assert said in capsys.readouterr().out


def test_advantages_solved() -> None:
    # mean 0.75, sample spread 0.5: three times +0.5, and -1.5.
    assert check_advantages([1.0, 1.0, 1.0, 0.0], [0.5, 0.5, 0.5, -1.5])


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (..., "replace the ..."),
        ([0.5, 0.5], "a list of 4 numbers"),
        ([0.577, 0.577, 0.577, -1.732], "population spread"),
        ([0.25, 0.25, 0.25, -0.75], "now divide"),
        ([1.0, 1.0, 1.0, 0.0], "add up to 0"),
        ([1.0, 1.0, 1.0, -3.0], "not yet"),
        ([-0.5, -0.5, -0.5, 1.5], "the sign"),
        (0.5, "a list of 4 numbers"),
        (["+", "+", "+", "-"], "a list of 4 numbers"),
    ],
)
def test_advantages_rejects(answer: object, said: str, capsys: Capture) -> None:
    assert not check_advantages([1.0, 1.0, 1.0, 0.0], answer)
    assert said in capsys.readouterr().out


def test_flat_share_solved() -> None:
    assert check_flat_share(0.95, 8, 0.66)  # 0.95^8 = 0.6634, 0.05^8 is nothing


@pytest.mark.parametrize(
    ("p", "group_size", "answer", "said"),
    [
        (0.95, 8, ..., "replace the ..."),
        (0.95, 8, 66, "between 0 and 1, got 66; 66 % is 0.66"),
        (0.95, 8, 0.7, "one rollout less"),  # 0.95^7 = 0.698
        (0.4, 2, 0.36, "groups all right are flat too"),  # 0.6^2 of 0.16 + 0.36
        (0.95, 8, 0.34, "take the rest"),  # 1 - 0.66
        (0.95, 8, 0.05, "not yet"),
        (0.5, 2, 0.25, "all wrong are flat too"),  # flat is 0.25 + 0.25
    ],
)
def test_flat_share_rejects(
    p: float, group_size: int, answer: object, said: str, capsys: Capture
) -> None:
    assert not check_flat_share(p, group_size, answer)
    assert said in capsys.readouterr().out


def test_remedies_solved() -> None:
    assert check_remedies(dict(REMEDIES))


@pytest.mark.parametrize(
    ("finding", "answer", "said"),
    [
        ("mean 0.97, most groups flat", ..., "replace the ..."),
        ("mean 0.05, nearly all replies cut off", "smaller operands", "is cut off"),
        ("mean 0, every reply ends in a sentence", "pray", "is none of"),
    ],
)
def test_remedies_rejects(
    finding: str, answer: object, said: str, capsys: Capture
) -> None:
    assert not check_remedies({**REMEDIES, finding: answer})
    assert said in capsys.readouterr().out


GROUPS = [[1, 1, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0]]


def test_spread_solved() -> None:
    # Two groups with sample spread 0.5 and a flat one: 1/3.
    assert check_spread(GROUPS, 0.33)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (..., "replace the ..."),
        ([0.5, 0, 0.5], "one number"),
        (0.49, "whole batch"),  # 4 of 12 right: sqrt((8/12)(4/12)(12/11)) = 0.492
        (0.29, "divides by n"),  # sqrt(3)/4 = 0.433, twice, over 3
        (0.5, "leaves the flat groups out"),  # the mean of the two mixed ones
        (0.25, "not yet"),
    ],
)
def test_spread_rejects(answer: object, said: str, capsys: Capture) -> None:
    assert not check_spread(GROUPS, answer)
    assert said in capsys.readouterr().out


DATUM = {
    "input": [3, 1, 4, 1],
    "targets": [1, 4, 1, 5],
    "advantages": [0, 0, -0.5, -0.5],
}


def test_datum_rows_solved() -> None:
    assert check_datum_rows([3, 1, 4], [1, 5], -0.5, DATUM)


@pytest.mark.parametrize(
    ("row", "answer", "said"),
    [
        ("input", ..., "replace the ..."),
        ("input", [3, 1, 4, 1, 5], "5 entries"),
        ("input", "3141", "a list of numbers"),
        ("advantages", [0, 0, 0, -0.5], "first 2 targets belong to the prompt"),
        ("advantages", [0, -0.5, -0.5, -0.5], "first 2 targets belong"),
        ("targets", [3, 1, 4, 1], "shifted by one"),
        (
            "advantages",
            [-0.5, -0.5, -0.5, -0.5],
            "first 2 targets belong to the prompt",
        ),
    ],
)
def test_datum_rows_rejects(
    row: str, answer: object, said: str, capsys: Capture
) -> None:
    assert not check_datum_rows([3, 1, 4], [1, 5], -0.5, {**DATUM, row: answer})
    assert said in capsys.readouterr().out


def test_on_policy_loss_solved() -> None:
    # −(0.71 × 30 − 0.71 × 150) = 85.2
    assert check_on_policy_loss([(0.71, 30), (-0.71, 150)], 85.2)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (..., "replace the ..."),
        ("85", "one number"),
        (-85.2, "the sign"),
        (0.0, "a sum over its tokens"),
        (0.47, "mean per token"),  # 85.2 / 180
        (42.6, "mean per rollout"),
        (120.0, "not yet"),
    ],
)
def test_on_policy_loss_rejects(answer: object, said: str, capsys: Capture) -> None:
    assert not check_on_policy_loss([(0.71, 30), (-0.71, 150)], answer)
    assert said in capsys.readouterr().out


def test_mcnemar_solved(capsys: Capture) -> None:
    # 2 × (1 + 10 + 45) / 1024 = 0.109
    assert check_mcnemar(fixed=8, regressed=2, answer=0.11)
    assert "2 × (1 + 10 + 45) / 2^10 = 0.1094" in capsys.readouterr().out
    assert check_mcnemar(fixed=0, regressed=1, answer=1)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (..., "replace the ..."),
        ("0.11", "a number between 0 and 1"),
        (True, "a number between 0 and 1"),
        (11, "a number between 0 and 1, got 11; 11 % is 0.11"),
        (0.055, "one side"),
        (0.088, "2 of 10 alone"),
        (0.2, "toss 10 fair coins"),
    ],
)
def test_mcnemar_rejects(answer: object, said: str, capsys: Capture) -> None:
    assert not check_mcnemar(fixed=8, regressed=2, answer=answer)
    assert said in capsys.readouterr().out


MOVED = {
    ("correct", "correct"): 9,
    ("correct", "wrong_integer"): 3,
    ("token_limit", "correct"): 3,
    ("token_limit", "token_limit"): 1,
    ("invalid_final_line", "correct"): 2,
    ("wrong_integer", "wrong_integer"): 2,
}
READ = {"right_before": 12, "right_after": 14, "fixed": 5, "regressed": 3}


def test_transitions_solved() -> None:
    assert check_transitions(MOVED, READ)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("right_before", ..., "replace the ..."),
        ("right_before", 14, "rows are before"),
        ("right_after", 12, "rows are before"),
        ("fixed", 3, "rows are before"),
        ("regressed", 5, "rows are before"),
        ("right_before", 9, "add up the row"),
        ("fixed", 14, "without the tasks that were right all along"),
        ("regressed", "three", "not 'three'"),
    ],
)
def test_transitions_rejects(
    name: str, value: object, said: str, capsys: Capture
) -> None:
    assert not check_transitions(MOVED, {**READ, name: value})
    assert said in capsys.readouterr().out


KINDS = {
    "go on training tomorrow": "training",
    "sample the next step's rollouts": "sampler",
    "evaluate step 15 a week later": "training",
    "promote to a model": "sampler",
}


def test_checkpoint_kinds_solved() -> None:
    assert check_checkpoint_kinds(KINDS)


@pytest.mark.parametrize(
    ("purpose", "answer", "said"),
    [
        ("go on training tomorrow", ..., "replace the ..."),
        ("go on training tomorrow", "sampler", "no optimizer"),
        ("sample the next step's rollouts", "training", "until it is resumed"),
        ("evaluate step 15 a week later", "sampler", "session has ended"),
        ("promote to a model", "training", "save a sampler, and promote that"),
        ("promote to a model", "final", "'final' is none of sampler, training"),
        ("promote to a model", ["sampler"], "is none of sampler, training"),
    ],
)
def test_checkpoint_kinds_rejects(
    purpose: str, answer: object, said: str, capsys: Capture
) -> None:
    assert not check_checkpoint_kinds({**KINDS, purpose: answer})
    (line,) = [row for row in capsys.readouterr().out.splitlines() if purpose in row]
    assert said in line


def test_checkpoint_kinds_needs_every_purpose() -> None:
    assert not check_checkpoint_kinds({})


def test_adam_step_solved() -> None:
    # mean 2, 3, 1.5, over 1 - 1/8: 1.714; square 8, 12, 6, likewise: 6.857.
    assert check_adam_step([4, 4, 0], 0.65, beta1=0.5, beta2=0.5)
    # mean 2, 3, 1 -> 1.143; square 8, 12, 6.5 -> 7.429, root 2.726.
    assert check_adam_step([4, 4, -1], 0.42, beta1=0.5, beta2=0.5)
    # With other decays: mean 0.1 * 2 -> 2, square 0.05 * 4 -> 4.
    assert check_adam_step([2], 1, beta1=0.9, beta2=0.95)


@pytest.mark.parametrize(
    ("gradients", "answer", "said"),
    [
        ([4, 4, 0], ..., "replace the ..."),
        ([4, 4, 0], "0.65", "expected a number"),
        ([4, 4, 0], True, "expected a number"),
        ([4, 4, 0], 0, "a fresh Adam"),
        ([4, 4, -1], -1, "a fresh Adam"),
        ([4, 4, 0], 0.61, "correct both moments"),  # 1.5 / sqrt(6)
        ([4, 4, 0], -0.65, "the sign is not"),
        ([4, 4, 0], 1, "not yet"),
        ([4, 4, 0], 1.71, "not yet"),  # the mean, not divided
    ],
)
def test_adam_step_rejects(
    gradients: list[float], answer: object, said: str, capsys: Capture
) -> None:
    assert not check_adam_step(gradients, answer, beta1=0.5, beta2=0.5)
    assert said in capsys.readouterr().out


# Notebook 01: a grader and its test


def good_grader(reply: str | None, expected: int) -> float:
    lines = [line.strip() for line in (reply or "").splitlines() if line.strip()]
    whole = lines and re.fullmatch(r"[+-]?[0-9]{1,4000}", lines[-1])
    return 1.0 if whole and int(lines[-1]) == expected else 0.0


def test_grader_solved(capsys: Capture) -> None:
    assert check_grader(good_grader)
    assert capsys.readouterr().out == "✓ all 20 replies are graded right\n"
    # The course's own grader forgives decoration, which the exercise does not test.
    assert check_grader(
        lambda reply, expected: grade_final_integer(reply, expected).reward
    )
    assert check_grader(lambda reply, expected: good_grader(reply, expected) == 1)


def last_number(reply: str | None, expected: int) -> float:
    numbers = re.findall(r"-?\d+", reply or "")
    return 1.0 if numbers and numbers[-1] == str(expected) else 0.0


def any_number(reply: str | None, expected: int) -> float:
    return float(str(expected) in (reply or ""))


def as_text(reply: str | None, expected: int) -> float:
    lines = (reply or "").strip().splitlines()
    return float(bool(lines) and lines[-1].strip() == str(expected))


def as_float(reply: str | None, expected: int) -> float:
    try:
        return float(float((reply or "").strip().splitlines()[-1]) == float(expected))
    except (ValueError, IndexError, OverflowError):
        return 0.0


def by_int(reply: str | None, expected: int) -> float:
    try:
        return float(int((reply or "").strip().splitlines()[-1]) == expected)
    except (ValueError, IndexError):
        return 0.0


def last_line_with_blanks(reply: str | None, expected: int) -> float:
    lines = (reply or "").split("\n")
    return float(
        re.fullmatch(r" *[+-]?[0-9]{1,4000} *", lines[-1]) is not None
        and int(lines[-1]) == expected
    )


@pytest.mark.parametrize(
    ("grader", "said"),
    [
        (..., "repair broken_grader"),
        (1.0, "expected a function, got 1.0"),
        (last_number, "integers are compared, not texts"),
        (any_number, "the sign is part of the integer"),
        (
            as_text,
            "'01692' for 1692: gives 0.0, not 1.0; integers are compared, not texts",
        ),
        (as_float, "floats cannot tell these two apart"),
        (by_int, "'1_692' for 1692: gives 1.0, not 0.0; int() reads an underscore"),
        (last_line_with_blanks, "blank lines after the last one do not count"),
        (lambda reply, expected: None, "returns None, not 1.0 or 0.0"),
        (lambda reply: 1.0, "raises TypeError"),
        (lambda reply, expected: float(int(reply) == expected), "raises ValueError"),
        (lambda reply, expected: 1.0, "another integer is wrong"),
        (
            lambda reply, expected: good_grader(reply.strip(), expected),
            "reply can be None",
        ),
    ],
)
def test_grader_rejects(grader: object, said: str, capsys: Capture) -> None:
    assert not check_grader(grader)
    assert said in capsys.readouterr().out


TESTS = [("The answer is 12.", 12, 0.0), ("012", 12, 1), ("12.0", 12, 0)]


def test_reward_tests_solved(capsys: Capture) -> None:
    assert check_reward_tests(TESTS)
    assert capsys.readouterr().out.count("✓") == 4
    assert check_reward_tests([TESTS[0], ("\\boxed{12}", 12, 1.0)])  # two are enough
    assert check_reward_tests([("07", 7, 1.0), ("7.0", 7, 0.0), ("7 = 7", 7, 0.0)])


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (..., "replace the ..."),
        ("1692", "expected a list of (reply, expected, reward), got '1692'"),
        ([], "0 rows"),
        ([*TESTS, ("12", 12, 1.0)], "4 rows: use 1 to 3"),
        ([("12", 12)], "row 1: expected (reply, expected, reward)"),
        (
            [("12", "12", 1.0)],
            "row 1: the reply is text and the expected one an integer",
        ),
        ([("12", 12, 0.5)], "row 1: the reward is 1.0 or 0.0, got 0.5"),
        ([TESTS[0], ("The answer is 12.", 12, 1.0)], "row 2: labelled 1, but"),
        ([("**12**", 12, 0.0)], "'**12**' is correct by the course's rule"),
        ([("12", 12, 1.0)], "looks for the right number anywhere passes all your rows"),
        (TESTS[1:], "takes the last number of the text passes all your rows"),
        (TESTS[:2], "reads the last line as a float passes all your rows"),
        ([TESTS[0], TESTS[2]], "compares the last line as text passes all your rows"),
    ],
)
def test_reward_tests_rejects(rows: object, said: str, capsys: Capture) -> None:
    assert not check_reward_tests(rows)
    assert said in capsys.readouterr().out


# Notebook 02: flat groups


#: Mean 7 of 16, so p^4 + (1 - p)^4 = 0.0366 + 0.1001; two of four groups are flat.
SAMPLED = [[1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0]]
#: Four of six are flat, three of them all right.
MORE = [*SAMPLED, [1, 1, 1, 1], [1, 1, 1, 1]]


def test_flat_groups_solved(capsys: Capture) -> None:
    assert check_flat_groups(SAMPLED, {"expected": 0.14, "measured": 0.5})
    assert "2 of 4 groups = 0.500" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("groups", "name", "value", "said"),
    [
        (SAMPLED, "expected", ..., "… expected: replace the ..."),
        (SAMPLED, "expected", 0.04, "groups all wrong are flat too"),
        (SAMPLED, "expected", 0.10, "groups all right are flat too"),
        (SAMPLED, "expected", 0.86, "take the rest"),
        (SAMPLED, "expected", 0.5, "not yet: p is the mean reward"),
        (SAMPLED, "measured", ..., "… measured: replace the ..."),
        (
            SAMPLED,
            "measured",
            2,
            "✗ measured: expected a number between 0 and 1, got 2",
        ),
        (SAMPLED, "measured", 0.14, "not yet: a group is flat if"),
        ([*SAMPLED, [1, 0, 1, 1]], "measured", 0.6, "that can teach: take the rest"),
        (MORE, "measured", 0.5, "groups all wrong are flat too"),
        (MORE, "measured", 0.17, "groups all right are flat too"),
    ],
)
def test_flat_groups_rejects(
    groups: list[list[float]], name: str, value: object, said: str, capsys: Capture
) -> None:
    assert not check_flat_groups(groups, {name: value})
    assert said in capsys.readouterr().out


# Notebook 03: a function of advantages


def advantages_with(
    spread: Callable[[list[float]], float] = stdev,
    *,
    flat_below: float | None = 1e-8,
    batch_mean: bool = False,
    batch_spread: bool = False,
) -> Callable[[list[list[float]]], list[list[float]]]:
    """A learner's function, right by default."""

    def function(groups: list[list[float]]) -> list[list[float]]:
        everything = [reward for rewards in groups for reward in rewards]
        found = []
        for rewards in groups:
            if flat_below is not None and spread(rewards) <= flat_below:
                continue
            center = mean(everything if batch_mean else rewards)
            scale = spread(everything if batch_spread else rewards)
            found.append([(reward - center) / scale for reward in rewards])
        return found

    return function


def numpy_std(rewards: list[float]) -> float:
    return float(np.std(rewards, ddof=1))


def zeros_for_flat(groups: list[list[float]]) -> list[list[float]]:
    right = advantages_with()
    return [right([g])[0] if stdev(g) > 1e-8 else [0.0] * len(g) for g in groups]


def test_advantage_function_solved(capsys: Capture) -> None:
    assert check_advantage_function(advantages_with())
    assert capsys.readouterr().out.startswith("✓ right on all 7 batches")
    assert check_advantage_function(advantages_with(numpy_std))


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (..., "repair broken_advantages"),
        ([1.5, -0.5], "expected a function"),
        (advantages_with(pstdev), "divides by the population spread (n)"),
        (advantages_with(lambda rewards: 1.0), "only subtracts the mean"),
        (
            advantages_with(batch_mean=True, batch_spread=True),
            "an easy and a hard group, [1.0, 1.0, 1.0, 0.0] [0.0, 0.0, 1.0, 0.0]: your "
            "function compares with the whole batch",
        ),
        (advantages_with(batch_mean=True), "the baseline is the group's own mean"),
        (
            advantages_with(flat_below=None),
            "raises ZeroDivisionError: float division by zero; a flat group has no",
        ),
        (zeros_for_flat, "returns 2 groups and only 1 can teach"),
        (advantages_with(numpy_std, flat_below=0.0), "three times 0.1"),
        (lambda groups: groups[0], "not a list of lists of numbers"),
        (lambda groups: None, "returns None, not a list of lists"),
        (lambda groups: [], "returns 0 groups and 1 can teach"),
        (lambda groups: [[1.0, 0.0, 0.0, 0.0]], "subtract the group's mean"),
    ],
)
def test_advantage_function_rejects(
    function: object, said: str, capsys: Capture
) -> None:
    assert not check_advantage_function(function)
    assert said in capsys.readouterr().out


def test_a_learners_function_cannot_spoil_the_hidden_groups() -> None:
    def empties(groups: list[list[float]]) -> list[list[float]]:
        found = advantages_with()(groups)
        groups.clear()
        return found

    assert check_advantage_function(empties)
    assert check_advantage_function(advantages_with())


# Notebook 04: the size of a group, and what to do with a run


def test_group_size_solved(capsys: Capture) -> None:
    # 0.95^13 = 0.513, 0.95^14 = 0.488
    assert check_group_size(0.95, 0.5, 14)
    assert "48.8% are flat" in capsys.readouterr().out
    assert check_group_size(0.5, 0.5, 2)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (..., "replace the ..."),
        (13, "with groups of 13, 51.3% are flat, more than 50%"),
        (15, "a smaller group would do"),
        (13.5, "a whole number of rollouts from 2 on, got 13.5"),
        (1, "from 2 on, got 1"),
        ("14", "got '14'"),
    ],
)
def test_group_size_rejects(answer: object, said: str, capsys: Capture) -> None:
    assert not check_group_size(0.95, 0.5, answer)
    assert said in capsys.readouterr().out


DECISIONS = {
    "A": "more tokens",
    "B": "stop or harder tasks",
    "C": "a lower learning rate",
    "D": "go on",
    "E": "sample from the new snapshot",
}


def test_decisions_solved() -> None:
    assert check_decisions(DECISIONS)


@pytest.mark.parametrize(
    ("run", "decision", "said"),
    [
        ("A", ..., "… A: replace the ... with a decision"),
        ("A", "stop or harder tasks", "cut off say nothing"),
        ("B", "go on", "no group is kept any more"),
        ("C", "go on", "steps are too large"),
        ("D", "a lower learning rate", "the loss tells only of lengths"),
        ("E", "a lower learning rate", "came from other weights"),
        ("E", "pray", "'pray' is none of a lower learning rate, go on"),
        ("F", "go on", "'F' is not asked for; the names are A, B, C, D, E"),
    ],
)
def test_decisions_rejects(
    run: str, decision: object, said: str, capsys: Capture
) -> None:
    assert not check_decisions({**DECISIONS, run: decision})
    assert said in capsys.readouterr().out


# Notebook 05: how many tasks


def test_tasks_needed_solved(capsys: Capture) -> None:
    # 12 against 3: 2 × (1 + 15 + 105 + 455) / 2^15 = 0.0352
    assert check_tasks_needed(4, 1, 192, per=64)
    said = capsys.readouterr().out
    assert "192 tasks, 12 fixed and 3 regressed: p = 0.0352" in said


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (..., "replace the ..."),
        (15, "15 is no multiple of 64: count all held-out tasks"),
        (128, "128 tasks, 8 fixed and 2 regressed: p = 0.1094, not below 0.05"),
        (256, "fewer tasks would do"),
        (192.5, "a whole number of tasks, got 192.5"),
        (0, "a whole number of tasks, got 0"),
    ],
)
def test_tasks_needed_rejects(answer: object, said: str, capsys: Capture) -> None:
    assert not check_tasks_needed(4, 1, answer, per=64)
    assert said in capsys.readouterr().out


# Notebook 06: the plan of a resume


def plan_with(
    *, step: int = 1, first: int = 0, count: int = 0, keep: int | None = 0
) -> Callable[[list[int], int, int], dict[str, object]]:
    """A learner's plan; what each argument shifts is right by default."""

    def plan(rows: list[int], saved: int, tasks_per_step: int) -> dict[str, object]:
        start = saved * tasks_per_step + first
        kept = rows if keep is None else [row for row in rows if row <= saved + keep]
        tasks = list(range(start, start + tasks_per_step + count))
        return {"keep": kept, "step": saved + step, "tasks": tasks}

    return plan


def test_resume_plan_solved(capsys: Capture) -> None:
    assert check_resume_plan(plan_with())
    assert "no step lost, none doubled" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (..., "repair broken_plan"),
        (16, "expected a function"),
        (plan_with(step=0), "step 15 is in the checkpoint already"),
        (plan_with(step=2), "holds steps up to 15; next is not 17"),
        (plan_with(keep=None), "step 16 is kept, but its weights were lost"),
        (plan_with(keep=-1), "steps 1 to 15 are in the checkpoint and stay"),
        (plan_with(first=1), "positions 0 to 119, so the next is 120, not 121"),
        (plan_with(count=-1), "a step takes 8 tasks, got 7"),
        (plan_with(first=-8), "so the next is 120, not 112"),
        # Hard-coded for the first run of the exercise.
        (
            lambda rows, saved, tasks: plan_with()(list(range(1, 18)), 15, 8),
            "steps 1 to 10 recorded, saved after step 10",
        ),
        (lambda rows, saved, tasks: 16, "a dict with keep, step and tasks, got 16"),
        (
            lambda rows, saved, tasks: {"keep": rows, "step": "16", "tasks": []},
            "step is an integer",
        ),
    ],
)
def test_resume_plan_rejects(plan: object, said: str, capsys: Capture) -> None:
    assert not check_resume_plan(plan)
    assert said in capsys.readouterr().out


# -- notebook 07 ------------------------------------------------------------------

CHOSEN = {
    "invoices": "sft",
    "sql": "rl",
    "tone": "settle",
    "json": "prompt",
    "puzzles": "sample",
    "proofs": "sft",
}
# 9 good to both, 4 and 2 to one only, 5 to none: they agree on 14 of 20. By chance
# 13/20 × 11/20 + 7/20 × 9/20 = 0.515; (0.7 − 0.515) / 0.485 = 0.381.
AGREED = {"share": 0.7, "kappa": 0.38}


def test_tools_that_fit(capsys: Capture) -> None:
    assert check_tools(CHOSEN)
    assert capsys.readouterr().out.count("✓") == 6


@pytest.mark.parametrize(
    ("wish", "choice", "said"),
    [
        ("tone", "rl", "three people who disagree are three rewards"),
        ("proofs", "rl", "64 attempts without a success"),
        ("sql", "sft", "a program can score each reply"),
        ("puzzles", "rl", "why train, if a check can choose"),
        ("json", "rl", "try the cheapest thing first"),
        ("invoices", "rl", "nothing has to be explored"),
        ("sql", "fine-tune", "is none of prompt, sample, sft, rl, settle"),
    ],
)
def test_a_tool_that_does_not_fit(
    wish: str, choice: str, said: str, capsys: Capture
) -> None:
    assert not check_tools({**CHOSEN, wish: choice})
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("share", 0.45, "they also agree where both say bad"),  # 9 of 20
        ("share", 0.3, "that is how often they differ"),
        ("share", 70, "70 % is 0.7"),
        ("kappa", 0.185, "divide by what chance leaves open"),
        ("kappa", 0.515, "that is the agreement by chance alone"),
        ("kappa", 0.4, "chance is one half only if"),
        ("kappa", 0.533, "chance makes them agree on bad, too"),  # 0.3425 / 0.6425
        ("kappa", 0.9, "not yet"),
    ],
)
def test_agreement_worked_out_wrongly(
    name: str, value: float, said: str, capsys: Capture
) -> None:
    assert check_agreement(AGREED)
    assert not check_agreement({**AGREED, name: value})
    assert said in capsys.readouterr().out


def fair(answer: str, exact: int) -> float:
    """The smaller over the larger, from one half up."""
    if not re.fullmatch("[0-9]{1,12}", answer) or int(answer) == 0:
        return 0.0
    low, high = sorted((int(answer), exact))
    return max(0.0, 2 * low / high - 1)


def test_a_fair_grader_of_estimates(capsys: Capture) -> None:
    assert check_estimate_grader(fair)
    assert capsys.readouterr().out.count("✓") == 5
    assert check_estimate_grader(with_a_quotient)


def by_difference(answer: str, exact: int) -> float:
    short = answer.isdigit() and len(answer) < 12
    return max(0.0, 1 - abs(int(answer) - exact) / exact) if short else 0.0


def with_a_quotient(answer: str, exact: int) -> float:
    if not answer.isdigit():
        return 0.0
    low, high = sorted((int(answer), exact))
    return 2 - high / low if 2 * low > high else 0.0


def lopsided(answer: str, exact: int) -> float:
    """A quotient below, a difference above: 1 − 423/1692 = 0.75 for 2115."""
    if not fair(answer, exact) or int(answer) <= exact:
        return fair(answer, exact)
    return 1 - (int(answer) - exact) / exact


def all_or_nothing(answer: str, exact: int) -> float:
    return float(fair(answer, exact) > 0.8) if answer != str(exact) else 1.0


@pytest.mark.parametrize(
    ("grader", "said"),
    [
        (by_difference, "'10' is farther off than a factor of 2 and earns"),
        (lambda answer, exact: 1 - abs(int(answer) - exact) / exact, "raises ValueErr"),
        (lambda answer, exact: fair(answer, exact) + 0 * float(answer or 0), "raises"),
        (all_or_nothing, "a policy could not tell which way to go"),
        (lambda answer, exact: fair(answer.split()[-1], exact), "raises IndexError"),
        (lambda answer, exact: fair(answer[-4:], exact), "is no plain number and"),
        (lopsided, "half of it earns 0 and twice 0; four fifths\n  0.599 and five"),
        (lambda answer, exact: 0.9 * fair(answer, exact), "the exact 1692 earns 0.9"),
        (lambda answer, exact: fair(answer, exact) or None, "returns None, no finite"),
        (lambda answer, exact: fair(answer, exact) if answer != "0" else 0.9, "facto"),
    ],
)
def test_a_grader_of_estimates_that_is_not_fair(
    grader: Callable[[str, int], Any], said: str, capsys: Capture
) -> None:
    assert not check_estimate_grader(grader)
    assert said in capsys.readouterr().out


# What no answer may do


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


JUNK: tuple[object, ...] = (
    None,
    True,
    "text",
    b"bytes",
    float("nan"),
    float("inf"),
    10**5000,
    1j,
    [],
    [[]],
    [None],
    {},
    {"unknown": 1},
    {1: 2},
    object(),
    Unprintable(),
    np.zeros((2, 2)),
    np.array(["a"]),
    print,
    lambda *arguments: np.zeros((2, 2)),
    lambda *arguments: {"keep": [Unprintable()], "step": 1, "tasks": 3},
    lambda *arguments: 1 / 0,
)

CHECKERS: tuple[Callable[[Any], bool], ...] = (
    lambda answer: check_three_outcomes(answer, expected=4234),
    check_grader,
    check_reward_tests,
    lambda answer: check_spread(GROUPS, answer),
    check_remedies,
    lambda answer: check_flat_share(0.95, 8, answer),
    lambda answer: check_flat_groups(SAMPLED, answer),
    lambda answer: check_datum_rows([3, 1, 4], [1, 5], -0.5, answer),
    lambda answer: check_on_policy_loss([(0.71, 30), (-0.71, 150)], answer),
    lambda answer: check_advantages([1.0, 1.0, 1.0, 0.0], answer),
    check_advantage_function,
    lambda answer: check_group_size(0.95, 0.5, answer),
    check_decisions,
    lambda answer: check_mcnemar(8, 2, answer),
    lambda answer: check_tasks_needed(4, 1, answer, per=64),
    lambda answer: check_transitions(MOVED, answer),
    check_checkpoint_kinds,
    lambda answer: check_adam_step([4, 4, 0], answer, beta1=0.5, beta2=0.5),
    check_resume_plan,
    check_tools,
    check_agreement,
    check_estimate_grader,
)


@pytest.mark.parametrize("number", range(len(CHECKERS)))
def test_no_answer_breaks_a_checker_or_passes_unseen(
    number: int, capsys: Capture
) -> None:
    for answer in JUNK:
        assert CHECKERS[number](answer) is False
        out = capsys.readouterr().out
        assert "✗" in out or "…" in out


#: Checker → a right answer with one entry, whose every other value is junk in turn.
NAMED: tuple[tuple[Callable[[Any], bool], dict[str, object]], ...] = (
    (CHECKERS[0], dict(SOLVED)),
    (check_remedies, dict(REMEDIES)),
    (CHECKERS[6], {"expected": 0.14, "measured": 0.5}),
    (CHECKERS[7], dict(DATUM)),
    (check_decisions, dict(DECISIONS)),
    (CHECKERS[15], dict(READ)),
    (check_checkpoint_kinds, dict(KINDS)),
    (check_tools, dict(CHOSEN)),
    (check_agreement, dict(AGREED)),
)


@pytest.mark.parametrize("number", range(len(NAMED)))
def test_no_entry_breaks_a_checker_or_passes_unseen(number: int) -> None:
    checker, solved = NAMED[number]
    assert checker(solved)
    for name in solved:
        for junk in JUNK:
            if not isinstance(junk, str):  # any text is an answer to some exercise
                assert checker({**solved, name: junk}) is False


@pytest.mark.parametrize("number", range(len(CHECKERS)))
def test_an_untouched_cell_is_told_what_to_replace(
    number: int, capsys: Capture
) -> None:
    assert CHECKERS[number](...) is False
    printed = capsys.readouterr().out.splitlines()
    assert printed
    assert all(line.startswith("… ") and "replace the ..." in line for line in printed)


def test_numbers_of_numpy_are_numbers() -> None:
    assert check_spread(GROUPS, np.float32(1 / 3))
    assert check_advantages([1.0, 1.0, 1.0, 0.0], np.array([0.5, 0.5, 0.5, -1.5]))
    assert check_group_size(0.95, 0.5, np.int64(14))


# -- 08: losses and stability -------------------------------------------------------

TOKENS = [(1.5, 2.0), (1.5, -2.0), (0.5, -2.0)]
PPO, CISPO = [0.0, -3.0, 0.0], [2.4, -2.4, -1.6]


def test_pushes_solved(capsys: Capture) -> None:
    assert check_pushes(TOKENS, PPO, CISPO)
    assert capsys.readouterr().out.count("✓") == 2


@pytest.mark.parametrize(
    ("ppo", "cispo", "said"),
    [
        (..., CISPO, "ppo: replace the ... with a list of 3 numbers"),
        (PPO, ..., "cispo: replace the ..."),
        (0.0, CISPO, "ppo: expected a list of 3 numbers, got 0.0"),
        ([0.0, -3.0], CISPO, "a list of 3 numbers"),
        (["0", "-3", "0"], CISPO, "a list of 3 numbers"),
        ([0.0, 0.0, 0.0], CISPO, "token 2: not silent"),
        ([2.4, -3.0, 0.0], CISPO, "token 1: that would be cispo's"),
        ([0.0, -2.4, 0.0], CISPO, "token 2: that would be cispo's"),
        ([3.0, -3.0, 0.0], CISPO, "token 1: the clipped product is the smaller one"),
        ([0.0, 3.0, 0.0], CISPO, "token 2: the sign"),
        (PPO, [0.0, -2.4, 0.0], "token 1: cispo bounds a token's weight"),
        (PPO, [3.0, -2.4, -1.6], "token 1: the ratio lies outside the bounds"),
        (PPO, [2.4, 2.4, -1.6], "token 2: the sign"),
        (PPO, [1.2, -2.4, -1.6], "token 1: not 1.2"),
    ],
)
def test_pushes_rejects(ppo: Any, cispo: Any, said: str, capsys: Capture) -> None:
    assert not check_pushes(TOKENS, ppo, cispo)
    assert said in capsys.readouterr().out


KNOBS = {
    "A": "a higher learning rate",
    "B": "a lower learning rate",
    "C": "fewer updates per batch",
    "D": "a KL coefficient",
    "E": "larger groups",
}


def test_knobs_solved() -> None:
    assert check_knobs(KNOBS)


@pytest.mark.parametrize(
    ("run", "answer", "said"),
    [
        ("A", ..., "replace the ..."),
        ("A", "larger groups", "its KL is next to nothing"),
        ("B", "a KL coefficient", "the integers in them become wrong"),
        ("C", "a lower learning rate", "has left the bounds"),
        ("D", "larger groups", "drifts ever further"),
        ("E", "a higher learning rate", "hardly a group has a spread"),
        ("E", "more tokens", "is none of"),
    ],
)
def test_knobs_rejects(run: str, answer: object, said: str, capsys: Capture) -> None:
    assert not check_knobs({**KNOBS, run: answer})
    assert said in capsys.readouterr().out


def ppo_loss(ratio: float, advantage: float) -> float:
    clipped = min(max(ratio, 0.8), 1.2)
    return -min(ratio * advantage, clipped * advantage)


def test_ppo_loss_solved() -> None:
    assert check_ppo_loss(ppo_loss)
    assert check_ppo_loss(lambda r, a: np.float64(ppo_loss(r, a)))


def always_clipped(ratio: float, advantage: float) -> float:
    return -min(max(ratio, 0.8), 1.2) * advantage


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (..., "repair broken_ppo"),
        (1.2, "expected a function"),
        (always_clipped, "always clips"),
        (always_clipped, "its loss is 1.5, yours gives 1.2"),
        (lambda r, a: -r * a, "that is importance_sampling"),
        (lambda r, a: -ppo_loss(r, a), "has the wrong sign"),
        (lambda r, a: -max(r * a, -always_clipped(r, a)), "the smaller one"),
        (lambda r, a: None, "returns None, not a number"),
        (lambda r, a: 1 / a, "raises ZeroDivisionError"),
        (lambda r: r, "raises TypeError"),
        (lambda r, a: ppo_loss(r, a) + 1, "minus the smaller of two products"),
        (lambda r, a: ppo_loss(r, a) if r > 1 else -r * a, "down far enough"),
    ],
)
def test_ppo_loss_rejects(answer: Any, said: str, capsys: Capture) -> None:
    assert not check_ppo_loss(answer)
    assert said in capsys.readouterr().out
