"""Notebook 04 and the stop button, pressed in a real kernel in the middle of a run."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import nbclient
import pytest
from papermill.iorw import load_notebook_node
from papermill.parameterize import parameterize_notebook
from test_notebooks import FOLDER

STEPS = 12
SMALL = {
    "STEPS": STEPS,
    "TASKS_PER_STEP": 2,
    "GROUP_SIZE": 4,
    "EVALUATION_TASKS": 4,
    "INTERRUPT_AFTER": STEPS,  # later than ours
}
TRAINS, GOES_ON, CHECKS = "c18", "c22", "c23"


def steps_on_disk(runs: Path) -> int:
    files = list(runs.glob("full-run-*/metrics.jsonl"))
    return len(files[0].read_text().splitlines()) if files else 0


async def recorded(runs: Path, steps: int) -> None:
    """Wait until so many steps are on disk."""
    for _ in range(6_000):
        if steps_on_disk(runs) >= steps:
            return
        await asyncio.sleep(0.02)
    pytest.fail(f"no {steps} steps after two minutes")


async def run_with_a_stop(notebook: Any, runs: Path) -> None:
    """Run the cells up to the check; stop the training cell after three steps."""
    client = nbclient.NotebookClient(
        notebook,
        kernel_name="python3",
        allow_errors=True,
        resources={"metadata": {"path": str(FOLDER)}},
    )
    async with client.async_setup_kernel():
        for index, cell in enumerate(notebook.cells):
            if cell.cell_type != "code":
                continue
            running = asyncio.ensure_future(client.async_execute_cell(cell, index))
            if cell.id == TRAINS:
                await recorded(runs, 3)
                assert client.km is not None
                await client.km.interrupt_kernel()
            await running
            if cell.id == CHECKS:
                return


@pytest.mark.slow
async def test_a_stopped_run_goes_on_without_losing_or_doubling_a_step(
    tmp_path: Path,
) -> None:
    runs = tmp_path / "runs"
    stored = load_notebook_node(str(FOLDER / "04_full_run.ipynb"))
    notebook = parameterize_notebook(stored, {**SMALL, "RUNS_DIR": str(runs)})
    await run_with_a_stop(notebook, runs)

    cells = {cell.id: cell for cell in notebook.cells}
    failed = [
        cell.id
        for cell in notebook.cells
        if any(o.output_type == "error" for o in cell.get("outputs", ()))
    ]
    assert failed == []
    assert "interrupted" in str(cells[TRAINS].outputs)
    (metrics,) = runs.glob("full-run-*/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    done = [row["attempt"] for row in rows].count(1)
    assert 3 <= done < STEPS - 1  # it was our stop, not the notebook's own
    assert [row["attempt"] for row in rows] == [1] * done + [2] * (STEPS - done)
    assert f"step {STEPS} of {STEPS}" in str(cells[GOES_ON].outputs)
    assert "✓ no step is lost or doubled" in str(cells[CHECKS].outputs)
