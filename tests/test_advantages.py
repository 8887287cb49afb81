"""Group-relative advantages, with values worked by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhelpers import group_relative_advantages, within_group_reward_std
from rlhelpers.advantages import sample_std


def runs_of(*pairs: tuple[str, Any]) -> list[Any]:
    return [
        SimpleNamespace(group_id=group, grade=SimpleNamespace(reward=reward))
        for group, reward in pairs
    ]


def test_a03_sample_standard_deviation_is_the_one_in_use() -> None:
    assert group_relative_advantages([1, 0, 0, 0]) == pytest.approx(
        [1.5, -0.5, -0.5, -0.5]
    )
    centred = group_relative_advantages([1, 0, 0, 0], scale="none")
    assert centred == pytest.approx([0.75, -0.25, -0.25, -0.25])


def test_a03_sum_is_zero_and_scale_of_rewards_cancels() -> None:
    small = group_relative_advantages([1, 0, 0, 1, 0])
    large = group_relative_advantages([1, -1, -1, 1, -1])
    assert small == pytest.approx(large)
    assert math.fsum(small) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    "rewards",
    [[0.1] * 3, [0.1] * 10, [0.2] * 7, [1.0] * 8, [0.0] * 8, [0.3, 0.3 + 1e-10]],
)
def test_a05_equal_rewards_are_exactly_flat(rewards: list[float]) -> None:
    assert group_relative_advantages(rewards) == [0.0] * len(rewards)
    assert group_relative_advantages(rewards, scale="none") == [0.0] * len(rewards)


def test_a_small_but_real_spread_still_counts() -> None:
    advantages = group_relative_advantages([0.0, 1e-6])
    assert advantages == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)])


def test_group_of_one_or_none_has_nothing_to_compare() -> None:
    assert group_relative_advantages([1.0]) == [0.0]
    assert group_relative_advantages([]) == []


@pytest.mark.parametrize("bad", [None, math.nan, math.inf, "1.0", np.float32("nan")])
def test_missing_or_non_finite_reward_is_an_error(bad: Any) -> None:
    with pytest.raises(ValueError, match="reward 1 is"):
        group_relative_advantages([1.0, bad])


def test_unknown_scale_is_named() -> None:
    with pytest.raises(ValueError, match="'population'"):
        group_relative_advantages([1, 0], scale="population")  # type: ignore[arg-type]


def test_numpy_rewards_and_booleans_are_numbers() -> None:
    assert group_relative_advantages([np.float32(1), np.float32(0)]) == pytest.approx(
        group_relative_advantages([True, False])
    )


def test_large_rewards_do_not_overflow() -> None:
    assert group_relative_advantages([1e200, 0, 0, 0])[0] == pytest.approx(1.5)


def test_a02_spread_is_measured_within_groups() -> None:
    runs = runs_of(*[("a", 1)] * 4, *[("b", 0)] * 4)
    assert within_group_reward_std(runs) == 0.0


def test_a08_groups_go_by_id_not_by_position() -> None:
    interleaved = runs_of(("a", 1), ("b", 1), ("a", 0), ("b", 1))
    # a = [1, 0] has sample std sqrt(0.5); b = [1, 1] is flat.
    expected = math.sqrt(0.5) / 2
    assert within_group_reward_std(interleaved) == pytest.approx(expected)
    assert within_group_reward_std(interleaved[::-1]) == pytest.approx(expected)


def test_group_of_one_counts_as_no_spread() -> None:
    runs = runs_of(("a", 1), ("a", 0), ("b", 1))
    assert within_group_reward_std(runs) == pytest.approx(math.sqrt(0.5) / 2)
    assert within_group_reward_std([]) == 0.0


def test_run_without_group_or_reward_is_named(graded_run: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="multiply-36x47.*group_id"):
        within_group_reward_std([graded_run(None, 1.0)])
    with pytest.raises(ValueError, match="multiply-36x47.*nan"):
        within_group_reward_std([graded_run("a", math.nan)])


def test_sample_std_against_numpy() -> None:
    values = [0.3, 0.9, 0.1, 0.5]
    assert sample_std(values) == pytest.approx(np.std(values, ddof=1))
