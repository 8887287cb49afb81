"""Token-level policy losses, as sums over tokens.

Every loss maps the current log-probability of each target token to one number per
token; the loss of a batch is the plain sum. Signs follow the service's convention:
lower is better, so a positive advantage pulls its token's log-probability up.

Notation, all tensors of shape [tokens]:

* ``lp``  log-probability of the target under the current weights (carries gradient)
* ``q``   log-probability under the policy that sampled it (``logprobs``)
* ``A``   advantage of the token (``advantages``); 0 on prompt tokens
* ``r``   importance ratio ``exp(lp - q)``
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_LARGEST = torch.finfo(torch.float32).max

Inputs = Mapping[str, Tensor]
Config = Mapping[str, float]
TokenLoss = Callable[[Tensor, Inputs, Config], Tensor]


class LossError(ValueError):
    """The request names a loss, an input or a setting that cannot be used."""


def cross_entropy(lp: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """``-w * lp``: weighted negative log-likelihood; ``weights`` default to 1."""
    weights = inputs.get("weights")
    return -lp if weights is None else -weights * lp


def importance_sampling(lp: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """``-r * A``: REINFORCE with an off-policy correction, never clipped."""
    return -_ratio(lp, inputs) * inputs["advantages"]


def ppo(lp: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """``-min(r A, clamp(r, low, high) A)`` (Schulman et al. 2017, eq. 7).

    ``clip_low_threshold`` and ``clip_high_threshold`` bound the ratio itself
    (0.8 and 1.2 by default, that is 1 ± 0.2).
    """
    ratio, advantages = _ratio(lp, inputs), inputs["advantages"]
    clipped = _clamp(ratio, config)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def cispo(lp: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """``-stopgrad(clamp(r, low, high)) * lp * A`` (MiniMax-M1 2025, eq. 4).

    The clamp bounds each token's weight but never silences its gradient.
    """
    weight = _clamp(_ratio(lp, inputs), config).detach()
    return -weight * lp * inputs["advantages"]


def dro(lp: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """``-(lp * A - beta / 2 * (lp - q)^2)`` where ``A != 0``, else 0 (DRO, 2024).

    The quadratic term pulls back towards the sampling policy. It is gated to tokens
    with an advantage, as in the Fireworks cookbook: ``q`` is a mere 0 on a prompt.
    """
    advantages = inputs["advantages"]
    drift = lp - inputs["logprobs"]
    penalty = 0.5 * config["beta"] * drift.square() * (advantages != 0)
    return penalty - lp * advantages


@dataclass(frozen=True)
class Loss:
    """One loss with the tensors it reads and the settings it takes."""

    token_loss: TokenLoss
    required: frozenset[str]
    optional: frozenset[str] = frozenset()
    defaults: Mapping[str, float] | None = None
    uses_clip: bool = False


_POLICY_INPUTS = frozenset({"target_tokens", "logprobs", "advantages"})
_CLIP_DEFAULTS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}

LOSSES: dict[str, Loss] = {
    "cross_entropy": Loss(
        cross_entropy, frozenset({"target_tokens"}), frozenset({"weights"})
    ),
    "importance_sampling": Loss(importance_sampling, _POLICY_INPUTS),
    "ppo": Loss(ppo, _POLICY_INPUTS, defaults=_CLIP_DEFAULTS, uses_clip=True),
    "cispo": Loss(cispo, _POLICY_INPUTS, defaults=_CLIP_DEFAULTS, uses_clip=True),
    "dro": Loss(dro, _POLICY_INPUTS, defaults={"beta": 0.05}),
}


def get_loss(name: str) -> Loss:
    """The loss called ``name``; :class:`LossError` lists the known ones."""
    try:
        return LOSSES[name]
    except KeyError:
        known = ", ".join(LOSSES)
        raise LossError(
            f"loss_fn {name!r} is not supported by the local service; use one of "
            f"{known}"
        ) from None


def resolve_config(name: str, config: Mapping[str, object] | None) -> dict[str, float]:
    """``config`` on top of the loss's defaults; unusable keys are refused."""
    loss = get_loss(name)
    resolved = dict(loss.defaults or {})
    if config is not None and not isinstance(config, Mapping):
        raise LossError(f"loss_fn_config must be an object, got {config!r}")
    for key, value in (config or {}).items():
        if key not in resolved:
            known = ", ".join(resolved) or "none"
            raise LossError(
                f"loss_fn_config key {key!r} is not supported for {name} (known: "
                f"{known})"
            )
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise LossError(f"loss_fn_config[{key!r}] must be a number, got {value!r}")
        if abs(value) > _LARGEST:
            raise LossError(f"loss_fn_config[{key!r}] is too large: {value!r}")
        resolved[key] = float(value)
    if not resolved.get("beta", 0.0) >= 0.0:  # false for NaN, too
        raise LossError(f"beta must not be negative, got {resolved['beta']}")
    if loss.uses_clip:
        low, high = resolved["clip_low_threshold"], resolved["clip_high_threshold"]
        if not 0.0 <= low <= high:
            raise LossError(
                "clip thresholds bound the ratio and need 0 <= low <= high, got "
                f"clip_low_threshold={low} and clip_high_threshold={high}"
            )
    return resolved


def check_inputs(name: str, keys: frozenset[str]) -> None:
    """Refuse missing and surplus ``loss_fn_inputs`` by name."""
    loss = get_loss(name)
    if missing := sorted(loss.required - keys):
        raise LossError(f"{name} needs loss_fn_inputs {missing}, which are missing")
    if surplus := sorted(keys - loss.required - loss.optional):
        raise LossError(f"{name} does not take loss_fn_inputs {surplus}; remove them")


def clipped_tokens(lp: Tensor, inputs: Inputs, config: Config) -> int:
    """How many tokens with an advantage have a ratio outside the clip bounds."""
    ratio = _ratio(lp.detach(), inputs)
    outside = (ratio < config["clip_low_threshold"]) | (
        ratio > config["clip_high_threshold"]
    )
    return int((outside & (inputs["advantages"] != 0)).sum())


def _ratio(lp: Tensor, inputs: Inputs) -> Tensor:
    return torch.exp(lp - inputs["logprobs"])


def _clamp(ratio: Tensor, config: Config) -> Tensor:
    return torch.clamp(
        ratio, config["clip_low_threshold"], config["clip_high_threshold"]
    )
