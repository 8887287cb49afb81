"""What the exercise checkers share: a mark, the reason for it, and no exception.

A checker prints ``…`` for what is not tried yet, ``✓`` for what is right and ``✗`` with
what is wrong and what to think of. Whatever it is given, it returns a bool.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, TypeGuard

#: The untouched answer of an exercise cell.
NOT_TRIED = ...


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a finite number, numpy's included; True and False are none."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int beyond every float
        return False


def is_whole_number(value: object, *, most: int = 10_000) -> TypeGuard[int]:
    """Whether a value is an integer from 0 to ``most``; True and False are none."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        return False
    return 0 <= int(value) <= most


def as_list(value: object) -> list[Any] | None:
    """A list, tuple or array as a list; ``None`` for anything else."""
    if isinstance(value, list | tuple):
        return list(value)
    plain = value.tolist() if hasattr(value, "tolist") else None
    return plain if isinstance(plain, list) else None


def shown(value: object, width: int = 60) -> str:
    """A learner's value as text that fits on a line."""
    try:
        text = repr(value)
    except Exception:  # e.g. an int of more than 4300 digits
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= width else f"{text[: width - 4]}...{text[-1]}"


def near(value: float, target: float, tolerance: float) -> bool:
    """Whether two numbers agree within a tolerance, rounding of the sum forgiven."""
    return abs(value - target) <= tolerance + 1e-12


def check_number(
    answer: object,
    right: float,
    *,
    wanted: str,
    well: str,
    slips: Sequence[tuple[float, str]],
    hint: str,
    tolerance: float = 0.006,
    is_share: bool = False,
    name: str = "",
) -> bool:
    """Mark one number that a learner worked out.

    Args:
        answer: The learner's; ``...`` if not tried yet.
        right: The right number.
        wanted: What kind of number it is, to stand after "replace the ... with".
        well: Said of a right answer.
        slips: (the number that a likely mistake gives, what that mistake is), the
            likeliest first.
        hint: Said of any other number.
        tolerance: Largest distance from a number that counts as that number; the
            default accepts two decimals.
        is_share: The number lies between 0 and 1.
        name: Stands before every line, where an exercise asks for several numbers.

    Returns:
        Whether the answer is right.
    """
    start = f"{name}: " if name else ""
    if answer is NOT_TRIED:
        print(f"… {start}replace the ... with {wanted}")
        return False
    if not is_number(answer):
        print(f"✗ {start}expected {wanted}, got {shown(answer)}")
        return False
    number = float(answer)
    if is_share and not 0 <= number <= 1:
        percent = f"; {number:g} % is {number / 100:g}" if 1 < number <= 100 else ""
        print(f"✗ {start}expected {wanted}, got {number:g}{percent}")
        return False
    if near(number, right, tolerance):
        print(f"✓ {start}{well}")
        return True
    for value, said in slips:
        if near(number, value, tolerance):
            print(f"✗ {start}{said}")
            return False
    print(f"✗ {start}not yet: {hint}")
    return False


def check_choices(
    answers: object,
    right: Mapping[str, str],
    hints: Mapping[str, str],
    *,
    options: Sequence[str],
    wanted: str,
) -> bool:
    """Mark one choice for each of several questions.

    Args:
        answers: Question → choice; ``...`` where not tried yet.
        right: Question → the right choice, in the order of the exercise.
        hints: Question → said of a wrong choice.
        options: All choices.
        wanted: What a choice is, to stand after "replace the ... with".

    Returns:
        Whether every choice is right.
    """
    given = answers_by_name(answers, right)
    if given is None:
        return False
    passed = True
    for question, choice in right.items():
        answer = given[question]
        if isinstance(answer, str) and answer == choice:
            print(f"✓ {question}: {choice}")
            continue
        passed = False
        if answer is NOT_TRIED:
            print(f"… {question}: replace the ... with {wanted}")
        elif not isinstance(answer, str) or answer not in options:
            print(f"✗ {question}: {shown(answer)} is none of {', '.join(options)}")
        else:
            print(f"✗ {question}: not {answer!r}; {hints[question]}")
    return passed


def answers_by_name(
    answers: object, names: Mapping[str, object] | Sequence[str]
) -> dict[str, object] | None:
    """The learner's answer for each name, ``...`` where there is none.

    ``None``, with a line printed, if ``answers`` is no mapping at all, or has a name
    that is not asked for (a misspelt one would otherwise look untried).
    """
    if answers is NOT_TRIED:
        answers = {}
    if not isinstance(answers, Mapping):
        print(f"✗ expected a dict with {', '.join(names)}, got {shown(answers)}")
        return None
    unknown = [key for key in answers if key not in list(names)]
    if unknown:
        print(
            f"✗ {shown(unknown[0])} is not asked for; the names are {', '.join(names)}"
        )
        return None
    return {name: answers.get(name, NOT_TRIED) for name in names}


def is_function(answer: object, name: str) -> TypeGuard[Callable[..., Any]]:
    """Whether a learner has given a function; prints what to do if not.

    Args:
        answer: The learner's function; ``...`` if not tried yet.
        name: The function that the exercise starts from.
    """
    if answer is NOT_TRIED:
        print(f"… repair {name}, then replace the ... with its name")
        return False
    if not callable(answer):
        print(
            f"✗ expected a function, got {shown(answer)}: give its name, without "
            "brackets"
        )
        return False
    return True


def call(function: Callable[..., Any], *arguments: object) -> tuple[Any, str | None]:
    """Call a learner's function on copies of the arguments.

    Returns:
        What it returned (a generator's values as a list) and None, or None and the
        exception in words.
    """
    try:
        result = function(*copy.deepcopy(arguments))
        return list(result) if inspect.isgenerator(result) else result, None
    except Exception as error:
        return None, f"raises {type(error).__name__}: {error}"
