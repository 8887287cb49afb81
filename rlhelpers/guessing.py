"""The course's environment of several turns: guess a number from "higher" or "lower".

``env`` is a HUD environment whose one template, :func:`guess`, opens a
:class:`Game` and answers every reply until the number is found or the guesses are used
up. The reward is for the whole game: 1 for a right first guess, less for each further
one, 0 for none.

The pure half below it reads finished games: how much of the range was left after each
guess, and how the policy compares with bisection.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any

from hud.environment import Environment
from hud.eval import Taskset
from hud.graders import EvaluationResult

from rlhelpers.advantages import sample_std
from rlhelpers.analysis import wilson_interval
from rlhelpers.answers import parse_final_integer
from rlhelpers.turns import Turns

if TYPE_CHECKING:
    from hud.eval.task import Task

    from rlhelpers.metrics import RolloutRecord

PROMPT_TEMPLATE = (
    "I think of a number from {low} to {high}. You have {guesses} guesses; "
    "I answer higher or lower. "
    "Write the range that is left, then your guess on the last line."
)
HIGHER = "Higher."
LOWER = "Lower."
NO_NUMBER = "Write one whole number on the last line."
GUESSES = 6
WIDTH = 31  # numbers in a range; bisection finds any of them in at most 5 guesses
SMALLEST, LARGEST = 10, 79  # of any range

env = Environment("guessing")
turns = Turns(env)


# The game


@dataclass
class Game:
    """One game, from the first guess to the last.

    Attributes:
        low, high: The range that the prompt names, both included.
        secret: The number to find.
        guesses: What was guessed so far; None where a reply held no number.

    Raises:
        ValueError: The secret lies outside the range.

    >>> game = Game(10, 40, 33)
    >>> game.answer("10 to 40\\n25"), game.answer("26 to 40\\n33")
    ('Higher.', None)
    >>> game.grade().reward  # found with the second of six guesses: 5/6
    0.8333333333333334
    """

    low: int
    high: int
    secret: int
    guesses: list[int | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.low <= self.secret <= self.high:
            raise ValueError(
                f"secret {self.secret} lies outside {self.low} to {self.high}: no "
                "player could find it; choose one within the range"
            )

    @property
    def found(self) -> bool:
        """Whether the last guess was right."""
        return bool(self.guesses) and self.guesses[-1] == self.secret

    @property
    def over(self) -> bool:
        """Whether the number is found or the guesses are used up."""
        return self.found or len(self.guesses) == GUESSES

    def answer(self, reply: str) -> str | None:
        """Take a reply's guess; what to say to it, or None once the game is over.

        Raises:
            ValueError: The game was over already.
        """
        if self.over:
            raise ValueError(f"the game is over after {len(self.guesses)} guesses")
        read = parse_final_integer(reply)
        number = read if isinstance(read, int) else None
        self.guesses.append(number)
        if number == self.secret or len(self.guesses) == GUESSES:
            return None
        if number is None:
            return NO_NUMBER
        return HIGHER if self.secret > number else LOWER

    def grade(self) -> EvaluationResult:
        """The reward of the whole game; ``info`` has the secret and every guess."""
        count = len(self.guesses)
        return EvaluationResult(
            reward=(GUESSES + 1 - count) / GUESSES if self.found else 0.0,
            content=f"{'found' if self.found else 'not found'} in {count} guesses",
            info={"expected": self.secret, "got": list(self.guesses)},
        )


@env.template(
    id="guess",
    description="Find a number from the answers higher and lower; fewer guesses pay.",
)
async def guess(low: int, high: int, secret: int) -> AsyncGenerator[Any, Any]:
    """Name the range, answer the replies, then grade the game that was played."""
    game = Game(low, high, secret)
    with turns.episode(game.answer) as bindings:
        prompt = PROMPT_TEMPLATE.format(low=low, high=high, guesses=GUESSES)
        yield {"prompt": prompt, "bindings": bindings}
        yield game.grade()


# Tasks


def guessing_task(low: int, secret: int, *, width: int = WIDTH) -> Task:
    """One game with a readable slug.

    >>> guessing_task(10, 33).slug
    'guess-10to40-33'
    """
    task = guess(low, low + width - 1, secret)
    task.slug = f"guess-{low}to{low + width - 1}-{secret}"
    return task


def make_guessing_tasks(
    *, train: int, held_out: int, seed: int
) -> tuple[Taskset, Taskset]:
    """Draw games for training and held-out games, whose ranges are all different ones.

    About a quarter of the ranges are held out: no training game names one of them.

    Args:
        train, held_out: How many games of each kind.
        seed: The same arguments and seed give the same games in the same order.

    Returns:
        ``(training taskset, held-out taskset)``; no game is drawn twice.

    Raises:
        ValueError: A number is below one, or there are fewer games than that.

    >>> training, held = make_guessing_tasks(train=2, held_out=1, seed=0)
    >>> len(training), len(held)
    (2, 1)
    """
    rng = random.Random(f"guessing {seed}")
    lows = list(range(SMALLEST, LARGEST - WIDTH + 2))
    rng.shuffle(lows)
    kept = len(lows) // 4
    sides = []
    for name, count, part in (
        ("held_out", held_out, lows[:kept]),
        ("train", train, lows[kept:]),
    ):
        games = [(low, low + step) for low in part for step in range(WIDTH)]
        if not 1 <= count <= len(games):
            raise ValueError(
                f"{name} is {count}; {len(part)} ranges of {WIDTH} numbers make "
                f"{len(games)} games, so ask for 1 to {len(games)}"
            )
        chosen = rng.sample(games, count)
        sides.append([guessing_task(low, secret) for low, secret in chosen])
    return Taskset("guessing-train", sides[1]), Taskset("guessing-held-out", sides[0])


# Reading finished games


def range_left(
    low: int, high: int, secret: int, guesses: Iterable[int | None]
) -> list[int]:
    """How many numbers are possible after each guess: 0 once it was right.

    Counted from the answers, whatever range the policy states.

    >>> range_left(10, 40, 33, [25, 25, 33])  # 26 to 40 is left, and again
    [15, 15, 0]
    """
    left = []
    for number in guesses:
        if number == secret:
            left.append(0)
            continue
        if number is not None and number < secret:
            low = max(low, number + 1)
        elif number is not None:
            high = min(high, number - 1)
        left.append(high - low + 1)
    return left


def bisection(low: int, high: int, secret: int) -> list[int]:
    """The guesses of a player who always takes the middle of what is left.

    >>> bisection(10, 40, 33)
    [25, 33]
    """
    guesses: list[int] = []
    while not guesses or guesses[-1] != secret:
        guesses.append((low + high) // 2)
        if guesses[-1] < secret:
            low = guesses[-1] + 1
        else:
            high = guesses[-1] - 1
    return guesses


def ruled_out(
    low: int, high: int, secret: int, guesses: Iterable[int | None]
) -> list[bool]:
    """For each guess, whether an earlier answer, or the prompt, had ruled it out.

    A reply without a number counts as ruled out too: it tells nothing.

    >>> ruled_out(10, 40, 33, [25, 25, 33])
    [False, True, False]
    """
    wasted = []
    for number in guesses:
        wasted.append(number is None or not low <= number <= high)
        if number is not None and number < secret:
            low = max(low, number + 1)
        elif number is not None:
            high = min(high, number - 1)
    return wasted


def left_of(record: RolloutRecord) -> list[int]:
    """:func:`range_left` of a recorded game, whose ``got`` holds its guesses."""
    return range_left(**_range_and_secret(record), guesses=record.got)


def wasted_of(record: RolloutRecord) -> list[bool]:
    """:func:`ruled_out` of a recorded game."""
    return ruled_out(**_range_and_secret(record), guesses=record.got)


def _range_and_secret(record: RolloutRecord) -> dict[str, int]:
    return {name: int(record.args[name]) for name in ("low", "high", "secret")}


def mean_range_left(records: Sequence[RolloutRecord]) -> list[float]:
    """Mean numbers left after 0, 1, … guesses; a finished game stays as it ended.

    Returns:
        ``GUESSES + 1`` means, the first over the whole ranges.
    """
    rows = []
    for record in records:
        left = [record.args["high"] - record.args["low"] + 1, *left_of(record)]
        rows.append(left + left[-1:] * (GUESSES + 1 - len(left)))
    return [fmean(column) for column in zip(*rows, strict=True)]


def bisection_left(records: Sequence[RolloutRecord]) -> list[float]:
    """:func:`mean_range_left` of a player who bisects, on the same games."""
    return mean_range_left(
        [
            dataclasses.replace(record, got=bisection(**_range_and_secret(record)))
            for record in records
        ]
    )


@dataclass(frozen=True)
class GamesSummary:
    """Some games in four numbers.

    Attributes:
        games: How many.
        found: Games in which the number was found.
        mean_guesses: Guesses of a game; all six where it was not found.
        wasted: Share of all guesses that were :func:`ruled_out`, 0 to 1.
    """

    games: int
    found: int
    mean_guesses: float
    wasted: float


def summarize_games(records: Sequence[RolloutRecord]) -> GamesSummary:
    """Summarise recorded games.

    Raises:
        ValueError: There are none.
    """
    if not records:
        raise ValueError("no games to summarise: roll out some first")
    return GamesSummary(
        games=len(records),
        found=sum(record.got[-1:] == [record.expected] for record in records),
        mean_guesses=fmean(len(record.got) for record in records),
        wasted=fmean(wasted for record in records for wasted in wasted_of(record)),
    )


def guesses_saved(
    before: Sequence[RolloutRecord], after: Sequence[RolloutRecord]
) -> tuple[float, float, float]:
    """How many guesses fewer the same games took, with a 95 % interval.

    The interval is the mean of the paired differences ± 1.96 standard errors.

    Args:
        before, after: One rollout of each game, both in the same order.

    Returns:
        ``(mean, low, high)``, guesses per game; above 0 is fewer.

    Raises:
        ValueError: The games are not the same, or fewer than two.
    """
    if [r.task for r in before] != [r.task for r in after] or len(before) < 2:
        raise ValueError(
            f"{len(before)} games before and {len(after)} after: give one rollout of "
            "each game on both sides, in the same order, at least two"
        )
    saved = [
        float(len(old.got) - len(new.got))
        for old, new in zip(before, after, strict=True)
    ]
    mean = fmean(saved)
    margin = 1.96 * sample_std(saved) / len(saved) ** 0.5
    return mean, mean - margin, mean + margin


@dataclass(frozen=True)
class GamesTable:
    """Summaries side by side; shows itself as a table.

    Attributes:
        columns: Heading → summary, in the order shown.
    """

    columns: Mapping[str, GamesSummary]

    def to_markdown(self) -> str:
        """The table in Markdown, with 95 % Wilson intervals."""
        rows = ["| | " + " | ".join(self.columns) + " |"]
        rows.append("|---" + "|---:" * len(self.columns) + "|")
        for name, cell in (
            ("found", _found_cell),
            ("mean guesses of a game", lambda s: f"{s.mean_guesses:.2f}"),
            ("guesses ruled out before", lambda s: f"{s.wasted:.1%}"),
        ):
            cells = " | ".join(cell(summary) for summary in self.columns.values())
            rows.append(f"| {name} | {cells} |")
        return "\n".join(rows)

    def _repr_markdown_(self) -> str:
        return self.to_markdown()


def _found_cell(summary: GamesSummary) -> str:
    low, high = wilson_interval(summary.found, summary.games)
    share = summary.found / summary.games
    return f"{share:.1%} ({100 * low:.1f} to {100 * high:.1f})"
