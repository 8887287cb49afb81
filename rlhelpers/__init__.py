"""GRPO-style RL fine-tuning with HUD tasks and the Fireworks training SDK.

The course's notebooks import their helpers from here. See the README for the map of
modules; every concept lives in the file that bears its name.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any


def _keep_hud_telemetry_local() -> None:
    """Switch HUD's telemetry off, and keep its trace files inside the clone.

    With a HUD key in reach, HUD reports every local rollout to its makers; without
    telemetry it writes one trace file per rollout into the home directory. Neither
    is what a learner expects of a local course. Whoever sets
    ``HUD_TELEMETRY_ENABLED`` or ``HUD_TELEMETRY_LOCAL_DIR`` beforehand keeps their
    choice. HUD reads both once, at its first import, hence before any other import
    here; if it was imported earlier, its settings object is corrected.
    """
    spans = Path(__file__).resolve().parents[1] / "runs" / "hud-spans"
    loaded = sys.modules.get("hud.settings")
    if "HUD_TELEMETRY_ENABLED" not in os.environ:
        os.environ["HUD_TELEMETRY_ENABLED"] = "false"
        if loaded is not None:
            loaded.settings.telemetry_enabled = False
    if "HUD_TELEMETRY_LOCAL_DIR" not in os.environ:
        os.environ["HUD_TELEMETRY_LOCAL_DIR"] = str(spans)
        if loaded is not None and loaded.settings.telemetry_local_dir is None:
            loaded.settings.telemetry_local_dir = str(spans)


def _import_jsonschema_without_iris() -> None:
    """Spare every kernel the grammar that jsonschema builds for a format of text.

    HUD imports jsonschema, and that builds a parser of internationalised web addresses
    where one is installed. It takes a fifth of all that importing this package takes,
    and nothing here checks that format. Without the parser jsonschema leaves it out.
    """
    parser = "rfc3987_syntax"
    if parser in sys.modules or "jsonschema" in sys.modules:
        return
    sys.modules[parser] = None  # type: ignore[assignment]  # importing it fails
    try:
        importlib.import_module("jsonschema")
    finally:
        del sys.modules[parser]


_keep_hud_telemetry_local()
_import_jsonschema_without_iris()
# Dependencies import tqdm's notebook bars, which warn where ipywidgets is missing; ours
# are text and need none.
warnings.filterwarnings("ignore", message="IProgress not found")

if TYPE_CHECKING:
    from rlhelpers.advantages import group_relative_advantages, within_group_reward_std
    from rlhelpers.analysis import classify_outcome
    from rlhelpers.arithmetic import grade_final_integer
    from rlhelpers.calibration import calibrate
    from rlhelpers.datums import RolloutFailed, make_datum, make_training_batch
    from rlhelpers.diagnosis import diagnose
    from rlhelpers.episodes import EpisodeAgent
    from rlhelpers.evaluation import evaluate
    from rlhelpers.sampling import PolicyAgent
    from rlhelpers.service import connect
    from rlhelpers.tasks import TaskPool, load_tasks, make_taskset, split_taskset
    from rlhelpers.training import TrainConfig, train, train_step

# Imported at the first use: HUD and the SDK take seconds, and the local service in a
# process of its own needs neither.
_HOMES = {
    "advantages": ("group_relative_advantages", "within_group_reward_std"),
    "analysis": ("classify_outcome",),
    "arithmetic": ("grade_final_integer",),
    "calibration": ("calibrate",),
    "datums": ("RolloutFailed", "make_datum", "make_training_batch"),
    "diagnosis": ("diagnose",),
    "episodes": ("EpisodeAgent",),
    "evaluation": ("evaluate",),
    "sampling": ("PolicyAgent",),
    "service": ("connect",),
    "tasks": ("TaskPool", "load_tasks", "make_taskset", "split_taskset"),
    "training": ("TrainConfig", "train", "train_step"),
}

__all__ = [
    "EpisodeAgent",
    "PolicyAgent",
    "RolloutFailed",
    "TaskPool",
    "TrainConfig",
    "calibrate",
    "classify_outcome",
    "connect",
    "diagnose",
    "evaluate",
    "grade_final_integer",
    "group_relative_advantages",
    "load_tasks",
    "make_datum",
    "make_taskset",
    "make_training_batch",
    "split_taskset",
    "train",
    "train_step",
    "within_group_reward_std",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
            globals()[name] = value  # the next use does not come here
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
