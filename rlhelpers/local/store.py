"""Checkpoints on disk: written whole or not at all, checked when read.

Two kinds, in two places. A *sampler* checkpoint holds adapter weights, belongs to its
session and goes when the session ends. A *training* checkpoint also holds Adam's
moments, and stays::

    <state>/sessions/<session>/<account>/<run>/<name>/     sampler
    <state>/checkpoints/<account>/<run>/<name>/            training
    <state>/promoted/<model>/                              promoted: see promotion.py

Each is a folder with ``adapter_model.safetensors`` and ``adapter_config.json`` (the
form PEFT reads), ``optimizer.safetensors`` for training, and ``checkpoint.json``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from .adapters import AdapterWeights, LoraSettings

Kind = Literal["sampler", "training"]

ACCOUNT = "local"
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_RUN = re.compile(r"run-[0-9a-f]{32}")
_SESSION = re.compile(r"ts-[0-9a-f]{32}")
_ADAPTER, _OPTIMIZER = "adapter_model.safetensors", "optimizer.safetensors"
_CONFIG, _MANIFEST = "adapter_config.json", "checkpoint.json"
_OWNER = "owner.json"
MARK_SECONDS = 3600.0  # a live client renews its session's mark this often
DEAD_SECONDS = 30 * 24 * 3600.0  # without, nobody is waited for that long


class CheckpointError(ValueError):
    """A checkpoint that cannot be written, found, or used as asked."""


@dataclass(frozen=True)
class CheckpointRef:
    """``<account>/<run id>/<name>``: how a checkpoint is named on the wire."""

    run_id: str
    name: str

    @property
    def path(self) -> str:
        """The reference as the SDK passes it around."""
        return f"{ACCOUNT}/{self.run_id}/{self.name}"

    @classmethod
    def parse(cls, path: object, *, own_run: str | None = None) -> CheckpointRef:
        """From a full reference, or a bare name within ``own_run``."""
        text = path if isinstance(path, str) else ""
        parts = text.split("/")
        if len(parts) == 1 and own_run is not None:
            parts = [ACCOUNT, own_run, text]
        if len(parts) != 3 or parts[0] != ACCOUNT or not _RUN.fullmatch(parts[1]):
            raise CheckpointError(
                f"{path!r} cannot be a checkpoint here: it should read "
                f"'{ACCOUNT}/run-<32 hex digits>/<name>'"
            )
        return cls(parts[1], check_label(parts[2]))


def check_label(name: object) -> str:
    """``name`` if it is a lower-case DNS label, as Fireworks requires."""
    if not isinstance(name, str) or not _LABEL.fullmatch(name):
        raise CheckpointError(
            f"checkpoint name {name!r} is refused: use 1 to 63 lower-case letters, "
            "digits and inner hyphens, for example 'state-5'"
        )
    return name


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's contents and where they came from."""

    ref: CheckpointRef
    kind: Kind
    base_model: str
    weights: AdapterWeights
    optimizer_state: dict[str, Tensor] | None


@dataclass(frozen=True)
class CheckpointInfo:
    """One line of a listing: what there is, without its tensors.

    ``created`` is in seconds since 1970, ``size`` in bytes over all files.
    """

    ref: CheckpointRef
    kind: Kind
    session_id: str
    base_model: str
    created: float
    size: int


class CheckpointStore:
    """The checkpoints of every session that uses one state folder."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir
        (state_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
        (state_dir / "sessions").mkdir(exist_ok=True)
        self._remove_orphans()

    def open_session(self, session_id: str) -> None:
        """Make room for a session's sampler checkpoints, marked as this process's."""
        folder = self._session_dir(session_id)
        # It appears with its mark, or another service could take it for an orphan.
        draft = folder.with_name(f".draft-{session_id}")
        draft.mkdir()
        (draft / _OWNER).write_text(json.dumps({"pid": os.getpid()}))
        os.rename(draft, folder)

    def mark_session(self, session_id: str) -> None:
        """Renew the session's mark of life on disk, at most once an hour."""
        owner = self._session_dir(session_id) / _OWNER
        with contextlib.suppress(OSError):  # being ended, or removed by hand
            if time.time() - owner.stat().st_mtime > MARK_SECONDS:
                os.utime(owner)

    def close_session(self, session_id: str) -> None:
        """Remove a session with its sampler checkpoints (training ones stay)."""
        _remove_session(self._session_dir(session_id))

    def save(
        self,
        kind: Kind,
        session_id: str,
        ref: CheckpointRef,
        base_model: str,
        weights: AdapterWeights,
        optimizer_state: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Write a checkpoint; it appears under its name complete, or not at all."""
        target = self._folder(kind, session_id, ref)
        if target.exists():
            raise CheckpointError(
                f"checkpoint {ref.path} exists already and is not overwritten; "
                "choose another name"
            )
        with whole_folder(target) as draft:
            write_adapter(draft, base_model, weights.modules(), weights)
            if optimizer_state is not None:
                _save_tensors(optimizer_state, draft / _OPTIMIZER)
            _write_manifest(draft, kind, session_id, ref, base_model, weights.settings)

    def load(
        self, kind: Kind, ref: CheckpointRef, session_id: str | None = None
    ) -> Checkpoint:
        """Read and verify a checkpoint of the wanted kind."""
        folder = self._locate(kind, ref, session_id)
        manifest = _read_manifest(folder)
        for name, digest in manifest["files"].items():
            if _digest(folder / name) != digest:
                raise CheckpointError(
                    f"checkpoint {ref.path} is damaged: {name} is not what was "
                    "written; use an earlier checkpoint"
                )
        settings = LoraSettings(**manifest["lora"])
        optimizer = folder / _OPTIMIZER
        return Checkpoint(
            ref=ref,
            kind=manifest["kind"],
            base_model=manifest["base_model"],
            weights=AdapterWeights(settings, load_file(folder / _ADAPTER)),
            optimizer_state=load_file(optimizer) if optimizer.exists() else None,
        )

    def describe(self, ref: CheckpointRef) -> dict[str, Any]:
        """The manifest of a training checkpoint: base model, LoRA settings."""
        return _read_manifest(self._locate("training", ref, None))

    def listing(
        self, *, session_id: str | None = None, run_id: str | None = None
    ) -> list[CheckpointInfo]:
        """Every complete checkpoint, of one session or one run if asked, oldest first.

        A checkpoint whose description cannot be read is left out.
        """
        found = [
            info
            for folder in self._folders(session_id)
            if run_id in (None, folder.parent.name)
            and (info := _read_info(folder)) is not None
            and session_id in (None, info.session_id)
        ]
        return sorted(found, key=lambda info: (info.created, info.ref.path))

    def names(self, run_id: str) -> list[str]:
        """Names of a run's training checkpoints, oldest first."""
        found = self.listing(run_id=run_id)
        return [info.ref.name for info in found if info.kind == "training"]

    def _folders(self, session_id: str | None) -> Iterator[Path]:
        """Folders that may hold a checkpoint: no drafts, and only proper names."""
        sessions = self.state_dir / "sessions"
        pattern = "ts-*" if session_id is None else self._session_dir(session_id).name
        for path in (
            *sessions.glob(f"{pattern}/{ACCOUNT}/run-*/*"),
            *(self.state_dir / "checkpoints").glob(f"{ACCOUNT}/run-*/*"),
        ):
            if _LABEL.fullmatch(path.name) and _RUN.fullmatch(path.parent.name):
                yield path

    def _locate(self, kind: Kind, ref: CheckpointRef, session_id: str | None) -> Path:
        sampler = self._find_sampler(ref, session_id)
        training = self._folder("training", "", ref)
        if kind == "sampler" and sampler is not None:
            return sampler
        if kind == "training" and (training / _MANIFEST).is_file():
            return training
        if kind == "sampler" and training.is_dir():
            raise CheckpointError(
                f"{ref.path} is a training checkpoint (save_state): load it into a "
                "training client and save a sampler checkpoint to sample from it "
                "or promote it"
            )
        if kind == "training" and sampler is not None:
            raise CheckpointError(
                f"{ref.path} is a sampler checkpoint: it has no optimizer and cannot "
                "be resumed; use a training checkpoint (save_state)"
            )
        known = ", ".join(self.names(ref.run_id)) or "none"
        raise CheckpointError(
            f"there is no {kind} checkpoint {ref.path}; training checkpoints of that "
            f"run: {known}"
            + (
                "; sampler checkpoints go when their session ends"
                if kind == "sampler"
                else ""
            )
        )

    def _find_sampler(self, ref: CheckpointRef, session_id: str | None) -> Path | None:
        sessions = self.state_dir / "sessions"
        candidates = (
            [self._session_dir(session_id)]
            if session_id
            else sorted(sessions.glob("ts-*"))
        )
        for session in candidates:
            folder = session / ACCOUNT / ref.run_id / ref.name
            if (folder / _MANIFEST).is_file():
                return folder
        return None

    def _folder(self, kind: Kind, session_id: str, ref: CheckpointRef) -> Path:
        root = (
            self._session_dir(session_id)
            if kind == "sampler"
            else self.state_dir / "checkpoints"
        )
        return root / ACCOUNT / ref.run_id / ref.name

    def _session_dir(self, session_id: str) -> Path:
        if not _SESSION.fullmatch(session_id):
            raise CheckpointError(f"{session_id!r} is not a session of this service")
        return self.state_dir / "sessions" / session_id

    def _remove_orphans(self) -> None:
        """Clear what a killed process left: its sessions and unfinished drafts."""
        sessions = self.state_dir / "sessions"
        for session in sessions.glob("ts-*"):
            if not _owner_is_alive(session):
                _remove_session(session)
        drafts = [
            *sessions.glob(".draft-*"),
            *(self.state_dir / "checkpoints").glob("*/*/.draft-*"),
            *(self.state_dir / "promoted").glob(".draft-*"),
        ]
        for draft in drafts:
            # Another live service may be writing a younger one, or just have ended it.
            with contextlib.suppress(OSError):
                if time.time() - draft.stat().st_mtime > 3600:
                    shutil.rmtree(draft, ignore_errors=True)


@contextlib.contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A draft to write into, which becomes ``target`` when all went well.

    It reaches the disk before it gets its name; after an error nothing is left.
    """
    new = [folder for folder in target.parents if not folder.exists()]
    target.parent.mkdir(parents=True, exist_ok=True)
    for folder in new:
        _sync_folder(folder.parent)
    draft = target.parent / f".draft-{secrets.token_hex(8)}"
    draft.mkdir()
    try:
        yield draft
        for path in draft.iterdir():
            _sync_file(path)
        _sync_folder(draft)
        os.rename(draft, target)
        _sync_folder(target.parent)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def write_adapter(
    folder: Path, base_model: str, target_modules: list[str], weights: AdapterWeights
) -> None:
    """Write the two files that PEFT reads."""
    _save_tensors(weights.tensors, folder / _ADAPTER)
    peft_config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": weights.settings.rank,
        "lora_alpha": weights.settings.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": target_modules,
        "inference_mode": True,
    }
    (folder / _CONFIG).write_text(json.dumps(peft_config, indent=1))


def read_adapter(folder: Path) -> tuple[str, AdapterWeights]:
    """Base model and weights from what :func:`write_adapter` wrote."""
    try:
        config = json.loads((folder / _CONFIG).read_text())
        settings = LoraSettings(int(config["r"]), int(config["lora_alpha"]))
        base_model = str(config["base_model_name_or_path"])
        return base_model, AdapterWeights(settings, load_file(folder / _ADAPTER))
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(
            f"adapter {folder.name!r} is damaged ({error}); delete its folder and "
            "promote again"
        ) from error


def _write_manifest(
    folder: Path,
    kind: Kind,
    session_id: str,
    ref: CheckpointRef,
    base_model: str,
    settings: LoraSettings,
) -> None:
    files = sorted(path.name for path in folder.iterdir())
    manifest = {
        "kind": kind,
        "session_id": session_id,
        "run_id": ref.run_id,
        "name": ref.name,
        "base_model": base_model,
        "lora": asdict(settings),
        "created": time.time(),
        "files": {name: _digest(folder / name) for name in files},
    }
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1))


def _save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    save_file({name: t.cpu().contiguous() for name, t in tensors.items()}, path)


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        if not isinstance(manifest, dict) or "files" not in manifest:
            raise ValueError("no file list")
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint {folder.name!r} is damaged ({error}); use another one"
        ) from error
    return manifest


def _read_info(folder: Path) -> CheckpointInfo | None:
    try:
        manifest = _read_manifest(folder)
        return CheckpointInfo(
            ref=CheckpointRef(folder.parent.name, folder.name),
            kind="sampler" if manifest["kind"] == "sampler" else "training",
            session_id=str(manifest.get("session_id", "")),
            base_model=str(manifest["base_model"]),
            created=float(manifest["created"]),
            size=sum((folder / name).stat().st_size for name in manifest["files"]),
        )
    except (CheckpointError, KeyError, TypeError, OSError):
        return None


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return "unreadable"


def _remove_session(folder: Path) -> None:
    # Away in one move first: nobody may see a checkpoint that is half gone.
    going = folder.with_name(f".draft-{secrets.token_hex(8)}")
    with contextlib.suppress(OSError):
        os.rename(folder, going)
    for path in (going, folder):
        shutil.rmtree(path, ignore_errors=True)


def _owner_is_alive(session: Path) -> bool:
    try:
        owner = session / _OWNER
        if time.time() - owner.stat().st_mtime > DEAD_SECONDS:
            return False  # the number may by now be another process's
        pid = int(json.loads(owner.read_text())["pid"])
        if os.name == "nt":  # there `os.kill` would interrupt the process: go by age
            return time.time() - owner.stat().st_mtime < 24 * 3600
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return True


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(path: Path) -> None:
    # Windows cannot open a folder; there the rename alone has to do.
    with contextlib.suppress(PermissionError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
