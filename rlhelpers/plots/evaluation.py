"""Plots of evaluations: the same held-out tasks before and after."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator, PercentFormatter

from rlhelpers import plot_texts as texts
from rlhelpers.analysis import (
    CAUSES,
    LABELS,
    OUTCOMES,
    Comparison,
    OutcomeSummary,
    Rollout,
    compare_rewards,
    summarize_outcomes,
    tokens_by_cause,
    wilson_interval,
)
from rlhelpers.plots.figures import COLORS, course_style, finished, pale, subplots


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
    with course_style():
        figure, axes = subplots(figsize=(8, 4))
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
    return finished(figure, texts.outcomes_text(before, after))


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
    with course_style():
        figure, panels = subplots(2, 1, figsize=(8, 4.8), sharex=True, sharey=True)
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
    return finished(figure, texts.token_lengths_text(sides, limit))


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
    with course_style():
        figure, axes = subplots(figsize=(7, 3.6))
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
    return finished(figure, texts.range_left_text(players))


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
    with course_style():
        figure, axes = subplots(figsize=(6.4, 4.6))
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
    return finished(figure, texts.transitions_text(transitions))


def plot_tokens_by_cause(before: Iterable[Rollout], after: Iterable[Rollout]) -> Figure:
    """Where the output tokens went, before and after, by what became of the reply.

    Args:
        before, after: Rollouts of the same tasks.
    """
    sides = {"before": list(before), "after": list(after)}
    spent = {side: tokens_by_cause(rollouts) for side, rollouts in sides.items()}
    totals = {side: sum(tokens.values()) for side, tokens in spent.items()}
    with course_style():
        figure, axes = subplots(figsize=(8, 2.7))
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
    return finished(figure, texts.tokens_by_cause_text(sides))


def plot_accuracy_by_range(
    comparisons: Mapping[str, Comparison], *, trained: str | None = None
) -> Figure:
    """Accuracy before and after on several operand ranges, with 95 % intervals.

    Args:
        comparisons: Name of the range → the same tasks before and after.
        trained: The range that training covered; its background is shaded.
    """
    names = list(comparisons)
    with course_style():
        figure, axes = subplots(figsize=(8, 4))
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
    return finished(figure, texts.accuracy_by_range_text(comparisons, trained))


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
    with course_style():
        figure, panels = subplots(2, 1, figsize=(8, 4.4), sharex=True, sharey=True)
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
    return finished(figure, texts.rewards_text(comparison))


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
        color=[pale(COLORS[k]) if side == "before" else COLORS[k] for k in keys],
        yerr=errors.T,
        error_kw={"elinewidth": 1, "ecolor": "#444444", "capsize": 2},
    )
    bars[-1].set(hatch="///", edgecolor="white")
    for bar, count, (_, high) in zip(bars, counts, bounds, strict=True):
        centre = bar.get_x() + bar.get_width() / 2
        axes.text(centre, high + 0.015, str(count), ha="center", fontsize=9)


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


def _length_title(side: str, rollouts: Sequence[Rollout]) -> str:
    summary = summarize_outcomes(rollouts)
    mean = summary.mean_output_tokens
    average = "no replies" if mean is None else f"mean {mean:,.0f} tokens"
    return (
        f"{side}: {summary.n} rollouts, {average}, {summary.token_limit} at the limit"
    )
