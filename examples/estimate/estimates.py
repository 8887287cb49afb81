"""A task of one's own: estimate a product at a glance, and write nothing else.

A HUD environment needs nothing of the course: this file could come from anybody.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from typing import Any

from hud.environment import Environment
from hud.graders import EvaluationResult

PROMPT = "Estimate {pieces} * {price}. Write only the final integer on the last line."

env = Environment("estimates")


def grade_estimate(answer: object, exact: int) -> EvaluationResult:
    """Pay 0.1 for a plain number, and up to 0.9 more for being close.

    Nothing is added from 50 % off on. Whatever was written, the reward is finite.
    """
    text = answer.strip() if isinstance(answer, str) else ""
    reward, off = 0.0, None
    if re.fullmatch("[0-9]{1,9}", text):
        off = abs(int(text) - exact) / exact
        reward = 0.1 + 0.9 * max(0.0, 1 - 2 * off)
    return EvaluationResult(reward=reward, info={"exact": exact, "off": off})


@env.template(id="estimate", description="Estimate a price; one plain number.")
async def estimate(pieces: int, price: int) -> AsyncGenerator[Any, Any]:
    """Ask for about ``pieces * price``, then grade the reply that comes back."""
    answer = yield PROMPT.format(pieces=pieces, price=price)
    yield grade_estimate(answer, pieces * price)
