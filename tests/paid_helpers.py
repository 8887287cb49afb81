"""The local service standing in for the paid endpoint: key, names, notes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hud.eval.runtime import LocalRuntime
from noise_policy import env

from rlhelpers.local import LocalService
from rlhelpers.models import PRESETS, ModelPreset
from rlhelpers.service import TrainingSession, connect

KEY = "fw_secret_0123456789"
QWEN = PRESETS["qwen3p8-27b"]
COMPLETIONS = "POST /training/v1/serverless/inference/v1/completions"


class Noted:
    """The service's application, with a note of every request."""

    def __init__(self, app: Any, events: list[str]) -> None:
        self._app, self._events = app, events

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            self._events.append(f"{scope['method']} {scope['path']}")
        await self._app(scope, receive, send)


def opened(
    endpoint: LocalService, paid: ModelPreset, tmp_path: Path, **how: Any
) -> TrainingSession:
    return connect(
        "fireworks",
        paid,
        base_url=endpoint.base_url,
        runs_dir=tmp_path / "runs",
        task_runtime=LocalRuntime(env),
        **{"api_key": KEY, "quiet": True, **how},
    )


def count(events: list[str], ending: str) -> int:
    return sum(event.endswith(ending) for event in events)
