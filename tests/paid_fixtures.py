"""Fixtures: the local service standing in for the paid endpoint.

It knows our key, serves the tiny policy as Qwen, and notes every request.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub
import pytest
from paid_helpers import KEY, QWEN, Noted

from rlhelpers.local import LocalService, server
from rlhelpers.models import TINY_POLICY_FOLDER, ModelPreset


@pytest.fixture
def events() -> list[str]:
    """What happened, in order: requests to the service, and printed lines."""
    return []


@pytest.fixture
def endpoint(
    events: list[str],
    policy_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[LocalService]:
    """A service that knows our key, the stand-in model, and the tiny one as Qwen."""
    build = server.build_app
    monkeypatch.setattr(
        server, "build_app", lambda api, key: Noted(build(api, key), events)
    )
    models = {
        "accounts/fireworks/models/noise": policy_folder,
        QWEN.base_model: TINY_POLICY_FOLDER,
    }
    folder = tmp_path / "endpoint"
    folder.mkdir()
    with LocalService(folder, models=models, api_key=KEY) as running:
        yield running


@pytest.fixture
def paid(preset: ModelPreset) -> ModelPreset:
    """A preset of the paid backend, one rollout at a time."""
    return dataclasses.replace(
        preset,
        backend="fireworks",
        base_model="accounts/fireworks/models/noise",
        max_concurrent=1,
    )


@pytest.fixture
def account(
    endpoint: LocalService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """What a user has set: a key, and the tokenizer downloaded before.

    The endpoint serves the tiny model as Qwen, so the hub's cache holds the tiny
    model's tokenizer under Qwen's name.
    """
    repository = tmp_path / "hub" / "hub" / "models--Qwen--Qwen3.8-27B"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    for file in TINY_POLICY_FOLDER.iterdir():
        if file.suffix in (".json", ".jinja"):
            shutil.copy(file, snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("FIREWORKS_API_KEY", KEY)
    monkeypatch.setenv("FIREWORKS_BASE_URL", endpoint.base_url)
    return tmp_path


@pytest.fixture
def commands(
    account: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[[Callable[[list[str]], int]], Callable[..., tuple[int, str, str]]]:
    """Make a program's ``main`` into a call with exit code, output and errors."""
    cache = str(account / "hub" / "hub")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", cache)

    def of(main: Callable[[list[str]], int]) -> Callable[..., tuple[int, str, str]]:
        def run(*arguments: str) -> tuple[int, str, str]:
            code = main([*arguments, "--runs-dir", str(account / "runs")])
            captured = capsys.readouterr()
            return code, captured.out, captured.err

        return run

    return of
