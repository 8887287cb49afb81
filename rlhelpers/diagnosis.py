"""What looks wrong in a run, and where to look first.

:func:`diagnose` reads the files that a run left (``metrics.jsonl``,
``rollouts.jsonl``, ``resume.json``) and changes nothing. Each check is one function
with its threshold beside it; the checks come in the order in which one debugs: the
reward and the inputs, then the environment, the parameters, and last the framework.

Trends compare the first with the last steps of a run, :data:`WINDOW` each. Groups, and
not rollouts, are what is counted where chance matters: rollouts of one prompt are much
alike, so a step of 64 rollouts in 8 groups says hardly more than 8 answers.

Example:
    >>> print(diagnose("runs/full-run-…"))  # doctest: +SKIP
    Nothing looks wrong: 30 steps, 1,920 training rollouts, 11 checks.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

from rlhelpers.advantages import FLAT_SPREAD, sample_std
from rlhelpers.analysis import calibration_verdict, exact_mcnemar
from rlhelpers.metrics import (
    DamagedFile,
    DamagedLine,
    ResumeState,
    RolloutRecord,
    StepMetrics,
    latest_step,
    read_resume_state,
    salvage_metrics,
    salvage_rollouts,
)

#: Where to look: what goes in (tasks, prompt, tokenizer), the environment and its
#: grader, the settings, or what lies between them (service, SDK, files).
Area = Literal["input", "environment", "parameters", "framework"]

#: Steps at either end of a run that a trend compares. One step is too noisy, because
#: each has other tasks.
WINDOW = 5
#: Fewer steps than this have no trend.
TREND_STEPS = 6
#: From this mean reward on, flat groups are mastery and not a fault.
MASTERED = 0.9


@dataclass(frozen=True)
class Finding:
    """One thing that looks wrong.

    Attributes:
        code: The check's short name, such as ``"flat_reward"``.
        area: Where to look first.
        headline: What looks wrong, in a few words.
        numbers: The figures behind it.
        advice: What to do about it.
    """

    code: str
    area: Area
    headline: str
    numbers: str
    advice: str

    def __str__(self) -> str:
        return (
            f"{self.headline}\n  seen: {self.numbers}\n"
            f"  look at: {self.area}. {self.advice}"
        )


@dataclass(frozen=True)
class RunFiles:
    """What a run left on disk, as far as it can be read.

    Attributes:
        run_dir: The run's folder.
        metrics: One row per finished step.
        rollouts: Every rollout, of all phases.
        state: What a resume needs, or None if no checkpoint was saved.
        damaged: Lines of the two files, and errors, that cannot be read.
        silent_seconds: Time since anything was written.
    """

    run_dir: Path
    metrics: tuple[StepMetrics, ...]
    rollouts: tuple[RolloutRecord, ...]
    state: ResumeState | None
    damaged: tuple[DamagedLine, ...]
    silent_seconds: float

    def phase(self, name: str) -> list[RolloutRecord]:
        """The rollouts of one phase, such as "train"."""
        return [record for record in self.rollouts if record.phase == name]

    @property
    def ends(self) -> tuple[tuple[StepMetrics, ...], tuple[StepMetrics, ...]] | None:
        """The first and the last steps; None where there are too few for a trend."""
        if len(self.metrics) < TREND_STEPS:
            return None
        size = min(WINDOW, len(self.metrics) // 2)
        return self.metrics[:size], self.metrics[-size:]

    @property
    def steps_planned(self) -> int | None:
        """Steps that the run was to take, or None if its files do not say."""
        steps = None if self.state is None else self.state.config.get("steps")
        return int(steps) if steps is not None else None


@dataclass(frozen=True)
class Diagnosis:
    """All findings of one run; a sequence of them that prints itself.

    Attributes:
        findings: What looks wrong, in the order in which to look; empty if nothing.
        steps, rollouts: How much was read: finished steps, training rollouts.
        checks: How many checks were made.
    """

    findings: tuple[Finding, ...]
    steps: int
    rollouts: int
    checks: int

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __len__(self) -> int:
        return len(self.findings)

    def __getitem__(self, index: int) -> Finding:
        return self.findings[index]

    @property
    def codes(self) -> tuple[str, ...]:
        """The findings' short names."""
        return tuple(finding.code for finding in self.findings)

    def __str__(self) -> str:
        read = (
            f"{self.steps} steps, {self.rollouts:,} training rollouts, "
            f"{self.checks} checks."
        )
        if not self.findings:
            return f"Nothing looks wrong: {read}"
        numbered = (f"{n}. {finding}" for n, finding in enumerate(self.findings, 1))
        count = f"{len(self)} finding" + ("s" if len(self) > 1 else "")
        return "\n".join([f"{count}: {read}", *numbered])

    def _repr_markdown_(self) -> str:
        head, *_ = str(self).split("\n")
        rows = [f"| {f.headline} | {f.numbers} | {f.area} | {f.advice} |" for f in self]
        table = ["", "| what | seen | look at | advice |", "|---|---|---|---|", *rows]
        return "\n".join([head, *(table if rows else [])])


def diagnose(run_dir: str | Path, *, now: float | None = None) -> Diagnosis:
    """Read a run's files and say what looks wrong, with the numbers.

    Args:
        run_dir: The run's folder, finished or not.
        now: Seconds since the epoch, to measure silence by; default: the clock.

    Returns:
        The findings, in the order in which to look; none for a healthy run.

    Raises:
        FileNotFoundError: The folder is not there, or holds nothing of a run.
    """
    run = read_run_files(run_dir, now=now)
    found = [finding for check in CHECKS if (finding := check(run)) is not None]
    return Diagnosis(
        findings=tuple(found),
        steps=len(run.metrics),
        rollouts=len(run.phase("train")),
        checks=len(CHECKS),
    )


def read_run_files(run_dir: str | Path, *, now: float | None = None) -> RunFiles:
    """Read what can be read of a run; arguments and errors as :func:`diagnose`."""
    folder = Path(run_dir)
    files = [folder / name for name in ("metrics.jsonl", "rollouts.jsonl")]
    written = [path.stat().st_mtime for path in files if path.is_file()]
    if not written:
        what = "holds no metrics.jsonl and no rollouts.jsonl"
        raise FileNotFoundError(
            f"{folder} {what if folder.is_dir() else 'does not exist'}; give the "
            "folder of one run, such as runs/full-run-…; a run writes its first rows "
            "when its first phase has ended"
        )
    metrics, damaged_metrics = salvage_metrics(files[0])
    rollouts, damaged_rollouts = salvage_rollouts(files[1])
    damaged = [*damaged_metrics, *damaged_rollouts]
    state = None
    try:
        state = read_resume_state(folder / "resume.json")
    except DamagedFile as error:
        damaged.append(DamagedLine(1, "", str(error)))
    except FileNotFoundError:
        pass
    return RunFiles(
        run_dir=folder,
        metrics=tuple(metrics),
        rollouts=tuple(rollouts),
        state=state,
        damaged=tuple(damaged),
        silent_seconds=(time.time() if now is None else now) - max(written),
    )


# Reward and input


def check_rewards(run: RunFiles) -> Finding | None:
    """Any reward that is missing or no finite number: one is enough for a NaN loss."""
    bad = [line for line in run.damaged if _has_bad_reward(line)]
    if not bad:
        return None
    return Finding(
        code="bad_reward",
        area="environment",
        headline="Some rewards are missing or not finite.",
        numbers=f"{len(bad)} in all, the first: {bad[0].error}",
        advice="The grader must pay a number for every reply: call it on empty, long "
        "and absurd replies, and fix what gives no number. Such a rollout is never "
        "trained on.",
    )


def _has_bad_reward(line: DamagedLine) -> bool:
    try:
        row: Any = json.loads(line.text)  # NaN and Infinity, which JSON has not, too
    except ValueError:
        return False
    if not isinstance(row, dict) or "rollout_index" not in row:
        return False
    reward = row.get("reward")
    if isinstance(reward, bool) or not isinstance(reward, int | float):
        return True
    return not math.isfinite(reward)


#: Share of groups with a spread under which a step teaches next to nothing. In the
#: first five steps of the default run 13 to 18 of 40 have one, over five seeds.
FEW_GROUPS = 0.25
#: Fewer groups than this say nothing about their share.
ENOUGH_GROUPS = 4


def check_flat_reward(run: RunFiles) -> Finding | None:
    """Hardly any group has a spread, at the start or, short of mastery, at the end."""
    records = run.phase("train") or run.phase("calibrate")
    steps = sorted({record.step for record in records})
    for place, chosen in (("first", steps[:WINDOW]), ("last", steps[-WINDOW:])):
        window = [record for record in records if record.step in chosen]
        spreads = [sample_std(rewards) for rewards in _groups(window)]
        kept = sum(spread >= FLAT_SPREAD for spread in spreads)
        if len(spreads) < ENOUGH_GROUPS or kept >= FEW_GROUPS * len(spreads):
            continue
        mean = fmean(record.reward for record in window)
        if place == "last" and mean > MASTERED:
            continue
        area, headline, advice = _why_flat(window, mean)
        return Finding(
            code="flat_reward",
            area=area,
            headline=f"Flat reward. {headline}",
            numbers=f"{kept} of {len(spreads)} groups of the {place} {len(chosen)} "
            f"steps have a spread, mean reward {mean:.2f}, "
            f"{sum(record.token_limit for record in window)} of {len(window)} replies "
            "cut off",
            advice=advice,
        )
    return None


def _groups(records: Sequence[RolloutRecord]) -> list[list[float]]:
    groups: dict[tuple[int, str], list[float]] = {}
    for record in records:
        groups.setdefault((record.step, record.task), []).append(record.reward)
    return list(groups.values())


def _why_flat(window: Sequence[RolloutRecord], mean: float) -> tuple[Area, str, str]:
    """Where to look, the cause, and the remedy, as a calibration would name them."""
    if all(record.outcome is not None for record in window):
        verdict = calibration_verdict(window)
        if not verdict.healthy:
            area: Area = "parameters" if verdict.code == "token_limit" else "input"
            return area, verdict.headline, verdict.advice
    elif 2 * sum(record.token_limit for record in window) >= len(window):
        return (
            "parameters",
            "Token limit first.",
            "Most replies were cut off: raise max_tokens and calibrate again.",
        )
    elif not 1 - MASTERED <= mean <= MASTERED:
        easy = mean > MASTERED
        return (
            "input",
            "Too easy." if easy else "Too hard.",
            f"Nearly every rollout earns {'the' if easy else 'no'} reward: choose "
            f"{'harder' if easy else 'easier'} tasks, or check that the grader reads "
            "what the model writes.",
        )
    return (
        "input",
        "Most tasks are all right or all wrong.",
        "Use larger groups, or tasks of a difficulty in between, and calibrate again.",
    )


#: Share of empty replies that is worth a look, and the fewest of them.
EMPTY_SHARE = 0.05
EMPTY_COUNT = 3


def check_empty_answers(run: RunFiles) -> Finding | None:
    """Replies without any text, which a grader can only fail."""
    empty = [record for record in run.rollouts if not record.text.strip()]
    if len(empty) < max(EMPTY_COUNT, EMPTY_SHARE * len(run.rollouts)):
        return None
    at_once = sum(record.output_tokens <= 1 for record in empty)
    cut = sum(record.token_limit for record in empty)
    return Finding(
        code="empty_answers",
        area="input",
        headline="Many replies are empty.",
        numbers=f"{len(empty)} of {len(run.rollouts)} rollouts; {at_once} of them "
        f"ended at once, {cut} were cut off",
        advice="Replies that end at once: check that the prompt is rendered once, "
        "with the model's own chat template, and that max_tokens is above 1. Cut off "
        "without text: a thinking block that never closes; switch thinking off or "
        "raise max_tokens.",
    )


#: Steps without an update, one after the other, that are more than bad luck.
STALLED_STEPS = 5


def check_no_update(run: RunFiles) -> Finding | None:
    """A stretch of steps that changed nothing although there was something to learn."""
    longest: list[StepMetrics] = []
    stretch: list[StepMetrics] = []
    for row in run.metrics:
        stalled = not row.updated and row.reward_mean <= MASTERED
        stretch = [*stretch, row] if stalled else []
        longest = max(longest, stretch, key=len)
    if len(longest) < STALLED_STEPS:
        return None
    return Finding(
        code="no_update",
        area="input",
        headline="Many steps in a row changed nothing.",
        numbers=f"steps {longest[0].step} to {longest[-1].step} had no group with a "
        f"spread, at a mean reward of {fmean(r.reward_mean for r in longest):.2f}",
        advice=f"The last of them says: {longest[-1].note or 'nothing'} Calibrate "
        "before you pay for more steps, and train with require_update.",
    )


# Environment


def check_failed_rollouts(run: RunFiles) -> Finding | None:
    """Rollouts that were asked for and are not there."""
    for row in run.metrics:
        if row.valid_rollouts < row.rollouts:
            return _failed(f"step {row.step}", row.valid_rollouts, row.rollouts)
    done = max((row.step for row in run.metrics), default=0)
    begun = [record for record in run.phase("train") if record.step > done]
    asked = _rollouts_per_step(run)
    if begun and asked is not None and len(begun) < asked:
        return _failed(f"step {begun[-1].step}", len(begun), asked)
    before = len(run.phase("before"))
    after = len(latest_step(run.phase("after")))
    if before and after and before != after:
        smaller = "before" if before < after else "after"
        return _failed(f"phase {smaller!r}", min(before, after), max(before, after))
    return None


def _failed(where: str, there: int, asked: int) -> Finding:
    return Finding(
        code="failed_rollouts",
        area="environment",
        headline="Rollouts failed.",
        numbers=f"{where} has {there} of {asked} rollouts",
        advice="The error that stopped the run names task and cause: an exception in "
        "the environment or grader, a refusal of the service, or the token limit. "
        "Repair that and resume; the step is run again as a whole.",
    )


def _rollouts_per_step(run: RunFiles) -> int | None:
    if run.metrics:
        return run.metrics[-1].rollouts
    config = {} if run.state is None else run.state.config
    tasks, size = config.get("tasks_per_step"), config.get("group_size")
    return int(tasks) * int(size) if tasks and size else None


# Parameters


#: How much larger the share of wrong integers among valid endings becomes.
WRONG_RISE = 0.10


def check_wrong_integers(run: RunFiles) -> Finding | None:
    """The form gets better while the answers get worse: an update that is too strong.

    Counted among replies with a valid ending, because a reply that was cut off before
    and ends on a wrong integer now is no loss. The rise also has to pass two standard
    errors, with one observation for each group.
    """
    if run.ends is None:
        return None
    first, last = map(_wrong_share, run.ends)
    invalid = [_share(rows, "invalid_final_line") for rows in run.ends]
    if first is None or last is None or invalid[1] > invalid[0]:
        return None
    pooled = (first + last) / 2
    groups = [_group_count(run, rows) for rows in run.ends]
    error = math.sqrt(pooled * (1 - pooled) * sum(1 / n for n in groups))
    if last - first < max(WRONG_RISE, 2 * error):
        return None
    rate = run.metrics[-1].learning_rate
    return Finding(
        code="wrong_integers_grow",
        area="parameters",
        headline="Endings become valid while the integers become wrong.",
        numbers=f"wrong integers among valid endings {first:.0%} → {last:.0%}, invalid "
        f"endings {invalid[0]:.0%} → {invalid[1]:.0%} of all, at a learning rate of "
        f"{rate:g}",
        advice="The updates overwrite what the model knew: start again from the last "
        "checkpoint before the rise, or from the base, at a third of the learning "
        "rate.",
    )


def _wrong_share(rows: Sequence[StepMetrics]) -> float | None:
    wrong = sum(row.wrong_integer for row in rows)
    valid = wrong + sum(row.correct for row in rows)
    return wrong / valid if valid else None


def _share(rows: Sequence[StepMetrics], outcome: str) -> float:
    total = sum(row.valid_rollouts for row in rows)
    return sum(getattr(row, outcome) for row in rows) / total if total else 0.0


def _group_count(run: RunFiles, rows: Sequence[StepMetrics]) -> int:
    """Groups in some steps; without their rollouts one per step, to be careful."""
    steps = {row.step for row in rows}
    window = [record for record in run.phase("train") if record.step in steps]
    return len(_groups(window)) or len(rows)


#: How likely so one-sided a change of held-out tasks would be by chance alone.
HELD_OUT_CHANCE = 0.01


def check_held_out(run: RunFiles) -> Finding | None:
    """The same held-out tasks, answered before and after training, earn less.

    An exact sign test on the tasks whose reward changed. Where the endings are
    repaired, what that gains hides what is lost; so the tasks that end validly on
    both sides are also judged alone: there, less reward is a wrong integer where a
    right one was. Held-out tasks tell of a loss that the training rollouts hide,
    because those are of other tasks at every step.
    """
    before = {record.task: record for record in run.phase("before")}
    after = latest_step(run.phase("after"))
    pairs = [(before[new.task], new) for new in after if new.task in before]
    ends = {"correct", "wrong_integer"}
    valid = [pair for pair in pairs if all(side.outcome in ends for side in pair)]
    which = {
        "Held-out tasks earn less than before training.": pairs,
        "Held-out tasks with a valid ending now end on wrong integers.": valid,
    }
    for headline, chosen in which.items():
        worse = sum(new.reward < old.reward for old, new in chosen)
        better = sum(new.reward > old.reward for old, new in chosen)
        chance = exact_mcnemar(worse, better)
        if worse > better and chance <= HELD_OUT_CHANCE:
            return _worse_held_out(run, headline, len(chosen), worse, better, chance)
    return None


def _worse_held_out(
    run: RunFiles, headline: str, tasks: int, worse: int, better: int, chance: float
) -> Finding:
    rate = f" at a learning rate of {run.metrics[-1].learning_rate:g}"
    return Finding(
        code="held_out_worse",
        area="parameters",
        headline=headline,
        numbers=f"of {tasks} tasks {worse} earn less and {better} more than before "
        f"(exact sign test, p = {chance:.2g})" + (rate if run.metrics else ""),
        advice="The updates overwrite what the model knew: evaluate earlier "
        "checkpoints, and start again from the best, or from the base, at a third of "
        "the learning rate.",
    )


#: KL to the base for a single update, in nats per reply, that is too much, and the
#: number of steps that must show it. At 0.08 a typical reply becomes 1.5 times as
#: probable or improbable, exp(√(2·KL)).
UPDATE_KL = 0.08
UPDATE_STEPS = 2


def check_update_size(run: RunFiles) -> Finding | None:
    """A single update moves the policy farther than one batch can answer for.

    A policy that u updates push the same way is u steps from its base, and its KL
    grows with the square of that: KL / u² is what one update does. Updates that turn
    back make it smaller, never larger. The KL is a mean over a step's rollouts, of a
    logarithm whose variance is about twice the KL where the two policies are near: two
    standard errors are taken off first, so that small steps prove nothing.
    """
    if not run.metrics or run.metrics[0].step != 1:
        return None  # how many updates went before is not in these files
    times = 1 if run.state is None else run.state.config.get("updates_per_batch") or 1
    updates = 0
    large: list[tuple[float, float, int, int]] = []  # for one, in all, updates, step
    for row in run.metrics:
        if updates and row.kl is not None and row.mean_output_tokens is not None:
            kl = max(0.0, row.kl * row.mean_output_tokens)
            least = kl - 2 * math.sqrt(2 * kl / max(1, row.valid_rollouts))
            if least >= UPDATE_KL * updates**2:
                large.append((least / updates**2, kl, updates, row.step))
        updates += int(times) * row.updated
    if len(large) < UPDATE_STEPS:
        return None
    least, kl, taken, step = max(large)
    return Finding(
        code="large_updates",
        area="parameters",
        headline="Each update moves the policy far.",
        numbers=f"step {step}, {taken} updates from the base: KL {kl:.2f} nats per "
        f"reply, at least {least:.2f} for each update; {UPDATE_KL:g} or more at "
        f"{len(large)} steps, at a learning rate of {run.metrics[-1].learning_rate:g}",
        advice="So large a step follows one batch's noise, and the policy swings "
        "instead of settling. Take a third of the learning rate, and evaluate held-out "
        "tasks before and after.",
    )


#: Entropy left, as a share of that at the start, which counts as collapse.
ENTROPY_LEFT = 0.2


def check_entropy(run: RunFiles) -> Finding | None:
    """Rollouts have become copies of each other before the task was learnt.

    Entropy falls in every run that learns. It is a fault where little of it is left,
    the reward is short of mastery, and too few groups have a spread to go on with.
    """
    if run.ends is None:
        return None
    first, last = (
        [row.entropy for row in rows if row.entropy is not None] for rows in run.ends
    )
    if not first or not last or fmean(last) > ENTROPY_LEFT * fmean(first):
        return None
    reward = fmean(row.reward_mean for row in run.ends[1])
    kept = sum(row.kept_groups for row in run.ends[1])
    groups = _group_count(run, run.ends[1])
    if reward > MASTERED or kept >= FEW_GROUPS * groups:
        return None
    return Finding(
        code="entropy_collapse",
        area="parameters",
        headline="Entropy collapsed: the rollouts of a group are nearly alike.",
        numbers=f"{fmean(first):.3f} → {fmean(last):.3f} nats per token, mean reward "
        f"{reward:.2f}, {kept} of {groups} groups kept in the last steps",
        advice="Lower the learning rate or take larger groups, and start again from "
        "an earlier checkpoint; this one explores no more.",
    )


#: How much longer replies become, without earning more.
LENGTH_RISE = 1.5
#: A rise in mean reward that pays for longer replies.
REWARD_RISE = 0.05
#: Share of replies cut off, after a rise in length, that is a fault whatever they earn.
CUT_OFF_SHARE = 0.25


def check_length(run: RunFiles) -> Finding | None:
    """Replies grow and grow, and earn no more for it or run into the limit."""
    if run.ends is None:
        return None
    lengths = [
        [row.mean_output_tokens for row in rows if row.mean_output_tokens is not None]
        for rows in run.ends
    ]
    if not all(lengths) or fmean(lengths[1]) < LENGTH_RISE * fmean(lengths[0]):
        return None
    rewards = [fmean(row.reward_mean for row in rows) for rows in run.ends]
    cut = [fmean(row.token_limit_share for row in rows) for rows in run.ends]
    if rewards[1] - rewards[0] >= REWARD_RISE and cut[1] < CUT_OFF_SHARE:
        return None
    return Finding(
        code="runaway_length",
        area="parameters",
        headline="Replies run away in length.",
        numbers=f"{fmean(lengths[0]):.0f} → {fmean(lengths[1]):.0f} tokens, cut off "
        f"{cut[0]:.0%} → {cut[1]:.0%}, mean reward {rewards[0]:.2f} → {rewards[1]:.2f}",
        advice="The loss sums over tokens, so long replies weigh more: lower the "
        "learning rate, lower max_tokens, or let the reward see the length.",
    )


#: Largest |ratio − 1| on policy. The local service computes sampling and training in
#: float32 and promises 1e-4. Elsewhere the two run in other kernels at lower precision,
#: where single rare tokens are off by tens of per cent.
LOCAL_RATIO_ERROR = 1e-3
REMOTE_RATIO_ERROR = 0.5


def check_ratios(run: RunFiles) -> Finding | None:
    """Sampler and trainer disagree about the probability of what was sampled."""
    local = run.state is None or run.state.base_model.startswith("local/")
    limit = LOCAL_RATIO_ERROR if local else REMOTE_RATIO_ERROR
    off = [row for row in run.metrics if (row.max_ratio_error or 0.0) > limit]
    if not off:
        return None
    worst = max(off, key=lambda row: row.max_ratio_error or 0.0)
    usual = (worst.temperature, worst.top_p) == (1.0, 1.0) and worst.top_k in (-1, 0)
    settings = f"temperature {worst.temperature:g}, top-p {worst.top_p:g}"
    return Finding(
        code="ratio_off",
        area="framework" if usual else "parameters",
        headline="Importance ratios are off 1 before the update.",
        numbers=f"{len(off)} of {len(run.metrics)} steps above {limit:g}; the largest "
        f"|ratio − 1| is {worst.max_ratio_error:.2g} in step {worst.step} ({settings}, "
        f"top-k {worst.top_k})",
        advice="One update per batch is on policy, so the ratio should be 1. "
        + (
            "Check that every step samples a snapshot saved after the last update, "
            "that model and tokenizer belong together, and the SDK's version."
            if usual
            else "Sample for training at temperature 1, top-p 1, top-k off."
        ),
    )


# Framework


#: Silence that is worth a word, in seconds, and in the run's usual steps.
SILENT_SECONDS = 300.0
SILENT_STEPS = 10


def check_silence(run: RunFiles) -> Finding | None:
    """A run that is not finished and has written nothing for long."""
    planned, done = run.steps_planned, len(run.metrics)
    if planned is None or done >= planned:
        return None
    usual = median(row.seconds for row in run.metrics) if run.metrics else 0.0
    if run.silent_seconds < max(SILENT_SECONDS, SILENT_STEPS * usual):
        return None
    limit = run.metrics[-1].max_tokens if run.metrics else None
    return Finding(
        code="silence",
        area="framework",
        headline="The run is not finished, and silent.",
        numbers=f"step {done} of {planned} is the last; nothing was written for "
        f"{run.silent_seconds / 60:.0f} minutes, and a step took {usual:.0f} s",
        advice="If its process still runs it is most likely sampling long replies "
        f"(max_tokens {limit}) or waiting for the service: look at its CPU use and at "
        "the service. If it has stopped, resume it.",
    )


def check_files(run: RunFiles) -> Finding | None:
    """Lines that cannot be read, other than those with a bad reward."""
    lines = [line for line in run.damaged if not _has_bad_reward(line)]
    if not lines:
        return None
    return Finding(
        code="damaged_file",
        area="framework",
        headline="Some of the run's files cannot be read whole.",
        numbers=f"{len(lines)} in all, the first: {lines[0].error}",
        advice="Was the disk full, or does another process write to this folder? "
        "Everything else here was judged without these lines.",
    )


#: All checks, in the order in which one looks.
CHECKS: tuple[Callable[[RunFiles], Finding | None], ...] = (
    check_rewards,
    check_flat_reward,
    check_empty_answers,
    check_no_update,
    check_failed_rollouts,
    check_wrong_integers,
    check_held_out,
    check_update_size,
    check_entropy,
    check_length,
    check_ratios,
    check_silence,
    check_files,
)
