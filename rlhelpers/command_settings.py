"""The settings of a command: given as flags, or kept by the run that it continues.

Flags and the notebooks' parameters are the same settings under two spellings
(``--group-size`` and ``GROUP_SIZE``), and obey the same rules. A training run keeps its
settings in ``command.json``, so that ``--resume-from RUN`` needs no other flag.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhelpers.calibration import Band
from rlhelpers.checkpoints import CheckpointError, require_training_checkpoint
from rlhelpers.metrics import DamagedFile, read_resume_state, read_rollouts
from rlhelpers.models import PRESETS, ModelPreset, resolve_preset
from rlhelpers.parameters import check_parameters, whole_number
from rlhelpers.training import TrainConfig

COMMAND_FILE = "command.json"

#: Settings that say what a run trains on and holds out, which a resume must keep.
RUN_SETTINGS = (
    "backend",
    "model",
    "seed",
    "min_a",
    "max_a",
    "min_b",
    "max_b",
    "tasks_file",
    "env_path",
    "taskset",
    "evaluation_tasks",
    "tasks_per_step",
    "group_size",
    "fixed_tasks",
)
#: Settings of the training itself, called as in ``TrainConfig``.
_TRAINING = (
    "steps",
    "tasks_per_step",
    "group_size",
    "max_tokens",
    "learning_rate",
    "loss_fn",
    "checkpoint_every",
    "kl_every",
    "kl_coefficient",
    "updates_per_batch",
)
_NOT_KEPT = ("run_dir", "debug_samples")
_OPERANDS = {"MIN_OPERAND": "--min-a, --min-b", "MAX_OPERAND": "--max-a, --max-b"}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a command was asked for; None means the preset's or the command's default.

    The fields are the flags; :mod:`rlhelpers.command_line` describes each.
    ``drawn_for`` is no flag: the number of steps that the run's training tasks were
    drawn for, which a resume with more steps must not change.
    """

    backend: str = "local"
    model: str | None = None
    seed: int = 0
    token_limit: int | None = None
    prices: list[float] | None = None
    runs_dir: str = "runs"
    run_dir: str | None = None
    resume_from: str | None = None

    min_a: int | None = None
    max_a: int | None = None
    min_b: int | None = None
    max_b: int | None = None
    tasks_file: str | None = None
    env_path: str | None = None
    taskset: str | None = None
    evaluation_tasks: int | None = None

    tasks_per_step: int | None = None
    group_size: int | None = None
    max_tokens: int | None = None
    debug_samples: int | None = None

    steps: int | None = None
    learning_rate: float | None = None
    loss_fn: str | None = None
    checkpoint_every: int | None = None
    kl_every: int | None = None
    kl_coefficient: float | None = None
    updates_per_batch: int | None = None
    require_update: bool | None = None
    eval_before: bool | None = None
    fixed_tasks: bool | None = None
    drawn_for: int | None = None

    def check(self, *, least_evaluation_tasks: int = 0) -> None:
        """Refuse values that cannot work.

        Raises:
            ValueError: Every value that is wrong, and what to give instead.
        """
        values = {name.upper(): value for name, value in vars(self).items()}
        operand = whole_number(0)
        check_parameters(
            values,
            MIN_A=operand,
            MAX_A=operand,
            MIN_B=operand,
            MAX_B=operand,
            EVALUATION_TASKS=whole_number(least_evaluation_tasks),
            CHECKPOINT_EVERY=whole_number(1),
            DEBUG_SAMPLES=whole_number(0),
        )

    @property
    def preset(self) -> ModelPreset:
        """The model's preset."""
        return resolve_preset(self.model, self.backend)

    @property
    def operands(self) -> tuple[Band, Band]:
        """Smallest and largest first operand, and second operand."""
        low, high = self.preset.operands
        return (
            (_or(self.min_a, low), _or(self.max_a, high)),
            (_or(self.min_b, low), _or(self.max_b, high)),
        )

    @property
    def own_tasks(self) -> bool:
        """Whether the tasks are somebody's own and not multiplication."""
        return any((self.tasks_file, self.env_path, self.taskset))

    @property
    def held_out(self) -> int:
        """How many tasks are held out."""
        return _or(self.evaluation_tasks, self.preset.evaluation_tasks)

    @property
    def evaluates_before(self) -> bool:
        """Whether to evaluate before training: on a paid backend only if asked."""
        return self.backend == "local" if self.eval_before is None else self.eval_before

    def train_config(self) -> TrainConfig:
        """The settings of the training itself."""
        names = (*_TRAINING, "require_update", "seed")
        given = {name: getattr(self, name) for name in names}
        return TrainConfig.from_preset(self.preset, **given)

    def save(self, run_dir: Path) -> None:
        """Keep these settings in the run's folder."""
        run_dir.mkdir(parents=True, exist_ok=True)
        kept = {
            name: value
            for name, value in vars(self).items()
            if value is not None and name not in _NOT_KEPT
        }
        path = run_dir / COMMAND_FILE
        path.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def read_settings(given: Mapping[str, Any]) -> tuple[Settings, Path | None]:
    """The settings of a command, and the folder of the run that it takes up, if any.

    Args:
        given: The flags that were given, by name; the others are absent.

    Raises:
        ValueError: ``resume_from`` is neither a run's folder nor a training checkpoint.
        FileNotFoundError: The folder holds nothing to continue.
    """
    target = given.get("resume_from")
    if target is None:
        return Settings(**given), None
    folder = Path(target)
    if not folder.is_dir():
        _require_checkpoint_path(target)
        return Settings(**given), None
    saved = _kept_settings(folder)
    merged = {**saved, **given, "resume_from": saved.get("resume_from")}
    if "runs_dir" not in given and (folder.parent / "service").is_dir():
        merged["runs_dir"] = str(folder.parent)
    return Settings(**merged), folder


def _require_checkpoint_path(target: str) -> None:
    try:
        known = require_training_checkpoint(target).run_id is not None
        reason = "a checkpoint's path is <account>/run-<32 hex digits>/<name>"
    except CheckpointError as error:
        known, reason = False, str(error)
    if not known:
        raise CheckpointError(
            f"resume_from is neither a run's folder (there is no {target!r} here) nor "
            f"a training checkpoint: {reason}"
        )


def changed_settings(given: Mapping[str, Any], folder: Path) -> list[str]:
    """What flags would change of a run's :data:`RUN_SETTINGS`.

    Returns:
        Each as ``"--seed 1 (was 0)"``. A flag that says what holds anyway is none.
    """
    kept = _kept_settings(folder)
    then, now = (_in_effect(Settings(**values)) for values in (kept, {**kept, **given}))
    return [
        f"{flag(name)} {now[name]} (was {then[name]})"
        for name in RUN_SETTINGS
        if name in given and now[name] != then[name]
    ]


def _in_effect(settings: Settings) -> dict[str, Any]:
    (min_a, max_a), (min_b, max_b) = settings.operands
    preset = settings.preset
    return {
        **vars(settings),
        "model": preset.name,
        "min_a": min_a,
        "max_a": max_a,
        "min_b": min_b,
        "max_b": max_b,
        "evaluation_tasks": settings.held_out,
        "tasks_per_step": _or(settings.tasks_per_step, preset.tasks_per_step),
        "group_size": _or(settings.group_size, preset.group_size),
        "fixed_tasks": bool(settings.fixed_tasks),
    }


def _kept_settings(folder: Path) -> dict[str, Any]:
    """What the run says of itself: its command, or what a notebook's run left."""
    path = folder / COMMAND_FILE
    if not path.is_file():
        return _notebook_settings(folder)
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        Settings(**kept)
    except (ValueError, TypeError) as error:
        raise DamagedFile(
            f"{path} cannot be read ({error}); delete it and give the flags again"
        ) from error
    return dict(kept)


def _notebook_settings(folder: Path) -> dict[str, Any]:
    state = read_resume_state(folder / "resume.json")
    kept = {name: state.config[name] for name in _TRAINING if name in state.config}
    before = 0
    if (folder / "rollouts.jsonl").is_file():
        before = len(read_rollouts(folder / "rollouts.jsonl", phase="before"))
    if state.model in PRESETS:
        kept |= {"model": state.model, "backend": PRESETS[state.model].backend}
    if before:
        kept["evaluation_tasks"] = before
    return {**kept, "seed": state.seed, "drawn_for": kept.get("steps")}


def flag(name: str) -> str:
    """The flag of a setting.

    >>> flag("group_size")
    '--group-size'
    """
    return "--" + name.lower().replace("_", "-")


def as_flags(message: str) -> str:
    """A message that speaks of parameters, in the words of the command line.

    >>> as_flags("GROUP_SIZE = 1: must be at least 2, or None for the preset's value")
    "--group-size = 1: must be at least 2; leave it out for the preset's value"
    """
    for name, flags in _OPERANDS.items():
        message = message.replace(name, flags)
    names = [spec.name.upper() for spec in dataclasses.fields(Settings)]
    words = re.compile(r"(?<![\w-])(" + "|".join(names) + r")(?![\w-])")
    message = words.sub(lambda match: flag(match[0]), message)
    return message.replace(", or None for the", "; leave it out for the")
