"""Keys from a ``.env`` file: never over a set variable, never shown, never in git."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from paid_helpers import KEY, opened

from rlhelpers.local import LocalService
from rlhelpers.models import ModelPreset
from rlhelpers.preflight import MissingKey, find_key, fireworks_url, setting

pytest_plugins = ("paid_fixtures",)

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory two levels under a ``.env`` file."""
    lines = f"FIREWORKS_API_KEY={KEY}\nFIREWORKS_BASE_URL=https://a.example\n"
    (tmp_path / ".env").write_text(lines)
    inner = tmp_path / "course" / "notebooks"
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    monkeypatch.delenv("FIREWORKS_BASE_URL", raising=False)
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_the_file_is_found_above_the_working_directory() -> None:
    assert find_key(None) == KEY
    assert fireworks_url(None) == "https://a.example/training/v1/serverless"
    assert "FIREWORKS_API_KEY" not in os.environ  # nobody else gets to see it


@pytest.mark.usefixtures("folder")
def test_a_variable_that_is_set_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIREWORKS_API_KEY", "fw_other")
    assert find_key(None) == "fw_other"
    monkeypatch.setenv("FIREWORKS_API_KEY", "")  # switched off on purpose
    with pytest.raises(MissingKey):
        find_key(None)
    assert find_key("fw_given") == "fw_given"


def test_a_file_without_the_variable(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / ".env").write_text("# nothing\nFIREWORKS_API_KEY\n")
    assert setting("FIREWORKS_API_KEY") == setting("HUD_API_KEY") == ""
    (folder / ".env").unlink()
    assert setting("FIREWORKS_API_KEY") == ""


def test_a_session_with_a_key_from_the_file_never_shows_it(
    folder: Path,
    endpoint: LocalService,
    paid: ModelPreset,
    capsys: pytest.CaptureFixture[str],
) -> None:
    how = {"api_key": None, "quiet": False}
    with opened(endpoint, paid, folder / "out", **how) as session:
        session.base_sampler()
        shown = repr(session) + str(session.banner)
    written = [path for path in (folder / "out").rglob("*") if path.is_file()]
    assert not any(KEY.encode() in path.read_bytes() for path in written)
    assert KEY not in shown + capsys.readouterr().out


def test_git_ignores_the_file_and_keeps_the_example() -> None:
    def ignored(name: str) -> bool:
        found = subprocess.run(["git", "check-ignore", "-q", name], cwd=ROOT)
        if found.returncode not in (0, 1):
            pytest.skip("not a git clone")
        return found.returncode == 0

    assert ignored(".env")
    assert ignored("notebooks/.env")
    assert not ignored(".env.example")


def test_the_example_names_what_is_read_and_holds_no_key() -> None:
    text = (ROOT / ".env.example").read_text(encoding="utf-8")
    names = dict(re.findall(r"^(?:# )?([A-Z_]+)=(.*)$", text, re.M))
    source = "".join(
        (ROOT / "rlhelpers" / name).read_text(encoding="utf-8")
        for name in ("preflight.py", "tasks.py")
    )
    assert set(names) == {"FIREWORKS_API_KEY", "HUD_API_KEY", "FIREWORKS_BASE_URL"}
    for name in names:
        assert f'"{name}"' in source
    assert names["FIREWORKS_API_KEY"] == names["HUD_API_KEY"] == ""
