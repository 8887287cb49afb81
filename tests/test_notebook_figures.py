"""The script that prints each notebook's size, checks and time."""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from notebook_figures import figures_of, main  # noqa: E402


@pytest.fixture
def course(tmp_path: Path) -> Path:
    notebook = new_notebook()
    notebook.cells = [
        new_markdown_cell("# One title\n\n| a | b |\n|---|---|\n| 1 | two |"),
        new_code_cell("import os\n" * 20, id="hosted"),
        new_code_cell("a = 1"),
        new_code_cell(
            "for b in (1, 2):\n    lesson.check(b > 0, 'above 0')\nassert a == 1"
        ),
        new_code_cell("pass\npass"),
        new_markdown_cell("**1 (easy, 5 minutes).** Try.\n\n**2 (hard, 15 minutes).**"),
    ]
    folder = tmp_path / "notebooks"
    folder.mkdir()
    nbformat.write(notebook, folder / "01_a.ipynb")
    notebook.metadata["papermill"] = {"duration": 12.4}
    (tmp_path / "out").mkdir()
    nbformat.write(notebook, tmp_path / "out" / "01_a.ipynb")
    return folder


def test_a_notebook_is_counted(course: Path) -> None:
    figures = figures_of(course / "01_a.ipynb")
    assert figures.cells == 5  # without the hidden one
    # One title a b 1 two; 1 easy 5 minutes Try; 2 hard 15 minutes
    assert figures.words == 6 + 5 + 4
    assert (figures.median_lines, figures.longest_lines) == (2, 3)
    assert figures.checks == 2
    assert figures.exercise_minutes == (5, 15)
    assert figures.seconds is None


def test_the_time_is_that_of_the_executed_copy(
    course: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = course.parent / "out"
    assert main(["--notebooks", str(course), "--executed", str(out)]) == 0
    printed = capsys.readouterr().out.splitlines()
    counts = ["01_a", "5", "15", "2", "3", "2"]  # cells, words, lines, checks
    assert printed[2].split() == [*counts, "5", "+", "15", "12"]
    assert printed[-1] == "12 seconds in all"


def test_without_an_executed_copy_there_is_no_time_and_no_total(
    course: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere = course.parent / "nowhere"
    assert main(["--notebooks", str(course), "--executed", str(nowhere)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1].split()[-1] == "–"


def test_a_folder_without_notebooks_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--notebooks", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err
