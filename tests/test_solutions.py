"""The exercises of every lesson, and their solutions.

nbval runs the solutions with the lessons (see the Makefile); here their form is held
against the lessons', and papermill runs those that have parameters with others.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import papermill
import pytest
import test_field_cases_notebooks as cases
from test_notebooks import FOLDER, NOTEBOOKS, SOLUTIONS, code_cells, parameters_of, read

STATEMENT = re.compile(r"\*\*(\d) \((easy|medium|hard), (\d+) minutes\)\.\*\*")


def solutions_of(lesson: Path) -> Path:
    return FOLDER / "solutions" / f"{lesson.stem[:2]}_solutions.ipynb"


LESSONS = [path for path in NOTEBOOKS if solutions_of(path) in SOLUTIONS]
IDS = [path.stem for path in LESSONS]


def exercises(notebook: Any) -> list[tuple[str, list[Any]]]:
    """Each exercise's statement, and the code cells under it."""
    found: list[tuple[str, list[Any]]] = []
    inside = False
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            match = STATEMENT.search(cell.source)
            inside = bool(match) or (inside and not cell.source.startswith("## "))
            if match:
                found.append((cell.source[match.start() :], []))
        elif inside:
            found[-1][1].append(cell)
    return found


def checks(cells: list[Any]) -> set[str]:
    """Names of the checkers that some cells call."""
    nodes = [node for cell in cells for node in ast.walk(ast.parse(cell.source))]
    calls = [node.func for node in nodes if isinstance(node, ast.Call)]
    names = {func.id for func in calls if isinstance(func, ast.Name)}
    return {name for name in names if name.startswith("check_")}


def output_of(cells: list[Any]) -> str:
    outputs = [output for cell in cells for output in cell.outputs]
    return "".join(output.get("text", "") for output in outputs)


def test_no_solution_is_left_out_and_none_is_left_over() -> None:
    assert [solutions_of(lesson) for lesson in LESSONS] == SOLUTIONS
    assert LESSONS == NOTEBOOKS


@pytest.mark.parametrize("lesson", LESSONS, ids=IDS)
def test_a_lesson_has_two_or_three_exercises(lesson: Path) -> None:
    found = exercises(read(lesson))
    assert len(found) in (2, 3)
    for number, (statement, cells) in enumerate(found, start=1):
        match = STATEMENT.match(statement)
        assert match is not None
        assert int(match[1]) == number
        assert 3 <= int(match[3]) <= 15
        assert checks(cells)


@pytest.mark.parametrize("lesson", LESSONS, ids=IDS)
def test_an_untouched_exercise_is_not_tried_yet_and_no_error(lesson: Path) -> None:
    for _, cells in exercises(read(lesson)):
        printed = output_of(cells)
        assert "…" in printed
        assert "✓" not in printed
        assert "✗" not in printed


@pytest.mark.parametrize("lesson", LESSONS, ids=IDS)
def test_a_solution_states_the_exercise_and_passes_its_checkers(lesson: Path) -> None:
    asked, solved = exercises(read(lesson)), exercises(read(solutions_of(lesson)))
    assert [statement for statement, _ in asked] == [text for text, _ in solved]
    for (_, cells), (_, solution) in zip(asked, solved, strict=True):
        assert checks(cells) == checks(solution)
        source = "\n".join(cell.source for cell in solution)
        for name in checks(cells):
            assert f"assert {name}(" in source
        printed = output_of(solution)
        assert "✓" in printed
        assert "✗" not in printed
        assert "…" not in printed


@pytest.mark.parametrize("lesson", LESSONS, ids=IDS)
def test_a_solution_gives_its_reasons(lesson: Path) -> None:
    notebook = read(solutions_of(lesson))
    assert f"(../{lesson.name})" in notebook.cells[0].source
    assert f"(solutions/{solutions_of(lesson).name})" in "".join(
        cell.source for cell in read(lesson).cells if cell.cell_type == "markdown"
    )
    prose = [c.source for c in notebook.cells if c.cell_type == "markdown"]
    reasons = [text for text in prose[1:] if not STATEMENT.search(text)]
    assert len(reasons) >= len(exercises(notebook))
    assert all(len(text.split()) >= 40 for text in reasons)


@pytest.mark.parametrize("path", SOLUTIONS, ids=[path.stem for path in SOLUTIONS])
def test_compared_cells_of_a_solution_hold_nothing_volatile(path: Path) -> None:
    cases.test_n14_n15_compared_cells_hold_one_stream_and_nothing_volatile(path)


def test_the_decisions_to_choose_from_stand_in_the_exercise() -> None:
    from rlhelpers.checks.full_run import _DECISIONS

    lesson = next(path for path in LESSONS if path.stem == "04_full_run")
    statement = " ".join(exercises(read(lesson))[1][0].split())
    assert set(re.findall(r"\| ([A-Z]) \|", statement)) == set(_DECISIONS)
    for decision, _ in _DECISIONS.values():
        assert decision in statement


WITH_PARAMETERS = [
    path
    for path in SOLUTIONS
    if any("parameters" in c.metadata.get("tags", []) for c in code_cells(read(path)))
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", WITH_PARAMETERS, ids=[path.stem for path in WITH_PARAMETERS]
)
def test_papermill_runs_a_solution_with_other_parameters(
    path: Path, tmp_path: Path
) -> None:
    assert set(parameters_of(read(path))) == {"SEED", "RUNS_DIR"}
    executed = papermill.execute_notebook(
        str(path),
        str(tmp_path / path.name),
        parameters={"SEED": 1, "RUNS_DIR": str(tmp_path / "runs")},
        kernel_name="python3",
        cwd=str(path.parent),
        progress_bar=False,
    )
    for _, cells in exercises(executed):
        assert "✓" in output_of(cells)
