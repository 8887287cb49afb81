"""A notebook's claims, held against what it has just measured."""

from __future__ import annotations

from dataclasses import dataclass


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
