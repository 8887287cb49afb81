"""Which forward passes sample from a model, and on how many rows.

Everything here is asked of the model and the machine by a trial when the model is
loaded, and stays the same from then on: float32 results may change in the last digits
with the pass or the shape of a batch, and one changed digit can change a sampled token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from .llama import LlamaPass
from .loading import BaseModel
from .slots import CAPACITY_STEP, Prefix, SlotCache, read_prompt

SMALLEST_PASS = 16  # rows; below this another kernel is sure to be chosen
TRIAL_ROWS = 1024  # at most; a row's tokens are the same in any number of rows
TRIAL_PROMPT = 24  # tokens at most, the same ones for every row
TRIAL_TOKENS = 3  # a row after it, of which the last one's logits are compared
AGREEMENT = 5e-5  # of log-probabilities, between a lean pass and the model's own,
AGREEMENT_SHARE = 1e-5  # and of unlikely tokens' this share: float32 has no more

OneTokenPass = Callable[[Tensor, Tensor, Tensor, SlotCache], Tensor]
"""Feeds one token a row: ids, [rows]; positions, [rows, 1]; the additive mask,
[rows, 1, 1, length]; and the cache that it writes to. Returns logits, [rows,
vocabulary]."""


@dataclass(frozen=True)
class SamplingPasses:
    """How a model is run for sampling.

    Attributes:
        one_token: Feeds one token a row.
        prompt: Runs one prompt, given as token ids.
    """

    one_token: OneTokenPass
    prompt: Callable[[tuple[int, ...]], Prefix]


def own_passes(model: PreTrainedModel) -> SamplingPasses:
    """The model's own forward pass, of any architecture."""
    return SamplingPasses(_model_pass(model), partial(read_prompt, model))


def lean_passes(model: PreTrainedModel) -> SamplingPasses:
    """The same in fewer operations.

    Raises:
        ValueError: The model is no plain Llama.
    """
    lean = LlamaPass(model)
    return SamplingPasses(lean, lean.read)


def _model_pass(model: PreTrainedModel) -> OneTokenPass:
    def run(
        tokens: Tensor, positions: Tensor, mask: Tensor, cache: SlotCache
    ) -> Tensor:
        output = model(
            input_ids=tokens.unsqueeze(1),
            attention_mask=mask,
            position_ids=positions,
            cache=cache,
            use_cache=True,
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    return run


@torch.inference_mode()
def sampling_passes(base: BaseModel) -> SamplingPasses:
    """The lean passes for a Llama with which they agree; else the model's own."""
    own = own_passes(base.sampling)
    try:
        lean = lean_passes(base.sampling)
    except ValueError:
        return own
    expected = _trial(base, own, rows_per_tile(base)).log_softmax(-1)
    found = _trial(base, lean, rows_per_tile(base)).log_softmax(-1)
    agree = torch.allclose(found, expected, rtol=AGREEMENT_SHARE, atol=AGREEMENT)
    return lean if agree else own


def rows_per_tile(base: BaseModel) -> int:
    """Rows decoded together: many for a small model, fewer for a large one.

    A row that nobody occupies still costs its share of the forward pass, which only
    a small model can afford.
    """
    return 64 if base.is_small else 32


@torch.inference_mode()
def interchangeable_sizes(
    base: BaseModel, passes: SamplingPasses, largest: int
) -> list[int]:
    """Numbers of rows whose passes agree bit for bit with those of ``largest``.

    Halves ``largest`` as long as a trial pass gives the same logits to the last
    digit. Which kernels a shape gets depends on the machine, so it is asked, not
    assumed; where no smaller size agrees, every pass runs on ``largest`` rows.
    """
    reference = _trial(base, passes, largest)
    sizes = [largest]
    while sizes[0] % 2 == 0 and sizes[0] > SMALLEST_PASS:
        half = sizes[0] // 2
        if not torch.equal(_trial(base, passes, half), reference[: half + 1]):
            break
        sizes.insert(0, half)
    return sizes


def _trial(base: BaseModel, passes: SamplingPasses, rows: int) -> Tensor:
    """Logits after a prompt, and of each row that continues it by a few tokens.

    [1 + rows, vocabulary]; a row has the same tokens at any ``rows``.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (TRIAL_TOKENS, TRIAL_ROWS)
    tokens = torch.randint(base.vocab_size, shape, generator=generator)
    tokens = tokens.to(base.sampling.device)
    length = max(min(TRIAL_PROMPT, base.context_length - TRIAL_TOKENS), 1)
    prompt = torch.randint(base.vocab_size, (length,), generator=generator)
    prefix = passes.prompt(tuple(prompt.tolist()))
    cache = SlotCache(rows, CAPACITY_STEP, prefix)
    for row in range(rows):
        cache.insert(row, prefix)
    logits = torch.empty(0)
    for step in range(TRIAL_TOKENS):
        positions, mask = cache.open([length + step] * rows)
        logits = passes.one_token(tokens[step, :rows], positions, mask, cache)
    return torch.cat([prefix.next_logits.unsqueeze(0), logits])
