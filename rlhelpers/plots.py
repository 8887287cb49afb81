"""The course's plots, over the rows of :mod:`rlhelpers.metrics`.

Every function returns a figure and does not show it; it is already closed in pyplot,
so a cell that ends in the call leaves exactly one image. ``print`` of a figure says in
words what it shows (:mod:`rlhelpers.plot_texts`). Colours are those of Okabe
and Ito (2008), which colour-blind readers can tell apart; one colour means one
outcome everywhere, and hatching marks the token limit, which overlaps the outcomes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator, PercentFormatter

from rlhelpers import plot_texts as texts
from rlhelpers.advantages import FLAT_SPREAD, sample_std
from rlhelpers.analysis import (
    CAUSES,
    LABELS,
    OUTCOMES,
    Comparison,
    OutcomeSummary,
    Rollout,
    compare_rewards,
    expected_flat_share,
    records_by_task,
    summarize_outcomes,
    tokens_by_cause,
    wilson_interval,
)
from rlhelpers.calibration import GroupSummary
from rlhelpers.losses import CLIP, TrainedTokens, token_losses, token_pushes
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

#: Below this log-probability a sampled token was no foregone conclusion: 90 %.
UNSURE = math.log(0.9)


#: Colour and dash of each of several runs or losses in one panel, told apart without
#: colour too. None of these colours means an outcome.
LINES: tuple[tuple[str, str], ...] = (
    ("#000000", "-"),
    ("#56B4E9", "--"),
    ("#8C510A", ":"),
    ("#B2ABD2", "-."),
)


class DescribedFigure(Figure):
    """A figure that also says in words what it shows.

    The words are its ``repr``, hence the plain text of a cell's output, which VS Code
    and MyST give to a screen reader as the image's alternative text. They also stand
    as ``alt`` in the output's metadata, for nbconvert and nbsphinx. JupyterLab 4 takes
    neither; there, ``print`` the figure.
    """

    words: str = ""

    def __repr__(self) -> str:
        return self.words or super().__repr__()

    def __str__(self) -> str:
        return self.words or super().__str__()

    def _repr_mimebundle_(
        self, include: object = None, exclude: object = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """No data of its own: IPython's formatters add the image and the repr."""
        return {}, {"image/png": {"alt": self.words}} if self.words else {}


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
        figure, axes = _subplots(figsize=(8, 4))
        _reward_band(axes, steps, reward, spread)
        if held_out:
            _diamonds(axes, held_out)
        _step_axis(axes, steps, start=min([*(held_out or ()), *steps]))
        axes.set(ylim=_reward_limits(reward), ylabel="mean reward")
        axes.set_title(title or f"Reward over {_counts(metrics)}")
        axes.legend(loc="lower right")
    return _finished(figure, texts.learning_curve_text(metrics, held_out))


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
        figure, axes = _subplots(figsize=(8, 4))
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
    return _finished(figure, texts.checkpoints_text(metrics, evaluations))


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
        figure, panels = _subplots(2, 3, figsize=(11, 5.6))
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
    return _finished(figure, texts.dashboard_text(metrics))


def plot_outcomes(before: Iterable[Rollout], after: Iterable[Rollout]) -> Figure:
    """Outcome counts before and after training, side by side.

    The three outcomes add up to the number of tasks; the hatched bar counts the
    rollouts that hit the token limit, and overlaps them. Whiskers are 95 % Wilson
    intervals of each share.
    """
    before, after = list(before), list(after)  # each is read twice
    summaries = {
        "before": summarize_outcomes(before),
        "after": summarize_outcomes(after),
    }
    keys = (*OUTCOMES, "token_limit")
    with _style():
        figure, axes = _subplots(figsize=(8, 4))
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
    return _finished(figure, texts.outcomes_text(before, after))


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
        figure, panels = _subplots(2, 1, figsize=(8, 4.8), sharex=True, sharey=True)
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
    return _finished(figure, texts.token_lengths_text(sides, limit))


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
        figure, (left, right) = _subplots(1, 2, figsize=(9, 3.4))
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
    return _finished(figure, texts.advantages_text(rewards, advantages))


def plot_calibration_bars(records: Iterable[Rollout]) -> Figure:
    """One stacked bar per task: its rollouts by outcome, hatched where cut off.

    A bar of one colour is a flat group: it teaches nothing, whatever the mean says.
    """
    records = list(records)  # read twice
    groups = records_by_task(records)
    kept = 0
    with _style():
        figure, axes = _subplots(figsize=(8, 1.6 + 0.32 * max(len(groups), 2)))
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
    return _finished(figure, texts.calibration_bars_text(records))


def plot_group_signal(group_sizes: Sequence[int] = (4, 8, 16)) -> Figure:
    """Where there is most to learn: signal and flat groups against the success rate.

    Left, the standard deviation √(p(1 − p)) of a reward of 0 or 1 that is 1 with
    probability p, to which the signal of standardised advantages is proportional;
    right, the expected share of flat groups, p^G + (1 − p)^G.

    Args:
        group_sizes: The group sizes G to draw.
    """
    p = np.linspace(0, 1, 201)
    styles = ("-", "--", ":", "-.")
    with _style():
        figure, (left, right) = _subplots(1, 2, figsize=(9, 3.4))
        left.plot(p, np.sqrt(p * (1 - p)), color=COLORS["reward"])
        left.set(title="How much a group's rewards differ", ylim=(0, 0.55))
        left.set_ylabel("std. dev. of one reward, √(p (1 − p))")
        for style, size in zip(styles, group_sizes, strict=False):
            right.plot(
                p,
                [expected_flat_share(float(x), size) for x in p],
                style,
                color=COLORS["reward"],
                label=f"G = {size}",
            )
        right.set(title="How often a group is flat", ylim=(0, 1.02))
        right.set_ylabel("expected share of flat groups")
        right.yaxis.set_major_formatter(PercentFormatter(1))
        right.legend(title="group size", loc="upper center")
        for axes in (left, right):
            axes.set_xlabel("p, the chance that one rollout is right")
    return _finished(figure, texts.group_signal_text(group_sizes))


def plot_range_heatmap(
    cells: Mapping[tuple[tuple[int, int], tuple[int, int]], GroupSummary],
    *,
    framed: tuple[int, int] | None = None,
) -> Figure:
    """Mean reward and within-group spread over ranges of both operands.

    Args:
        cells: (range of a, range of b) → summary, as
            :func:`~rlhelpers.calibration.summarize_by_range` returns it.
        framed: Draw a frame around the cells whose operands both lie in this range.
    """
    rows = sorted({a for a, _ in cells})
    columns = sorted({b for _, b in cells})
    panels = (
        ("reward_mean", "Mean reward", "mean reward", 1.0),
        ("within_group_std", "Within-group spread", "sample std. dev.", None),
    )
    groups = {cell.groups for cell in cells.values()}
    counts = f"{min(groups)} to {max(groups)}" if len(groups) > 1 else str(min(groups))
    with _style():
        figure, axes = _subplots(1, 2, figsize=(10, 4.2))
        for panel, (name, title, label, top) in zip(axes, panels, strict=True):
            values = np.array(
                [
                    [
                        getattr(cells[a, b], name) if (a, b) in cells else np.nan
                        for b in columns
                    ]
                    for a in rows
                ]
            )
            _heatmap(figure, panel, values, label=label, top=top)
            panel.set_title(f"{title} ({counts} groups per cell)")
            if framed is not None:
                _frame(panel, _indices(rows, framed), _indices(columns, framed))
            panel.set_xticks(range(len(columns)), [f"{lo}–{hi}" for lo, hi in columns])
            panel.set_yticks(range(len(rows)), [f"{lo}–{hi}" for lo, hi in rows])
            panel.set(xlabel="second operand b", ylabel="first operand a")
            panel.tick_params(axis="x", labelrotation=30)
    return _finished(figure, texts.range_heatmap_text(cells))


def plot_datum(
    tokens: Sequence[str],
    advantages: Sequence[float],
    logprobs: Sequence[float],
    *,
    per_row: int = 12,
) -> Figure:
    """A datum, target by target: what is masked, and what is trained how hard.

    A masked target (advantage 0, the prompt) is grey; a trained one is green if it is
    to become more likely and orange if less, and framed where the policy was unsure
    (its probability below 90 %). Under each token stand its advantage and the
    log-probability it was sampled with.

    Args:
        tokens: Text of each target token, length T.
        advantages, logprobs: The datum's rows of the same names, length T.
        per_row: Tokens drawn side by side.
    """
    if not len(tokens) == len(advantages) == len(logprobs):
        raise ValueError(
            f"{len(tokens)} tokens, {len(advantages)} advantages and {len(logprobs)} "
            "log-probabilities: a datum has one of each per target"
        )
    rows = -(-len(tokens) // per_row)
    with _style():
        figure, axes = _subplots(figsize=(9.5, 0.5 + 0.62 * rows))
        axes.set(xlim=(0, per_row), ylim=(rows, 0))
        axes.axis("off")
        for index, token in enumerate(tokens):
            row, column = divmod(index, per_row)
            _token_box(axes, column, row, token, advantages[index], logprobs[index])
        trained = sum(value != 0 for value in advantages)
        axes.set_title(
            f"{len(tokens)} targets: {len(tokens) - trained} masked (grey), {trained} "
            "trained (framed: probability below 90 %);\nbelow each: advantage, "
            "log-probability"
        )
    return _finished(figure, texts.datum_text(tokens, advantages, logprobs))


def plot_range_left(players: Mapping[str, Sequence[float]]) -> Figure:
    """How many numbers are left after each guess, player by player.

    Args:
        players: Name → mean numbers left after 0, 1, … guesses, such as
            :func:`rlhelpers.guessing.mean_range_left` gives. ``"before"`` and
            ``"after"`` have the colours that they have everywhere.

    Raises:
        ValueError: There is no player to plot.
    """
    if not players:
        raise ValueError("no players to plot: give at least one row of numbers")
    with _style():
        figure, axes = _subplots(figsize=(7, 3.6))
        for name, left in players.items():
            axes.plot(
                range(len(left)),
                left,
                color=COLORS.get(name, COLORS["held_out"]),
                linestyle="-" if name in COLORS else "--",
                marker="o",
                ms=4,
                label=name,
            )
        axes.set(
            xlabel="guesses made",
            ylabel="numbers left (mean)",
            title="What is left of the range after each guess",
            ylim=(0, None),
        )
        axes.legend()
    return _finished(figure, texts.range_left_text(players))


def plot_logprob_changes(
    changes: Sequence[Sequence[float]],
    advantages: Sequence[float],
    labels: Sequence[str],
) -> Figure:
    """What one update did to the log-probability of every sampled token.

    One row of dots per rollout, one dot per token; the vertical mark is the rollout's
    mean. Rows are sorted by advantage, and colour tells which way the update pushed
    them: where all went well, the green means lie right of 0 and the orange ones left.

    Args:
        changes: Per rollout, the change of each output token's log-probability (nats).
        advantages: Per rollout, its advantage.
        labels: Per rollout, its name on the axis.
    """
    count = len(changes)
    order = sorted(range(count), key=lambda i: -advantages[i])
    changes = [changes[i] for i in order]
    advantages = [advantages[i] for i in order]
    labels = [labels[i] for i in order]
    with _style():
        figure, axes = _subplots(figsize=(9, 1.4 + 0.36 * count))
        axes.axvline(0, color="black", linewidth=1)
        for row, (values, advantage) in enumerate(
            zip(changes, advantages, strict=True)
        ):
            color = COLORS["correct"] if advantage > 0 else COLORS["wrong_integer"]
            axes.plot(values, [row] * len(values), "o", color=color, ms=4, alpha=0.45)
            axes.plot(np.mean(values), row, "|", color="black", ms=16, mew=2)
        axes.set_yticks(range(count), list(labels))
        axes.set_ylim(count - 0.4, -0.6)
        axes.set_xscale("symlog", linthresh=0.01)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(
            "← less likely     change of log-probability by one update "
            "(nats, symmetric log)     more likely →"
        )
        total = sum(len(values) for values in changes)
        axes.set_title(
            f"{total:,} tokens of {count} rollouts: pushed up (green), down (orange); "
            "mark: mean of the rollout"
        )
    return _finished(figure, texts.logprob_changes_text(changes, labels))


def plot_losses(
    *, clip: tuple[float, float] = CLIP, sampled_probability: float = 0.3
) -> Figure:
    """The three losses of one token against its ratio, and how hard each pushes.

    Left for an advantage of +1, right for −1. Above the loss, below minus its gradient
    with respect to the token's log-probability: above 0 the token is pushed up.

    Args:
        clip: Smallest and largest ratio of ppo and cispo.
        sampled_probability: With which the token was sampled; the ratio ends where the
            probability would be 1. Only the value of cispo depends on it.
    """
    ratios = np.linspace(0.02, 2.2, 400)
    names = ("importance_sampling", "ppo", "cispo")
    with _style():
        figure, panels = _subplots(2, 2, figsize=(9, 5.4), sharex=True, sharey="row")
        for (above, below), advantage in zip(panels.T, (1.0, -1.0), strict=True):
            for name, (color, dash) in zip(names, LINES, strict=False):
                style = {"color": color, "linestyle": dash, "linewidth": 2}
                values = token_losses(
                    name,
                    ratios,
                    advantage,
                    sampled_logprobs=np.log(sampled_probability),
                    clip=clip,
                )
                above.plot(ratios, values, label=name, **style)
                pushes = token_pushes(name, ratios, advantage, clip=clip)
                below.plot(ratios, pushes, **style)
            for axes in (above, below):
                axes.axvspan(*clip, color="#EEEEEE", zorder=0)
                axes.axvline(1, color="#999999", linewidth=0.8)
            above.set(title=f"advantage {advantage:+.0f}".replace("-", "−"))
            above.set(ylabel="loss of the token")
            below.set(ylabel="push on the token", xlabel="ratio, now / when sampled")
        panels[0, 1].legend(loc="upper left")
        figure.suptitle(f"One token, clipped to {clip[0]:g} … {clip[1]:g} (grey)")
    return _finished(figure, texts.losses_text(clip))


def plot_repeated_updates(histories: Mapping[str, Sequence[TrainedTokens]]) -> Figure:
    """What several updates on one batch do to the ratios, for each loss.

    Left the share of trained tokens outside the clip bounds, right the ratios that 1 %
    of the tokens lie below and 1 % above, both against the updates taken.

    Args:
        histories: Loss → the batch's tokens before the first update, after it, and so
            on.

    Raises:
        ValueError: There is nothing to plot.
    """
    if not histories or not all(histories.values()):
        raise ValueError("no updates to plot: score the batch at least once")
    with _style():
        figure, (left, right) = _subplots(1, 2, figsize=(9.5, 3.6))
        for (name, history), (color, dash) in zip(
            histories.items(), LINES, strict=False
        ):
            taken = range(len(history))
            style: Any = {"color": color, "linestyle": dash, "linewidth": 2}
            left.plot(taken, [tokens.clip_share() for tokens in history], **style)
            ends = np.array([tokens.ends() for tokens in history])
            right.plot(taken, ends[:, 0], label=name, **style)
            right.plot(taken, ends[:, 1], **style)
        right.axhline(1, color="#999999", linewidth=0.8)
        right.set_yscale("log")
        left.yaxis.set_major_formatter(PercentFormatter(1))
        left.set_ylim(0, None)
        left.set(ylabel=f"tokens outside {CLIP[0]:g} … {CLIP[1]:g}")
        right.set(ylabel="ratio, 1st and 99th percentile")
        for axes in (left, right):
            axes.set_xlabel("updates taken on the batch")
            axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        right.legend(loc="lower left")
        count = len(next(iter(histories.values()))[0].ratios)
        figure.suptitle(f"Several updates on one batch of {count:,} trained tokens")
    return _finished(figure, texts.repeated_updates_text(histories))


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
    with _style():
        figure, panels = _subplots(1, len(drawn), figsize=(3.4 * len(drawn), 3.6))
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
    return _finished(figure, texts.runs_text(runs, held_out or {}))


def plot_who_does_what(*, backend: str = "local") -> Figure:
    """Who does what in one training step: HUD, the course's code, the service.

    Args:
        backend: ``"local"`` or ``"fireworks"``, for the name of the third box.
    """
    service = "Fireworks" if backend == "fireworks" else "local training service"
    boxes = (
        (
            "HUD",
            "defines tasks and graders\nruns the rollouts\nreturns rewards",
        ),
        (
            "this course",
            "renders prompts,\nturns rewards into\nadvantages and datums",
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
        figure, axes = _subplots(figsize=(9.5, 2.9))
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
    return _finished(figure, texts.who_does_what_text(service))


def plot_transitions(transitions: Mapping[tuple[str, str], int]) -> Figure:
    """Where each task was before training, and where it is after: a heat map.

    Green frames the tasks that were fixed, orange those that regressed; the diagonal
    holds what did not move.

    Args:
        transitions: (cause before, cause after) → tasks, as in ``Comparison``; pairs
            that are left out count as 0.
    """
    counts = np.array([[transitions.get((b, a), 0) for a in CAUSES] for b in CAUSES])
    labels = [LABELS[cause].replace(" hit", "").replace(" ", "\n") for cause in CAUSES]
    fixed, regressed = counts[1:, 0].sum(), counts[0, 1:].sum()
    with _style():
        figure, axes = _subplots(figsize=(6.4, 4.6))
        top = max(int(counts.max()), 1)
        axes.imshow(counts, cmap="Blues", norm=PowerNorm(0.5, 0, top), aspect="auto")
        for (row, column), count in np.ndenumerate(counts):
            dark = count > 0.45 * top
            axes.text(
                column,
                row,
                str(count),
                ha="center",
                va="center",
                color="white" if dark else "black" if count else "#999999",
                weight="bold" if count else "normal",
            )
        for corner, width, height, key, label in (
            ((-0.46, 0.54), 0.92, 2.92, "correct", f"fixed: {fixed}"),
            ((0.54, -0.46), 2.92, 0.92, "wrong_integer", f"regressed: {regressed}"),
        ):
            axes.add_patch(
                Rectangle(
                    corner,
                    width,
                    height,
                    fill=False,
                    lw=2.5,
                    ec=COLORS[key],
                    label=label,
                )
            )
        axes.set_xticks(range(len(CAUSES)), labels)
        axes.set_yticks(range(len(CAUSES)), labels)
        axes.tick_params(length=0)
        axes.grid(visible=False)
        axes.set(xlabel="after training", ylabel="before training")
        axes.set_title(f"{counts.sum()} tasks, before and after training")
        figure.legend(loc="outside lower center", ncols=2)
    return _finished(figure, texts.transitions_text(transitions))


def plot_tokens_by_cause(before: Iterable[Rollout], after: Iterable[Rollout]) -> Figure:
    """Where the output tokens went, before and after, by what became of the reply.

    Args:
        before, after: Rollouts of the same tasks.
    """
    sides = {"before": list(before), "after": list(after)}
    spent = {side: tokens_by_cause(rollouts) for side, rollouts in sides.items()}
    totals = {side: sum(tokens.values()) for side, tokens in spent.items()}
    with _style():
        figure, axes = _subplots(figsize=(8, 2.7))
        for row, (side, tokens) in enumerate(spent.items()):
            left = 0
            for cause in CAUSES:
                axes.barh(
                    row,
                    tokens[cause],
                    left=left,
                    height=0.62,
                    color=COLORS[cause],
                    edgecolor="white",
                    hatch="///" if cause == "token_limit" else None,
                    label=LABELS[cause] if row == 0 else None,
                )
                if tokens[cause] > 0.08 * max(totals.values()):
                    _segment_label(axes, left, row, tokens[cause], totals[side])
                left += tokens[cause]
        axes.set_yticks(range(len(spent)), list(spent))
        axes.tick_params(axis="y", length=0)
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel("output tokens, all replies together")
        axes.set_title(
            f"Tokens by cause: {totals['before']:,} in {len(sides['before'])} replies "
            f"before, {totals['after']:,} in {len(sides['after'])} after"
        )
        figure.legend(loc="outside lower center", ncols=4)
    return _finished(figure, texts.tokens_by_cause_text(sides))


def plot_accuracy_by_range(
    comparisons: Mapping[str, Comparison], *, trained: str | None = None
) -> Figure:
    """Accuracy before and after on several operand ranges, with 95 % intervals.

    Args:
        comparisons: Name of the range → the same tasks before and after.
        trained: The range that training covered; its background is shaded.
    """
    names = list(comparisons)
    with _style():
        figure, axes = _subplots(figsize=(8, 4))
        if trained in names:
            centre = names.index(trained)
            axes.axvspan(centre - 0.5, centre + 0.5, color="#F0F0F0", zorder=0)
        for offset, side, marker in ((-0.1, "before", "o"), (0.1, "after", "D")):
            for position, comparison in enumerate(comparisons.values()):
                summary = getattr(comparison, side)
                low, high = wilson_interval(summary.correct, summary.n)
                share = summary.correct / summary.n
                axes.errorbar(
                    position + offset,
                    share,
                    yerr=[[share - low], [max(0.0, high - share)]],
                    fmt=marker,
                    color=COLORS[side],
                    capsize=3,
                    label=side if position == 0 else None,
                )
        labels = [
            f"{name}\n{comparison.before.n} tasks"
            + ("\n(trained range)" if name == trained else "")
            for name, comparison in comparisons.items()
        ]
        axes.set_xticks(range(len(names)), labels)
        axes.tick_params(axis="x", length=0)
        axes.grid(axis="x", visible=False)
        axes.set(xlim=(-0.5, len(names) - 0.5), ylim=(-0.02, 1.02))
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.set(xlabel="operands", ylabel="accuracy, greedy")
        axes.set_title(
            f"Accuracy on {len(names)} operand ranges (bars: 95 % intervals)"
        )
        axes.legend(loc="lower left")
    return _finished(figure, texts.accuracy_by_range_text(comparisons, trained))


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
    with _style():
        figure, panels = _subplots(
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
    return _finished(figure, texts.reward_and_truth_text(runs, held_out))


def plot_group_rewards(records: Iterable[Rollout]) -> Figure:
    """One row per task: the reward of each of its rollouts, and their mean.

    For any reward. Rows whose dots lie on one spot are flat groups: they teach nothing.
    Open dots are replies that the token limit cut off.
    """
    records = list(records)  # read twice
    groups = records_by_task(records)
    kept = 0
    with _style():
        figure, axes = _subplots(figsize=(8, 1.7 + 0.32 * max(len(groups), 2)))
        for row, rollouts in enumerate(groups.values()):
            rewards = [float(rollout.reward) for rollout in rollouts]
            kept += sample_std(rewards) >= FLAT_SPREAD
            _reward_dots(axes, row, rollouts)
            axes.plot(np.mean(rewards), row, "|", color="black", ms=14, mew=1.5)
        axes.set_yticks(range(len(groups)), list(groups))
        axes.set_ylim(len(groups) - 0.5, -0.5)
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("reward (bar: mean; open: cut off by the token limit)")
        axes.set_title(
            f"{len(records)} rollouts of {len(groups)} tasks: "
            f"{kept} groups with a reward spread"
        )
    return _finished(figure, texts.group_rewards_text(records))


def plot_rewards(before: Iterable[Rollout], after: Iterable[Rollout]) -> Figure:
    """How the rewards of held-out tasks are distributed before and after training.

    For tasks whose grader pays a reward and names no outcome.

    Args:
        before, after: One rollout of each task.

    Raises:
        ValueError: A side is empty, repeats a task, or has tasks the other lacks.
    """
    comparison = compare_rewards(before, after)
    sides = {"before": comparison.before, "after": comparison.after}
    everything = [*comparison.before, *comparison.after]
    bins = np.linspace(min(0.0, *everything), max(1.0, *everything), 21)
    with _style():
        figure, panels = _subplots(2, 1, figsize=(8, 4.4), sharex=True, sharey=True)
        for axes, (side, rewards) in zip(panels, sides.items(), strict=True):
            axes.hist(rewards, bins=list(bins), color=COLORS[side], edgecolor="white")
            mean = float(np.mean(rewards))
            axes.axvline(mean, color="black", linestyle="--", linewidth=1.2)
            axes.set_ylabel("tasks")
            axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
            axes.set_title(
                f"{side}: {len(rewards)} held-out tasks, mean reward {mean:.2f} "
                "(dashed)"
            )
        panels[1].set_xlabel("reward, greedy")
    return _finished(figure, texts.rewards_text(comparison))


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


def _heatmap(
    figure: Figure, axes: Axes, values: np.ndarray, *, label: str, top: float | None
) -> None:
    """Cells with their numbers written in; cividis reads the same to all eyes."""
    highest = float(np.nanmax(values)) if top is None else top
    image = axes.imshow(values, cmap="cividis", vmin=0, vmax=highest, aspect="auto")
    for row, column in np.ndindex(*values.shape):
        value = values[row, column]
        if np.isfinite(value):
            color = "black" if value > highest / 2 else "white"
            axes.text(
                column, row, f"{value:.2f}", ha="center", va="center", color=color
            )
    axes.grid(visible=False)
    figure.colorbar(image, ax=axes, label=label, shrink=0.9)


def _indices(bands: Sequence[tuple[int, int]], within: tuple[int, int]) -> list[int]:
    least, most = within
    return [i for i, (lo, hi) in enumerate(bands) if least <= lo and hi <= most]


def _frame(axes: Axes, rows: Sequence[int], columns: Sequence[int]) -> None:
    """Frame a block of a heat map's cells, so that it shows on dark and on bright."""
    if not rows or not columns:
        return
    corner = (columns[0] - 0.5, rows[0] - 0.5)
    for color, width in (("white", 4.5), ("black", 2.0)):
        size = (len(columns), len(rows))
        axes.add_patch(Rectangle(corner, *size, fill=False, ec=color, lw=width))


def _token_box(
    axes: Axes, column: int, row: int, token: str, advantage: float, logprob: float
) -> None:
    color = "#BBBBBB"
    if advantage:
        color = COLORS["correct"] if advantage > 0 else COLORS["wrong_integer"]
    axes.add_patch(
        Rectangle((column + 0.03, row + 0.04), 0.94, 0.5, color=_pale(color), lw=0)
    )
    if advantage and logprob < UNSURE:
        corner = (column + 0.05, row + 0.06)
        axes.add_patch(Rectangle(corner, 0.9, 0.46, fill=False, ec="black", lw=1.8))
    shown = token.replace("\n", "⏎").replace(" ", "␣")
    size = 9 if len(shown) <= 8 else 6.5
    centre = column + 0.5
    axes.text(centre, row + 0.3, shown, ha="center", va="center", fontsize=size)
    rounded = round(logprob, 2) + 0.0  # no minus sign in front of a zero
    below = f"{advantage:+.2f}  {rounded:.2f}" if advantage else "masked"
    axes.text(centre, row + 0.73, below, ha="center", va="center", fontsize=6.5)


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


def _reward_dots(axes: Axes, row: int, rollouts: Sequence[Rollout]) -> None:
    """A row of dots, those of one reward beside each other."""
    heights = np.linspace(-0.24, 0.24, max(len(rollouts), 2))
    for height, rollout in zip(heights, rollouts, strict=False):
        axes.plot(
            float(rollout.reward),
            row + height,
            "o",
            color=COLORS["reward"],
            markerfacecolor="white" if rollout.token_limit else COLORS["reward"],
            markersize=4.5,
            alpha=0.8,
            clip_on=False,
        )


def _segment_label(axes: Axes, left: int, row: int, tokens: int, total: int) -> None:
    axes.text(
        left + tokens / 2,
        row,
        f"{tokens:,} ({tokens / total:.0%})",
        ha="center",
        va="center",
        fontsize=9,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
    )


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


def _style() -> AbstractContextManager[None]:
    # Local to one figure: importing this module changes nobody's other plots.
    return plt.rc_context(_STYLE)


def _subplots(*grid: int, **options: Any) -> tuple[DescribedFigure, Any]:
    """``plt.subplots`` with a figure that takes words; one Axes, or an array."""
    figure, axes = plt.subplots(*grid, FigureClass=DescribedFigure, **options)
    return cast("DescribedFigure", figure), axes


def _finished(figure: Figure, words: str | None = None) -> Figure:
    """Close the figure in pyplot, which would otherwise show it a second time.

    Args:
        figure: A figure of :func:`_subplots`.
        words: What it shows, with numbers; None names its titles and axes only.
    """
    plt.close(figure)
    if isinstance(figure, DescribedFigure):
        figure.words = _titles(figure) if words is None else words
    return figure


def _titles(figure: Figure) -> str:
    """Titles and axis labels, panel by panel."""
    panels = [
        f"{axes.get_title()} ({axes.get_ylabel()} against {axes.get_xlabel()})"
        for axes in figure.axes
    ]
    return f"Plot: {'; '.join([figure.get_suptitle(), *panels]).strip('; ')}."
