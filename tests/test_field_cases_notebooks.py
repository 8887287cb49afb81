"""Failures that others reported of notebooks and widgets, held against ours.

The ids are those of the collected field cases. Parts of N05 and N14 live in
test_store_notebooks.py, and of N20 in test_quotes.py.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import papermill
import pytest
from noise_policy import env, plain
from test_notebooks import CHANGED, IDS, NOTEBOOKS, code_cells, parameters_of, read

import rlhelpers
from rlhelpers.models import PRESETS, ModelPreset

ROOT = Path(__file__).resolve().parents[1]
WIDGET = "application/vnd.jupyter.widget-view+json"


# -- N01: no helper starts a loop of its own --------------------------------------


def helpers() -> dict[str, Callable[..., Any]]:
    """The public helpers that are plain functions, by name."""
    found = {name: getattr(rlhelpers, name) for name in rlhelpers.__all__}
    return {name: f for name, f in found.items() if inspect.isfunction(f)}


def test_n01_what_waits_is_async_and_nothing_else_is() -> None:
    waiting = {name for name, f in helpers().items() if inspect.iscoroutinefunction(f)}
    assert waiting == {"calibrate", "evaluate", "train", "train_step"}
    for path in sorted((ROOT / "rlhelpers").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        assert "run_until_complete" not in text, path.name
        # These are programs, with a loop of their own.
        if path.name in {"commands.py", "verification.py"}:
            continue
        assert "asyncio.run(" not in text, path.name
        if path.name not in {"__main__.py", "command_line.py"}:
            assert "import rlhelpers.command" not in text, path.name
            assert "from rlhelpers.command" not in text, path.name


async def each_helper(session: Any, run_dir: Path) -> list[int]:
    """Every public helper that talks to a service, as a cell would call it."""
    tasks = [plain(n) for n in range(4)]
    config = rlhelpers.TrainConfig.from_preset(session.preset, steps=1)
    calibrated = await rlhelpers.calibrate(session, tasks[:2], group_size=2)
    evaluated = await rlhelpers.evaluate(session, tasks[:2])
    stepped = await rlhelpers.train_step(session, tasks[:2], config=config)
    trained = await rlhelpers.train(
        session, tasks, config=config, run_dir=run_dir, progress=False
    )
    return [
        len(calibrated.records),
        len(evaluated.records),
        len(stepped.records),
        len(trained.metrics),
    ]


def connected(preset: ModelPreset, folder: Path) -> Any:
    from hud.eval.runtime import LocalRuntime

    return rlhelpers.connect(
        model=preset, runs_dir=folder, task_runtime=LocalRuntime(env), quiet=True
    )


async def test_n01_in_a_running_loop(preset: ModelPreset, tmp_path: Path) -> None:
    # connect() itself is synchronous and is called here inside a loop, as in a cell.
    with connected(preset, tmp_path) as session:
        assert await each_helper(session, tmp_path / "run") == [4, 2, 8, 1]


def test_n01_from_a_plain_script(preset: ModelPreset, tmp_path: Path) -> None:
    with connected(preset, tmp_path) as session:
        for name in ("first", "second"):  # a new loop each time, one session
            counts = asyncio.run(each_helper(session, tmp_path / name))
            assert counts == [4, 2, 8, 1]


# -- N03, N05: callbacks and figures in a real kernel ------------------------------


GRADE = """
from rlhelpers.plots import plot_advantages
from rlhelpers.metrics import StepMetrics
from rlhelpers.training import StepResult
from rlhelpers.widgets import TrainingDashboard, answer_box


def grade(text):
    print("printed", text)
    if text == "bad":
        raise ValueError("cannot grade this")
    return f"graded {text}"


once, twice = (answer_box(grade, default=text) for text in ("1692", "1693"))
"""
TWICE = "twice.children[0].value = 'bad'\ntwice.children[1].click()"
PLOT = "plot_advantages([1, 0], [0.7, -0.7])"
LIVE = """
dashboard = TrainingDashboard(3, redraw_every=1)
for step in (1, 2, 3):
    metrics = StepMetrics.example(step=step, kl=step / 100)
    dashboard(StepResult(metrics, (), (), ()))
"""
CELLS = {
    "grade": GRADE,
    "boxes": "display(once, twice)",
    "click": "for box in (once, twice):\n    box.children[1].click()",
    "click again": TWICE,
    "plot": PLOT,
    "named plot": f"figure = {PLOT}",
    "its name": "figure",
    "live": LIVE,
}


@pytest.fixture(scope="module")
def notebook() -> Any:
    """Those cells after a run, with the state of their widgets."""
    made = nbformat.v4.new_notebook()
    made.cells = [nbformat.v4.new_code_cell(source) for source in CELLS.values()]
    return nbclient.NotebookClient(
        made, kernel_name="python3", timeout=120, store_widget_state=True
    ).execute()


@pytest.fixture
def cell(notebook: Any) -> Callable[[str], Any]:
    """A cell of it by its name."""
    return lambda name: notebook.cells[list(CELLS).index(name)]


def clicks(notebook: Any) -> list[str]:
    """What the boxes show, each as one text."""
    states = notebook.metadata.widgets["application/vnd.jupyter.widget-state+json"]
    return [
        str(model["state"]["outputs"])
        for model in states["state"].values()
        if model["model_name"] == "OutputModel"
    ]


@pytest.mark.slow
def test_n03_what_a_callback_prints_returns_or_raises_is_seen(
    notebook: Any, cell: Callable[[str], Any]
) -> None:
    (text,) = (shown for shown in clicks(notebook) if "bad" in shown)
    # The second click replaced what the first one showed.
    assert "printed bad" in text
    assert "cannot grade this" in text
    assert "1693" not in text
    assert not cell("click").outputs
    assert not cell("click again").outputs


@pytest.mark.slow
def test_n03_a_click_shows_what_was_printed_and_returned(notebook: Any) -> None:
    (text,) = (shown for shown in clicks(notebook) if "bad" not in shown)
    assert "printed 1692" in text
    assert "graded 1692" in text


@pytest.mark.slow
def test_n05_a_plot_leaves_exactly_one_image(cell: Callable[[str], Any]) -> None:
    names = ("grade", "plot", "named plot", "its name")
    assert [images(cell(name)) for name in names] == [0, 1, 0, 1]


@pytest.mark.slow
def test_n05_n12_a_live_dashboard_is_redrawn_in_place_and_stays(
    cell: Callable[[str], Any],
) -> None:
    line, panels = cell("live").outputs
    assert line["data"]["text/plain"].startswith("step 3 of 3: mean reward 0.50")
    assert "image/png" in panels["data"]
    assert WIDGET not in line["data"].keys() | panels["data"].keys()


def images(cell: Any) -> int:
    return sum("image/png" in output.get("data", {}) for output in cell.outputs)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=IDS)
def test_n05_no_stored_cell_shows_a_figure_twice(path: Path) -> None:
    for cell in code_cells(read(path)):
        shown = [
            output["data"]["image/png"]
            for output in cell.outputs
            if "image/png" in output.get("data", {})
        ]
        assert len(shown) == len(set(shown)), cell.id
        if re.match(r"plot_\w+\(", cell.source.strip().splitlines()[-1]):
            assert len(shown) == 1, cell.id


# -- N07, N12: the lesson without a widget front end ------------------------------


def is_static(output: Any) -> bool:
    """Whether an output can be read without JavaScript and without a kernel."""
    data = output.get("data", {})
    return output.output_type == "stream" or (
        WIDGET not in data and bool(data.keys() & {"text/plain", "image/png"})
    )


@pytest.mark.parametrize("path", NOTEBOOKS, ids=IDS)
def test_n07_n12_every_widget_stands_beside_a_static_output(path: Path) -> None:
    cells = code_cells(read(path))
    for cell, following in zip(cells, [*cells[1:], None], strict=True):
        if any(WIDGET in output.get("data", {}) for output in cell.outputs):
            beside = [*cell.outputs, *(following.outputs if following else ())]
            assert any(map(is_static, beside)), cell.id


# -- N08, N17, N18: no widgets, no key, no network, nobody at the keyboard ---------

# Python runs this module at the start of every kernel that finds it.
BARE = """
import socket
import sys

sys.modules["ipywidgets"] = None  # importing it fails
NEAR = ("127.0.0.1", "localhost", "::1", "0.0.0.0", "", None)
connect, look_up = socket.socket.connect, socket.getaddrinfo


def refuse(host):
    with open({log!r}, "a") as log:
        log.write(f"{{host}}\\n")
    raise OSError("the network is off")


def near_only(self, address):
    if isinstance(address, tuple) and address[0] not in NEAR:
        refuse(address[0])
    return connect(self, address)


def near_name_only(host, *rest, **options):
    if host not in NEAR:
        refuse(host)
    return look_up(host, *rest, **options)


socket.socket.connect, socket.getaddrinfo = near_only, near_name_only
"""


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Kernels and scripts without ipywidgets, network and keys; a log of attempts."""
    log = tmp_path / "attempts.txt"
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(BARE.format(log=str(log)))
    paths = [str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    for name in list(os.environ):
        if re.search(r"API_KEY|TOKEN$|_PROXY$", name, re.I):
            monkeypatch.delenv(name)
    return log


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=IDS)
def test_n08_n17_n18_the_course_runs_with_nothing(
    path: Path, bare: Path, tmp_path: Path
) -> None:
    """With other parameters than its own, whose effect is checked as well."""
    changed, check = CHANGED[path.stem]
    if "RUNS_DIR" in parameters_of(read(path)):
        changed = {**changed, "RUNS_DIR": str(tmp_path / "runs")}
    executed = papermill.execute_notebook(
        str(path),
        str(tmp_path / path.name),
        parameters=changed,
        kernel_name="python3",
        cwd=str(path.parent),
        progress_bar=False,
    )
    check(executed, tmp_path / "runs")
    outputs = [output for cell in code_cells(executed) for output in cell.outputs]
    assert not [output for output in outputs if output.get("name") == "stderr"]
    assert not [output for output in outputs if WIDGET in output.get("data", {})]
    assert not bare.exists(), bare.read_text()


def script(source: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", source],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_n08_the_stand_in_for_a_widget_says_what_it_is(bare: Path) -> None:
    done = script(
        "from rlhelpers.widgets import TrainingDashboard, answer_box\n"
        "print(answer_box(str.upper, default='a'), TrainingDashboard(3).steps)"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("(this control needs the package ipywidgets")
    assert done.stdout.rstrip().endswith(" 3")
    assert done.stderr == ""


async def test_n08_the_progress_bar_is_text_on_one_stream(
    session: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = rlhelpers.TrainConfig.from_preset(session.preset, steps=2)
    await rlhelpers.train(
        session, [plain(n) for n in range(4)], config=config, run_dir=tmp_path / "run"
    )
    printed = capfd.readouterr()
    assert "training" in printed.out
    assert "2/2" in printed.out
    assert printed.err == ""


@pytest.mark.slow
def test_n17_without_a_key_nobody_is_asked_for_one(bare: Path, tmp_path: Path) -> None:
    done = script(
        f"import os; os.chdir({str(tmp_path)!r})\n"
        "from rlhelpers import connect\n"
        "connect('fireworks')"
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "MissingKey" in last
    assert "FIREWORKS_API_KEY" in last
    assert "BACKEND='local'" in last
    assert not bare.exists(), bare.read_text()


# -- N14, N15: what nbval compares ------------------------------------------------

VOLATILE = {
    "a run's id": r"\d{8}-\d{6}",
    "an address": r"127\.0\.0\.1|localhost|https?://",
    "a path": r"(^|[\s'\"(])(/[\w.-]+){2,}|[A-Z]:\\\\",
    "an object's id": r"0x[0-9a-f]{6,}",
    "a duration": r"\b\d+(\.\d+)? ?(s|ms|seconds|minutes)\b",
    "a date": r"\b20\d\d-\d\d-\d\d\b",
}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=IDS)
def test_n14_n15_compared_cells_hold_one_stream_and_nothing_volatile(
    path: Path,
) -> None:
    for cell in code_cells(read(path)):
        if "nbval-check-output" not in cell.metadata.get("tags", []):
            continue
        assert images(cell) == 0, f"{cell.id}: pictures differ by machine"
        assert {output.get("name", "stdout") for output in cell.outputs} == {"stdout"}
        text = "\n".join(output.get("text", "") for output in cell.outputs)
        for what, pattern in VOLATILE.items():
            found = re.search(pattern, text, re.M)
            assert not found, f"{cell.id} prints {what}: {found and found[0]!r}"


# -- N20: the prose says what the code does ---------------------------------------


def prose(stem: str) -> str:
    notebook = read(ROOT / "notebooks" / f"{stem}.ipynb")
    texts = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    return " ".join(" ".join(texts).split())


def test_n20_the_reward_rule() -> None:
    text = prose("01_environment_and_grader")
    assert "strip decoration (`$ * backtick`, a `\\boxed{}`, one full stop)" in text
    for answer in ("$4$", "**4**", "`4`", "\\boxed{4}", "4.", "work\n4\n"):
        assert rlhelpers.grade_final_integer(answer, 4).reward == 1.0, answer
    for answer in ("4!", "It is 4.", "4 or 5", "4\nDone"):
        assert rlhelpers.grade_final_integer(answer, 4).reward == 0.0, answer


def test_n20_the_advantage_formula_and_the_variant() -> None:
    text = prose("04_full_run")
    assert "(1 − 0.25) / 0.5 = +1.5 and each wrong one −0.5" in text
    assert "Advantages standardised within the group (n − 1)" in text
    values = rlhelpers.group_relative_advantages([1.0, 0.0, 0.0, 0.0])
    assert values == [1.5, -0.5, -0.5, -0.5]


def test_n20_the_recipe_names_functions_that_exist() -> None:
    from fireworks.training.sdk import FiretitanTrainingClient

    import rlhelpers.sampling

    text = prose("04_full_run").split("## The recipe")[1].split("## By hand")[0]
    named = set(re.findall(r"`(\w+)` \|", text))
    assert named >= {"collect_rollouts", "make_training_batch", "optim_step"}
    homes = (rlhelpers, rlhelpers.sampling, FiretitanTrainingClient)
    missing = {n for n in named if not any(hasattr(home, n) for home in homes)}
    assert missing == {"multiply"}  # the task's template, which HUD calls
    assert callable(rlhelpers.arithmetic.multiply)


def test_n20_quoted_numbers() -> None:
    preset = PRESETS["tiny-arithmetic"]
    text = prose("04_full_run")
    assert f"train a policy for {preset.steps} steps" in text
    quoted = re.search(r"Tokens at the defaults: about ([\d,]+)", text)
    stored = re.search(
        r"in all ([\d,]+)",
        (ROOT / "notebooks" / "04_full_run.ipynb").read_text(encoding="utf-8"),
    )
    assert quoted
    assert stored
    about, exact = (int(match[1].replace(",", "")) for match in (quoted, stored))
    assert abs(about - exact) < 0.2 * exact


def test_n20_the_readme_agrees_with_the_presets() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    preset = PRESETS["tiny-arithmetic"]
    rollouts = preset.steps * preset.rollouts_per_step
    assert f"{rollouts:,} rollouts, {preset.steps} updates" in " ".join(text.split())
    for name, known in PRESETS.items():
        assert re.search(rf'\| `"{known.backend}"` \| `"{name}"`', text), name
    for path in NOTEBOOKS:
        assert f"(notebooks/{path.name})" in text
    linked = set(re.findall(r"\]\(([^)#:]+)\)", text))
    notebooks = {Path(link).stem for link in linked if link.endswith(".ipynb")}
    assert notebooks == set(IDS)
    for link in linked:
        assert link.endswith(".ipynb") or (ROOT / link).exists(), link


# -- N09, N10: the stored kernel, and parameters that reach what follows from them -


@pytest.mark.parametrize(
    "path",
    sorted((ROOT / "notebooks").rglob("[0-9][0-9]_*.ipynb")),
    ids=lambda path: path.stem,
)
def test_n09_the_stored_kernel_is_nobodys_own(path: Path) -> None:
    metadata = read(path).metadata
    assert metadata.kernelspec == {
        "display_name": "Python 3",
        "language": "python",
        "name": "python3",
    }
    assert metadata.language_info == {"name": "python"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=IDS)
def test_n10_what_follows_from_a_parameter_is_worked_out_later(path: Path) -> None:
    """The parameters cell holds literals alone, and what is injected comes after it."""
    notebook = read(path)
    names = set(parameters_of(notebook))  # refuses anything but literals
    cells = code_cells(notebook)
    tags = [cell.metadata.get("tags", []) for cell in cells]
    place = next(i for i, found in enumerate(tags) if "parameters" in found)
    later = {
        node.id
        for cell in cells[place + 1 :]
        for node in ast.walk(ast.parse(cell.source))
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    assert names <= later
    before = "\n".join(cell.source for cell in cells[:place])
    assert not [name for name in names if re.search(rf"\b{name}\b", before)]
