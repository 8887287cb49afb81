"""Interactive shells over plain functions.

Nothing here computes: a widget calls a function that the notebook's next cell calls
too, so that a front end without widgets shows the same lesson.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import TYPE_CHECKING, Any

from IPython.display import DisplayHandle, display

from rlhelpers.plots import plot_training_dashboard

try:
    import ipywidgets as widgets
except ImportError:  # progress, dashboards and lessons do without
    from rlhelpers import plain_widgets as widgets

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from rlhelpers.metrics import StepMetrics
    from rlhelpers.training import StepResult


def answer_box(
    grade: Callable[[str], object], *, default: str = "", label: str = "Grade it"
) -> widgets.VBox:
    """A text area and a button; the button shows what ``grade`` returns.

    Args:
        grade: A plain function of the typed text. What it raises is shown as well.
        default: The text to begin with.
        label: What the button says.
    """
    text = widgets.Textarea(
        value=default, layout=widgets.Layout(width="95%", height="6em")
    )
    button = widgets.Button(description=label, button_style="primary")
    result = widgets.Output()

    def on_click(_: widgets.Button) -> None:
        with result:
            result.clear_output(wait=True)
            display(grade(text.value))

    button.on_click(on_click)
    return widgets.VBox([text, button, result])


class LiveDisplay:
    """One place in the notebook whose content is replaced.

    Uses the notebook's own display updates, not a widget, so that the last state is
    what is stored, also in a headless run.
    """

    def __init__(self) -> None:
        self._handle: DisplayHandle | None = None

    def show(self, content: Any) -> None:
        """Show ``content``, in place of what was shown before."""
        if self._handle is None:
            self._handle = display(content, display_id=True)
        else:
            self._handle.update(content)


class _Html:
    """HTML with a plain-text twin for front ends that show none."""

    def __init__(self, html: str, text: str) -> None:
        self._html, self._text = html, text

    def _repr_html_(self) -> str:
        return self._html

    def __repr__(self) -> str:
        return self._text


class TrainingDashboard:
    """Progress and six panels, redrawn in place while a policy trains.

    Pass it to ``train`` as ``on_step``. Drawing takes about as long as half a step of
    the tiny policy, so it happens every few steps and at the end.

    Args:
        steps: How many steps the run will have.
        redraw_every: Steps between drawings.
    """

    def __init__(self, steps: int, *, redraw_every: int = 5) -> None:
        self.steps = steps
        self.redraw_every = redraw_every
        self.metrics: list[StepMetrics] = []
        self.ratio_errors: list[float] = []
        self._progress = LiveDisplay()
        self._panels = LiveDisplay()

    def __call__(self, result: StepResult) -> None:
        """Take in one step."""
        self.metrics.append(result.metrics)
        if result.max_ratio_error is not None:
            self.ratio_errors.append(result.max_ratio_error)
        self._progress.show(self._progress_line())
        step = result.metrics.step
        if step % self.redraw_every == 0 or step >= self.steps:
            self._panels.show(self.figure())

    def resumed(self) -> TrainingDashboard:
        """A dashboard that goes on with this one's steps, in the current cell."""
        later = TrainingDashboard(self.steps, redraw_every=self.redraw_every)
        later.metrics = list(self.metrics)
        later.ratio_errors = list(self.ratio_errors)
        return later

    def figure(self) -> Figure:
        """The six panels over the steps seen so far."""
        return plot_training_dashboard(self.metrics)

    def _progress_line(self) -> _Html:
        last = self.metrics[-1]
        text = (
            f"step {last.step} of {self.steps}: mean reward {last.reward_mean:.2f}, "
            f"{last.kept_groups} groups kept"
        )
        html = (
            f'<progress value="{last.step}" max="{self.steps}" style="width:40%">'
            f"</progress> {escape(text)}"
        )
        return _Html(html, text)
