"""One token for many rows, or one prompt, through a Llama model in few operations.

The model's own forward pass is written for any length, any attention and any cache; for
one token a row most of its time goes into Python between small operations, and into
copies of the cache. These passes do the same arithmetic on the same weights, call about
a fifth as many operations, and copy nothing that they only read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_utils import PreTrainedModel
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaRMSNorm,
)

from .slots import Prefix, SlotCache, SlotLayer

ROPE_STEP = 512  # positions by which the table of rotations grows


@dataclass(frozen=True)
class _Norm:
    """Division by the root of the mean square, then a weight a feature."""

    weight: Tensor  # [width], times the root of the width
    epsilon: float  # times the width, because squares are summed and not averaged

    @classmethod
    def of(cls, module: LlamaRMSNorm) -> _Norm:
        width = module.weight.shape[0]
        weight = module.weight.detach() * math.sqrt(width)
        return cls(weight, module.variance_epsilon * width)

    def __call__(self, hidden: Tensor) -> Tensor:
        squares = (hidden * hidden).sum(-1, keepdim=True)
        return self.weight * (hidden * torch.rsqrt(squares + self.epsilon))


@dataclass(frozen=True)
class _Layer:
    """One layer's weights, products that share an input joined into one."""

    before_attention: _Norm
    before_mlp: _Norm
    query_key_value: Tensor  # [(heads + 2 key heads) * head dimension, width]
    attention_out: Tensor
    gate_up: Tensor  # [2 * inner width, width]
    down: Tensor

    @classmethod
    def of(cls, module: LlamaDecoderLayer) -> _Layer:
        attention, mlp = module.self_attn, module.mlp
        return cls(
            before_attention=_Norm.of(module.input_layernorm),
            before_mlp=_Norm.of(module.post_attention_layernorm),
            query_key_value=_join(attention.q_proj, attention.k_proj, attention.v_proj),
            attention_out=attention.o_proj.weight,
            gate_up=_join(mlp.gate_proj, mlp.up_proj),
            down=mlp.down_proj.weight,
        )


def _join(*layers: nn.Linear) -> Tensor:
    """The weights one above the other; the layers' own become parts of it.

    So a weight that is written to later, in place, is written here too.
    """
    joined = torch.cat([layer.weight.detach() for layer in layers])
    start = 0
    for layer in layers:
        layer.weight.data = joined[start : start + layer.out_features]
        start += layer.out_features
    return joined


class LlamaPass:
    """The passes that sampling needs of ``model``, sharing its weights.

    Raises:
        ValueError: The model is no plain Llama; its own forward pass must be used.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        if (reason := _unlike(model)) is not None:
            raise ValueError(reason)
        assert isinstance(model, LlamaForCausalLM)
        attention = model.model.layers[0].self_attn
        self._model = model
        self._width: int = attention.head_dim
        self._heads = attention.q_proj.out_features // self._width
        self._key_heads = attention.k_proj.out_features // self._width
        self._layers = [_Layer.of(layer) for layer in model.model.layers]
        self._norm = _Norm.of(model.model.norm)
        self._cosine = self._sine = torch.empty(0)

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor,
        cache: SlotCache,
    ) -> Tensor:
        """Feed one token a row.

        Args:
            tokens: [rows], their ids.
            positions: [rows, 1], where they stand in their sequences.
            mask: [rows, 1, 1, length], 0 where a row may attend, else minus infinity.
            cache: what the rows saw before; gets their new keys and values.

        Returns:
            Logits, [rows, vocabulary].
        """
        hidden = self._embed(tokens)
        cosine, sine = self._rotations(mask.shape[-1])
        cosine, sine = cosine[positions], sine[positions]  # [rows, 1, head dimension]
        for layer, seen in zip(self._layers, cache.slots, strict=True):
            turned, values = self._project(layer, hidden, cosine, sine)
            found = self._attend(turned, values, mask, seen)
            hidden = _leave(layer, hidden, found)
        return self._logits(hidden)

    def read(self, prompt: tuple[int, ...]) -> Prefix:
        """Run a prompt through the model, alone."""
        hidden = self._embed(torch.tensor(prompt, device=self._model.device))
        cosine, sine = self._rotations(len(prompt))
        # [prompt, 1, head dimension]
        cosine, sine = (part[: len(prompt), None] for part in (cosine, sine))
        keys, values = [], []
        for layer in self._layers:
            turned, value = self._project(layer, hidden, cosine, sine)
            # All three are [1, heads, prompt, head dimension] from here on.
            query = turned[:, : self._heads].transpose(0, 1).unsqueeze(0)
            keys.append(_kept(turned[:, self._heads :]))
            values.append(_kept(value))
            found = functional.scaled_dot_product_attention(
                query,
                keys[-1],
                values[-1],
                is_causal=True,
                enable_gqa=self._heads != self._key_heads,
            )
            found = found[0].transpose(0, 1).reshape(len(prompt), -1)
            if layer is self._layers[-1]:  # from here on the last token alone counts
                hidden, found = hidden[-1:], found[-1:]
            hidden = _leave(layer, hidden, found)
        return Prefix(keys, values, next_logits=self._logits(hidden)[0])

    def _embed(self, tokens: Tensor) -> Tensor:
        return functional.embedding(tokens, self._model.model.embed_tokens.weight)

    def _logits(self, hidden: Tensor) -> Tensor:
        return functional.linear(self._norm(hidden), self._model.lm_head.weight)

    def _project(
        self, layer: _Layer, hidden: Tensor, cosine: Tensor, sine: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys, turned by their positions, one after the other; values.

        [tokens, heads + key heads, head dimension] and [tokens, key heads, head
        dimension].
        """
        heads, key_heads = self._heads, self._key_heads
        joined = functional.linear(
            layer.before_attention(hidden), layer.query_key_value
        )
        parts = joined.view(len(hidden), heads + 2 * key_heads, self._width)
        turned = parts[:, : heads + key_heads]
        # Each feature of the first half is a pair with one of the second.
        first, second = turned.chunk(2, dim=-1)
        turned = turned * cosine + torch.cat([second, first], dim=-1) * sine
        return turned, parts[:, heads + key_heads :]

    def _attend(
        self, turned: Tensor, values: Tensor, mask: Tensor, seen: SlotLayer
    ) -> Tensor:
        """What every row's query finds, [rows, heads * head dimension]."""
        rows, heads = len(turned), self._heads
        keys, values = seen.update(turned[:, heads:].unsqueeze(2), values.unsqueeze(2))
        # Heads that share keys are asked together, as if they were several positions.
        queries = turned[:, :heads].reshape(rows, self._key_heads, -1, self._width)
        found = functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask
        )
        return found.reshape(rows, -1)

    def _rotations(self, length: int) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines of the first positions, [positions, width]."""
        if len(self._cosine) < length:
            count = -(-length // ROPE_STEP) * ROPE_STEP
            rotary, weight = self._model.model.rotary_emb, self._model.lm_head.weight
            steps = torch.arange(count, device=weight.device).unsqueeze(0)
            cosine, sine = rotary(weight, steps)
            self._cosine, self._sine = cosine[0], sine[0].clone()
            self._sine[:, : self._width // 2].neg_()
        return self._cosine, self._sine


def _leave(layer: _Layer, hidden: Tensor, found: Tensor) -> Tensor:
    """What leaves ``layer``, given what its attention found."""
    hidden = hidden + functional.linear(found, layer.attention_out)
    both = functional.linear(layer.before_mlp(hidden), layer.gate_up)
    gate, up = both.chunk(2, dim=-1)
    return hidden + functional.linear(functional.silu(gate) * up, layer.down)


def _kept(states: Tensor) -> Tensor:
    """A copy of [tokens, heads, width] as [1, heads, tokens, width]."""
    turned = states.transpose(0, 1).unsqueeze(0)
    return turned.clone(memory_format=torch.contiguous_format)


def _unlike(model: PreTrainedModel) -> str | None:
    """Why ``model`` is no plain Llama, or None if it is one."""
    if type(model) is not LlamaForCausalLM:
        return f"{type(model).__name__} is not LlamaForCausalLM"
    config = model.config
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}, not silu"
    rope = (config.rope_parameters or {}).get("rope_type", "default")
    if rope != "default":
        return f"its rotary embedding is {rope}, not default"
    linear = [m for m in model.modules() if isinstance(m, nn.Linear)]
    if any(module.bias is not None for module in linear):
        return "its linear layers have biases"
    if any(type(module) is not nn.Linear for module in linear):
        return "its linear layers are not plain ones"
    return None
