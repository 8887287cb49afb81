"""Plots of one update: advantages, datums, losses and what they change."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator, PercentFormatter

from rlhelpers import plot_texts as texts
from rlhelpers.losses import CLIP, TrainedTokens, token_losses, token_pushes
from rlhelpers.plots.figures import (
    COLORS,
    LINES,
    course_style,
    finished,
    pale,
    subplots,
)

#: Below this log-probability a sampled token was no foregone conclusion: 90 %.
UNSURE = math.log(0.9)


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
    with course_style():
        figure, (left, right) = subplots(1, 2, figsize=(9, 3.4))
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
    return finished(figure, texts.advantages_text(rewards, advantages))


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
    with course_style():
        figure, axes = subplots(figsize=(9.5, 0.5 + 0.62 * rows))
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
    return finished(figure, texts.datum_text(tokens, advantages, logprobs))


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
    with course_style():
        figure, axes = subplots(figsize=(9, 1.4 + 0.36 * count))
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
    return finished(figure, texts.logprob_changes_text(changes, labels))


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
    with course_style():
        figure, panels = subplots(2, 2, figsize=(9, 5.4), sharex=True, sharey="row")
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
    return finished(figure, texts.losses_text(clip))


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
    with course_style():
        figure, (left, right) = subplots(1, 2, figsize=(9.5, 3.6))
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
        right.yaxis.set_major_formatter("{x:g}")
        right.yaxis.set_minor_formatter("{x:.1g}")
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
    return finished(figure, texts.repeated_updates_text(histories))


def _token_box(
    axes: Axes, column: int, row: int, token: str, advantage: float, logprob: float
) -> None:
    color = "#BBBBBB"
    if advantage:
        color = COLORS["correct"] if advantage > 0 else COLORS["wrong_integer"]
    axes.add_patch(
        Rectangle((column + 0.03, row + 0.04), 0.94, 0.5, color=pale(color), lw=0)
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
