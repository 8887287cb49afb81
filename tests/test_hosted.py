"""The cell that fetches the course on a hosted service, in a kernel without it.

No hosted service is reached from here. What can be shown: in a Python that does not
know the package, the cell takes a clone, a repository or a zip file, leaves torch as it
is, and ends with a course that can be imported.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from test_notebooks import code_cells, read

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import hosted  # noqa: E402

EVERY = sorted((ROOT / "notebooks").rglob("[0-9][0-9]_*.ipynb"))
CELL = (ROOT / "scripts" / "hosted_cell.py").read_text(encoding="utf-8").rstrip("\n")

# A name that is None in sys.modules is one that cannot be found; the test's own
# environment has the package.
PROBE = """
import json, os, sys
sys.modules["rlhelpers"] = None
exec(open({cell!r}).read())
del sys.modules["rlhelpers"]
import importlib.metadata, importlib.util
found = importlib.util.find_spec("rlhelpers").origin
print(json.dumps([found, os.getcwd(), importlib.metadata.version("torch")]))
"""


@pytest.mark.parametrize("path", EVERY, ids=lambda path: path.stem)
def test_every_notebook_begins_with_the_cell(path: Path) -> None:
    """``make notebooks`` puts it there, or its newest form."""
    first = code_cells(read(path))[0]
    assert first.source == CELL
    assert first.metadata.tags == ["hosted"]
    assert first.metadata.jupyter.source_hidden
    assert not first.outputs


def test_in_a_clone_the_cell_does_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    before = os.getcwd(), list(sys.path), set(sys.modules)
    exec(compile(CELL, "cell", "exec"), {})
    assert (os.getcwd(), list(sys.path), set(sys.modules)) == before
    assert capfd.readouterr().out == ""


def run_cell(folder: Path, course: str | None) -> subprocess.CompletedProcess[str]:
    """The cell in a new process that starts in an empty folder."""
    script = folder.parent / f"{folder.name}-cell.py"
    script.write_text(CELL, encoding="utf-8")
    environment = {k: v for k, v in os.environ.items() if k != "RL_COURSE"}
    if course is not None:
        environment["RL_COURSE"] = course
    environment |= {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    return subprocess.run(
        [sys.executable, "-c", PROBE.format(cell=str(script))],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )


def lacking(*names: str) -> bool:
    """Whether this environment lacks a tool or module that a test needs."""
    modules = {"pip"}
    return any(
        shutil.which(name) is None
        if name not in modules
        else hosted.installed_version(name) is None
        for name in names
    )


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    folder = tmp_path / "content"
    folder.mkdir()
    return folder


def set_up_in(folder: Path, course: str | None) -> tuple[Path, Path]:
    """Where the package is found afterwards, and the working directory."""
    done = run_cell(folder, course)
    assert done.returncode == 0, done.stderr
    assert "The course is set up." in done.stdout
    origin, place, version = json.loads(done.stdout.splitlines()[-1])
    assert version == metadata.version("torch")  # still the kernel's own
    return Path(origin).parents[1], Path(place)


def test_without_an_address_it_says_what_to_set(kernel: Path) -> None:
    done = run_cell(kernel, None)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last == (
        "RuntimeError: set COURSE in this cell: the course's package is not here"
    )
    assert not list(kernel.iterdir())


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The repository's files, as in a zip file that somebody downloaded."""
    folder = tmp_path / "downloads" / "course-main"
    for name in ("rlhelpers", "notebooks", "scripts"):
        shutil.copytree(
            ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


@pytest.mark.slow
@pytest.mark.skipif(lacking("pip"), reason="pip is not installed")
def test_a_clone_above_the_notebook_is_used(copy: Path) -> None:
    found, place = set_up_in(copy / "notebooks", None)
    assert found == copy
    assert place == copy / "notebooks"


@pytest.mark.slow
@pytest.mark.skipif(lacking("pip"), reason="pip is not installed")
def test_an_uploaded_zip_file(copy: Path, kernel: Path) -> None:
    archive = shutil.make_archive(
        str(copy.parent / "course"), "zip", copy.parent, copy.name
    )
    for _ in range(2):  # the kernel restarts; the files are there already
        found, place = set_up_in(kernel, archive)
        assert found == kernel / "rl-course" / "course-main"
        assert place == found / "notebooks"


@pytest.mark.slow
@pytest.mark.skipif(lacking("pip", "git"), reason="pip or git is not installed")
def test_a_repository_is_cloned(copy: Path, kernel: Path) -> None:
    name = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    for command in (("init", "-q"), ("add", "."), (*name, "commit", "-qm", "all")):
        subprocess.run(["git", "-C", str(copy), *command], check=True)
    found, place = set_up_in(kernel, copy.as_uri())
    assert found == kernel / "rl-course"
    assert place == found / "notebooks"


def test_torch_and_the_front_end_are_left_to_the_kernel() -> None:
    names = {
        hosted.name_of(line)
        for line in hosted.requirements(ROOT, (*hosted.NOT_IN_A_KERNEL, "torch"))
    }
    assert not names & {"torch", "jupyterlab", "papermill", "nbval"}
    assert names >= {"hud", "fireworks-ai", "transformers", "peft", "ipywidgets"}
    assert hosted.wanted("torch", ROOT).startswith("torch>=")


def test_another_python_is_refused() -> None:
    hosted.check_python((3, 12))
    with pytest.raises(RuntimeError, match=r"needs Python 3.11 or 3.12.*runs 3.13"):
        hosted.check_python((3, 13))


def test_what_pip_says_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(RuntimeError, match="pip could not install the course"):
        hosted.pip(["no-such-package-anywhere"])
