"""``python -m rlhelpers.local``: starting, stopping, and several programs at once."""

from __future__ import annotations

import math
import runpy
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from local_crash import (
    Acknowledged,
    ServiceProcess,
    check_what_is_left,
    one_step,
)
from local_helpers import TINY, Wire
from local_soak import Habits, train

from rlhelpers.local.store import CheckpointRef, CheckpointStore

pytest_plugins = ("local_fixtures",)


def port_of(service: ServiceProcess) -> int:
    return httpx.URL(service.endpoint.base_url).port or 0


@dataclass(frozen=True)
class Shared:
    """A service process that several tests use; each ends the sessions it opened."""

    process: ServiceProcess
    state: Path

    @property
    def sessions(self) -> set[str]:
        """The sessions that are open."""
        return {path.name for path in (self.state / "sessions").iterdir()}


@pytest.fixture(scope="module")
def shared(
    tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Shared]:
    """Started once, since that takes seconds; at the end it has no complaint."""
    folder = tmp_path_factory.mktemp("shared")
    errors = folder / "errors"
    service = ServiceProcess(folder / "state", tiny_folder, errors=errors)
    try:
        yield Shared(service, folder / "state")
    finally:
        code = service.stop()
    assert code == 0
    assert errors.read_text() == "stopping\n"


def test_it_prints_its_address_and_its_key(shared: Shared) -> None:
    endpoint = shared.process.endpoint
    assert endpoint.base_url == (
        f"http://127.0.0.1:{port_of(shared.process)}/training/v1/serverless"
    )
    wire = Wire(endpoint)
    with wire.http:
        session = wire.session()
        assert session.startswith("ts-")
        wrong = {"X-API-Key": endpoint.api_key + "x"}
        answer = wire.http.get(f"{wire.root}/v1/accounts", headers=wrong)
        assert answer.status_code == 401
        wire.end_session(session)
    assert not shared.sessions


def stop_while_it_is_busy(
    service: ServiceProcess, number: signal.Signals, sessions: Path
) -> list[str]:
    """Stop it with two sessions and an operation that waits; checkpoints it saved."""
    wire = Wire(service.endpoint)
    before = len(list(sessions.iterdir()))
    saved: list[str] = []
    with wire.http:
        for _ in range(2):
            model = wire.model(wire.session())
            for kind, path in (
                ("save_weights", "state-1"),
                ("save_weights_for_sampler", "policy-1"),
            ):
                order = {"save_weights": 1, "save_weights_for_sampler": 2}[kind]
                body = {"model_id": model, "seq_id": order, "path": path}
                result = wire.result(wire.submit(kind, body))
                saved.append(str(result["path"]))
        # It waits for a number that never comes.
        early = {"model_id": model, "seq_id": 9, "adam_params": {}}
        ticket = wire.submit("optim_step", early)
        told: list[dict[str, object]] = []
        poll = threading.Thread(target=lambda: told.append(wire.result(ticket)))
        poll.start()
        assert len(list(sessions.iterdir())) == before + 2
        code = service.stop(number)
        poll.join(timeout=60)
    assert told == [{"error": "the local service was stopped", "category": "server"}]
    assert code == 0
    return saved[::2]


def test_a_signal_stops_it_cleanly(tiny_folder: Path, tmp_path: Path) -> None:
    """Ctrl-C; then SIGTERM to one that took over its port and its checkpoints."""
    errors, state = tmp_path / "errors", tmp_path / "state"
    port, saved = 0, []
    for number in (signal.SIGINT, signal.SIGTERM):
        service = ServiceProcess(state, tiny_folder, "--port", str(port), errors=errors)
        assert port in (0, port_of(service))  # the first one's was free at once
        port = port_of(service)
        if saved:
            go_on_from(saved[0], service)
        saved += stop_while_it_is_busy(service, number, state / "sessions")
        assert errors.read_text() == "stopping\n"
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=5)
        assert not list((state / "sessions").iterdir())
        assert not list(state.rglob(".draft-*"))
        store = CheckpointStore(state)
        assert {info.ref.path for info in store.listing()} == set(saved)
        for path in saved:
            store.load("training", CheckpointRef.parse(path))
    assert len(saved) == 4


def go_on_from(path: str, service: ServiceProcess) -> None:
    """Load a checkpoint, as whoever had the service before would."""
    wire = Wire(service.endpoint)
    with wire.http:
        model = wire.model(wire.session())
        load = {"model_id": model, "seq_id": 1, "path": path}
        assert wire.result(wire.submit("load_weights", load))["path"] == path


def test_a_signal_while_it_saves_leaves_only_whole_checkpoints(
    tiny_folder: Path, tmp_path: Path
) -> None:
    acknowledged = Acknowledged()
    errors = tmp_path / "errors"
    service = ServiceProcess(tmp_path / "state", tiny_folder, errors=errors)
    enough = threading.Event()

    def save() -> None:
        wire = Wire(service.endpoint)
        with wire.http:
            session = wire.session()
            model = wire.model(session)
            for step in range(1, 10_000):
                try:
                    one_step(wire, session, model, step, acknowledged)
                except (httpx.TransportError, AssertionError, KeyError):
                    return  # the service is stopping, or has stopped
                if step == 5:
                    enough.set()

    saving = threading.Thread(target=save)
    saving.start()
    assert enough.wait(timeout=300)
    assert service.stop() == 0
    saving.join(timeout=60)
    assert not saving.is_alive()
    assert errors.read_text() == "stopping\n"
    assert not list((tmp_path / "state").rglob(".draft-*"))
    assert check_what_is_left(tmp_path / "state", acknowledged) >= 5


@pytest.fixture
def run_service(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., tuple[Any, str, str]]]:
    """``python -m rlhelpers.local`` in this process: exit code, output and errors."""
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}

    def run(*arguments: str) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "argv", ["rlhelpers.local", *arguments])
        with pytest.raises(SystemExit) as ended:
            runpy.run_module("rlhelpers.local", run_name="__main__", alter_sys=True)
        return (ended.value.code, *capsys.readouterr())

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_what_cannot_be_started_is_explained(
    tmp_path: Path, run_service: Callable[..., tuple[Any, str, str]]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        taken = run_service("--state-dir", str(tmp_path), "--port", str(port))
    assert taken[:2] == (1, "")
    (line,) = taken[2].splitlines()
    assert line.startswith(f"port {port} cannot be listened on")
    assert line.endswith("choose another, or 0 for any free one")
    for arguments, said in (
        (("--port", "65536"), "--port must be from 0 to 65535, got 65536"),
        (("--model", "folder"), "--model takes NAME=PATH, got 'folder'"),
    ):
        code, out, err = run_service(*arguments)
        assert (code, out) == (2, "")
        assert said in err


def test_sessions_of_several_clients_do_not_touch_each_other(
    shared: Shared, connect: Callable[..., Any]
) -> None:
    """Two connections of the SDK: each ends its own session, the other goes on."""
    first, second = (connect(shared.process.endpoint) for _ in range(2))
    policies = [
        client.create_lora_training_client(base_model=TINY, rank=4, seed=seed)
        for seed, client in enumerate((first, second))
    ]
    paths = [p.save_weights_for_sampler("policy").result().path for p in policies]
    assert len({path.split("/")[1] for path in paths}) == 2
    names = [str(client.training_session_id) for client in (first, second)]
    assert shared.sessions == set(names)
    first.delete_training_session()
    assert shared.sessions == set(names[1:])
    assert policies[1].get_info().lora_rank == 4
    assert policies[1].save_weights_for_sampler("later").result().path
    second.delete_training_session()
    for client in (first, second):
        client.close()  # before the service: afterwards it takes the SDK 30 s


@pytest.mark.slow
def test_four_programs_at_once_get_what_they_get_alone(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short run of ``benchmarks/soak.py``."""
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    habits, steps = Habits(save_every=2, renew_every=4), 6
    endpoint = shared.process.endpoint
    totals: list[int] = []
    (alone,) = train(endpoint, clients=1, steps=steps, habits=habits)
    found = train(
        endpoint, clients=4, steps=steps, habits=habits, on_step=totals.append
    )
    assert not shared.sessions
    assert totals == list(range(1, 4 * steps + 1))
    assert [len(client) for client in found] == [steps] * 4
    assert all(math.isfinite(step.loss) for client in found for step in client)
    assert found[0] == alone
    assert all(client != alone for client in found[1:])  # they have other seeds
    store = CheckpointStore(shared.state)
    names = [info.ref.name for info in store.listing()]
    assert sorted(names) == sorted(["state-2", "state-4", "state-6"] * 5)
