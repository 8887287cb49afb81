"""Whether a task of one's own is ready to be trained on, before anything is spent.

:func:`check_tasks` starts every task once and grades labelled replies, through HUD and
without any model: no token is used. What it cannot know is whether the policy has
anything to learn; that takes a calibration, which :func:`check_signal` reads.

Each check is a plain function that returns one :class:`ReadinessCheck`; a
:class:`Readiness` shows them as a table.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mcp.types as mcp_types
from hud.agents.base import Agent
from hud.agents.types import AgentConfig
from hud.eval import HUDRuntime, Shared, Task, Taskset
from hud.eval.run import Run, rollout

from rlhelpers.advantages import finite_reward
from rlhelpers.calibration import summarize_groups
from rlhelpers.metrics import RolloutRecord
from rlhelpers.models import ModelPreset
from rlhelpers.sampling import render_prompt
from rlhelpers.tasks import LoadedTasks, content_key, split_taskset

if TYPE_CHECKING:
    from hud.eval import Provider
    from transformers import PreTrainedTokenizerBase

#: Tasks started at the same time; an environment hosted by HUD is asked for few.
_AT_ONCE, _AT_ONCE_HOSTED = 64, 4


class NotReady(ValueError):
    """A task of one's own fails a check; the message says which, and the remedy."""


@dataclass(frozen=True)
class ReadinessCheck:
    """One check before spending.

    Attributes:
        name: What has to hold, in a few words.
        passed: Whether it does.
        seen: The numbers behind it.
        remedy: What to do; empty if it passed.
    """

    name: str
    passed: bool
    seen: str
    remedy: str = ""

    def __str__(self) -> str:
        mark = "✓" if self.passed else "✗"
        return f"{mark} {self.name}: {self.seen}" + (
            f". {self.remedy}" if self.remedy else ""
        )


@dataclass(frozen=True)
class Readiness:
    """Checks of one set of tasks; shows itself as a table."""

    checks: tuple[ReadinessCheck, ...]

    @property
    def ready(self) -> bool:
        """Whether every check passed."""
        return all(check.passed for check in self.checks)

    def and_also(self, *checks: ReadinessCheck) -> Readiness:
        """The same with further checks, such as that of a calibration."""
        return Readiness((*self.checks, *checks))

    def require(self) -> None:
        """Do nothing if every check passed.

        Raises:
            NotReady: Names each check that failed, with its remedy.
        """
        failed = [str(check)[2:] for check in self.checks if not check.passed]
        if failed:
            raise NotReady("; ".join(failed))

    def to_markdown(self) -> str:
        """The table in Markdown."""
        rows = [
            f"| {'✓' if check.passed else '✗'} | {check.name} | {check.seen} "
            f"| {check.remedy} |"
            for check in self.checks
        ]
        return "\n".join(
            ["| | check | seen | what to do |", "|---|---|---|---|", *rows]
        )

    def _repr_markdown_(self) -> str:
        return self.to_markdown()

    def __str__(self) -> str:
        return "\n".join(map(str, self.checks))


# Labelled replies


@dataclass(frozen=True)
class LabelledReply:
    """A reply to one task, and the reward that people agree it should earn.

    Attributes:
        task: The task's slug.
        reply: What a policy might write; may be empty.
        least, most: The reward lies between them, both included.
        why: What the row is there to show.
    """

    task: str
    reply: str
    least: float
    most: float
    why: str = ""


def read_labelled_replies(path: str | Path) -> list[LabelledReply]:
    """Read labelled replies, one JSON object a line.

    A row holds ``task`` (a slug), ``reply``, ``reward`` (a number, or ``[least,
    most]``) and ``why``.

    Raises:
        FileNotFoundError: No such file.
        ValueError: A line is no such row; the message gives its number.
    """
    rows = []
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append(_labelled(json.loads(line)))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}, line {number} is no labelled reply ({error!r}); a row is "
                '{"task": slug, "reply": text, "reward": number or [least, most], '
                '"why": text}'
            ) from error
    return rows


def _labelled(row: dict[str, Any]) -> LabelledReply:
    reward = row["reward"]
    least, most = reward if isinstance(reward, list) else (reward, reward)
    return LabelledReply(
        task=str(row["task"]),
        reply=str(row["reply"]),
        least=finite_reward(least, "least"),
        most=finite_reward(most, "most"),
        why=str(row.get("why", "")),
    )


# Grading without a model


@dataclass(frozen=True)
class GradedReply:
    """A reply that no model wrote, graded by its task's own grader.

    Attributes:
        task: The task's slug.
        reply: The text that was graded.
        turns: The prompt's turns as (role, text); None where it is no text.
        tools: Names of what the environment offers beside the prompt, such as a shell.
        reward: What it earned, or None if it could not be graded.
        error: Why not, or None.
    """

    task: str
    reply: str
    turns: tuple[tuple[str, str | None], ...]
    tools: tuple[str, ...]
    reward: float | None
    error: str | None


class _Scripted(Agent[AgentConfig]):
    """Gives a fixed reply, and notes what it was asked and offered."""

    def __init__(self, reply: str) -> None:
        super().__init__(AgentConfig(model_name="scripted"))
        self.reply = reply
        self.turns: tuple[tuple[str, str | None], ...] = ()
        self.tools: tuple[str, ...] = ()

    async def __call__(self, run: Run) -> None:
        self.turns = tuple((turn.role, _text(turn)) for turn in run.prompt_messages)
        manifest = run.client.manifest
        if manifest is not None:
            self.tools = tuple(tool.name for tool in manifest.bindings)
        run.trace.content = self.reply


def _text(turn: mcp_types.PromptMessage) -> str | None:
    content = turn.content
    return content.text if isinstance(content, mcp_types.TextContent) else None


async def grade_replies(
    runtime: Provider, replies: Sequence[tuple[Task, str]]
) -> list[GradedReply]:
    """Grade texts by their tasks' own grader, through HUD and without a model.

    Args:
        runtime: Where the tasks run, such as ``load_tasks(…).runtime``.
        replies: (task, text) pairs.

    Returns:
        One result a pair, in the same order. A task that does not start or a grader
        that fails is a result with an ``error``, not an exception.
    """
    job_id = uuid.uuid4().hex
    width = _AT_ONCE_HOSTED if isinstance(runtime, HUDRuntime) else _AT_ONCE
    async with Shared(runtime, width=width) as shared:

        async def grade(task: Task, reply: str) -> GradedReply:
            agent = _Scripted(reply)
            run = await rollout(task, agent, runtime=shared, job_id=job_id)
            reward, error = _reward(run)
            return GradedReply(
                task.slug, reply, agent.turns, agent.tools, reward, error
            )

        with _failures_unlogged():
            return list(await asyncio.gather(*(grade(*pair) for pair in replies)))


@contextlib.contextmanager
def _failures_unlogged() -> Iterator[None]:
    """Keep HUD's log of failed rollouts out: each is a result here, with its error."""
    loggers = [logging.getLogger(name) for name in ("hud.eval.run", "hud.environment")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _reward(run: Run) -> tuple[float | None, str | None]:
    if run.trace.status != "completed":
        return None, str(run.trace.error or f"it ended with {run.trace.status!r}")
    if run.grade.is_error:
        return None, str(run.grade.content or "it could not be graded")
    try:
        return finite_reward(run.grade.reward, "the reward"), None
    except ValueError as error:
        return None, str(error)


# The checks


async def check_tasks(
    loaded: LoadedTasks,
    *,
    tasks_per_step: int,
    held_out: int,
    calibration: int = 6,
    samples: Sequence[LabelledReply] = (),
    tokenizer: PreTrainedTokenizerBase | None = None,
    preset: ModelPreset | None = None,
    max_tokens: int | None = None,
    seed: int = 0,
) -> Readiness:
    """Check tasks of one's own before anything is spent on them.

    Every task is started once, and an empty reply to it graded. No model is asked.

    Args:
        loaded: What :func:`~rlhelpers.tasks.load_tasks` returns.
        tasks_per_step, held_out, calibration: How many tasks each phase takes.
        samples: Labelled replies, at least one that earns much and one that earns
            little.
        tokenizer, preset: Of the model to be trained; with both, the longest prompt
            is held against the model's context.
        max_tokens: Longest reply; default: the preset's.
        seed: Of the split.

    Returns:
        The checks, in the order in which to repair them.
    """
    tasks = list(loaded.taskset)
    empty = await grade_replies(loaded.runtime, [(task, "") for task in tasks])
    checks = [
        check_one_turn(empty),
        check_count(
            loaded.taskset,
            tasks_per_step=tasks_per_step,
            held_out=held_out,
            calibration=calibration,
        ),
        check_sides(loaded.taskset, empty, held_out=held_out, seed=seed),
    ]
    if tokenizer is not None and preset is not None:
        longest = preset.max_tokens if max_tokens is None else max_tokens
        checks.append(check_prompts(empty, tokenizer, preset, longest))
    by_slug = {task.slug: task for task in tasks}
    known = [sample for sample in samples if sample.task in by_slug]
    # Graded twice: a reward must not depend on what was graded before.
    pairs = [(by_slug[sample.task], sample.reply) for sample in known]
    graded = await grade_replies(loaded.runtime, [*pairs, *pairs])
    checks.append(check_grader(samples, graded, empty))
    return Readiness(tuple(checks))


def check_one_turn(probes: Sequence[GradedReply]) -> ReadinessCheck:
    """The one-turn agent is given a text and answers once: no tools, no pictures.

    Args:
        probes: Each task, started once.
    """
    name = "one turn, text only"
    silent = [p for p in probes if not p.turns]
    if silent:
        first = silent[0]
        return ReadinessCheck(
            name,
            False,
            f"{len(silent)} of {len(probes)} tasks did not start, such as "
            f"{first.task} ({_short(first.error)})",
            "Correct the environment, or the row's args",
        )
    for probe in probes:
        if probe.tools:
            return ReadinessCheck(
                name,
                False,
                f"{probe.task} offers {', '.join(probe.tools)}, which takes several "
                "turns",
                "PolicyAgent answers once: use an agent that records every turn, such "
                "as EpisodeAgent",
            )
        if any(text is None for _, text in probe.turns):
            return ReadinessCheck(
                name,
                False,
                f"the prompt of {probe.task} holds more than text",
                "Use an agent for such content, or put it into words",
            )
        if not any((text or "").strip() for _, text in probe.turns):
            return ReadinessCheck(
                name, False, f"the prompt of {probe.task} is empty", "Yield a prompt"
            )
    return ReadinessCheck(name, True, f"{len(probes)} tasks started, no tools")


def check_count(
    taskset: Taskset, *, tasks_per_step: int, held_out: int, calibration: int
) -> ReadinessCheck:
    """There are tasks for calibration, for a training step and for evaluation.

    Tasks with the same content count once.
    """
    different = len({content_key(task) for task in taskset})
    training = different - held_out
    needed = held_out + max(tasks_per_step, calibration)
    wanted = (
        f"a step takes {tasks_per_step}, calibration {calibration}, and {held_out} are "
        "held out"
    )
    if different < needed:
        return ReadinessCheck(
            "enough tasks",
            False,
            f"{different} different tasks; {wanted}: together {needed}",
            f"Add {needed - different} tasks, or hold fewer out",
        )
    return ReadinessCheck(
        "enough tasks",
        True,
        f"{different} different tasks, {training} to train on: {wanted}; a task comes "
        f"again after {training // tasks_per_step} steps",
    )


def check_sides(
    taskset: Taskset, probes: Sequence[GradedReply], *, held_out: int, seed: int
) -> ReadinessCheck:
    """The split gives the same sides again, and no prompt stands on both.

    Different arguments can make one and the same prompt; a held-out score on such a
    task measures memory.

    Args:
        taskset: All tasks.
        probes: Each of them, started once.
        held_out, seed: Of the split.
    """
    name = "sides apart"
    try:
        training, held = split_taskset(taskset, held_out=held_out, seed=seed)
        again = split_taskset(taskset, held_out=held_out, seed=seed)
    except ValueError:
        return ReadinessCheck(name, False, "too few tasks to split", "See enough tasks")
    sides = [[task.slug for task in side] for side in (training, held)]
    repeats = sides == [[task.slug for task in side] for side in again]
    prompts = {probe.task: probe.turns for probe in probes if probe.turns}
    seen = {prompts.get(slug) for slug in sides[0]} - {None}
    leaks = [slug for slug in sides[1] if prompts.get(slug) in seen]
    if leaks:
        return ReadinessCheck(
            name,
            False,
            f"{len(leaks)} held-out prompts are trained on too, such as that of "
            f"{leaks[0]}",
            "Leave tasks out until every prompt differs",
        )
    return ReadinessCheck(
        name,
        repeats,
        f"{len(sides[0])} to train on, {len(sides[1])} held out, no prompt on both; "
        f"the same again with seed {seed}",
    )


def check_prompts(
    probes: Sequence[GradedReply],
    tokenizer: PreTrainedTokenizerBase,
    preset: ModelPreset,
    max_tokens: int,
) -> ReadinessCheck:
    """The longest prompt and the longest reply fit the model's context."""
    name = "prompts fit"
    lengths = {
        probe.task: len(
            render_prompt(
                tokenizer,
                preset,
                [{"role": role, "content": text or ""} for role, text in probe.turns],
            )
        )
        for probe in probes
        if probe.turns
    }
    if not lengths:
        return ReadinessCheck(name, False, "no prompt to measure", "See one turn")
    slug = max(lengths, key=lambda task: lengths[task])
    seen = (
        f"longest prompt {lengths[slug]} tokens + reply {max_tokens}, context "
        f"{preset.context}"
    )
    if lengths[slug] + max_tokens > preset.context:
        return ReadinessCheck(
            name, False, f"{seen} ({slug})", "Shorten the prompt, or lower max_tokens"
        )
    return ReadinessCheck(name, True, seen)


def check_grader(
    samples: Sequence[LabelledReply],
    graded: Sequence[GradedReply],
    empty: Sequence[GradedReply],
) -> ReadinessCheck:
    """The grader pays what people said it should, the same again, and never nothing.

    Args:
        samples: Labelled replies.
        graded: Those whose task is known, in this order, each graded twice: first all
            of them, then all again.
        empty: An empty reply to every task.
    """
    name = "grader as labelled"
    if problem := _unfit_samples(samples, graded):
        return ReadinessCheck(name, False, *problem)
    if failed := [g for g in (*empty, *graded) if g.error is not None]:
        first = failed[0]
        return ReadinessCheck(
            name,
            False,
            f"no reward for {first.reply!r:.40} to {first.task}: {_short(first.error)}",
            "A grader returns a finite number for every text, also an empty one",
        )
    rewards = [g.reward or 0.0 for g in graded]
    first_time, second_time = rewards[: len(samples)], rewards[len(samples) :]
    for sample, paid in zip(samples, first_time, strict=True):
        if not sample.least - 1e-9 <= paid <= sample.most + 1e-9:
            return ReadinessCheck(
                name,
                False,
                f"{paid:.3g} for {sample.reply!r:.40} to {sample.task}; labelled "
                f"{sample.least:g} to {sample.most:g}"
                + (f" ({sample.why})" if sample.why else ""),
                "Correct the grader, or the label if people do not agree on it",
            )
    if first_time != second_time:
        return ReadinessCheck(
            name,
            False,
            "the same reply earned something else the second time",
            "Take chance and memory out of the grader",
        )
    return ReadinessCheck(
        name,
        True,
        f"{len(samples)} of {len(samples)} labelled replies, each graded twice; an "
        f"empty reply earns at most {max(g.reward or 0.0 for g in empty):g}",
    )


def _unfit_samples(
    samples: Sequence[LabelledReply], graded: Sequence[GradedReply]
) -> tuple[str, str] | None:
    """What makes labelled replies useless, and the remedy; None if they are fit."""
    if 2 * len(samples) != len(graded):
        known = {g.task for g in graded}
        lost = next(sample.task for sample in samples if sample.task not in known)
        return f"no task {lost!r}", "Label replies to tasks of this file, by slug"
    best = max((sample.least for sample in samples), default=0.0)
    if not any(sample.most < best for sample in samples):
        return (
            f"{len(samples)} labelled replies, none worse than another",
            "Label a dozen replies, good and bad, before you trust a grader",
        )
    return None


def check_signal(records: Iterable[RolloutRecord]) -> ReadinessCheck:
    """A calibration's groups differ in reward: there is something to learn from.

    Works for any reward; tasks with outcome classes have the more telling
    :func:`~rlhelpers.analysis.calibration_verdict`.

    Args:
        records: Rollouts of a calibration, several of each task.

    Raises:
        ValueError: There are none.
    """
    rollouts = list(records)
    groups = summarize_groups(rollouts)
    cut = sum(record.token_limit for record in rollouts)
    seen = (
        f"{groups.kept} of {groups.groups} groups have a reward spread; mean reward "
        f"{groups.reward_mean:.2f}, within-group spread {groups.within_group_std:.2f}, "
        f"{cut} of {len(rollouts)} replies cut off"
    )
    if groups.kept:
        return ReadinessCheck("calibration shows signal", True, seen)
    rewards = {record.reward for record in rollouts}
    if 2 * cut >= len(rollouts):
        remedy = "Raise max_tokens, and calibrate again"
    elif len(rewards) == 1:
        remedy = (
            "Every reply earns the same: read the texts, then pay for a step on the "
            "way, show a worked example in the prompt, or choose other tasks"
        )
    else:
        remedy = "Draw more tasks or larger groups: each task's replies earn the same"
    return ReadinessCheck("calibration shows signal", False, seen, remedy)


def _short(text: str | None, width: int = 160) -> str:
    words = " ".join((text or "no reason was given").split())
    return words if len(words) <= width else words[: width - 1] + "…"
