"""The stacked Muon against torch's own, matrix by matrix."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rlhelpers.local.muon import StackedMuon, orthogonalize

SHAPES = ((6, 6), (9, 6), (6, 6), (6, 9), (9, 6))


def matrices() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def test_it_steps_as_torch_does() -> None:
    stacked, reference = matrices(), matrices()
    ours = StackedMuon(stacked, lr=0.03, weight_decay=0.01)
    theirs = torch.optim.Muon(reference, lr=0.03, weight_decay=0.01)
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        for one, other in zip(stacked, reference, strict=True):
            one.grad = torch.randn(one.shape, generator=generator)
            other.grad = one.grad.clone()
        ours.step()
        theirs.step()
    for one, other, start in zip(stacked, reference, matrices(), strict=True):
        moved = float((one - start).detach().abs().max())
        assert moved > 0.01
        # Both round to bfloat16 on the way, which keeps 8 bits.
        torch.testing.assert_close(one, other, rtol=0.0, atol=0.02 * moved)


@pytest.mark.parametrize("shape", [(8, 8), (12, 5), (5, 12)])
def test_singular_values_end_near_one(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(2)
    spread = torch.randn(3, *shape, generator=generator) * torch.tensor(
        [1e-3, 1.0, 50.0]
    ).view(3, 1, 1)
    result = orthogonalize(spread).float()
    values = torch.linalg.svdvals(result)
    assert float(values.min()) > 0.3  # tiny ones are still on their way up
    assert float(values.max()) < 1.3
    # The direction stays: U V^T of the input, up to the singular values.
    u, _, vt = torch.linalg.svd(spread, full_matrices=False)
    inside = torch.diagonal(u.mT @ result @ vt.mT, dim1=1, dim2=2)
    assert float(inside.min()) > 0.3
