"""The shells around plain functions."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import ipywidgets
import pytest

from rlhelpers.calibration import CalibrationSettings
from rlhelpers.metrics import StepMetrics
from rlhelpers.training import StepResult
from rlhelpers.widgets import (
    CalibrationPanel,
    RolloutBrowser,
    TrainingDashboard,
    answer_box,
)


class Shown:
    """Collects what is displayed, in place of a notebook."""

    def __init__(self) -> None:
        self.contents: list[Any] = []
        self.updates: list[Any] = []

    def __call__(self, content: Any, *, display_id: bool = False) -> Shown:
        self.contents.append(content)
        return self

    def update(self, content: Any) -> None:
        self.updates.append(content)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Shown:
    collector = Shown()
    monkeypatch.setattr("rlhelpers.widgets.display", collector)
    return collector


def parts(box: ipywidgets.VBox) -> tuple[Any, Any, Any]:
    text, button, output = box.children
    return text, button, output


def test_a_click_grades_what_was_typed(shown: Shown) -> None:
    text, button, _ = parts(answer_box(str.upper, default="abc"))
    assert text.value == "abc"
    assert shown.contents == []  # nothing happens before the click
    text.value = "1692"
    button.click()
    assert shown.contents == ["1692"]


def result(step: int, reward: float, ratio_error: float | None) -> StepResult:
    metrics = StepMetrics.example(
        step=step, reward_mean=reward, kept_groups=3, max_ratio_error=ratio_error
    )
    return StepResult(metrics, (), (), ())


def test_the_dashboard_redraws_in_place(shown: Shown) -> None:
    dashboard = TrainingDashboard(steps=3, redraw_every=2)
    for step in (1, 2, 3):
        dashboard(result(step, step / 4, 1e-5 * step))
    # One line and one figure were displayed; the rest were updates of these two.
    assert len(shown.contents) == 2
    assert repr(shown.contents[0]) == "step 1 of 3: mean reward 0.25, 3 groups kept"
    lines = [repr(item) for item in shown.updates if not hasattr(item, "savefig")]
    assert lines[-1] == "step 3 of 3: mean reward 0.75, 3 groups kept"
    assert sum(hasattr(item, "savefig") for item in shown.updates) == 1  # at step 3
    assert dashboard.ratio_errors == [1e-5, 2e-5, pytest.approx(3e-5)]


def test_a_step_without_update_has_no_ratio(shown: Shown) -> None:
    dashboard = TrainingDashboard(steps=2)
    dashboard(result(1, 0.0, None))
    assert dashboard.ratio_errors == []
    assert len(dashboard.metrics) == 1


def test_a_resumed_dashboard_keeps_the_steps_and_draws_anew(shown: Shown) -> None:
    first = TrainingDashboard(steps=4, redraw_every=2)
    for step in (1, 2):
        first(result(step, 0.5, 1e-5))
    later = first.resumed()
    for step in (3, 4):
        later(result(step, 0.75, 2e-5))
    assert [row.step for row in later.metrics] == [1, 2, 3, 4]
    assert len(first.metrics) == 2
    assert later.ratio_errors == [1e-5, 1e-5, 2e-5, 2e-5]
    assert len(shown.contents) == 4  # a line and a figure in each of the two cells


# -- the calibration panel ----------------------------------------------------------

START = CalibrationSettings(a=(10, 99), b=(10, 99), max_tokens=160)


class Recalibrations:
    """Stands where the notebook's own function stands, and waits to be let go."""

    def __init__(self) -> None:
        self.asked: list[CalibrationSettings] = []
        self.go = asyncio.Event()

    async def __call__(self, settings: CalibrationSettings) -> object:
        self.asked.append(settings)
        await self.go.wait()
        if settings.max_tokens == 16:
            raise ValueError("a limit of <16> is too short")
        return [f"{settings.rollouts} rollouts", "a second part"]


def panel_for(recalibrate: Recalibrations) -> CalibrationPanel:
    return CalibrationPanel(
        recalibrate,
        start=START,
        operands=(1, 9, 100, 999),
        token_limits=(16, 64),
        prompt_tokens=38,
    )


def texts(panel: CalibrationPanel) -> list[str]:
    return [str(output["data"]["text/plain"]) for output in panel.result.outputs]


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_dragging_sends_nothing_and_shows_the_bound() -> None:
    recalibrate = Recalibrations()
    panel = panel_for(recalibrate)
    assert panel.settings == START
    assert "6 tasks × 4 = 24 rollouts, at most 4,752 tokens" in panel.status.value
    panel.group_size.value = 8
    panel.a.value = (1, 9)
    panel.max_tokens.value = 64
    await settle()
    assert recalibrate.asked == []
    # 48 rollouts of at most 38 + 64 tokens
    assert "48 rollouts, at most 4,896 tokens" in panel.status.value
    assert (panel.settings.a, panel.settings.b) == ((1, 9), (10, 99))


async def test_a_click_calibrates_with_what_the_sliders_show() -> None:
    recalibrate = Recalibrations()
    panel = panel_for(recalibrate)
    panel.b.value = (1, 9)
    panel.button.click()
    await settle()
    assert panel.status.value == "Sampling …"
    recalibrate.go.set()
    await settle()
    assert [settings.b for settings in recalibrate.asked] == [(1, 9)]
    assert texts(panel) == ["'24 rollouts'", "'a second part'"]
    panel.group_size.value = 2
    panel.button.click()
    await settle()
    assert texts(panel) == ["'12 rollouts'", "'a second part'"]  # in place of the first


async def test_a_second_click_while_one_runs_is_refused() -> None:
    recalibrate = Recalibrations()
    panel = panel_for(recalibrate)
    panel.button.click()
    await settle()
    panel.button.click()
    await settle()
    assert len(recalibrate.asked) == 1
    assert "is running" in panel.status.value
    recalibrate.go.set()
    await settle()
    panel.button.click()
    await settle()
    assert len(recalibrate.asked) == 2


async def test_n03_an_error_in_the_callback_is_seen() -> None:
    recalibrate = Recalibrations()
    recalibrate.go.set()
    panel = panel_for(recalibrate)
    panel.max_tokens.value = 16
    panel.button.click()
    await settle()
    assert texts(panel) == ["ValueError: a limit of <16> is too short"]
    assert "&lt;16&gt;" in panel.result.outputs[0]["data"]["text/html"]
    panel.max_tokens.value = 64  # and the panel still works
    panel.button.click()
    await settle()
    assert texts(panel) == ["'24 rollouts'", "'a second part'"]


async def test_an_interrupted_calibration_leaves_a_panel_that_works() -> None:
    recalibrate = Recalibrations()
    panel = panel_for(recalibrate)
    panel.button.click()
    await settle()
    panel.group_size.value = 8  # what is being sampled stays said
    assert panel.status.value == "Sampling …"
    assert panel._running is not None
    panel._running.cancel()  # as the stop button does
    await settle()
    assert "48 rollouts" in panel.status.value
    recalibrate.go.set()
    panel.button.click()
    await settle()
    assert texts(panel) == ["'48 rollouts'", "'a second part'"]


# -- the rollout browser ------------------------------------------------------------


@pytest.fixture
def browser(record: Callable[..., Any]) -> RolloutBrowser:
    """Twelve rollouts: three steps of four, the second of each step wrong."""
    records = [
        record(
            outcome="wrong_integer" if index == 1 else "correct",
            step=step,
            rollout_index=index,
            text=f"reply {step}.{index} <b>",
        )
        for step in (1, 2, 3)
        for index in range(4)
    ]
    return RolloutBrowser(records, page=5)


def replies(browser: RolloutBrowser) -> list[str]:
    return re.findall(r"reply (\d\.\d) &lt;b&gt;", browser.table.value)


def test_the_browser_turns_its_pages(browser: RolloutBrowser) -> None:
    assert replies(browser) == ["1.0", "1.1", "1.2", "1.3", "2.0"]
    assert browser.status.value == "12 of 12 rollouts fit; here 1 to 5"
    assert (browser.back.disabled, browser.next.disabled) == (True, False)
    browser.next.click()
    browser.next.click()
    assert replies(browser) == ["3.2", "3.3"]
    assert browser.status.value == "12 of 12 rollouts fit; here 11 to 12"
    assert (browser.back.disabled, browser.next.disabled) == (False, True)
    browser.next.click()  # pressed before the button was seen to be disabled
    assert replies(browser) == ["3.2", "3.3"]
    browser.back.click()
    assert replies(browser)[0] == "2.1"


def test_a_filter_begins_at_the_first_page(browser: RolloutBrowser) -> None:
    browser.next.click()
    browser.outcome.value = "wrong_integer"
    assert replies(browser) == ["1.1", "2.1", "3.1"]
    browser.steps.value = (2, 3)
    assert replies(browser) == ["2.1", "3.1"]
    assert browser.status.value == "2 of 12 rollouts fit; here 1 to 2"
    browser.rewards.value = (1.0, 1.0)
    assert browser.status.value == "no rollout fits; widen a filter"
    assert browser.table.value == ""
    browser.outcome.value = None
    assert len(browser.chosen) == 6


def test_a_slider_with_nothing_to_slide_is_left_out(record: Callable[..., Any]) -> None:
    browser = RolloutBrowser([record(), record(outcome="wrong_integer")])
    assert browser.rewards in browser.children
    assert browser.steps not in browser.children
    with pytest.raises(ValueError, match="no rollouts to browse"):
        RolloutBrowser([])


def test_n03_an_error_in_the_browser_is_seen(
    browser: RolloutBrowser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(browser, "_records", [None])
    browser.outcome.value = "correct"
    assert "AttributeError" in browser.table.value
