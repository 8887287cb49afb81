"""What all plots share: colours, style, and figures that say what they show."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, cast

import matplotlib.pyplot as plt
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

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


def pale(color: str) -> tuple[float, ...]:
    """The colour mixed with white: unlike transparency it hides the grid."""
    return tuple(0.5 + 0.5 * part for part in to_rgb(color))


def course_style() -> AbstractContextManager[None]:
    # Local to one figure: importing this module changes nobody's other plots.
    return plt.rc_context(_STYLE)


def subplots(*grid: int, **options: Any) -> tuple[DescribedFigure, Any]:
    """``plt.subplots`` with a figure that takes words; one Axes, or an array."""
    figure, axes = plt.subplots(*grid, FigureClass=DescribedFigure, **options)
    return cast("DescribedFigure", figure), axes


def finished(figure: Figure, words: str | None = None) -> Figure:
    """Close the figure in pyplot, which would otherwise show it a second time.

    Args:
        figure: A figure of :func:`subplots`.
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
