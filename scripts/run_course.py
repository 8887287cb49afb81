"""Run the course headless: every notebook in order, into runs/notebooks/.

Prints the time of each and of all together; --times FILE writes them down.

    python scripts/run_course.py
    python scripts/run_course.py -p GROUP_SIZE 4 -p BACKEND local
    python scripts/run_course.py --only 01 02
    python scripts/run_course.py --solutions

Stops at the first failure and names the notebook, the cell and the cause. A
parameter goes to the notebooks that have it; one that no notebook has is an error, and
so is a value that cannot work. The exercises' solutions run only if asked for.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import papermill as pm
from papermill.exceptions import PapermillExecutionError

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"
OUTPUT = ROOT / "runs" / "notebooks"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the notebooks that the arguments ask for; 0 if all of them passed."""
    options = _parser().parse_args(argv)
    try:
        notebooks = select_notebooks(
            options.notebooks, options.only, solutions=options.solutions
        )
        plan = assign_parameters(notebooks, dict(options.parameters))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    options.output.mkdir(parents=True, exist_ok=True)
    seconds: dict[str, float] = {}
    for number, (notebook, parameters) in enumerate(plan.items(), start=1):
        print(f"[{number}/{len(plan)}] {notebook.name} ... ", end="", flush=True)
        before = time.monotonic()
        if failure := run_notebook(notebook, options.output, parameters):
            print("failed")
            print(failure, file=sys.stderr)
            return 1
        seconds[notebook.stem] = round(time.monotonic() - before, 1)
        print(f"passed in {seconds[notebook.stem]:.0f} s")
    total = sum(seconds.values())
    print(f"{len(plan)} notebooks passed in {total:.0f} s; executed copies: ", end="")
    print(options.output)
    if options.times is not None:
        times = {"seconds": seconds, "total": round(total, 1)}
        options.times.write_text(json.dumps(times, indent=2) + "\n", encoding="utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "-p",
        dest="parameters",
        nargs=2,
        action="append",
        default=[],
        metavar=("NAME", "VALUE"),
        help="set a parameter; may be repeated",
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NN", help="numbers, such as 01 03"
    )
    parser.add_argument(
        "--solutions", action="store_true", help="run the exercises' solutions too"
    )
    parser.add_argument("--notebooks", type=Path, default=NOTEBOOKS)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--times", type=Path, metavar="FILE", help="write the seconds")
    return parser


def select_notebooks(
    folder: Path, only: Sequence[str] = (), *, solutions: bool = False
) -> list[Path]:
    """The folder's numbered notebooks, in order; all, or those with these numbers.

    Args:
        folder: Holds the notebooks, and their solutions in ``solutions/``.
        only: Two-digit numbers; none means all.
        solutions: Add the solutions of the chosen notebooks after them.
    """
    found = sorted(folder.glob("[0-9][0-9]_*.ipynb"))
    if not found:
        raise ValueError(f"no notebooks named NN_*.ipynb in {folder}")
    numbers = {path.name[:2] for path in found}
    if unknown := sorted(set(only) - numbers):
        raise ValueError(
            f"no notebook {', '.join(unknown)}; there are {', '.join(sorted(numbers))}"
        )
    if solutions:
        found += sorted((folder / "solutions").glob("[0-9][0-9]_*.ipynb"))
    return [path for path in found if not only or path.name[:2] in only]


def assign_parameters(
    notebooks: Sequence[Path], given: dict[str, str]
) -> dict[Path, dict[str, Any]]:
    """Give each notebook those of the given parameters that it declares."""
    declared = {path: pm.inspect_notebook(str(path)).keys() for path in notebooks}
    known = sorted(set().union(*declared.values()))
    if unknown := sorted(given.keys() - set(known)):
        named = ", ".join(name + _meant(name, known) for name in unknown)
        raise ValueError(
            f"no notebook has a parameter {named}; known: {', '.join(known) or 'none'}"
        )
    values = {name: parse_value(text) for name, text in given.items()}
    return {
        path: {name: value for name, value in values.items() if name in names}
        for path, names in declared.items()
    }


def _meant(name: str, known: Sequence[str]) -> str:
    """The known name most like a misspelt one, as a question."""
    found = difflib.get_close_matches(name.upper(), known, n=1)
    return f" (did you mean {found[0]}?)" if found else ""


def parse_value(text: str) -> Any:
    """Read a parameter as a Python literal; anything else is text.

    >>> parse_value("8"), parse_value("1e-4"), parse_value("None"), parse_value("local")
    (8, 0.0001, None, 'local')
    """
    lowered = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in lowered:
        return lowered[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def run_notebook(
    notebook: Path, output: Path, parameters: dict[str, Any]
) -> str | None:
    """Execute one notebook; the failure in words, or ``None`` if it passed."""
    copy = output / notebook.name
    try:
        pm.execute_notebook(
            str(notebook),
            str(copy),
            parameters=parameters,
            cwd=str(notebook.parent),
            kernel_name="python3",
            progress_bar=sys.stderr.isatty(),
        )
    except Exception as error:  # a cell failed, or the kernel died
        return f"{notebook.name}{failure_of(error)}\nexecuted copy: {copy}"
    return None


def failure_of(error: Exception) -> str:
    """Where in a notebook it failed, and why; to be read after the notebook's name."""
    if isinstance(error, PapermillExecutionError):
        cause = " ".join(f"{error.ename}: {error.evalue}".split())
        cell = f"cell {error.cell_index + 1} (In [{error.exec_count}])"
        return f", {cell}: {cause[:600]}"
    return f": {type(error).__name__}: {error}"


if __name__ == "__main__":
    sys.exit(main())
