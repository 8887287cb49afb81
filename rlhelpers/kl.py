"""How far the policy has moved from its base model: the KL, measured on rollouts.

KL(policy ‖ base) is the mean, over what the policy says, of how much more probable the
policy finds it than the base model does. A step's rollouts are what the policy says,
and their log-probabilities under the policy are known; one forward pass of the frozen
base model gives the other half. GRPO as this course runs it has no KL term in its loss,
so the number is watched and steers nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhelpers.datums import check_run, make_scoring_datum, whole_text

if TYPE_CHECKING:
    from rlhelpers.service import TrainingSession


def kl_per_token(
    policy_logprobs: Sequence[float], base_logprobs: Sequence[float]
) -> float:
    """Estimate KL(policy ‖ base) from tokens that the policy sampled.

    The estimator is the plain mean of the difference, "k1" in Schulman, "Approximating
    KL Divergence" (2020), http://joschu.net/blog/kl-approx.html. It has no bias; where
    policy and base hardly differ it may come out a little below 0. The same note's k3
    (r − 1 − log r, with r = base / policy), the one in GRPO's loss, is never negative.
    But it weighs a token with r itself: a single token that training made a thousand
    times rarer, and that is sampled all the same, outweighs everything else in a step.

    Args:
        policy_logprobs: Of each sampled token under the policy, natural logarithms.
        base_logprobs: Of the same tokens under the base model.

    Returns:
        Nats per token.

    Raises:
        ValueError: No tokens, or two different numbers of them.

    >>> round(kl_per_token([-0.5, -1.0], [-1.0, -0.75]), 3)  # (0.5 − 0.25) / 2
    0.125
    """
    if len(policy_logprobs) != len(base_logprobs) or not len(policy_logprobs):
        raise ValueError(
            f"{len(policy_logprobs)} log-probabilities under the policy and "
            f"{len(base_logprobs)} under the base model; give both for the same "
            "tokens, at least one"
        )
    return float(np.mean(np.subtract(policy_logprobs, base_logprobs)))


async def measure_kl(session: TrainingSession, runs: Sequence[Any]) -> float:
    """The KL of some rollouts' policy to its base model, in nats per token.

    One forward pass of the base model over prompts and replies, which counts as
    prefill. Measured under the sampling settings of the rollouts: at temperature 1,
    top-p 1 and top-k off this is the policy's own distribution.

    Args:
        session: An open session of the base model.
        runs: Completed HUD runs, all sampled from one snapshot.

    Raises:
        RolloutFailed: A run has no usable sample; nothing was sent.
        TokenLimitReached: The pass does not fit under the session's limit.
    """
    samples = [check_run(run) for run in runs]
    texts = [whole_text(sample) for sample in samples]
    datums = [make_scoring_datum(tokens[:1], tokens[1:]) for tokens, _ in texts]
    client = await asyncio.to_thread(session.reference)
    future = await client.forward_async(datums, "cross_entropy")
    output = await future.result_async()
    policy: list[float] = []
    base: list[float] = []
    for sample, (_, sampled), scored in zip(
        samples, texts, output.loss_fn_outputs, strict=True
    ):
        policy += sample.output_logprobs
        # Position i predicts token i + 1; the others predict what was only read.
        base += scored["logprobs"].to_numpy()[np.array(sampled[1:])].tolist()
    return kl_per_token(policy, base)
