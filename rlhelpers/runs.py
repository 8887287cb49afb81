"""Finished runs on disk: finding the one that a later notebook reads, or making one.

Notebook 04 leaves a run in the runs folder; the notebooks after it read it back with
:func:`find_run`. Where there is none, :func:`short_run` makes one, with the same files.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlhelpers.analysis import OutcomeSummary
from rlhelpers.checkpoints import checkpoint_name
from rlhelpers.evaluation import evaluate
from rlhelpers.metrics import (
    DamagedFile,
    ResumeState,
    RolloutRecord,
    StepMetrics,
    latest_step,
    read_metrics,
    read_resume_state,
    read_rollouts,
)
from rlhelpers.recording import Place
from rlhelpers.sampling import SamplingSettings
from rlhelpers.tasks import (
    draw_sides,
    make_taskset,
    multiplication_task,
    operand_pairs,
)
from rlhelpers.training import TrainConfig, train

if TYPE_CHECKING:
    from hud.eval.task import Task

    from rlhelpers.models import ModelPreset
    from rlhelpers.service import TrainingSession

FULL_RUN = "full-run"
SHORT_RUN = "short-run"

_PUBLISHED = Path(__file__).resolve().parents[1] / "data" / "published_run.json"
_SIDES = ("before", "after")


@dataclass(frozen=True)
class FinishedRun:
    """A run that trained to its last step, with its held-out replies.

    Attributes:
        run_dir: Its folder.
        state: Where it ended: the final training checkpoint and the settings.
        metrics: One row per step.
        before, after: Greedy replies to the same held-out tasks, one per task.
    """

    run_dir: Path
    state: ResumeState
    metrics: tuple[StepMetrics, ...]
    before: tuple[RolloutRecord, ...]
    after: tuple[RolloutRecord, ...]

    @property
    def run_id(self) -> str:
        """The run's id, which is its folder's name."""
        return self.run_dir.name

    @property
    def steps(self) -> int:
        """How many steps it took."""
        return len(self.metrics)

    @property
    def max_tokens(self) -> int:
        """The token limit of its replies."""
        return self.metrics[-1].max_tokens

    @property
    def held_out(self) -> list[Task]:
        """The held-out multiplication tasks, in the order they were evaluated."""
        return [multiplication_task(**record.args) for record in self.before]

    @property
    def trained_pairs(self) -> frozenset[tuple[int, int]]:
        """The operand pairs it was trained on, smaller operand first."""
        rows = read_rollouts(self.run_dir / "rollouts.jsonl", phase="train")
        return frozenset(_pair(row.args["a"], row.args["b"]) for row in rows)

    def is_full(self, preset: ModelPreset) -> bool:
        """Whether it is the preset's own full run, or at least as thorough a one.

        Claims that a notebook proves at the defaults are promised for such a run; of
        a shorter one they are only reported.
        """
        config = self.state.config
        operands = [value for record in self.before for value in record.args.values()]
        same = ("max_tokens", "learning_rate", "tasks_per_step", "group_size")
        return (
            self.steps >= preset.steps
            and len(self.before) >= preset.evaluation_tasks
            and all(config.get(name) == getattr(preset, name) for name in same)
            and preset.operands[0] <= min(operands)
            and max(operands) <= preset.operands[1]
        )

    @property
    def checkpoints(self) -> dict[int, str]:
        """Steps taken → path of the training checkpoint saved after them.

        A step's row names the snapshot that it sampled, and so the service's run that
        saved the checkpoint; after an interruption a run goes on under another id.
        """
        every = int(self.state.config.get("checkpoint_every", 0))
        found = {}
        for row in self.metrics[:-1]:
            if every and row.step % every == 0 and row.snapshot:
                parent = row.snapshot.rsplit("/", 1)[0]
                tag = Place(self.run_dir, row.attempt).tag
                name = checkpoint_name("state", step=row.step, tag=tag)
                found[row.step] = f"{parent}/{name}"
        return {**found, self.steps: self.state.checkpoint}

    def __str__(self) -> str:
        return (
            f"{self.run_id}: {self.steps} steps on {self.state.model}, "
            f"{len(self.before)} held-out tasks"
        )


def find_run(runs_dir: str | Path, preset: ModelPreset) -> FinishedRun | None:
    """The newest finished run of a preset, full runs before short ones.

    Folders that are unfinished, damaged or of another base model are passed over.

    Args:
        runs_dir: The folder that holds all runs.
        preset: The preset that the run must have trained.

    Returns:
        The run, or None if there is none.
    """
    for label in (FULL_RUN, SHORT_RUN):
        # The folder's name carries the time it was made, so names sort by age.
        for folder in sorted(Path(runs_dir).glob(f"{label}-*"), reverse=True):
            run = _read_run(folder)
            if run is not None and run.state.base_model == preset.base_model:
                return run
    return None


def _read_run(folder: Path) -> FinishedRun | None:
    try:
        state = read_resume_state(folder / "resume.json")
        metrics = read_metrics(folder / "metrics.jsonl")
        rollouts = read_rollouts(folder / "rollouts.jsonl")
    except (FileNotFoundError, DamagedFile):
        return None
    before = tuple(record for record in rollouts if record.phase == "before")
    after = tuple(latest_step(row for row in rollouts if row.phase == "after"))
    finished = state.next_step > int(state.config.get("steps", 0)) and bool(metrics)
    paired = bool(before) and [r.task for r in before] == [r.task for r in after]
    if not (finished and paired):
        return None
    return FinishedRun(folder, state, tuple(metrics), before, after)


async def short_run(
    session: TrainingSession,
    *,
    steps: int = 10,
    evaluation_tasks: int | None = None,
    seed: int = 0,
    config: TrainConfig | None = None,
    operands: tuple[int, int] | None = None,
    progress: bool = True,
) -> FinishedRun:
    """Evaluate, train for a few steps, and evaluate again on the same tasks.

    Args:
        session: An open session.
        steps: Optimizer steps.
        evaluation_tasks: Held-out tasks; default: the preset's.
        seed: Of tasks and rollouts.
        config: Settings of the training; default: the preset's with these steps.
        operands: Smallest and largest operand; default: the preset's.
        progress: Show a text progress bar.

    Returns:
        The run, as :func:`find_run` would read it back.
    """
    preset = session.preset
    config = config or TrainConfig.from_preset(preset, steps=steps, seed=seed)
    operands = operands or preset.operands
    training, held_out = draw_sides(
        operands,
        operands,
        steps=config.steps,
        tasks_per_step=config.tasks_per_step,
        held_out=evaluation_tasks or preset.evaluation_tasks,
        seed=seed,
    )
    run_dir = session.new_run_dir(SHORT_RUN)
    greedy = SamplingSettings.greedy(config.max_tokens)
    await evaluate(
        session,
        held_out,
        phase="before",
        sampler=session.base_sampler(),
        settings=greedy,
        run_dir=run_dir,
    )
    result = await train(
        session, training, config=config, run_dir=run_dir, progress=progress
    )
    await evaluate(
        session,
        held_out,
        phase="after",
        sampler=result.sampler,
        settings=greedy,
        step=config.steps,
        run_dir=run_dir,
    )
    run = _read_run(run_dir)
    if run is None:
        raise RuntimeError(f"{run_dir} was not written completely; make the run again")
    return run


# Other tasks for the same policy


def operands_around(trained: tuple[int, int]) -> list[tuple[int, int]]:
    """Operand ranges to test a policy on: below, at, near and far above its own.

    The near one reaches three times as far as the trained range, the far one ten
    times; there is none below where no room is left.

    >>> operands_around((10, 99))
    [(1, 9), (10, 99), (100, 300), (100, 999)]
    """
    low, high = trained
    if not 1 <= low <= high:
        raise ValueError(
            f"the trained range is {low} to {high}; it needs 1 <= smallest <= largest"
        )
    below = [(1, low - 1)] if low > 2 else []
    over = high + 1
    return [*below, (low, high), (over, 3 * over), (over, 10 * over - 1)]


def unseen_tasks(
    run: FinishedRun, operands: tuple[int, int], count: int, *, seed: int
) -> list[Task]:
    """Multiplication tasks of a range that a run was not trained on.

    Args:
        run: The run.
        operands: Smallest and largest operand of both factors.
        count: Most tasks to return; a small range has fewer.
        seed: The same seed gives the same tasks.

    Raises:
        ValueError: The run was trained on every pair of the range, or the range is
            inverted, or ``count`` is below one.
    """
    low, high = operands
    trained = run.trained_pairs
    there_are = operand_pairs(min_a=low, max_a=high, min_b=low, max_b=high).size
    enough = min(there_are, count + len(trained))
    drawn = make_taskset(
        enough, min_a=low, max_a=high, min_b=low, max_b=high, seed=seed
    )
    unseen = [
        task for task in drawn if _pair(task.args["a"], task.args["b"]) not in trained
    ]
    if not unseen or count < 1:
        raise ValueError(
            f"{count} tasks with operands {low} to {high} were asked for, and "
            f"{len(unseen)} were not trained on; ask for at least one, of a wider range"
        )
    return unseen[:count]


def _pair(a: int, b: int) -> tuple[int, int]:
    return min(a, b), max(a, b)


# A run to compare with


@dataclass(frozen=True)
class PublishedRun:
    """Before and after of a run that somebody else made and published.

    Attributes:
        model: The base model.
        task: What it was trained and evaluated on.
        training_rollouts: How many rollouts it was trained on.
        source: Where the figures were published.
        before, after: Greedy outcomes on its held-out tasks.
    """

    model: str
    task: str
    training_rollouts: int
    source: str
    before: OutcomeSummary
    after: OutcomeSummary


def published_run(path: str | Path | None = None) -> PublishedRun:
    """The published figures for Qwen 3.8 27B, as they were recorded in ``data/``.

    Args:
        path: Another JSON file of the same form; default: the course's own.

    Raises:
        ValueError: A value is missing or unknown, or the three outcomes of a side do
            not add up to its tasks; names the file.
    """
    source = Path(path) if path is not None else _PUBLISHED
    try:
        values = json.loads(source.read_text(encoding="utf-8"))
        sides = {name: OutcomeSummary(**values.pop(name)) for name in _SIDES}
        published = PublishedRun(**values, before=sides["before"], after=sides["after"])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{source.name} is not a published run: {error}") from error
    for name, side in sides.items():
        total = side.correct + side.wrong_integer + side.invalid_final_line
        if total != side.n:
            raise ValueError(
                f"{source.name}, {name}: the outcomes add up to {total}, not to the "
                f"{side.n} tasks; correct the counts"
            )
    return published
