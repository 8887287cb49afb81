"""The course's plots, over the rows of :mod:`rlhelpers.metrics`.

Every function returns a figure and does not show it; it is already closed in pyplot,
so a cell that ends in the call leaves exactly one image. ``print`` of a figure says in
words what it shows (:mod:`rlhelpers.plot_texts`). Colours are those of Okabe
and Ito (2008), which colour-blind readers can tell apart; one colour means one
outcome everywhere, and hatching marks the token limit, which overlaps the outcomes.
"""

from rlhelpers.plots.calibration import (
    plot_calibration_bars,
    plot_group_rewards,
    plot_group_signal,
    plot_range_heatmap,
)
from rlhelpers.plots.course import plot_who_does_what
from rlhelpers.plots.evaluation import (
    plot_accuracy_by_range,
    plot_outcomes,
    plot_range_left,
    plot_rewards,
    plot_token_lengths,
    plot_tokens_by_cause,
    plot_transitions,
)
from rlhelpers.plots.figures import COLORS, LINES, DescribedFigure
from rlhelpers.plots.training import (
    RUN_PANELS,
    plot_checkpoints,
    plot_learning_curve,
    plot_reward_and_truth,
    plot_runs,
    plot_training_dashboard,
)
from rlhelpers.plots.updates import (
    UNSURE,
    plot_advantages,
    plot_datum,
    plot_logprob_changes,
    plot_losses,
    plot_repeated_updates,
)

__all__ = [
    "COLORS",
    "LINES",
    "RUN_PANELS",
    "UNSURE",
    "DescribedFigure",
    "plot_accuracy_by_range",
    "plot_advantages",
    "plot_calibration_bars",
    "plot_checkpoints",
    "plot_datum",
    "plot_group_rewards",
    "plot_group_signal",
    "plot_learning_curve",
    "plot_logprob_changes",
    "plot_losses",
    "plot_outcomes",
    "plot_range_heatmap",
    "plot_range_left",
    "plot_repeated_updates",
    "plot_reward_and_truth",
    "plot_rewards",
    "plot_runs",
    "plot_token_lengths",
    "plot_tokens_by_cause",
    "plot_training_dashboard",
    "plot_transitions",
    "plot_who_does_what",
]
