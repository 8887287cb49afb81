"""Muon for a small model: matrices of one shape are orthogonalized together.

The update is that of ``torch.optim.Muon`` (Jordan et al. 2024), which takes one matrix
at a time; with many small ones most of its time goes into starting operations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

# Of the quintic iteration: steepest at zero, at the price of singular values that end
# between about 0.7 and 1.2 instead of at 1 (Jordan et al. 2024).
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
SMALLEST_NORM = 1e-7


class StackedMuon(torch.optim.Optimizer):
    """Momentum, then the nearest orthogonal matrix, for 2-D parameters.

    Args:
        matrices: The parameters; each needs a gradient at every step.
        lr: Learning rate; a matrix with more rows than columns takes it times the
            square root of their ratio.
        weight_decay: Decoupled.
        momentum: Of Nesterov's kind.
    """

    def __init__(
        self,
        matrices: Iterable[nn.Parameter],
        *,
        lr: float,
        weight_decay: float,
        momentum: float = 0.95,
    ) -> None:
        settings = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        super().__init__(matrices, settings)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every matrix from its ``grad``."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = {}
            for matrix in group["params"]:
                by_shape.setdefault(matrix.shape, []).append(matrix)
            for matrices in by_shape.values():
                self._step_stack(matrices, **_settings(group))

    def _step_stack(
        self,
        matrices: list[nn.Parameter],
        lr: float,
        weight_decay: float,
        momentum: float,
    ) -> None:
        gradients = torch.stack([m.grad for m in matrices if m.grad is not None])
        state = self.state[matrices[0]]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(gradients)
        average: Tensor = state["momentum"]
        average.lerp_(gradients, 1 - momentum)
        updates = orthogonalize(gradients.lerp(average, momentum))
        rows, columns = matrices[0].shape
        scale = lr * math.sqrt(max(1.0, rows / columns))
        for matrix, update in zip(matrices, updates, strict=True):
            matrix.mul_(1 - lr * weight_decay).add_(update, alpha=-scale)


def _settings(group: dict[str, Any]) -> dict[str, float]:
    return {name: float(group[name]) for name in ("lr", "weight_decay", "momentum")}


def orthogonalize(matrices: Tensor) -> Tensor:
    """About the nearest orthogonal matrix to each; [count, rows, columns], bfloat16.

    A Newton-Schulz iteration on matrices whose singular values are at most 1.
    """
    first, second, third = COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.bfloat16()
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=SMALLEST_NORM)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=second, alpha=third)
        x = torch.baddbmm(x, polynomial, x, beta=first)
    return x.mT if tall else x
