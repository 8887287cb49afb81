"""Sessions that are open at a service, and whose process has gone.

An open session takes a slot of the account's quota. ``session.close()`` gives it back,
also after an error and at interpreter exit; a process that was killed cannot. The SDK
ends a session whose name is known, and lists none. So every session leaves a note in
``runs/sessions`` while it is open, and a note whose process is gone tells which one to
end. A note holds no key.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from fireworks.training.sdk import FireworksClient


@dataclass(frozen=True)
class OpenSession:
    """A session that was opened and not given back.

    Attributes:
        session_id: The service's id, ``ts-…``.
        host: The service's host.
        model: The preset that it was opened for.
        opened: When, in UTC.
        machine: The machine that opened it.
        process: The process's number there.
        started: When that process started, in seconds since 1970.
        kept: Whether it was left open on purpose (``keep_session=True``).
    """

    session_id: str
    host: str
    model: str
    opened: str
    machine: str
    process: int
    started: float
    kept: bool = False

    @classmethod
    def of_this_process(cls, session_id: str, host: str, model: str) -> OpenSession:
        """A session that this process has just opened."""
        return cls(
            session_id=session_id,
            host=host,
            model=model,
            opened=datetime.now(UTC).isoformat(timespec="seconds"),
            machine=socket.gethostname(),
            process=os.getpid(),
            started=psutil.Process().create_time(),
        )

    @property
    def state(self) -> str:
        """``"open"``, ``"kept"``, ``"stale"``, or ``"elsewhere"``.

        Stale means that its process is gone. Of a process on another machine nothing
        can be said.
        """
        if self.kept:
            return "kept"
        if self.machine != socket.gethostname():
            return "elsewhere"
        return "open" if self._lives() else "stale"

    def _lives(self) -> bool:
        try:
            # Another process may have got the number since.
            started = float(psutil.Process(self.process).create_time())
        except psutil.NoSuchProcess:
            return False
        except psutil.AccessDenied:
            return True
        return abs(started - self.started) < 2

    def __str__(self) -> str:
        owner = f"process {self.process} on {self.machine}"
        return (
            f"{self.session_id}  {self.state:9}  {self.opened}  {self.model}, {owner}"
        )


class SessionNotes:
    """The notes of a runs folder, one file for each open session.

    Args:
        folder: Where they are, such as ``runs/sessions``.

    Example:
        >>> SessionNotes(Path("runs/no-such-folder")).all()
        []
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _path(self, session_id: str) -> Path:
        return self.folder / f"{session_id}.json"

    def add(self, session: OpenSession) -> None:
        """Note a session, or note it anew."""
        self.folder.mkdir(parents=True, exist_ok=True)
        draft = self._path(session.session_id).with_suffix(f".{os.getpid()}")
        text = json.dumps(dataclasses.asdict(session), indent=2)
        draft.write_text(f"{text}\n", encoding="utf-8")
        draft.replace(self._path(session.session_id))

    def keep(self, session_id: str) -> None:
        """Mark a session as left open on purpose."""
        for session in self.all():
            if session.session_id == session_id:
                self.add(dataclasses.replace(session, kept=True))

    def remove(self, session_id: str) -> None:
        """The session has ended."""
        self._path(session_id).unlink(missing_ok=True)

    def all(self, host: str | None = None) -> list[OpenSession]:
        """Noted sessions of a host, or of every host, oldest first.

        A file that is no note is passed over: it may be half written.
        """
        found = []
        for path in self.folder.glob("ts-*.json"):
            try:
                found.append(OpenSession(**json.loads(path.read_text("utf-8"))))
            except (OSError, ValueError, TypeError):
                continue
        known = [session for session in found if host in (None, session.host)]
        return sorted(known, key=lambda session: (session.opened, session.session_id))

    def stale(self, host: str) -> list[OpenSession]:
        """Sessions of a host whose process is gone."""
        return [session for session in self.all(host) if session.state == "stale"]


def stale_notice(stale: Sequence[OpenSession]) -> str:
    """What to tell about sessions whose process is gone."""
    ids = ", ".join(session.session_id for session in stale)
    return (
        f"{len(stale)} sessions of processes that are gone were never given back and "
        f"may still count against the account's limit: {ids}. To end them: python -m "
        "rlhelpers sessions --release"
    )


def release(
    client: FireworksClient, notes: SessionNotes, sessions: Iterable[OpenSession]
) -> list[str]:
    """End sessions at their service; one that has ended already counts as ended.

    Their sampler checkpoints go with them. Training checkpoints are not touched.

    Args:
        client: A control-plane client of the account that opened them.
        notes: The notes to clear.
        sessions: What to end.

    Returns:
        The ids of those that ended.

    Raises:
        RuntimeError: The service refused; those before it have ended.
    """
    ended = []
    for session in sessions:
        client.delete_training_session(
            f"accounts/{client.account_id}/trainingSessions/{session.session_id}"
        )
        notes.remove(session.session_id)
        ended.append(session.session_id)
    return ended
