"""Turning logits into tokens, one independent random stream per request.

What a row draws depends on its own logits, settings and stream alone. All arithmetic
here is float64 and row by row, so the other rows of the batch cannot matter.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

GREEDY_BELOW = 1e-6  # a temperature under this is greedy decoding


@dataclass(frozen=True)
class SamplingParams:
    """Settings of one completion request.

    ``top_k`` 0 and ``top_p`` 1 are off; ``temperature`` 0 is greedy. Without a
    ``seed`` the stream is random. ``echo`` also asks for the prompt's
    log-probabilities.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    echo: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(
                f"temperature must be finite and >= 0, got {self.temperature}"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or positive, got {self.top_k}")

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature < GREEDY_BELOW

    def uniforms(self) -> np.ndarray:
        """One number in [0, 1) per token to come, fixed by the seed."""
        seed = secrets.randbits(63) if self.seed is None else self.seed
        return np.random.Generator(np.random.Philox(abs(seed))).random(self.max_tokens)


@dataclass(frozen=True)
class Drawn:
    """One token per row: ids, raw log-probabilities, and those sampled from."""

    tokens: list[int]
    logprobs: list[float]
    sampling_logprobs: list[float]


def draw(logits: Tensor, params: Sequence[SamplingParams], uniforms: Tensor) -> Drawn:
    """Draw the next token of each row.

    Args:
        logits: [rows, vocabulary], any float type.
        params: settings of each row.
        uniforms: [rows], float64 on the CPU, each row's next number in [0, 1).

    ``logprobs`` are log-probabilities under the model itself; ``sampling_logprobs``
    under the distribution that was drawn from, after temperature, top-k and top-p
    (0 for greedy rows, which draw from a single token).
    """
    # On the CPU: MPS has no float64, and CUDA sums in no fixed order.
    raw = torch.log_softmax(logits.to("cpu", torch.float64), dim=-1)
    if all(_plain(row) for row in params):
        tokens = _inverse_cdf(raw.exp(), uniforms)
        picked = pick(raw, tokens)
        return Drawn(tokens.tolist(), picked, picked)
    if all(row.greedy for row in params):
        tokens = raw.argmax(dim=-1)
        return Drawn(tokens.tolist(), pick(raw, tokens), [0.0] * len(params))
    rows = [_shape(raw[i], row) for i, row in enumerate(params)]
    shaped = torch.stack(rows)
    tokens = _inverse_cdf(shaped.exp(), uniforms)
    return Drawn(tokens.tolist(), pick(raw, tokens), pick(shaped, tokens))


def _plain(params: SamplingParams) -> bool:
    return params.temperature == 1.0 and params.top_p == 1.0 and params.top_k == 0


def _shape(logprobs: Tensor, params: SamplingParams) -> Tensor:
    """Log-probabilities after temperature, then top-k, then top-p."""
    if _plain(params):
        return logprobs  # normalising again would change the last digits
    if params.greedy:
        return _keep(logprobs, logprobs.argmax().unsqueeze(0))
    shaped = torch.log_softmax(logprobs / params.temperature, dim=-1)
    if 0 < params.top_k < shaped.numel():
        shaped = _keep(shaped, shaped.topk(params.top_k).indices)
    if params.top_p < 1.0:
        ordered = shaped.sort(descending=True, stable=True)
        mass_before = ordered.values.exp().cumsum(0) - ordered.values.exp()
        shaped = _keep(shaped, ordered.indices[mass_before < params.top_p])
    return shaped


def _keep(logprobs: Tensor, indices: Tensor) -> Tensor:
    """The distribution restricted to ``indices`` and renormalised."""
    kept = torch.full_like(logprobs, -math.inf)
    kept[indices] = logprobs[indices]
    return torch.log_softmax(kept, dim=-1)


def _inverse_cdf(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """The first token whose cumulative probability exceeds the row's number."""
    cumulative = probabilities.cumsum(dim=-1)
    # The total is 1 up to rounding; scaling the draw keeps it inside the support.
    threshold = uniforms.unsqueeze(-1) * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)
    return tokens.clamp_(max=probabilities.shape[-1] - 1)


def pick(logprobs: Tensor, tokens: Tensor) -> list[float]:
    """The log-probability of each row's token; ``logprobs`` is [rows, vocabulary]."""
    picked: list[float] = logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).tolist()
    return picked
