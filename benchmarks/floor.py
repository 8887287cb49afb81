"""The arithmetic of a training step, and how fast this machine does such arithmetic.

Counts the floating-point operations of the matrix products that a step cannot do
without, and measures how many a second the machine reaches in the same products at the
same number of rows, one after another and with nothing between them. Their quotient is
the floor: what the step would take if everything around the products were free.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

MEASURE_SECONDS = 0.5


@dataclass(frozen=True)
class Shape:
    """What the count needs to know of a model."""

    linears: tuple[tuple[int, int], ...]  # (in, out) of every linear layer
    layers: int
    width: int  # of all attention heads together
    rank: int

    @classmethod
    def of(cls, model: nn.Module, rank: int) -> Shape:
        """Read off a Hugging Face causal language model."""
        config = model.config
        head = getattr(config, "head_dim", None)
        head = head or config.hidden_size // config.num_attention_heads
        return cls(
            tuple(
                (module.in_features, module.out_features)
                for module in model.modules()
                if isinstance(module, nn.Linear)
            ),
            config.num_hidden_layers,
            config.num_attention_heads * head,
            rank,
        )

    @property
    def weights(self) -> int:
        """Numbers in all linear layers."""
        return sum(a * b for a, b in self.linears)

    @property
    def adapter(self) -> int:
        """Numbers in a LoRA adapter on all of them."""
        return sum(self.rank * (a + b) for a, b in self.linears)

    def read(self, start: int, stop: int) -> float:
        """Operations to read positions ``start`` to ``stop`` of one sequence.

        A product with a weight takes two operations for every number of it. Attention
        takes two products of the heads' width with every position seen so far.
        """
        count = stop - start
        seen = (start + 1 + stop) * count / 2  # start + 1, …, stop
        return 2.0 * self.weights * count + 4.0 * self.layers * self.width * seen

    def train(self, start: int, stop: int) -> float:
        """Operations of forward and backward over positions ``start`` to ``stop``.

        The frozen weights need the gradient of their input but not their own, so their
        backward pass costs as much as their forward pass. Attention's costs twice as
        much. The adapter is read once and differentiated twice.
        """
        products = 2.0 * self.weights * (stop - start)
        attention = self.read(start, stop) - products
        adapter = 2.0 * self.adapter * (stop - start)
        return 2.0 * products + 3.0 * attention + 3.0 * adapter


@dataclass(frozen=True)
class StepWork:
    """Operations of one step: reading prompts, sampling, training."""

    prompts: float
    sampling: float
    training: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.prompts + self.sampling + self.training


def count_step(
    shape: Shape,
    sampled: Sequence[tuple[int, int]],
    trained: Sequence[tuple[int, int]],
    group: int,
) -> StepWork:
    """The operations of a step.

    Args:
        shape: The model's.
        sampled: (prompt, reply) lengths of every rollout, group after group.
        trained: The same of every datum; whole groups.
        group: Rollouts that share a prompt; it needs to be read, and differentiated,
            only once for all of them.
    """
    # The last token of a reply is never read.
    return StepWork(
        prompts=sum(shape.read(0, p) for p, _ in sampled[::group]),
        sampling=sum(shape.read(p, p + r - 1) for p, r in sampled),
        training=sum(shape.train(0, p) for p, _ in trained[::group])
        + sum(shape.train(p, p + r - 1) for p, r in trained),
    )


@torch.inference_mode()
def product_speed(shape: Shape, rows: int) -> float:
    """Operations per CPU second in the model's products with ``rows`` rows, one thread.

    CPU time, because the thread that computes is this one, and other processes then
    count less.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    inputs = {a: torch.randn(rows, a) for a, _ in shape.linears}
    weights = [torch.randn(b, a) for a, b in shape.linears]
    outputs = [torch.empty(rows, b) for _, b in shape.linears]
    passes, seconds = 0, 0.0
    started = time.thread_time()
    while seconds < MEASURE_SECONDS:
        for weight, output in zip(weights, outputs, strict=True):
            torch.mm(inputs[weight.shape[1]], weight.t(), out=output)
        passes += 1
        seconds = time.thread_time() - started
    torch.set_num_threads(before)
    return 2.0 * shape.weights * rows * passes / seconds
