"""Fixtures: a session of the local service with a tiny random policy.

Imports stay inside the fixtures, so that tests of pure functions start at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a freshly initialised two-layer Llama."""
    from noise_policy import write_policy

    return write_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="session")
def preset(policy_folder: Path) -> Any:
    """A preset for that policy, with small numbers everywhere."""
    from rlhelpers.models import PRESETS

    return dataclasses.replace(
        PRESETS["tiny-arithmetic"],
        name="noise",
        base_model="local/noise",
        tokenizer=policy_folder,
        context=256,
        max_tokens=16,
        steps=4,
        tasks_per_step=2,
        group_size=4,
        learning_rate=1e-2,
        kl_every=0,
    )


@pytest.fixture
def session(preset: Any, tmp_path: Path) -> Iterator[Any]:
    """An open session whose tasks are those of ``noise_policy.env``."""
    from hud.eval.runtime import LocalRuntime
    from noise_policy import env

    from rlhelpers.service import connect

    with connect(
        model=preset,
        runs_dir=tmp_path / "runs",
        task_runtime=LocalRuntime(env),
        quiet=True,
    ) as opened:
        yield opened
