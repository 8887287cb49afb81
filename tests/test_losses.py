"""The losses: worked out by hand, differentiated by torch, and as the service's."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, get_args

import numpy as np
import pytest
import torch
from noise_policy import plain

from rlhelpers.datums import make_datum
from rlhelpers.local.losses import get_loss, resolve_config
from rlhelpers.losses import TrainedTokens, token_losses, token_pushes
from rlhelpers.service import TrainingSession
from rlhelpers.training import LossName, TrainConfig, train_step

NAMES = get_args(LossName)
RATIOS = np.array([0.1, 0.5, 0.79, 0.81, 1.0, 1.19, 1.21, 1.5, 3.0])


@pytest.mark.parametrize(
    ("name", "ratio", "advantage", "loss", "push"),
    [
        ("importance_sampling", 1.5, 2.0, -3.0, 3.0),
        ("importance_sampling", 0.5, -2.0, 1.0, -1.0),
        ("ppo", 1.5, 2.0, -2.4, 0.0),  # min(3, 2.4): a constant
        ("ppo", 1.5, -2.0, 3.0, -3.0),  # min(−3, −2.4): pulled back
        ("ppo", 0.5, 2.0, -1.0, 1.0),  # min(1, 1.6): pulled back
        ("ppo", 0.5, -2.0, 1.6, 0.0),  # min(−1, −1.6): a constant
        ("cispo", 1.5, 2.0, -2.4 * math.log(1.5), 2.4),
        ("cispo", 0.5, -2.0, 1.6 * math.log(0.5), -1.6),
    ],
)
def test_by_hand(
    name: str, ratio: float, advantage: float, loss: float, push: float
) -> None:
    assert float(token_losses(name, ratio, advantage)) == pytest.approx(loss)
    assert float(token_pushes(name, ratio, advantage)) == pytest.approx(push)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("advantage", [1.5, -0.5, 0.0])
@pytest.mark.parametrize("clip", [(0.8, 1.2), (0.0, 4.0)])
def test_as_the_service_computes_and_differentiates_them(
    name: str, advantage: float, clip: tuple[float, float]
) -> None:
    sampled = np.linspace(-2.0, -0.1, len(RATIOS))
    lp = torch.tensor(sampled + np.log(RATIOS), requires_grad=True)
    inputs = {
        "logprobs": torch.tensor(sampled),
        "advantages": torch.full_like(lp, advantage),
    }
    bounds = dict(zip(("clip_low_threshold", "clip_high_threshold"), clip, strict=True))
    given = None if name == "importance_sampling" else bounds
    service = get_loss(name).token_loss(lp, inputs, resolve_config(name, given))
    service.sum().backward()
    losses = token_losses(name, RATIOS, advantage, sampled_logprobs=sampled, clip=clip)
    assert losses == pytest.approx(service.detach().numpy())
    pushes = token_pushes(name, RATIOS, advantage, clip=clip)
    assert lp.grad is not None
    assert pushes == pytest.approx(-lp.grad.numpy())


def test_at_ratio_1_all_push_alike() -> None:
    pushes = [token_pushes(name, 1.0, [1.5, -0.5]).tolist() for name in NAMES]
    assert pushes == [[1.5, -0.5]] * 3


def test_an_unknown_loss_is_named() -> None:
    for function in (token_losses, token_pushes):
        with pytest.raises(ValueError, match="unknown loss 'dro'; use"):
            function("dro", 1.0, 1.0)


def test_trained_tokens_leave_out_the_masked_ones() -> None:
    two = math.log(2)
    datums = [
        make_datum([1, 2], [3, 4], [-1.0, -2.0], 1.0),
        make_datum([1], [5], [-1.0], -0.5),
    ]
    # Twice as probable, as probable, and half as probable.
    now = [np.array([-9.0, -1.0 + two, -2.0]), np.array([-1.0 - two])]
    tokens = TrainedTokens.of(datums, now)
    assert tokens.ratios == pytest.approx([2.0, 1.0, 0.5])
    assert tokens.advantages.tolist() == [1.0, 1.0, -0.5]
    assert tokens.clip_share() == pytest.approx(2 / 3)
    assert tokens.clip_share((0.4, 2.1)) == 0.0
    assert tokens.ends(0.0) == pytest.approx((0.5, 2.0))
    # −2 − 1 + 0.25; −1.2 − 1 + 0.4 (min(−0.25, −0.4) is −0.4).
    assert tokens.loss("importance_sampling") == pytest.approx(-2.75)
    assert tokens.loss("ppo") == pytest.approx(-1.8)
    # −1.2·(−1 + log 2) − 1·(−2) + 0.8·(−1 − log 2)·0.5
    by_hand = -1.2 * (two - 1) + 2.0 + 0.4 * (-1 - two)
    assert tokens.loss("cispo") == pytest.approx(by_hand)
    with pytest.raises(ValueError):
        TrainedTokens.of(datums, now[:1])


@pytest.mark.parametrize("name", NAMES)
async def test_the_services_sum_after_an_update(
    session: TrainingSession, name: str, tmp_path: Any
) -> None:
    config = TrainConfig.from_preset(
        session.preset, loss_fn=name, learning_rate=5e-2, tasks_per_step=4, group_size=8
    )
    tasks = [plain(n) for n in range(4)]
    step = await train_step(session, tasks, config=config, run_dir=tmp_path / "run")
    datums = list(step.datums)
    future = await session.training_client.forward_backward_async(datums, name)
    output = await future.result_async()
    now = [scored["logprobs"].to_numpy() for scored in output.loss_fn_outputs]
    tokens = TrainedTokens.of(datums, now)
    assert tokens.clip_share() > 0.05  # the update moved them
    assert output.metrics["loss:sum"] == pytest.approx(tokens.loss(name), rel=1e-3)
    if name != "importance_sampling":
        counted = output.metrics["clipped_tokens:sum"]
        assert counted == pytest.approx(tokens.clip_share() * len(tokens.ratios), abs=1)


# -- several updates on one batch ---------------------------------------------------


async def test_two_updates_are_two_optimizer_steps(
    session: TrainingSession, tmp_path: Any
) -> None:
    """The second update starts where the first one ended, as two calls by hand do."""
    tasks = [plain(n) for n in range(4)]
    config = TrainConfig.from_preset(
        session.preset, tasks_per_step=4, group_size=8, updates_per_batch=2
    )
    twice = await train_step(session, tasks, config=config, run_dir=tmp_path / "twice")
    assert session.updates == 2
    assert twice.max_ratio_error is not None
    assert twice.max_ratio_error < 1e-3  # the first pass, on policy
    trained = session.usage.counts.trained
    assert trained == 2 * sum(datum.model_input.length for datum in twice.datums)

    async def logprobs() -> list[np.ndarray]:
        client = session.training_client
        future = await client.forward_async(list(twice.datums), config.loss_fn)
        rows = (await future.result_async()).loss_fn_outputs
        return [row["logprobs"].to_numpy() for row in rows]

    after = await logprobs()
    session.new_policy()
    client = session.training_client
    for _ in range(2):
        future = await client.forward_backward_async(list(twice.datums), config.loss_fn)
        optimizer = await client.optim_step_async(config.adam)
        await future.result_async()
        await optimizer.result_async()
    again = await logprobs()
    assert all(map(np.array_equal, after, again))


async def test_a_limit_that_allows_one_of_two_updates_allows_none(
    session: TrainingSession, tmp_path: Any
) -> None:
    from rlhelpers.usage import TokenLimitReached

    tasks = [plain(n) for n in range(4)]
    config = TrainConfig.from_preset(
        session.preset, tasks_per_step=4, group_size=8, updates_per_batch=2
    )
    once = dataclasses.replace(config, updates_per_batch=1)
    await train_step(session, tasks, config=once, run_dir=tmp_path / "once")
    used = session.usage.counts
    session.new_policy()
    # The same rollouts again, and a token short of two updates.
    session.usage.limit = 2 * used.total + used.trained - 1
    with pytest.raises(TokenLimitReached):
        await train_step(session, tasks, config=config, run_dir=tmp_path / "run")
    assert session.usage.counts.trained == used.trained
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_updates_per_batch_is_at_least_1() -> None:
    with pytest.raises(ValueError, match="updates_per_batch must be at least 1, got 0"):
        TrainConfig(max_tokens=16, updates_per_batch=0)
