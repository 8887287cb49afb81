"""The headless runner: order, parameters, and how it reports a failure."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import nbformat
import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "run_course.py"


@pytest.fixture(scope="module")
def runner() -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_course", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(folder: Path, name: str, parameters: str, *cells: str) -> None:
    notebook = nbformat.v4.new_notebook()
    first = nbformat.v4.new_code_cell(parameters, metadata={"tags": ["parameters"]})
    notebook.cells = [first, *map(nbformat.v4.new_code_cell, cells)]
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3"}
    notebook.metadata.language_info = {"name": "python"}
    folder.mkdir(exist_ok=True)
    nbformat.write(notebook, folder / name)


@pytest.fixture
def course(tmp_path: Path) -> Path:
    folder = tmp_path / "notebooks"
    write(folder, "01_a.ipynb", "SIZE = 4", "print('size', SIZE)")
    write(folder, "02_b.ipynb", "RATE = 0.1", "print('rate', RATE)")
    return folder


def run(runner: ModuleType, course: Path, *arguments: str) -> int:
    output = course.parent / "out"
    return int(
        runner.main(["--notebooks", str(course), "--output", str(output), *arguments])
    )


def test_all_notebooks_run_in_order_with_their_parameters(
    runner: ModuleType, course: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(runner, course, "-p", "SIZE", "8") == 0
    printed = capsys.readouterr().out
    assert printed.index("[1/2] 01_a.ipynb") < printed.index("[2/2] 02_b.ipynb")
    copies = {
        name: (course.parent / "out" / name).read_text()
        for name in ("01_a.ipynb", "02_b.ipynb")
    }
    assert "size 8" in copies["01_a.ipynb"]
    assert "rate 0.1" in copies["02_b.ipynb"]


def test_solutions_run_only_if_asked_for(
    runner: ModuleType, course: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in ("01", "02"):
        name = f"{number}_solutions.ipynb"
        write(course / "solutions", name, "SIZE = 1", "print('solved', SIZE)")
    assert run(runner, course, "--only", "01") == 0
    assert "01_solutions" not in capsys.readouterr().out
    assert run(runner, course, "--only", "01", "--solutions", "-p", "SIZE", "3") == 0
    printed = capsys.readouterr().out
    assert printed.index("[1/2] 01_a.ipynb") < printed.index("[2/2] 01_solutions.ipynb")
    assert "02_solutions" not in printed
    copy = course.parent / "out" / "01_solutions.ipynb"
    assert "solved 3" in copy.read_text()


def test_first_failure_stops_and_is_named(
    runner: ModuleType, course: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(course, "01_a.ipynb", "SIZE = 4", "x = 1", "raise ValueError('no spread')")
    assert run(runner, course) == 1
    captured = capsys.readouterr()
    assert "01_a.ipynb, cell 3 (In [3]): ValueError: no spread" in captured.err
    assert "02_b" not in captured.out


def test_unknown_parameter_or_notebook_is_refused(
    runner: ModuleType, course: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(runner, course, "-p", "SIZES", "8") == 2
    said = capsys.readouterr().err
    assert "parameter SIZES (did you mean SIZE?); known: RATE, SIZE" in said
    assert run(runner, course, "-p", "rate", "8") == 2
    assert "parameter rate (did you mean RATE?)" in capsys.readouterr().err
    assert run(runner, course, "-p", "COLOUR", "8") == 2
    assert "parameter COLOUR; known: RATE, SIZE" in capsys.readouterr().err
    assert not (course.parent / "out").exists()  # nothing was run
    assert run(runner, course, "--only", "07") == 2
    assert "no notebook 07; there are 01, 02" in capsys.readouterr().err


def test_a_value_that_cannot_work_stops_the_notebook(
    runner: ModuleType, course: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(
        course,
        "01_a.ipynb",
        "# Parameters: one.\nGROUP_SIZE = 4  # rollouts",
        "from rlhelpers.parameters import check_parameters\n"
        "check_parameters(globals())",
        "print('sent')",
    )
    assert run(runner, course, "--only", "01", "-p", "GROUP_SIZE", "'8'") == 1
    said = capsys.readouterr().err
    assert "01_a.ipynb, cell 3" in said
    assert "GROUP_SIZE = '8': must be a whole number of at least 2" in said
    copy = (course.parent / "out" / "01_a.ipynb").read_text()
    assert '"sent\\n"' not in copy


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8", 8),
        ("1e-4", 1e-4),
        ("None", None),
        ("true", True),
        ("local", "local"),
        ("[1, 2]", [1, 2]),
        ("03", "03"),
    ],
)
def test_parameter_values(runner: ModuleType, text: str, value: object) -> None:
    assert runner.parse_value(text) == value


def test_times_are_written_and_added_up(
    runner: ModuleType, course: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = course.parent / "times.json"
    assert run(runner, course, "--times", str(file)) == 0
    times = json.loads(file.read_text())
    assert list(times["seconds"]) == ["01_a", "02_b"]
    assert times["total"] == pytest.approx(sum(times["seconds"].values()), abs=0.06)
    printed = capsys.readouterr().out
    assert f"2 notebooks passed in {times['total']:.0f} s" in printed
