"""What plots say in words: every figure, and with the right numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from test_plots import draw_all, metrics, rollouts

from rlhelpers import plots
from rlhelpers.metrics import StepMetrics
from rlhelpers.plots.figures import finished, subplots

__all__ = ["metrics", "rollouts"]  # fixtures


def test_every_figure_says_what_it_shows(
    metrics: list[StepMetrics], rollouts: list[Any]
) -> None:
    figures = draw_all(metrics, rollouts)
    figures += [
        plots.plot_group_signal(),
        plots.plot_who_does_what(),
        plots.plot_datum(["a", "b"], [0.0, 1.0], [0.0, -0.5]),
        plots.plot_range_left({"before": [31.0, 15.0], "bisection": [31.0, 15.0]}),
    ]
    public = {name for name in vars(plots) if name.startswith("plot_")} - {"plot_texts"}
    assert len(figures) == len(public)
    for figure in figures:
        words = str(figure)
        assert repr(figure) == words
        assert len(words) >= 40
        assert "<Figure" not in words
        assert re.search(r"\d", words) or words.startswith("Three boxes")
        data, metadata = figure._repr_mimebundle_()
        assert (data, metadata) == ({}, {"image/png": {"alt": words}})


def test_words_of_a_learning_curve(metrics: list[StepMetrics]) -> None:
    # Rewards 0.45, 0.50 … 0.80 over 8 steps of 64 rollouts.
    assert str(plots.plot_learning_curve(metrics, held_out={0: 0.5, 8: 0.9})) == (
        "Curve over 8 steps and 512 rollouts: mean training reward 0.45 at step 1 and "
        "0.80 at step 8, lowest 0.45 at step 1; within-group spread 0.40 at first, "
        "0.40 at last. Held-out accuracy, greedy: 50.0% after 0 steps; 90.0% after 8 "
        "steps."
    )


def test_words_of_the_dashboard_leave_out_what_was_not_measured(
    metrics: list[StepMetrics],
) -> None:
    words = str(plots.plot_training_dashboard(metrics))
    assert "mean reward 0.45 to 0.80" in words
    assert "mean tokens of a reply 59.0 to 52.0" in words
    assert "correct 62% to 62%" in words  # 40 of 64
    assert "KL" not in words


def test_words_of_small_plots() -> None:
    assert str(plots.plot_advantages([1, 0], [0.71, -0.71])) == (
        "Bars: one group of 2 rollouts with mean reward 0.50 and its advantages: "
        "reward 1 gets +0.71; reward 0 gets -0.71."
    )
    assert str(
        plots.plot_datum(["7", "8", "!"], [0.0, 1.5, 1.5], [0.0, -0.1, -2.0])
    ) == (
        "A datum of 3 targets: 1 masked, 2 trained with advantage +1.50: '8!'. Lowest "
        "log-probability -2.00, of '!'."
    )
    moved = {("correct", "correct"): 3, ("token_limit", "correct"): 2}
    assert str(plots.plot_transitions({**moved, ("correct", "wrong_integer"): 1})) == (
        "Table of 6 tasks, before to after training. correct 4: 3 to correct, 1 to "
        "wrong integer; token limit hit 2: 2 to correct. Fixed 2, regressed 1."
    )


def test_a_plot_without_words_names_its_titles_and_axes() -> None:
    figure, axes = subplots(figsize=(2, 2))
    axes.set(title="Reward", xlabel="training step", ylabel="mean reward")
    assert str(finished(figure)) == (
        "Plot: Reward (mean reward against training step)."
    )


def test_words_of_rewards_without_outcomes(record: Callable[..., Any]) -> None:
    def side(*rewards: float) -> list[Any]:
        return [record(f"t{i}", reward=r, outcome=None) for i, r in enumerate(rewards)]

    assert str(plots.plot_rewards(side(0.0, 0.5), side(0.5, 1.0))) == (
        "Two histograms of the rewards of 2 held-out tasks: before mean 0.250, median "
        "0.25, lowest 0.00, highest 0.50; after mean 0.750, median 0.75, lowest 0.50, "
        "highest 1.00."
    )
    rows = [record("t", reward=r, outcome=None, token_limit=r == 0) for r in (0.0, 0.5)]
    assert str(plots.plot_group_rewards(rows)) == (
        "Rewards of each task's rollouts, 1 tasks: t: 0.00 to 0.50, mean 0.25 (1 cut "
        "off)."
    )
