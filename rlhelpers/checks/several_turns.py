"""Notebook 09: the checkers of its exercises."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlhelpers.checks.marking import NOT_TRIED, as_list, is_whole_number, shown
from rlhelpers.guessing import bisection, wasted_of
from rlhelpers.metrics import RolloutRecord

#: Of the first exercise: prompt 1 2, reply 3 4, the user's 5, reply 6.
_ROWS: dict[str, list[Any]] = {
    "input": [1, 2, 3, 4, 5],
    "targets": [2, 3, 4, 5, 6],
    "advantages": [0.0, -0.5, -0.5, 0.0, -0.5],
}
_ALL_TRAINED = [0.0, -0.5, -0.5, -0.5, -0.5]
_LAST_ONLY = [0.0, 0.0, 0.0, 0.0, -0.5]
_NOT_SHIFTED = [0.0, 0.0, -0.5, -0.5, 0.0]

#: (low, high, [(guess, answer), …]) → the next guess.
Player = Callable[[int, int, list[tuple[int, str]]], int]


def check_episode_rows(rows: object) -> bool:
    """Notebook 09: the rows of a datum of two turns, advantage −0.5.

    Args:
        rows: The learner's ``input``, ``targets`` and ``advantages``; ``...`` where
            not tried yet.

    Returns:
        Whether all three rows are right.
    """
    if not isinstance(rows, Mapping) or rows.keys() != _ROWS.keys():
        print(f"✗ keep the three rows {', '.join(_ROWS)}; got {shown(rows)}")
        return False
    marks = [_row(name, rows[name]) for name in _ROWS]
    return all(marks)


def _row(name: str, given: object) -> bool:
    if given is NOT_TRIED:
        print(f"… {name}: replace the ... with a list")
        return False
    row, right = as_list(given), _ROWS[name]
    if row == right:
        print(f"✓ {name}")
        return True
    if row is None or len(row) != len(right):
        print(f"✗ {name}: a list of {len(right)}, all tokens but one; {shown(given)}")
    elif row == _ALL_TRAINED:
        print("✗ advantages: the user's token 5 is trained too; the policy did not")
        print("  write it, so nothing it could do better is in it")
    elif row == _LAST_ONLY:
        print("✗ advantages: the first reply is masked; it was sampled as well, and")
        print("  the reward is for the whole episode")
    elif row == _NOT_SHIFTED:
        print("✗ advantages: these stand on the input; the weight belongs to the")
        print("  token that is predicted, one position earlier")
    else:
        print(f"✗ {name}: {shown(given)}; write prompt, reply, user and reply in one")
        print("  row, then drop the last token for the input, the first for targets")
    return False


def check_player(player: Player) -> bool:
    """Notebook 09: a player that finds every number of a range as bisection does.

    Args:
        player: The learner's function of ``low``, ``high`` and the history, a list of
            (guess, "Higher." or "Lower."); returns the next guess.

    Returns:
        Whether it finds all numbers from 10 to 40, and from 1 to 31, in at most five
        guesses.
    """
    for low, high in ((10, 40), (1, 31)):
        for secret in range(low, high + 1):
            if not _finds(player, low, high, secret):
                return False
    print("✓ all 31 numbers of both ranges in at most 5 guesses")
    return True


def _finds(player: Player, low: int, high: int, secret: int) -> bool:
    history: list[tuple[int, str]] = []
    longest = max(len(bisection(low, high, number)) for number in range(low, high + 1))
    for _ in range(longest):
        try:
            number: Any = player(low, high, list(history))
        except Exception as error:
            print(f"✗ it raises {type(error).__name__}: {error}, after {history}")
            return False
        if number is NOT_TRIED:
            print("… replace the ... with the next guess")
            return False
        if not is_whole_number(number):
            print(f"✗ a guess is a whole number, got {shown(number)}")
            return False
        if number == secret:
            return True
        if number in [earlier for earlier, _ in history]:
            print(f"✗ it guesses {number} again, after {history}; leave it out of the")
            print("  range that is left")
            return False
        history.append((number, "Higher." if secret > number else "Lower."))
    print(f"✗ {secret}, from {low} to {high}, is not found in {longest}: {history}")
    return False


def check_lucky_waste(record: object, turn: object) -> bool:
    """Notebook 09: a wasted guess that the update makes more likely all the same.

    Args:
        record: A row of the run's rollouts; ``...`` if not tried yet.
        turn: The number of the guess in it, from 1.

    Returns:
        Whether the guess was ruled out before it was made, in a rollout with an
        advantage above 0.
    """
    if record is NOT_TRIED or turn is NOT_TRIED:
        print("… replace both ... with a record of `trained` and the guess's number")
        return False
    if not isinstance(record, RolloutRecord):
        print(f"✗ a record is one of `trained`, got {shown(record)}")
        return False
    if not is_whole_number(turn) or not 1 <= turn <= len(record.got):
        print(f"✗ this game has guesses 1 to {len(record.got)}, got {shown(turn)}")
        return False
    if (record.advantage or 0.0) <= 0:
        print(f"✗ its advantage is {record.advantage}: no token of it is pushed up")
        return False
    if not wasted_of(record)[turn - 1]:
        print(f"✗ guess {turn} of {record.got} was still possible: it told something")
        return False
    print(f"✓ guess {turn} of {record.got} was wasted, and its tokens are pushed up")
    print(f"  with weight {record.advantage:+.2f}: the game as a whole beat its group")
    return True
