"""Choosing rollouts to read, and the table that shows them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rlhelpers.rollouts import RolloutTable, select_rollouts


@pytest.fixture
def records(record: Callable[..., Any]) -> list[Any]:
    """Six rollouts of three steps; one of them was cut off."""
    return [
        record("multiply-3x4", "correct", step=1, text="3 * 4 = 12\n12"),
        record("multiply-3x4", "wrong_integer", step=1, text="13"),
        record("multiply-5x6", "invalid_final_line", step=2, text="Wait"),
        record("multiply-5x6", "invalid_final_line", step=2, token_limit=True),
        record("multiply-7x8", "correct", step=3, reward=0.5),
        record("multiply-7x8", "correct", step=3),
    ]


@pytest.mark.parametrize(
    ("filters", "chosen"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"outcome": "correct"}, [0, 4, 5]),
        ({"outcome": "token_limit"}, [3]),
        ({"steps": (2, 3)}, [2, 3, 4, 5]),
        ({"rewards": (0.5, 1.0)}, [0, 4, 5]),
        ({"outcome": "invalid_final_line", "steps": (2, 2)}, [2, 3]),
        ({"outcome": "wrong_integer", "steps": (3, 3)}, []),
    ],
)
def test_every_filter_holds(
    records: list[Any], filters: dict[str, Any], chosen: list[int]
) -> None:
    assert select_rollouts(records, **filters) == [records[i] for i in chosen]


def test_filters_that_cannot_be_meant_are_refused(records: list[Any]) -> None:
    with pytest.raises(ValueError, match="no outcome 'right'; choose one of correct"):
        select_rollouts(records, outcome="right")
    with pytest.raises(ValueError, match="steps = \\(5, 1\\)"):
        select_rollouts(records, steps=(5, 1))
    with pytest.raises(ValueError, match="rewards"):
        select_rollouts(records, rewards=(1.0, 0.0))


def test_a_row_holds_the_reply_beside_its_numbers(record: Callable[..., Any]) -> None:
    told = record(
        step=7,
        args={"a": 36, "b": 47},
        text="1692",
        advantage=-0.75,
        finish_reason="stop",
        output_tokens=5,
    )
    cut = record("other-task", "invalid_final_line", token_limit=True, text="36 *")
    assert RolloutTable([told, cut]).rows() == [
        ("7", "36 × 47", "1", "-0.75", "correct", "5", "stop", "1692"),
        ("0", "other-task", "0", "none", "invalid final line", "40", "cut off", "36 *"),
    ]


def test_what_a_policy_says_is_text_never_markup(record: Callable[..., Any]) -> None:
    reply = '<script>alert("1")</script>\n<img src=x onerror=y> & 2 < 3'
    html = RolloutTable([record("<b>slug</b>", text=reply)])._repr_html_()
    for tag in ("<script", "<img", "<b>"):
        assert tag not in html
    assert "&lt;script&gt;alert(&quot;1&quot;)&lt;/script&gt;\n&lt;img" in html
    assert "&amp; 2 &lt; 3" in html
    assert "<i>(empty)</i>" in RolloutTable([record(text="")])._repr_html_()


def test_as_text_it_keeps_one_line_a_rollout(record: Callable[..., Any]) -> None:
    long = record(text="\n".join(["36 * 47 = 1692"] * 20))
    head, *lines = repr(RolloutTable([record(text="a\nb"), long])).splitlines()
    assert head.split() == [
        *("step", "task", "reward", "advantage", "outcome", "tokens", "ended"),
        "reply",
    ]
    assert lines[0].endswith("  a / b")
    assert lines[1].endswith("…")
    assert len(lines) == 2
    assert lines[0].index("a / b") == lines[1].index("36 * 47")  # columns line up


def test_no_rollouts_leave_the_head_of_the_table() -> None:
    assert repr(RolloutTable([])).startswith("step  task")
    assert "<td" not in RolloutTable([])._repr_html_()
