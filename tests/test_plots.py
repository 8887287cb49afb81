"""Plots: the numbers behind them, and one image per cell (pictures vary by machine)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from rlhelpers import plots
from rlhelpers.analysis import (
    CAUSES,
    OUTCOMES,
    OutcomeSummary,
    compare_before_after,
    summarize_outcomes,
    wilson_interval,
)
from rlhelpers.calibration import GroupSummary
from rlhelpers.losses import TrainedTokens
from rlhelpers.metrics import StepMetrics

SMALL, LARGE = (1, 9), (10, 99)
CELLS = {
    (SMALL, SMALL): GroupSummary(3, 1, 0.9, 0.2),
    (SMALL, LARGE): GroupSummary(3, 2, 0.6, 0.5),
    (LARGE, LARGE): GroupSummary(3, 2, 0.3, 0.4),
}
#: Tokens of a batch before any update, after one, and after two.
HISTORY = [
    TrainedTokens(np.array(ratios), np.array([1.0, -1.0]), np.array([-0.5, -0.5]))
    for ratios in ([1.0, 1.0], [1.5, 1.0], [2.0, 0.5])
]


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
    paired = rollouts[::4], rollouts[3::4]  # one rollout of each task
    return [
        plots.plot_learning_curve(metrics, held_out={0: 0.5, 8: 0.9}),
        plots.plot_training_dashboard(metrics),
        plots.plot_outcomes(rollouts, rollouts),
        plots.plot_token_lengths(rollouts, rollouts, 160),
        plots.plot_advantages([1, 0, 0, 0], [1.5, -0.5, -0.5, -0.5]),
        plots.plot_calibration_bars(rollouts),
        plots.plot_range_heatmap(CELLS),
        plots.plot_logprob_changes([[0.1, 0.2], [-0.1]], [1.0, -1.0], ["a", "b"]),
        plots.plot_transitions({("correct", "correct"): 3}),
        plots.plot_tokens_by_cause(rollouts, rollouts[:12]),
        plots.plot_accuracy_by_range({"1 to 9": compare_before_after(*paired)}),
        plots.plot_checkpoints(metrics, {0: summarize_outcomes(rollouts)}),
        plots.plot_reward_and_truth({"a": metrics, "b": metrics}, {"a": {0: 0.7}}),
        plots.plot_group_rewards(rollouts),
        plots.plot_rewards(*paired),
        plots.plot_losses(),
        plots.plot_repeated_updates({"ppo": HISTORY, "cispo": HISTORY[:2]}),
        plots.plot_runs({"a": metrics, "b": metrics}, held_out={"b": 0.7}),
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


@pytest.mark.parametrize(
    ("values", "limits"),
    [
        ([0.0, 0.5], (0.0, 0.55)),
        ([-0.01, 0.5], (-0.011, 0.55)),  # an estimate below 0 stays in sight
        ([1e-6, 2e-6], (0.0, 0.01)),  # noise around 0 does not fill the panel
    ],
)
def test_the_kl_panel_has_room_for_what_was_measured(
    values: list[float], limits: tuple[float, float]
) -> None:
    rows = [StepMetrics.example(step=s, kl=kl) for s, kl in enumerate(values, start=1)]
    figure = plots.plot_training_dashboard(rows)
    (axes,) = (a for a in figure.axes if a.get_title().startswith("KL"))
    assert axes.get_ylim() == pytest.approx(limits)


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


def written(figure: Figure, panel: int = 0) -> list[str]:
    return [text.get_text() for text in figure.axes[panel].texts]


def test_the_heat_map_writes_each_cell_and_leaves_gaps() -> None:
    figure = plots.plot_range_heatmap(CELLS)
    assert written(figure, 0) == ["0.90", "0.60", "0.30"]
    assert written(figure, 1) == ["0.20", "0.50", "0.40"]
    assert "3 groups per cell" in figure.axes[0].get_title()


def test_the_heat_map_frames_the_cells_of_a_range() -> None:
    bands = ((1, 9), (10, 49), (50, 99), (100, 299))
    cells = {(a, b): GroupSummary(3, 1, 0.5, 0.2) for a in bands for b in bands}
    for panel in plots.plot_range_heatmap(cells, framed=(10, 99)).axes[:2]:
        frames = [patch for patch in panel.patches if not patch.get_fill()]
        assert {box.get_bbox().bounds for box in frames} == {(0.5, 0.5, 2.0, 2.0)}
    for panel in plots.plot_range_heatmap(cells, framed=(20, 30)).axes[:2]:
        assert not panel.patches  # no cell lies in it


def test_the_signal_is_largest_at_one_half() -> None:
    left, right = plots.plot_group_signal((2, 4)).axes
    line = left.lines[0].get_xydata()
    assert line[np.argmax(line[:, 1])] == pytest.approx([0.5, 0.5])
    # half flat in groups of two at p = 0.5, an eighth in groups of four
    middles = [float(line.get_xydata()[100][1]) for line in right.lines]
    assert middles == pytest.approx([0.5, 0.125])


def test_a_datum_is_drawn_target_by_target() -> None:
    figure = plots.plot_datum(["a", " b", "\n"], [0, 1.5, 1.5], [0, -0.2, -0.1])
    assert written(figure) == ["a", "masked", "␣b", "+1.50  -0.20", "⏎", "+1.50  -0.10"]
    assert "3 targets: 1 masked (grey), 2 trained" in figure.axes[0].get_title()
    with pytest.raises(ValueError, match="2 tokens, 1 advantages"):
        plots.plot_datum(["a", "b"], [0], [0, 0])


def test_changes_are_coloured_by_the_way_they_were_pushed() -> None:
    figure = plots.plot_logprob_changes(
        [[0.1, 0.3], [-0.2]], [1.0, -1.0], ["up", "down"]
    )
    dots = [line for line in figure.axes[0].lines if line.get_marker() == "o"]
    colors = [to_rgb(line.get_color()) for line in dots]
    assert colors == [
        to_rgb(plots.COLORS["correct"]),
        to_rgb(plots.COLORS["wrong_integer"]),
    ]
    marks = [line for line in figure.axes[0].lines if line.get_marker() == "|"]
    means = [line.get_xdata() for line in marks]
    assert [float(np.ravel(x)[0]) for x in means] == pytest.approx([0.2, -0.2])


def test_rollouts_pushed_up_stand_above_those_pushed_down() -> None:
    figure = plots.plot_logprob_changes(
        [[-0.2], [0.1], [0.4]], [-1.5, 0.5, 1.0], ["down", "up", "most"]
    )
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "most",
        "up",
        "down",
    ]
    assert axes.yaxis_inverted()  # the first row is on top
    dots = [line for line in axes.lines if line.get_marker() == "o"]
    assert [float(line.get_xdata()[0]) for line in dots] == [0.4, 0.1, -0.2]


def test_a_datum_frames_the_tokens_that_the_policy_was_unsure_of() -> None:
    # e^-0.2 is 82 %, e^-0.1 is 90.5 %; what is masked was never sampled
    figure = plots.plot_datum(
        ["a", "b", "c", "d"], [0, 1.5, 1.5, -1.5], [0, -0.2, -0.1, -2.0]
    )
    boxes = [patch for patch in figure.axes[0].patches if not patch.get_fill()]
    assert [int(box.get_x()) for box in boxes] == [1, 3]


def test_transition_cells_show_the_counts() -> None:
    moved = {
        ("correct", "correct"): 9,
        ("correct", "wrong_integer"): 2,
        ("token_limit", "correct"): 3,
        ("wrong_integer", "correct"): 1,
    }
    figure = plots.plot_transitions(moved)
    axes = figure.axes[0]
    cells = {text.get_position(): text.get_text() for text in axes.texts}
    for (old, new), count in moved.items():
        assert cells[CAUSES.index(new), CAUSES.index(old)] == str(count)
    assert sum(map(int, cells.values())) == 15
    assert len(cells) == 16
    labels = [patch.get_label() for patch in axes.patches]
    assert labels == ["fixed: 4", "regressed: 2"]
    assert axes.get_title() == "15 tasks, before and after training"


def test_token_bars_add_up_to_the_tokens_spent(record: Callable[..., Any]) -> None:
    before = [
        record("t1", "correct", output_tokens=40),
        record("t2", "invalid_final_line", output_tokens=160, token_limit=True),
    ]
    after = [record("t1", output_tokens=40), record("t2", output_tokens=50)]
    axes = plots.plot_tokens_by_cause(before, after).axes[0]
    bars = [bar for bar in axes.patches if bar.get_width()]
    assert [(bar.get_x(), bar.get_width()) for bar in bars] == [
        (0, 40),
        (40, 160),
        (0, 90),
    ]
    assert [text.get_text() for text in axes.texts] == [
        "40 (20%)",
        "160 (80%)",
        "90 (100%)",
    ]
    assert "200 in 2 replies before, 90 in 2 after" in axes.get_title()


def test_ranges_are_drawn_with_their_intervals(record: Callable[..., Any]) -> None:
    before = [record(f"t{i}", OUTCOMES[i % 2]) for i in range(10)]
    after = [record(f"t{i}") for i in range(10)]
    comparison = compare_before_after(before, after)
    figure = plots.plot_accuracy_by_range({"1 to 9": comparison}, trained="1 to 9")
    axes = figure.axes[0]
    points = [bars.lines[0].get_ydata()[0] for bars in axes.containers]
    assert points == [0.5, 1.0]
    (segment,) = axes.containers[0].lines[2][0].get_segments()
    assert segment[:, 1] == pytest.approx([0.2366, 0.7634], abs=5e-5)  # 5 of 10
    assert axes.get_xticklabels()[0].get_text() == "1 to 9\n10 tasks\n(trained range)"


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


def test_reward_and_truth_are_drawn_apart(metrics: list[StepMetrics]) -> None:
    held_out = {"gamed": {0: 0.7, 8: 0.2}}
    figure = plots.plot_reward_and_truth({"gamed": metrics, "other": metrics}, held_out)
    above, other, below, _ = figure.axes
    lines = {line.get_label(): list(line.get_ydata()) for line in above.get_lines()}
    assert lines["mean reward"] == pytest.approx([0.4 + 0.05 * n for n in range(1, 9)])
    assert lines["share right"] == [40 / 64] * 8
    assert lines["held-out accuracy, greedy"] == [0.7, 0.2]
    assert list(below.get_lines()[0].get_ydata()) == [60.0 - n for n in range(1, 9)]
    # A run that was not evaluated has no diamonds.
    assert [len(line.get_ydata()) for line in other.get_lines()] == [8, 8, 0]
    words = str(figure)
    assert "gamed, 8 steps and 512 rollouts: mean reward 0.45 at step 1" in words
    assert "share right 62% to 62%; mean tokens of a reply 59.0 to 52.0" in words
    assert "held-out accuracy, greedy, 70.0% after 0 steps, 20.0% after 8" in words
    with pytest.raises(ValueError, match="no runs"):
        plots.plot_reward_and_truth({}, {})


# -- tasks without outcomes -------------------------------------------------------


def test_group_rewards_are_dots_with_their_mean(record: Callable[..., Any]) -> None:
    graded = [
        record(f"t{i // 2}", reward=reward, outcome=None, token_limit=i == 0)
        for i, reward in enumerate([0.0, 0.5, 0.9, 0.9])
    ]
    axes = plots.plot_group_rewards(graded).axes[0]
    assert axes.get_title() == "4 rollouts of 2 tasks: 1 groups with a reward spread"
    lines = axes.get_lines()
    dots = [line for line in lines if line.get_marker() == "o"]
    means = [line for line in lines if line.get_marker() == "|"]
    assert [float(dot.get_xdata()[0]) for dot in dots] == [0.0, 0.5, 0.9, 0.9]
    assert [dot.get_markerfacecolor() == "white" for dot in dots] == [True] + [
        False
    ] * 3
    assert [float(mean.get_xdata()[0]) for mean in means] == pytest.approx([0.25, 0.9])


def test_rewards_before_and_after_are_two_histograms(
    record: Callable[..., Any],
) -> None:
    def side(*rewards: float) -> list[Any]:
        return [record(f"t{i}", reward=r, outcome=None) for i, r in enumerate(rewards)]

    figure = plots.plot_rewards(side(0.0, 0.0, 0.52), side(0.91, 0.93, 1.0))
    heights = [[bar.get_height() for bar in axes.patches] for axes in figure.axes]
    # Bins of 0.05: 0.52 lies in the eleventh, 0.91 and 0.93 in the nineteenth.
    assert [heights[0][0], heights[0][10], sum(heights[0])] == [2, 1, 3]
    assert [heights[1][18], heights[1][19], sum(heights[1])] == [2, 1, 3]


def test_a_dashboard_without_outcomes_says_so() -> None:
    rows = [
        StepMetrics.example(step=s, correct=0, wrong_integer=0, invalid_final_line=0)
        for s in (1, 2)
    ]
    figure = plots.plot_training_dashboard(rows)
    (panel,) = [axes for axes in figure.axes if axes.get_title() == "Outcomes"]
    assert panel.get_lines() == []
    assert "names no outcome" in panel.texts[0].get_text()
    assert "no outcomes, because the grader names none" in str(figure)


def test_losses_are_drawn_as_they_are() -> None:
    figure = plots.plot_losses(clip=(0.5, 2.0), sampled_probability=0.5)
    above, right, below, _ = figure.axes
    ratio = above.get_lines()[0].get_xdata()
    assert [line.get_label() for line in right.get_lines()][:3] == [
        "importance_sampling",
        "ppo",
        "cispo",
    ]
    # For an advantage of +1, at the last ratio, 2.2: −2.2, −min(2.2, 2), and
    # −2 · (log 0.5 + log 2.2).
    ends = [line.get_ydata()[-1] for line in above.get_lines()[:3]]
    assert ends == pytest.approx([-2.2, -2.0, -2 * np.log(1.1)])
    assert [line.get_ydata()[-1] for line in below.get_lines()[:3]] == pytest.approx(
        [2.2, 0.0, 2.0]
    )
    assert ratio[-1] == pytest.approx(2.2)
    assert "ppo stops pushing up above 2 and down below 0.5" in str(figure)


def test_repeated_updates_show_clip_share_and_ends() -> None:
    figure = plots.plot_repeated_updates({"ppo": HISTORY, "cispo": HISTORY[:2]})
    left, right = figure.axes
    assert [list(line.get_ydata()) for line in left.get_lines()] == [
        [0.0, 0.5, 1.0],
        [0.0, 0.5],
    ]
    low, high = right.get_lines()[:2]
    assert low.get_ydata()[-1] == pytest.approx(0.515)  # 1 % of the way up from 0.5
    assert high.get_ydata()[-1] == pytest.approx(1.985)
    words = str(figure)
    assert "ppo, 2 updates: 100.0% of 2 tokens outside the bounds" in words
    assert "cispo, 1 updates: 50.0% of 2 tokens" in words
    for nothing in ({}, {"ppo": []}):
        with pytest.raises(ValueError, match="no updates"):
            plots.plot_repeated_updates(nothing)


def test_runs_side_by_side(metrics: list[StepMetrics]) -> None:
    held = [dataclasses.replace(row, kl=row.step / 100) for row in metrics]
    figure = plots.plot_runs({"free": metrics, "held": held}, held_out={"held": 0.7})
    right, invalid, wrong, kl = figure.axes
    assert list(right.get_lines()[0].get_ydata()) == [40 / 64] * 8
    assert list(invalid.get_lines()[0].get_ydata()) == [10 / 64] * 8
    assert list(wrong.get_lines()[0].get_ydata()) == [14 / 54] * 8  # of 40 + 14
    assert [list(line.get_ydata()) for line in kl.get_lines()] == [
        [],  # not measured in the first run
        [n / 100 for n in range(1, 9)],
    ]
    (diamond,) = [line for line in right.get_lines() if line.get_marker() == "D"]
    assert list(diamond.get_ydata()) == [0.7]
    words = str(figure)
    assert "free, 8 steps and 512 rollouts; right 62% to 62%" in words
    assert "wrong integers 22% to 22%; KL to the base 0.080 nats per token" in words
    assert "held-out accuracy, greedy, 70.0%." in words
    assert len(plots.plot_runs({"free": metrics}).axes) == 3
    with pytest.raises(ValueError, match="no runs"):
        plots.plot_runs({})


def test_range_left_draws_one_line_for_each_player() -> None:
    players = {"before": [31.0, 20.0, 12.5], "bisection": [31.0, 15.0, 7.0]}
    figure = plots.plot_range_left(players)
    (axes,) = figure.axes
    drawn = {line.get_label(): list(line.get_ydata()) for line in axes.get_lines()}
    assert drawn == players
    assert str(figure) == (
        "Lines: mean numbers left after 0, 1, … guesses. before: 31.0, 20.0, 12.5; "
        "bisection: 31.0, 15.0, 7.0."
    )
    with pytest.raises(ValueError, match="no players to plot"):
        plots.plot_range_left({})
