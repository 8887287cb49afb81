"""The service's policy losses, token by token, as functions of the importance ratio.

The ratio r of a trained token is its probability under the weights that are updated
over its probability under the weights that sampled it. At the first update on a batch
it is 1 and the three losses have the same gradient; they differ from the second update
on. Written here to be drawn, counted and checked by hand; what trains is the service.

======================  ==================================  ===========================
loss                    of one token with advantage A       how hard it pushes up
======================  ==================================  ===========================
``importance_sampling`` −r·A                                r·A
``ppo``                 −min(r·A, clip(r)·A)                r·A, or 0 where clipped
``cispo``               −stopgrad(clip(r))·log p·A          clip(r)·A
======================  ==================================  ===========================

Sources: PPO, Schulman et al. 2017 (arXiv 1707.06347), eq. 7; CISPO, MiniMax-M1 2025
(arXiv 2506.13585), eq. 4; the bounds clip the ratio itself, as the service's
``clip_low_threshold`` and ``clip_high_threshold`` do.

Pure: no I/O, no service.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from fireworks.training.sdk import Datum

#: Smallest and largest ratio that the service leaves as it is, unless told otherwise.
CLIP = (0.8, 1.2)


def token_losses(
    name: str,
    ratios: Any,
    advantages: Any,
    *,
    sampled_logprobs: Any = 0.0,
    clip: tuple[float, float] = CLIP,
) -> np.ndarray:
    """The loss of each token; the loss of a batch is their sum.

    Args:
        name: ``"importance_sampling"``, ``"ppo"`` or ``"cispo"``.
        ratios: Importance ratios, above 0.
        advantages: The tokens' advantages.
        sampled_logprobs: Log-probabilities under the weights that sampled; only cispo
            reads them.
        clip: Smallest and largest ratio.

    Raises:
        ValueError: The name is unknown.

    >>> token_losses("ppo", [0.5, 1.0, 1.5], [1.0, 1.0, 1.0]).tolist()
    [-0.5, -1.0, -1.2]
    """
    ratio, advantage = np.asarray(ratios, float), np.asarray(advantages, float)
    clipped = np.clip(ratio, *clip)
    if name == "importance_sampling":
        return np.asarray(-ratio * advantage)
    if name == "ppo":
        return np.asarray(-np.minimum(ratio * advantage, clipped * advantage))
    if name == "cispo":
        logprobs = np.asarray(sampled_logprobs, float) + np.log(ratio)
        return np.asarray(-clipped * logprobs * advantage)
    raise _unknown(name)


def token_pushes(
    name: str, ratios: Any, advantages: Any, *, clip: tuple[float, float] = CLIP
) -> np.ndarray:
    """How hard each token's log-probability is pushed up: minus the loss's gradient.

    Arguments and errors are those of :func:`token_losses`.

    >>> token_pushes("ppo", [0.5, 1.0, 1.5], [1.0, 1.0, 1.0]).tolist()
    [0.5, 1.0, 0.0]
    >>> token_pushes("cispo", [0.5, 1.0, 1.5], [1.0, 1.0, 1.0]).tolist()
    [0.8, 1.0, 1.2]
    """
    ratio, advantage = np.asarray(ratios, float), np.asarray(advantages, float)
    if name == "importance_sampling":
        return np.asarray(ratio * advantage)
    if name == "ppo":
        # Silent where the ratio has gone far enough the way the advantage pushes.
        far = np.where(advantage > 0, ratio > clip[1], ratio < clip[0])
        return np.where(far, 0.0, ratio * advantage)
    if name == "cispo":
        return np.asarray(np.clip(ratio, *clip) * advantage)
    raise _unknown(name)


@dataclass(frozen=True)
class TrainedTokens:
    """The trained tokens of a batch, flattened.

    Attributes:
        ratios: Probability under the trainer's weights over that under the sampler's.
        advantages: What each is weighted by; none is 0.
        sampled_logprobs: Under the weights that sampled.
    """

    ratios: np.ndarray
    advantages: np.ndarray
    sampled_logprobs: np.ndarray

    @classmethod
    def of(
        cls, datums: Sequence[Datum], logprobs: Sequence[np.ndarray]
    ) -> TrainedTokens:
        """Compare a batch with the trainer's log-probabilities of its targets.

        Args:
            datums: The batch.
            logprobs: Of each datum's targets, as ``forward`` or ``forward_backward``
                returns them.

        Raises:
            ValueError: There are not as many of the one as of the other.
        """
        parts = []
        for datum, current in zip(datums, logprobs, strict=True):
            fields = datum.loss_fn_inputs
            advantages = fields["advantages"].to_numpy()
            rows = np.stack([current, advantages, fields["logprobs"].to_numpy()])
            parts.append(rows[:, advantages != 0])
        current, advantages, sampled = np.concatenate(parts, axis=1).astype(float)
        return cls(np.exp(current - sampled), advantages, sampled)

    def clip_share(self, clip: tuple[float, float] = CLIP) -> float:
        """Share of the tokens whose ratio lies outside the bounds, 0 to 1."""
        return float(np.mean((self.ratios < clip[0]) | (self.ratios > clip[1])))

    def ends(self, share: float = 0.01) -> tuple[float, float]:
        """The ratios that this share of the tokens lies below, and above."""
        low, high = np.quantile(self.ratios, [share, 1 - share])
        return float(low), float(high)

    def loss(self, name: str, *, clip: tuple[float, float] = CLIP) -> float:
        """The batch's loss by hand, a sum over tokens."""
        losses = token_losses(
            name,
            self.ratios,
            self.advantages,
            sampled_logprobs=self.sampled_logprobs,
            clip=clip,
        )
        return float(losses.sum())


def _unknown(name: str) -> ValueError:
    return ValueError(
        f"unknown loss {name!r}; use 'importance_sampling', 'ppo' or 'cispo'"
    )
