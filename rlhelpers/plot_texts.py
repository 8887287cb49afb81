"""What each plot shows, in words and with its numbers.

A reader who does not see the picture reads these: they are a figure's ``repr``, so the
plain text beside every stored image, and the alternative text where a front end shows
one. Every function takes the data of the plot of the same name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median

from rlhelpers.analysis import (
    CAUSES,
    LABELS,
    OUTCOMES,
    Comparison,
    OutcomeSummary,
    RewardComparison,
    Rollout,
    expected_flat_share,
    records_by_task,
    summarize_outcomes,
    tokens_by_cause,
    wilson_interval,
)
from rlhelpers.calibration import GroupSummary
from rlhelpers.losses import TrainedTokens
from rlhelpers.metrics import StepMetrics

Range = tuple[int, int]

#: (label, column of the metrics, format) of what the dashboard draws.
_PANELS = (
    ("mean reward", "reward_mean", ".2f"),
    ("groups with a reward spread", "kept_groups", ".0f"),
    ("mean tokens of a reply", "mean_output_tokens", ".1f"),
    ("share cut off", "token_limit_share", ".0%"),
    ("entropy in nats per token", "entropy", ".3f"),
    ("KL to the base model in nats per token", "kl", ".4f"),
    ("loss per trained token", "loss_per_token", "+.3f"),
)

_FAILURES = (
    ("invalid endings", "invalid_final_line"),
    ("wrong integers", "wrong_integer"),
)


def learning_curve_text(
    metrics: Sequence[StepMetrics], held_out: Mapping[int, float] | None
) -> str:
    """Reward at both ends and its extremes; held-out accuracy."""
    lowest = min(metrics, key=lambda row: row.reward_mean)
    parts = [
        f"Curve over {_steps(metrics)}: mean training reward {_from_to(metrics)}, "
        f"lowest {lowest.reward_mean:.2f} at step {lowest.step}; within-group spread "
        f"{metrics[0].within_group_std:.2f} at first, "
        f"{metrics[-1].within_group_std:.2f} at last."
    ]
    if held_out:
        shares = (f"{share:.1%} after {step} steps" for step, share in held_out.items())
        parts.append(f"Held-out accuracy, greedy: {'; '.join(shares)}.")
    return " ".join(parts)


def checkpoints_text(
    metrics: Sequence[StepMetrics], evaluations: Mapping[int, OutcomeSummary]
) -> str:
    """Accuracy with its interval at every checkpoint."""
    shown = (f"step {step}: {_share(s)}" for step, s in sorted(evaluations.items()))
    return (
        "Held-out accuracy along a run, greedy, with 95 % intervals: "
        f"{'; '.join(shown)}. Mean training reward {_from_to(metrics)}."
    )


def dashboard_text(metrics: Sequence[StepMetrics]) -> str:
    """First and last value of every panel; what was not measured is left out."""
    first, last = metrics[0], metrics[-1]
    shown = [
        f"{label} {start:{form}} to {end:{form}}"
        for label, column, form in _PANELS
        for start, end in [_ends([getattr(row, column) for row in metrics])]
        if start is not None and end is not None
    ]
    if not have_outcomes(metrics):
        shown.append("no outcomes, because the grader names none")
    elif first.valid_rollouts and last.valid_rollouts:
        shown += [
            f"{LABELS[outcome]} {getattr(first, outcome) / first.valid_rollouts:.0%} "
            f"to {getattr(last, outcome) / last.valid_rollouts:.0%}"
            for outcome in OUTCOMES
        ]
    return f"Panels over {_steps(metrics)}, first step to last: {'; '.join(shown)}."


def have_outcomes(metrics: Sequence[StepMetrics]) -> bool:
    """Whether any rollout has an outcome; a grader of one's own may name none."""
    return any(getattr(row, outcome) for row in metrics for outcome in OUTCOMES)


def outcomes_text(before: Iterable[Rollout], after: Iterable[Rollout]) -> str:
    """Counts of each outcome on both sides."""
    old, new = summarize_outcomes(before), summarize_outcomes(after)
    shown = [
        f"{LABELS[key]} {getattr(old, key)} before, {getattr(new, key)} after"
        for key in (*OUTCOMES, "token_limit")
    ]
    return (
        f"Bars: outcomes of {old.n} replies before and {new.n} after training: "
        f"{'; '.join(shown)}. The last overlaps the others."
    )


def token_lengths_text(
    sides: Mapping[str, Sequence[Rollout]],
    limit: int,
) -> str:
    """Mean, median and longest reply, and the replies at the limit, on each side."""
    shown = []
    for side, rollouts in sides.items():
        lengths = [rollout.output_tokens for rollout in rollouts]
        if not lengths:
            shown.append(f"{side} no replies")
            continue
        cut = sum(bool(rollout.token_limit) for rollout in rollouts)
        shown.append(
            f"{side} {len(lengths)} replies, mean {fmean(lengths):.1f}, median "
            f"{median(lengths):g}, longest {max(lengths)}, {cut} at the limit"
        )
    return f"Reply lengths in tokens, limit {limit}: {'; '.join(shown)}."


def advantages_text(rewards: Sequence[float], advantages: Sequence[float]) -> str:
    """Every reward with the advantage made from it."""
    shown = (
        f"reward {reward:g} gets {advantage:+.2f}"
        for reward, advantage in zip(rewards, advantages, strict=True)
    )
    return (
        f"Bars: one group of {len(rewards)} rollouts with mean reward "
        f"{fmean(rewards):.2f} and its advantages: {'; '.join(shown)}."
    )


def calibration_bars_text(records: Iterable[Rollout]) -> str:
    """Task by task, how its rollouts ended."""
    shown = []
    for task, rollouts in records_by_task(records).items():
        summary = summarize_outcomes(rollouts)
        text = ", ".join(
            f"{getattr(summary, key)} {LABELS[key]}"
            for key in OUTCOMES
            if getattr(summary, key)
        )
        cut = f" ({summary.token_limit} cut off)" if summary.token_limit else ""
        shown.append(f"{task}: {text}{cut}")
    return f"One bar per task, {len(shown)} tasks: {'; '.join(shown)}."


def group_rewards_text(records: Iterable[Rollout]) -> str:
    """Task by task, the lowest, mean and highest reward."""
    shown = []
    for task, rollouts in records_by_task(records).items():
        rewards = [float(rollout.reward) for rollout in rollouts]
        cut = sum(bool(rollout.token_limit) for rollout in rollouts)
        shown.append(
            f"{task}: {min(rewards):.2f} to {max(rewards):.2f}, mean "
            f"{fmean(rewards):.2f}" + (f" ({cut} cut off)" if cut else "")
        )
    return f"Rewards of each task's rollouts, {len(shown)} tasks: {'; '.join(shown)}."


def rewards_text(comparison: RewardComparison) -> str:
    """Mean, median and extremes of the rewards on both sides."""
    shown = (
        f"{side} mean {fmean(rewards):.3f}, median {median(rewards):.2f}, lowest "
        f"{min(rewards):.2f}, highest {max(rewards):.2f}"
        for side, rewards in (
            ("before", comparison.before),
            ("after", comparison.after),
        )
    )
    return (
        f"Two histograms of the rewards of {len(comparison.tasks)} held-out tasks: "
        f"{'; '.join(shown)}."
    )


def group_signal_text(group_sizes: Sequence[int]) -> str:
    """Both curves at three success rates."""
    shown = []
    for p in (0.05, 0.25, 0.5):
        shares = (f"{expected_flat_share(p, size):.0%}" for size in group_sizes)
        shown.append(
            f"at p = {p} the spread is {(p * (1 - p)) ** 0.5:.2f} and "
            f"{', '.join(shares)} of groups are flat"
        )
    sizes = ", ".join(str(size) for size in group_sizes)
    return (
        "Two curves over the chance p that a rollout is right, for groups of "
        f"{sizes}: {'; '.join(shown)}. Both are symmetric around 0.5; at 0 and 1 the "
        "spread is 0 and every group is flat."
    )


def range_heatmap_text(cells: Mapping[tuple[Range, Range], GroupSummary]) -> str:
    """Mean reward and spread of every cell, row by row."""
    rows = []
    for a in sorted({a for a, _ in cells}):
        shown = (
            f"{cells[key].reward_mean:.2f} ({cells[key].within_group_std:.2f})"
            for key in sorted(cells)
            if key[0] == a
        )
        rows.append(f"a {_range(a)}: {', '.join(shown)}")
    columns = ", ".join(_range(b) for b in sorted({b for _, b in cells}))
    return (
        "Two heat maps: mean reward and, in brackets, within-group spread, for b in "
        f"{columns}. {'; '.join(rows)}."
    )


def datum_text(
    tokens: Sequence[str], advantages: Sequence[float], logprobs: Sequence[float]
) -> str:
    """What is masked, what is trained how hard, and where the policy was unsure."""
    trained = [i for i, advantage in enumerate(advantages) if advantage]
    text = f"A datum of {len(tokens)} targets: {len(tokens) - len(trained)} masked"
    if not trained:
        return f"{text}, none trained."
    weights = sorted({f"{advantages[i]:+.2f}" for i in trained})
    unsure = min(trained, key=lambda i: logprobs[i])
    reply = "".join(tokens[i] for i in trained).strip()
    return (
        f"{text}, {len(trained)} trained with advantage {', '.join(weights)}: "
        f"{reply!r}. Lowest log-probability {logprobs[unsure]:.2f}, of "
        f"{tokens[unsure]!r}."
    )


def range_left_text(players: Mapping[str, Sequence[float]]) -> str:
    """Mean numbers left after each guess, for every player."""
    shown = [
        f"{name}: " + ", ".join(f"{value:.1f}" for value in left)
        for name, left in players.items()
    ]
    return f"Lines: mean numbers left after 0, 1, … guesses. {'; '.join(shown)}."


def logprob_changes_text(
    changes: Sequence[Sequence[float]], labels: Sequence[str]
) -> str:
    """Mean and extremes of the changes, rollout by rollout, in the order drawn."""
    shown = (
        f"{label}: mean {fmean(values):+.3f}, from {min(values):+.2f} to "
        f"{max(values):+.2f}"
        for label, values in zip(labels, changes, strict=True)
    )
    total = sum(len(values) for values in changes)
    return (
        f"Dots: change of log-probability of {total:,} tokens by one update, in nats. "
        f"{'; '.join(shown)}."
    )


def losses_text(clip: tuple[float, float]) -> str:
    """Where each loss pushes, at and beyond the clip bounds."""
    low, high = clip
    return (
        f"Curves of loss and push of one token against its ratio from 0 to 2.2, for "
        f"advantages of +1 and −1, clipped to {low:g} … {high:g}. At ratio 1 all three "
        "losses push alike, with the advantage. importance_sampling pushes with ratio "
        f"times advantage everywhere. ppo stops pushing up above {high:g} and down "
        f"below {low:g}. cispo never stops: its weight is held at {low:g} below and "
        f"at {high:g} above."
    )


def repeated_updates_text(histories: Mapping[str, Sequence[TrainedTokens]]) -> str:
    """Clip share and ends of the ratios after the last update, loss by loss."""
    shown = []
    for name, history in histories.items():
        low, high = history[-1].ends()
        shown.append(
            f"{name}, {len(history) - 1} updates: {history[-1].clip_share():.1%} of "
            f"{len(history[-1].ratios):,} tokens outside the bounds, ratio "
            f"{low:.3g} at the 1st and {high:.3g} at the 99th percentile"
        )
    return f"Lines: several updates on one batch. {'; '.join(shown)}."


def runs_text(
    runs: Mapping[str, Sequence[StepMetrics]], held_out: Mapping[str, float]
) -> str:
    """Of each run: outcomes at both ends, the last KL, and held-out accuracy."""
    sentences = []
    for heading, rows in runs.items():
        words = f"{heading}, {_steps(rows)}"
        for label, outcome in (("right", "correct"), *_FAILURES):
            ends = (
                f"{getattr(row, outcome) / row.valid_rollouts:.0%}"
                for row in (rows[0], rows[-1])
            )
            words += f"; {label} {' to '.join(ends)}"
        _, kl = _ends([row.kl for row in rows])
        if kl is not None:
            words += f"; KL to the base {kl:.3f} nats per token at last"
        if heading in held_out:
            words += f"; held-out accuracy, greedy, {held_out[heading]:.1%}"
        sentences.append(words + ".")
    return "Runs side by side. " + " ".join(sentences)


def who_does_what_text(service: str) -> str:
    """The three boxes and the arrows between them."""
    return (
        "Three boxes. HUD defines tasks and graders and runs rollouts; this course "
        "renders prompts and turns rewards into advantages and datums; the "
        f"{service} holds model and adapter, samples and computes gradients. Arrows: "
        "HUD sends a prompt, the course prompt tokens; the service returns sampled "
        "tokens with log-probabilities, the course a reply, HUD a reward; the course "
        "sends datums."
    )


def transitions_text(transitions: Mapping[tuple[str, str], int]) -> str:
    """Row by row, where the tasks of one cause went."""
    rows = []
    for old in CAUSES:
        moved = {new: transitions.get((old, new), 0) for new in CAUSES}
        if total := sum(moved.values()):
            shown = (f"{n} to {LABELS[new]}" for new, n in moved.items() if n)
            rows.append(f"{LABELS[old]} {total}: {', '.join(shown)}")
    fixed = sum(transitions.get((old, "correct"), 0) for old in CAUSES[1:])
    lost = sum(transitions.get(("correct", new), 0) for new in CAUSES[1:])
    return (
        f"Table of {sum(transitions.values())} tasks, before to after training. "
        f"{'; '.join(rows)}. Fixed {fixed}, regressed {lost}."
    )


def tokens_by_cause_text(sides: Mapping[str, Sequence[Rollout]]) -> str:
    """Output tokens by what became of the reply, on each side."""
    shown = []
    for side, rollouts in sides.items():
        tokens = tokens_by_cause(rollouts)
        total = sum(tokens.values())
        parts = (
            f"{LABELS[cause]} {tokens[cause]:,} ({tokens[cause] / total:.0%})"
            for cause in CAUSES
            if tokens[cause]
        )
        shown.append(f"{side} {total:,} in {len(rollouts)} replies: {', '.join(parts)}")
    return f"Bars: output tokens by cause. {'; '.join(shown)}."


def accuracy_by_range_text(
    comparisons: Mapping[str, Comparison], trained: str | None
) -> str:
    """Accuracy before and after in every range, with intervals."""
    shown = (
        f"{name}{' (trained)' if name == trained else ''}: {_share(c.before)} before, "
        f"{_share(c.after)} after"
        for name, c in comparisons.items()
    )
    return f"Accuracy by operand range with 95 % intervals: {'; '.join(shown)}."


def reward_and_truth_text(
    runs: Mapping[str, Sequence[StepMetrics]],
    held_out: Mapping[str, Mapping[int, float]],
) -> str:
    """Of each run: reward, share right and reply length at both ends; accuracy."""
    sentences = []
    for heading, rows in runs.items():
        first, last = rows[0], rows[-1]
        words = f"{heading}, {_steps(rows)}: mean reward {_from_to(rows)}"
        if first.valid_rollouts and last.valid_rollouts:
            before, after = (row.correct / row.valid_rollouts for row in (first, last))
            words += f"; share right {before:.0%} to {after:.0%}"
        start, end = _ends([row.mean_output_tokens for row in rows])
        if start is not None and end is not None:
            words += f"; mean tokens of a reply {start:.1f} to {end:.1f}"
        if points := held_out.get(heading):
            shares = (
                f"{share:.1%} after {step} steps" for step, share in points.items()
            )
            words += f"; held-out accuracy, greedy, {', '.join(shares)}"
        sentences.append(words + ".")
    return "Reward and truth. " + " ".join(sentences)


# Pieces


def _range(bounds: Range) -> str:
    return f"{bounds[0]} to {bounds[1]}"


def _steps(metrics: Sequence[StepMetrics]) -> str:
    rollouts = sum(row.valid_rollouts for row in metrics)
    plural = "" if len(metrics) == 1 else "s"
    return f"{len(metrics)} step{plural} and {rollouts:,} rollouts"


def _from_to(metrics: Sequence[StepMetrics]) -> str:
    first, last = metrics[0], metrics[-1]
    return (
        f"{first.reward_mean:.2f} at step {first.step} and {last.reward_mean:.2f} at "
        f"step {last.step}"
    )


def _ends(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    """The first and the last value that was measured."""
    known = [value for value in values if value is not None]
    return (known[0], known[-1]) if known else (None, None)


def _share(summary: OutcomeSummary) -> str:
    """Such as ``97.7 % of 128 [93.3, 99.2]``."""
    if not summary.n:
        return "no replies"
    low, high = wilson_interval(summary.correct, summary.n)
    return (
        f"{100 * summary.correct / summary.n:.1f} % of {summary.n} "
        f"[{100 * low:.1f}, {100 * high:.1f}]"
    )
