"""The checkers of notebook 09: the right answer, and wrong ones a learner gives."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from rlhelpers.checks import check_episode_rows, check_lucky_waste, check_player
from rlhelpers.metrics import RolloutRecord

Capture = pytest.CaptureFixture[str]

RIGHT: dict[str, Any] = {
    "input": [1, 2, 3, 4, 5],
    "targets": [2, 3, 4, 5, 6],
    "advantages": [0, -0.5, -0.5, 0, -0.5],
}


def test_the_rows_of_an_episode(capsys: Capture) -> None:
    assert check_episode_rows(RIGHT)
    assert check_episode_rows({name: tuple(row) for name, row in RIGHT.items()})
    assert "✗" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"input": ...}, "… input"),
        ({"input": [1, 2, 3, 4, 5, 6]}, "a list of 5"),
        ({"targets": [1, 2, 3, 4, 5]}, "the first for targets"),
        ({"advantages": [0, -0.5, -0.5, -0.5, -0.5]}, "user's token 5 is trained"),
        ({"advantages": [0, 0, 0, 0, -0.5]}, "the first reply is masked"),
        ({"advantages": [0, 0, -0.5, -0.5, 0]}, "one position earlier"),
        ({"advantages": [0, 0.5, 0.5, 0, 0.5]}, "✗ advantages"),
        ({"advantages": -0.5}, "a list of 5"),
    ],
)
def test_wrong_rows(changes: dict[str, Any], said: str, capsys: Capture) -> None:
    assert not check_episode_rows({**RIGHT, **changes})
    assert said in capsys.readouterr().out


def test_rows_must_be_there(capsys: Capture) -> None:
    assert not check_episode_rows([1, 2])
    assert not check_episode_rows({"input": []})
    assert capsys.readouterr().out.count("keep the three rows") == 2


def bisects(low: int, high: int, history: list[tuple[int, str]]) -> int:
    for number, answer in history:
        if answer == "Higher.":
            low = max(low, number + 1)
        else:
            high = min(high, number - 1)
    return (low + high) // 2


def keeps_the_guess(low: int, high: int, history: list[tuple[int, str]]) -> int:
    for number, answer in history:
        low, high = (number, high) if answer == "Higher." else (low, number)
    return (low + high) // 2


def always_the_middle(low: int, high: int, history: list[tuple[int, str]]) -> int:
    return (low + high) // 2


def last_answer_alone(low: int, high: int, history: list[tuple[int, str]]) -> int:
    for number, answer in history[-1:]:
        low, high = (number + 1, high) if answer == "Higher." else (low, number - 1)
    return (low + high) // 2


def counts_up(low: int, high: int, history: list[tuple[int, str]]) -> int:
    return low + len(history)


def divides(low: int, high: int, history: list[tuple[int, str]]) -> Any:
    return (low + high) / 2


def test_a_player_that_bisects_passes(capsys: Capture) -> None:
    assert check_player(bisects)
    # Rounding up is as good.
    assert check_player(lambda low, high, h: -bisects(-high, -low, _mirrored(h)))
    assert "✗" not in capsys.readouterr().out


def _mirrored(history: list[tuple[int, str]]) -> list[tuple[int, str]]:
    turned = {"Higher.": "Lower.", "Lower.": "Higher."}
    return [(-number, turned[answer]) for number, answer in history]


@pytest.mark.parametrize(
    ("player", "said"),
    [
        (lambda low, high, history: ..., "… replace"),
        (keeps_the_guess, "40, from 10 to 40, is not found in 5"),
        (always_the_middle, "it guesses 25 again"),
        (last_answer_alone, "is not found in 5"),
        (counts_up, "is not found in 5"),
        (divides, "a guess is a whole number, got 25.0"),
        (lambda low, high, history: history[0][0], "it raises IndexError"),
        (lambda low, high, history: None, "a guess is a whole number"),
    ],
)
def test_players_that_do_not_pass(player: Any, said: str, capsys: Capture) -> None:
    assert not check_player(player)
    assert said in capsys.readouterr().out


LUCKY = RolloutRecord(
    run_id="r",
    phase="train",
    step=1,
    task="guess-10to40-33",
    task_index=0,
    rollout_index=0,
    args={"low": 10, "high": 40, "secret": 33},
    expected=33,
    got=[25, 12, 33],
    text="",
    reward=4 / 6,
    prompt_tokens=1,
    output_tokens=1,
    advantage=0.7,
)


def test_a_wasted_guess_that_was_pushed_up(capsys: Capture) -> None:
    assert check_lucky_waste(LUCKY, 2)
    assert "guess 2 of [25, 12, 33] was wasted" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("record", "turn", "said"),
    [
        (..., 2, "… replace"),
        (LUCKY, ..., "… replace"),
        (3, 2, "a record is one of `trained`"),
        (LUCKY, 0, "guesses 1 to 3"),
        (LUCKY, 4, "guesses 1 to 3"),
        (LUCKY, 1, "was still possible"),
        (LUCKY, 3, "was still possible"),
        (dataclasses.replace(LUCKY, advantage=-0.7), 2, "its advantage is -0.7"),
        (dataclasses.replace(LUCKY, advantage=None), 2, "its advantage is None"),
    ],
)
def test_no_injustice(record: Any, turn: Any, said: str, capsys: Capture) -> None:
    assert not check_lucky_waste(record, turn)
    assert said in capsys.readouterr().out
