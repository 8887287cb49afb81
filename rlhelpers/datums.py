"""From graded rollouts to the training batch that ``forward_backward`` receives.

A datum is one rollout as the training service sees it: the tokens read, the tokens
to predict, and for each of these the log-probability it was sampled with and the
advantage to weight it by. A rollout of several turns is one datum too, with every reply
trained and every user turn masked (:class:`Episode`). Everything is checked here,
before any request: a misaligned batch trains without an error and teaches nonsense.

No I/O, no service; only the SDK's own data types.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fireworks.training.sdk import Datum, ModelInput

from rlhelpers.advantages import (
    GradedRun,
    Scale,
    group_relative_advantages,
    group_runs,
    run_reward,
    task_name,
)

#: The wire carries float32; a larger value would arrive as infinity.
_FLOAT32_MAX = 3.4028234663852886e38


class RolloutFailed(RuntimeError):
    """A rollout did not finish: its reward says nothing about the policy."""


@dataclass(frozen=True)
class Episode:
    """The turns of one rollout, joined into one sequence of T tokens.

    Made by :meth:`of`, from samples that each extend the one before. It has what a
    ``Sample`` has, over all turns: the tokens read before the first reply, and every
    token sampled, with its log-probability.

    Attributes:
        token_ids: [T] the first prompt, then replies and user turns in order.
        sampled: [T] whether the policy wrote the token.
        prompt_token_ids: The first turn's prompt.
        output_token_ids: The sampled tokens of all turns, N of them.
        output_logprobs: [N] the log-probabilities they were sampled with.
        turns: How many replies.
    """

    token_ids: tuple[int, ...]
    sampled: tuple[bool, ...]
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    output_logprobs: list[float]
    turns: int

    @classmethod
    def of(cls, samples: Sequence[Any]) -> Episode:
        """Join samples, the first turn's first.

        Raises:
            ValueError: A prompt does not extend the turn before it: joined all the
                same, the datum would train on a conversation that never was.

        >>> from types import SimpleNamespace as Sample
        >>> first = Sample(
        ...     prompt_token_ids=[1], output_token_ids=[2], output_logprobs=[-0.5]
        ... )
        >>> second = Sample(  # 3 is the user's
        ...     prompt_token_ids=[1, 2, 3], output_token_ids=[4], output_logprobs=[-1.0]
        ... )
        >>> Episode.of([first, second]).sampled
        (False, True, False, True)
        """
        ids: list[int] = []
        sampled: list[bool] = []
        for turn, sample in enumerate(samples, start=1):
            prompt, output = sample.prompt_token_ids, sample.output_token_ids
            _check_extends(prompt, ids, turn)
            sampled += [False] * (len(prompt) - len(ids)) + [True] * len(output)
            ids = [*prompt, *output]
        return cls(
            token_ids=tuple(ids),
            sampled=tuple(sampled),
            prompt_token_ids=list(samples[0].prompt_token_ids),
            output_token_ids=[i for sample in samples for i in sample.output_token_ids],
            output_logprobs=[lp for sample in samples for lp in sample.output_logprobs],
            turns=len(samples),
        )


def _check_extends(prompt: Sequence[int], before: Sequence[int], turn: int) -> None:
    """Refuse a turn whose prompt is not what was said before it, and more."""
    if list(prompt[: len(before)]) == list(before):
        return
    pairs = zip(prompt, before, strict=False)
    same = next(
        (at for at, (now, then) in enumerate(pairs) if now != then), len(prompt)
    )
    raise ValueError(
        f"the prompt of turn {turn} differs at token {same} from the {len(before)} "
        "tokens that were read and sampled before it: the conversation was rendered "
        "anew or shortened. Build each prompt as the last one + its sampled tokens + "
        "the user's tokens, as EpisodeAgent does; a shortened history needs a rollout "
        "of its own"
    )


def whole_text(sample: Any) -> tuple[list[int], list[bool]]:
    """Every token of a rollout, and which of them the policy wrote; both length T.

    Args:
        sample: What :func:`check_run` returns.

    >>> from types import SimpleNamespace
    >>> whole_text(SimpleNamespace(prompt_token_ids=[1, 2], output_token_ids=[3]))
    ([1, 2, 3], [False, False, True])
    """
    if isinstance(sample, Episode):
        return list(sample.token_ids), list(sample.sampled)
    prompt, output = list(sample.prompt_token_ids), list(sample.output_token_ids)
    return prompt + output, [False] * len(prompt) + [True] * len(output)


def check_run(run: Any) -> Any:
    """Return the run's token sample, or say why the run must not be used.

    HUD keeps a reward on a failed run too (0.0, or even 1.0 when grading succeeded
    after the agent broke), so the reward alone cannot tell a failure from a wrong
    answer. A run counts only with status ``completed``, no grading error, and a
    recorded sample for each of its turns.

    Args:
        run: A HUD ``Run``.

    Returns:
        The ``Sample`` of its assistant step, or of several the :class:`Episode`: both
        have ``prompt_token_ids``, ``output_token_ids`` and ``output_logprobs``.

    Raises:
        RolloutFailed: Names the task and the cause.
    """
    trace = run.trace
    if trace.status != "completed":
        cause = getattr(trace, "error", None) or "no error was recorded"
        raise _failed(run, f"ended with status {trace.status!r}: {cause}")
    if getattr(run.grade, "is_error", False):
        cause = getattr(run.grade, "content", None) or "no message"
        raise _failed(run, f"could not be graded: {cause}")
    steps = (getattr(step, "sample", None) for step in trace.steps)
    samples = [sample for sample in steps if sample is not None]
    if not samples:
        raise _failed(
            run,
            "has no recorded tokens: use an agent that stores a Sample on its "
            "assistant step, such as PolicyAgent",
        )
    if len(samples) == 1:
        return samples[0]
    try:
        return Episode.of(samples)
    except ValueError as error:
        raise _failed(run, f"cannot be joined: {error}") from error


def make_datum(
    prompt_token_ids: Sequence[int],
    output_token_ids: Sequence[int],
    output_logprobs: Sequence[float],
    advantage: float,
) -> Datum:
    """Build one datum from the token ids that were really sampled.

    With P prompt and N output tokens, all four rows have T = P + N − 1 entries.
    Position *i* of the input predicts target *i*, so the input is everything but
    the last token and the targets are everything but the first. The P − 1 positions
    that predict prompt tokens carry log-probability 0 and advantage 0, which is
    what masks them. A sampled end token is part of the output and is trained;
    nothing is added to an output that was cut off.

    Args:
        prompt_token_ids: Length P ≥ 1, as rendered for sampling.
        output_token_ids: Length N ≥ 1, as sampled; never text encoded again, which
            may give other ids.
        output_logprobs: Length N, natural logarithms under the sampling policy.
        advantage: The rollout's advantage, the same for each of its tokens.

    Raises:
        ValueError: Lengths differ, a part is empty, a token id is not a
            non-negative integer, or a number is missing or not finite.

    >>> datum = make_datum([1, 2], [3, 4], [-0.2, -0.1], 1.0)
    >>> datum.model_input.to_ints(), datum.loss_fn_inputs["target_tokens"].tolist()
    ([1, 2, 3], [2, 3, 4])
    >>> datum.loss_fn_inputs["advantages"].tolist()
    [0.0, 1.0, 1.0]
    """
    prompt = _token_ids(prompt_token_ids, "prompt_token_ids")
    output = _token_ids(output_token_ids, "output_token_ids")
    if len(output_logprobs) != len(output):
        raise ValueError(
            f"{len(output)} output tokens but {len(output_logprobs)} log-probabilities:"
            " each sampled token needs the one it was sampled with"
        )
    logprobs = [
        _finite(value, f"output_logprobs[{i}]")
        for i, value in enumerate(output_logprobs)
    ]
    weight = _finite(advantage, "advantage")
    masked = [0.0] * (len(prompt) - 1)
    return Datum(
        model_input=ModelInput.from_ints(prompt + output[:-1]),
        loss_fn_inputs={
            "target_tokens": prompt[1:] + output,
            "logprobs": masked + logprobs,
            "advantages": masked + [weight] * len(output),
        },
    )


def make_episode_datum(episode: Episode, advantage: float) -> Datum:
    """Build the one datum of a rollout of several turns.

    Laid out as in :func:`make_datum`. Of the T − 1 positions, those that predict a
    sampled token carry its log-probability and the rollout's advantage, the same in
    every turn; those that predict a token of the prompt or of a user turn carry 0 and
    0, and so teach nothing.

    Args:
        episode: The rollout's turns.
        advantage: The rollout's advantage.

    Raises:
        ValueError: As :func:`make_datum`.

    >>> episode = Episode((1, 2, 3, 4), (False, True, False, True), [1], [2, 4],
    ...                   [-0.5, -1.0], 2)
    >>> make_episode_datum(episode, 2.0).loss_fn_inputs["advantages"].tolist()
    [2.0, 0.0, 2.0]
    """
    tokens = _token_ids(episode.token_ids, "token_ids")
    _token_ids(episode.prompt_token_ids, "prompt_token_ids")
    count = sum(episode.sampled)
    if len(episode.output_logprobs) != count:
        raise ValueError(
            f"{count} sampled tokens but {len(episode.output_logprobs)} "
            "log-probabilities: each sampled token needs the one it was sampled with"
        )
    weight = _finite(advantage, "advantage")
    logprobs = iter(
        _finite(value, f"output_logprobs[{i}]")
        for i, value in enumerate(episode.output_logprobs)
    )
    trained = episode.sampled[1:]
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": [next(logprobs) if own else 0.0 for own in trained],
            "advantages": [weight if own else 0.0 for own in trained],
        },
    )


def make_scoring_datum(
    prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]
) -> Datum:
    """Build a datum that asks for log-probabilities and trains nothing.

    Laid out as in :func:`make_datum`, with P prompt and N output tokens: of the
    P + N − 1 log-probabilities that ``forward`` returns for it, the last N are those
    of the output.

    Args:
        prompt_token_ids: Length P ≥ 1.
        output_token_ids: Length N ≥ 1.

    Raises:
        ValueError: A part is empty, or a token id is not a non-negative integer.

    >>> datum = make_scoring_datum([1, 2], [3, 4])
    >>> datum.model_input.to_ints(), datum.loss_fn_inputs["target_tokens"].tolist()
    ([1, 2, 3], [2, 3, 4])
    """
    prompt = _token_ids(prompt_token_ids, "prompt_token_ids")
    output = _token_ids(output_token_ids, "output_token_ids")
    return Datum(
        model_input=ModelInput.from_ints(prompt + output[:-1]),
        loss_fn_inputs={"target_tokens": prompt[1:] + output},
    )


def make_training_batch(
    runs: Iterable[GradedRun], *, scale: Scale = "std"
) -> tuple[list[Datum], int]:
    """Group runs by prompt, drop flat groups, and build one datum per kept rollout.

    Args:
        runs: Graded HUD runs, grouped by ``group_id`` (never by position).
        scale: See :func:`~rlhelpers.advantages.group_relative_advantages`.

    Returns:
        ``(datums, kept_groups)``: the datums, in order of each group's first
        appearance and of the runs within it, and the NUMBER of groups with a reward
        spread. Two empty results mean that nothing can be learnt from this batch:
        make no update.

    Raises:
        RolloutFailed: A run failed, holds no token sample, or its turns do not extend
            each other.
        ValueError: A reward or a token sample is missing, misaligned or not finite.
    """
    batch = list(runs)
    # Every run is checked before any is used: a failure anywhere stops the step.
    samples = {id(run): check_run(run) for run in batch}
    datums: list[Datum] = []
    kept_groups = 0
    for group in group_runs(batch).values():
        rewards = [run_reward(run) for run in group]
        advantages = group_relative_advantages(rewards, scale=scale)
        if not any(advantages):
            continue
        kept_groups += 1
        datums += [
            _run_datum(run, samples[id(run)], advantage)
            for run, advantage in zip(group, advantages, strict=True)
        ]
    return datums, kept_groups


def _run_datum(run: GradedRun, sample: Any, advantage: float) -> Datum:
    try:
        if isinstance(sample, Episode):
            return make_episode_datum(sample, advantage)
        return make_datum(
            sample.prompt_token_ids,
            sample.output_token_ids,
            sample.output_logprobs,
            advantage,
        )
    except ValueError as error:
        raise ValueError(f"rollout of task {task_name(run)!r}: {error}") from error


def _failed(run: object, cause: str) -> RolloutFailed:
    return RolloutFailed(
        f"rollout of task {task_name(run)!r} {cause}. A failed rollout is not a wrong "
        "answer: nothing was trained on; fix the cause and run the step again"
    )


def _token_ids(values: Sequence[int], name: str) -> list[int]:
    ids: list[int] = []
    for i, value in enumerate(values):
        if isinstance(value, bool) or not hasattr(value, "__index__") or value < 0:
            raise ValueError(f"{name}[{i}] is {value!r}, not a token id (0 or more)")
        ids.append(int(value))
    if not ids:
        raise ValueError(f"{name} is empty: a datum needs at least one token there")
    return ids


def _finite(value: Any, name: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not abs(number) <= _FLOAT32_MAX:  # also true for NaN
        raise ValueError(
            f"{name} is {value!r}, not a finite float32 number: do not train on this "
            "rollout; sample it again"
        )
    return number
