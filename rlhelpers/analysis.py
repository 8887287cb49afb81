"""Reading results: outcome classes, before against after, and verdicts.

Works on :class:`~rlhelpers.metrics.RolloutRecord` rows or anything with the same
attributes. Pure: no I/O, no service.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean
from typing import Any, Literal, Protocol

from rlhelpers.advantages import FLAT_SPREAD, sample_std
from rlhelpers.answers import parse_final_integer
from rlhelpers.tables import markdown_table

Outcome = Literal["correct", "wrong_integer", "invalid_final_line"]

#: Every rollout is exactly one of these; the order of all tables and plots.
OUTCOMES: tuple[Outcome, ...] = ("correct", "wrong_integer", "invalid_final_line")

#: Why a rollout failed, in the order in which causes are named: a reply that was cut
#: off has no valid ending, and a reply without a valid ending has no integer.
CAUSES: tuple[str, ...] = (
    "correct",
    "token_limit",
    "invalid_final_line",
    "wrong_integer",
)

#: How outcomes and causes are called in text, tables and plots.
LABELS: Mapping[str, str] = {
    "correct": "correct",
    "wrong_integer": "wrong integer",
    "invalid_final_line": "invalid final line",
    "token_limit": "token limit hit",
}


class Rollout(Protocol):
    """What is read from a rollout record."""

    @property
    def task(self) -> str: ...
    @property
    def rollout_index(self) -> int: ...
    @property
    def reward(self) -> float: ...
    @property
    def outcome(self) -> str | None: ...
    @property
    def token_limit(self) -> bool: ...
    @property
    def output_tokens(self) -> int: ...


# Outcomes


def classify_outcome(answer: object, expected: int) -> Outcome:
    """Say which of the three outcomes a reply is; the grader's own rule decides.

    A reply that the token limit cut off is classed by its last line like any other;
    the limit is a separate flag.

    >>> classify_outcome("1692", 1692), classify_outcome("The answer is 1692.", 1692)
    ('correct', 'invalid_final_line')
    """
    got = parse_final_integer(answer)
    if got is None:
        return "invalid_final_line"
    return "correct" if got == expected else "wrong_integer"


def cause_of(rollout: Rollout) -> str:
    """One cause per rollout, from :data:`CAUSES`.

    A cut-off reply whose last line happens to be right is ``correct``.
    """
    if rollout.outcome == "correct":
        return "correct"
    return "token_limit" if rollout.token_limit else _outcome(rollout)


def _outcome(rollout: Rollout) -> str:
    if rollout.outcome not in OUTCOMES:
        raise ValueError(
            f"rollout of task {rollout.task!r} has outcome {rollout.outcome!r}; "
            f"expected one of {', '.join(OUTCOMES)}. A task of your own has outcomes "
            "only if its grader reports the right integer as info['expected']; without "
            "them, compare rewards (compare_rewards, plot_rewards, plot_group_rewards)"
        )
    return rollout.outcome


def records_by_task(records: Iterable[Rollout]) -> dict[str, list[Any]]:
    """Rollouts of each task, in order of first appearance."""
    groups: dict[str, list[Any]] = {}
    for record in records:
        groups.setdefault(record.task, []).append(record)
    return groups


@dataclass(frozen=True)
class OutcomeSummary:
    """Counts over a set of rollouts; the three outcomes add up to ``n``."""

    n: int
    correct: int
    wrong_integer: int
    invalid_final_line: int
    token_limit: int  # overlaps the three
    mean_output_tokens: float | None  # None if n is 0

    @property
    def accuracy(self) -> float | None:
        """Share of correct rollouts, 0 to 1; ``None`` if there are none."""
        return self.correct / self.n if self.n else None


def summarize_outcomes(records: Iterable[Rollout]) -> OutcomeSummary:
    """Count the outcomes, limit hits and tokens of some rollouts."""
    rollouts = list(records)
    counts = Counter(_outcome(rollout) for rollout in rollouts)
    return OutcomeSummary(
        n=len(rollouts),
        correct=counts["correct"],
        wrong_integer=counts["wrong_integer"],
        invalid_final_line=counts["invalid_final_line"],
        token_limit=sum(rollout.token_limit for rollout in rollouts),
        mean_output_tokens=(
            fmean(rollout.output_tokens for rollout in rollouts) if rollouts else None
        ),
    )


# Statistics


def wilson_interval(
    successes: int, n: int, confidence: float = 0.95
) -> tuple[float, float]:
    """Interval for a proportion (Wilson 1927), sound near 0 and 1 and for small n.

    Returns:
        Lower and upper bound, 0 to 1; ``(0, 1)`` if n is 0.

    Raises:
        ValueError: ``successes`` is not between 0 and n, or ``confidence`` is not
            between 0 and 1.

    >>> low, high = wilson_interval(8, 10)
    >>> round(low, 3), round(high, 3)
    (0.49, 0.943)
    """
    if not 0 <= successes <= n:
        raise ValueError(f"{successes} successes out of {n}: not a proportion")
    if n == 0:
        return 0.0, 1.0
    z = _normal_quantile(confidence)
    p = successes / n
    scale = 1 + z * z / n
    centre = (p + z * z / (2 * n)) / scale
    half = z / scale * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    # At the ends the formula gives 0 and 1 up to rounding.
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == n else min(1.0, centre + half)
    return low, high


def exact_mcnemar(before_only: int, after_only: int) -> float:
    """Two-sided exact p-value for a paired before/after change (McNemar's test).

    Only tasks whose result changed carry information. If training changed nothing,
    each of these is a fair coin; the p-value is the chance of a split at least as
    uneven as the one seen.

    Args:
        before_only: Tasks right before and wrong after.
        after_only: Tasks wrong before and right after.

    >>> exact_mcnemar(0, 5)
    0.0625
    """
    if before_only < 0 or after_only < 0:
        raise ValueError(f"counts cannot be negative: {before_only}, {after_only}")
    n = before_only + after_only
    tail = sum(math.comb(n, k) for k in range(min(before_only, after_only) + 1))
    return float(min(1.0, 2 * tail / 2**n))


def paired_change_interval(
    before_only: int, after_only: int, n: int, confidence: float = 0.95
) -> tuple[float, float]:
    """Interval for the change in accuracy over n paired tasks, −1 to 1.

    The adjusted Wald interval of Bonett and Price (2012): one imagined task is added
    to each kind of change, which keeps it honest when few tasks changed.

    >>> low, high = paired_change_interval(1, 9, 20)
    >>> round(low, 3), round(high, 3)
    (0.095, 0.632)
    """
    if before_only < 0 or after_only < 0 or before_only + after_only > n:
        raise ValueError(f"{before_only} + {after_only} changed tasks out of {n}")
    z = _normal_quantile(confidence)
    worse, better = (before_only + 1) / (n + 2), (after_only + 1) / (n + 2)
    change = better - worse
    half = z * math.sqrt((worse + better - change**2) / (n + 2))
    return max(-1.0, change - half), min(1.0, change + half)


def expected_flat_share(p: float, group_size: int) -> float:
    """Expected share of flat groups if each rollout is right with probability p.

    A group is flat if all its rollouts are right, or all wrong: p^G + (1 − p)^G.
    Tasks differ in p, so the share seen is usually larger than that of their mean.

    >>> expected_flat_share(0.5, 4)
    0.125
    """
    if not 0 <= p <= 1 or group_size < 1:
        raise ValueError(
            f"p is {p} and group_size {group_size}; p must be between 0 and 1, and a "
            "group needs at least one rollout"
        )
    return float(p**group_size + (1 - p) ** group_size)


def _normal_quantile(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}; use e.g. 0.95")
    return NormalDist().inv_cdf((1 + confidence) / 2)


# Before and after


def _share_text(count: int, n: int, confidence: float) -> str:
    """Such as ``97.7% [93.3, 99.2]``."""
    low, high = wilson_interval(count, n, confidence)
    return f"{count / n:.1%} [{100 * low:.1f}, {100 * high:.1f}]"


def _p_text(p: float) -> str:
    return "p < 0.0001" if p < 1e-4 else f"p = {p:.4f}"


def _count_rows(
    columns: Sequence[OutcomeSummary], cell: Callable[[int, OutcomeSummary], str]
) -> list[list[str]]:
    """The rows of a table that say what went wrong, and how long the replies were."""
    rows = [
        [LABELS[key], *(cell(getattr(column, key), column) for column in columns)]
        for key in ("invalid_final_line", "wrong_integer", "token_limit")
    ]
    rows[-1][0] += " (overlaps)"
    means = (column.mean_output_tokens for column in columns)
    lengths = ("–" if mean is None else f"{mean:,.1f}" for mean in means)
    return [*rows, ["mean output tokens", *lengths]]


@dataclass(frozen=True)
class Comparison:
    """The same tasks before and after training, paired."""

    before: OutcomeSummary
    after: OutcomeSummary
    #: (cause before, cause after) -> number of tasks, over all of :data:`CAUSES`.
    transitions: Mapping[tuple[str, str], int]
    fixed: tuple[str, ...]  # tasks wrong before, right after
    regressed: tuple[str, ...]  # tasks right before, wrong after
    confidence: float = 0.95

    @property
    def p_value(self) -> float:
        """Exact McNemar p-value of the change in accuracy."""
        return exact_mcnemar(len(self.regressed), len(self.fixed))

    @property
    def change(self) -> float:
        """Change in accuracy, −1 to 1."""
        return (self.after.correct - self.before.correct) / self.before.n

    @property
    def change_interval(self) -> tuple[float, float]:
        """Interval of the change in accuracy."""
        return paired_change_interval(
            len(self.regressed), len(self.fixed), self.before.n, self.confidence
        )

    def to_markdown(self) -> str:
        """The comparison as two tables and a sentence between them, in Markdown."""
        return "\n\n".join([self._outcomes(), self._sentence(), self._transitions()])

    _repr_markdown_ = to_markdown

    def _outcomes(self) -> str:
        sides = (self.before, self.after)
        shares = (_share_text(side.correct, side.n, self.confidence) for side in sides)
        rows = [
            [f"accuracy [{self.confidence:.0%} interval]", *shares],
            *_count_rows(sides, lambda count, side: str(count)),
        ]
        return markdown_table(
            [f"{self.before.n} held-out tasks", "before", "after"], rows
        )

    def _sentence(self) -> str:
        low, high = (100 * bound for bound in self.change_interval)
        return (
            f"Accuracy changed by {100 * self.change:+.1f} points "
            f"[{low:+.1f}, {high:+.1f}]: {len(self.fixed)} tasks were fixed and "
            f"{len(self.regressed)} regressed (exact McNemar test, "
            f"{_p_text(self.p_value)})."
        )

    def _transitions(self) -> str:
        return markdown_table(
            ["before ↓ after →", *(LABELS[new] for new in CAUSES)],
            [
                [LABELS[old], *(str(self.transitions[old, new]) for new in CAUSES)]
                for old in CAUSES
            ],
        )


def compare_before_after(
    before_records: Iterable[Rollout],
    after_records: Iterable[Rollout],
    *,
    confidence: float = 0.95,
) -> Comparison:
    """Pair rollouts of the same tasks before and after training.

    Each task needs one rollout on each side (greedy evaluation has no other).

    Raises:
        ValueError: A side is empty, repeats a task, or has tasks the other lacks.
    """
    before, after = _paired(before_records, after_records)
    moves = {task: (cause_of(before[task]), cause_of(after[task])) for task in before}
    counts = Counter(moves.values())
    return Comparison(
        before=summarize_outcomes(before.values()),
        after=summarize_outcomes(after.values()),
        transitions={(old, new): counts[old, new] for old in CAUSES for new in CAUSES},
        fixed=tuple(
            task for task, (old, new) in moves.items() if old != "correct" == new
        ),
        regressed=tuple(
            task for task, (old, new) in moves.items() if old == "correct" != new
        ),
        confidence=confidence,
    )


def _paired(
    before_records: Iterable[Rollout], after_records: Iterable[Rollout]
) -> tuple[dict[str, Rollout], dict[str, Rollout]]:
    """The rollouts of both sides by task, one of each, of the same tasks."""
    before = _by_task(before_records, "before")
    after = _by_task(after_records, "after")
    if before.keys() != after.keys():
        lacking = sorted(before.keys() - after.keys())
        extra = sorted(after.keys() - before.keys())
        raise ValueError(
            f"before and after are not the same tasks: {len(lacking)} only before "
            f"({_few(lacking)}), {len(extra)} only after ({_few(extra)}); evaluate "
            "both on one held-out taskset"
        )
    return before, after


def _by_task(records: Iterable[Rollout], side: str) -> dict[str, Rollout]:
    rollouts: dict[str, Rollout] = {}
    for rollout in records:
        if rollout.task in rollouts:
            raise ValueError(
                f"task {rollout.task!r} has more than one rollout {side}: pair one "
                "greedy rollout per task"
            )
        rollouts[rollout.task] = rollout
    if not rollouts:
        raise ValueError(f"no rollouts {side}: run that evaluation first")
    return rollouts


def _few(names: Sequence[str], limit: int = 3) -> str:
    shown = ", ".join(names[:limit]) or "none"
    return shown + (", …" if len(names) > limit else "")


# Calibration

VerdictCode = Literal[
    "healthy", "too_easy", "too_hard", "token_limit", "no_valid_ending", "no_signal"
]


@dataclass(frozen=True)
class CalibrationVerdict:
    """Whether these tasks teach this policy anything, and what to change if not."""

    code: VerdictCode
    headline: str
    advice: str
    reward_mean: float
    within_group_std: float
    groups: int
    kept_groups: int  # groups with a reward spread
    outcomes: OutcomeSummary

    @property
    def healthy(self) -> bool:
        """Whether training on such tasks can start."""
        return self.code == "healthy"

    def to_markdown(self) -> str:
        """The verdict with the numbers behind it, in Markdown."""
        o = self.outcomes
        return (
            f"**{self.headline}** {self.advice}\n\n"
            f"Mean reward {self.reward_mean:.2f}; within-group spread "
            f"{self.within_group_std:.2f}; {self.kept_groups} of {self.groups} groups "
            f"can teach something. Of {o.n} rollouts {o.correct} were correct, "
            f"{o.wrong_integer} a wrong integer and {o.invalid_final_line} had an "
            f"invalid final line; {o.token_limit} hit the token limit."
        )

    _repr_markdown_ = to_markdown


def calibration_verdict(records: Iterable[Rollout]) -> CalibrationVerdict:
    """Judge a calibration: is there anything to learn from?

    Rollouts are grouped by task. The causes are tried in this order, because each
    would disguise itself as a later one:

    1. *token limit*: at least half of all rollouts were cut off before an answer;
    2. *no valid ending*: no rollout ended in an integer;
    3. *too easy* or *too hard*: the mean reward is above 0.9 or below 0.1;
    4. *no signal*: the mean looks fine, yet every group is flat;
    5. *healthy*: some groups have right and wrong answers.

    Args:
        records: Rollouts with rewards between 0 and 1.

    Raises:
        ValueError: There are no records.
    """
    rollouts = list(records)
    if not rollouts:
        raise ValueError("no rollouts to judge: run the calibration first")
    spreads = [
        sample_std([float(rollout.reward) for rollout in group])
        for group in records_by_task(rollouts).values()
    ]
    mean = fmean(float(rollout.reward) for rollout in rollouts)
    kept = sum(spread >= FLAT_SPREAD for spread in spreads)
    outcomes = summarize_outcomes(rollouts)
    cut_off = sum(cause_of(rollout) == "token_limit" for rollout in rollouts)
    code = _verdict_code(outcomes, cut_off, mean, kept)
    headline, advice = _VERDICTS[code]
    return CalibrationVerdict(
        code=code,
        headline=headline,
        advice=advice,
        reward_mean=mean,
        within_group_std=fmean(spreads),
        groups=len(spreads),
        kept_groups=kept,
        outcomes=outcomes,
    )


def _verdict_code(
    outcomes: OutcomeSummary, cut_off: int, mean: float, kept_groups: int
) -> VerdictCode:
    if 2 * cut_off >= outcomes.n:
        return "token_limit"
    if outcomes.invalid_final_line == outcomes.n:
        return "no_valid_ending"
    if mean > 0.9:
        return "too_easy"
    if mean < 0.1:
        return "too_hard"
    return "healthy" if kept_groups else "no_signal"


_VERDICTS: Mapping[VerdictCode, tuple[str, str]] = {
    "token_limit": (
        "Token limit first.",
        "Most replies were cut off before they could answer, which says nothing about "
        "difficulty: raise max_tokens and calibrate again.",
    ),
    "no_valid_ending": (
        "No signal: the ending is never valid.",
        "No reply ends in a bare integer, so every reward is 0: show worked examples "
        "in the prompt, or use a graded reward that pays for a better ending.",
    ),
    "too_easy": (
        "Too easy.",
        "Nearly every rollout is right, so most groups are flat: use larger operands.",
    ),
    "too_hard": (
        "Too hard.",
        "Nearly every rollout is wrong, so most groups are flat: use smaller operands.",
    ),
    "no_signal": (
        "No signal.",
        "Every group is all right or all wrong, so no advantage differs from zero, "
        "whatever the mean says: draw more tasks, use larger groups, or change the "
        "operand range.",
    ),
    "healthy": (
        "Healthy.",
        "Some groups hold right and wrong answers. Read sample texts beside their "
        "rewards before you train: a spread proves variation, not a sound grader.",
    ),
}


# What a comparison is made of


@dataclass(frozen=True)
class OutcomeTable:
    """Outcome counts side by side, each with its share and Wilson interval.

    Attributes:
        columns: Heading → counts, in the order shown.
        confidence: Of the intervals, between 0 and 1.
    """

    columns: Mapping[str, OutcomeSummary]
    confidence: float = 0.95

    def to_markdown(self) -> str:
        """The table in Markdown; ``–`` where a column has no rollouts."""
        summaries = tuple(self.columns.values())
        rows = [
            ["tasks", *(f"{s.n:,}" for s in summaries)],
            ["correct", *(self._cell(s.correct, s) for s in summaries)],
            *_count_rows(summaries, self._cell),
        ]
        return markdown_table(["", *self.columns], rows)

    def _cell(self, count: int, of: OutcomeSummary) -> str:
        if not of.n:
            return "–"
        return f"{count} = {_share_text(count, of.n, self.confidence)}"

    _repr_markdown_ = to_markdown


def tokens_by_cause(records: Iterable[Rollout]) -> dict[str, int]:
    """How many output tokens went into replies of each of :data:`CAUSES`."""
    spent = dict.fromkeys(CAUSES, 0)
    for rollout in records:
        spent[cause_of(rollout)] += rollout.output_tokens
    return spent


def mentions_integer(text: str, value: int) -> bool:
    """Whether a reply writes an integer anywhere, not only on its last line.

    Tells a reply that had the answer and did not end on it from one that never had
    it. Comma groups are read as one number; a longer number that contains the digits
    does not count.

    >>> mentions_integer("36 * 47 = 1692\\nThe answer is 1,692.", 1692)
    True
    >>> mentions_integer("16920", 1692)
    False
    """
    plain = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    return re.search(rf"(?<![\d-]){value}(?!\.?\d)", plain) is not None


# Rewards of tasks without outcome classes


def mean_interval(
    values: Sequence[float], confidence: float = 0.95
) -> tuple[float, float]:
    """Student's t interval for the mean of some independent values.

    Returns:
        Lower and upper bound, not cut to any range; (-inf, inf) for fewer than two
        values. Without any spread it has no width, which a few equal values do not
        deserve.

    >>> low, high = mean_interval([0.0, 1.0, 0.0, 1.0])
    >>> round(low, 2), round(high, 2)
    (-0.42, 1.42)
    """
    if len(values) < 2:
        return -math.inf, math.inf
    mean = fmean(values)
    half = _t_quantile(confidence, len(values) - 1) * sample_std(values)
    half /= math.sqrt(len(values))
    return mean - half, mean + half


def _t_quantile(confidence: float, freedom: int) -> float:
    """The two-sided quantile of Student's t distribution.

    Exact for 1 and 2 degrees of freedom; else the expansion in 1/freedom of Abramowitz
    and Stegun (26.7.5), within half a percent from 3 on.
    """
    z = _normal_quantile(confidence)
    if freedom == 1:
        return math.tan(math.pi * confidence / 2)
    if freedom == 2:
        return confidence * math.sqrt(2 / (1 - confidence**2))
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(
        term / float(freedom) ** power for power, term in enumerate(terms, start=1)
    )


@dataclass(frozen=True)
class RewardComparison:
    """The rewards of the same tasks before and after training, paired.

    For tasks whose grader pays a reward and names no outcome, partial credit included.

    Attributes:
        before, after: Reward of each task, in the order of ``tasks``.
        tasks: The tasks' slugs.
        tokens: Mean output tokens before and after.
        token_limit: Replies cut off before and after.
        confidence: Of the intervals, between 0 and 1.
    """

    before: tuple[float, ...]
    after: tuple[float, ...]
    tasks: tuple[str, ...]
    tokens: tuple[float, float]
    token_limit: tuple[int, int]
    confidence: float = 0.95

    @property
    def differences(self) -> tuple[float, ...]:
        """Each task's reward after minus its reward before."""
        return tuple(
            new - old for old, new in zip(self.before, self.after, strict=True)
        )

    @property
    def change(self) -> float:
        """Change of the mean reward."""
        return fmean(self.differences)

    @property
    def change_interval(self) -> tuple[float, float]:
        """Paired t interval of the change."""
        return mean_interval(self.differences, self.confidence)

    @property
    def better(self) -> int:
        """Tasks that earn more than before."""
        return sum(difference > FLAT_SPREAD for difference in self.differences)

    @property
    def worse(self) -> int:
        """Tasks that earn less than before."""
        return sum(difference < -FLAT_SPREAD for difference in self.differences)

    @property
    def p_value(self) -> float:
        """Exact two-sided sign test: the changed tasks as fair coins."""
        return exact_mcnemar(self.worse, self.better)

    def to_markdown(self) -> str:
        """A table of both sides and a sentence on the change, in Markdown."""
        means = [self._mean(rewards) for rewards in (self.before, self.after)]
        table = markdown_table(
            [
                f"{len(self.tasks)} tasks",
                f"mean reward [{self.confidence:.0%} interval]",
                "mean tokens",
                "token limit hit",
            ],
            [
                [side, means[i], f"{self.tokens[i]:,.1f}", str(self.token_limit[i])]
                for i, side in enumerate(("before", "after"))
            ],
        )
        return (
            f"{table}\n\nMean reward changed by {self._mean(self.differences, '+')}: "
            f"{self.better} tasks earn more than before, {self.worse} earn less (exact "
            f"sign test, {_p_text(self.p_value)})."
        )

    def _mean(self, values: Sequence[float], sign: str = "") -> str:
        mean = f"{fmean(values):{sign}.3f}"
        if len(values) < 2:
            return mean
        low, high = mean_interval(values, self.confidence)
        return f"{mean} [{low:{sign}.3f}, {high:{sign}.3f}]"

    _repr_markdown_ = to_markdown


def compare_rewards(
    before_records: Iterable[Rollout],
    after_records: Iterable[Rollout],
    *,
    confidence: float = 0.95,
) -> RewardComparison:
    """Pair the rewards of the same tasks before and after training.

    Each task needs one rollout on each side.

    Raises:
        ValueError: A side is empty, repeats a task, or has tasks the other lacks.
    """
    before, after = _paired(before_records, after_records)
    sides = (before.values(), [after[task] for task in before])
    return RewardComparison(
        before=tuple(float(rollout.reward) for rollout in sides[0]),
        after=tuple(float(rollout.reward) for rollout in sides[1]),
        tasks=tuple(before),
        tokens=(
            fmean(rollout.output_tokens for rollout in sides[0]),
            fmean(rollout.output_tokens for rollout in sides[1]),
        ),
        token_limit=(
            sum(rollout.token_limit for rollout in sides[0]),
            sum(rollout.token_limit for rollout in sides[1]),
        ),
        confidence=confidence,
    )
