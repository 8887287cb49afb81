"""Sessions that were never given back are noted, listed and ended."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from paid_helpers import KEY, QWEN, opened

from rlhelpers.command_line import main
from rlhelpers.local import LocalService
from rlhelpers.models import ModelPreset
from rlhelpers.open_sessions import OpenSession, SessionNotes

pytest_plugins = ("paid_fixtures",)

KILLED = """
import os, signal, sys
from rlhelpers import connect
session = connect("fireworks", quiet=True, runs_dir=sys.argv[1])
print(session.service_client.training_session_id, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def note(session_id: str = "ts-1", **changes: object) -> OpenSession:
    made = OpenSession.of_this_process(session_id, "127.0.0.1:9", "noise")
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def open_at(endpoint: LocalService) -> set[str]:
    assert endpoint._api is not None
    return set(endpoint._api.registry.sessions)


def test_a_session_is_noted_while_it_is_open(
    endpoint: LocalService, paid: ModelPreset, tmp_path: Path
) -> None:
    notes = SessionNotes(tmp_path / "runs" / "sessions")
    with opened(endpoint, paid, tmp_path) as session:
        (noted,) = notes.all()
        assert {noted.session_id} == open_at(endpoint)
        assert (noted.state, noted.process) == ("open", os.getpid())
        _ = session.training_client
        session.new_policy()
        (renewed,) = notes.all()
        assert {renewed.session_id} == open_at(endpoint) != {noted.session_id}
        text = "".join(path.read_text() for path in notes.folder.iterdir())
        assert KEY not in text
    assert notes.all() == []
    assert open_at(endpoint) == set()


def test_one_that_is_left_open_on_purpose_is_marked(
    endpoint: LocalService, paid: ModelPreset, tmp_path: Path
) -> None:
    opened(endpoint, paid, tmp_path, keep_session=True).close()
    (noted,) = SessionNotes(tmp_path / "runs" / "sessions").all()
    assert noted.state == "kept"
    assert {noted.session_id} == open_at(endpoint)


def test_states() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert note().state == "open"
    assert note(process=gone.pid).state == "stale"
    # The number is another process's by now.
    assert note(started=note().started - 100).state == "stale"
    assert note(machine="another").state == "elsewhere"
    assert note(process=gone.pid, kept=True).state == "kept"


def test_notes_that_cannot_be_read_are_passed_over(tmp_path: Path) -> None:
    notes = SessionNotes(tmp_path)
    notes.add(note())
    (tmp_path / "ts-2.json").write_text("{")
    (tmp_path / "ts-3.json").write_text('{"session_id": "ts-3"}')
    assert [known.session_id for known in notes.all()] == ["ts-1"]
    assert notes.all("elsewhere.example") == []


@pytest.mark.slow
def test_a_killed_process_leaves_a_session_that_can_be_ended(
    endpoint: LocalService,
    account: Path,
    paid: ModelPreset,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """S11: stale sessions use up the quota, and nobody lists them."""
    runs = account / "runs"
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(runs)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert killed.returncode == -signal.SIGKILL
    stale = killed.stdout.strip()
    assert open_at(endpoint) == {stale}

    with opened(endpoint, paid, account, quiet=False):
        told = capsys.readouterr().out
        assert f"still count against the account's limit: {stale}." in told
        assert "python -m rlhelpers sessions --release" in told
        # Listed, and nothing is taken from anyone who did not ask.
        assert len(open_at(endpoint)) == 2

        assert main(["sessions", "--runs-dir", str(runs)]) == 0
        listed = capsys.readouterr().out
        assert f"{stale}  stale " in listed
        assert f"{QWEN.name}, process " in listed
        assert len(open_at(endpoint)) == 2

        assert main(["sessions", "--runs-dir", str(runs), "--release"]) == 0
        assert f"ended {stale}" in capsys.readouterr().out
        # The other one belongs to a process that lives: this one.
        assert len(open_at(endpoint)) == 1
        assert stale not in open_at(endpoint)
    assert main(["sessions", "--runs-dir", str(runs), "--release"]) == 0
    assert "no session" in capsys.readouterr().out


def test_sessions_that_are_not_noted_are_not_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["sessions", "--runs-dir", str(tmp_path), "--release", "ts-9"])
    assert code == 2
    assert "no session ts-9 of api.fireworks.ai is noted" in capsys.readouterr().err
