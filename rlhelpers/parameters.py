"""The notebooks' parameters: which names there are, and which values can work.

A notebook is run with other parameters by papermill, which puts a cell of assignments
after the one tagged ``parameters``. A misspelt name would change nothing there, and a
value that cannot work would fail much later, perhaps after it has cost something. So
every notebook calls :func:`check_parameters` before it does anything.

Example:
    >>> check_parameters({"STEPS": 3, "GROUP_SIZE": "8"})
    Traceback (most recent call last):
    ...
    rlhelpers.parameters.ParameterError: GROUP_SIZE = '8': must be a whole number of \
at least 2, or None for the preset's value; write it without quotes
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from rlhelpers.checkpoints import check_label
from rlhelpers.models import BACKENDS, ModelPreset, resolve_preset
from rlhelpers.preflight import check_prices

#: Takes a value; returns what it must be, or None if it can work.
Rule = Callable[[Any], str | None]

# How the first line of a notebook's own parameters cell begins, and what the first
# line of the cell is that papermill adds.
_DECLARED = "# Parameters:"
_INJECTED = "# Parameters"


class ParameterError(ValueError):
    """A parameter that the notebook does not have, or a value that cannot work."""


def _rule(holds: Callable[[Any], bool], words: str, *, or_none: bool = False) -> Rule:
    """A rule: ``holds`` is true of the value, or it is None where that is allowed."""
    return lambda value: None if (or_none and value is None) or holds(value) else words


def whole_number(least: int, *, or_none: bool = True) -> Rule:
    """A rule: an integer of at least ``least``, or None where that has a meaning."""
    return _rule(
        lambda value: (
            isinstance(value, int) and not isinstance(value, bool) and value >= least
        ),
        f"must be a whole number of at least {least}"
        + (", or None for the preset's value" if or_none else ""),
        or_none=or_none,
    )


def _is_number(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value)


def _passes(check: Callable[[Any], object], value: Any) -> bool:
    """Whether a function that refuses bad values with an error takes this one."""
    try:
        check(value)
    except (ValueError, TypeError):
        return False
    return True


#: A rule: a number above 0.
above_zero: Rule = _rule(
    lambda value: _is_number(value) and value > 0, "must be a number above 0"
)

#: What the parameters that several notebooks share may be.
RULES: Mapping[str, Rule] = {
    "BACKEND": _rule(
        lambda value: value in BACKENDS,
        f"must be one of {', '.join(map(repr, BACKENDS))}",
    ),
    "SEED": whole_number(0, or_none=False),
    "MIN_OPERAND": whole_number(0),
    "MAX_OPERAND": whole_number(1),
    "STEPS": whole_number(1),
    "TASKS": whole_number(1),
    "TASKS_PER_STEP": whole_number(1),
    "GROUP_SIZE": whole_number(2),
    "MAX_TOKENS": whole_number(1),
    "LEARNING_RATE": _rule(
        lambda value: _is_number(value) and value > 0,
        "must be a number above 0, such as 6e-4, or None for the preset's value",
        or_none=True,
    ),
    "EVALUATION_TASKS": whole_number(1),
    "KL_EVERY": whole_number(0),
    "KL_COEFFICIENT": _rule(
        lambda value: _is_number(value) and value >= 0,
        "must be a number of at least 0, such as 0.1; 0 is off",
        or_none=True,
    ),
    "UPDATES_PER_BATCH": whole_number(1),
    "INTERRUPT_AFTER": whole_number(1, or_none=False),
    "PROMOTED_NAME": _rule(
        lambda value: _passes(check_label, value),
        "must be lower-case letters, digits and hyphens, as in 'my-model', or None",
        or_none=True,
    ),
    "TOKEN_LIMIT": whole_number(1),
    "PRICES": _rule(
        lambda value: _passes(check_prices, value),
        "must be three prices, dollars per million prefill, sampled and trained "
        "tokens, such as [1.5, 4, 6], or None",
        or_none=True,
    ),
    "RUNS_DIR": _rule(
        lambda value: isinstance(value, str) and bool(value.strip()),
        "must name a folder",
    ),
}


def check_parameters(namespace: Mapping[str, Any], **rules: Rule) -> None:
    """Refuse parameters that do not exist or cannot work, before anything is sent.

    Args:
        namespace: The notebook's ``globals()``.
        rules: Rules of this notebook's own parameters, beside :data:`RULES`.

    Raises:
        ParameterError: Every parameter that is wrong, with the value seen and what to
            write instead.
    """
    problems = _unknown_names(namespace.get("In", ()))
    for name, rule in {**RULES, **rules}.items():
        if name in namespace and (words := rule(namespace[name])):
            problems.append(_problem(name, namespace[name], words))
    if not problems:
        problems = _do_not_go_together(namespace)
    if problems:
        raise ParameterError("; ".join(problems))


def _problem(name: str, value: Any, words: str) -> str:
    text = f"{name} = {value!r}: {words}"
    if isinstance(value, str) and "number" in words:
        text += "; write it without quotes"
    return text


def _unknown_names(history: Sequence[str]) -> list[str]:
    """Names that papermill set and the parameters cell does not have.

    Args:
        history: Sources of the executed cells, IPython's ``In``; the latest of each
            kind counts, because cells can be run again.
    """
    declared: set[str] = set()
    injected: set[str] = set()
    for cell in history:
        first = cell.split("\n", 1)[0]
        if first.startswith(_DECLARED):
            declared, injected = _assigned(cell), set()
        elif first == _INJECTED:
            injected = _assigned(cell)
    return [
        f"{name} is no parameter of this notebook{_meant(name, declared)}; it has "
        + ", ".join(sorted(declared))
        for name in sorted(injected - declared)
        if declared
    ]


def _meant(name: str, known: Iterable[str]) -> str:
    found = get_close_matches(name.upper(), sorted(known), n=1)
    return f" (did you mean {found[0]}?)" if found else ""


def _assigned(source: str) -> set[str]:
    return {
        target.id
        for statement in ast.parse(source).body
        if isinstance(statement, ast.Assign)
        for target in statement.targets
        if isinstance(target, ast.Name)
    }


def _do_not_go_together(namespace: Mapping[str, Any]) -> list[str]:
    """Problems between parameters that are right one by one."""
    if "BACKEND" not in namespace:
        return []
    try:
        preset = resolve_preset(namespace.get("MODEL"), namespace["BACKEND"])
    except ValueError as error:
        return [f"MODEL = {namespace.get('MODEL')!r}: {error}"]
    return [*_operand_problems(namespace, preset), *_length_problems(namespace, preset)]


def _operand_problems(namespace: Mapping[str, Any], preset: ModelPreset) -> list[str]:
    values, words = [], []
    for name, default in zip(
        ("MIN_OPERAND", "MAX_OPERAND"), preset.operands, strict=True
    ):
        given = namespace.get(name)
        values.append(default if given is None else given)
        words.append(f"{name} = {values[-1]}" + (" (preset)" if given is None else ""))
    if values[0] <= values[1]:
        return []
    return [f"{words[0]} is above {words[1]}: set both, the smaller one first"]


def _length_problems(namespace: Mapping[str, Any], preset: ModelPreset) -> list[str]:
    limit = namespace.get("MAX_TOKENS")
    if limit is None or limit < preset.context:
        return []
    return [
        f"MAX_TOKENS = {limit}: prompt and reply share the model's context of "
        f"{preset.context} tokens; set it lower"
    ]
