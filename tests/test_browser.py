"""Notebook 02 as a learner meets it: JupyterLab in a headless browser.

Opens the notebook, runs it, moves a slider, presses Recalibrate, and sees the table
change. Needs Playwright's Python package and a Chromium; without them it is skipped.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

playwright = pytest.importorskip(
    "playwright.sync_api", reason="Playwright is not installed"
)

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = "02_calibration.ipynb"
TOKEN = "course-test"
ERROR = "application/vnd.jupyter.error"
STDERR = "application/vnd.jupyter.stderr"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
SETTINGS = "@jupyterlab/notebook-extension/tracker.jupyterlab-settings"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser_path() -> str:
    for name in BROWSERS:
        if found := shutil.which(name):
            return found
    pytest.skip(f"no browser found: none of {', '.join(BROWSERS)} is on the PATH")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start JupyterLab on a copy of the notebook; its address."""
    folder = tmp_path_factory.mktemp("lab")
    (folder / "course").mkdir()
    notebook = nbformat.read(ROOT / "notebooks" / NOTEBOOK, as_version=4)
    for cell in notebook.cells:  # what is found later was written by this run
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    nbformat.write(notebook, folder / "course" / NOTEBOOK)
    # Off-screen cells would otherwise leave the page, and with them their outputs.
    settings = folder / "settings" / SETTINGS
    settings.parent.mkdir(parents=True)
    settings.write_text('{"windowingMode": "none"}', encoding="utf-8")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    log = (folder / "lab.log").open("wb")
    server = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "jupyterlab",
            "--no-browser",
            "--allow-root",
            "--ip=127.0.0.1",
            f"--port={port}",
            f"--IdentityProvider.token={TOKEN}",
            f"--ServerApp.root_dir={folder / 'course'}",
        ],
        env={
            **os.environ,
            "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
            "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
        },
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    try:
        _wait_for(f"{address}/api?token={TOKEN}", server, folder / "lab.log")
        yield address
    finally:
        server.terminate()
        server.wait(timeout=30)
        log.close()


def _wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            if server.poll() is not None:
                break
            time.sleep(0.5)
    pytest.fail(f"JupyterLab did not start:\n{log.read_text(errors='replace')[-2000:]}")


@pytest.fixture
def page(browser_path: str) -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=browser_path,
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )
        try:
            opened = browser.new_page(viewport={"width": 1300, "height": 1000})
            opened.set_default_timeout(60_000)
            yield opened
        finally:
            browser.close()


def run_all(page: Any, address: str) -> None:
    """Open the notebook and run it to its end, without an error in any cell."""
    page.goto(f"{address}/lab/tree/{NOTEBOOK}?token={TOKEN}")
    page.locator(".jp-Notebook .jp-CodeCell").first.wait_for()
    page.locator('.jp-Notebook-ExecutionIndicator[data-status="idle"]').wait_for()
    cells = page.locator(".jp-Notebook .jp-CodeCell")
    prompts = cells.locator(".jp-InputArea-prompt")
    for _ in range(6):
        page.locator(".lm-MenuBar-itemLabel", has_text="Run").first.click()
        page.locator('[data-command="runmenu:run-all"]').click()
        # While a page is still settling, JupyterLab can lose a click on a menu.
        page.wait_for_timeout(5_000)
        if any(text.strip() != "[ ]:" for text in prompts.all_inner_texts()):
            break
        page.keyboard.press("Escape")
    last = cells.last.locator(".jp-InputArea-prompt")
    failed = page.locator(f'[data-mime-type="{ERROR}"], [data-mime-type="{STDERR}"]')
    deadline = time.monotonic() + 400
    while last.inner_text().strip() != f"[{cells.count()}]:":
        if failed.count() or time.monotonic() > deadline:
            break
        page.wait_for_timeout(500)
    assert failed.count() == 0, failed.first.inner_text()
    playwright.expect(last).to_have_text(f"[{cells.count()}]:")


def test_recalibrate_changes_the_table(lab: str, page: Any, tmp_path: Path) -> None:
    run_all(page, lab)
    panel = page.locator(".jp-OutputArea-output .widget-vbox").filter(
        has=page.get_by_role("button", name="Recalibrate")
    )
    status = panel.locator(".widget-html-content").last
    assert "24 rollouts, at most" in status.inner_text()
    assert panel.locator("table").count() == 0  # nothing was sent yet

    handle = panel.locator(".widget-hslider", has_text="group size")
    handle = handle.locator(".noUi-handle")
    handle.focus()
    page.keyboard.press("ArrowRight")
    playwright.expect(status).to_contain_text("6 tasks × 5 = 30 rollouts")
    assert panel.locator("table").count() == 0  # nor by dragging

    panel.get_by_role("button", name="Recalibrate").click()
    table = panel.locator("table")
    table.wait_for(timeout=120_000)
    rows = [row.split("\t") for row in table.inner_text().splitlines()]
    # The four calibrations of the notebook's own cells, then the learner's.
    assert [row[2] for row in rows] == ["group size", "4", "4", "4", "4", "5"]
    assert rows[-1][:4] == ["10 to 99", "10 to 99", "5", "160"]
    assert panel.locator("img").count() == 1
    page.screenshot(path=str(tmp_path / "recalibrated.png"))

    for _ in range(2):
        handle.focus()
        page.keyboard.press("ArrowRight")
    playwright.expect(status).to_contain_text("6 tasks × 7 = 42 rollouts")
    panel.get_by_role("button", name="Recalibrate").click()
    playwright.expect(table.locator("tr")).to_have_count(7, timeout=120_000)
    assert table.locator("tr").last.inner_text().split("\t")[2] == "7"
