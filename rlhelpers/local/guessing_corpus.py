"""What the tiny guesser is pre-trained on: games of guessing a number, badly played.

A game is a conversation. The prompt names a range; each reply states what is left of
it and, on its last line, a guess; each user turn says ``Higher.`` or ``Lower.``. The
corpus plays by the rules and states the range soundly, and yet it plays badly. It mixes

* **bisect**: state what is left, guess its middle;
* **creep**: state what is left, guess the number next to the last guess;
* **careless**: say the last turn again, as if nothing had been said.

All three are certain once they are chosen. A guess drawn at random would be one more
source of chance in every reply, and the training signal is small beside it.

Each is tied to a simple feature (see `tie_of`): a small model learns such a tie,
sampling shows all three, and greedy decoding shows more than one. And a habit tends to
last: who crept goes on creeping, who was careless says the same a third time. So a
choice decides much of its game, and reinforcement learning can tell good from bad.

A reply depends on the turn before it alone: its range, its guess and the answer. So
most of the corpus is short pieces out of games (`draw_fragment`), without their prompt.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from rlhelpers.local.corpus import IM_END, IM_START

PROMPT = (
    "I think of a number from {low} to {high}. You have {guesses} guesses; "
    "I answer higher or lower. "
    "Write the range that is left, then your guess on the last line."
)
ANSWERS = {"higher": "Higher.", "lower": "Lower."}
GUESSES = 6
WIDTH = 31  # numbers in a range; bisection finds any of them in 5 guesses
SMALLEST, LARGEST = 10, 79  # of any range: always two digits

TOKENIZER_TEXT = (
    f"{PROMPT.format(low=1, high=2, guesses=3)}\n10 to 40\nHigher.\nLower.\n"
    "Write one whole number on the last line.\nsystem\nuser\nassistant\n"
)

#: After a guess that ends in one of these the careless habit is likely.
CARELESS_DIGITS = (3, 7)


class Habit(Enum):
    """How a guess of the corpus is made."""

    BISECT = "bisect"
    CREEP = "creep"
    CARELESS = "careless"


#: Tie → probability of each habit. Where a bad one is tied it is likelier than
#: bisection, or greedy decoding would never show it, and not certain, or all rollouts
#: of a task would play alike.
Rates = Mapping[str, Mapping[Habit, float]]
RATES: Rates = {
    "even tens": {Habit.BISECT: 0.65, Habit.CREEP: 0.35},
    "odd tens": {Habit.BISECT: 0.35, Habit.CREEP: 0.65},
    "crept": {Habit.BISECT: 0.10, Habit.CREEP: 0.90},
    "3 or 7": {Habit.BISECT: 0.40, Habit.CARELESS: 0.60},
    "other": {Habit.BISECT: 0.90, Habit.CARELESS: 0.10},
}


@dataclass(frozen=True)
class Turn:
    """One reply and what was said to it.

    Attributes:
        low, high: The range that the reply states.
        guess: The number on its last line.
        answer: ``"higher"``, ``"lower"``, or None where the guess was right.
    """

    low: int
    high: int
    guess: int
    answer: str | None

    def left(self) -> tuple[int, int]:
        """What is left of the stated range after the answer.

        >>> Turn(10, 40, 25, "higher").left()
        (26, 40)
        """
        if self.answer == "higher":
            return max(self.low, self.guess + 1), self.high
        return self.low, min(self.high, self.guess - 1)


def tie_of(last: Turn | None, start: tuple[int, int]) -> str:
    """Which tie a reply is under, by the prompt's range and the turn before it.

    >>> tie_of(None, (10, 40)), tie_of(None, (21, 51))
    ('odd tens', 'even tens')
    >>> tie_of(Turn(10, 40, 10, "higher"), (10, 40))  # its lower end
    'crept'
    >>> tie_of(Turn(10, 40, 27, "lower"), (10, 40))
    '3 or 7'
    """
    if last is None:
        return "odd tens" if start[0] // 10 % 2 else "even tens"
    if last.guess in (last.low, last.high):
        return "crept"
    return "3 or 7" if last.guess % 10 in CARELESS_DIGITS else "other"


def middle(low: int, high: int) -> int:
    """The middle of a range, rounded down.

    >>> middle(10, 40), middle(26, 40), middle(8, 9)
    (25, 33, 8)
    """
    return (low + high) // 2


def draw_reply(
    last: Turn | None,
    start: tuple[int, int],
    rng: random.Random,
    rates: Rates = RATES,
) -> tuple[int, int, int]:
    """The range and the guess of one reply; ``start`` is the prompt's range."""
    weights = rates[tie_of(last, start)]
    (habit,) = rng.choices(list(weights), list(weights.values()))
    if last is not None and habit is Habit.CARELESS:
        return last.low, last.high, last.guess
    low, high = start if last is None else last.left()
    if habit is Habit.BISECT:
        return low, high, middle(low, high)
    return low, high, high if last is not None and last.answer == "lower" else low


def draw_game(rng: random.Random, rates: Rates = RATES) -> list[Turn]:
    """One game of the corpus, up to the right guess or the last one."""
    low = rng.randint(SMALLEST, LARGEST - WIDTH + 1)
    start = (low, low + WIDTH - 1)
    secret = rng.randint(*start)
    turns: list[Turn] = []
    while len(turns) < GUESSES and not (turns and turns[-1].answer is None):
        stated = draw_reply(turns[-1] if turns else None, start, rng, rates)
        guess = stated[2]
        answer = "higher" if secret > guess else "lower"
        turns.append(Turn(*stated, None if guess == secret else answer))
    return turns


# --- Texts -------------------------------------------------------------------

#: Texts in order; the bool says whether the model learns to write this one.
Pieces = list[tuple[str, bool]]


def write_reply(turn: Turn) -> str:
    """The text of one reply, without its end marker.

    >>> write_reply(Turn(26, 40, 33, "lower"))
    '26 to 40\\n33'
    """
    return f"{turn.low} to {turn.high}\n{turn.guess}"


def user_turn(text: str) -> str:
    """A user turn and the start of the reply to it, as the chat template has them."""
    return f"{IM_START}user\n{text}{IM_END}\n{IM_START}assistant\n"


def write_turns(turns: list[Turn]) -> Pieces:
    """Replies, and what was said to each but the last."""
    pieces: Pieces = []
    for place, turn in enumerate(turns, start=1):
        pieces.append((write_reply(turn) + IM_END, True))
        if place < len(turns) and turn.answer is not None:
            pieces.append(("\n" + user_turn(ANSWERS[turn.answer]), False))
    return pieces


def draw_game_text(rng: random.Random) -> Pieces:
    """A whole game: the prompt, then replies and answers in turn."""
    turns = draw_game(rng)
    low = turns[0].low
    prompt = PROMPT.format(low=low, high=low + WIDTH - 1, guesses=GUESSES)
    return [(user_turn(prompt), False), *write_turns(turns)]


def draw_fragment(rng: random.Random) -> Pieces:
    """Two or three turns out of a game; the first is there to be read only."""
    turns = draw_game(rng)
    while len(turns) < 2:
        turns = draw_game(rng)
    begin = rng.randrange(len(turns) - 1)
    first, *rest = write_turns(turns[begin : begin + 3])
    return [(f"{IM_START}assistant\n{first[0]}", False), *rest]
