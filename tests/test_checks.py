"""Notebook claims, exercise checkers and labelled answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhelpers import classify_outcome, grade_final_integer
from rlhelpers.analysis import OUTCOMES
from rlhelpers.checks import (
    REMEDIES,
    LabelledAnswer,
    Lesson,
    LessonFailed,
    check_adam_step,
    check_advantages,
    check_checkpoint_kinds,
    check_datum_rows,
    check_flat_share,
    check_mcnemar,
    check_on_policy_loss,
    check_remedies,
    check_spread,
    check_three_outcomes,
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
        (0.95, 8, 66, "between 0 and 1"),
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
        (0.5, "not yet"),
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
        (11, "lies between 0 and 1, got 11"),
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
        ("promote to a model", "final", "'final' is no kind"),
        ("promote to a model", ["sampler"], "is no kind"),
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
        ([4, 4, 0], "0.65", "a step is a number"),
        ([4, 4, 0], True, "a step is a number"),
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
