"""The service in a process of its own, started and stopped from this one."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

START_TIMEOUT_SECONDS = 120.0
STOP_TIMEOUT_SECONDS = 20.0
_KILL_AFTER_SECONDS = 5.0
_PACKAGES = Path(__file__).resolve().parents[2]  # where this package is imported from
_TOLD = ("base_url", "api_key")
_LONG, _SHORT = 2000, 150  # characters of its last words


@dataclass
class _Child:
    """A service process, out of reach of a terminal's Ctrl-C, and what it says."""

    command: InitVar[list[str]]
    process: subprocess.Popen[bytes] = field(init=False)
    lines: queue.SimpleQueue[str | None] = field(default_factory=queue.SimpleQueue)
    # A file, because a pipe that nobody reads fills up.
    errors: IO[bytes] = field(default_factory=tempfile.TemporaryFile)
    settings: dict[str, str] = field(default_factory=dict)

    def __post_init__(self, command: list[str]) -> None:
        path = [str(_PACKAGES), *filter(None, [os.environ.get("PYTHONPATH")])]
        options: dict[str, Any] = {"start_new_session": True}
        if sys.platform == "win32":
            group = subprocess.CREATE_NEW_PROCESS_GROUP | subprocess.CREATE_NO_WINDOW
            options = {"creationflags": group}
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.errors,
                # Without a buffer, whose lock an exiting interpreter would wait for.
                bufsize=0,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
                **options,
            )
        except BaseException:
            self.errors.close()
            raise

    def said(self, characters: int) -> str:
        """The end of its stderr; to be asked for once it has ended."""
        self.errors.seek(0)
        text = self.errors.read().decode("utf-8", errors="replace").strip()
        return text[-characters:] or "it said nothing"

    def obituary(self, characters: int) -> str:
        """How it ended, and its last words."""
        code = self.process.wait()
        how = f"with exit code {code}"
        if code < 0:
            how = f"by signal {-code}"
            with contextlib.suppress(ValueError):
                how = f"by {signal.Signals(-code).name}"
        return f"the local service's process ended {how}: {self.said(characters)}"


class LocalServiceProcess:
    """A training service of one's own, in another process.

    It computes while this process is busy with something else: in threads of one
    process the two take turns. It starts a second interpreter, which takes seconds and
    memory. It ends with this process, however that ends, and ignores Ctrl-C.

    Should it end by itself, its address answers every request with status 410 until
    :meth:`close`, because the SDK would ask a silent address again without end.

    >>> with LocalServiceProcess("runs/service") as service:  # doctest: +SKIP
    ...     print(service.base_url)
    http://127.0.0.1:40123/training/v1/serverless

    Args:
        state_dir: where checkpoints live; several services may share it.
        models: base-model names beyond the built-in ones, each with the folder of a
            Hugging Face causal LM or a ``.gguf`` file.

    Raises:
        ValueError: A model's name holds ``=``.
    """

    def __init__(
        self, state_dir: str | Path, *, models: Mapping[str, str | Path] | None = None
    ) -> None:
        self.state_dir = Path(state_dir)
        self._models = dict(models or {})
        for name in self._models:
            if "=" in name:
                raise ValueError(
                    f"model name {name!r} holds '=', which ends a name on the command "
                    "line of the service's process: use another name, or LocalService "
                    "(own_process=False)"
                )
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._ear: threading.Thread | None = None
        self._substitute: ThreadingHTTPServer | None = None

    @property
    def base_url(self) -> str:
        """What the SDK takes as ``base_url``."""
        return self._setting("base_url")

    @property
    def api_key(self) -> str:
        """What the SDK takes as ``api_key``: a random one of each process."""
        return self._setting("api_key")

    @property
    def pid(self) -> int:
        """The process's id."""
        if self._child is None:
            raise RuntimeError("the local service is not running: call start() first")
        return self._child.process.pid

    @property
    def running(self) -> bool:
        """Whether the process is there."""
        return self._child is not None and self._child.process.poll() is None

    def start(self) -> LocalServiceProcess:
        """Start the process, and return when requests are answered.

        Raises:
            RuntimeError: It ended before it was ready, or said nothing for two
                minutes; with the end of what it wrote to stderr.
        """
        if self._child is not None:
            raise RuntimeError("the local service is running already")
        self._child = child = _Child(self._command())
        self._ear = threading.Thread(target=self._hear, args=(child,), daemon=True)
        self._ear.start()
        try:
            _wait_until_started(child)
        except BaseException:
            child.process.kill()
            self.close()
            raise
        return self

    def close(self) -> None:
        """Stop it, as :meth:`LocalService.close` does. Safe to call twice.

        A process that is still there after 20 seconds is terminated, then killed.
        """
        with self._lock:
            child, self._child = self._child, None
            substitute, self._substitute = self._substitute, None
        if child is None:
            return
        if substitute is not None:
            substitute.shutdown()
            substitute.server_close()
        assert child.process.stdin is not None
        child.process.stdin.close()  # the sign to stop
        try:
            _wait_for_end(child.process)
        finally:
            if self._ear is not None:
                self._ear.join(_KILL_AFTER_SECONDS)
            child.errors.close()

    def __enter__(self) -> LocalServiceProcess:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _setting(self, name: str) -> str:
        if self._child is None or name not in self._child.settings:
            raise RuntimeError("the local service is not running: call start() first")
        return self._child.settings[name]

    def _command(self) -> list[str]:
        models = [f"{name}={path}" for name, path in self._models.items()]
        return [
            # -P: another package of this name in the working directory is not meant.
            *(sys.executable, "-P", "-m", "rlhelpers.local", "--stop-with-stdin"),
            *("--state-dir", str(self.state_dir)),
            *(part for model in models for part in ("--model", model)),
        ]

    def _hear(self, child: _Child) -> None:
        """Read what the process prints until it ends, in a thread of its own."""
        assert child.process.stdout is not None
        with child.process.stdout as stdout:
            for line in stdout:
                child.lines.put(line.decode("utf-8", errors="replace").strip())
        child.process.wait()
        child.lines.put(None)
        with self._lock:
            if self._child is not child or len(child.settings) < len(_TOLD):
                return
            try:
                substitute = _answer_in_place_of(child)
            except OSError:  # somebody else has the port already
                return
            self._substitute = substitute
        substitute.serve_forever(poll_interval=0.1)


def _wait_until_started(child: _Child) -> None:
    """Fill the child's settings with what it prints."""
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    found: dict[str, str] = {}
    while len(found) < len(_TOLD):
        try:
            line = child.lines.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            child.process.kill()
            child.process.wait()
            raise RuntimeError(
                "the local service's process did not say where it listens within "
                f"{START_TIMEOUT_SECONDS:g} s: {child.said(_LONG)}"
            ) from None
        if line is None:
            raise RuntimeError(child.obituary(_LONG))
        name, _, value = line.partition("=")
        if name in _TOLD:
            found[name] = value
    child.settings = found


def _wait_for_end(process: subprocess.Popen[bytes]) -> None:
    steps = (
        (STOP_TIMEOUT_SECONDS, process.terminate),
        (_KILL_AFTER_SECONDS, process.kill),
    )
    for seconds, insist in steps:
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            insist()
    process.wait()


def _answer_in_place_of(child: _Child) -> ThreadingHTTPServer:
    """Listen where the process did, to say that it has ended."""
    error = {"message": child.obituary(_SHORT), "code": "gone", "type": "server"}
    body = json.dumps({"error": error}).encode()

    class Gone(BaseHTTPRequestHandler):
        def answer(self) -> None:
            # Unread, it would reset the connection before the answer is read.
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(410)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_DELETE = answer

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing on stderr."""

    return ThreadingHTTPServer(
        ("127.0.0.1", urlsplit(child.settings["base_url"]).port or 0), Gone
    )
