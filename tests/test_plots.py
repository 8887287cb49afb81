"""Plots: the numbers behind them, and one image per cell (pictures vary by machine)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from rlhelpers import plots
from rlhelpers.analysis import (
    OUTCOMES,
    OutcomeSummary,
    summarize_outcomes,
    wilson_interval,
)
from rlhelpers.metrics import StepMetrics


@pytest.fixture
def metrics() -> list[StepMetrics]:
    return [
        StepMetrics.example(
            step=step,
            reward_mean=0.4 + 0.05 * step,
            valid_rollouts=64,
            correct=40,
            wrong_integer=14,
            invalid_final_line=10,
            mean_output_tokens=60.0 - step,
            entropy=0.2,
            loss_per_token=0.01,
        )
        for step in range(1, 9)
    ]


@pytest.fixture
def rollouts(record: Callable[..., Any]) -> list[Any]:
    return [
        record(f"t{i // 4}", OUTCOMES[i % 3], output_tokens=20 + i, rollout_index=i % 4)
        for i in range(24)
    ]


def draw_all(metrics: list[StepMetrics], rollouts: list[Any]) -> list[Figure]:
    return [
        plots.plot_learning_curve(metrics, held_out={0: 0.5, 8: 0.9}),
        plots.plot_training_dashboard(metrics),
        plots.plot_outcomes(rollouts, rollouts),
        plots.plot_token_lengths(rollouts, rollouts, 160),
        plots.plot_advantages([1, 0, 0, 0], [1.5, -0.5, -0.5, -0.5]),
        plots.plot_calibration_bars(rollouts),
        plots.plot_checkpoints(metrics, {0: summarize_outcomes(rollouts)}),
    ]


def test_n05_figures_are_returned_and_closed(
    metrics: list[StepMetrics], rollouts: list[Any]
) -> None:
    plt.close("all")
    for figure in draw_all(metrics, rollouts):
        assert isinstance(figure, Figure)
        figure.canvas.draw()  # drawable, though closed
    assert plt.get_fignums() == []


def test_every_axis_is_labelled_and_every_figure_states_its_counts(
    metrics: list[StepMetrics], rollouts: list[Any]
) -> None:
    for figure in draw_all(metrics, rollouts):
        titles = " ".join(ax.get_title() for ax in figure.axes)
        titles += figure.get_suptitle()
        assert any(letter.isdigit() for letter in titles)
        for ax in figure.axes:
            shares_x = ax.get_shared_x_axes().get_siblings(ax)
            assert any(other.get_xlabel() for other in shares_x) or ax.get_yticklabels()
            assert ax.get_ylabel() or ax.get_yticklabels()


def test_importing_and_drawing_change_no_global_style(
    metrics: list[StepMetrics],
) -> None:
    before = dict(plt.rcParams)
    plots.plot_training_dashboard(metrics)
    assert dict(plt.rcParams) == before


@pytest.mark.filterwarnings("error")
def test_missing_numbers_leave_gaps_and_raise_no_warning() -> None:
    rows = [StepMetrics.example(step=s, valid_rollouts=0) for s in (1, 2)]
    figure = plots.plot_training_dashboard(rows)
    figure.canvas.draw()


def test_learning_curve_shows_the_rows(metrics: list[StepMetrics]) -> None:
    axes = plots.plot_learning_curve(metrics, held_out={8: 0.9}).axes[0]
    lines = {str(line.get_label()): line for line in axes.get_lines()}
    reward = lines["training reward"]
    assert list(reward.get_xdata()) == list(range(1, 9))
    assert np.asarray(reward.get_ydata()) == pytest.approx(
        [m.reward_mean for m in metrics]
    )
    assert list(lines["held-out accuracy, greedy"].get_ydata()) == [0.9]
    assert axes.get_title() == "Reward over 8 steps, 512 rollouts"


def test_dashboard_shows_kl_only_where_it_was_measured(
    metrics: list[StepMetrics],
) -> None:
    def last_title(rows: list[StepMetrics]) -> str:
        figure = plots.plot_training_dashboard(rows)
        titles = [ax.get_title() for ax in figure.axes]
        return next(t for t in titles if t.startswith(("KL", "Loss")))

    assert last_title(metrics) == "Loss (no measure of progress)"
    measured = [*metrics, StepMetrics.example(step=9, kl=0.01)]
    assert last_title(measured) == "KL to the base model"


def test_outcome_counts_stand_on_the_bars(rollouts: list[Any]) -> None:
    axes = plots.plot_outcomes(rollouts[:12], rollouts).axes[0]
    assert [text.get_text() for text in axes.texts] == ["4"] * 3 + ["0"] + (
        ["8"] * 3 + ["0"]
    )


def test_same_colour_for_the_same_outcome_everywhere(rollouts: list[Any]) -> None:
    bars = plots.plot_calibration_bars(rollouts).axes[0].patches
    used = {tuple(round(c, 3) for c in to_rgb(bar.get_facecolor())) for bar in bars}
    wanted = {
        tuple(round(c, 3) for c in to_rgb(plots.COLORS[outcome]))
        for outcome in OUTCOMES
    }
    assert used == wanted


def test_nothing_to_plot_is_explained() -> None:
    with pytest.raises(ValueError, match="at least one training step"):
        plots.plot_learning_curve([])
    with pytest.raises(ValueError, match="4 rewards but 1 advantages"):
        plots.plot_advantages([1, 0, 0, 0], [1.5])


def test_n05_a_notebook_cell_shows_exactly_one_image() -> None:
    nbformat = pytest.importorskip("nbformat")
    from nbclient import NotebookClient

    notebook = nbformat.v4.new_notebook()
    notebook.cells = [
        nbformat.v4.new_code_cell(
            "from rlhelpers.plots import plot_advantages\n"
            "plot_advantages([1, 0], [0.7, -0.7])"
        ),
        nbformat.v4.new_code_cell("figure = plot_advantages([1, 0], [0.7, -0.7])"),
        nbformat.v4.new_code_cell("figure"),
    ]
    NotebookClient(notebook, kernel_name="python3", timeout=120).execute()
    images = [
        sum("image/png" in output.get("data", {}) for output in cell.outputs)
        for cell in notebook.cells
    ]
    assert images == [1, 0, 1]


def test_checkpoints_show_their_intervals(metrics: list[StepMetrics]) -> None:
    evaluations = {
        step: OutcomeSummary(40, correct, 40 - correct, 0, 0, 30.0)
        for step, correct in ((8, 36), (0, 28))
    }
    figure = plots.plot_checkpoints(metrics, evaluations)
    (axes,) = figure.axes
    assert axes.get_title() == "2 evaluations along a run, each of 40 held-out tasks"
    assert axes.get_xlabel() == "training step"
    assert axes.get_ylabel()
    (container,) = axes.containers
    points, _, (bars,) = container.lines  # type: ignore[attr-defined]
    assert list(points.get_xdata()) == [0, 8]  # in order, whatever order they came in
    assert list(points.get_ydata()) == pytest.approx([0.7, 0.9])
    ends = [tuple(segment[:, 1]) for segment in bars.get_segments()]
    wanted = [wilson_interval(28, 40), wilson_interval(36, 40)]
    assert np.array(ends) == pytest.approx(np.array(wanted))
    assert axes.get_xlim()[0] < 0


def test_checkpoints_without_an_evaluation_are_refused(
    metrics: list[StepMetrics],
) -> None:
    with pytest.raises(ValueError, match="no evaluations"):
        plots.plot_checkpoints(metrics, {})
