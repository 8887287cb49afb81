"""Print the figures of each lesson: its size, what it checks, and how long it runs.

    python scripts/notebook_figures.py
    python scripts/notebook_figures.py --executed runs/notebooks

Cells and words leave out the hidden cell for hosted services. Checks are claims of the
lesson that the notebook holds against what it has just measured. The seconds are those
that papermill wrote into the executed copies, which `make run` leaves in
runs/notebooks/; a dash where there is none.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import nbformat

ROOT = Path(__file__).resolve().parents[1]
EXERCISE = re.compile(r"\*\*\d \((?:easy|medium|hard), (\d+) minutes\)\.\*\*")


@dataclass(frozen=True)
class Figures:
    """One notebook in numbers.

    Attributes:
        name: The file's name without its ending.
        cells: Cells, without the one for hosted services.
        words: Words of its markdown cells; rules of tables are no words.
        median_lines, longest_lines: Lines of its code cells.
        checks: Claims held against a measurement (``lesson.check`` and ``assert``).
        exercise_minutes: What each of its exercises says it takes.
        seconds: Of its last run, if an executed copy is there.
    """

    name: str
    cells: int
    words: int
    median_lines: float
    longest_lines: int
    checks: int
    exercise_minutes: tuple[int, ...]
    seconds: float | None

    def row(self) -> str:
        """One row of the printed table."""
        seconds = "–" if self.seconds is None else f"{self.seconds:.0f}"
        minutes = " + ".join(map(str, self.exercise_minutes)) or "–"
        return (
            f"{self.name:30}{self.cells:6}{self.words:7,}{self.median_lines:8g}"
            f"{self.longest_lines:9}{self.checks:8}{minutes:>14}{seconds:>9}"
        )


HEADER = (
    f"{'notebook':30}{'cells':>6}{'words':>7}{'median':>8}{'longest':>9}{'checks':>8}"
    f"{'exercises':>14}{'seconds':>9}"
)
UNITS = f"{'':43}{'lines':>8}{'lines':>9}{'':8}{'minutes':>14}"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 2 if there are no notebooks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--notebooks", type=Path, default=ROOT / "notebooks")
    parser.add_argument(
        "--executed", type=Path, default=ROOT / "runs" / "notebooks", metavar="FOLDER"
    )
    options = parser.parse_args(argv)
    paths = sorted(options.notebooks.glob("[0-9][0-9]_*.ipynb"))
    if not paths:
        print(f"no notebooks named NN_*.ipynb in {options.notebooks}", file=sys.stderr)
        return 2
    print(HEADER, UNITS, sep="\n")
    found = [figures_of(path, options.executed / path.name) for path in paths]
    for figures in found:
        print(figures.row())
    if all(figures.seconds is not None for figures in found):
        print(f"{sum(figures.seconds or 0 for figures in found):.0f} seconds in all")
    return 0


def figures_of(path: Path, executed: Path | None = None) -> Figures:
    """Count one notebook, and read the time of its executed copy if there is one."""
    cells = [c for c in nbformat.read(path, as_version=4).cells if c.id != "hosted"]
    code = [cell.source for cell in cells if cell.cell_type == "code"]
    prose = "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    lines = [len(source.splitlines()) for source in code]
    return Figures(
        name=path.stem,
        cells=len(cells),
        words=sum(bool(re.search(r"\w", word)) for word in prose.split()),
        median_lines=median(lines),
        longest_lines=max(lines),
        checks=sum(map(_checks, code)),
        exercise_minutes=tuple(map(int, EXERCISE.findall(prose))),
        seconds=_seconds(executed),
    )


def _checks(source: str) -> int:
    """Assert statements and calls of ``lesson.check`` in a cell, loops counted once."""
    return sum(
        isinstance(node, ast.Assert)
        or (isinstance(node, ast.Call) and ast.unparse(node.func) == "lesson.check")
        for node in ast.walk(ast.parse(source))
    )


def _seconds(executed: Path | None) -> float | None:
    if executed is None or not executed.is_file():
        return None
    metadata: dict[str, Any] = nbformat.read(executed, as_version=4).metadata
    duration = metadata.get("papermill", {}).get("duration")
    return None if duration is None else float(duration)


if __name__ == "__main__":
    sys.exit(main())
