"""Killing a service process while it saves, and looking at what it left behind."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import httpx
from local_helpers import TINY, Endpoint, Wire

from rlhelpers.local.promotion import load_promoted
from rlhelpers.local.store import CheckpointRef, CheckpointStore

REPOSITORY = Path(__file__).resolve().parents[1]
LONGEST_LIFE = 1.5  # seconds from the first checkpoint to the kill


@dataclass
class Acknowledged:
    """What the client was told is saved."""

    training: dict[str, int] = field(default_factory=dict)  # path → optimizer steps
    promoted: list[str] = field(default_factory=list)


class ServiceProcess:
    """``python -m rlhelpers.local`` on a state folder, with the tiny model.

    ``options`` are further ones of its command line; ``errors`` is a file for what it
    writes to stderr.
    """

    def __init__(
        self,
        state_dir: Path,
        model_folder: Path,
        *options: str,
        errors: Path | None = None,
    ) -> None:
        with errors.open("w") if errors else contextlib.nullcontext() as stderr:
            self.process = self._start(state_dir, model_folder, options, stderr)
        assert self.process.stdout is not None
        lines = [self.process.stdout.readline().strip() for _ in range(2)]
        settings = dict(line.split("=", 1) for line in lines)
        self.endpoint = Endpoint(settings["base_url"], settings["api_key"])

    @staticmethod
    def _start(
        state_dir: Path,
        model_folder: Path,
        options: tuple[str, ...],
        stderr: IO[str] | None,
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "rlhelpers.local"),
                *("--state-dir", str(state_dir), "--model", f"{TINY}={model_folder}"),
                *options,
            ],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            cwd=REPOSITORY,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def kill(self) -> None:
        """At once, whatever it is doing."""
        self.process.kill()
        self._wait()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Ask it to stop; its exit code."""
        self.process.send_signal(number)
        return self._wait()

    def _wait(self) -> int:
        code = self.process.wait(timeout=300)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


def save_until_killed(
    service: ServiceProcess, moment: random.Random, acknowledged: Acknowledged
) -> None:
    """Train, save and promote until the service dies at a random moment."""
    killer = threading.Timer(moment.uniform(0.0, LONGEST_LIFE), service.kill)
    wire = Wire(service.endpoint)
    with wire.http:
        session = wire.session()
        model = wire.model(session)
        killer.start()
        try:
            for step in range(1, 10_000):
                one_step(wire, session, model, step, acknowledged)
        except httpx.TransportError:
            pass
        finally:
            killer.join()


def one_step(
    wire: Wire, session: str, model: str, step: int, acknowledged: Acknowledged
) -> None:
    """One optimizer step, a checkpoint of each kind, and a promotion."""
    number = 4 * (step - 1)
    data = {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": [65, 66, 67]}]},
        "loss_fn_inputs": {"target_tokens": {"data": [66, 67, 68], "dtype": "int64"}},
    }
    operations = [
        (
            "forward_backward",
            {"forward_backward_input": {"data": [data], "loss_fn": "cross_entropy"}},
        ),
        ("optim_step", {"adam_params": {"learning_rate": 1e-3}}),
        ("save_weights", {"path": f"state-{step}"}),
        ("save_weights_for_sampler", {"path": f"policy-{step}"}),
    ]
    tickets = [
        wire.submit(name, {"model_id": model, "seq_id": number + 1 + i, **body})
        for i, (name, body) in enumerate(operations)
    ]
    results = [wire.result(ticket) for ticket in tickets]
    acknowledged.training[str(results[2]["path"])] = step
    run = model.split(":")[0]
    output = f"accounts/local/models/{run}-{step}"
    row = f"accounts/local/trainingSessions/{session}/checkpoints/{run}-policy-{step}"
    answer = wire.http.post(
        f"{wire.root}/v1/{row}:promote",
        json={"output_model": output, "base_model": TINY},
    )
    assert answer.status_code == 200, answer.text
    acknowledged.promoted.append(output)


def check_what_is_left(state_dir: Path, acknowledged: Acknowledged) -> int:
    """Everything acknowledged loads, and so does everything listed; how many."""
    store = CheckpointStore(state_dir)
    for path, steps in acknowledged.training.items():
        loaded = store.load("training", CheckpointRef.parse(path))
        assert loaded.optimizer_state, path
        counts = {
            int(value)
            for name, value in loaded.optimizer_state.items()
            if name.endswith("|step")
        }
        assert counts == {steps}, path
    listed = store.listing()
    for info in listed:
        assert info.kind == "training", "the dead process's samplers are gone"
        store.load("training", info.ref)
    assert {info.ref.path for info in listed} >= acknowledged.training.keys()
    for name in acknowledged.promoted:
        load_promoted(store, name, TINY)
    for folder in (state_dir / "promoted").glob("run-*"):
        load_promoted(store, f"accounts/local/models/{folder.name}", TINY)
    return len(listed)
