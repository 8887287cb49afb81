"""Reading the final integer out of a reply: one rule, used by every part.

The grader (:mod:`rlhelpers.arithmetic`) and the analysis
(:mod:`rlhelpers.analysis`) both call :func:`parse_final_integer`, so a rollout
cannot be right in one place and wrong in another. Pure: no I/O, no service.

The rule, in order:

1. A thinking block that never closes leaves no reply.
2. Take the last line that is not blank, trimmed.
3. Drop one trailing full stop.
4. Strip ``$``, ``*``, backticks and blanks at both ends.
5. If what is left is ``\\boxed{…}``, take its inside and repeat step 4.
6. Drop one trailing full stop again (``**1692.**``).
7. The rest must be, whole, an optional sign and ASCII digits, either plain or in
   groups of three separated by commas.

So ``1692.``, ``**1692**``, ``\\boxed{1692}``, ``$1,692`` and ``01692`` all read as
1692, while ``The answer is 1692``, ``1692!``, ``1_692``, ``42 or 43`` and
``1692, 1692`` have no valid final line. Nothing is ever picked out of the middle of
a line: a stray number must not earn a reward.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

#: CPython's own default bound on the digits that ``int()`` reads. Reading more takes
#: quadratic time, which one adversarial reply could use to stall a whole batch.
MAX_DIGITS = 4300

_DECORATION = "$*` \t"
_BOXED = re.compile(r"\\boxed\{(.*)\}", re.DOTALL)
# [0-9], not \d: \d also matches the digits of other scripts.
_INTEGER = re.compile(r"([+-]?)([0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)")


@dataclass(frozen=True)
class LongInteger:
    """An integer with more digits than can be read safely; always a wrong answer."""

    digits: int

    def __str__(self) -> str:
        return f"an integer of {self.digits} digits"


def final_line(answer: object) -> str:
    """Return the last non-blank line of a reply, trimmed; ``""`` if there is none.

    Anything that is not text counts as no reply: ``None`` must not turn into the
    word ``None``.

    >>> final_line("36 * 47\\n1692\\n\\n")
    '1692'
    """
    if not isinstance(answer, str):
        return ""
    if answer.rfind("<think>") > answer.rfind("</think>"):
        return ""
    text = answer.rstrip()
    start = max(text.rfind("\n"), text.rfind("\r")) + 1
    return text[start:].strip()


def parse_final_integer(answer: object) -> int | LongInteger | None:
    """Read the integer on the last non-blank line; ``None`` if it is not one.

    Takes time linear in the length of the reply and raises nothing, whatever the
    model wrote. Leading zeros and a plus sign do not matter: integers are compared,
    never their spelling.

    >>> parse_final_integer("40 * 47 - 4 * 47\\n**1,692**")
    1692
    >>> parse_final_integer("The answer is 1692.") is None
    True
    >>> parse_final_integer("9" * 5000)
    LongInteger(digits=5000)
    """
    line = final_line(answer).removesuffix(".").strip(_DECORATION)
    if boxed := _BOXED.fullmatch(line):
        line = boxed[1].strip(_DECORATION)
    match = _INTEGER.fullmatch(line.removesuffix(".").rstrip(_DECORATION))
    if match is None:
        return None
    digits = match[2].replace(",", "").lstrip("0") or "0"
    if len(digits) > MAX_DIGITS:
        return LongInteger(len(digits))
    try:
        value = int(digits)
    except ValueError:  # this interpreter's own limit was set lower
        return LongInteger(len(digits))
    return -value if match[1] == "-" else value
