"""Summaries, statistics, comparisons and verdicts, with values worked by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from rlhelpers.analysis import (
    CAUSES,
    OUTCOMES,
    OutcomeTable,
    calibration_verdict,
    cause_of,
    compare_before_after,
    compare_rewards,
    exact_mcnemar,
    expected_flat_share,
    mean_interval,
    mentions_integer,
    paired_change_interval,
    records_by_task,
    summarize_outcomes,
    tokens_by_cause,
    wilson_interval,
)

Make = Callable[..., Any]


@pytest.fixture
def group(record: Make) -> Callable[..., list[Any]]:
    """One task's rollouts, from a list of outcomes."""

    def make(task: str, outcomes: Sequence[str], **changes: Any) -> list[Any]:
        return [
            record(task, outcome, rollout_index=i, **changes)
            for i, outcome in enumerate(outcomes)
        ]

    return make


# Outcomes


def test_three_counts_add_up_and_the_limit_overlaps(record: Make) -> None:
    records = [
        record(outcome="correct", output_tokens=40),
        record(outcome="correct", output_tokens=160, token_limit=True),
        record(outcome="wrong_integer", output_tokens=20),
        record(outcome="invalid_final_line", output_tokens=160, token_limit=True),
        record(outcome="invalid_final_line", output_tokens=60),
    ]
    summary = summarize_outcomes(records)
    assert summary.n == 5
    assert (summary.correct, summary.wrong_integer, summary.invalid_final_line) == (
        2,
        1,
        2,
    )
    assert summary.token_limit == 2
    assert summary.mean_output_tokens == 88
    assert summary.accuracy == 0.4


def test_nothing_to_summarise() -> None:
    summary = summarize_outcomes([])
    assert summary.n == 0
    assert summary.accuracy is None
    assert summary.mean_output_tokens is None


def test_unknown_outcome_is_named(record: Make) -> None:
    with pytest.raises(ValueError, match="'maybe'.*wrong_integer"):
        summarize_outcomes([record(outcome="maybe")])


@pytest.mark.parametrize(
    ("outcome", "limit", "cause"),
    [
        ("correct", False, "correct"),
        ("correct", True, "correct"),  # cut off, but its last line was right
        ("invalid_final_line", True, "token_limit"),
        ("invalid_final_line", False, "invalid_final_line"),
        ("wrong_integer", True, "token_limit"),
        ("wrong_integer", False, "wrong_integer"),
    ],
)
def test_token_limit_comes_before_the_other_causes(
    record: Make, outcome: str, limit: bool, cause: str
) -> None:
    assert cause_of(record(outcome=outcome, token_limit=limit)) == cause


# Statistics


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (5, 10, 0.2366, 0.7634),
        (126, 128, 0.9448, 0.9957),
        (0, 0, 0.0, 1.0),
    ],
)
def test_wilson_interval(successes: int, n: int, low: float, high: float) -> None:
    assert wilson_interval(successes, n) == pytest.approx((low, high), abs=5e-5)


def test_wilson_interval_solves_its_defining_equation() -> None:
    # Each bound p is where |k/n - p| equals z standard errors of p itself.
    for successes, n in [(3, 17), (98, 128), (1, 4)]:
        for bound in wilson_interval(successes, n):
            distance = abs(successes / n - bound)
            assert distance == pytest.approx(
                1.959964 * math.sqrt(bound * (1 - bound) / n), rel=1e-5
            )


def test_wilson_interval_refuses_nonsense() -> None:
    with pytest.raises(ValueError, match="11 successes out of 10"):
        wilson_interval(11, 10)
    with pytest.raises(ValueError, match="confidence is 95"):
        wilson_interval(5, 10, confidence=95)


@pytest.mark.parametrize(
    ("before_only", "after_only", "p"),
    [
        (0, 0, 1.0),
        (0, 1, 1.0),
        (0, 5, 2 / 32),
        (5, 0, 2 / 32),
        (1, 9, 2 * 11 / 1024),
        (4, 4, 1.0),
        (2, 3, 1.0),
    ],
)
def test_exact_mcnemar(before_only: int, after_only: int, p: float) -> None:
    assert exact_mcnemar(before_only, after_only) == pytest.approx(p)


def test_exact_mcnemar_handles_large_counts() -> None:
    assert exact_mcnemar(0, 5000) == 0.0
    assert 0 < exact_mcnemar(450, 550) < 0.01
    with pytest.raises(ValueError, match="negative"):
        exact_mcnemar(-1, 2)


def test_paired_change_interval() -> None:
    low, high = paired_change_interval(0, 0, 128)
    assert low < 0 < high  # no change seen is not proof of none
    low, high = paired_change_interval(1, 30, 128)
    assert 0 < low < 29 / 128 < high < 1
    with pytest.raises(ValueError, match=r"5 \+ 5 changed tasks out of 9"):
        paired_change_interval(5, 5, 9)


def test_expected_flat_share() -> None:
    assert expected_flat_share(0.5, 4) == 0.125
    assert expected_flat_share(0.0, 8) == 1.0
    assert expected_flat_share(0.9, 8) == pytest.approx(0.9**8 + 0.1**8)
    assert expected_flat_share(0.3, 1) == pytest.approx(1.0)
    with pytest.raises(ValueError, match=r"p is 1\.2"):
        expected_flat_share(1.2, 4)


# Before and after


@pytest.fixture
def sides(record: Make) -> tuple[list[Any], list[Any]]:
    before = [
        record("t1", "correct"),
        record("t2", "correct"),
        record("t3", "wrong_integer"),
        record("t4", "invalid_final_line", output_tokens=160, token_limit=True),
        record("t5", "invalid_final_line"),
    ]
    after = [
        record("t5", "correct"),
        record("t4", "correct"),
        record("t3", "correct"),
        record("t2", "wrong_integer"),
        record("t1", "correct"),
    ]
    return before, after


def test_comparison_pairs_by_task_not_by_position(sides: Any) -> None:
    comparison = compare_before_after(*sides)
    assert comparison.fixed == ("t3", "t4", "t5")
    assert comparison.regressed == ("t2",)
    assert comparison.change == pytest.approx(0.4)
    assert comparison.p_value == pytest.approx(2 * 5 / 16)
    moved = {pair: n for pair, n in comparison.transitions.items() if n}
    assert moved == {
        ("correct", "correct"): 1,
        ("correct", "wrong_integer"): 1,
        ("token_limit", "correct"): 1,
        ("invalid_final_line", "correct"): 1,
        ("wrong_integer", "correct"): 1,
    }
    assert sum(comparison.transitions.values()) == 5
    assert set(comparison.transitions) == {(a, b) for a in CAUSES for b in CAUSES}


def test_comparison_table_shows_counts_intervals_and_regressions(sides: Any) -> None:
    text = compare_before_after(*sides).to_markdown()
    assert "| accuracy [95% interval] | 40.0% [11.8, 76.9] | 80.0% [37.6, 96.4] |" in (
        text
    )
    assert "| invalid final line | 2 | 0 |" in text
    assert "| wrong integer | 1 | 1 |" in text
    assert "| token limit hit (overlaps) | 1 | 0 |" in text
    assert "| mean output tokens | 64.0 | 40.0 |" in text
    assert "3 tasks were fixed and 1 regressed (exact McNemar test, p = 0.6250)" in text
    tables = [line for line in text.splitlines() if line.startswith("|")]
    widths = {line.count("|") for line in tables}
    assert widths == {4, 6}  # two well-formed tables
    assert compare_before_after(*sides)._repr_markdown_() == text


def test_comparison_of_different_tasks_is_refused(record: Make) -> None:
    one, two = [record("t1")], [record("t2")]
    with pytest.raises(ValueError, match=r"1 only before \(t1\), 1 only after \(t2\)"):
        compare_before_after(one, two)
    with pytest.raises(ValueError, match="'t1' has more than one rollout before"):
        compare_before_after(one * 2, one)
    with pytest.raises(ValueError, match="no rollouts after"):
        compare_before_after(one, [])


# Calibration


def test_a02_flat_groups_behind_a_healthy_mean_are_no_signal(group: Any) -> None:
    verdict = calibration_verdict(
        [*group("a", ["correct"] * 4), *group("b", ["wrong_integer"] * 4)]
    )
    assert verdict.code == "no_signal"
    assert verdict.reward_mean == 0.5
    assert verdict.within_group_std == 0.0
    assert (verdict.kept_groups, verdict.groups) == (0, 2)
    assert "no signal" in verdict.to_markdown().lower()


def test_a18_token_limit_is_named_before_too_hard(group: Any) -> None:
    verdict = calibration_verdict(
        group("a", ["invalid_final_line"] * 8, token_limit=True)
    )
    assert verdict.code == "token_limit"
    assert verdict.headline.startswith("Token limit first")
    assert "raise max_tokens" in verdict.advice


def test_no_valid_ending_is_told_from_too_hard(group: Any) -> None:
    never = calibration_verdict(group("a", ["invalid_final_line"] * 8))
    assert never.code == "no_valid_ending"
    assert "worked examples" in never.advice
    assert "graded reward" in never.advice
    mixed = calibration_verdict(
        [*group("a", ["invalid_final_line"] * 4), *group("b", ["wrong_integer"] * 4)]
    )
    assert mixed.code == "too_hard"


def test_too_easy_and_healthy(group: Any) -> None:
    easy = calibration_verdict(
        [*group("a", ["correct"] * 12), *group("b", ["correct"] * 11 + OUT_OF_ONE)]
    )
    assert easy.code == "too_easy"
    assert "larger operands" in easy.advice
    healthy = calibration_verdict(
        [
            *group("a", ["correct", "correct", "wrong_integer", "invalid_final_line"]),
            *group("b", ["correct"] * 4),
        ]
    )
    assert healthy.code == "healthy"
    assert healthy.healthy
    # Group a: rewards 1, 1, 0, 0 with sample std sqrt(1/3); group b is flat.
    assert healthy.within_group_std == pytest.approx(math.sqrt(1 / 3) / 2)
    assert (healthy.kept_groups, healthy.groups) == (1, 2)
    assert "1 of 2 groups" in healthy.to_markdown()


OUT_OF_ONE = ["wrong_integer"]


def test_some_cut_offs_do_not_hide_a_healthy_calibration(group: Any) -> None:
    records = [
        *group("a", ["correct", "correct", "correct"]),
        *group("a", ["invalid_final_line"], token_limit=True),
    ]
    assert calibration_verdict(records).code == "healthy"


def test_cut_off_but_right_is_no_reason_to_raise_the_limit(group: Any) -> None:
    records = group("a", ["correct"] * 4, token_limit=True)
    assert calibration_verdict(records).code == "too_easy"


def test_verdict_without_rollouts_is_refused() -> None:
    with pytest.raises(ValueError, match="run the calibration first"):
        calibration_verdict([])


def test_grouping_keeps_the_order_of_tasks(group: Any) -> None:
    records = [*group("b", OUTCOMES), *group("a", OUTCOMES)]
    assert list(records_by_task(records)) == ["b", "a"]


# What a comparison is made of


def test_outcome_table_gives_count_share_and_interval(sides: Any) -> None:
    before, after = (summarize_outcomes(side) for side in sides)
    empty = summarize_outcomes([])
    text = OutcomeTable({"old": before, "new": after, "none": empty}).to_markdown()
    # The intervals of 2 and 4 of 5 are those of the comparison's own table.
    assert text.splitlines() == [
        "| | old | new | none |",
        "|---|---:|---:|---:|",
        "| tasks | 5 | 5 | 0 |",
        "| correct | 2 = 40.0% [11.8, 76.9] | 4 = 80.0% [37.6, 96.4] | – |",
        "| invalid final line | 2 = 40.0% [11.8, 76.9] | 0 = 0.0% [0.0, 43.4] | – |",
        "| wrong integer | 1 = 20.0% [3.6, 62.4] | 1 = 20.0% [3.6, 62.4] | – |",
        "| token limit hit (overlaps) | 1 = 20.0% [3.6, 62.4] | 0 = 0.0% [0.0, 43.4] "
        "| – |",
        "| mean output tokens | 64.0 | 40.0 | – |",
    ]


def test_tokens_are_counted_under_one_cause_each(sides: Any) -> None:
    assert tokens_by_cause(sides[0]) == {
        "correct": 80,
        "token_limit": 160,
        "invalid_final_line": 40,
        "wrong_integer": 40,
    }
    assert tokens_by_cause([]) == dict.fromkeys(CAUSES, 0)


@pytest.mark.parametrize(
    ("text", "value", "found"),
    [
        ("36 * 47 = 1692\nThe answer is 1692.", 1692, True),
        ("so it is 1,692!", 1692, True),
        ("1,234,567", 1234567, True),
        ("16920 and 41692", 1692, False),
        ("1692.5", 1692, False),
        ("-1692", 1692, False),
        ("it is -1692", -1692, True),
        ("16, 92", 1692, False),
        ("", 1692, False),
    ],
)
def test_an_integer_is_found_anywhere_and_whole(
    text: str, value: int, found: bool
) -> None:
    assert mentions_integer(text, value) == found


# -- rewards without outcomes -----------------------------------------------------


@pytest.mark.parametrize(
    ("n", "t", "tolerance"),
    [
        # Two-sided 95 % quantiles of Student's t with n - 1 degrees of freedom, as in
        # any printed table.
        (2, 12.706, 1e-3),
        (3, 4.303, 1e-3),
        (4, 3.182, 5e-3),
        (6, 2.571, 1e-3),
        (31, 2.042, 1e-3),
        (128, 1.979, 1e-3),
    ],
)
def test_the_interval_of_a_mean_is_students(n: int, t: float, tolerance: float) -> None:
    values = [float(i) for i in range(n)]
    mean = (n - 1) / 2
    std = math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1))
    low, high = mean_interval(values)
    assert (low + high) / 2 == pytest.approx(mean)
    assert (high - mean) * math.sqrt(n) / std == pytest.approx(t, rel=tolerance)


def test_the_mean_of_one_value_says_nothing() -> None:
    assert mean_interval([0.5]) == (-math.inf, math.inf)


def test_rewards_are_compared_task_by_task(record: Make) -> None:
    def side(*rewards: float, **changes: Any) -> list[Any]:
        return [
            record(f"t{i}", reward=reward, outcome=None, **changes)
            for i, reward in enumerate(rewards)
        ]

    before = side(0.0, 0.5, 1.0, output_tokens=30, token_limit=True)
    after = side(0.5, 0.5, 1.0, output_tokens=6)
    compared = compare_rewards(before, after[::-1])  # whatever the order
    assert compared.differences == (0.5, 0.0, 0.0)
    assert (compared.better, compared.worse) == (1, 0)
    assert compared.p_value == 1.0  # one changed task is one coin
    # Standard errors 0.5 / √3 and 0.2887 / √3, times 4.3027.
    assert compared.to_markdown().splitlines() == [
        "| 3 tasks | mean reward [95% interval] | mean tokens | token limit hit |",
        "|---|---:|---:|---:|",
        "| before | 0.500 [-0.742, 1.742] | 30.0 | 3 |",
        "| after | 0.667 [-0.050, 1.384] | 6.0 | 0 |",
        "",
        "Mean reward changed by +0.167 [-0.550, +0.884]: 1 tasks earn more than "
        "before, 0 earn less (exact sign test, p = 1.0000).",
    ]
    alone = compare_rewards(before[:1], after[:1]).to_markdown()
    assert "| before | 0.000 | 30.0 | 1 |" in alone
    with pytest.raises(ValueError, match="not the same tasks"):
        compare_rewards(before, after[:2])


def test_counting_outcomes_that_do_not_exist_names_the_way_out(record: Make) -> None:
    with pytest.raises(ValueError, match=r"outcome None.*compare_rewards"):
        summarize_outcomes([record(outcome=None)])
