"""The course's HUD environment: multiply two integers, graded exactly.

``env`` is an ordinary HUD :class:`~hud.environment.Environment`; its one template,
:func:`multiply`, has three beats: it yields the prompt, receives the answer, and
yields the grade. Everything that decides right or wrong is
:func:`grade_final_integer`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from hud.environment import Environment
from hud.graders import EvaluationResult

from rlhelpers.answers import LongInteger, parse_final_integer
from rlhelpers.rewards import Grader, reward_of

PROMPT_TEMPLATE = (
    "Compute {a} * {b}. "
    "Work step by step, then write only the final integer on the last line."
)

env = Environment("arithmetic")


def grade_final_integer(answer: object, expected: int) -> EvaluationResult:
    """Grade a reply: reward 1.0 if its last line is exactly ``expected``, else 0.0.

    What counts as an integer on the last line is set out in
    :mod:`rlhelpers.answers`. Bold, code, dollar and ``\\boxed{}`` wrappers and one
    full stop are accepted; a sentence around the number is not.

    Args:
        answer: The reply. ``None``, or anything else that is not text, is an empty
            reply.
        expected: The exact product.

    Returns:
        HUD's evaluation result: ``reward`` 1.0 or 0.0, ``content`` the graded text,
        and ``info`` with ``expected`` and ``got``. ``got`` is the integer read,
        ``None`` if the last line is not one, or, for a number too long to read, a
        text with its digit count.

    Never raises: an exception in a grader would turn a bad answer into a failed
    rollout, and stop the training step.

    >>> grade_final_integer("36 * 47 = 1440 + 252\\n1692", 1692).reward
    1.0
    >>> grade_final_integer("The answer is 1692.", 1692).info
    {'expected': 1692, 'got': None}
    """
    got = parse_final_integer(answer)
    return EvaluationResult(
        reward=1.0 if got == expected else 0.0,
        content=_storable(answer),
        info={
            "expected": expected,
            "got": str(got) if isinstance(got, LongInteger) else got,
        },
    )


def _storable(answer: object) -> str:
    """The graded text as valid Unicode; a lone surrogate cannot be stored as JSON."""
    if not isinstance(answer, str):
        return ""
    return answer.encode("utf-8", "replace").decode("utf-8")


@env.template(
    id="multiply",
    description="Multiply two integers; the last line must be the bare product.",
)
async def multiply(a: int, b: int) -> AsyncGenerator[Any, Any]:
    """Ask for ``a * b``, then grade the reply that comes back."""
    answer = yield PROMPT_TEMPLATE.format(a=a, b=b)
    yield grade_final_integer(answer, a * b)


def graded_environment(grader: Grader, *, name: str) -> Environment:
    """The same environment under a grader of your own: same prompt, other reward.

    The grade's ``info`` stays the course's own, so that a rollout's outcome says what
    the reply is, whatever is paid for it.

    Args:
        grader: Called with the reply and the right product; returns a finite number,
            or an object with one in ``reward``. What it raises, and a reward that is
            missing or not finite, fails the rollout, and that stops the step.
        name: The environment's name; tasks carry it.

    Returns:
        A HUD environment with one template, ``multiply``.

    >>> graded_environment(grade_final_integer, name="strict").templates.keys()
    dict_keys(['multiply'])
    """
    environment = Environment(name)

    @environment.template(id=multiply.id, description=f"Multiply; graded by {name}.")
    async def graded(a: int, b: int) -> AsyncGenerator[Any, Any]:
        answer = yield PROMPT_TEMPLATE.format(a=a, b=b)
        reward = reward_of(grader, answer, a * b)
        read = grade_final_integer(answer, a * b)
        yield read.model_copy(update={"reward": reward})

    return environment
