"""The guessing game: its rules, its tasks, and how finished games are read."""

from __future__ import annotations

import itertools
import random

import pytest

from rlhelpers.guessing import (
    GUESSES,
    HIGHER,
    LOWER,
    NO_NUMBER,
    PROMPT_TEMPLATE,
    Game,
    GamesTable,
    bisection,
    bisection_left,
    guesses_saved,
    guessing_task,
    make_guessing_tasks,
    mean_range_left,
    range_left,
    ruled_out,
    summarize_games,
)
from rlhelpers.local import guessing_corpus
from rlhelpers.metrics import RolloutRecord


def record(*guesses: int | None, secret: int = 33, low: int = 10) -> RolloutRecord:
    return RolloutRecord(
        run_id="r",
        phase="before",
        step=0,
        task=f"guess-{low}to{low + 30}-{secret}",
        task_index=0,
        rollout_index=0,
        args={"low": low, "high": low + 30, "secret": secret},
        expected=secret,
        got=list(guesses),
        text="",
        reward=0.0,
        prompt_tokens=1,
        output_tokens=1,
    )


# -- the game ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("replies", "answers", "reward"),
    [
        (["33"], [None], 1.0),
        (["10 to 40\n25", "26 to 40\n33"], [HIGHER, None], 5 / 6),
        (["40", "10", "33"], [LOWER, HIGHER, None], 4 / 6),
        # Five wrong guesses, and the last one right: 1/6; wrong: nothing.
        (["1", "2", "3", "4", "5", "33"], [HIGHER] * 5 + [None], 1 / 6),
        (["1", "2", "3", "4", "5", "6"], [HIGHER] * 5 + [None], 0.0),
        # No number is a wasted guess, and says what to do.
        (["The answer is 33.", "", "33"], [NO_NUMBER, NO_NUMBER, None], 4 / 6),
        (["9" * 5000, "33"], [NO_NUMBER, None], 5 / 6),
        (["33 to 40\n34"], [LOWER], 0.0),  # not over: the player gave up
    ],
)
def test_a_game_by_hand(
    replies: list[str], answers: list[str | None], reward: float
) -> None:
    game = Game(10, 40, 33)
    assert [game.answer(reply) for reply in replies] == answers
    result = game.grade()
    assert result.reward == pytest.approx(reward)
    assert result.info["expected"] == 33
    assert len(result.info["got"]) == len(replies)
    if answers[-1] is None:
        with pytest.raises(ValueError, match="the game is over"):
            game.answer("33")


def test_a_game_that_cannot_be_won_is_refused() -> None:
    with pytest.raises(ValueError, match="secret 41 lies outside 10 to 40"):
        Game(10, 40, 41)


def test_bisection_finds_every_number_in_five() -> None:
    lengths = [len(bisection(10, 40, secret)) for secret in range(10, 41)]
    # 1 + 2 + 4 + 8 + 16 numbers are found with 1, 2, … 5 guesses.
    assert sorted(lengths) == [1] + [2] * 2 + [3] * 4 + [4] * 8 + [5] * 16
    assert max(lengths) < GUESSES


def test_the_game_is_the_one_that_the_tiny_guesser_was_made_for() -> None:
    assert PROMPT_TEMPLATE == guessing_corpus.PROMPT
    assert guessing_corpus.ANSWERS == {"higher": HIGHER, "lower": LOWER}
    assert guessing_corpus.GUESSES == GUESSES


# -- tasks ------------------------------------------------------------------------


def test_held_out_games_name_other_ranges() -> None:
    training, held_out = make_guessing_tasks(train=400, held_out=200, seed=3)
    assert (len(training), len(held_out)) == (400, 200)
    slugs = [task.slug for task in (*training, *held_out)]
    assert len(set(slugs)) == 600
    ranges = [{task.args["low"] for task in side} for side in (training, held_out)]
    assert not ranges[0] & ranges[1]
    for task in (*training, *held_out):
        args = task.args
        assert 10 <= args["low"] <= args["secret"] <= args["high"] <= 79
        assert args["high"] - args["low"] == 30


def test_tasks_repeat_with_their_seed() -> None:
    def slugs(seed: int) -> list[str | None]:
        made = make_guessing_tasks(train=5, held_out=5, seed=seed)
        return [task.slug for side in made for task in side]

    assert slugs(1) == slugs(1)
    assert slugs(1) != slugs(2)


def test_too_many_games_are_refused_with_the_number_there_is() -> None:
    # 40 ranges, from 10 to 40 up to 49 to 79: 10 are held out, 310 games; 930 are left.
    with pytest.raises(ValueError, match=r"held_out is 311; .* 310 games"):
        make_guessing_tasks(train=1, held_out=311, seed=0)
    with pytest.raises(ValueError, match=r"train is 931; .* 930 games"):
        make_guessing_tasks(train=931, held_out=1, seed=0)
    with pytest.raises(ValueError, match="train is 0"):
        make_guessing_tasks(train=0, held_out=1, seed=0)


def test_a_task_names_its_game() -> None:
    task = guessing_task(10, 33)
    assert task.slug == "guess-10to40-33"
    assert task.args == {"low": 10, "high": 40, "secret": 33}


# -- finished games ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("guesses", "left", "wasted"),
    [
        ([25, 33], [15, 0], [False, False]),
        ([25, 37, 29, 33], [15, 11, 7, 0], [False] * 4),
        ([25, 20, 33], [15, 15, 0], [False, True, False]),  # 20 was ruled out
        ([None, 25], [31, 15], [True, False]),
        ([50, 40], [31, 30], [True, False]),  # 50 is no number of the range
    ],
)
def test_what_is_left_and_what_was_wasted(
    guesses: list[int | None], left: list[int], wasted: list[bool]
) -> None:
    assert range_left(10, 40, 33, guesses) == left
    assert ruled_out(10, 40, 33, guesses) == wasted


def test_games_are_summed_up() -> None:
    games = [record(25, 33), record(25, 20, 26, 27, 28, 29)]
    summary = summarize_games(games)
    assert (summary.games, summary.found, summary.mean_guesses) == (2, 1, 4.0)
    assert summary.wasted == 1 / 8
    # 31, then 15 twice; after two guesses 0 and 15; at the end 0 and 30 to 40.
    assert mean_range_left(games)[:3] == [31, 15, 7.5]
    assert mean_range_left(games)[-1] == 5.5
    assert bisection_left(games) == [31, 15, 0, 0, 0, 0, 0]
    with pytest.raises(ValueError, match="no games"):
        summarize_games([])
    table = GamesTable({"before": summary}).to_markdown()
    # Wilson, 95 %, 1 of 2: 9.5 to 90.5.
    assert "| found | 50.0% (9.5 to 90.5) |" in table
    assert "| guesses ruled out before | 12.5% |" in table


def test_guesses_saved_are_paired() -> None:
    before = [record(25, 26, 33), record(1, 2, 3, 4, secret=12)]
    after = [record(25, 33), record(12, secret=12)]
    # Differences 1 and 3: mean 2, standard deviation √2, standard error 1.
    assert guesses_saved(before, after) == pytest.approx((2.0, 0.04, 3.96))
    with pytest.raises(ValueError, match="2 games before and 1 after"):
        guesses_saved(before, after[:1])


# -- the corpus -------------------------------------------------------------------


def test_the_corpus_plays_by_the_rules() -> None:
    rng = random.Random(0)
    for _ in range(300):
        game = guessing_corpus.draw_game(rng)
        assert 1 <= len(game) <= GUESSES
        assert all(turn.answer for turn in game[:-1])
        for turn in game:
            assert turn.low <= turn.guess <= turn.high
        for turn, following in itertools.pairwise(game):
            stated = (following.low, following.high)
            assert stated in (turn.left(), (turn.low, turn.high))


@pytest.mark.parametrize(
    ("last", "start", "likelier", "share"),
    [
        # (the turn before, the prompt's range, the likelier reply, its probability)
        (None, (30, 60), (30, 60, 30), 0.65),  # three tens: creeps
        (None, (40, 70), (40, 70, 55), 0.65),  # four tens: bisects
        ((30, 60, 30, "higher"), (30, 60), (31, 60, 31), 0.90),  # goes on creeping
        ((30, 60, 60, "lower"), (30, 60), (30, 59, 59), 0.90),
        ((10, 40, 27, "lower"), (10, 40), (10, 40, 27), 0.60),  # says it again
        ((10, 40, 25, "lower"), (10, 40), (10, 24, 17), 0.90),
    ],
)
def test_a_habit_is_likely_where_it_is_tied_and_not_certain(
    last: tuple[int, int, int, str] | None,
    start: tuple[int, int],
    likelier: tuple[int, int, int],
    share: float,
) -> None:
    rng = random.Random(0)
    turn = guessing_corpus.Turn(*last) if last else None
    drawn = [guessing_corpus.draw_reply(turn, start, rng) for _ in range(2000)]
    assert drawn.count(likelier) / 2000 == pytest.approx(share, abs=0.04)


def test_only_replies_are_learnt() -> None:
    rng = random.Random(1)
    pieces = guessing_corpus.draw_game_text(rng)
    assert pieces[0][0].startswith("<|im_start|>user\nI think of a number from ")
    assert [learnt for _, learnt in pieces[1:]][:2] == [True, False][: len(pieces) - 1]
    for text, learnt in pieces:
        assert learnt == (not text.startswith(("<|im_start|>user", "\n<|im_start|>")))
    first, *rest = guessing_corpus.draw_fragment(rng)
    assert first[0].startswith("<|im_start|>assistant\n")
    assert not first[1]
    assert any(learnt for _, learnt in rest)
