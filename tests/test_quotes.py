"""Numbers in prose are those of the outputs that they quote (N20)."""

from __future__ import annotations

import doctest
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import quotes  # noqa: E402


def test_n20_every_quoted_number_is_the_one_that_its_source_shows() -> None:
    assert quotes.check() == []


def test_examples_in_docstrings_hold() -> None:
    assert doctest.testmod(quotes).failed == 0


LIST = """
covered = ["notebooks/01_a.ipynb", "README.md"]

[[quote]]
in = "notebooks/01_a.ipynb#prose"
prose = 'accuracy rose from ([\\d.]+) % to ([\\d.]+) %'
from = "notebooks/01_a.ipynb#code"
shown = 'before ([\\d.]+), after ([\\d.]+)'
times = 100

[[quote]]
in = "README.md"
prose = 'about ([\\d,]+) tokens'
from = "notebooks/01_a.ipynb#code"
shown = 'read ([\\d,]+), sampled ([\\d,]+)'
sum = true
round = 1000

[[block]]
in = "README.md"
name = "table"
from = "measured.md"

[[free]]
in = "README.md"
numbers = ["3.11"]
why = "a version"
"""
README = """# A course
Needs Python 3.11 and about {tokens}
tokens.

<!-- table -->
{row}
<!-- /table -->
"""


def write(root: Path, *, before: str, after: str, tokens: str, row: str) -> None:
    """A small repository whose outputs say 0.719, 0.977 and 1,500 + 2,800 tokens."""
    shown = "before 0.719, after 0.977\nread 1,500, sampled 2,800\n"
    prose = new_markdown_cell(
        f"Greedy accuracy rose from {before} %\nto {after} %.", id="prose"
    )
    code = new_code_cell("go()", id="code")
    code.outputs = [new_output("stream", name="stdout", text=shown)]
    for folder in ("notebooks", "scripts"):
        (root / folder).mkdir(exist_ok=True)
    notebook = new_notebook(cells=[prose, code])
    nbformat.write(notebook, root / "notebooks" / "01_a.ipynb")
    (root / "scripts" / "quotes.toml").write_text(LIST)
    (root / "README.md").write_text(README.format(tokens=tokens, row=row))
    (root / "measured.md").write_text("<!-- table -->\n| 71.9 % |\n<!-- /table -->\n")


RIGHT = {"before": "71.9", "after": "97.7", "tokens": "4,000", "row": "| 71.9 % |"}


def test_right_numbers_pass(tmp_path: Path) -> None:
    write(tmp_path, **RIGHT)
    assert quotes.check(tmp_path) == []


def test_a_wrong_number_is_named_with_the_right_one(tmp_path: Path) -> None:
    write(tmp_path, **{**RIGHT, "after": "98.0"})
    (problem,) = quotes.check(tmp_path)
    place = "notebooks/01_a.ipynb"
    assert problem.startswith(f"{place}#prose says 98.0 where {place}#code shows 97.7")


def test_numbers_and_tables_are_written_anew(tmp_path: Path) -> None:
    wrong = {"before": "7.2", "after": "100.0", "tokens": "900", "row": "| 1.0 % |"}
    write(tmp_path, **wrong)
    assert len(quotes.check(tmp_path)) == 4
    assert quotes.rewrite(tmp_path) == []
    assert (tmp_path / "README.md").read_text() == README.format(
        tokens="4,000", row="| 71.9 % |"
    )
    notebook = nbformat.read(tmp_path / "notebooks" / "01_a.ipynb", as_version=4)
    assert notebook.cells[0].source == "Greedy accuracy rose from 71.9 %\nto 97.7 %."
    assert notebook.cells[1].outputs[0].text.startswith("before 0.719")


def test_a_number_that_nothing_accounts_for_is_named(tmp_path: Path) -> None:
    write(tmp_path, **RIGHT)
    readme = tmp_path / "README.md"
    readme.write_text(readme.read_text() + "\nIt wins 95 % of games, `x = 0.3` too.\n")
    (problem,) = quotes.check(tmp_path)
    assert problem.startswith("README.md says '95'")
    assert "quotes.toml" in problem


def test_prose_or_output_that_changed_its_words_is_named(tmp_path: Path) -> None:
    write(tmp_path, **RIGHT)
    readme = tmp_path / "README.md"
    readme.write_text(readme.read_text().replace("tokens.", "words."))
    problems = quotes.check(tmp_path)
    assert any("has nothing like 'about" in problem for problem in problems)
    write(tmp_path, **RIGHT)
    text = LIST.replace("before ([", "earlier ([")
    (tmp_path / "scripts" / "quotes.toml").write_text(text)
    assert any("shows nothing like 'earlier" in p for p in quotes.check(tmp_path))
    text = LIST.replace("01_a.ipynb#code", "01_a.ipynb#gone")
    (tmp_path / "scripts" / "quotes.toml").write_text(text)
    assert any("has no cell 'gone' any more" in p for p in quotes.check(tmp_path))
    text = LIST.replace("01_a.ipynb#code", "01_a.ipynb")  # wherever it is shown
    (tmp_path / "scripts" / "quotes.toml").write_text(text)
    assert quotes.check(tmp_path) == []


def test_a_free_number_that_has_gone_is_named(tmp_path: Path) -> None:
    write(tmp_path, **RIGHT)
    readme = tmp_path / "README.md"
    readme.write_text(readme.read_text().replace("3.11", "three"))
    (problem,) = quotes.check(tmp_path)
    assert "'3.11' is listed as free and is not there any more" in problem


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("71.9 % and 1,234 of them, 8 of 10", ["71.9", "1,234", "8 of 10"]),
        ("a 27B model, 30 steps, Apache-2.0, 127.0.0.1, 2^0.5", []),
        ("an advantage of +1.5 or −0.5, 6 % in all", ["+1.5", "−0.5", "6"]),
    ],
)
def test_what_looks_like_a_result(text: str, numbers: list[str]) -> None:
    assert [match[0] for match in quotes.RESULT.finditer(text)] == numbers


def test_an_exercise_gives_its_numbers(tmp_path: Path) -> None:
    write(tmp_path, **RIGHT)
    path = tmp_path / "notebooks" / "01_a.ipynb"
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.append(new_markdown_cell("**2 (5 minutes).** At p = 0.95, say …"))
    nbformat.write(notebook, path)
    assert quotes.check(tmp_path) == []
