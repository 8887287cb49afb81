"""Storing notebooks: what is tidied, what is refused, and that nothing is half done."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import store_notebooks  # noqa: E402
from test_notebooks import read  # noqa: E402

STORED = store_notebooks.select(ROOT / "notebooks")


def notebook(*sources: str) -> Any:
    made = new_notebook()
    made.cells = [new_markdown_cell("# A lesson"), *map(new_code_cell, sources)]
    made.metadata.kernelspec = {"name": "mine", "display_name": "Mine"}
    made.metadata.language_info = {"name": "python", "version": "3.11.9"}
    return made


def executed(*outputs: Any) -> Any:
    made = notebook("x")
    made.cells[1].outputs = list(outputs)
    made.cells[1].execution_count = 1
    return made


def found(*outputs: Any) -> list[str]:
    return list(store_notebooks.problems(executed(*outputs)))


def picture(words: str) -> Any:
    return new_output("display_data", {"image/png": "AAAA", "text/plain": words})


def stream(text: str, name: str = "stdout") -> Any:
    return new_output("stream", name=name, text=text)


WORDS = "Curve over 3 steps: mean training reward 0.2 to 0.8."


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_every_stored_notebook_is_clean(path: Path) -> None:
    assert list(store_notebooks.problems(read(path))) == []


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_n05_every_stored_picture_says_what_it_shows(path: Path) -> None:
    for cell in read(path).cells:
        images = [
            o for o in cell.get("outputs", ()) if "image/png" in o.get("data", {})
        ]
        assert len(images) <= 1, cell.id
        for output in images:
            words = output.data["text/plain"]
            assert len(words) >= 40, cell.id
            assert "<Figure" not in words, cell.id
            assert output.metadata["image/png"]["alt"] == words, cell.id


def test_solutions_and_later_lessons_are_found(tmp_path: Path) -> None:
    (tmp_path / "solutions").mkdir()
    for name in ("10_b.ipynb", "02_a.ipynb", "solutions/02_a.ipynb", "notes.ipynb"):
        nbformat.write(notebook("x"), tmp_path / name)
    names = [str(p.relative_to(tmp_path)) for p in store_notebooks.select(tmp_path)]
    assert names == ["02_a.ipynb", "10_b.ipynb", str(Path("solutions", "02_a.ipynb"))]
    assert len(store_notebooks.select(tmp_path, ["02"])) == 2
    with pytest.raises(ValueError, match="no notebook 07; there are 02, 10"):
        store_notebooks.select(tmp_path, ["07"])


def test_a_tidied_notebook_is_the_same_after_every_run() -> None:
    first, second = (
        store_notebooks.tidied(
            executed(
                stream("step 1\n"),
                stream("step 2\n"),
                new_output(
                    "display_data",
                    {store_notebooks.WIDGET: {"model_id": name}, "text/plain": "Box"},
                ),
            )
        )
        for name in ("aaaa", "bbbb")
    )
    second.cells[0].id, second.cells[1].id = (cell.id for cell in first.cells)
    again = store_notebooks.tidied(second)
    assert again.cells == first.cells
    assert [o.get("text") for o in first.cells[1].outputs] == ["step 1\nstep 2\n", None]
    assert first.metadata.kernelspec.name == "python3"
    assert first.metadata.language_info == {"name": "python"}


def test_times_and_the_runners_notes_go() -> None:
    made = executed(stream("1"))
    made.metadata.papermill = {"duration": 3}
    for cell in made.cells:
        cell.metadata |= {"papermill": {"duration": 1}, "execution": {}, "tags": []}
    made.cells[1].metadata.tags = ["parameters"]
    tidy = store_notebooks.tidied(made)
    assert "papermill" not in tidy.metadata
    assert [cell.metadata for cell in tidy.cells] == [{}, {"tags": ["parameters"]}]


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (stream("saved to /home/ann/runs/x"), "a path of this machine: '/home/"),
        (stream(r"saved to 'C:\Users\ann'"), "a path of this machine"),
        (stream("key fw_12345678abc"), "a key"),
        (stream("api_key='12345678'"), "a key"),
        (stream("x.py:3: UserWarning: old"), "a warning: 'UserWarning:'"),
        (stream("hm", name="stderr"), "text on stderr: 'hm'"),
        (stream(" 10%|█         | 3/30"), "a progress bar"),
        (stream("<A object at 0x7f0011223344>"), "an object's address"),
        (new_output("error", ename="E", evalue="v", traceback=[]), "an error, E: v"),
        (picture("<Figure size 640x480 with 1 Axes>"), "a picture without words"),
        (picture("a plot"), "does not say what it shows"),
        (new_output("display_data", {"text/html": "<b>/tmp/x</b>"}), "a path"),
    ],
)
def test_what_is_refused(output: Any, said: str) -> None:
    problems = found(output)
    assert any(said in problem for problem in problems), problems
    assert all(problem.startswith("cell ") for problem in problems)


def test_what_is_not_refused() -> None:
    assert (
        found(stream("rollouts per step: 8 / 64, 100 % of p|q"), picture(WORDS)) == []
    )
    assert len(found(picture(WORDS), picture(WORDS))) == 1


def test_cells_run_out_of_order_or_empty_are_refused() -> None:
    made = executed(stream("1"))
    made.cells[1].execution_count = 7
    made.cells[0].source = " "
    said = list(store_notebooks.problems(made))
    assert "empty" in said[0]
    assert "run as number 7, not 1; run all cells in order" in said[1]


@pytest.mark.slow
def test_all_are_stored_or_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "notebooks"
    folder.mkdir()
    good, bad = folder / "01_a.ipynb", folder / "02_b.ipynb"
    nbformat.write(notebook("print('fresh')"), good)
    nbformat.write(notebook("print('/tmp/somewhere')"), bad)
    before = good.read_text(), bad.read_text()
    options = ["--notebooks", str(folder)]

    assert store_notebooks.main(options) == 1
    assert (good.read_text(), bad.read_text()) == before
    said = capsys.readouterr().err
    assert "02_b.ipynb, cell" in said
    assert "a path of this machine: '/tmp/'" in said

    nbformat.write(notebook("x = 1", "raise ValueError('flat')"), bad)
    assert store_notebooks.main(options) == 1
    assert good.read_text() == before[0]
    assert "02_b.ipynb, cell 4 (In [3]): ValueError: flat" in capsys.readouterr().err

    nbformat.write(notebook("print('also fresh')"), bad)
    assert store_notebooks.main(options) == 0
    title, cell, printed = read(good).cells
    assert (title.cell_type, cell.id) == ("markdown", "hosted")
    assert printed.outputs[0].text == "fresh\n"
    assert "papermill" not in read(good).metadata
    assert store_notebooks.main([*options, "--check"]) == 0
