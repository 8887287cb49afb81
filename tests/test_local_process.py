"""``python -m rlhelpers.local``: starting, stopping, and several programs at once."""

from __future__ import annotations

import math
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from local_crash import (
    REPOSITORY,
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


def test_it_prints_its_address_and_its_key(tiny_folder: Path, tmp_path: Path) -> None:
    service = ServiceProcess(tmp_path, tiny_folder)
    try:
        assert service.endpoint.base_url == (
            f"http://127.0.0.1:{port_of(service)}/training/v1/serverless"
        )
        wire = Wire(service.endpoint)
        with wire.http:
            assert wire.session().startswith("ts-")
            wrong = {"X-API-Key": service.endpoint.api_key + "x"}
            answer = wire.http.get(f"{wire.root}/v1/accounts", headers=wrong)
            assert answer.status_code == 401
    finally:
        service.stop()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_it_cleanly(
    tiny_folder: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """Two sessions are open and one operation waits for a number that never comes."""
    errors, state = tmp_path / "errors", tmp_path / "state"
    service = ServiceProcess(state, tiny_folder, errors=errors)
    wire = Wire(service.endpoint)
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
        early = {"model_id": model, "seq_id": 9, "adam_params": {}}
        ticket = wire.submit("optim_step", early)
        told: list[dict[str, object]] = []
        poll = threading.Thread(target=lambda: told.append(wire.result(ticket)))
        poll.start()
        assert len(list((state / "sessions").iterdir())) == 2
        code = service.stop(number)
        poll.join(timeout=60)
    assert told == [{"error": "the local service was stopped", "category": "server"}]
    assert code == 0
    assert errors.read_text() == "stopping\n"
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port_of(service)), timeout=5)
    assert not list((state / "sessions").iterdir())
    assert not list(state.rglob(".draft-*"))
    store = CheckpointStore(state)
    assert [info.ref.path for info in store.listing()] == saved[::2]
    for path in saved[::2]:
        store.load("training", CheckpointRef.parse(path))

    # The port is free at once, and whoever had it goes on from the checkpoint.
    port = str(port_of(service))
    again = ServiceProcess(state, tiny_folder, "--port", port)
    try:
        assert port_of(again) == int(port)
        wire = Wire(again.endpoint)
        with wire.http:
            model = wire.model(wire.session())
            load = {"model_id": model, "seq_id": 1, "path": saved[0]}
            result = wire.result(wire.submit("load_weights", load))
            assert result["path"] == saved[0]
    finally:
        assert again.stop() == 0


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


def run_service(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rlhelpers.local", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_what_cannot_be_started_is_explained(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        taken = run_service("--state-dir", str(tmp_path), "--port", str(port))
    assert taken.returncode == 1
    assert taken.stdout == ""
    (line,) = taken.stderr.splitlines()
    assert line.startswith(f"port {port} cannot be listened on")
    assert line.endswith("choose another, or 0 for any free one")
    for arguments, said in (
        (("--port", "65536"), "--port must be from 0 to 65535, got 65536"),
        (("--model", "folder"), "--model takes NAME=PATH, got 'folder'"),
    ):
        refused = run_service(*arguments)
        assert refused.returncode == 2
        assert said in refused.stderr


def test_sessions_of_several_clients_do_not_touch_each_other(
    tiny_folder: Path, tmp_path: Path, connect: Callable[..., Any]
) -> None:
    """Two connections of the SDK: each ends its own session, the other goes on."""
    service = ServiceProcess(tmp_path, tiny_folder)
    try:
        first, second = (connect(service.endpoint) for _ in range(2))
        policies = [
            client.create_lora_training_client(base_model=TINY, rank=4, seed=seed)
            for seed, client in enumerate((first, second))
        ]
        paths = [p.save_weights_for_sampler("policy").result().path for p in policies]
        assert len({path.split("/")[1] for path in paths}) == 2
        folder = tmp_path / "sessions"
        names = [str(client.training_session_id) for client in (first, second)]
        assert {path.name for path in folder.iterdir()} == set(names)
        first.delete_training_session()
        assert [path.name for path in folder.iterdir()] == names[1:]
        assert policies[1].get_info().lora_rank == 4
        assert policies[1].save_weights_for_sampler("later").result().path
        for client in (first, second):
            client.close()  # before the service: afterwards it takes the SDK 30 s
    finally:
        assert service.stop() == 0


@pytest.mark.slow
def test_four_programs_at_once_get_what_they_get_alone(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short run of ``benchmarks/soak.py``."""
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    habits, steps = Habits(save_every=2, renew_every=4), 6
    errors = tmp_path / "errors"
    service = ServiceProcess(tmp_path / "state", tiny_folder, errors=errors)
    totals: list[int] = []
    try:
        (alone,) = train(service.endpoint, clients=1, steps=steps, habits=habits)
        found = train(
            service.endpoint,
            clients=4,
            steps=steps,
            habits=habits,
            on_step=totals.append,
        )
        assert not list((tmp_path / "state" / "sessions").iterdir())
    finally:
        assert service.stop() == 0
    assert errors.read_text() == "stopping\n"
    assert totals == list(range(1, 4 * steps + 1))
    assert [len(client) for client in found] == [steps] * 4
    assert all(math.isfinite(step.loss) for client in found for step in client)
    assert found[0] == alone
    assert all(client != alone for client in found[1:])  # they have other seeds
    store = CheckpointStore(tmp_path / "state")
    names = [info.ref.name for info in store.listing()]
    assert sorted(names) == sorted(["state-2", "state-4", "state-6"] * 5)
