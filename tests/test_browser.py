"""The notebooks as a learner meets them: JupyterLab in a headless browser.

Opens each notebook, runs it to its end without an error, and uses its widgets. Needs
Playwright's Python package and a Chromium; without them it is skipped. With
``--screenshots docs/screenshots`` it runs notebook 04 at its defaults and writes the
README's pictures.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import pytest
from papermill.iorw import load_notebook_node
from papermill.parameterize import parameterize_notebook
from PIL import Image
from test_field_cases_notebooks import WIDGET
from test_notebooks import CHANGED, IDS, NOTEBOOKS, code_cells, read

playwright = pytest.importorskip(
    "playwright.sync_api", reason="Playwright is not installed"
)

ROOT = Path(__file__).resolve().parents[1]
TOKEN = "course-test"
ERROR = "application/vnd.jupyter.error"
STDERR = "application/vnd.jupyter.stderr"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
SETTINGS = "@jupyterlab/notebook-extension/tracker.jupyterlab-settings"
NOTIFICATIONS = "@jupyterlab/apputils-extension/notification.jupyterlab-settings"
#: Parameters of the copies whose widgets are used, so that they take a minute each. The
#: others get those of CHANGED. 05 and 06 read the run that 04 leaves.
SMALLER: dict[str, dict[str, Any]] = {
    "01_environment_and_grader": {},
    "02_calibration": {"HEAT_MAP_TASKS": 1, "HEAT_MAP_GROUP_SIZE": 2},
    "04_full_run": {
        "STEPS": 7,
        "TASKS_PER_STEP": 4,
        "GROUP_SIZE": 4,
        "EVALUATION_TASKS": 16,
        "INTERRUPT_AFTER": 5,
    },
}
PICTURED = "04_full_run"  # at its defaults where pictures are asked for

Shot = Callable[[Any, str], None]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser_path() -> str:
    for name in BROWSERS:
        if found := shutil.which(name):
            return found
    pytest.skip(f"no browser found: none of {', '.join(BROWSERS)} is on the PATH")


@dataclass(frozen=True)
class Lab:
    """A running JupyterLab: its address, and the folder of the notebooks' runs."""

    address: str
    runs: Path

    def stop_kernels(self) -> None:
        """End what the notebooks left running; six kernels need several GB."""
        for session in json.loads(self._ask("GET", "sessions")):
            self._ask("DELETE", f"sessions/{session['id']}")

    def _ask(self, method: str, path: str) -> bytes:
        request = urllib.request.Request(
            f"{self.address}/api/{path}",
            method=method,
            headers={"Authorization": f"token {TOKEN}"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return bytes(answer.read())


def copy_notebooks(folder: Path, *, pictures: bool) -> None:
    """The course without outputs: what is found later was written by this run."""
    folder.mkdir()
    for path in NOTEBOOKS:
        notebook = load_notebook_node(str(path))
        for cell in code_cells(notebook):
            cell.outputs, cell.execution_count = [], None
        smaller = SMALLER.get(path.stem, CHANGED[path.stem][0])
        if smaller and not (pictures and path.stem == PICTURED):
            notebook = parameterize_notebook(notebook, smaller)
        nbformat.write(notebook, folder / path.name)


@pytest.fixture(scope="module")
def lab(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Lab]:
    """Start JupyterLab on copies of the notebooks."""
    folder = tmp_path_factory.mktemp("lab")
    pictures = bool(request.config.getoption("--screenshots"))
    copy_notebooks(folder / "course", pictures=pictures)
    shutil.copytree(ROOT / "examples", folder / "examples")  # that notebook 07 reads
    # Off-screen cells would otherwise leave the page, and with them their outputs.
    settings = folder / "settings" / SETTINGS
    settings.parent.mkdir(parents=True)
    settings.write_text('{"windowingMode": "none"}', encoding="utf-8")
    # Nor may a question about news lie over a picture, or anything be fetched.
    quiet = folder / "settings" / NOTIFICATIONS
    quiet.parent.mkdir(parents=True)
    quiet.write_text('{"fetchNews": "false", "checkForUpdates": false}', "utf-8")
    log = (folder / "lab.log").open("wb")
    server = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "jupyterlab",
            "--no-browser",
            "--allow-root",
            "--ip=127.0.0.1",
            "--port=0",  # any that is free
            f"--IdentityProvider.token={TOKEN}",
            f"--ServerApp.root_dir={folder / 'course'}",
        ],
        env={
            **os.environ,
            "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
            "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
            "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
        },
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    try:
        yield Lab(_address_of(server, folder), folder / "runs")
    finally:
        server.terminate()
        server.wait(timeout=30)
        log.close()


def _address_of(server: subprocess.Popen[bytes], folder: Path) -> str:
    """Where the server listens, once it answers."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and server.poll() is None:
        for file in (folder / "runtime").glob("jpserver-*.json"):
            with contextlib.suppress(OSError, ValueError):  # it is not ready yet
                address = f"http://127.0.0.1:{json.loads(file.read_text())['port']}"
                with urllib.request.urlopen(f"{address}/api?token={TOKEN}", timeout=5):
                    return address
        time.sleep(0.5)
    log = (folder / "lab.log").read_text(errors="replace")
    pytest.fail(f"JupyterLab did not start:\n{log[-2000:]}")


@pytest.fixture(scope="module")
def profile(browser_path: str) -> Iterator[Any]:
    """One browser for all notebooks: it fetches and compiles JupyterLab once."""
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=browser_path,
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )
        context = browser.new_context(viewport={"width": 1300, "height": 1000})
        context.set_default_timeout(60_000)
        playwright.expect.set_options(timeout=60_000)
        yield context
        browser.close()


@pytest.fixture
def page(profile: Any, lab: Lab) -> Iterator[Any]:
    opened = profile.new_page()
    yield opened
    opened.close()
    lab.stop_kernels()


@pytest.fixture
def shot(request: pytest.FixtureRequest) -> Shot:
    """Save a picture of a part of the page, where pictures were asked for."""
    folder = request.config.getoption("--screenshots")

    def save(part: Any, name: str) -> None:
        if folder:
            path = Path(folder) / f"{name}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            image = Image.open(io.BytesIO(part.screenshot())).convert("RGB")
            image.save(path, optimize=True)

    return save


def run_all(page: Any, lab: Lab, name: str) -> None:
    """Open a notebook and run it to its end, without an error in any cell."""
    # A workspace of its own, or the notebook opened before would open again.
    workspace = f"{lab.address}/lab/workspaces/{name[:2]}"
    page.goto(f"{workspace}/tree/{name}?token={TOKEN}")
    page.locator(".jp-Notebook .jp-CodeCell").first.wait_for()
    page.locator('.jp-Notebook-ExecutionIndicator[data-status="idle"]').wait_for()
    prompts = page.locator(".jp-Notebook .jp-CodeCell .jp-InputArea-prompt")
    press_run_all(page, prompts)
    failed = page.locator(f'[data-mime-type="{ERROR}"], [data-mime-type="{STDERR}"]')
    deadline = time.monotonic() + 1_200
    while not ran_in_order(prompts.all_inner_texts()):
        if failed.count() or time.monotonic() > deadline:
            break
        page.wait_for_timeout(500)
    assert failed.count() == 0, failed.first.inner_text()
    assert ran_in_order(prompts.all_inner_texts()), prompts.all_inner_texts()


def ran_in_order(prompts: list[str]) -> bool:
    """Whether every cell has ended, each after the one above it.

    The last prompt need not be the number of cells: on a slow machine JupyterLab may
    hear Run All twice, and then counts on.
    """
    found = [re.fullmatch(r"\[(\d+)\]:", prompt.strip()) for prompt in prompts]
    numbers = [int(match[1]) for match in found if match]
    return len(numbers) == len(prompts) and numbers == sorted(set(numbers))


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        (["[1]:", "[2]:", "[3]:"], True),
        (["[2]:", " [3]: ", "[4]:"], True),  # counted on after an earlier execution
        (["[1]:", "[2]:", "[*]:"], False),  # runs
        (["[1]:", "[2]:", "[ ]:"], False),  # did not run
        (["[4]:", "[2]:", "[3]:"], False),  # the first was run again, alone
        (["[1]:", "[1]:", "[2]:"], False),  # of two kernels
    ],
)
def test_cells_that_ran_in_order(prompts: list[str], expected: bool) -> None:
    assert ran_in_order(prompts) == expected


def answer_dialog(page: Any, dialog: Any) -> None:
    """Close a dialog; the one that asks for a kernel must not be left without one."""
    kernels = dialog.locator("select")
    if kernels.count():
        kernels.first.select_option(label="Python 3 (ipykernel)")
        dialog.locator(".jp-mod-accept").click()
    else:
        page.keyboard.press("Escape")


def press_run_all(page: Any, prompts: Any) -> None:
    """Choose Run All; a page that is settling can lose the click, or ask something."""
    asked: list[str] = []
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        dialog = page.locator(".jp-Dialog")
        if dialog.count():  # such as of a connection that is slow at first
            asked.append(dialog.first.inner_text())
            answer_dialog(page, dialog.first)
        try:
            menu = page.locator(".lm-MenuBar-itemLabel", has_text="Run").first
            menu.click(timeout=10_000)
            page.locator('[data-command="runmenu:run-all"]').click(timeout=10_000)
        except playwright.TimeoutError as error:
            asked.append(str(error))
        else:
            for _ in range(60):  # pressed again too early, all would run twice
                page.wait_for_timeout(250)
                if any(text.strip() != "[ ]:" for text in prompts.all_inner_texts()):
                    return
        page.keyboard.press("Escape")  # an open menu would only be closed by a click
    pytest.fail(f"Run All was never heard; JupyterLab asked: {asked}")


def widget_box(page: Any, button: str) -> Any:
    """The widget that has a button of that name."""
    named = page.get_by_role("button", name=button, exact=True)
    return page.locator(".widget-vbox").filter(has=named).first


# -- one function for each notebook with widgets ------------------------------------


def grade_an_answer(page: Any, lab: Lab, shot: Shot) -> None:
    box = widget_box(page, "Grade it")
    button = box.get_by_role("button", name="Grade it")
    result = box.locator(".jp-OutputArea-output")
    for answer, said in (
        ("It is 1692.", "reward 0.0 invalid_final_line read as None"),
        ("1,693", "reward 0.0 wrong_integer read as 1693"),
        ("47 * 36 = 47 * 30 + 47 * 6\n**1,692**", "reward 1.0 correct read as 1692"),
    ):
        box.locator("textarea").fill(answer)
        button.click()
        playwright.expect(result).to_contain_text(said)
        assert result.count() == 1  # in place of the one before
    shot(box, "answer_box")


def recalibrate(page: Any, lab: Lab, shot: Shot) -> None:
    panel = widget_box(page, "Recalibrate")
    button = panel.get_by_role("button", name="Recalibrate")
    status = panel.locator(".widget-html-content").last
    assert "24 rollouts, at most" in status.inner_text()
    assert panel.locator("table").count() == 0  # nothing was sent yet

    slide(page, panel, "group size", "ArrowRight")
    playwright.expect(status).to_contain_text("6 tasks × 5 = 30 rollouts")
    assert panel.locator("table").count() == 0  # nor by dragging

    button.click()
    table = panel.locator("table")
    table.wait_for(timeout=120_000)
    rows = [row.split("\t") for row in table.inner_text().splitlines()]
    # The four calibrations of the notebook's own cells, then the learner's.
    assert [row[2] for row in rows] == ["group size", "4", "4", "4", "4", "5"]
    assert rows[-1][:4] == ["10 to 99", "10 to 99", "5", "160"]
    # The bars follow the table, a moment later.
    playwright.expect(panel.locator("img")).to_have_count(1)
    shot(panel, "calibration_panel")

    slide(page, panel, "group size", "End")
    playwright.expect(status).to_contain_text("6 tasks × 16 = 96 rollouts")
    button.click()
    button.click()  # while the first one samples
    playwright.expect(status).to_contain_text("One calibration is running")
    playwright.expect(table.locator("tr")).to_have_count(7, timeout=120_000)
    assert table.locator("tr").last.inner_text().split("\t")[2] == "16"
    playwright.expect(status).to_contain_text("96 rollouts")  # and it is ready again
    assert table.locator("tr").count() == 7

    for operand in ("first operand", "second operand"):  # both from 1 to 1: one pair
        slider = panel.locator(".widget-hslider", has_text=operand)
        for handle, shown in (("lower", r"^1\W+99$"), ("upper", r"^1\W+1$")):
            slide(page, panel, operand, "Home", f".noUi-handle-{handle}")
            readout = slider.locator(".widget-readout")
            playwright.expect(readout).to_have_text(re.compile(shown))
    # A slider sends one message at a time: its last one is still on its way.
    page.wait_for_timeout(5_000)
    button.click()
    playwright.expect(panel).to_contain_text("ValueError")


def slide(
    page: Any, box: Any, label: str, key: str, handle: str = ".noUi-handle"
) -> None:
    """Press a key on a slider's handle."""
    box.locator(".widget-hslider", has_text=label).locator(handle).first.focus()
    page.keyboard.press(key)


def watch_and_browse(page: Any, lab: Lab, shot: Shot) -> None:
    trained = page.locator(".jp-CodeCell", has=page.locator("progress"))
    assert trained.count() == 2  # until the interrupt, and on
    for number in range(2):  # each was redrawn in place
        assert trained.nth(number).locator("progress").count() == 1
        assert trained.nth(number).locator("img").count() == 1
    assert re.search(r"step (\d+) of \1:", trained.nth(1).inner_text())
    shot(trained.nth(1).locator(".jp-Cell-outputWrapper"), "dashboard")

    browser = widget_box(page, "Next")
    status = browser.locator(".widget-html-content", has_text="rollouts fit")
    replies = browser.locator("tbody tr")
    (file,) = lab.runs.glob("full-run-*/rollouts.jsonl")
    records = [json.loads(line) for line in file.read_text().splitlines()]
    records = [record for record in records if record["phase"] == "train"]
    wrong = [record for record in records if record["outcome"] == "wrong_integer"]
    playwright.expect(status).to_contain_text(f"{len(records):,} of {len(records):,}")

    browser.locator("select").select_option(label="wrong integer")
    playwright.expect(status).to_contain_text(f"{len(wrong):,} of {len(records):,}")
    for row, record in zip(replies.all(), wrong, strict=False):
        assert "wrong integer" in row.inner_text()
        assert record["text"].splitlines()[-1] in row.locator("pre").inner_text()
    shot(browser, "rollout_browser")

    last = records[-1]["step"]
    slide(page, browser, "steps", "End", ".noUi-handle-lower")
    browser.locator("select").select_option(label="any")
    in_last = [record for record in records if record["step"] == last]
    playwright.expect(status).to_contain_text(f"{len(in_last)} of {len(records):,}")
    browser.get_by_role("button", name="Next", exact=True).click()
    playwright.expect(status).to_contain_text("here 6 to 10")


USES: dict[str, Callable[[Any, Lab, Shot], None]] = {
    "01_environment_and_grader": grade_an_answer,
    "02_calibration": recalibrate,
    "04_full_run": watch_and_browse,
}


@pytest.mark.timeout(1_500)  # a busy machine takes many times as long as an idle one
@pytest.mark.parametrize("path", NOTEBOOKS, ids=IDS)
def test_it_runs_and_its_widgets_work(
    path: Path, lab: Lab, page: Any, shot: Shot
) -> None:
    run_all(page, lab, path.name)
    if path.stem in USES:
        USES[path.stem](page, lab, shot)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=IDS)
def test_no_widget_is_left_unused(path: Path) -> None:
    outputs = [output for cell in code_cells(read(path)) for output in cell.outputs]
    shows = any(WIDGET in output.get("data", {}) for output in outputs)
    assert shows == (path.stem in USES)
