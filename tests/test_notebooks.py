"""Every notebook: its stored form, and a run with changed parameters.

nbval runs them unchanged and compares their deterministic cells (see the Makefile).
Here stand the other parameters that papermill runs each with, and how their effect is
seen; test_field_cases_notebooks.py runs them, in a kernel that lacks what it can do
without.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import papermill
import pytest
from papermill.iorw import load_notebook_node
from papermill.parameterize import parameterize_notebook

from rlhelpers.preflight import MissingKey
from rlhelpers.sampling import rollout_seed

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
IDS = [path.stem for path in NOTEBOOKS]
SOLUTIONS = sorted((FOLDER / "solutions").glob("*.ipynb"))
STORED = [*NOTEBOOKS, *SOLUTIONS]
STORED_IDS = [path.stem for path in STORED]


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(notebook: Any) -> str:
    """Everything that the notebook printed or displayed as text."""
    parts = []
    for cell in code_cells(notebook):
        for output in cell.outputs:
            parts.append(output.get("text", ""))
            data = output.get("data", {})
            parts += [data.get("text/plain", ""), data.get("text/markdown", "")]
    return "\n".join(parts)


# -- the stored form --------------------------------------------------------------


@pytest.mark.parametrize("path", STORED, ids=STORED_IDS)
def test_stored_outputs_come_from_one_clean_run(path: Path) -> None:
    notebook = read(path)
    cells = code_cells(notebook)
    counts = [cell.execution_count for cell in cells]
    assert counts == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [o for o in outputs if o.output_type == "error"]
    assert not [o for o in outputs if o.get("name") == "stderr"]
    assert all("".join(cell.source).strip() for cell in notebook.cells)
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"/(home|root|tmp|work|Users)/|Traceback|api_key=\w", text)


@pytest.mark.parametrize("path", STORED, ids=STORED_IDS)
def test_the_kernel_is_nobodys_own(path: Path) -> None:
    assert read(path).metadata.kernelspec.name == "python3"


@pytest.mark.parametrize("path", STORED, ids=STORED_IDS)
def test_cells_stay_short(path: Path) -> None:
    cells = [cell.source.splitlines() for cell in code_cells(read(path))]
    assert max(len(lines) for lines in cells) <= 40
    assert sorted(len(lines) for lines in cells)[len(cells) // 2] <= 12
    assert max(len(line) for lines in cells for line in lines) <= 88


@pytest.mark.parametrize("path", NOTEBOOKS, ids=IDS)
def test_a_notebook_fits_one_sitting(path: Path) -> None:
    # The hidden cell for hosted services is nothing to read.
    cells = [cell for cell in read(path).cells if cell.id != "hosted"]
    prose = [cell.source for cell in cells if cell.cell_type == "markdown"]
    assert 25 <= len(cells) <= 45
    words = [word for text in prose for word in text.split() if re.search(r"\w", word)]
    assert len(words) <= 1550  # about 1,500; rules of tables are no words


def parameters_of(notebook: Any) -> dict[str, Any]:
    """Names and values of the one cell tagged ``parameters``; literals only."""
    tagged = [
        cell
        for cell in code_cells(notebook)
        if "parameters" in cell.metadata.get("tags", [])
    ]
    assert len(tagged) == 1
    values: dict[str, Any] = {}
    for statement in ast.parse(tagged[0].source).body:
        assert isinstance(statement, ast.Assign)
        (target,) = statement.targets
        assert isinstance(target, ast.Name)
        values[target.id] = ast.literal_eval(statement.value)
    return values


@pytest.mark.parametrize("path", NOTEBOOKS, ids=IDS)
def test_every_parameter_is_read_by_a_later_cell(path: Path) -> None:
    notebook = read(path)
    names = set(parameters_of(notebook))
    read_names: set[str] = set()
    for cell in code_cells(notebook):
        tree = ast.parse(cell.source, mode="exec", type_comments=False)
        read_names |= {
            node.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
        }
    assert names
    assert names <= read_names


@pytest.mark.parametrize("path", NOTEBOOKS, ids=IDS)
def test_papermill_sees_every_parameter(path: Path) -> None:
    # It skips a line with more than one equals sign, inside a text too.
    seen = papermill.inspect_notebook(str(path))
    assert set(seen) == set(parameters_of(read(path)))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=IDS)
def test_parameters_are_checked_before_anything_is_sent(path: Path) -> None:
    sources = [cell.source for cell in code_cells(read(path))]
    parameters = next(i for i, source in enumerate(sources) if "# Param" in source)
    # How the check finds the names that this notebook has.
    assert sources[parameters].startswith("# Parameters:")
    check = re.compile(r"\bcheck_parameters\(\s*globals\(\)")
    checked = [i for i, source in enumerate(sources) if check.search(source)]
    sent = [i for i, source in enumerate(sources) if re.search(r"\bconnect\(", source)]
    assert checked
    assert parameters < checked[0] < min(sent, default=len(sources))


@pytest.mark.parametrize("path", STORED, ids=STORED_IDS)
def test_no_loop_is_started_inside_the_notebooks_own(path: Path) -> None:
    source = "\n".join(cell.source for cell in code_cells(read(path)))
    assert "asyncio.run" not in source
    assert "nest_asyncio" not in source
    assert not re.search(r"\binput\(", source)


# -- runs with changed parameters -------------------------------------------------


def check_01(notebook: Any, folder: Path) -> None:
    text = printed(notebook)
    assert "Compute 12 * 34" in text
    assert "rewards of the group: [0.0, 1.0, 0.0, 0.0]" in text
    assert "wrong_integer   read as 407" in text  # ANSWER was graded, and for 12 × 34


def calibrations(folder: Path) -> list[list[dict[str, Any]]]:
    """The rollouts of each calibration, in the order they were run."""
    files = sorted(
        folder.glob("calibrate-*/rollouts.jsonl"), key=lambda p: p.stat().st_mtime
    )
    return [
        [json.loads(line) for line in file.read_text().splitlines()] for file in files
    ]


def check_02(notebook: Any, folder: Path) -> None:
    first, easy, large, short, heat = calibrations(folder)
    # TASKS 3 × GROUP_SIZE 2, within MIN_OPERAND 2 to MAX_OPERAND 12, under MAX_TOKENS
    for batch in (first, easy, large, short):
        assert len(batch) == 6
        assert len({row["task"] for row in batch}) == 3
    operands = [value for row in first for value in row["args"].values()]
    assert min(operands) >= 2
    assert max(operands) <= 12
    assert max(row["output_tokens"] for row in first + easy + large) <= 48
    assert max(row["output_tokens"] for row in short) <= 24
    # 36 cells × HEAT_MAP_TASKS 1 × HEAT_MAP_GROUP_SIZE 2
    assert len(heat) == 72
    assert len({row["task"] for row in heat}) == 36
    seeds = {row["seed"] for row in first}
    assert seeds == {rollout_seed(3, 0, t, r) for t in range(3) for r in range(2)}
    text = printed(notebook)
    assert "6 rollouts:" in text
    assert text.count("reward 1   correct") + text.count("reward 0   ") == 2  # SAMPLES
    assert "Token ceiling    5,000,000" in text  # TOKEN_LIMIT


def check_03(notebook: Any, folder: Path) -> None:
    (calibration,) = calibrations(folder)
    assert len(calibration) == 24 * 8
    assert max(row["output_tokens"] for row in calibration) <= 100
    assert max(value for row in calibration for value in row["args"].values()) <= 60
    steps = folder.glob("step-*/metrics.jsonl")
    metrics = min(steps, key=lambda file: file.stat().st_mtime)
    row = json.loads(metrics.read_text().splitlines()[0])
    assert (row["rollouts"], row["max_tokens"]) == (12, 100)  # 2 × 6
    assert row["learning_rate"] == 2e-3
    for phase in ("before", "after"):
        (file,) = folder.glob(f"{phase}-*/rollouts.jsonl")
        assert len(file.read_text().splitlines()) == 3
    assert "Token ceiling    5,000,000" in printed(notebook)


def check_04(notebook: Any, folder: Path) -> None:
    (metrics,) = folder.glob("full-run-*/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert {row["rollouts"] for row in rows} == {8}
    assert {row["max_tokens"] for row in rows} == {64}
    assert {row["learning_rate"] for row in rows} == {1e-3}
    assert [row["kl"] is not None for row in rows] == [False, True, False]
    rollouts = metrics.with_name("rollouts.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in rollouts]
    before = [record for record in records if record["phase"] == "before"]
    assert len(before) == 6
    operands = [value for record in records for value in record["args"].values()]
    assert min(operands) >= 2
    assert max(operands) <= 12
    resume = json.loads(metrics.with_name("resume.json").read_text())
    assert (resume["seed"], resume["next_step"]) == (5, 4)
    text = printed(notebook)
    assert "1 steps recorded: [1]" in text  # INTERRUPT_AFTER
    assert "12 training tasks" not in text
    assert "6 training tasks, 6 held out, operands 2 to 12" in text
    assert "Token ceiling    123,456" in text


def check_05(notebook: Any, folder: Path) -> None:
    assert "Token ceiling    5,000,000" in printed(notebook)
    (short,) = folder.glob("short-run-*/metrics.jsonl")  # there was no run to read
    rows = [json.loads(line) for line in short.read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert {row["max_tokens"] for row in rows} == {96}
    assert json.loads(short.with_name("resume.json").read_text())["seed"] == 5
    (ranges,) = folder.glob("ranges-*/rollouts.jsonl")
    records = [json.loads(line) for line in ranges.read_text().splitlines()]
    counts = {
        phase: sum(record["phase"] == phase for record in records)
        for phase in dict.fromkeys(record["phase"] for record in records)
    }
    assert counts == {
        "again": 6,
        "base 2-9": 6,
        "trained 2-9": 6,
        "base 100-120": 6,
        "trained 100-120": 6,
    }
    low = [r["args"].values() for r in records if r["phase"] == "base 2-9"]
    assert all(2 <= operand <= 9 for operands in low for operand in operands)
    assert max(record["output_tokens"] for record in records) <= 96
    text = printed(notebook)
    assert "no finished run here" in text
    assert "2 steps on tiny-arithmetic, 6 held-out tasks" in text
    assert "6 of 6 replies are as recorded after training" in text


def check_06(notebook: Any, folder: Path) -> None:
    def rows_of(label: str) -> list[dict[str, Any]]:
        (metrics,) = folder.glob(f"{label}-*/metrics.jsonl")
        return [json.loads(line) for line in metrics.read_text().splitlines()]

    assert [row["step"] for row in rows_of("first-half")] == [1, 2]
    for label in ("straight-on", "resumed", "weights-only"):
        rows = rows_of(label)
        assert [row["step"] for row in rows] == [3, 4]
        assert {row["rollouts"] for row in rows} == {8}
        assert {row["max_tokens"] for row in rows} == {64}
    (along,) = folder.glob("along-checkpoints-*/rollouts.jsonl")
    records = [json.loads(line) for line in along.read_text().splitlines()]
    assert [record["step"] for record in records] == [0] * 6 + [5] * 6 + [10] * 6
    (resume,) = folder.glob("short-run-*/resume.json")
    assert json.loads(resume.read_text())["seed"] == 3
    text = printed(notebook)
    assert "models/my-model\n" in text
    assert "Token ceiling    5,000,000" in text  # TOKEN_LIMIT
    assert "✓ with the optimizer: the same run, bit for bit" in text
    assert "✓ every wrong use is refused" in text
    assert "✓ another base model is a new run" in text
    assert "✓ the same greedy replies, token by token" in text


def check_07(notebook: Any, folder: Path) -> None:
    (sampled,) = calibrations(folder)
    assert len(sampled) == 2 * 2 * 4  # two steps' tasks, each GROUP_SIZE times
    (metrics,) = folder.glob("own-task-*/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert {row["rollouts"] for row in rows} == {8}
    assert {row["max_tokens"] for row in rows} == {10}
    assert {row["learning_rate"] for row in rows} == {1e-3}
    rollouts = metrics.with_name("rollouts.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in rollouts]
    assert sum(record["phase"] == "after" for record in records) == 6
    assert {record["outcome"] for record in records} == {None}
    text = printed(notebook)
    assert "354 to train on, 6 held out" in text
    assert "a step takes 2, calibration 4, and 6 are held out" in text
    assert "✓ the task as it is passes every check" in text
    assert "6 tasks | mean reward" in text
    assert "Token ceiling    5,000,000" in text  # TOKEN_LIMIT


def check_08(notebook: Any, folder: Path) -> None:
    rates = {"too-low": 5e-4, "fits": 1e-3, "too-high": 2e-3, "held": 1e-3}
    for label, rate in rates.items():
        (metrics,) = folder.glob(f"{label}-*/metrics.jsonl")
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        assert [row["step"] for row in rows] == [1, 2]
        assert {row["rollouts"] for row in rows} == {8}
        assert {row["max_tokens"] for row in rows} == {64}
        assert {row["learning_rate"] for row in rows} == {rate}
        assert all(row["kl"] is not None for row in rows)
        resume = json.loads(metrics.with_name("resume.json").read_text())
        held = 0.2 if label == "held" else 0.0
        assert resume["config"]["kl_coefficient"] == held
        records = metrics.with_name("rollouts.jsonl").read_text().splitlines()
        after = [r for r in map(json.loads, records) if r["phase"] == "after"]
        assert len(after) == 6
        operands = [value for row in after for value in row["args"].values()]
        assert min(operands) >= 2
        assert max(operands) <= 12
    text = printed(notebook)
    assert "6 held out" in text
    assert text.count("the service's loss is the sum by hand") == 3
    assert re.search(r"^ppo +2 ", text, re.M)  # UPDATES
    assert "Token ceiling    5,000,000" in text  # TOKEN_LIMIT


def check_09(notebook: Any, folder: Path) -> None:
    (sampled,) = calibrations(folder)
    assert len(sampled) == 4 * 4  # four games, each GROUP_SIZE times
    (metrics,) = folder.glob("several-turns-*/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert {row["rollouts"] for row in rows} == {8}
    assert {row["max_tokens"] for row in rows} == {12}
    assert {row["learning_rate"] for row in rows} == {1e-3}
    records = metrics.with_name("rollouts.jsonl").read_text().splitlines()
    after = [r for r in map(json.loads, records) if r["phase"] == "after"]
    assert len(after) == 6
    seeds = {row["seed"] for row in sampled}
    assert seeds == {rollout_seed(5, 0, t, r) for t in range(4) for r in range(4)}
    text = printed(notebook)
    assert "4 training games, 6 held out" in text
    assert "Token ceiling    5,000,000" in text  # TOKEN_LIMIT
    assert "✓ answers are read, never trained" in text
    assert "✓ the one-turn agent refuses" in text


def check_10(notebook: Any, folder: Path) -> None:
    (sampled,) = calibrations(folder)
    assert len(sampled) == 4 * 4  # two steps' tasks, each GROUP_SIZE times
    for label in ("gamed", "cured"):
        (metrics,) = folder.glob(f"{label}-*/metrics.jsonl")
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        assert [row["step"] for row in rows] == [1, 2]
        assert {row["rollouts"] for row in rows} == {8}
        assert {row["max_tokens"] for row in rows} == {64}
        assert {row["learning_rate"] for row in rows} == {1e-3}
        records = metrics.with_name("rollouts.jsonl").read_text().splitlines()
        after = [r for r in map(json.loads, records) if r["phase"] == "after"]
        assert len(after) == 6
    operands = [value for row in sampled for value in row["args"].values()]
    assert min(operands) >= 2
    assert max(operands) <= 12
    text = printed(notebook)
    assert "6 held out" in text
    assert "✓ grading again cost no token" in text
    assert "Token ceiling    5,000,000" in text  # TOKEN_LIMIT


Check = Callable[[Any, Path], None]
CHANGED: dict[str, tuple[dict[str, Any], Check]] = {
    "01_environment_and_grader": (
        {"A": 12, "B": 34, "ANSWER": "12 * 34 = 407\n407"},
        check_01,
    ),
    "02_calibration": (
        {
            "SEED": 3,
            "MIN_OPERAND": 2,
            "MAX_OPERAND": 12,
            "TASKS": 3,
            "GROUP_SIZE": 2,
            "MAX_TOKENS": 48,
            "SAMPLES": 2,
            "HEAT_MAP_TASKS": 1,
            "HEAT_MAP_GROUP_SIZE": 2,
            "TOKEN_LIMIT": 5_000_000,
        },
        check_02,
    ),
    "03_one_update": (
        {
            "SEED": 1,
            "MIN_OPERAND": 11,
            "MAX_OPERAND": 60,
            "GROUP_SIZE": 6,
            "MAX_TOKENS": 100,
            "LEARNING_RATE": 2e-3,
            "EVALUATION_TASKS": 3,
            "TOKEN_LIMIT": 5_000_000,
        },
        check_03,
    ),
    "04_full_run": (
        {
            "SEED": 5,
            "MIN_OPERAND": 2,
            "MAX_OPERAND": 12,
            "STEPS": 3,
            "TASKS_PER_STEP": 2,
            "GROUP_SIZE": 4,
            "MAX_TOKENS": 64,
            "LEARNING_RATE": 1e-3,
            "EVALUATION_TASKS": 6,
            "KL_EVERY": 2,
            "INTERRUPT_AFTER": 1,
            "TOKEN_LIMIT": 123_456,
            "PRICES": [1.0, 2.0, 4.0],  # free here: seen in test_fireworks_path.py
        },
        check_04,
    ),
    "05_before_and_after": (
        {
            "SEED": 5,
            "EVALUATION_TASKS": 6,
            "MAX_TOKENS": 96,
            "RANGES": [[2, 9], [100, 120]],
            "STEPS": 2,
            "TOKEN_LIMIT": 5_000_000,
        },
        check_05,
    ),
    "06_checkpoints": (
        {
            "SEED": 3,
            "STEPS": 4,
            "TASKS_PER_STEP": 2,
            "GROUP_SIZE": 4,
            "MAX_TOKENS": 64,
            "EVALUATION_TASKS": 6,
            "PROMOTED_NAME": "my-model",
            "TOKEN_LIMIT": 5_000_000,
            "PRICES": [1.0, 2.0, 4.0],  # free here: seen in test_fireworks_path.py
        },
        check_06,
    ),
    "07_your_own_task": (
        {
            "SEED": 5,
            "STEPS": 3,
            "TASKS_PER_STEP": 2,
            "GROUP_SIZE": 4,
            "MAX_TOKENS": 10,
            "LEARNING_RATE": 1e-3,
            "EVALUATION_TASKS": 6,
            "TOKEN_LIMIT": 5_000_000,
            "PRICES": [1.0, 2.0, 4.0],  # free here: seen in test_fireworks_path.py
        },
        check_07,
    ),
    "08_losses_and_stability": (
        {
            "SEED": 5,
            "MIN_OPERAND": 2,
            "MAX_OPERAND": 12,
            "STEPS": 2,
            "TASKS_PER_STEP": 2,
            "GROUP_SIZE": 4,
            "MAX_TOKENS": 64,
            "LEARNING_RATE": 1e-3,
            "TOO_LOW": 0.5,
            "TOO_HIGH": 2.0,
            "UPDATES": 2,
            "KL_COEFFICIENT": 0.2,
            "POOL_TASKS": 4,
            "POOL_GROUP": 4,
            "TRAINING_TASKS": 3,
            "EVALUATION_TASKS": 6,
            "TOKEN_LIMIT": 5_000_000,
            "PRICES": [1.0, 2.0, 4.0],  # free here: seen in test_fireworks_path.py
        },
        check_08,
    ),
    "09_several_turns": (
        {
            "SEED": 5,
            "STEPS": 2,
            "TASKS_PER_STEP": 2,
            "GROUP_SIZE": 4,
            "MAX_TOKENS": 12,
            "LEARNING_RATE": 1e-3,
            "EVALUATION_TASKS": 6,
            "TOKEN_LIMIT": 5_000_000,
            "PRICES": [1.0, 2.0, 4.0],  # free here: seen in test_fireworks_path.py
        },
        check_09,
    ),
    "10_reward_design": (
        {
            "SEED": 5,
            "MIN_OPERAND": 2,
            "MAX_OPERAND": 12,
            "STEPS": 2,
            "TASKS_PER_STEP": 2,
            "GROUP_SIZE": 4,
            "MAX_TOKENS": 64,
            "LEARNING_RATE": 1e-3,
            "EVALUATION_TASKS": 6,
            "TOKEN_LIMIT": 5_000_000,
            "PRICES": [1.0, 2.0, 4.0],  # free here: seen in test_fireworks_path.py
        },
        check_10,
    ),
}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=IDS)
def test_changed_parameters_are_changed(path: Path) -> None:
    declared = parameters_of(read(path))
    changed, _ = CHANGED[path.stem]
    assert all(declared[name] != value for name, value in changed.items())


def run_up_to_an_error(path: Path, **parameters: Any) -> None:
    """Run a notebook's cells here, where one before the first ``await`` has to fail.

    Papermill's cell of parameters is there, and ``In``, as a kernel keeps it.
    """
    ran: list[str] = []
    scope: dict[str, Any] = {"In": ran}
    stored = load_notebook_node(str(path))
    for cell in code_cells(parameterize_notebook(stored, parameters)):
        ran.append(cell.source)
        exec(compile(cell.source, path.name, "exec"), scope)


def test_fireworks_without_a_key_stops_before_anything_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # no .env of a developer's is found from here
    runs = tmp_path / "runs"
    notebook = FOLDER / "04_full_run.ipynb"
    with pytest.raises(MissingKey, match="FIREWORKS_API_KEY"):
        run_up_to_an_error(notebook, BACKEND="fireworks", RUNS_DIR=str(runs))
    assert not (runs / "service").exists()


# -- nothing is left out ----------------------------------------------------------


def test_no_notebook_is_left_out() -> None:
    assert NOTEBOOKS
    assert set(CHANGED) == set(IDS)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(r"pytest .*--nbval-lax notebooks$", makefile, re.M)
    assert all(re.fullmatch(r"\d\d_[a-z_]+", stem) for stem in IDS)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=IDS)
def test_deterministic_cells_are_compared(path: Path) -> None:
    compared = [
        cell
        for cell in code_cells(read(path))
        if "nbval-check-output" in cell.metadata.get("tags", [])
    ]
    assert len(compared) >= 3
    assert all(cell.outputs for cell in compared)


def test_the_prompt_is_the_one_that_the_tiny_policy_was_made_for() -> None:
    from rlhelpers.arithmetic import PROMPT_TEMPLATE
    from rlhelpers.local.corpus import PROMPT

    assert PROMPT_TEMPLATE == PROMPT
