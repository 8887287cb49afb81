"""Gradients and optimizer steps for the LoRA adapters of one base model.

Several adapters share the frozen base weights; each has its own gradients and its own
Adam moments. All methods run on the service's compute thread.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn

from .adapters import (
    AdapterError,
    AdapterWeights,
    LoraSettings,
    linear_weights,
)
from .batches import TrainingDatum
from .loading import BaseModel
from .losses import LOSSES, clipped_tokens, resolve_config
from .packing import (
    PackedInput,
    Row,
    Work,
    apart,
    pack,
    plan_rows,
    rows_agree,
    run_model,
)

MAX_BATCH_TOKENS = 16_384  # padded tokens of one forward pass
MAX_LOGITS = 64_000_000  # and its logits: tokens times vocabulary
MIN_FILL = 0.8  # the shortest sequence of a pass is at least this share of the longest
MIN_BATCH_TOKENS = 2_048  # passes smaller than this are not split for the fill's sake


class TrainingError(ValueError):
    """The operation cannot be carried out as asked; nothing was changed."""


@dataclass(frozen=True)
class AdamSettings:
    """One step's optimizer settings; ``weight_decay`` is decoupled (AdamW)."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(frozen=True)
class TopTokens:
    """The most probable tokens of every position of a datum, best first, flattened."""

    logprobs: list[float]
    tokens: list[int]


@dataclass(frozen=True)
class PassResult:
    """Log-probabilities of each datum's targets, and sums over the batch.

    ``logprobs`` are in the order of the flattened targets; ``top_k`` is empty unless
    it was asked for.
    """

    logprobs: list[list[float]]
    metrics: dict[str, float]
    top_k: list[TopTokens]


@dataclass
class _Adapter:
    """One client's adapter: parameters, optimizer, and what was accumulated."""

    name: str
    settings: LoraSettings
    parameters: dict[str, nn.Parameter]
    optimizer: torch.optim.AdamW
    loss_tokens: int = 0
    sequences: int = 0
    passes: int = 0


@dataclass
class PolicyTrainer:
    """The trainable copy of a base model with the adapters of its clients."""

    base: BaseModel
    base_weights: dict[str, Tensor] = field(init=False)
    _peft: PeftModel | None = field(default=None, init=False)
    _adapters: dict[str, _Adapter] = field(default_factory=dict, init=False)
    _created: int = field(default=0, init=False)
    _packs: bool | None = field(default=None, init=False)
    _work: Work = field(init=False)

    def __post_init__(self) -> None:
        self._work = Work.of(self.base.trainable)
        # Taken before PEFT renames the layers; the tensors stay the same objects.
        self.base_weights = linear_weights(self.base.trainable)

    def create(self, model_id: str, settings: LoraSettings) -> None:
        """Attach a fresh adapter: A random by the settings' seed, B zero."""
        self._created += 1
        name = f"adapter{self._created}"
        config = LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,
            target_modules=settings.target_modules(self.base_weights),
            lora_dropout=0.0,
            task_type="CAUSAL_LM",
        )
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            # PEFT warns that an adapter on a tied output layer must not be merged
            # carelessly; the sampling copy of the model is untied for that reason.
            warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*")
            if settings.seed is None:
                torch.seed()
            else:
                torch.manual_seed(settings.seed)
            self._attach(name, config)
        parameters = dict(self._named_parameters(name))
        for parameter in parameters.values():
            parameter.requires_grad_(True)
        optimizer = torch.optim.AdamW(parameters.values(), weight_decay=0.0)
        self._adapters[model_id] = _Adapter(name, settings, parameters, optimizer)

    @property
    def has_models(self) -> bool:
        """Whether any client's adapter is attached."""
        return bool(self._adapters)

    def unload(self, model_id: str) -> None:
        """Forget an adapter, its gradients and its optimizer; twice is no error."""
        adapter = self._adapters.pop(model_id, None)
        if adapter is not None and self._peft is not None:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Adapter .* was active")
                self._peft.delete_adapter(adapter.name)

    def run(
        self,
        model_id: str,
        data: Sequence[TrainingDatum],
        loss_fn: str,
        config: Mapping[str, float],
        *,
        backward: bool,
        top_k: int = 0,
    ) -> PassResult:
        """Forward pass over ``data``; with ``backward``, gradients are added up.

        ``top_k`` also gives that many most probable tokens of every position. A batch
        whose loss is not finite raises :class:`TrainingError` and leaves the gradients
        that were accumulated before as they were.
        """
        adapter = self._adapters[model_id]
        settings = resolve_config(loss_fn, config)
        self._activate(adapter)
        before = {name: p.grad for name, p in adapter.parameters.items()}
        for parameter in adapter.parameters.values():
            parameter.grad = None
        try:
            result = self._passes(data, loss_fn, settings, backward, top_k)
        except BaseException:
            for name, parameter in adapter.parameters.items():
                parameter.grad = before[name]
            raise
        for name, parameter in adapter.parameters.items():
            _add_gradient(parameter, before[name])
        if backward:
            adapter.passes += 1
            adapter.sequences += len(data)
            adapter.loss_tokens += int(result.metrics["num_loss_tokens:sum"])
        return result

    def run_base(
        self,
        data: Sequence[TrainingDatum],
        loss_fn: str,
        config: Mapping[str, float],
        *,
        top_k: int = 0,
    ) -> PassResult:
        """Forward pass of the bare base model, without any adapter."""
        settings = resolve_config(loss_fn, config)
        if self._peft is None or not self._adapters:
            return self._passes(data, loss_fn, settings, False, top_k)
        # PEFT may still name an adapter that was unloaded; it must name one it has.
        self._activate(next(iter(self._adapters.values())))
        with self._peft.disable_adapter():
            return self._passes(data, loss_fn, settings, False, top_k)

    def optim_step(
        self, model_id: str, adam: AdamSettings, normalization: str
    ) -> dict[str, float]:
        """One AdamW step with the accumulated gradients, which are then cleared."""
        adapter = self._adapters[model_id]
        if adapter.passes == 0:
            raise TrainingError(
                "optim_step has no gradient to apply: call forward_backward first"
            )
        parameters = list(adapter.parameters.values())
        divisor = {
            "none": 1,
            "num_sequences": max(adapter.sequences, 1),
            "num_loss_tokens": max(adapter.loss_tokens, 1),
        }[normalization]
        gradients = [p.grad for p in parameters if p.grad is not None]
        for gradient in gradients:
            gradient.div_(divisor)
        norm = float(torch.linalg.vector_norm(_norms(gradients)))
        if not math.isfinite(norm):
            _clear(adapter)
            raise TrainingError(
                f"the accumulated gradient has norm {norm} and was dropped: check the "
                "advantages, weights and logprobs of the batches behind it"
            )
        clip = adam.grad_clip_norm
        factor = min(1.0, clip / (norm + 1e-12)) if clip > 0 else 1.0
        for gradient in gradients:
            gradient.mul_(factor)
        for group in adapter.optimizer.param_groups:
            group.update(
                lr=adam.learning_rate,
                betas=(adam.beta1, adam.beta2),
                eps=adam.eps,
                weight_decay=adam.weight_decay,
            )
        adapter.optimizer.step()
        _clear(adapter)
        count = sum(gradient.numel() for gradient in gradients)
        return {
            "grad_norm:last": norm,
            "grad_norm_rms:last": norm / count**0.5,
            "grad_norm_post_clip:last": norm * factor,
            "lr:last": adam.learning_rate,
        }

    def weights(self, model_id: str) -> AdapterWeights:
        """A copy of the adapter as it is now."""
        adapter = self._adapters[model_id]
        return AdapterWeights(
            adapter.settings,
            {name: p.detach().clone() for name, p in adapter.parameters.items()},
        )

    def optimizer_state(self, model_id: str) -> dict[str, Tensor]:
        """Adam's moments and step counts as ``<parameter>|<moment>`` tensors."""
        adapter = self._adapters[model_id]
        return {
            f"{name}|{key}": torch.as_tensor(value).detach().clone()
            for name, parameter in adapter.parameters.items()
            for key, value in adapter.optimizer.state.get(parameter, {}).items()
        }

    def load(
        self,
        model_id: str,
        weights: AdapterWeights,
        optimizer_state: Mapping[str, Tensor] | None,
    ) -> None:
        """Replace weights and, where given, Adam's moments; gradients are cleared."""
        adapter = self._adapters[model_id]
        if {name: tuple(t.shape) for name, t in weights.tensors.items()} != {
            name: tuple(p.shape) for name, p in adapter.parameters.items()
        }:
            raise AdapterError(
                f"the saved adapter (rank {weights.settings.rank}) does not fit "
                f"this model's (rank {adapter.settings.rank}); create the model with "
                "the rank and train_* flags of the saved one"
            )
        if weights.settings.alpha != adapter.settings.alpha:
            raise AdapterError(
                f"the saved adapter has lora_alpha {weights.settings.alpha}, this "
                f"model {adapter.settings.alpha}: the same weights would act "
                "differently; create the model with the saved one's lora_alpha"
            )
        with torch.no_grad():
            for name, parameter in adapter.parameters.items():
                parameter.copy_(weights.tensors[name])
        _clear(adapter)
        adapter.optimizer.state.clear()
        for key, value in (optimizer_state or {}).items():
            name, moment = key.rsplit("|", 1)
            parameter = adapter.parameters[name]
            adapter.optimizer.state[parameter][moment] = value.clone()

    def _passes(
        self,
        data: Sequence[TrainingDatum],
        loss_fn: str,
        settings: Mapping[str, float],
        backward: bool,
        top_k: int,
    ) -> PassResult:
        logprobs: list[list[float]] = [[] for _ in data]
        best: dict[int, TopTokens] = {}
        loss_sum, clipped = 0.0, 0
        sequences = [datum.tokens for datum in data]
        rows = self._rows(sequences)
        for chosen in plan_passes([row.length for row in rows], self.base.vocab_size):
            packed = pack([rows[index] for index in chosen], sequences)
            batch = [data[index] for index in packed.members]
            with torch.set_grad_enabled(backward):
                with_adapters = self._peft if self._adapters else None
                logits = run_model(with_adapters or self.base.trainable, packed)
                lp = _target_logprobs(logits, packed, batch)
                inputs = _concatenate(batch, lp.device)
                per_token = LOSSES[loss_fn].token_loss(lp, inputs, settings)
                loss = per_token.sum()
            if not torch.isfinite(loss):
                raise TrainingError(
                    f"the {loss_fn} loss of this batch is {float(loss.detach())}: "
                    "check its advantages, weights and logprobs"
                )
            if backward:
                loss.backward()  # type: ignore[no-untyped-call]
            loss_sum += float(loss.detach())
            if LOSSES[loss_fn].uses_clip:
                clipped += clipped_tokens(lp, inputs, settings)
            parts = torch.split(lp.detach(), [datum.targets.numel() for datum in batch])
            for index, part in zip(packed.members, parts, strict=True):
                logprobs[index] = part.tolist()
            if top_k:
                found = _top(logits, packed, top_k)
                best |= dict(zip(packed.members, found, strict=True))
        metrics = {
            "loss:sum": loss_sum,
            "total_tokens:sum": float(sum(len(datum) for datum in data)),
            "num_loss_tokens:sum": float(sum(datum.loss_tokens() for datum in data)),
        }
        if LOSSES[loss_fn].uses_clip:
            metrics["clipped_tokens:sum"] = float(clipped)
        return PassResult(logprobs, metrics, [best[index] for index in sorted(best)])

    def _rows(self, sequences: Sequence[Sequence[int]]) -> list[Row]:
        """Rows for a batch; shared ones only if this model takes them, tried once."""
        if self._packs is None:
            self._packs = rows_agree(self.base.trainable, self.base.vocab_size)
        return plan_rows(sequences, self._work) if self._packs else apart(sequences)

    def _attach(self, name: str, config: LoraConfig) -> None:
        if self._peft is not None:
            self._peft.add_adapter(name, config)
        else:
            peft = get_peft_model(self.base.trainable, config, adapter_name=name)
            if not isinstance(peft, PeftModel):
                raise AdapterError("peft returned a model of another kind")
            self._peft = peft
        self._peft.eval()

    def _activate(self, adapter: _Adapter) -> None:
        if self._peft is None:
            raise TrainingError("this base model has no adapter yet")
        self._peft.set_adapter(adapter.name)

    def _named_parameters(self, adapter: str) -> Iterator[tuple[str, nn.Parameter]]:
        """The adapter's parameters under the names PEFT gives them on disk."""
        assert self._peft is not None
        for name, parameter in self._peft.named_parameters():
            if f".{adapter}." in name:
                yield name.replace(f".{adapter}.", "."), parameter


def plan_passes(lengths: Sequence[int], vocab_size: int) -> Iterator[list[int]]:
    """Split rows into forward passes of similar lengths, longest first.

    Yields lists of indices into ``lengths``. The plan depends on the lengths alone,
    so the same data always give the same sums, bit for bit.
    """
    limit = max(min(MAX_BATCH_TOKENS, MAX_LOGITS // vocab_size), 1)
    group: list[int] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        padded = longest * (len(group) + 1)
        thin = lengths[index] < MIN_FILL * longest and padded > MIN_BATCH_TOKENS
        if group and (padded > limit or thin):
            yield group
            group = []
        if not group:
            longest = lengths[index]
        group.append(index)
    if group:
        yield group


def _target_logprobs(
    logits: Tensor, packed: PackedInput, batch: Sequence[TrainingDatum]
) -> Tensor:
    """Log-probability of every target of ``batch``, datum after datum, flattened."""
    targets = torch.cat([datum.targets.flatten() for datum in batch]).to(logits.device)
    if packed.mask is None and len(targets) == len(logits):
        return -nn.functional.cross_entropy(logits, targets, reduction="none")
    positions = [
        where.repeat_interleave(datum.targets.numel() // len(datum))
        for where, datum in zip(packed.where, batch, strict=True)
    ]
    rows = torch.cat(positions).to(logits.device)
    return logits[rows, targets] - torch.logsumexp(logits, dim=-1)[rows]


def _top(logits: Tensor, packed: PackedInput, count: int) -> Iterator[TopTokens]:
    """The ``count`` most probable tokens of every position, datum by datum."""
    found = torch.log_softmax(logits, dim=-1).topk(count)
    for where in packed.where:
        rows = where.to(logits.device)
        yield TopTokens(
            found.values[rows].flatten().tolist(),
            found.indices[rows].flatten().tolist(),
        )


def _concatenate(
    batch: Sequence[TrainingDatum], device: torch.device
) -> dict[str, Tensor]:
    names = batch[0].inputs.keys()
    return {
        name: torch.cat([datum.inputs[name].flatten() for datum in batch]).to(device)
        for name in names
    }


def _clear(adapter: _Adapter) -> None:
    """Forget what was accumulated for the next step."""
    adapter.optimizer.zero_grad(set_to_none=True)
    adapter.passes = adapter.sequences = adapter.loss_tokens = 0


def _add_gradient(parameter: nn.Parameter, earlier: Tensor | None) -> None:
    if earlier is not None:
        parameter.grad = (
            earlier if parameter.grad is None else parameter.grad.add_(earlier)
        )


def _norms(gradients: Sequence[Tensor]) -> Tensor:
    if not gradients:
        raise TrainingError("optim_step found no gradient: nothing was trained")
    norms: list[Any] = list(torch._foreach_norm(list(gradients)))
    return torch.stack(norms)
