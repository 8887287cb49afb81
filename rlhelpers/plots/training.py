"""Plots of a run: how reward, outcomes and lengths move from step to step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from rlhelpers import plot_texts as texts
from rlhelpers.analysis import LABELS, OUTCOMES, OutcomeSummary, wilson_interval
from rlhelpers.metrics import StepMetrics
from rlhelpers.plots.figures import (
    COLORS,
    LINES,
    course_style,
    finished,
    pale,
    subplots,
)


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
    with course_style():
        figure, axes = subplots(figsize=(8, 4))
        _reward_band(axes, steps, reward, spread)
        if held_out:
            _diamonds(axes, held_out)
        _step_axis(axes, steps, start=min([*(held_out or ()), *steps]))
        axes.set(ylim=_reward_limits(reward), ylabel="mean reward")
        axes.set_title(title or f"Reward over {_counts(metrics)}")
        axes.legend(loc="lower right")
    return finished(figure, texts.learning_curve_text(metrics, held_out))


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
    with course_style():
        figure, axes = subplots(figsize=(8, 4))
        axes.plot(
            steps,
            reward,
            color=pale(COLORS["reward"]),
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
    return finished(figure, texts.checkpoints_text(metrics, evaluations))


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
    with course_style():
        figure, panels = subplots(2, 3, figsize=(11, 5.6))
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
    return finished(figure, texts.dashboard_text(metrics))


def plot_runs(
    runs: Mapping[str, Sequence[StepMetrics]],
    *,
    held_out: Mapping[str, float] | None = None,
) -> Figure:
    """Several runs side by side: form, arithmetic and, where measured, the KL.

    Three panels with one line per run: the share of rollouts that is right (diamonds:
    greedy held-out accuracy at the end), the share whose ending is invalid, and among
    valid endings the share of wrong integers. A fourth where the KL was measured.

    Args:
        runs: Heading → rows of the run's ``metrics.jsonl``.
        held_out: Heading → held-out accuracy after the run, 0 to 1.

    Raises:
        ValueError: There is no run to plot, or a run without steps.
    """
    if not runs:
        raise ValueError("no runs to plot: train at least once")
    measured = any(row.kl is not None for rows in runs.values() for row in rows)
    drawn = RUN_PANELS if measured else RUN_PANELS[:-1]
    with course_style():
        figure, panels = subplots(1, len(drawn), figsize=(3.4 * len(drawn), 3.6))
        for (heading, rows), (color, dash) in zip(runs.items(), LINES, strict=False):
            steps = _steps(rows)
            for axes, (label, value) in zip(panels, drawn, strict=True):
                values = np.array([value(row) for row in rows], dtype=float)
                known = ~np.isnan(values)
                style: Any = {"color": color, "linestyle": dash, **_line_style(steps)}
                axes.plot(steps[known], values[known], label=heading, **style)
                axes.set_ylabel(label)
                _step_axis(axes, steps)
            if held_out and heading in held_out:
                end = (steps[-1] + 0.5, held_out[heading])
                panels[0].plot(*end, "D", color=color, markersize=7, clip_on=False)
        for axes in panels[:3]:
            axes.set_ylim(-0.02, 1.02)
            axes.yaxis.set_major_formatter(PercentFormatter(1))
        panels[0].legend(loc="lower left")
        counts = dict.fromkeys(_counts(rows) for rows in runs.values())
        figure.suptitle(f"{len(runs)} runs, each of {' or '.join(counts)}")
    return finished(figure, texts.runs_text(runs, held_out or {}))


def plot_reward_and_truth(
    runs: Mapping[str, Sequence[StepMetrics]],
    held_out: Mapping[str, Mapping[int, float]],
) -> Figure:
    """What each run's reward says, what is true, and how long the replies are.

    One column per run. Above: the mean reward of each step's own rollouts, the share
    of them that is right, and greedy accuracy on held-out tasks. Where reward and
    truth part, the reward is being gamed. Below: the reply length, which often shows
    how.

    Args:
        runs: Heading → rows of the run's ``metrics.jsonl``.
        held_out: Heading → {steps taken: held-out accuracy, 0 to 1}.

    Raises:
        ValueError: There is no run to plot, or a run without steps.
    """
    if not runs:
        raise ValueError("no runs to plot: train at least once")
    with course_style():
        figure, panels = subplots(
            2,
            len(runs),
            figsize=(4.6 * len(runs), 5.2),
            sharey="row",
            squeeze=False,
            height_ratios=(3, 2),
        )
        for (heading, rows), (above, below) in zip(runs.items(), panels.T, strict=True):
            steps = _steps(rows)
            _truth_panel(above, steps, rows, held_out.get(heading, {}))
            above.set(ylabel="reward; share", title=f"{heading}: {_counts(rows)}")
            lengths = _numbers(rows, "mean_output_tokens")
            below.plot(steps, lengths, color="#555555", **_line_style(steps))
            below.set_ylabel("mean reply (tokens)")
            for axes in (above, below):
                _step_axis(axes, steps, start=0)
        lowest = min(row.reward_mean for rows in runs.values() for row in rows)
        panels[0, 0].set_ylim(min(0.0, lowest), 1.02)
        panels[1, 0].set_ylim(0, None)
        panels[0, 0].legend(loc="lower left")
    return finished(figure, texts.reward_and_truth_text(runs, held_out))


def _wrong_among_valid(row: StepMetrics) -> float | None:
    valid = row.correct + row.wrong_integer
    return row.wrong_integer / valid if valid else None


#: What plot_runs draws of a step: (label of the axis, value or None).
RUN_PANELS: tuple[tuple[str, Callable[[StepMetrics], float | None]], ...] = (
    ("right (diamond: held-out)", lambda row: row.correct / row.valid_rollouts),
    ("invalid ending", lambda row: row.invalid_final_line / row.valid_rollouts),
    ("wrong among valid endings", _wrong_among_valid),
    ("KL to the base (nats per token)", lambda row: row.kl),
)


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
    if not texts.have_outcomes(metrics):
        _no_outcomes(axes)
        return
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


def _no_outcomes(axes: Axes) -> None:
    """Say that there is nothing to draw; three lines at 0 would be a result."""
    axes.set(title="Outcomes", ylim=(0, 1))
    axes.set_yticks([])
    axes.text(
        0.5,
        0.5,
        "none: this grader pays a reward\nand names no outcome",
        ha="center",
        va="center",
        transform=axes.transAxes,
        color="#555555",
    )


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
        # An estimate can fall below 0, and one near 0 needs no magnifying glass.
        low, high = float(kl[measured].min()), float(kl[measured].max())
        axes.set_ylim(min(0.0, 1.1 * low), max(0.01, 1.1 * high))
        return
    axes.axhline(0, color="black", linewidth=1)
    loss = _numbers(metrics, "loss_per_token")
    axes.plot(steps, loss, color=COLORS["reward"], **_line_style(steps))
    axes.set(title="Loss (no measure of progress)", ylabel="per trained token")


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


def _truth_panel(
    axes: Axes,
    steps: np.ndarray,
    metrics: Sequence[StepMetrics],
    held_out: Mapping[int, float],
) -> None:
    """Mean reward, the share that is right, and held-out accuracy as diamonds."""
    shares = [
        row.correct / row.valid_rollouts if row.valid_rollouts else np.nan
        for row in metrics
    ]
    for values, color, label in (
        (_numbers(metrics, "reward_mean"), COLORS["reward"], "mean reward"),
        (shares, COLORS["correct"], "share right"),
    ):
        axes.plot(steps, values, color=color, label=label, **_line_style(steps))
    _diamonds(axes, held_out)


def _diamonds(axes: Axes, held_out: Mapping[int, float]) -> None:
    """Held-out accuracy by steps taken."""
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
