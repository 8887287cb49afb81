"""The training step and the loop around it.

The variant of GRPO, in one line: advantages standardised within a group (n - 1), the
loss summed over tokens, and by default no KL term and one on-policy update per batch.

One step, as code: save a snapshot of the adapter, open a sampler on it, roll out
groups, grade, build datums, ``forward_backward``, ``optim_step``. The update and the
row that records it are finished together even when the step is interrupted, so that
the weights and the metrics never disagree.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import math
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, get_args

import numpy as np
from fireworks.training.sdk import AdamParams
from tqdm import tqdm

from rlhelpers.advantages import Scale, within_group_reward_std
from rlhelpers.analysis import OUTCOMES
from rlhelpers.checkpoints import CheckpointError, checkpoint_name
from rlhelpers.datums import check_run, make_training_batch
from rlhelpers.kl import add_kl_penalty, measure_kl
from rlhelpers.metrics import (
    ResumeState,
    RolloutRecord,
    StepMetrics,
    append_metrics,
    next_attempt,
    read_metrics,
    read_resume_state,
    write_resume_state,
)
from rlhelpers.recording import (
    Place,
    make_run_dir,
    need_tasks,
    roll_out,
    verdict_of,
)
from rlhelpers.refusals import explained
from rlhelpers.sampling import (
    PolicySampler,
    RolloutPlan,
    SamplingSettings,
)
from rlhelpers.service import TrainingSession
from rlhelpers.tasks import TaskPool

if TYPE_CHECKING:
    from fireworks.training.sdk import Datum
    from hud.eval import Taskset
    from hud.eval.run import Run
    from hud.eval.task import Task

    from rlhelpers.models import ModelPreset

LossName = Literal["importance_sampling", "ppo", "cispo"]
LOSSES: tuple[str, ...] = get_args(LossName)

#: The settings that every metrics row carries.
_RECORDED_SETTINGS = (
    "temperature",
    "top_p",
    "top_k",
    "max_tokens",
    "loss_fn",
    "learning_rate",
)

T = TypeVar("T")


class NoUpdate(RuntimeError):
    """A step that had to change the weights had nothing to learn from."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The settings of a training run.

    Attributes:
        max_tokens: Most tokens of one reply.
        steps: Optimizer steps.
        tasks_per_step: Groups in a step.
        group_size: Rollouts per group, at least 2.
        loss_fn: The service's loss, a sum over tokens.
        loss_fn_config: Its options, such as ``{"clip_low_threshold": 0.8}``.
        updates_per_batch: Optimizer steps on each batch. From the second on, the
            ratios leave 1; ``"ppo"`` and ``"cispo"`` bound what that does.
        learning_rate, beta1, beta2, eps, grad_clip_norm: Adam's. A clip of 0 is off.
        advantage_scale: ``"std"`` divides by the group's spread, ``"none"`` does not.
        temperature, top_p, top_k: How training rollouts are sampled. Anything but 1,
            1 and -1 biases the importance ratios, and warns.
        seed: Seed of the run; every rollout derives its own.
        checkpoint_every: Steps between training checkpoints.
        watch_every: Steps between looks at the watch prompts.
        kl_every: Steps between measurements of the KL to the base model, which read
            the step's rollouts once more; 0 is never.
        kl_coefficient: Holds the policy near the base model: β of
            :func:`~rlhelpers.kl.kl_penalised`, which reads every step's datums once
            more with the base. 0 is off.
        require_update: Whether a step without signal is an error.

    Raises:
        ValueError: A value cannot work; the message names it and the remedy.

    Example:
        >>> TrainConfig(max_tokens=160, group_size=4).rollouts_per_step
        32
    """

    max_tokens: int
    steps: int = 30
    tasks_per_step: int = 8
    group_size: int = 8
    loss_fn: str = "importance_sampling"
    loss_fn_config: dict[str, float] | None = None
    updates_per_batch: int = 1
    learning_rate: float = 6e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    grad_clip_norm: float = 0.0
    advantage_scale: Scale = "std"
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int = 0
    checkpoint_every: int = 5
    watch_every: int = 5
    kl_every: int = 0
    kl_coefficient: float = 0.0
    require_update: bool = False

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise ValueError(
                f"group_size must be at least 2, got {self.group_size}: an advantage "
                "compares rollouts of one prompt, so one alone teaches nothing"
            )
        names = ("steps", "tasks_per_step", "updates_per_batch")
        for name in (*names, "checkpoint_every", "watch_every"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.kl_every < 0:
            raise ValueError(
                f"kl_every must be at least 0, got {self.kl_every}; 0 never measures"
            )
        if not (math.isfinite(self.kl_coefficient) and self.kl_coefficient >= 0):
            raise ValueError(
                "kl_coefficient must be a number of at least 0, got "
                f"{self.kl_coefficient}; 0 is off, and a negative one would push the "
                "policy away from the base model"
            )
        if self.loss_fn not in LOSSES:
            raise ValueError(
                f"unknown loss_fn {self.loss_fn!r}; use one of: {', '.join(LOSSES)}"
            )
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise ValueError(
                f"learning_rate must be a positive number, got {self.learning_rate}; "
                "LoRA on the default model learns at about 6e-4"
            )
        if self.temperature <= 0:
            raise ValueError(
                f"training temperature must be above 0, got {self.temperature}: greedy "
                "rollouts of one prompt are all alike; use 1"
            )
        self.sampling.warn_if_biased()

    @classmethod
    def from_preset(cls, preset: ModelPreset, **overrides: Any) -> Self:
        """The preset's settings with some replaced; None means the preset's value.

        Example:
            >>> from rlhelpers.models import resolve_preset
            >>> TrainConfig.from_preset(resolve_preset(None), steps=None).steps
            30
        """
        names = ["max_tokens", "steps", "tasks_per_step", "group_size"]
        names += ["learning_rate", "kl_every"]
        values = {name: getattr(preset, name) for name in names}
        given = {name: value for name, value in overrides.items() if value is not None}
        return cls(**{**values, **given})

    @property
    def rollouts_per_step(self) -> int:
        """Tasks times group size."""
        return self.tasks_per_step * self.group_size

    def measures_kl(self, step: int) -> bool:
        """Whether a step measures the KL to the base model; steps count from 1."""
        return self.kl_every > 0 and step % self.kl_every == 0

    @property
    def kl_rollouts(self) -> int:
        """Most rollouts that the whole run reads once more with the base model."""
        measured = self.steps // self.kl_every if self.kl_every else 0
        held = self.steps if self.kl_coefficient else 0
        return (measured + held) * self.rollouts_per_step

    @property
    def sampling(self) -> SamplingSettings:
        """How training rollouts are sampled."""
        return SamplingSettings(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
        )

    @property
    def adam(self) -> AdamParams:
        """The optimizer's parameters as the SDK takes them."""
        return AdamParams(
            learning_rate=self.learning_rate,
            beta1=self.beta1,
            beta2=self.beta2,
            eps=self.eps,
            grad_clip_norm=self.grad_clip_norm,
        )


# -- one step ---------------------------------------------------------------------


@dataclass(frozen=True)
class StepResult:
    """One finished training step.

    Attributes:
        metrics: The row that was written.
        runs: The step's HUD runs, task by task.
        records: The same as rows of ``rollouts.jsonl``.
        datums: What was trained on; empty without signal.
        logprobs: For each datum, forward_backward's log-probabilities, aligned with
            its targets.
    """

    metrics: StepMetrics
    runs: tuple[Run, ...]
    records: tuple[RolloutRecord, ...]
    datums: tuple[Datum, ...]
    logprobs: tuple[np.ndarray, ...] = ()

    @property
    def updated(self) -> bool:
        """Whether the weights changed."""
        return self.metrics.updated

    @property
    def max_ratio_error(self) -> float | None:
        """Largest ``|ratio - 1|`` over trained tokens, by forward_backward.

        On-policy it is near 0. None without an update.
        """
        return self.metrics.max_ratio_error

    @property
    def reason(self) -> str | None:
        """Why the weights did not change, or None."""
        return None if self.updated else self.metrics.note


async def _to_the_end(coroutine: Coroutine[Any, Any, T]) -> T:
    """Await something that must not be left half done.

    When the caller is cancelled, as an interrupted notebook cell is, the work still
    finishes before the cancellation goes on.
    """
    task = asyncio.ensure_future(coroutine)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # seen; the cancellation is what the caller hears of
        raise


@dataclass
class _Clock:
    """Wall time of a step's parts, in seconds."""

    started: float = field(default_factory=time.perf_counter)
    rollouts: float = 0.0
    sampling: float = 0.0
    training: float = 0.0

    @contextlib.contextmanager
    def on(self, part: Literal["rollouts", "training"]) -> Iterator[None]:
        """What is done inside counts to a part."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            taken = time.perf_counter() - begun
            setattr(self, part, getattr(self, part) + taken)

    def split(self) -> dict[str, Any]:
        """The four parts and their sum.

        Sampling is the time with at least one completion in flight; HUD's is the rest
        of the rollout phase (what overlaps sampling costs nothing and counts there).
        """
        total = time.perf_counter() - self.started
        return {
            "seconds": total,
            "sampling_seconds": self.sampling,
            "training_seconds": self.training,
            "hud_seconds": self.rollouts - self.sampling,
            "other_seconds": total - self.rollouts - self.training,
        }


async def _update(
    session: TrainingSession, datums: list[Datum], config: TrainConfig
) -> tuple[float | None, tuple[np.ndarray, ...]]:
    """forward_backward and optim_step, as often as asked for.

    Returns:
        Loss and log-probabilities of the first forward_backward, which is the
        on-policy one; of no datums, None and none.
    """
    if not datums:
        return None, ()
    client = session.training_client
    tokens = sum(datum.model_input.length for datum in datums)
    # All of the updates or none: a step that the token limit cut short would change
    # the weights and leave no row.
    session.usage.require(config.updates_per_batch * tokens)
    outputs = []
    waiting = session.waits.operation("the update", polls=True)
    with waiting, explained(session.preset, training=True):
        for _ in range(config.updates_per_batch):
            backward = await client.forward_backward_async(
                datums, config.loss_fn, config.loss_fn_config
            )
            # Sent without waiting: the service runs a model's operations in order.
            optimizer = await client.optim_step_async(config.adam)
            outputs.append(await backward.result_async())
            await optimizer.result_async()
            session.updates += 1
    first = outputs[0]
    logprobs = tuple(o["logprobs"].to_numpy() for o in first.loss_fn_outputs)
    return first.metrics.get("loss:sum"), logprobs


def _ratio_error(
    datums: Sequence[Datum], logprobs: Sequence[np.ndarray]
) -> float | None:
    """Largest |exp(trainer's - sampler's log-probability) - 1| over trained tokens."""
    if not datums:
        return None
    worst = 0.0
    for datum, current in zip(datums, logprobs, strict=True):
        sampled = datum.loss_fn_inputs["logprobs"].to_numpy()
        trained = datum.loss_fn_inputs["advantages"].to_numpy() != 0
        gap = np.abs(np.expm1(current[trained] - sampled[trained]))
        worst = max(worst, float(gap.max(initial=0.0)))
    return worst


def _no_signal_note(records: Sequence[RolloutRecord], note: str | None) -> str:
    """Why no group has a spread, with the remedy that calibration would name."""
    verdict = verdict_of(records)
    advice = (
        "Change the tasks, or use larger groups."
        if verdict is None
        else f"{verdict.headline} {verdict.advice}"
    )
    return (
        "no update: every group is flat (all its rollouts earned the same reward). "
        + advice
        + (f" Also: {note}" if note else "")
    )


async def train_step(
    session: TrainingSession,
    tasks: Taskset | Sequence[Task],
    *,
    step: int = 1,
    config: TrainConfig | None = None,
    run_dir: str | Path | None = None,
    note: str | None = None,
) -> StepResult:
    """One GRPO step: sample groups from a fresh snapshot, grade, and update once.

    Without any reward spread nothing is sent to the trainer and the weights stay.

    Args:
        session: An open session.
        tasks: The step's tasks; each makes one group.
        step: The step's number, from 1; part of every rollout's seed.
        config: Settings; default: the preset's.
        run_dir: Where rows are written; default: a new folder under ``runs``.
        note: Remark for the metrics row.

    Returns:
        Metrics, runs, datums and the on-policy check.

    Raises:
        NoUpdate: No signal, under ``config.require_update``.
        RolloutFailed: A rollout failed; nothing was trained on.
        TokenLimitReached: The session's token limit would be passed.
    """
    config = config or TrainConfig.from_preset(session.preset)
    folder = make_run_dir(session, run_dir, "step")
    attempt = next_attempt(folder / "metrics.jsonl", step)
    return await _step(
        session,
        need_tasks(tasks, "train_step"),
        step=step,
        config=config,
        place=Place(folder, attempt),
        job_id=uuid.uuid4().hex,
        note=note,
    )


async def _step(
    session: TrainingSession,
    tasks: tuple[Task, ...],
    *,
    step: int,
    config: TrainConfig,
    place: Place,
    job_id: str,
    note: str | None,
    watch: Sequence[Task] = (),
    committed: Callable[[], None] = lambda: None,
) -> StepResult:
    clock, used = _Clock(), session.usage.counts
    # The name counts the updates behind the weights, as training checkpoints do.
    name = checkpoint_name("policy", step=step - 1, tag=place.tag)
    with clock.on("training"):
        sampler = await asyncio.to_thread(session.new_sampler, name)
    if watch:
        await _watch(session, sampler, watch, step - 1, place, config)
    plan = RolloutPlan(
        phase="train",
        step=step,
        seed=config.seed,
        group_size=config.group_size,
        settings=config.sampling,
        job_id=job_id,
    )
    idle, scale = sampler.clock.seconds, config.advantage_scale
    with clock.on("rollouts"):
        runs, records = await roll_out(
            session, sampler, tasks, plan=plan, place=place, scale=scale
        )
    clock.sampling = sampler.clock.seconds - idle
    datums, kept_groups = make_training_batch(runs, scale=scale)
    with clock.on("training"):
        kl = await measure_kl(session, runs) if config.measures_kl(step) else None
        if datums and config.kl_coefficient:
            datums = await add_kl_penalty(session, datums, config.kl_coefficient)

    async def commit() -> StepResult:
        """Update and record; both or neither."""
        with clock.on("training"):
            loss, logprobs = await _update(session, datums, config)
        spent = session.usage.counts - used
        trained = _trained_tokens(records) if datums else 0
        metrics = StepMetrics(
            run_id=place.run_id,
            step=step,
            attempt=place.attempt,
            snapshot=sampler.snapshot,
            kept_groups=kept_groups,
            datums=len(datums),
            updated=bool(datums),
            loss=loss,
            loss_per_token=loss / trained if loss is not None and trained else None,
            max_ratio_error=_ratio_error(datums, logprobs),
            kl=kl,
            note=note if datums else _no_signal_note(records, note),
            prefill_tokens=spent.prefill,
            sampled_tokens=spent.sampled,
            trained_tokens=trained,
            **_rollout_numbers(runs, records),
            **{name: getattr(config, name) for name in _RECORDED_SETTINGS},
            **clock.split(),
        )
        append_metrics(place.metrics, metrics)
        committed()
        return StepResult(metrics, tuple(runs), tuple(records), tuple(datums), logprobs)

    result = await _to_the_end(commit())
    if not result.updated and config.require_update:
        raise NoUpdate(f"step {step}: {result.reason}")
    return result


def _rollout_numbers(
    runs: Sequence[Run], records: Sequence[RolloutRecord]
) -> dict[str, Any]:
    """What the rollouts of a step say, before any update."""
    outcomes = [record.outcome for record in records]
    logprobs = [lp for run in runs for lp in check_run(run).output_logprobs]
    return {
        "reward_mean": fmean(record.reward for record in records),
        "within_group_std": within_group_reward_std(runs),
        "rollouts": len(runs),
        "valid_rollouts": len(records),
        "mean_output_tokens": fmean(record.output_tokens for record in records),
        "token_limit_share": fmean(record.token_limit for record in records),
        **{name: outcomes.count(name) for name in OUTCOMES},
        "entropy": 0.0 - sum(logprobs) / len(logprobs),
    }


def _trained_tokens(records: Sequence[RolloutRecord]) -> int:
    return sum(r.output_tokens for r in records if r.advantage is not None)


async def _watch(
    session: TrainingSession,
    sampler: PolicySampler,
    tasks: Sequence[Task],
    step: int,
    place: Place,
    config: TrainConfig,
) -> None:
    """Record greedy replies to fixed prompts, to read how the policy changes."""
    plan = RolloutPlan(
        phase="watch",
        step=step,
        seed=config.seed,
        group_size=1,
        settings=SamplingSettings.greedy(config.max_tokens),
        job_id=uuid.uuid4().hex,
    )
    await roll_out(session, sampler, tasks, plan=plan, place=place, file="watch.jsonl")


# -- the loop ---------------------------------------------------------------------


@dataclass(frozen=True)
class TrainResult:
    """A finished run.

    Attributes:
        run_dir: Where everything was written.
        metrics: One row per step of the whole run, resumed parts included.
        sampler: An open sampler on the final weights.
        state: The final training checkpoint, to resume from.
        seconds: Wall time of this call.
    """

    run_dir: Path
    metrics: tuple[StepMetrics, ...]
    sampler: PolicySampler
    state: str
    seconds: float

    @property
    def final_snapshot(self) -> str:
        """Path of the final sampler checkpoint."""
        return self.sampler.snapshot


@dataclass
class _Loop:
    """Where a run stands."""

    session: TrainingSession
    config: TrainConfig
    place: Place
    done: int = 0
    saved: int | None = None
    state: str = ""

    def mark_done(self) -> None:
        self.done += 1

    async def save(self, name: str | None = None) -> None:
        """Save a training checkpoint, then point resume.json at it."""
        label = name or checkpoint_name("state", step=self.done, tag=self.place.tag)
        self.state = await asyncio.to_thread(self.session.save_state, label)
        preset = self.session.preset
        write_resume_state(
            self.place.resume,
            ResumeState(
                run_id=self.place.run_id,
                next_step=self.done + 1,
                seed=self.config.seed,
                pool_position=self.done,
                checkpoint=self.state,
                base_model=preset.base_model,
                model=preset.name,
                attempt=self.place.attempt,
                config=dataclasses.asdict(self.config),
            ),
        )
        self.saved = self.done


async def train(
    session: TrainingSession,
    pool: TaskPool | Taskset | Sequence[Task],
    *,
    config: TrainConfig | None = None,
    run_dir: str | Path | None = None,
    resume: bool = False,
    watch: Taskset | Sequence[Task] = (),
    on_step: Callable[[StepResult], Awaitable[None] | None] | None = None,
    progress: bool = True,
) -> TrainResult:
    """Run ``config.steps`` training steps, with metrics and checkpoints.

    Interrupting is safe: the step in progress is either finished and recorded, or
    leaves no trace in the weights, and a training checkpoint is saved. The same call
    with ``resume=True`` then goes on with the next step.

    Args:
        session: An open session.
        pool: Training tasks: a ``TaskPool``, or tasks to make one of. For one fixed
            set of tasks at every step give a ``TaskPool(…, fixed=True)``.
        config: Settings; default: the preset's.
        run_dir: The run's folder; default: a new one under ``runs``. Needed to resume.
        resume: Continue the run in ``run_dir``. Without a checkpoint there, start.
        watch: Tasks answered greedily every ``config.watch_every`` steps, into
            ``watch.jsonl``.
        on_step: Called with each step's result; may be a coroutine function. What it
            raises stops the run, which can be resumed.
        progress: Show a text progress bar.

    Raises:
        ValueError: ``run_dir`` holds a run and ``resume`` is False, or settings that
            a resume must keep have changed.
        CheckpointError: The run's checkpoint is of another base model, or gone.
        NoUpdate, RolloutFailed, TokenLimitReached: As :func:`train_step`.

    Example:
        >>> result = await train(session, tasks, run_dir="runs/a")  # doctest: +SKIP
    """
    started = time.perf_counter()
    config = config or TrainConfig.from_preset(session.preset)
    if resume and run_dir is None:
        raise ValueError("resume=True needs run_dir, the folder of the run to continue")
    tasks = _as_pool(pool, config)
    folder = make_run_dir(session, run_dir, "train")
    loop = await _begin(session, config, folder, resume=resume)
    bar = tqdm(
        total=config.steps,
        initial=loop.done,
        desc="training",
        unit="step",
        file=sys.stdout,
        disable=not progress,
    )
    try:
        with bar, session.waits.shown_by(_in_bar(bar)):
            await _run_steps(loop, tasks, tuple(watch), on_step, bar)
    except BaseException as error:
        await _save_after(loop, error)
        raise
    tag = loop.place.tag
    await _to_the_end(loop.save(checkpoint_name("final-state", tag=tag)))
    final = checkpoint_name("final", tag=tag)
    sampler = await asyncio.to_thread(session.new_sampler, final)
    if tuple(watch):
        await _watch(session, sampler, tuple(watch), loop.done, loop.place, config)
    return TrainResult(
        run_dir=folder,
        metrics=tuple(read_metrics(loop.place.metrics)),
        sampler=sampler,
        state=loop.state,
        seconds=time.perf_counter() - started,
    )


def _in_bar(bar: tqdm[Any]) -> Callable[[str | None], None]:
    """Shows a wait behind the progress bar, in place of what it says otherwise."""
    usual: str | None = None
    waiting = False

    def show(wait: str | None) -> None:
        nonlocal usual, waiting
        if not waiting:
            usual = getattr(bar, "postfix", None)  # a disabled bar has none
        waiting = wait is not None
        bar.set_postfix_str(wait or usual or "")

    return show


def _as_pool(
    pool: TaskPool | Taskset | Sequence[Task], config: TrainConfig
) -> TaskPool:
    if not isinstance(pool, TaskPool):
        return TaskPool(
            tuple(pool), tasks_per_step=config.tasks_per_step, seed=config.seed
        )
    if pool.tasks_per_step != config.tasks_per_step:
        raise ValueError(
            f"the task pool serves {pool.tasks_per_step} tasks a step, but the config "
            f"has tasks_per_step={config.tasks_per_step}; make them equal"
        )
    return pool


async def _begin(
    session: TrainingSession, config: TrainConfig, folder: Path, *, resume: bool
) -> _Loop:
    """Start a run, or take it up where its last checkpoint stands."""
    place = Place(folder)
    if resume and place.resume.exists():
        state = read_resume_state(place.resume)
        _check_resumable(state, session, config, place)
        await asyncio.to_thread(session.resume, state.checkpoint)
        session.updates = state.next_step - 1
        attempt = max(state.attempt + 1, next_attempt(place.metrics, state.next_step))
        done = state.next_step - 1
        # Taken at once: a try that dies before its first row would else leave its
        # number, and so the names of its snapshots, to the next.
        taken = dataclasses.replace(state, attempt=attempt)
        write_resume_state(place.resume, taken)
        return _Loop(
            session,
            config,
            Place(folder, attempt),
            done=done,
            saved=done,
            state=state.checkpoint,
        )
    if not resume and (place.metrics.exists() or place.resume.exists()):
        raise ValueError(
            f"{folder} already holds a run; pass resume=True to continue it, or "
            "another run_dir to start a new one"
        )
    if session.updates:
        # A run's step 1 starts from fresh weights, whatever was tried before it.
        print(f"Leaving {session.updates} earlier updates behind: fresh weights.")
        await asyncio.to_thread(session.new_policy)
    return _Loop(session, config, Place(folder, next_attempt(place.metrics, 1)))


def _check_resumable(
    state: ResumeState, session: TrainingSession, config: TrainConfig, place: Place
) -> None:
    """Refuse to continue a run as another one; nothing was sent yet."""
    if state.base_model != session.preset.base_model:
        raise CheckpointError(
            f"the run in {place.run_dir} trains base model {state.base_model!r}, and "
            f"this session runs {session.preset.base_model!r}; connect with "
            f"model={state.model!r} to resume it, or start a new run"
        )
    # These decide which tasks and rollouts a step gets.
    for name in ("seed", "tasks_per_step", "group_size"):
        then, now = state.config.get(name), getattr(config, name)
        if then is not None and then != now:
            raise ValueError(
                f"the run in {place.run_dir} has {name}={then}, and the config now "
                f"says {now}; resume with {name}={then}, or start a new run"
            )


async def _run_steps(
    loop: _Loop,
    pool: TaskPool,
    watch: tuple[Task, ...],
    on_step: Callable[[StepResult], Awaitable[None] | None] | None,
    bar: tqdm[Any],
) -> None:
    config, job_id = loop.config, uuid.uuid4().hex
    while loop.done < config.steps:
        served = pool.tasks_for_step(loop.done)
        look = watch if loop.done % config.watch_every == 0 else ()
        result = await _step(
            loop.session,
            served.tasks,
            step=loop.done + 1,
            config=config,
            place=loop.place,
            job_id=job_id,
            note=served.notice,
            watch=look,
            committed=loop.mark_done,
        )
        bar.set_postfix_str(f"reward {result.metrics.reward_mean:.2f}", refresh=False)
        bar.update()
        if loop.done % config.checkpoint_every == 0 and loop.done < config.steps:
            await _to_the_end(loop.save())
        if on_step is not None:
            answer = on_step(result)
            if inspect.isawaitable(answer):
                await answer


async def _save_after(loop: _Loop, error: BaseException) -> None:
    """Save what was done before an error or interrupt goes on its way."""
    if loop.done == 0 or loop.saved == loop.done:
        return
    try:
        await _to_the_end(loop.save())
    except Exception as second:
        error.add_note(
            f"the state after step {loop.done} could not be saved either ({second}); "
            "a resume goes back to the last checkpoint"
        )
