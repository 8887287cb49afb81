"""Plots of calibrations: whether groups have a spread to learn from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator, PercentFormatter

from rlhelpers import plot_texts as texts
from rlhelpers.advantages import FLAT_SPREAD, sample_std
from rlhelpers.analysis import (
    LABELS,
    OUTCOMES,
    Rollout,
    expected_flat_share,
    records_by_task,
)
from rlhelpers.calibration import GroupSummary
from rlhelpers.plots.figures import COLORS, course_style, finished, subplots


def plot_calibration_bars(records: Iterable[Rollout]) -> Figure:
    """One stacked bar per task: its rollouts by outcome, hatched where cut off.

    A bar of one colour is a flat group: it teaches nothing, whatever the mean says.
    """
    records = list(records)  # read twice
    groups = records_by_task(records)
    kept = 0
    with course_style():
        figure, axes = subplots(figsize=(8, 1.6 + 0.32 * max(len(groups), 2)))
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
    return finished(figure, texts.calibration_bars_text(records))


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
    with course_style():
        figure, (left, right) = subplots(1, 2, figsize=(9, 3.4))
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
    return finished(figure, texts.group_signal_text(group_sizes))


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
    with course_style():
        figure, axes = subplots(1, 2, figsize=(10, 4.2))
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
    return finished(figure, texts.range_heatmap_text(cells))


def plot_group_rewards(records: Iterable[Rollout]) -> Figure:
    """One row per task: the reward of each of its rollouts, and their mean.

    For any reward. Rows whose dots lie on one spot are flat groups: they teach nothing.
    Open dots are replies that the token limit cut off.
    """
    records = list(records)  # read twice
    groups = records_by_task(records)
    kept = 0
    with course_style():
        figure, axes = subplots(figsize=(8, 1.7 + 0.32 * max(len(groups), 2)))
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
    return finished(figure, texts.group_rewards_text(records))


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
