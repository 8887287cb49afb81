"""Grade the exercises of students' notebooks with the course's own checkers.

    python scripts/grade_notebooks.py submissions/
    python scripts/grade_notebooks.py submissions/ --csv grades.csv
    python scripts/grade_notebooks.py submissions/ --stored

Takes every NN_*.ipynb below the folder, runs it, and reads what the checkers print in
each exercise: passed, wrong, not tried, or failed (with an error, or never reached).
This executes the students' code with your rights: use an account or a container made
for it. --stored runs nothing and reads the outputs as handed in, which a student can
have changed.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import papermill as pm
from nbclient import NotebookClient
from nbclient.exceptions import DeadKernelError
from papermill.iorw import load_notebook_node
from papermill.parameterize import parameterize_notebook

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
STATEMENT = re.compile(r"\*\*(\d) \((?:easy|medium|hard), \d+ minutes\)\.\*\*")


@dataclass(frozen=True)
class Grade:
    """What became of one exercise of one notebook."""

    notebook: Path
    exercise: int
    result: str
    said: str

    @property
    def row(self) -> tuple[str, str, str, str]:
        """The cells of its row in the table."""
        return str(self.notebook), str(self.exercise), self.result, self.said


def main(argv: Sequence[str] | None = None) -> int:
    """Grade a folder; 0 if every notebook could be read, 2 if there is none."""
    options = _parser().parse_args(argv)
    found = sorted(options.folder.rglob("[0-9][0-9]_*.ipynb"))
    found = [path for path in found if ".ipynb_checkpoints" not in path.parts]
    if not found:
        print(f"no notebooks named NN_*.ipynb under {options.folder}", file=sys.stderr)
        return 2
    grades: list[Grade] = []
    for path in found:
        name = path.relative_to(options.folder)
        for grade in grade_notebook(path, name, options):
            grades.append(grade)
            print("  ".join(grade.row), flush=True)
    passed = sum(grade.result == "passed" for grade in grades)
    print(f"{passed} of {len(grades)} exercises passed in {len(found)} notebooks")
    if options.csv is not None:
        with options.csv.open("w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            rows.writerow(("notebook", "exercise", "result", "said"))
            rows.writerows(grade.row for grade in grades)
    return 0


def grade_notebook(
    path: Path, name: Path, options: argparse.Namespace
) -> Iterator[Grade]:
    """The grades of a notebook's exercises, which it is run for unless told not to."""
    notebook = nbformat.read(path, as_version=4)
    if not options.stored:
        notebook = execute(path, options.output / name)
    for number, cells in exercises(notebook):
        result, said = judge(cells, stored=options.stored)
        yield Grade(name, number, result, said)


def execute(path: Path, copy: Path) -> Any:
    """Run a notebook as it was handed in, also past its errors.

    A student's notebooks share a runs folder, in which 05 finds the run of 04.
    """
    copy.parent.mkdir(parents=True, exist_ok=True)
    runs = {"RUNS_DIR": str((copy.parent / "runs").resolve())}
    declared = pm.inspect_notebook(str(path))
    notebook = parameterize_notebook(
        load_notebook_node(str(path)),
        {name: value for name, value in runs.items() if name in declared},
    )
    client = NotebookClient(
        notebook,
        kernel_name="python3",
        timeout=None,
        allow_errors=True,
        resources={"metadata": {"path": str(NOTEBOOKS)}},
    )
    try:
        client.execute()
    except DeadKernelError as error:
        print(f"{path}: {error}", file=sys.stderr)
    nbformat.write(notebook, copy)
    return notebook


def exercises(notebook: Any) -> Iterator[tuple[int, list[Any]]]:
    """Each exercise's number, and the code cells under its statement."""
    number, cells = 0, []
    for cell in notebook.cells:
        if cell.cell_type != "markdown":
            cells.append(cell)
            continue
        match = STATEMENT.search(cell.source)
        if match or cell.source.startswith("## "):
            if number:
                yield number, cells
            number, cells = int(match[1]) if match else 0, []
    if number:
        yield number, cells


def judge(cells: Sequence[Any], *, stored: bool) -> tuple[str, str]:
    """The result of an exercise, and the line that says why."""
    outputs = [output for cell in cells for output in cell.outputs]
    errors = [output for output in outputs if output.output_type == "error"]
    if errors:
        return "failed", f"{errors[0].ename}: {errors[0].evalue}".splitlines()[0]
    lines = "".join(output.get("text", "") for output in outputs).splitlines()
    for mark, result in (("✗", "wrong"), ("…", "not tried")):
        for line in lines:
            if line.startswith(mark):
                return result, line
    if any(line.startswith("✓") for line in lines):
        return "passed", ""
    never = "its cells were not run" if stored else "its checkers printed nothing"
    return "failed", never


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="holds the students' notebooks")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the table too")
    parser.add_argument(
        "--stored", action="store_true", help="read the outputs as handed in, run none"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs/graded"),
        metavar="DIR",
        help="executed copies (default: %(default)s)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
