"""Starting and stopping the service on a loopback port."""

from __future__ import annotations

import logging
import secrets
import socket
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

import uvicorn

from .app import PREFIX, TrainingApi, build_app
from .engine import Engine
from .faults import Fault, Faults
from .loading import default_models
from .store import CheckpointStore

START_TIMEOUT_SECONDS = 30.0


class PortTaken(RuntimeError):
    """The port that was asked for cannot be had."""


class LocalService:
    """A training service of one's own, in threads of this process.

    >>> with LocalService(state_dir="runs/service") as service:  # doctest: +SKIP
    ...     print(service.base_url)
    http://127.0.0.1:40123/training/v1/serverless

    Args:
        state_dir: where checkpoints live; several services may share it.
        models: base-model names beyond the built-in ones, each with the folder of a
            Hugging Face causal LM or a ``.gguf`` file.
        port: a fixed port, or 0 for any free one.
        api_key: a fixed key, or ``None`` for a random one.
        faults: what to answer amiss first; :attr:`faults` may be added to later.

    It listens on 127.0.0.1 only, and answers only to ``api_key``.
    """

    def __init__(
        self,
        state_dir: str | Path,
        *,
        models: Mapping[str, str | Path] | None = None,
        port: int = 0,
        api_key: str | None = None,
        faults: Iterable[Fault] = (),
    ) -> None:
        folders = {name: Path(path) for name, path in (models or {}).items()}
        self.state_dir = Path(state_dir)
        self.api_key = api_key or f"local-{secrets.token_urlsafe(24)}"
        self.faults = list(faults)
        self._models = {**default_models(), **folders}
        self._port = port
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self._engine: Engine | None = None
        self._api: TrainingApi | None = None

    @property
    def base_url(self) -> str:
        """What the SDK takes as ``base_url``."""
        if self._server is None:
            raise RuntimeError("the local service is not running: call start() first")
        return f"http://127.0.0.1:{self._port}{PREFIX}"

    def start(self) -> LocalService:
        """Listen, and return when requests are answered.

        Raises :class:`PortTaken` if ``port`` cannot be had.
        """
        if self._server is not None:
            raise RuntimeError("the local service is running already")
        store = CheckpointStore(self.state_dir)
        listener = _listen(self._port)
        self._port = listener.getsockname()[1]
        self._engine = Engine(store, self._models)
        self._api = TrainingApi(self._engine, store)
        config = uvicorn.Config(
            Faults(build_app(self._api, self.api_key), self.faults),
            log_level=logging.ERROR,
            access_log=False,
            lifespan="off",
            ws="none",
            # For the last answers on a busy machine; nothing waits for long by then.
            timeout_graceful_shutdown=5,
        )
        self._server = uvicorn.Server(config)
        self._engine.start()
        self._thread = threading.Thread(
            target=self._server.run,
            kwargs={"sockets": [listener]},
            name="rlhelpers-local-http",
            daemon=True,
        )
        self._thread.start()
        self._wait_until_started()
        return self

    def close(self) -> None:
        """Stop; sampler checkpoints go with their sessions. Safe to call twice."""
        if self._server is None or self._thread is None:
            return
        assert self._engine is not None
        assert self._api is not None
        # The engine first: what waits for it then fails, instead of holding up HTTP.
        self._engine.close()
        if self.running:
            self._api.futures.fail_open("the local service was stopped")
        self._server.should_exit = True
        self._thread.join()
        self._api.close()
        self._server = self._thread = None

    @property
    def running(self) -> bool:
        """Whether requests are answered."""
        return self._thread is not None and self._thread.is_alive()

    def __enter__(self) -> LocalService:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _wait_until_started(self) -> None:
        assert self._server is not None
        assert self._thread is not None
        deadline = threading.Event()
        for _ in range(int(START_TIMEOUT_SECONDS / 0.01)):
            if self._server.started:
                return
            if not self._thread.is_alive():
                break
            deadline.wait(0.01)
        raise RuntimeError("the local service did not start; see the log above")


def _listen(port: int) -> socket.socket:
    # asyncio sets TCP_NODELAY only on sockets made with IPPROTO_TCP; without it every
    # request stalls for about 45 ms.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
    except OSError as error:
        listener.close()
        raise PortTaken(
            f"port {port} cannot be listened on ({error.strerror}): choose another, "
            "or 0 for any free one"
        ) from error
    listener.listen(2048)
    return listener
