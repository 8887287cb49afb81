"""Parameters that do not exist or cannot work are refused, with the remedy."""

from __future__ import annotations

from typing import Any

import pytest

from rlhelpers.parameters import ParameterError, check_parameters, whole_number

DECLARED = "# Parameters: change them here.\nSTEPS = None  # steps\nGROUP_SIZE = 4"
GOOD: dict[str, Any] = {
    "BACKEND": "local",
    "MODEL": None,
    "SEED": 0,
    "MIN_OPERAND": None,
    "MAX_OPERAND": 99,
    "STEPS": 3,
    "TASKS_PER_STEP": 2,
    "GROUP_SIZE": 8,
    "MAX_TOKENS": 160,
    "LEARNING_RATE": 1e-3,
    "EVALUATION_TASKS": None,
    "KL_EVERY": 0,
    "KL_COEFFICIENT": 0.05,
    "UPDATES_PER_BATCH": 2,
    "INTERRUPT_AFTER": 1,
    "PROMOTED_NAME": "my-model",
    "TOKEN_LIMIT": 10_000,
    "PRICES": [1, 2.5, 4],
    "RUNS_DIR": "../runs",
}


def refused(**changes: Any) -> str:
    with pytest.raises(ParameterError) as caught:
        check_parameters({**GOOD, **changes})
    return str(caught.value)


def test_good_values_pass() -> None:
    check_parameters(GOOD)
    check_parameters({**GOOD, "BACKEND": "fireworks", "MAX_OPERAND": 9999})
    check_parameters({"A": 3, "unrelated": object()})


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("GROUP_SIZE", "8", "at least 2, or None for the preset's value; write it"),
        ("GROUP_SIZE", 1, "at least 2"),
        ("GROUP_SIZE", 8.0, "whole number"),
        ("GROUP_SIZE", True, "whole number"),
        ("STEPS", 0, "at least 1"),
        ("STEPS", -3, "at least 1"),
        ("TASKS_PER_STEP", 0, "at least 1"),
        ("EVALUATION_TASKS", 0, "at least 1"),
        ("INTERRUPT_AFTER", None, "at least 1"),
        ("KL_EVERY", -1, "at least 0"),
        ("KL_COEFFICIENT", -0.1, "at least 0, such as 0.1; 0 is off"),
        ("KL_COEFFICIENT", "0.1", "write it without quotes"),
        ("UPDATES_PER_BATCH", 0, "at least 1"),
        ("SEED", None, "at least 0"),
        ("SEED", "1", "write it without quotes"),
        ("MIN_OPERAND", -1, "at least 0"),
        ("LEARNING_RATE", 0.0, "above 0"),
        ("LEARNING_RATE", "1e-4", "above 0"),
        ("LEARNING_RATE", float("nan"), "above 0"),
        ("MAX_TOKENS", 0, "at least 1"),
        ("MAX_TOKENS", 4096, "context of 1024 tokens"),
        ("PROMOTED_NAME", "My_Model", "lower-case letters"),
        ("PROMOTED_NAME", "", "lower-case letters"),
        ("PROMOTED_NAME", 5, "as in 'my-model', or None"),
        ("TOKEN_LIMIT", "1e6", "at least 1"),
        ("PRICES", [1, 2], "three prices"),
        ("PRICES", 3.0, "three prices"),
        ("PRICES", [1, 2, -1], "three prices"),
        ("RUNS_DIR", None, "must name a folder"),
        ("RUNS_DIR", " ", "must name a folder"),
        ("BACKEND", "Fireworks", "must be one of 'local', 'fireworks'"),
        ("MODEL", "tiny", "known models: tiny-arithmetic"),
        ("MODEL", "qwen3p8-27b", "set BACKEND='fireworks'"),
    ],
)
def test_a_bad_value_is_named_with_its_remedy(
    name: str, value: object, said: str
) -> None:
    text = refused(**{name: value})
    assert text.startswith(f"{name} = {value!r}: ")
    assert said in text


def test_operands_must_be_in_order() -> None:
    text = refused(MIN_OPERAND=100, MAX_OPERAND=12)
    assert text.startswith("MIN_OPERAND = 100 is above MAX_OPERAND = 12: set both")
    text = refused(MIN_OPERAND=200, MAX_OPERAND=None)
    assert "MIN_OPERAND = 200 is above MAX_OPERAND = 99 (preset)" in text


def test_every_problem_is_said_at_once() -> None:
    text = refused(STEPS=0, SEED=-1)
    assert "STEPS = 0" in text
    assert "SEED = -1" in text


def test_a_notebooks_own_parameters_have_rules_too() -> None:
    rule = whole_number(0, or_none=False)
    check_parameters({"A": 0}, A=rule)
    with pytest.raises(ParameterError, match="A = None: must be a whole number"):
        check_parameters({"A": None}, A=rule)


def test_a_name_that_papermill_set_and_the_notebook_lacks() -> None:
    history = ["", DECLARED, "# Parameters\nSTEP = 3\nGROUPSIZE = 8\nXYZ = 1\n"]
    text = refused(In=history)
    assert "STEP is no parameter of this notebook (did you mean STEPS?)" in text
    assert "GROUPSIZE is no parameter of this notebook (did you mean GROUP_S" in text
    assert "XYZ is no parameter of this notebook; it has GROUP_SIZE, STEPS" in text


@pytest.mark.parametrize(
    "history",
    [
        ["", DECLARED],
        ["", DECLARED, "# Parameters\nSTEPS = 3\n"],
        ["", DECLARED, "# Parameters\nSTEP = 3\n", DECLARED],  # the cell was mended
        ["", DECLARED, "# Parameters\nSTEP = 3\n", "x", "# Parameters\nSTEPS = 3\n"],
        ["", "# Parameters\nSTEP = 3\n"],  # nothing says what there is
    ],
)
def test_what_is_no_misspelling(history: list[str]) -> None:
    check_parameters({**GOOD, "In": history})
