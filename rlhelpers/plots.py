"""The course's plots, over the rows of :mod:`rlhelpers.metrics`.

Every function returns a figure and does not show it; it is already closed in pyplot,
so a cell that ends in the call leaves exactly one image. Colours are those of Okabe
and Ito (2008), which colour-blind readers can tell apart; one colour means one
outcome everywhere, and hatching marks the token limit, which overlaps the outcomes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator, PercentFormatter

from rlhelpers.analysis import (
    LABELS,
    OUTCOMES,
    OutcomeSummary,
    Rollout,
    records_by_task,
    summarize_outcomes,
    wilson_interval,
)
from rlhelpers.metrics import StepMetrics

#: One colour per meaning, in every plot and widget of the course.
COLORS: Mapping[str, str] = {
    "correct": "#009E73",
    "wrong_integer": "#D55E00",
    "invalid_final_line": "#E69F00",
    "token_limit": "#CC79A7",
    "reward": "#0072B2",
    "held_out": "#000000",
    "before": "#999999",
    "after": "#0072B2",
}

_STYLE: Any = {
    "figure.dpi": 100,
    "figure.constrained_layout.use": True,
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    "legend.frameon": False,
    "legend.fontsize": 9,
}


def plot_learning_curve(
    metrics: Sequence[StepMetrics],
    *,
    held_out: Mapping[int, float] | None = None,
    title: str | None = None,
) -> Figure:
    """Mean training reward per step, with the within-group spread as a band.

    The band is half the spread to each side. It shows how much the rollouts of one
    prompt still differ, which is what a group-relative update learns from; it is not
    an error bar.

    Args:
        metrics: Rows of ``metrics.jsonl``.
        held_out: Greedy held-out accuracy (0 to 1) after so many steps, e.g.
            ``{0: 0.77, 30: 1.0}``: the score that counts, drawn on top.
        title: Instead of the one that states the counts.
    """
    steps = _steps(metrics)
    reward = np.array([row.reward_mean for row in metrics])
    spread = np.array([row.within_group_std for row in metrics])
    with _style():
        figure, axes = plt.subplots(figsize=(8, 4))
        _reward_band(axes, steps, reward, spread)
        if held_out:
            axes.plot(
                list(held_out),
                list(held_out.values()),
                "D",
                color=COLORS["held_out"],
                markersize=7,
                label="held-out accuracy, greedy",
                zorder=5,
                clip_on=False,
            )
        _step_axis(axes, steps, start=min([*(held_out or ()), *steps]))
        axes.set(ylim=_reward_limits(reward), ylabel="mean reward")
        axes.set_title(title or f"Reward over {_counts(metrics)}")
        axes.legend(loc="lower right")
    return _finished(figure)


def plot_checkpoints(
    metrics: Sequence[StepMetrics], evaluations: Mapping[int, OutcomeSummary]
) -> Figure:
    """Held-out accuracy along the checkpoints of a run, over its training curve.

    Whiskers are 95 % Wilson intervals. All checkpoints answer the same tasks, so
    neighbours rise and fall together and differ by less than the whiskers suggest.

    Args:
        metrics: Rows of the run's ``metrics.jsonl``.
        evaluations: Steps taken → outcomes of the held-out tasks.

    Raises:
        ValueError: There is nothing to plot, or an evaluation has no tasks.
    """
    steps = _steps(metrics)
    taken = sorted(evaluations)
    summaries = [evaluations[step] for step in taken]
    if not summaries or not all(summary.n for summary in summaries):
        raise ValueError(
            "no evaluations to plot: evaluate each checkpoint on at least one task"
        )
    shares = np.array([summary.correct / summary.n for summary in summaries])
    bounds = np.array([wilson_interval(s.correct, s.n) for s in summaries])
    errors = np.abs(bounds - shares[:, None]).T
    reward = np.array([row.reward_mean for row in metrics])
    with _style():
        figure, axes = plt.subplots(figsize=(8, 4))
        axes.plot(
            steps,
            reward,
            color=_pale(COLORS["reward"]),
            label="training reward",
            **_line_style(steps),
        )
        axes.errorbar(
            taken,
            shares,
            yerr=errors,
            fmt="D",
            color=COLORS["held_out"],
            markersize=7,
            capsize=3,
            elinewidth=1.2,
            label="held-out accuracy, greedy (95 % interval)",
            zorder=5,
            clip_on=False,
        )
        _step_axis(axes, steps, start=min([*taken, *steps]))
        axes.set(ylim=_reward_limits(reward), ylabel="accuracy; mean reward")
        axes.set_title(_checkpoint_title(summaries))
        axes.legend(loc="lower right")
    return _finished(figure)


def _checkpoint_title(summaries: Sequence[OutcomeSummary]) -> str:
    tasks = sorted({summary.n for summary in summaries})
    counts = str(tasks[0]) if len(tasks) == 1 else f"{tasks[0]} to {tasks[-1]}"
    return f"{len(summaries)} evaluations along a run, each of {counts} held-out tasks"


def plot_training_dashboard(metrics: Sequence[StepMetrics]) -> Figure:
    """Six small panels: what to watch while a policy trains.

    Reward, groups with a signal, outcomes, reply length with limit hits, entropy,
    and the KL to the base model where it was measured, else the loss per trained
    token, which on-policy tells of length imbalance and never of progress.
    """
    steps = _steps(metrics)
    with _style():
        figure, panels = plt.subplots(2, 3, figsize=(11, 5.6))
        drawers: list[Callable[[Axes, np.ndarray, Sequence[StepMetrics]], None]] = [
            _reward_panel,
            _groups_panel,
            _outcomes_panel,
            _length_panel,
            _entropy_panel,
            _kl_or_loss_panel,
        ]
        for axes, draw in zip(panels.flat, drawers, strict=True):
            draw(axes, steps, metrics)
            _step_axis(axes, steps)
        figure.suptitle(f"Training: {_counts(metrics)}", fontsize=12)
    return _finished(figure)


def plot_outcomes(before: Iterable[Rollout], after: Iterable[Rollout]) -> Figure:
    """Outcome counts before and after training, side by side.

    The three outcomes add up to the number of tasks; the hatched bar counts the
    rollouts that hit the token limit, and overlaps them. Whiskers are 95 % Wilson
    intervals of each share.
    """
    summaries = {
        "before": summarize_outcomes(before),
        "after": summarize_outcomes(after),
    }
    keys = (*OUTCOMES, "token_limit")
    with _style():
        figure, axes = plt.subplots(figsize=(8, 4))
        for offset, (side, summary) in zip((-0.2, 0.2), summaries.items(), strict=True):
            _outcome_bars(axes, keys, offset, side, summary)
        axes.set_xticks(range(len(keys)), [LABELS[key] for key in keys])
        axes.tick_params(axis="x", length=0)
        axes.grid(axis="x", visible=False)
        axes.set_ylim(0, 1.12)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.set_ylabel("share of rollouts")
        axes.set_title(
            f"Outcomes on held-out tasks: {summaries['before'].n} before (pale), "
            f"{summaries['after'].n} after (full)"
        )
    return _finished(figure)


def plot_token_lengths(
    before_records: Iterable[Rollout],
    after_records: Iterable[Rollout],
    limit: int,
) -> Figure:
    """Distribution of reply lengths before and after, coloured by outcome.

    Args:
        before_records, after_records: Rollouts of the same tasks.
        limit: The token limit, drawn as a line.
    """
    sides = {"before": list(before_records), "after": list(after_records)}
    longest = max(
        [limit, *(r.output_tokens for rollouts in sides.values() for r in rollouts)]
    )
    bins = np.linspace(0, longest, 41)
    with _style():
        figure, panels = plt.subplots(2, 1, figsize=(8, 4.8), sharex=True, sharey=True)
        for axes, (side, rollouts) in zip(panels, sides.items(), strict=True):
            axes.hist(
                [
                    [r.output_tokens for r in rollouts if r.outcome == outcome]
                    for outcome in OUTCOMES
                ],
                bins=list(bins),
                stacked=True,
                color=[COLORS[outcome] for outcome in OUTCOMES],
                label=[LABELS[outcome] for outcome in OUTCOMES],
            )
            axes.axvline(limit, color=COLORS["token_limit"], linestyle="--")
            axes.set_ylabel("rollouts")
            axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
            axes.set_title(_length_title(side, rollouts))
        panels[0].annotate(
            f"limit: {limit} tokens",
            (limit, 1),
            xycoords=("data", "axes fraction"),
            xytext=(-5, -4),
            textcoords="offset points",
            ha="right",
            va="top",
            color="#8A3B66",
            fontsize=9,
        )
        panels[0].legend(loc="upper center", title="outcome")
        panels[1].set(xlabel="reply length (tokens)", xlim=(0, longest * 1.02))
    return _finished(figure)


def plot_advantages(rewards: Sequence[float], advantages: Sequence[float]) -> Figure:
    """One group: the reward of each rollout, and the advantage made from it.

    Args:
        rewards: One group's rewards.
        advantages: What ``group_relative_advantages`` returned for them.
    """
    if len(rewards) != len(advantages):
        raise ValueError(
            f"{len(rewards)} rewards but {len(advantages)} advantages; pass one group"
        )
    positions = np.arange(1, len(rewards) + 1)
    mean = float(np.mean(rewards))
    with _style():
        figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
        heights = left.bar(positions, rewards, width=0.6, color=COLORS["reward"])
        left.bar_label(heights, [f"{value:g}" for value in rewards], padding=2)
        left.margins(y=0.18)
        left.axhline(mean, color="black", linestyle="--", linewidth=1.2)
        left.set(
            title=f"{len(rewards)} rollouts of one task: mean {mean:.2f} (dashed)",
            ylabel="reward",
        )
        colors = [
            COLORS["correct"] if value > 0 else COLORS["wrong_integer"]
            for value in advantages
        ]
        bars = right.bar(positions, advantages, width=0.6, color=colors)
        right.bar_label(bars, [f"{value:+.2f}" for value in advantages], padding=2)
        right.axhline(0, color="black", linewidth=1)
        right.margins(y=0.18)
        right.set(
            title="Advantages: above 0 makes more likely",
            ylabel="advantage (group std. dev.)",
        )
        for axes in (left, right):
            axes.set_xlabel("rollout")
            axes.set_xticks(positions)
            axes.grid(axis="x", visible=False)
    return _finished(figure)


def plot_calibration_bars(records: Iterable[Rollout]) -> Figure:
    """One stacked bar per task: its rollouts by outcome, hatched where cut off.

    A bar of one colour is a flat group: it teaches nothing, whatever the mean says.
    """
    groups = records_by_task(records)
    kept = 0
    with _style():
        figure, axes = plt.subplots(figsize=(8, 1.6 + 0.32 * max(len(groups), 2)))
        for row, rollouts in enumerate(groups.values()):
            kept += len({rollout.reward for rollout in rollouts}) > 1
            _stacked_row(axes, row, rollouts)
        axes.set_yticks(range(len(groups)), list(groups))
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.tick_params(axis="y", length=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("rollouts")
        total = sum(len(rollouts) for rollouts in groups.values())
        axes.set_title(
            f"{total} rollouts of {len(groups)} tasks: "
            f"{kept} groups with a reward spread"
        )
        _outcome_legend(figure)
    return _finished(figure)


def plot_who_does_what(*, backend: str = "local") -> Figure:
    """Who does what in one training step: HUD, the course's code, the service.

    Args:
        backend: ``"local"`` or ``"fireworks"``, for the name of the third box.
    """
    service = "Fireworks" if backend == "fireworks" else "local training service"
    boxes = (
        (
            "HUD",
            "defines tasks and graders\nruns the rollouts\nreturns rewards, traces",
        ),
        (
            "this course",
            "renders prompts, samples\nturns rewards into\nadvantages, datums",
        ),
        (
            service,
            "holds model and adapter\nsamples, computes\ngradients, saves weights",
        ),
    )
    arrows = (
        (0, 1, 0.70, "prompt"),
        (1, 0, 0.50, "reply"),
        (0, 1, 0.30, "reward"),
        (1, 2, 0.70, "prompt tokens"),
        (2, 1, 0.50, "sampled tokens,\nlog-probabilities"),
        (1, 2, 0.30, "datums"),
    )
    with _style():
        figure, axes = plt.subplots(figsize=(9.5, 2.9))
        axes.set(xlim=(0, 9.5), ylim=(0, 1))
        axes.axis("off")
        for index, (name, duties) in enumerate(boxes):
            left = index * 3.7
            color = (COLORS["correct"], COLORS["reward"], COLORS["invalid_final_line"])
            axes.add_patch(
                Rectangle(
                    (left + 0.02, 0.08), 2.06, 0.84, fill=False, lw=2, ec=color[index]
                )
            )
            axes.text(left + 1.05, 0.80, name, ha="center", weight="bold")
            axes.text(left + 1.05, 0.46, duties, ha="center", va="center", fontsize=9)
        for start, end, height, label in arrows:
            forward = end > start
            gap = min(start, end) * 3.7 + 2.12
            tail, head = (gap, gap + 1.55) if forward else (gap + 1.55, gap)
            axes.annotate(
                "",
                xy=(head, height),
                xytext=(tail, height),
                arrowprops={"arrowstyle": "->", "lw": 1.3},
            )
            axes.text(gap + 0.78, height + 0.025, label, ha="center", fontsize=8.5)
    return _finished(figure)


# Panels of the dashboard


def _reward_panel(
    axes: Axes, steps: np.ndarray, metrics: Sequence[StepMetrics]
) -> None:
    reward = np.array([row.reward_mean for row in metrics])
    spread = np.array([row.within_group_std for row in metrics])
    _reward_band(axes, steps, reward, spread)
    axes.set(
        title="Reward (band: spread)", ylabel="mean reward", ylim=_reward_limits(reward)
    )


def _groups_panel(
    axes: Axes, steps: np.ndarray, metrics: Sequence[StepMetrics]
) -> None:
    kept = [row.kept_groups for row in metrics]
    axes.bar(steps, kept, color=COLORS["reward"], width=0.8)
    axes.set(title="Groups with a reward spread", ylabel="groups", ylim=(0, None))
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))


def _outcomes_panel(
    axes: Axes, steps: np.ndarray, metrics: Sequence[StepMetrics]
) -> None:
    for outcome in OUTCOMES:
        shares = [
            getattr(row, outcome) / row.valid_rollouts if row.valid_rollouts else np.nan
            for row in metrics
        ]
        axes.plot(
            steps,
            shares,
            color=COLORS[outcome],
            label=LABELS[outcome],
            **_line_style(steps),
        )
    axes.set(title="Outcomes", ylabel="share of rollouts", ylim=(-0.02, 1.02))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.legend(loc="center right")


def _length_panel(
    axes: Axes, steps: np.ndarray, metrics: Sequence[StepMetrics]
) -> None:
    lengths = _numbers(metrics, "mean_output_tokens")
    axes.plot(steps, lengths, color=COLORS["reward"], **_line_style(steps))
    axes.set(title="Reply length; limit hits", ylabel="mean tokens", ylim=(0, None))
    hits = axes.twinx()
    hits.bar(
        steps,
        _numbers(metrics, "token_limit_share"),
        color=COLORS["token_limit"],
        alpha=0.55,
        width=0.8,
    )
    hits.set_ylim(0, 1)
    hits.grid(visible=False)
    hits.spines["right"].set_visible(True)
    hits.yaxis.set_major_formatter(PercentFormatter(1))
    hits.set_ylabel("share cut off (bars)", color="#8A3B66")
    # The line stays readable in front of the bars.
    axes.set_zorder(hits.get_zorder() + 1)
    axes.patch.set_visible(False)


def _entropy_panel(
    axes: Axes, steps: np.ndarray, metrics: Sequence[StepMetrics]
) -> None:
    entropy = _numbers(metrics, "entropy")
    axes.plot(steps, entropy, color=COLORS["reward"], **_line_style(steps))
    axes.set(title="Entropy (estimate)", ylabel="nats per token", ylim=(0, None))


def _kl_or_loss_panel(
    axes: Axes, steps: np.ndarray, metrics: Sequence[StepMetrics]
) -> None:
    kl = _numbers(metrics, "kl")
    if np.isfinite(kl).any():
        measured = np.isfinite(kl)
        axes.plot(steps[measured], kl[measured], "o-", color=COLORS["reward"], ms=4)
        axes.set(title="KL to the base model", ylabel="nats per token")
        axes.set_ylim(bottom=0)
        return
    axes.axhline(0, color="black", linewidth=1)
    loss = _numbers(metrics, "loss_per_token")
    axes.plot(steps, loss, color=COLORS["reward"], **_line_style(steps))
    axes.set(title="Loss (no measure of progress)", ylabel="per trained token")


# Pieces


def _reward_band(
    axes: Axes, steps: np.ndarray, reward: np.ndarray, spread: np.ndarray
) -> None:
    axes.fill_between(
        steps,
        reward - spread / 2,
        reward + spread / 2,
        color=COLORS["reward"],
        alpha=0.15,
        linewidth=0,
        label="within-group spread (mean ± half)",
    )
    axes.plot(
        steps,
        reward,
        color=COLORS["reward"],
        label="training reward",
        **_line_style(steps),
    )


def _reward_limits(reward: np.ndarray) -> tuple[float, float]:
    """0 to 1, or further where a reward of one's own goes further."""
    return min(0.0, float(reward.min())), max(1.02, 1.02 * float(reward.max()))


def _pale(color: str) -> tuple[float, ...]:
    """The colour mixed with white: unlike transparency it hides the grid."""
    return tuple(0.5 + 0.5 * part for part in to_rgb(color))


def _outcome_bars(
    axes: Axes, keys: Sequence[str], offset: float, side: str, summary: OutcomeSummary
) -> None:
    counts = [getattr(summary, key) for key in keys]
    shares = [count / summary.n if summary.n else 0.0 for count in counts]
    bounds = [wilson_interval(count, summary.n) for count in counts]
    errors = np.array(
        [
            (share - low, high - share)
            for share, (low, high) in zip(shares, bounds, strict=True)
        ]
    ).clip(0)
    bars = axes.bar(
        np.arange(len(keys)) + offset,
        shares,
        width=0.36,
        color=[_pale(COLORS[k]) if side == "before" else COLORS[k] for k in keys],
        yerr=errors.T,
        error_kw={"elinewidth": 1, "ecolor": "#444444", "capsize": 2},
    )
    bars[-1].set(hatch="///", edgecolor="white")
    for bar, count, (_, high) in zip(bars, counts, bounds, strict=True):
        centre = bar.get_x() + bar.get_width() / 2
        axes.text(centre, high + 0.015, str(count), ha="center", fontsize=9)


def _stacked_row(axes: Axes, row: int, rollouts: Sequence[Rollout]) -> None:
    left = 0
    for outcome in OUTCOMES:
        for cut_off in (False, True):
            width = sum(
                r.outcome == outcome and bool(r.token_limit) == cut_off
                for r in rollouts
            )
            axes.barh(
                row,
                width,
                left=left,
                height=0.7,
                color=COLORS[outcome],
                edgecolor="white",
                hatch="///" if cut_off else None,
            )
            left += width


def _outcome_legend(figure: Figure) -> None:
    handles: list[Any] = [
        Rectangle((0, 0), 1, 1, color=COLORS[outcome], label=LABELS[outcome])
        for outcome in OUTCOMES
    ]
    handles.append(
        Rectangle(
            (0, 0),
            1,
            1,
            facecolor="#BBBBBB",
            edgecolor="white",
            hatch="///",
            label=LABELS["token_limit"],
        )
    )
    figure.legend(handles=handles, loc="outside lower center", ncols=4)


def _length_title(side: str, rollouts: Sequence[Rollout]) -> str:
    summary = summarize_outcomes(rollouts)
    mean = summary.mean_output_tokens
    average = "no replies" if mean is None else f"mean {mean:,.0f} tokens"
    return (
        f"{side}: {summary.n} rollouts, {average}, {summary.token_limit} at the limit"
    )


def _steps(metrics: Sequence[StepMetrics]) -> np.ndarray:
    if not metrics:
        raise ValueError("no metrics to plot: run at least one training step first")
    return np.array([row.step for row in metrics])


def _numbers(metrics: Sequence[StepMetrics], key: str) -> np.ndarray:
    """A column as floats; a value that was not measured leaves a gap."""
    values = (getattr(row, key) for row in metrics)
    return np.array([np.nan if value is None else float(value) for value in values])


def _counts(metrics: Sequence[StepMetrics]) -> str:
    rollouts = sum(row.valid_rollouts for row in metrics)
    steps = "1 step" if len(metrics) == 1 else f"{len(metrics)} steps"
    return f"{steps}, {rollouts:,} rollouts"


def _step_axis(axes: Axes, steps: np.ndarray, *, start: float | None = None) -> None:
    """Whole steps; room for ten at least, so that a young run does not jump about."""
    first = float(steps.min()) if start is None else start
    axes.set_xlim(first - 0.6, max(float(steps.max()), first + 9) + 0.6)
    axes.set_xlabel("training step")
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))


def _line_style(steps: np.ndarray) -> dict[str, Any]:
    """Markers while there are few steps: a line through one point is invisible."""
    return {"marker": "o" if len(steps) < 60 else None, "markersize": 3}


def _style() -> AbstractContextManager[None]:
    # Local to one figure: importing this module changes nobody's other plots.
    return plt.rc_context(_STYLE)


def _finished(figure: Figure) -> Figure:
    """Close the figure in pyplot, which would otherwise show it a second time."""
    plt.close(figure)
    return figure
