"""Interactive shells over plain functions.

Nothing here computes: a widget calls a function that the notebook's next cell calls
too, so that a front end without widgets shows the same lesson.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from IPython.display import DisplayHandle, display

from rlhelpers.analysis import LABELS
from rlhelpers.plots import plot_training_dashboard
from rlhelpers.rollouts import KINDS, RolloutTable, select_rollouts

try:
    import ipywidgets as widgets
except ImportError:  # progress, dashboards and lessons do without
    from rlhelpers import plain_widgets as widgets

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from rlhelpers.calibration import CalibrationSettings
    from rlhelpers.metrics import RolloutRecord, StepMetrics
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


class CalibrationPanel(widgets.VBox):  # type: ignore[misc]
    """Sliders for a calibration's settings, and a button that runs it.

    Nothing is sent while a slider is dragged: the sliders only fill in the settings
    and the bound on rollouts and tokens. The button awaits ``recalibrate`` on the
    notebook's own event loop and shows what it returns. A click while one runs is
    refused; an error is shown in place of a result.

    Args:
        recalibrate: A coroutine function of the settings that returns what is to be
            shown: one displayable object, or a list of them. The notebook's next cell
            awaits the same function.
        start: The settings that the sliders begin with.
        operands: The stops of the operand sliders, besides those to begin with.
        token_limits: The stops of the token-limit slider.
        prompt_tokens: Length of the longest prompt of these operands, for the bound.
    """

    def __init__(
        self,
        recalibrate: Callable[[CalibrationSettings], Awaitable[object]],
        *,
        start: CalibrationSettings,
        operands: Sequence[int],
        token_limits: Sequence[int],
        prompt_tokens: int,
    ) -> None:
        self._recalibrate = recalibrate
        self._start = start
        self._prompt_tokens = prompt_tokens
        self._running: asyncio.Task[None] | None = None
        self.a = _range_slider("first operand", operands, start.a)
        self.b = _range_slider("second operand", operands, start.b)
        self.group_size = widgets.IntSlider(
            start.group_size, 2, max(16, start.group_size), description="group size"
        )
        self.max_tokens = widgets.SelectionSlider(
            options=_with(token_limits, start.max_tokens),
            value=start.max_tokens,
            description="token limit",
        )
        self.button = widgets.Button(description="Recalibrate", button_style="primary")
        self.status = widgets.HTML()
        self.result = widgets.Output()
        sliders = (self.a, self.b, self.group_size, self.max_tokens)
        for slider in sliders:
            slider.style.description_width = "9em"
            slider.layout.width = "34em"
            slider.observe(self._show_bound, names="value")
        self.button.on_click(self._on_click)
        self._show_bound()
        super().__init__([*sliders, self.button, self.status, self.result])

    @property
    def settings(self) -> CalibrationSettings:
        """The settings that the sliders show."""
        return dataclasses.replace(
            self._start,
            a=tuple(self.a.value),
            b=tuple(self.b.value),
            group_size=self.group_size.value,
            max_tokens=self.max_tokens.value,
        )

    def _show_bound(self, _: object = None) -> None:
        if self._running is not None:
            return  # what is being sampled stays said
        settings = self.settings
        bound = settings.token_bound(self._prompt_tokens)
        self.status.value = (
            f"{settings.tasks} tasks × {settings.group_size} = {settings.rollouts} "
            f"rollouts, at most {bound:,} tokens"
        )

    def _on_click(self, _: widgets.Button) -> None:
        if self._running is not None:
            self.status.value = "One calibration is running; press again when it ends."
            return
        self._running = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        """Await the calibration and show it; an error is a result too."""
        self.status.value = "Sampling …"
        try:
            shown = await self._recalibrate(self.settings)
        except Exception as error:
            shown = _in_red(error)
        finally:  # an interrupted one leaves a panel that works, too
            self._running = None
            self._show_bound()
        self.result.outputs = ()
        for content in shown if isinstance(shown, list) else [shown]:
            self.result.append_display_data(content)


class RolloutBrowser(widgets.VBox):  # type: ignore[misc]
    """Filters over a run's rollouts, and a page of those that fit, reply by reply.

    Nothing is sampled or sent. The page is a
    :class:`~rlhelpers.rollouts.RolloutTable` of what
    :func:`~rlhelpers.rollouts.select_rollouts` chose; the notebook's next cell calls
    both. A slider with one stop only is left out.

    Args:
        records: Rows of ``rollouts.jsonl``.
        page: Rollouts shown at once.

    Raises:
        ValueError: There are no rollouts.
    """

    def __init__(self, records: Iterable[RolloutRecord], *, page: int = 5) -> None:
        self._records = list(records)
        if not self._records:
            raise ValueError("no rollouts to browse; read those of a run first")
        self._page, self._first = page, 0
        kinds = [("any", None), *((LABELS[kind], kind) for kind in KINDS)]
        self.outcome = widgets.Dropdown(
            options=kinds, value=None, description="outcome"
        )
        steps = sorted({record.step for record in self._records})
        rewards = sorted({record.reward for record in self._records})
        self.steps = _range_slider("steps", steps, (steps[0], steps[-1]))
        self.rewards = _range_slider("rewards", rewards, (rewards[0], rewards[-1]))
        filters = [self.outcome]
        filters += [self.steps] if len(steps) > 1 else []
        filters += [self.rewards] if len(rewards) > 1 else []
        self.back = widgets.Button(description="Back", disabled=True)
        self.next = widgets.Button(description="Next", disabled=True)
        self.status, self.table = widgets.HTML(), widgets.HTML()
        for control in filters:
            control.observe(self._filter, names="value")
        self.back.on_click(lambda _: self._turn(-page))
        self.next.on_click(lambda _: self._turn(page))
        self._turn(0)
        turning = widgets.HBox([self.back, self.next, self.status])
        super().__init__([*filters, turning, self.table])

    @property
    def chosen(self) -> list[RolloutRecord]:
        """The rollouts that fit the filters."""
        return select_rollouts(
            self._records,
            outcome=self.outcome.value,
            steps=tuple(self.steps.value),
            rewards=tuple(self.rewards.value),
        )

    def _filter(self, _: object) -> None:
        self._first = 0
        self._turn(0)

    def _turn(self, by: int) -> None:
        """Show the page ``by`` rollouts further on; an error is shown in its place."""
        try:
            chosen = self.chosen
            if 0 <= self._first + by < len(chosen):  # a click can come late
                self._first += by
            end = min(self._first + self._page, len(chosen))
            table = RolloutTable(chosen[self._first : end])
            self.table.value = table._repr_html_() if chosen else ""
        except Exception as error:
            self.table.value = _in_red(error)._repr_html_()
            return
        self.back.disabled, self.next.disabled = self._first == 0, end == len(chosen)
        self.status.value = (
            f"{len(chosen):,} of {len(self._records):,} rollouts fit; "
            f"here {self._first + 1:,} to {end:,}"
            if chosen
            else "no rollout fits; widen a filter"
        )


def _with(stops: Sequence[float], *values: float) -> list[float]:
    """The stops with the values to begin with among them, ascending."""
    return sorted({*stops, *values})


def _range_slider(
    label: str, stops: Sequence[float], start: tuple[float, float]
) -> widgets.SelectionRangeSlider:
    return widgets.SelectionRangeSlider(
        options=_with(stops, *start), value=start, description=label
    )


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


def _in_red(error: Exception) -> _Html:
    """What went wrong in a callback, where its result would have been."""
    text = f"{type(error).__name__}: {error}"
    return _Html(f'<p style="color:#B00020">{escape(text)}</p>', text)


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
