"""The drawing of who does what in the course."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from rlhelpers import plot_texts as texts
from rlhelpers.plots.figures import COLORS, course_style, finished, subplots


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
    with course_style():
        figure, axes = subplots(figsize=(9.5, 2.9))
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
    return finished(figure, texts.who_does_what_text(service))
