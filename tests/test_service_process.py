"""The local service in a process of its own: starting it, and every way it can end."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from noise_policy import env, plain

from rlhelpers import TrainConfig, connect, train
from rlhelpers.local import LocalServiceProcess, process
from rlhelpers.metrics import read_metrics, read_resume_state
from rlhelpers.models import ModelPreset
from rlhelpers.refusals import ServiceRefused
from rlhelpers.sampling import SamplingSettings
from rlhelpers.service import TrainingSession

ROOT = Path(__file__).resolve().parents[1]
PROMPT = [72, 101, 108, 108, 111]


def gone(pid: int) -> bool:
    """Whether no such process is there, within 30 seconds."""
    for _ in range(600):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def process_of(session: TrainingSession) -> LocalServiceProcess:
    assert isinstance(session._local_service, LocalServiceProcess)
    return session._local_service


@contextlib.contextmanager
def apart(preset: ModelPreset, runs: Path, **how: Any) -> Iterator[TrainingSession]:
    from hud.eval.runtime import LocalRuntime

    with connect(
        model=preset,
        runs_dir=runs,
        task_runtime=LocalRuntime(env),
        own_process=True,
        quiet=True,
        **how,
    ) as session:
        yield session


async def sampled(session: TrainingSession) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probabilities of a fresh adapter's replies to four seeds."""
    sampler = session.new_sampler("policy")
    replies = [
        await sampler.sample(PROMPT, SamplingSettings(max_tokens=16), seed)
        for seed in range(4)
    ]
    return [(list(r.tokens), list(r.logprobs or ())) for r in replies]


# -- the same service ---------------------------------------------------------------


async def test_it_samples_what_the_service_in_this_process_samples(
    preset: ModelPreset, session: TrainingSession, tmp_path: Path
) -> None:
    """Also from a path with '=' in it; then it ends with the session, and cleanly."""
    there = await sampled(session)
    assert all(tokens and logprobs for tokens, logprobs in there)
    folder = tmp_path / "step=1"
    shutil.copytree(preset.tokenizer, folder)
    moved = dataclasses.replace(preset, tokenizer=folder)
    with apart(moved, tmp_path / "apart") as other:
        service = process_of(other)
        assert service.running
        assert await sampled(other) == there
        with pytest.raises(RuntimeError, match="is running already"):
            service.start()
        look_at(service, folder)
        url, pid = service.base_url, service.pid
    assert not service.running
    assert gone(pid)
    async with httpx.AsyncClient(trust_env=False) as client:
        with pytest.raises(httpx.ConnectError):
            await client.get(url)
    service.close()
    with pytest.raises(RuntimeError, match="call start"):
        _ = service.base_url


def look_at(service: LocalServiceProcess, folder: Path) -> None:
    """What others can see of the process, where that is to be seen."""
    if hasattr(os, "getsid"):  # Ctrl-C goes to all of a session
        assert os.getsid(service.pid) == service.pid
    shown = Path(f"/proc/{service.pid}/cmdline")
    if shown.exists():
        command = shown.read_bytes().decode().split("\0")
        assert f"local/noise={folder}" in command
        assert not any(service.api_key in part for part in command)


PARENT = """
import sys, time
sys.path.insert(0, sys.argv[1])
from rlhelpers.local import LocalServiceProcess
assert "torch" not in sys.modules  # which the other process loads
service = LocalServiceProcess("state").start()
print(service.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(os.name == "nt", reason="sends a POSIX signal")
def test_a_killed_parent_leaves_no_process(tmp_path: Path) -> None:
    """It is also found from elsewhere, past another package of its name."""
    decoy = tmp_path / "rlhelpers"
    decoy.mkdir()
    (decoy / "__init__.py").write_text("raise SystemExit('the wrong package')")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(ROOT)],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        os.kill(pid, 0)  # it is there
        parent.kill()
    assert gone(pid)
    assert not list((tmp_path / "state" / "sessions").iterdir())


# -- what cannot be started ---------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"backend": "fireworks", "api_key": "k"}, "backend='fireworks' means another"),
        (
            {"base_url": "http://127.0.0.1:1/x", "api_key": "k"},
            "base_url='http://127.0.0.1:1/x' means another",
        ),
    ],
)
def test_a_contradiction_is_refused(
    how: dict[str, str], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="own_process=True is about") as caught:
        connect(own_process=True, runs_dir=tmp_path, **how)  # type: ignore[arg-type]
    assert said in str(caught.value)
    assert str(caught.value).endswith("leave one of the two out")
    assert not list(tmp_path.iterdir())


def test_a_name_that_a_command_line_cannot_carry(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="model name 'a=b' holds '='"):
        LocalServiceProcess(tmp_path, models={"a=b": tmp_path})


def test_a_process_that_ends_at_once_says_why(tmp_path: Path) -> None:
    taken = tmp_path / "state"
    taken.write_text("a file")
    service = LocalServiceProcess(taken)
    with pytest.raises(RuntimeError, match="ended with exit code 1: .*state"):
        service.start()
    assert not service.running
    service.close()


Interpreter = Callable[[str], None]


@pytest.fixture
def interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Interpreter:
    """Let a shell script be the interpreter that is started."""
    if os.name == "nt":
        pytest.skip("needs a shell")

    def use(script: str) -> None:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))

    return use


def test_a_silent_process_is_given_up(
    interpreter: Interpreter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    interpreter("echo loading >&2; exec sleep 600")
    monkeypatch.setattr(process, "START_TIMEOUT_SECONDS", 0.5)
    service = LocalServiceProcess(tmp_path)
    with pytest.raises(RuntimeError, match=r"listens within 0\.5 s: loading"):
        service.start()
    assert not service.running


def test_a_process_that_does_not_stop_is_killed(
    interpreter: Interpreter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    interpreter(
        "trap '' TERM; echo stray; echo base_url=http://127.0.0.1:1/x; "
        "echo api_key=a=b; exec sleep 600"
    )
    monkeypatch.setattr(process, "STOP_TIMEOUT_SECONDS", 0.2)
    monkeypatch.setattr(process, "_KILL_AFTER_SECONDS", 0.2)
    with LocalServiceProcess(tmp_path) as service:
        assert (service.base_url, service.api_key) == ("http://127.0.0.1:1/x", "a=b")
        pid = service.pid
    assert gone(pid)


# -- an end in the middle -----------------------------------------------------------


@pytest.mark.skipif(os.name == "nt", reason="sends a POSIX signal")
async def test_a_service_that_dies_ends_the_run_with_its_last_words(
    preset: ModelPreset, tmp_path: Path
) -> None:
    """An update, which the SDK would ask for without end, and a completion."""
    config = TrainConfig.from_preset(preset, checkpoint_every=1)
    folder = tmp_path / "run"
    with apart(preset, tmp_path) as session:
        send = session.training_client.optim_step_async
        said: list[str] = []

        async def kill_in_step_2(*args: Any, **options: Any) -> Any:
            sent = await send(*args, **options)
            if has_a_row(folder):
                os.kill(process_of(session).pid, signal.SIGKILL)
                with pytest.raises(ServiceRefused) as refused:
                    await session._samplers[-1].sample(
                        PROMPT, SamplingSettings(max_tokens=16), seed=0
                    )
                said.append(str(refused.value))
            return sent

        session.training_client.optim_step_async = kill_in_step_2
        tasks = [plain(n) for n in range(8)]
        with pytest.raises(ServiceRefused) as caught:
            await train(session, tasks, config=config, run_dir=folder, progress=False)
        for text in (str(caught.value), *said):
            assert text.startswith("the session is gone from the service; ")
            assert "(status 410: " in text
            assert "the local service's process ended by SIGKILL" in text
        assert len(said) == 1
        assert len(read_metrics(folder / "metrics.jsonl")) == 1
        assert not process_of(session).running
    # What it had saved is there for the next one.
    state = read_resume_state(folder / "resume.json")
    assert state.next_step == 2


def has_a_row(folder: Path) -> bool:
    return (folder / "metrics.jsonl").exists()


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="sends a POSIX signal")
def test_a_terminals_ctrl_c_lets_a_long_run_save(tmp_path: Path) -> None:
    """It reaches the whole process group of ``train``; the service is not in it."""
    run_dir = tmp_path / "run"
    flags = "--steps 60 --tasks-per-step 4 --group-size 6 --max-tokens 64"
    # A shell's background job ignores Ctrl-C, and so would its children.
    ours = signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(
        [
            *(sys.executable, "-m", "rlhelpers", "train", *flags.split()),
            *("--evaluation-tasks", "2"),
            *("--run-dir", str(run_dir), "--runs-dir", str(tmp_path)),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as training:
        signal.signal(signal.SIGINT, ours)
        deadline = threading.Timer(300, training.kill)
        deadline.start()
        while not has_a_row(run_dir) and training.poll() is None:
            time.sleep(0.05)
        child = children_of(training.pid)
        os.killpg(training.pid, signal.SIGINT)
        _, err = training.communicate()
        deadline.cancel()
    assert training.returncode == 130, err
    assert "interrupted\nTo go on: " in err
    assert "Traceback" not in err
    done = len(read_metrics(run_dir / "metrics.jsonl"))
    assert read_resume_state(run_dir / "resume.json").next_step == done + 1
    assert all(gone(pid) for pid in child)
    if Path("/proc").is_dir():
        assert len(child) == 1


def children_of(pid: int) -> list[int]:
    """Processes that a process started; none where there is no /proc."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = stat.read_text().rpartition(")")[2].split()[1]
            if int(parent) == pid:
                found.append(int(stat.parent.name))
    return found
