"""Calibration settings, their history, and one calibration read by range."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rlhelpers.analysis import calibration_verdict
from rlhelpers.calibration import (
    CalibrationHistory,
    CalibrationSettings,
    summarize_by_range,
    summarize_groups,
)

DEFAULT = CalibrationSettings(a=(10, 99), b=(1, 9), max_tokens=160)


def group(record: Callable[..., Any], task: str, rewards: str, **changes: Any) -> list:
    outcome = {"1": "correct", "0": "wrong_integer"}
    return [
        record(task, outcome[reward], rollout_index=i, **changes)
        for i, reward in enumerate(rewards)
    ]


def test_settings_say_what_they_cost() -> None:
    assert DEFAULT.rollouts == 24  # 6 × 4
    assert DEFAULT.token_bound(38) == 4752  # 24 × (38 + 160)


def test_the_same_settings_draw_the_same_tasks() -> None:
    slugs = [task.slug for task in DEFAULT.draw_tasks()]
    assert len(set(slugs)) == 6
    assert slugs == [task.slug for task in DEFAULT.draw_tasks()]
    for task in DEFAULT.draw_tasks():
        assert 10 <= task.args["a"] <= 99
        assert 1 <= task.args["b"] <= 9


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"group_size": 1}, "group_size must be at least 2, got 1"),
        ({"tasks": 0}, "tasks must be at least 1, got 0"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
    ],
)
def test_settings_that_cannot_work(changes: dict[str, int], said: str) -> None:
    values: dict[str, Any] = {"a": (1, 9), "b": (1, 9), "max_tokens": 8, **changes}
    with pytest.raises(ValueError, match=said):
        CalibrationSettings(**values)


def test_an_inverted_or_too_small_range_is_named() -> None:
    with pytest.raises(ValueError, match="min_a is 9 and max_a is 1"):
        CalibrationSettings(a=(9, 1), b=(1, 9), max_tokens=8).draw_tasks()
    with pytest.raises(ValueError, match="6 tasks asked for"):
        CalibrationSettings(a=(1, 2), b=(1, 2), max_tokens=8).draw_tasks()


def test_groups_by_hand(record: Callable[..., Any]) -> None:
    rollouts = [*group(record, "x", "1010"), *group(record, "y", "1111")]
    summary = summarize_groups(rollouts)
    assert (summary.groups, summary.kept, summary.flat_share) == (2, 1, 0.5)
    assert summary.reward_mean == 0.75
    # spread of 1,0,1,0: sqrt(4 × 0.25 / 3) = 0.57735; of the flat one 0
    assert summary.within_group_std == pytest.approx(0.57735 / 2, abs=1e-5)


def test_smaller_groups_cut_from_larger_ones(record: Callable[..., Any]) -> None:
    rollouts = [*group(record, "x", "11001"), *group(record, "y", "10110")]
    # in twos: 11 and 00 (the fifth is left out), 10 and 11
    pairs = summarize_groups(rollouts, group_size=2)
    assert (pairs.groups, pairs.kept) == (4, 1)
    assert pairs.reward_mean == 5 / 8
    with pytest.raises(ValueError, match="at least 6"):
        summarize_groups(rollouts, group_size=6)
    with pytest.raises(ValueError, match="calibrate first"):
        summarize_groups([])


def test_one_calibration_read_by_range(record: Callable[..., Any]) -> None:
    bands = ((1, 9), (10, 99))
    rollouts = [
        *group(record, "small", "11", args={"a": 3, "b": 9}),
        *group(record, "mixed", "10", args={"a": 3, "b": 10}),
        *group(record, "other", "00", args={"a": 9, "b": 99}),
    ]
    cells = summarize_by_range(rollouts, bands)
    assert set(cells) == {((1, 9), (1, 9)), ((1, 9), (10, 99))}
    assert cells[(1, 9), (1, 9)].reward_mean == 1.0
    assert cells[(1, 9), (10, 99)].reward_mean == 0.25
    assert cells[(1, 9), (10, 99)].kept == 1
    with pytest.raises(ValueError, match="operand 10 lies in none"):
        summarize_by_range(rollouts, bands[:1])


def test_the_history_is_a_table(record: Callable[..., Any]) -> None:
    history = CalibrationHistory()
    rollouts = [*group(record, "x", "1010"), *group(record, "y", "1111")]
    history.add(DEFAULT, calibration_verdict(rollouts))
    (row,) = history.rows()
    assert row[:4] == ("10 to 99", "1 to 9", "4", "160")
    assert row[4:] == ("0.75", "0.29", "1 of 2", "0 of 8", "Healthy")
    html = history._repr_html_()
    assert html.count("<tr>") == 2
    assert "<td>10 to 99</td>" in html
    lines = repr(history).splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("a         b       group size")
