"""Checkpoint names and kinds.

The service keeps two kinds of checkpoint. A *sampler* checkpoint holds the adapter
weights, serves sampling and promotion, and ends with its session. A *training*
checkpoint also holds the optimizer's state and is what a run resumes from. Our names
tell them apart: ``policy-…`` and ``final`` are sampler checkpoints, ``state-…`` and
``final-state`` are training checkpoints. Everything here is pure: a wrong name is
explained before anything is sent.

Example:
    >>> checkpoint_name("state", step=5)
    'state-0005'
    >>> parse_checkpoint("course/run-0123456789abcdef0123456789abcdef/final-state").kind
    'training'
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

CheckpointKind = Literal["sampler", "training", "unknown"]

MAX_NAME_LENGTH = 63
# The SDK appends "-" and 8 hex digits to a sampler checkpoint's name.
SAMPLER_SUFFIX_LENGTH = 9

_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
_RUN_ID = re.compile(r"run-[0-9a-f]{32}")
_TRAINING = re.compile(r"(state|final-state)(-.*)?")
_SAMPLER = re.compile(r"(policy|base|final)(-.*)?")
# The control plane names a checkpoint in one segment: its run, then its own name.
_ROW_ID = re.compile(r"(run-[0-9a-f]{32})-(.+)")


class CheckpointError(ValueError):
    """A checkpoint name that cannot exist, or a checkpoint of the wrong kind."""


@dataclass(frozen=True)
class CheckpointRef:
    """A parsed checkpoint reference.

    Attributes:
        path: The reference as it was given, trimmed.
        account, run_id: Owner and run, or None for a bare name.
        name: The checkpoint's own name.
        kind: ``"sampler"``, ``"training"``, or ``"unknown"`` for a name that
            follows neither of our patterns.
    """

    path: str
    account: str | None
    run_id: str | None
    name: str
    kind: CheckpointKind


def check_label(label: str, *, limit: int = MAX_NAME_LENGTH) -> str:
    """Return ``label`` if the service accepts it as a checkpoint name.

    Raises:
        CheckpointError: It is not a lower-case DNS label of at most ``limit``
            characters; the message names the first thing that is wrong.

    Example:
        >>> check_label("state-0005")
        'state-0005'
    """
    if not label:
        raise CheckpointError("a checkpoint name cannot be empty")
    if len(label) > limit:
        raise CheckpointError(
            f"checkpoint name {label!r} has {len(label)} characters; at most {limit} "
            "are allowed, so shorten it"
        )
    if not _LABEL.fullmatch(label):
        bad = sorted(set(re.sub(r"[a-z0-9-]", "", label)))
        found = f"it contains {', '.join(map(repr, bad))}" if bad else "it does not"
        raise CheckpointError(
            f"checkpoint name {label!r} is not allowed: use lower-case letters, "
            f"digits and hyphens, starting and ending with a letter or digit ({found})"
        )
    return label


def checkpoint_name(
    kind: Literal["policy", "state", "final", "final-state"] | str,
    *,
    step: int | None = None,
    tag: str | None = None,
) -> str:
    """Build a checkpoint name that the service accepts.

    Args:
        kind: First part: ``policy``/``final`` for sampler checkpoints,
            ``state``/``final-state`` for training checkpoints.
        step: Optimizer step, appended with four digits so that names sort.
        tag: Free text, lower-cased and reduced to letters, digits and hyphens.

    Returns:
        A DNS label short enough for the SDK's own suffix.

    Raises:
        CheckpointError: The parts make no valid name.

    Example:
        >>> checkpoint_name("policy", step=12, tag="Lr 4e-4")
        'policy-0012-lr-4e-4'
    """
    parts = [kind]
    if step is not None:
        if step < 0:
            raise CheckpointError(f"a checkpoint's step cannot be negative, got {step}")
        parts.append(f"{step:04d}")
    if tag is not None:
        parts.append(re.sub(r"[^a-z0-9]+", "-", tag.lower()).strip("-"))
    name = "-".join(part for part in parts if part)
    return check_label(name, limit=MAX_NAME_LENGTH - SAMPLER_SUFFIX_LENGTH)


def checkpoint_kind(name: str) -> CheckpointKind:
    """Tell a sampler from a training checkpoint by the pattern of its name.

    Example:
        >>> checkpoint_kind("policy-0005-1a2b3c4d"), checkpoint_kind("state-0005")
        ('sampler', 'training')
    """
    if _TRAINING.fullmatch(name):
        return "training"
    if _SAMPLER.fullmatch(name):
        return "sampler"
    return "unknown"


def parse_checkpoint(path: str) -> CheckpointRef:
    """Parse ``<account>/run-<32 hex>/<name>`` or a bare name.

    Raises:
        CheckpointError: The reference cannot name a checkpoint; nothing was sent.

    Example:
        >>> parse_checkpoint("state-0005").name
        'state-0005'
    """
    reference = path.strip()
    parts = reference.split("/")
    if len(parts) == 1:
        name = check_label(parts[0])
        return CheckpointRef(reference, None, None, name, checkpoint_kind(name))
    if len(parts) != 3 or not all(parts):
        raise CheckpointError(
            f"{reference!r} is not a checkpoint path: expected "
            "<account>/run-<32 hex digits>/<name>, as the service returned it when "
            "the checkpoint was saved, or a bare name"
        )
    account, run_id, name = parts
    check_label(account)
    if not _RUN_ID.fullmatch(run_id):
        raise CheckpointError(
            f"{reference!r} is not a checkpoint path: its middle part must be a run "
            f"id, 'run-' and 32 hex digits, got {run_id!r}"
        )
    check_label(name)
    return CheckpointRef(reference, account, run_id, name, checkpoint_kind(name))


def require_training_checkpoint(path: str) -> CheckpointRef:
    """Parse a checkpoint to resume from.

    Raises:
        CheckpointError: It cannot exist, or is a sampler checkpoint.

    Example:
        >>> require_training_checkpoint("state-0005").kind
        'training'
    """
    reference = parse_checkpoint(path)
    if reference.kind == "sampler":
        raise CheckpointError(
            f"{reference.path!r} is a sampler checkpoint (adapter weights only); to "
            "resume, give a training checkpoint: state-<step> or final-state, saved "
            "by save_state and named in the run's resume.json"
        )
    return reference


def require_sampler_checkpoint(path: str) -> CheckpointRef:
    """Parse a checkpoint to sample from.

    Raises:
        CheckpointError: It cannot exist, or is a training checkpoint.
    """
    reference = parse_checkpoint(path)
    if reference.kind == "training":
        raise CheckpointError(
            f"{reference.path!r} is a training checkpoint (weights and optimizer); to "
            "sample from it or promote it, resume it first and save a new sampler: "
            "session.resume(path), then session.new_sampler(name)"
        )
    return reference


@dataclass(frozen=True)
class ListedCheckpoint:
    """One row of a session's checkpoint list.

    Attributes:
        resource: The control plane's name of it, which promotion takes.
        run_id: The run it belongs to, or None if the name does not tell.
        name: The checkpoint's own name.
        kind: What the service says it is.
        promotable: Whether it can become a model.
        size: Bytes over all its files, or None where the service does not tell.
    """

    resource: str
    run_id: str | None
    name: str
    kind: CheckpointKind
    promotable: bool
    size: int | None = None

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Self:
        """Read a row as the service sends it.

        Example:
            >>> run = "run-0123456789abcdef0123456789abcdef"
            >>> row = {
            ...     "name": f"accounts/a/trainingSessions/ts-1/checkpoints/{run}-final",
            ...     "checkpointType": "CHECKPOINT_TYPE_INFERENCE_LORA",
            ...     "promotable": True,
            ... }
            >>> listed = ListedCheckpoint.from_row(row)
            >>> listed.name, listed.kind, listed.promotable
            ('final', 'sampler', True)
        """
        resource = str(row.get("name", ""))
        last = resource.rsplit("/", 1)[-1]
        match = _ROW_ID.fullmatch(last)
        run_id, name = match.groups() if match else (None, last)
        kind_of = str(row.get("checkpointType", ""))
        size = row.get("sizeBytes")
        kind: CheckpointKind = "unknown"
        if "INFERENCE" in kind_of:
            kind = "sampler"
        elif kind_of.endswith(("TRAINING", "TRAINING_LORA")):
            kind = "training"
        return cls(
            resource=resource,
            run_id=run_id,
            name=name,
            kind=kind,
            promotable=bool(row.get("promotable", False)),
            size=None if size is None else int(size),
        )


@dataclass(frozen=True)
class PromotedModel:
    """A model made from a sampler checkpoint.

    Attributes:
        name: Its name at the service, ``accounts/<account>/models/<id>``.
        folder: Where the PEFT adapter lies, or None if it is not on this machine.
    """

    name: str
    folder: Path | None

    @classmethod
    def from_row(cls, row: Mapping[str, Any], output: str) -> Self:
        """Read the service's answer; ``output`` names the model if it does not.

        Example:
            >>> PromotedModel.from_row({"state": "READY"}, "accounts/a/models/m").name
            'accounts/a/models/m'
        """
        folder = row.get("localFolder")
        return cls(
            name=str(row.get("name") or output),
            folder=None if folder is None else Path(folder),
        )

    @property
    def files(self) -> dict[str, int]:
        """File names and sizes in bytes; empty if the folder is not on this machine."""
        return {} if self.folder is None else folder_files(self.folder)


def folder_files(folder: Path) -> dict[str, int]:
    """Names and sizes in bytes of the files of a checkpoint's folder, by name."""
    paths = sorted(path for path in folder.iterdir() if path.is_file())
    return {path.name: path.stat().st_size for path in paths}
