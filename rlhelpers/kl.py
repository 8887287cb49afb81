"""How far the policy has moved from its base model: the KL, measured on rollouts.

KL(policy ‖ base) is the mean, over what the policy says, of how much more probable the
policy finds it than the base model does. A step's rollouts are what the policy says,
and their log-probabilities under the policy are known; one forward pass of the frozen
base model gives the other half. GRPO as this course runs it has no KL term by default,
so the number is watched and steers nothing. :func:`add_kl_penalty` is the option that
lets it steer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from fireworks.training.sdk import Datum

from rlhelpers.datums import check_run, make_scoring_datum, whole_text
from rlhelpers.refusals import explained

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
    scored = await _base_logprobs(session, datums)
    policy: list[float] = []
    base: list[float] = []
    for sample, (_, sampled), logprobs in zip(samples, texts, scored, strict=True):
        policy += sample.output_logprobs
        # Position i predicts token i + 1; the others predict what was only read.
        base += logprobs[np.array(sampled[1:])].tolist()
    return kl_per_token(policy, base)


async def _base_logprobs(
    session: TrainingSession, datums: Sequence[Datum]
) -> list[np.ndarray]:
    """The frozen base model's log-probabilities of each datum's targets."""
    client = await asyncio.to_thread(session.reference)
    waiting = session.waits.operation("the base model's pass", polls=True)
    with waiting, explained(session.preset, training=True):
        future = await client.forward_async(list(datums), "cross_entropy")
        output = await future.result_async()
    return [scored["logprobs"].to_numpy() for scored in output.loss_fn_outputs]


# -- a penalty that holds the policy ------------------------------------------------


def kl_penalised(
    datums: Sequence[Datum],
    base_logprobs: Sequence[np.ndarray],
    coefficient: float,
) -> list[Datum]:
    """Fold a KL penalty into the advantages, token by token.

    The service's losses have no KL term, and need none: each trained token's advantage
    becomes A + β·(mean − d), where d is its log-probability under the policy minus that
    under the base, and the mean is over all trained tokens of the batch. On-policy the
    expected gradient of the added term is −β times that of the KL at each token, the
    text before it taken as given; the mean is a baseline, which only takes out noise.
    So it is done in Tinker's cookbook (``incorporate_kl_penalty``); verl subtracts β·d
    from the rewards instead (``use_kl_in_reward``), and TRL and the GRPO paper add a
    k3 term to the loss (``beta``).

    Args:
        datums: A batch as :func:`~rlhelpers.datums.make_training_batch` builds it.
        base_logprobs: For each datum, the base model's log-probabilities of its
            targets.
        coefficient: β, in units of advantage per nat.

    Returns:
        New datums; masked positions keep advantage 0.

    Raises:
        ValueError: There are not as many of the one as of the other.

    >>> from rlhelpers.datums import make_datum
    >>> datum = make_datum([1, 2], [3, 4], [-0.25, -0.5], 1.0)
    >>> (held,) = kl_penalised([datum], [np.array([0.0, -1.25, -0.5])], 0.5)
    >>> held.loss_fn_inputs["advantages"].tolist()  # d is 1 and 0, their mean 0.5
    [0.0, 0.75, 1.25]
    """
    rows = [
        _row(datum, base) for datum, base in zip(datums, base_logprobs, strict=True)
    ]
    gaps = [(sampled - base)[trained] for _, sampled, base, trained in rows]
    mean = float(np.concatenate(gaps).mean()) if gaps else 0.0
    penalised = []
    for datum, (advantages, _, _, trained), gap in zip(datums, rows, gaps, strict=True):
        weights = advantages.copy()
        weights[trained] += coefficient * (mean - gap)
        inputs = {**datum.loss_fn_inputs, "advantages": weights.tolist()}
        penalised.append(Datum(model_input=datum.model_input, loss_fn_inputs=inputs))
    return penalised


def _row(
    datum: Datum, base: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Advantages, log-probabilities under policy and base, and what is trained."""
    fields = datum.loss_fn_inputs
    advantages = fields["advantages"].to_numpy().astype(float)
    sampled = fields["logprobs"].to_numpy().astype(float)
    # Masked positions carry 0 in both rows. So does a token that was certain in a
    # rollout of advantage 0, and that has no gradient either.
    trained = (advantages != 0) | (sampled != 0)
    return advantages, sampled, np.asarray(base, dtype=float), trained


async def add_kl_penalty(
    session: TrainingSession, datums: Sequence[Datum], coefficient: float
) -> list[Datum]:
    """Read a batch with the frozen base model and fold the KL into its advantages.

    One forward pass of the base model over the batch, which counts as prefill.

    Args:
        session: An open session of the base model.
        datums: The batch.
        coefficient: See :func:`kl_penalised`.

    Raises:
        TokenLimitReached: The pass does not fit under the session's limit.
    """
    targets = [datum.loss_fn_inputs["target_tokens"] for datum in datums]
    scoring = [
        Datum(model_input=datum.model_input, loss_fn_inputs={"target_tokens": target})
        for datum, target in zip(datums, targets, strict=True)
    ]
    base = await _base_logprobs(session, scoring)
    return kl_penalised(datums, base, coefficient)
