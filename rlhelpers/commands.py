"""What ``python -m rlhelpers`` does: check, calibrate, train, evaluate, diagnose.

Each command prepares everything that can be wrong, connects, which prints the banner,
and only then sends anything. It calls the functions that the notebooks call, with the
same defaults and seeds, so the same settings give the same rewards in both. What is
printed is plain text.
"""

from __future__ import annotations

import asyncio
import logging
import shlex
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx
from fireworks.training.sdk import FireworksClient
from hud.utils.exceptions import HudException

from rlhelpers.analysis import (
    OutcomeTable,
    compare_before_after,
    compare_rewards,
    mean_interval,
    summarize_outcomes,
)
from rlhelpers.calibration import CalibrationResult, CalibrationSettings, calibrate
from rlhelpers.command_settings import Settings
from rlhelpers.datums import RolloutFailed
from rlhelpers.diagnosis import diagnose
from rlhelpers.evaluation import evaluate
from rlhelpers.metrics import (
    RolloutRecord,
    read_resume_state,
    read_rollouts,
)
from rlhelpers.open_sessions import SessionNotes, release
from rlhelpers.preflight import (
    api_root,
    find_key,
    fireworks_url,
    host_of,
    load_tokenizer,
)
from rlhelpers.readiness import (
    Readiness,
    check_one_turn,
    check_signal,
    check_tasks,
    grade_replies,
    read_labelled_replies,
)
from rlhelpers.refusals import ServiceRefused
from rlhelpers.runs import FULL_RUN
from rlhelpers.sampling import PolicySampler, SamplingSettings
from rlhelpers.service import TrainingSession, connect
from rlhelpers.tables import plain_text
from rlhelpers.tasks import (
    LoadedTasks,
    TaskPool,
    draw_sides,
    load_tasks,
    split_taskset,
)
from rlhelpers.training import NoUpdate, StepResult, TrainConfig, train
from rlhelpers.usage import TokenLimitReached

if TYPE_CHECKING:
    from hud.eval import Provider
    from hud.eval.task import Task

#: Held-out prompts that are answered every few steps of training, as in notebook 04.
WATCHED = 3
#: Rollouts from which a local run gains more by a service in a process of its own than
#: the seconds in which that starts.
LONG_RUN = 1000
#: A calibration's groups, rollouts in each, and sample texts.
CALIBRATION = (6, 4, 4)

#: What can go wrong once something was sent; the message is all that helps.
_FAILURES = (
    RolloutFailed,
    NoUpdate,
    TokenLimitReached,
    ServiceRefused,
    HudException,
    ValueError,
    OSError,
)


class Stopped(RuntimeError):
    """A command stopped half way; the message says why and how to go on."""


def _run(work: Coroutine[Any, Any, None], go_on: str = "") -> None:
    """Run a command's work; Ctrl-C leaves it as its functions promise to."""
    try:
        asyncio.run(work)
    except _FAILURES as error:
        raise Stopped(f"{error}{go_on}") from error
    except KeyboardInterrupt:
        # Requests in flight are given up; the SDK would announce a retry of each.
        logging.getLogger("fireworks").setLevel(logging.CRITICAL)
        raise KeyboardInterrupt(f"interrupted{go_on}") from None


def _say(text: str = "") -> None:
    print(text, flush=True)


# Tasks


class Tasks(NamedTuple):
    """A command's tasks, and where HUD runs them; None is the bundled environment."""

    training: list[Task]
    held_out: list[Task]
    runtime: Provider | None


def draw_tasks(settings: Settings, config: TrainConfig) -> Tasks:
    """The tasks to train on, and those held out: the same for the same settings.

    Raises:
        ValueError: There are fewer than a step's and the held-out ones together.
    """
    held_out = settings.held_out
    if settings.own_tasks:
        loaded = _own_tasks(settings)
        needed = config.tasks_per_step + held_out
        if len(loaded.taskset) < needed:
            raise ValueError(
                f"{loaded.taskset.name!r} has {len(loaded.taskset)} tasks; a step "
                f"takes {config.tasks_per_step} (TASKS_PER_STEP) and {held_out} are "
                f"held out (EVALUATION_TASKS), together {needed}: add tasks, or lower "
                "one of the two"
            )
        sides = split_taskset(loaded.taskset, held_out=held_out, seed=settings.seed)
        return Tasks(list(sides[0]), list(sides[1]), loaded.runtime)
    sides = draw_sides(
        *settings.operands,
        steps=settings.drawn_for or config.steps,
        tasks_per_step=config.tasks_per_step,
        held_out=held_out,
        seed=settings.seed,
    )
    return Tasks(list(sides[0]), list(sides[1]), None)


def _own_tasks(settings: Settings) -> LoadedTasks:
    return load_tasks(
        tasks_file=settings.tasks_file,
        env_path=settings.env_path,
        taskset=settings.taskset,
    )


def _connect(
    settings: Settings,
    tasks: Tasks,
    *,
    rollouts: int,
    datums: int = 0,
    forwards: int = 0,
    max_tokens: int,
    checkpoint: str | None = None,
    own_process: bool = False,
) -> TrainingSession:
    """Print the banner, then open the session."""
    _require_one_turn(tasks)
    return connect(
        settings.backend,
        settings.model,
        runs_dir=settings.runs_dir,
        seed=settings.seed,
        token_limit=settings.token_limit,
        prices=settings.prices,
        planned_rollouts=rollouts,
        planned_datums=datums,
        planned_forwards=forwards,
        max_tokens=max_tokens,
        max_operand=max(map(max, settings.operands)),
        resume_from=checkpoint,
        task_runtime=tasks.runtime,
        own_process=own_process,
    )


def _require_one_turn(tasks: Tasks) -> None:
    """Refuse tasks that the one-turn agent cannot answer, before anything is sent."""
    if tasks.runtime is None:
        return
    everything = [*tasks.training, *tasks.held_out]
    one_of_each = {(task.env, task.id): task for task in everything}.values()
    probing = grade_replies(tasks.runtime, [(task, "") for task in one_of_each])
    Readiness((check_one_turn(asyncio.run(probing)),)).require()


# Check


def check_command(settings: Settings, samples: str | None) -> bool:
    """Check tasks of one's own without a model; whether something failed.

    Args:
        settings: The command's settings.
        samples: A file of labelled replies, or None.
    """
    settings.check()
    if not settings.own_tasks:
        raise ValueError(
            "check is for tasks of your own: give TASKS_FILE with ENV_PATH, or TASKSET"
        )
    config, preset = settings.train_config(), settings.preset
    checking = check_tasks(
        _own_tasks(settings),
        tasks_per_step=config.tasks_per_step,
        held_out=settings.held_out,
        calibration=CALIBRATION[0],
        samples=read_labelled_replies(samples) if samples else (),
        tokenizer=load_tokenizer(preset),
        preset=preset,
        max_tokens=config.max_tokens,
        seed=settings.seed,
    )
    readiness = asyncio.run(checking)
    _say(str(readiness))
    if readiness.ready:
        _say("Ready to calibrate: that alone shows whether there is a signal.")
    return not readiness.ready


# Calibrate


def calibrate_command(settings: Settings) -> None:
    """Sample some tasks, and say whether there is anything to learn from."""
    settings.check()
    given = (settings.tasks_per_step, settings.group_size, settings.debug_samples)
    count, group_size, samples = (
        default if value is None else value
        for value, default in zip(given, CALIBRATION, strict=True)
    )
    max_tokens = settings.max_tokens or settings.preset.max_tokens
    tasks = _calibration_tasks(settings, count, group_size, max_tokens)
    rollouts = count * group_size
    with _connect(settings, tasks, rollouts=rollouts, max_tokens=max_tokens) as session:

        async def work() -> None:
            result = await calibrate(
                session,
                tasks.training,
                group_size=group_size,
                settings=SamplingSettings(max_tokens),
                seed=settings.seed,
                run_dir=settings.run_dir,
            )
            _report_calibration(result, samples)
            _report_usage(session)

        _run(work())


def _calibration_tasks(
    settings: Settings, count: int, group_size: int, max_tokens: int
) -> Tasks:
    if settings.own_tasks:
        unheld = replace(settings, tasks_per_step=count, evaluation_tasks=0)
        tasks = draw_tasks(unheld, unheld.train_config())
        return tasks._replace(training=tasks.training[:count])
    a, b = settings.operands
    drawn = CalibrationSettings(
        a=a,
        b=b,
        tasks=count,
        group_size=group_size,
        max_tokens=max_tokens,
        seed=settings.seed,
    ).draw_tasks()
    return Tasks(list(drawn), [], None)


def _report_calibration(result: CalibrationResult, samples: int) -> None:
    _say()
    _print_samples(result.samples(samples) if samples else [])
    if result.verdict is not None:
        _say(plain_text(result.verdict.to_markdown()))
    else:
        _say(f"{check_signal(result.records)}.")
        _say("These tasks have no outcome classes: read texts beside their rewards.")
    _say(f"\nrollouts   {result.run_dir / 'rollouts.jsonl'}")


# Train


@dataclass(frozen=True)
class _Training:
    """A training run that is about to begin, or to go on."""

    settings: Settings
    config: TrainConfig
    tasks: Tasks
    pool: TaskPool
    before: list[RolloutRecord]  # recorded by an earlier call
    done: int  # steps taken by earlier calls

    @property
    def evaluates_before(self) -> bool:
        """Whether the policy before training is still there and not yet evaluated."""
        gone = self.done > 0 and self.settings.resume_from is not None
        wanted = self.settings.evaluates_before and bool(self.tasks.held_out)
        return wanted and not self.before and not gone

    @property
    def trained_rollouts(self) -> int:
        left = max(self.config.steps - self.done, 0)
        return left * self.config.rollouts_per_step

    @property
    def all_rollouts(self) -> int:
        """The most that this call samples: training, watching and evaluating."""
        watched = min(WATCHED, len(self.tasks.held_out))
        looks = watched * (self.config.steps // self.config.watch_every + 2)
        evaluated = len(self.tasks.held_out) * (1 + self.evaluates_before)
        return self.trained_rollouts + looks + evaluated


def train_command(settings: Settings, folder: Path | None) -> None:
    """Train, with evaluations around it; ``folder`` is the run to go on with."""
    training = _prepare_training(settings, folder)
    config, settings = training.config, training.settings
    checkpoint = settings.resume_from
    if folder is not None and (folder / "resume.json").is_file():
        checkpoint = None  # train() loads the run's own
    with _connect(
        settings,
        training.tasks,
        rollouts=training.all_rollouts,
        datums=training.trained_rollouts * config.updates_per_batch,
        forwards=config.kl_rollouts,
        max_tokens=config.max_tokens,
        checkpoint=checkpoint,
        own_process=(settings.backend == "local" and training.all_rollouts >= LONG_RUN),
    ) as session:
        run_dir = folder or _new_run_dir(session, settings)
        settings.save(run_dir)
        again = f"python -m rlhelpers train --resume-from {shlex.quote(str(run_dir))}"
        _run(_train(session, training, run_dir, again), f"\nTo go on: {again}")


def _prepare_training(settings: Settings, folder: Path | None) -> _Training:
    settings.check()
    if folder is None and settings.run_dir is not None:
        _require_unused(Path(settings.run_dir))
    config = settings.train_config()
    tasks = draw_tasks(settings, config)
    pool = TaskPool(
        tasks.training,
        tasks_per_step=config.tasks_per_step,
        seed=config.seed,
        fixed=bool(settings.fixed_tasks),
    )
    before = _recorded(folder, "before")
    _require_same_tasks(before, tasks.held_out)
    return _Training(
        settings=replace(settings, drawn_for=settings.drawn_for or config.steps),
        config=config,
        tasks=tasks,
        pool=pool,
        before=before,
        done=_steps_done(folder),
    )


def _require_unused(run_dir: Path) -> None:
    for name in ("metrics.jsonl", "rollouts.jsonl", "resume.json"):
        if (run_dir / name).exists():
            raise ValueError(
                f"{run_dir} already holds a run: go on with --resume-from {run_dir}, "
                "or give another RUN_DIR"
            )


def _recorded(folder: Path | None, phase: str) -> list[RolloutRecord]:
    path = None if folder is None else folder / "rollouts.jsonl"
    return read_rollouts(path, phase=phase) if path and path.is_file() else []


def _steps_done(folder: Path | None) -> int:
    path = None if folder is None else folder / "resume.json"
    return read_resume_state(path).next_step - 1 if path and path.is_file() else 0


def _require_same_tasks(before: list[RolloutRecord], held_out: list[Task]) -> None:
    """A held-out task of the run could otherwise be trained on now."""
    if before and [record.task for record in before] != [t.slug for t in held_out]:
        raise ValueError(
            "these settings do not hold out the tasks that the run evaluated before "
            "training; give the operand range or TASKS_FILE that it was started with"
        )


def _new_run_dir(session: TrainingSession, settings: Settings) -> Path:
    if settings.run_dir is not None:
        return Path(settings.run_dir)
    # Notebooks 05 and 06 look for full runs, and read multiplication tasks in them.
    return session.new_run_dir("train" if settings.own_tasks else FULL_RUN)


async def _train(
    session: TrainingSession, training: _Training, run_dir: Path, again: str
) -> None:
    settings, config = training.settings, training.config
    held_out = training.tasks.held_out
    _say(f"\nRun {run_dir}")
    before = training.before
    if training.evaluates_before:
        fresh = settings.resume_from is None
        sampler = session.base_sampler() if fresh else session.current_sampler()
        before = await _evaluate_side("before", session, training, run_dir, sampler)
    result = await train(
        session,
        training.pool,
        config=config,
        run_dir=run_dir,
        resume=True,
        watch=held_out[:WATCHED],
        on_step=lambda step: _print_step(step, config),
        progress=False,
    )
    if held_out:
        after = await _evaluate_side(
            "after", session, training, run_dir, result.sampler
        )
        _say()
        _report_sides(before, after)
    _say(f"\nDiagnosis. {diagnose(run_dir)}\n")
    _say(f"steps      {run_dir / 'metrics.jsonl'}")
    _say(f"rollouts   {run_dir / 'rollouts.jsonl'}")
    _say(f"checkpoint {result.state}")
    _say(f"more steps {again} --steps {2 * config.steps}")
    _report_usage(session)


async def _evaluate_side(
    phase: str,
    session: TrainingSession,
    training: _Training,
    run_dir: Path,
    sampler: PolicySampler,
) -> list[RolloutRecord]:
    result = await evaluate(
        session,
        training.tasks.held_out,
        phase=phase,
        sampler=sampler,
        settings=SamplingSettings.greedy(training.config.max_tokens),
        step=training.config.steps if phase == "after" else 0,
        run_dir=run_dir,
    )
    count = len(result.records)
    _say(f"{phase}: mean reward {result.reward_mean:.3f} on {count} held-out tasks")
    return list(result.records)


def _print_step(result: StepResult, config: TrainConfig) -> None:
    row = result.metrics
    _say(
        f"step {row.step}/{config.steps}  reward {row.reward_mean:.2f}  "
        f"spread {row.within_group_std:.2f}  "
        f"groups kept {row.kept_groups}/{config.tasks_per_step}  "
        f"tokens {row.mean_output_tokens or 0:.0f}  "
        f"cut off {row.token_limit_share:.0%}  {row.seconds:.1f} s"
    )
    if row.note:
        _say(f"  {row.note}")


# Evaluate


def evaluate_command(settings: Settings, folder: Path | None, *, own: bool) -> None:
    """Evaluate the base model, a checkpoint, or where a run stands.

    Args:
        settings: The command's settings.
        folder: The run to evaluate, or None.
        own: Whether the tasks are to be those of ``settings`` and not the run's own
            held-out ones; the run's training tasks are then left out.
    """
    settings.check(least_evaluation_tasks=1)
    config = settings.train_config()
    tasks = draw_tasks(settings, config)
    before: list[RolloutRecord] = []
    checkpoint, step = settings.resume_from, 0
    if folder is not None:
        state = read_resume_state(folder / "resume.json")
        checkpoint, step = state.checkpoint, state.next_step - 1
        if own:
            tasks = tasks._replace(held_out=_unseen(tasks, folder))
        else:
            before = _recorded(folder, "before")
            _require_same_tasks(before, tasks.held_out)
    with _connect(
        settings,
        tasks,
        rollouts=len(tasks.held_out),
        max_tokens=config.max_tokens,
        checkpoint=checkpoint,
    ) as session:

        async def work() -> None:
            result = await evaluate(
                session,
                tasks.held_out,
                settings=SamplingSettings.greedy(config.max_tokens),
                step=step,
                run_dir=settings.run_dir,
            )
            _say()
            wrong = [record for record in result.records if record.reward <= 0]
            _print_samples(wrong[: settings.debug_samples or 0])
            _report_sides(before, list(result.records))
            _say(f"\nrollouts   {result.run_dir / 'rollouts.jsonl'}")
            _report_usage(session)

        _run(work())


def _unseen(tasks: Tasks, folder: Path) -> list[Task]:
    """The held-out tasks that a run was not trained on, in either operand order."""
    trained = {_content(row.task, row.args) for row in _recorded(folder, "train")}
    unseen = [t for t in tasks.held_out if _content(t.slug, t.args) not in trained]
    if not unseen:
        raise ValueError(
            f"the run in {folder} was trained on all {len(tasks.held_out)} tasks of "
            "these settings; widen MIN_A, MAX_A, MIN_B or MAX_B, or raise "
            "EVALUATION_TASKS"
        )
    return unseen


def _content(slug: str, args: dict[str, Any]) -> str:
    if args.keys() == {"a", "b"}:
        return str(sorted(args.values(), key=str))
    return slug


# Diagnose


def diagnose_command(run_dir: str) -> bool:
    """Print what looks wrong in a run; whether anything does."""
    diagnosis = diagnose(run_dir)
    _say(str(diagnosis))
    return bool(diagnosis.findings)


# Sessions


def sessions_command(runs_dir: str, wanted: list[str] | None) -> None:
    """List the sessions that are noted as open, and end some of them.

    Args:
        runs_dir: The runs folder, which holds the notes.
        wanted: Ids to end; empty for those whose process is gone; None ends none.

    Raises:
        ValueError: An id that no note has; nothing was sent.
        MissingKey: Something is to be ended, and there is no key.
        Stopped: The service refused to end one.
    """
    notes = SessionNotes(Path(runs_dir) / "sessions")
    url = fireworks_url(None)
    found = notes.all()
    for session in found:
        _say(str(session))
    if not found:
        _say(f"no session of {runs_dir} is open")
    if wanted is None:
        return
    here = {session.session_id: session for session in notes.all(host_of(url))}
    if unknown := [name for name in wanted if name not in here]:
        raise ValueError(
            f"no session {', '.join(unknown)} of {host_of(url)} is noted in "
            f"{notes.folder}; noted are {', '.join(here) or 'none'}"
        )
    chosen = [here[name] for name in wanted] or notes.stale(host_of(url))
    if not chosen:
        _say("none to end: no process that opened one is gone")
        return
    key = find_key(None)
    try:
        with FireworksClient(api_key=key, base_url=api_root(url)) as client:
            ended = release(client, notes, chosen)
    except (RuntimeError, httpx.HTTPError) as error:
        raise Stopped(f"not all were ended: {error}") from error
    _say(f"ended {', '.join(ended)}")


# Printing


def _report_sides(before: list[RolloutRecord], after: list[RolloutRecord]) -> None:
    """The table at the end: before and after, or one of them, and the verdict."""
    if any(record.outcome is None for record in after):
        if before:
            _say(plain_text(compare_rewards(before, after).to_markdown()))
        else:
            _say(_reward_table(after))
    elif before:
        _say(plain_text(compare_before_after(before, after).to_markdown()))
    else:
        table = OutcomeTable({"held out": summarize_outcomes(after)})
        _say(plain_text(table.to_markdown()))


def _reward_table(records: list[RolloutRecord]) -> str:
    """Mean reward of tasks that have no outcome classes, and the length of replies."""
    rewards = [record.reward for record in records]
    low, high = mean_interval(rewards)
    tokens = sum(record.output_tokens for record in records) / len(records)
    cut = sum(record.token_limit for record in records)
    return (
        f"{len(records)} tasks, mean reward {sum(rewards) / len(rewards):.3f} "
        f"[{low:.3f}, {high:.3f}], mean tokens {tokens:.1f}, {cut} cut off"
    )


def _print_samples(records: Sequence[RolloutRecord]) -> None:
    for record in records:
        words = [record.outcome or "", f"{record.output_tokens} tokens"]
        words += ["cut off"] if record.token_limit else []
        _say("  ".join([f"--- reward {record.reward:.2f}", *filter(None, words)]))
        _say(f"{record.prompt}\n{record.text or '(empty)'}\n")


def _report_usage(session: TrainingSession) -> None:
    if session.preset.backend == "local":  # elsewhere the session says so as it closes
        _say(f"\n{session.usage_report}")
