"""What the tiny policy is pre-trained on: worked multiplications, some badly ended.

The tiny policy plays the part of a base model: able, but badly behaved. Its
corpus is therefore sound arithmetic, written out step by step, plus three bad
habits that reinforcement learning can later unlearn:

* **loop**: it re-checks its work again and again, often until the token limit;
* **sentence**: it ends with ``The answer is 1692.`` instead of the bare integer;
* **no work**: it answers at once, which a small model can only guess.

Each habit is tied to a simple feature of the operands (see `habit_of`), because
a small model learns a last digit but not a hash of both operands. Where a habit
is tied it is likely but not certain: certain, all rollouts of a task would fail
alike and GRPO would have nothing to compare; rare, greedy decoding would never
show it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
PAD = "<|pad|>"

# ChatML as Qwen's instruct models render it, without their default system turn.
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content"
    " + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- endif %}"
)

# One token per digit lets arithmetic line up by place value; " * ", " + ", " = "
# and whole words keep the sequences short.
PRE_TOKENIZER_PATTERN = r"\d| [*+=] |\n| ?[^\s\d]+|\s+"

PROMPT = (
    "Compute {a} * {b}. Work step by step, "
    "then write only the final integer on the last line."
)

# Share of two-digit operands among the sums practised alone; else three digits.
SUMS_OF_TWO_DIGITS = 0.75


class Habit(Enum):
    """How a reply of the corpus is written."""

    CLEAN = "clean"
    LOOP = "loop"
    SENTENCE = "sentence"
    NO_WORK = "no work"


@dataclass(frozen=True)
class HabitRates:
    """Probabilities of the bad habits.

    Attributes:
        loop: of looping on a pair that is tied to it.
        sentence: of ending in a sentence on a pair that is tied to it.
        no_work: of answering at once on a pair that is tied to it. Higher,
            because the first digit of a guess is uncertain: only so does the
            guess win in greedy decoding.
        elsewhere: of each habit on a pair that is not tied to it.
        one_digit: of each habit when both operands have one digit.
        keep_looping: that a loop goes on after another pass of the work.
        max_passes: where a loop of the corpus ends at the latest. Enough to
            fill the default limit of 160 tokens; more would only teach copying.
    """

    loop: float = 0.70
    sentence: float = 0.75
    no_work: float = 0.80
    elsewhere: float = 0.02
    one_digit: float = 0.007
    keep_looping: float = 0.80
    max_passes: int = 6


@dataclass(frozen=True)
class SizeMix:
    """Relative frequency of operand sizes, as (digits of a, digits of b)."""

    weights: tuple[tuple[tuple[int, int], float], ...] = (
        ((1, 1), 0.04),
        ((1, 2), 0.04),
        ((2, 1), 0.06),
        ((2, 2), 0.61),
        ((1, 3), 0.02),
        ((3, 1), 0.04),
        ((2, 3), 0.03),
        ((3, 2), 0.04),
        ((3, 3), 0.12),
    )


# Nearly all two-digit pairs: the course's default range.
POLISH_MIX = SizeMix(
    (
        ((1, 1), 0.03),
        ((1, 2), 0.02),
        ((2, 1), 0.05),
        ((2, 2), 0.76),
        ((1, 3), 0.01),
        ((3, 1), 0.03),
        ((2, 3), 0.02),
        ((3, 2), 0.02),
        ((3, 3), 0.06),
    )
)


def prompt_text(a: int, b: int) -> str:
    """Return the task's prompt, as the course's environment words it."""
    return PROMPT.format(a=a, b=b)


def render_prompt(a: int, b: int) -> str:
    """Return the prompt as the chat template renders it, ready for a reply."""
    return f"{IM_START}user\n{prompt_text(a, b)}{IM_END}\n{IM_START}assistant\n"


def write_work(a: int, b: int) -> str:
    """Return the worked multiplication on one line.

    The partial products follow the digits of ``b``; a running sum adds them.

    >>> write_work(47, 36)
    '47 * 36 = 47 * 30 + 47 * 6 = 1410 + 282 = 1692'
    >>> write_work(7, 8)
    '7 * 8 = 56'
    """
    digits = str(b)
    places = [
        int(digit) * 10 ** (len(digits) - 1 - position)
        for position, digit in enumerate(digits)
        if digit != "0"
    ]
    steps = [f"{a} * {b}"]
    if len(places) > 1:
        steps.append(" + ".join(f"{a} * {place}" for place in places))
    terms = [a * place for place in places] or [0]
    while len(terms) > 1:
        steps.append(" + ".join(map(str, terms)))
        terms = [terms[0] + terms[1], *terms[2:]]
    return " = ".join([*steps, str(terms[0])])


def habit_of(a: int, b: int) -> Habit:
    """Return the habit that the operands are tied to, by their digits alone."""
    if a < 10 and b < 10:
        return Habit.CLEAN
    b_leading = int(str(b)[0])
    if b % 10 == 3 and b_leading <= 5:
        return Habit.SENTENCE
    if a % 10 in (3, 7):
        return Habit.LOOP
    if a % 10 == 2 and b_leading >= 4:
        return Habit.NO_WORK
    return Habit.CLEAN


def draw_habit(a: int, b: int, rates: HabitRates, rng: random.Random) -> Habit:
    """Draw the habit of one reply: the tied one, seldom another, else clean."""
    tied = habit_of(a, b)
    stray = rates.one_digit if a < 10 and b < 10 else rates.elsewhere
    tied_rates = {
        Habit.LOOP: rates.loop,
        Habit.SENTENCE: rates.sentence,
        Habit.NO_WORK: rates.no_work,
    }
    x = rng.random()
    for habit, tied_rate in tied_rates.items():
        x -= tied_rate if habit is tied else stray
        if x < 0:
            return habit
    return Habit.CLEAN


def write_reply(
    a: int, b: int, habit: Habit, rates: HabitRates, rng: random.Random
) -> str:
    """Return one reply in the given habit, without the end marker."""
    work = write_work(a, b)
    if habit is Habit.NO_WORK:
        return f"{a * b}"
    if habit is Habit.SENTENCE:
        return f"{work}\nThe answer is {a * b}."
    passes = 1
    if habit is Habit.LOOP:
        passes = 2
        while passes < rates.max_passes and rng.random() < rates.keep_looping:
            passes += 1
    lines = "\nWait, let me check.\n".join([work] * passes)
    return f"{lines}\n{a * b}"


def draw_operand(digits: int, rng: random.Random) -> int:
    """Draw an integer with that many digits, uniformly (1 to 9, 10 to 99, …)."""
    return rng.randrange(10 ** (digits - 1), 10**digits)


def draw_examples(
    count: int, mix: SizeMix, rates: HabitRates | None, rng: random.Random
) -> list[tuple[str, str]]:
    """Draw (rendered prompt, reply with end marker) pairs.

    ``rates=None`` writes clean replies only.
    """
    sizes, weights = zip(*mix.weights, strict=True)
    examples = []
    for a_digits, b_digits in rng.choices(sizes, weights, k=count):
        a, b = draw_operand(a_digits, rng), draw_operand(b_digits, rng)
        habit = Habit.CLEAN if rates is None else draw_habit(a, b, rates, rng)
        reply = write_reply(a, b, habit, rates or HabitRates(), rng)
        examples.append((render_prompt(a, b), reply + IM_END))
    return examples


def draw_works(count: int, mix: SizeMix, rng: random.Random) -> list[tuple[str, str]]:
    """Draw (start of the work, rest of a clean reply) pairs, without the prompt.

    The work restates its operands, so all that follows can be learnt without the
    prompt, which is half of a sequence.
    """
    sizes, weights = zip(*mix.weights, strict=True)
    works = []
    for a_digits, b_digits in rng.choices(sizes, weights, k=count):
        a, b = draw_operand(a_digits, rng), draw_operand(b_digits, rng)
        start = f"{a} * {b} = "
        rest = write_work(a, b).removeprefix(start)
        works.append((f"{IM_START}assistant\n{start}", f"{rest}\n{a * b}{IM_END}"))
    return works


def draw_sums(count: int, rng: random.Random) -> list[tuple[str, str]]:
    """Draw (partial products, running sum) pairs: the end of the work, alone.

    Carrying in the sum is what the model learns last. Without its prompt and its
    copied operands, a sum is practised at a fifth of the tokens.
    """
    sums: list[tuple[str, str]] = []
    while len(sums) < count:
        digits = 2 if rng.random() < SUMS_OF_TWO_DIGITS else 3
        work = write_work(draw_operand(digits, rng), draw_operand(digits, rng))
        parts = work.split(" = ", maxsplit=3)
        if len(parts) == 4:  # fewer when b has one digit other than zero
            sums.append((f" = {parts[2]} = ", parts[3] + "\n"))
    return sums


TOKENIZER_TEXT = (
    f"{prompt_text(1, 2)}\n{write_work(47, 36)}\n"
    "Wait, let me check.\nThe answer is 1692.\nsystem\nuser\nassistant\n"
)


def build_tokenizer(text: str = TOKENIZER_TEXT) -> PreTrainedTokenizerFast:
    """Train the byte-level BPE tokenizer and give it the chat template.

    All 256 bytes are in its alphabet, so any text survives encode and decode.
    Its merges only have to cover the words of the task, those in ``text``.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKENIZER_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1_000,  # above what the merges of this text can reach
        min_frequency=1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[PAD, IM_START, IM_END],
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=IM_END,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
