"""Shared fixtures. No test may see a key, reach HUD or a hub, or open a window."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import matplotlib
import pytest
from session_fixtures import policy_folder, preset, session
from workers import (
    SHARING,
    keep_processes_apart,
    pytest_collection_modifyitems,
    pytest_xdist_make_scheduler,
)

__all__ = [
    "policy_folder",
    "preset",
    "pytest_collection_modifyitems",
    "pytest_xdist_make_scheduler",
    "session",
]

KEYS = ("FIREWORKS_API_KEY", "HUD_API_KEY")

# Before anything imports hud: it reads its settings once, at import.
for _key in KEYS:
    os.environ.pop(_key, None)
os.environ["HUD_TELEMETRY_ENABLED"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"  # an unknown model id must not wait for a network
_spans = tempfile.mkdtemp(prefix="hud-spans-")
os.environ["HUD_TELEMETRY_LOCAL_DIR"] = _spans
atexit.register(shutil.rmtree, _spans, ignore_errors=True)

if SHARING:
    keep_processes_apart()

# Not through MPLBACKEND: kernels started by a test would inherit it, and a notebook
# under Agg shows no images.
matplotlib.use("Agg")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--screenshots",
        metavar="DIR",
        help="run notebook 04 at its defaults in test_browser.py, and write the "
        "README's pictures into this folder",
    )


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that sets a key cannot leak it into the next one."""
    for key in KEYS:
        monkeypatch.delenv(key, raising=False)


@pytest.fixture
def graded_run() -> Callable[..., Any]:
    """Make a finished HUD run by hand: real HUD objects, no environment."""
    from hud.agents.types import AgentStep, Sample
    from hud.eval.run import Grade, Run

    def make(
        group_id: str | None,
        reward: Any,
        *,
        prompt: tuple[int, ...] = (1, 2),
        output: tuple[int, ...] = (3, 4),
        logprobs: tuple[float, ...] | None = None,
        status: str | None = "completed",
        is_error: bool = False,
        samples: int = 1,
        slug: str = "multiply-36x47",
        error: str | None = None,
    ) -> Run:
        run = Run(None, "multiply", {})
        run.group_id, run.slug = group_id, slug
        run.grade = Grade(reward=reward, is_error=is_error, content="graded text")
        run.trace.status = status  # type: ignore[assignment]
        values = [-0.1] * len(output) if logprobs is None else list(logprobs)
        for _ in range(samples):
            sample = Sample(
                prompt_token_ids=list(prompt),
                output_token_ids=list(output),
                output_logprobs=values,
            )
            run.trace.record(AgentStep(content="1692", sample=sample, error=error))
        return run

    return make


@pytest.fixture
def record() -> Callable[..., Any]:
    """Make a rollout record; outcome and reward follow each other."""
    from rlhelpers.metrics import RolloutRecord

    def make(task: str = "multiply-36x47", outcome: str = "correct", **changes: Any):
        values: dict[str, Any] = {
            "run_id": "run",
            "phase": "before",
            "step": 0,
            "task": task,
            "task_index": 0,
            "rollout_index": 0,
            "text": "",
            "reward": float(outcome == "correct"),
            "outcome": outcome,
            "prompt_tokens": 38,
            "output_tokens": 40,
        }
        return RolloutRecord(**{**values, **changes})

    return make
