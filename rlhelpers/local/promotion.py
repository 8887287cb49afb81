"""Promotion: a sampler checkpoint becomes a model of its own, as a PEFT adapter folder.

The folder is ``<state>/promoted/<model id>/``, holds ``adapter_config.json`` and
``adapter_model.safetensors``, outlives every session, and loads anywhere with
``PeftModel.from_pretrained(base, folder)``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch

from .adapters import AdapterWeights
from .store import (
    ACCOUNT,
    CheckpointError,
    CheckpointRef,
    CheckpointStore,
    read_adapter,
    whole_folder,
    write_adapter,
)

# The SDK's own rule for the id of a model.
_MODEL = re.compile(rf"accounts/{ACCOUNT}/models/([a-z0-9-]{{1,63}})")
_ROW = re.compile(r"(run-[0-9a-f]{32})-(.*)", re.DOTALL)


@dataclass(frozen=True)
class PromotedModel:
    """A promoted adapter and the folder it is in."""

    name: str
    base_model: str
    rank: int
    target_modules: list[str]
    folder: Path


def row_id(ref: CheckpointRef) -> str:
    """How the control plane names a checkpoint within its session: one segment."""
    return f"{ref.run_id}-{ref.name}"


def parse_row_id(text: str) -> CheckpointRef:
    """The checkpoint behind a control-plane name."""
    match = _ROW.fullmatch(text)
    if match is None:
        raise CheckpointError(
            f"{text!r} names no checkpoint: pass a name from the session's checkpoint "
            "list, which ends in 'run-<32 hex digits>-<name>'"
        )
    return CheckpointRef.parse("/".join([ACCOUNT, *match.groups()]))


def promote(
    store: CheckpointStore,
    session_id: str,
    ref: CheckpointRef,
    output_model: object,
    base_model: object,
) -> PromotedModel:
    """Write the sampler checkpoint ``ref`` of a session as a promoted model.

    ``output_model`` reads ``accounts/<account>/models/<id>``. Promoting the same
    weights to the same id again changes nothing and succeeds, because a client may
    have to repeat its request. Raises :class:`CheckpointError` for a training or
    unknown checkpoint, for another base model, and for an id that is taken.
    """
    match = _MODEL.fullmatch(output_model) if isinstance(output_model, str) else None
    if match is None:
        raise CheckpointError(
            f"output_model {output_model!r} is refused: it should read "
            f"'accounts/{ACCOUNT}/models/<id>', the id 1 to 63 of a-z, 0-9 and '-'"
        )
    checkpoint = store.load("sampler", ref, session_id)
    if base_model != checkpoint.base_model:
        raise CheckpointError(
            f"base_model {base_model!r} does not match: checkpoint {ref.path} was "
            f"trained on {checkpoint.base_model!r}"
        )
    # A layer is adapted by the last part of its name, wherever it stands in the model.
    modules = sorted({name.rsplit(".", 1)[-1] for name in checkpoint.weights.modules()})
    folder = store.state_dir / "promoted" / match[1]
    public_base = _public_name(checkpoint.base_model)
    if not folder.exists():
        with whole_folder(folder) as draft:
            write_adapter(draft, public_base, modules, checkpoint.weights)
    elif not _holds(folder, public_base, checkpoint.weights):
        raise CheckpointError(
            f"model {match[1]!r} exists already with other weights and is not "
            "overwritten; choose another output_model id"
        )
    rank = checkpoint.weights.settings.rank
    return PromotedModel(match[0], public_base, rank, modules, folder)


def find_promoted(store: CheckpointStore, path: object) -> Path | None:
    """The folder of a promoted model, ``path`` as in :func:`promote`; None if none."""
    match = _MODEL.fullmatch(path) if isinstance(path, str) else None
    folder = store.state_dir / "promoted" / match[1] if match else None
    return folder if folder is not None and folder.is_dir() else None


def load_promoted(
    store: CheckpointStore, path: object, base_model: str
) -> AdapterWeights:
    """The weights of a promoted model, ``path`` as in :func:`promote`.

    Raises :class:`CheckpointError` if there is none, or if it is not ``base_model``'s.
    """
    folder = find_promoted(store, path)
    if folder is None:
        raise CheckpointError(
            f"there is no promoted model {path!r} here: pass "
            f"'accounts/{ACCOUNT}/models/<id>' with the id it was promoted under"
        )
    found_base, weights = read_adapter(folder)
    if found_base != _public_name(base_model):
        raise CheckpointError(
            f"promoted model {path!r} belongs to base model {found_base!r}, this model "
            f"to {base_model!r}: another base model means a new run"
        )
    return weights


def _public_name(base_model: str) -> str:
    """The base model's name; of a folder's path, its last part.

    The adapter may travel; a path of this machine would mislead, and tell too much.
    """
    is_path = Path(base_model).is_absolute() or base_model.startswith((".", "~"))
    return Path(base_model).name if is_path else base_model


def _holds(folder: Path, base_model: str, weights: AdapterWeights) -> bool:
    """Whether that adapter is in ``folder`` already."""
    found_base, found = read_adapter(folder)
    settings = (found.settings.rank, found.settings.alpha)
    return (
        found_base == base_model
        and settings == (weights.settings.rank, weights.settings.alpha)
        and found.tensors.keys() == weights.tensors.keys()
        and all(torch.equal(t, weights.tensors[n]) for n, t in found.tensors.items())
    )
