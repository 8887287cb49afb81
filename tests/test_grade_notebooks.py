"""Grading a folder of students' notebooks, with the checkers that they used."""

from __future__ import annotations

import csv
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import grade_notebooks  # noqa: E402

LESSON = ROOT / "notebooks" / "01_environment_and_grader.ipynb"
SOLVED = ROOT / "notebooks" / "solutions" / "01_solutions.ipynb"


@pytest.fixture
def hand_in(tmp_path: Path) -> Callable[..., Path]:
    """Put notebooks into a student's folder of a submissions folder."""

    def put(student: str, source: Path, edit: Callable[[Any], None] | None = None):
        folder = tmp_path / "submissions" / student
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / LESSON.name
        shutil.copy(source, target)
        if edit is not None:
            notebook = nbformat.read(target, as_version=4)
            edit(notebook)
            nbformat.write(notebook, target)
        return tmp_path / "submissions"

    return put


def graded(folder: Path, *options: str) -> list[list[str]]:
    table = folder.parent / "grades.csv"
    arguments = [str(folder), "--csv", str(table), *options]
    arguments += ["--output", str(folder.parent / "graded")]
    assert grade_notebooks.main(arguments) == 0
    with table.open(encoding="utf-8", newline="") as file:
        head, *rows = csv.reader(file)
    assert head == ["notebook", "exercise", "result", "said"]
    return rows


def test_stored_outputs_are_read_without_running(
    hand_in: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    hand_in("ada", SOLVED)
    folder = hand_in("bob", LESSON)
    rows = graded(folder, "--stored")
    assert [row[:3] for row in rows] == [
        [f"{student}/{LESSON.name}", str(number), result]
        for student, result in (("ada", "passed"), ("bob", "not tried"))
        for number in (1, 2, 3)
    ]
    assert all(row[3].startswith("…") for row in rows[3:])
    assert "3 of 6 exercises passed in 2 notebooks" in capsys.readouterr().out


def test_cells_that_were_never_run_do_not_pass(hand_in: Callable[..., Path]) -> None:
    def clear(notebook: Any) -> None:
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.outputs = []

    rows = graded(hand_in("ada", SOLVED, clear), "--stored")
    assert {row[2] for row in rows} == {"failed"}
    assert {row[3] for row in rows} == {"its cells were not run"}


@pytest.mark.slow
def test_running_shows_what_was_written_into_the_outputs(
    hand_in: Callable[..., Path],
) -> None:
    """One student's cell fails, and the exercise after it is graded all the same."""

    def spoil(notebook: Any) -> None:
        cells = [cell for cell in notebook.cells if "my_answers = {" in cell.source]
        cells[0].source = "raise RuntimeError('a slip')"

    hand_in("ada", SOLVED, spoil)
    folder = hand_in("bob", SOLVED)
    rows = graded(folder)
    assert [row[2] for row in rows] == ["failed", *["passed"] * 5]
    assert rows[0][3] == "RuntimeError: a slip"
    assert (folder.parent / "graded" / "bob" / LESSON.name).is_file()


def test_a_folder_without_notebooks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert grade_notebooks.main([str(tmp_path)]) == 2
    assert "no notebooks named NN_*.ipynb" in capsys.readouterr().err
