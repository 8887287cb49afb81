"""Losses of the local service, against hand-worked values and finite differences."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rlhelpers.local.losses import (
    LOSSES,
    LossError,
    check_inputs,
    clipped_tokens,
    get_loss,
    resolve_config,
)

BOUNDS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}


def value_and_gradient(
    name: str,
    lp: list[float],
    config: dict[str, float] | None = None,
    **inputs: list[float],
) -> tuple[np.ndarray, np.ndarray]:
    """Per-token losses, and the gradient of their sum for each ``lp``."""
    current = torch.tensor(lp, dtype=torch.float64, requires_grad=True)
    tensors = {k: torch.tensor(v, dtype=torch.float64) for k, v in inputs.items()}
    settings = resolve_config(name, config)
    per_token = LOSSES[name].token_loss(current, tensors, settings)
    per_token.sum().backward()
    assert current.grad is not None
    return per_token.detach().numpy(), current.grad.numpy()


def test_cross_entropy_is_the_weighted_negative_logprob() -> None:
    lp, weights = [-1.0, -2.0, -0.5], [1.0, 0.0, -3.0]
    value, gradient = value_and_gradient("cross_entropy", lp, weights=weights)
    np.testing.assert_array_equal(value, [1.0, 0.0, -1.5])
    np.testing.assert_array_equal(gradient, [-1.0, 0.0, 3.0])


def test_cross_entropy_weights_default_to_one() -> None:
    value, gradient = value_and_gradient("cross_entropy", [-1.0, -2.0])
    np.testing.assert_array_equal(value, [1.0, 2.0])
    np.testing.assert_array_equal(gradient, [-1.0, -1.0])


# Ratio r against advantage A, with bounds 0.8 and 1.2: the loss and its derivative by
# lp, worked out by hand. The sampling log-probability is -1, so lp is ln r - 1.
RATIO_CASES = [
    # r    A     importance_sampling     ppo
    (0.5, 2.0, (-1.0, -1.0), (-1.0, -1.0)),
    (1.0, 2.0, (-2.0, -2.0), (-2.0, -2.0)),
    (1.5, 2.0, (-3.0, -3.0), (-2.4, 0.0)),
    (0.5, -2.0, (1.0, 1.0), (1.6, 0.0)),
    (1.0, -2.0, (2.0, 2.0), (2.0, 2.0)),
    (1.5, -2.0, (3.0, 3.0), (3.0, 3.0)),
    (1.5, 0.0, (0.0, 0.0), (0.0, 0.0)),
]


@pytest.mark.parametrize(("ratio", "advantage", "plain", "clipped"), RATIO_CASES)
def test_importance_sampling_and_ppo_by_hand(
    ratio: float,
    advantage: float,
    plain: tuple[float, float],
    clipped: tuple[float, float],
) -> None:
    lp = [math.log(ratio) - 1.0]
    for name, expected in (("importance_sampling", plain), ("ppo", clipped)):
        value, gradient = value_and_gradient(
            name, lp, logprobs=[-1.0], advantages=[advantage]
        )
        assert value[0] == pytest.approx(expected[0], abs=1e-12)
        assert gradient[0] == pytest.approx(expected[1], abs=1e-12)
        if expected[1] == 0.0:
            assert gradient[0] == 0.0  # exactly: a clipped token does not move


@pytest.mark.parametrize(
    ("ratio", "weight"), [(0.5, 0.8), (0.9, 0.9), (1.0, 1.0), (1.1, 1.1), (3.0, 1.2)]
)
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_cispo_clamps_the_weight_and_never_the_gradient(
    ratio: float, weight: float, advantage: float
) -> None:
    lp = math.log(ratio) - 1.0
    value, gradient = value_and_gradient(
        "cispo", [lp], logprobs=[-1.0], advantages=[advantage]
    )
    assert value[0] == pytest.approx(-weight * lp * advantage, abs=1e-12)
    assert gradient[0] == pytest.approx(-weight * advantage, abs=1e-12)
    assert gradient[0] != 0.0


def test_dro_by_hand() -> None:
    """-(lp A - beta/2 (lp - q)^2), and nothing at all on a token without advantage."""
    inputs = {"logprobs": [-1.0, -1.0, 0.0], "advantages": [2.0, -2.0, 0.0]}
    value, gradient = value_and_gradient("dro", [-3.0, -2.0, -5.0], **inputs)
    # By default beta is 0.05: 6 + 0.025 * 4 and -4 + 0.025 * 1.
    np.testing.assert_allclose(value, [6.1, -3.975, 0.0], rtol=1e-12)
    # The derivative is -A + beta (lp - q).
    np.testing.assert_allclose(gradient, [-2.1, 1.95, 0.0], rtol=1e-12)
    value, gradient = value_and_gradient(
        "dro", [-3.0, -2.0, -5.0], {"beta": 1.0}, **inputs
    )
    np.testing.assert_allclose(value, [8.0, -3.5, 0.0], rtol=1e-12)
    np.testing.assert_allclose(gradient, [-4.0, 1.0, 0.0], rtol=1e-12)


def test_clip_bounds_are_taken_from_the_config() -> None:
    config = {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}
    lp = [math.log(r) for r in (0.1, 3.0, 5.0)]
    inputs = {"logprobs": [0.0] * 3, "advantages": [1.0] * 3}
    value, gradient = value_and_gradient("ppo", lp, config, **inputs)
    np.testing.assert_allclose(value, [-0.1, -3.0, -4.0], rtol=1e-12)
    np.testing.assert_allclose(gradient, [-0.1, -3.0, 0.0], rtol=1e-12)
    _, gradient = value_and_gradient("cispo", lp, config, **inputs)
    np.testing.assert_allclose(gradient, [-0.1, -3.0, -4.0], rtol=1e-12)


def _reference(
    name: str, lp: np.ndarray, q: np.ndarray, a: np.ndarray, frozen: np.ndarray
) -> float:
    """The summed loss in numpy; ``frozen`` is where cispo's ratio is held."""
    ratio = np.exp(lp - q)
    match name:
        case "cross_entropy":
            return float(-(a * lp).sum())
        case "importance_sampling":
            return float(-(ratio * a).sum())
        case "ppo":
            clipped = np.minimum(np.maximum(ratio, 0.8), 1.2)
            return float(-np.minimum(ratio * a, clipped * a).sum())
        case "cispo":
            weight = np.minimum(np.maximum(np.exp(frozen - q), 0.8), 1.2)
            return float(-(weight * lp * a).sum())
        case "dro":
            penalty = np.where(a != 0, 0.5 * 0.05 * (lp - q) ** 2, 0.0)
            return float(-(lp * a - penalty).sum())
    raise AssertionError(name)


@pytest.mark.parametrize("name", list(LOSSES))
def test_gradient_agrees_with_central_differences(name: str) -> None:
    random = np.random.default_rng(7)
    lp = random.uniform(-3, -0.1, 40)
    q = lp + random.uniform(-0.6, 0.6, 40)
    a = random.normal(size=40)
    a[::7] = 0.0
    inputs = (
        {"weights": a.tolist()}
        if name == "cross_entropy"
        else {"logprobs": q.tolist(), "advantages": a.tolist()}
    )
    value, gradient = value_and_gradient(name, lp.tolist(), **inputs)
    assert value.sum() == pytest.approx(_reference(name, lp, q, a, lp), abs=1e-12)
    step = 1e-6
    numeric = np.array(
        [
            (
                _reference(name, lp + step * unit, q, a, lp)
                - _reference(name, lp - step * unit, q, a, lp)
            )
            / (2 * step)
            for unit in np.eye(40)
        ]
    )
    np.testing.assert_allclose(gradient, numeric, atol=1e-8)


def test_clipped_tokens_counts_those_with_an_advantage_outside_the_bounds() -> None:
    lp = torch.log(torch.tensor([0.7, 0.9, 1.0, 1.3, 1.3]))
    inputs = {
        "logprobs": torch.zeros(5),
        "advantages": torch.tensor([1.0, 1.0, -1.0, -1.0, 0.0]),
    }
    assert clipped_tokens(lp, inputs, BOUNDS) == 2


def test_unknown_loss_is_refused_with_the_known_ones() -> None:
    with pytest.raises(LossError, match=r"'gspo'.*cross_entropy.*cispo"):
        get_loss("gspo")


def test_config_defaults_and_overrides() -> None:
    assert resolve_config("ppo", None) == BOUNDS
    assert resolve_config("cispo", {"clip_high_threshold": 4}) == {
        "clip_low_threshold": 0.8,
        "clip_high_threshold": 4.0,
    }
    assert resolve_config("cross_entropy", {}) == {}


@pytest.mark.parametrize(
    ("loss", "config", "message"),
    [
        ("importance_sampling", {"clip_low_threshold": 0.8}, "'clip_low_threshold'"),
        ("ppo", {"epsilon": 0.2}, "'epsilon'.*clip_low_threshold"),
        ("ppo", {"clip_low_threshold": "0.8"}, "must be a number"),
        ("ppo", {"clip_low_threshold": True}, "must be a number"),
        ("ppo", {"clip_low_threshold": None}, "must be a number"),
        ("cispo", {"clip_low_threshold": 1.3}, "0 <= low <= high"),
        ("ppo", {"clip_low_threshold": -0.1}, "0 <= low <= high"),
        ("ppo", {"clip_high_threshold": math.nan}, "0 <= low <= high"),
        ("ppo", {"clip_high_threshold": 10**400}, "too large"),
        ("dro", {"beta": math.inf}, "too large"),
        ("dro", {"beta": math.nan}, "must not be negative"),
        ("dro", {"beta": -0.1}, "must not be negative"),
        ("dro", {"clip_low_threshold": 0.8}, "known: beta"),
    ],
)
def test_unusable_config_is_refused(
    loss: str, config: dict[str, object], message: str
) -> None:
    with pytest.raises(LossError, match=message):
        resolve_config(loss, config)


def test_missing_and_surplus_inputs_are_named() -> None:
    policy = frozenset({"target_tokens", "logprobs", "advantages"})
    for name in ("importance_sampling", "ppo", "cispo", "dro"):
        check_inputs(name, policy)
        with pytest.raises(LossError, match=r"\['advantages'\], which are missing"):
            check_inputs(name, policy - {"advantages"})
        with pytest.raises(LossError, match=r"does not take .*\['mask'\]"):
            check_inputs(name, policy | {"mask"})
    check_inputs("cross_entropy", frozenset({"target_tokens"}))
    check_inputs("cross_entropy", frozenset({"target_tokens", "weights"}))
    with pytest.raises(LossError, match="target_tokens"):
        check_inputs("cross_entropy", frozenset({"weights"}))
