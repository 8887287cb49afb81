"""LoRA adapters as plain data: settings, weights under PEFT names, merging.

An adapter that leaves the trainer (a snapshot for sampling, a checkpoint on disk, a
promoted model) is an :class:`AdapterWeights`: frozen, and never the tensors that
training goes on changing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

PEFT_PREFIX = "base_model.model."
_ATTENTION = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"})
_MLP = frozenset({"gate_proj", "up_proj", "down_proj", "gate_up_proj"})
_UNEMBED = "lm_head"


class AdapterError(ValueError):
    """LoRA settings or adapter weights that do not fit the base model."""


@dataclass(frozen=True)
class LoraSettings:
    """What ``create_model`` asks for; the update is ``alpha / rank * B @ A``."""

    rank: int
    alpha: int = 32
    seed: int | None = None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True

    @property
    def scale(self) -> float:
        """The factor in front of ``B @ A``."""
        return self.alpha / self.rank

    @classmethod
    def from_wire(cls, raw: Mapping[str, Any]) -> LoraSettings:
        """Settings from a request's ``lora_config``; surplus keys are refused."""
        known = {"rank", "alpha", "seed", "train_attn", "train_mlp", "train_unembed"}
        # "kaiming" is what PEFT does anyway.
        extra = {"init_method"} if raw.get("init_method") == "kaiming" else set()
        surplus = sorted(
            k for k in raw if k not in known | extra and raw[k] is not None
        )
        if surplus:
            raise AdapterError(f"lora_config keys {surplus} are not supported")
        rank = raw.get("rank")
        if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= 256:
            raise AdapterError(
                f"lora_config.rank must be an integer from 1 to 256, got {rank!r} "
                "(full-parameter training, rank 0, is not supported)"
            )
        values = {key: raw[key] for key in known if raw.get(key) is not None}
        for key, value in values.items():
            wanted = bool if key.startswith("train_") else int
            if type(value) is not wanted or abs(value) >= 2**63:
                raise AdapterError(
                    f"lora_config.{key} must be of type {wanted.__name__}, got "
                    f"{value!r}"
                )
        settings = cls(**values)
        if not (settings.train_attn or settings.train_mlp or settings.train_unembed):
            raise AdapterError(
                "lora_config trains nothing: set one of train_attn, train_mlp or "
                "train_unembed"
            )
        return settings

    def target_modules(self, linear_layers: Iterable[str]) -> list[str]:
        """Those of a model's linear layers that get an adapter, by full name."""
        wanted: set[str] = set()
        if self.train_attn:
            wanted |= _ATTENTION
        if self.train_mlp:
            wanted |= _MLP
        if self.train_unembed:
            wanted.add(_UNEMBED)
        names = [name for name in linear_layers if name.rsplit(".", 1)[-1] in wanted]
        if not names:
            raise AdapterError(f"the base model has no linear layer called {wanted}")
        return names


@dataclass(frozen=True)
class AdapterWeights:
    """A and B of every adapted layer, by their PEFT names."""

    settings: LoraSettings
    tensors: Mapping[str, Tensor]

    def modules(self) -> list[str]:
        """Names of the adapted layers in the base model."""
        suffix = ".lora_A.weight"
        return [
            name.removeprefix(PEFT_PREFIX).removesuffix(suffix)
            for name in self.tensors
            if name.endswith(suffix)
        ]

    def delta(self, module: str) -> Tensor:
        """The change of that layer's weight, ``scale * B @ A``, [out, in]."""
        a = self.tensors[f"{PEFT_PREFIX}{module}.lora_A.weight"]
        b = self.tensors[f"{PEFT_PREFIX}{module}.lora_B.weight"]
        return self.settings.scale * (b @ a)


def linear_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """The untouched weight of every linear layer, by name (no copies)."""
    return {
        name: module.weight
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }


@torch.no_grad()
def merge_into(
    model: PreTrainedModel,
    base_weights: Mapping[str, Tensor],
    adapter: AdapterWeights | None,
) -> None:
    """Set ``model`` to the base weights plus ``adapter`` (or to the bare base).

    Always starts from the base weights, so merging one adapter after another leaves
    no trace of the first.
    """
    adapted = set(adapter.modules()) if adapter is not None else set()
    for name, weight in base_weights.items():
        target = model.get_submodule(name).weight
        if not isinstance(target, Tensor):
            raise AdapterError(f"layer {name} has no weight to merge into")
        target.copy_(weight)
        if adapter is not None and name in adapted:
            target.add_(adapter.delta(name).to(target.device))
