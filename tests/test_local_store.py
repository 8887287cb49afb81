"""Checkpoints on disk: whole or not at all, of two kinds, and under strict names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhelpers.local import store as store_module
from rlhelpers.local.adapters import PEFT_PREFIX, AdapterWeights, LoraSettings
from rlhelpers.local.store import (
    CheckpointError,
    CheckpointRef,
    CheckpointStore,
    Kind,
    check_label,
)

SESSION = "ts-" + "a" * 32
RUN = "run-" + "b" * 32
LAYER = f"{PEFT_PREFIX}model.layers.0.self_attn.q_proj"
WEIGHTS = AdapterWeights(
    LoraSettings(rank=2, alpha=16, seed=5, train_mlp=False),
    {
        f"{LAYER}.lora_A.weight": torch.arange(6.0).reshape(2, 3),
        f"{LAYER}.lora_B.weight": torch.tensor([[0.5, -1.0]]),
    },
)
MOMENTS = {f"{LAYER}.lora_A.weight|exp_avg": torch.ones(2, 3), "x|step": torch.ones(())}


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    """A store with one open session."""
    opened = CheckpointStore(tmp_path / "state")
    opened.open_session(SESSION)
    return opened


def save(store: CheckpointStore, kind: Kind, name: str) -> CheckpointRef:
    ref = CheckpointRef(RUN, name)
    moments = MOMENTS if kind == "training" else None
    store.save(kind, SESSION, ref, "test/tiny", WEIGHTS, moments)
    return ref


def files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_what_is_saved_is_loaded(store: CheckpointStore) -> None:
    ref = save(store, "training", "state-1")
    loaded = store.load("training", ref)
    assert (loaded.kind, loaded.base_model, loaded.ref) == (
        "training",
        "test/tiny",
        ref,
    )
    assert loaded.weights.settings == WEIGHTS.settings
    assert loaded.weights.tensors.keys() == WEIGHTS.tensors.keys()
    for name, tensor in WEIGHTS.tensors.items():
        assert torch.equal(loaded.weights.tensors[name], tensor)
    assert loaded.optimizer_state is not None
    for name, tensor in MOMENTS.items():
        assert torch.equal(loaded.optimizer_state[name], tensor)


def test_a_sampler_checkpoint_has_no_optimizer(store: CheckpointStore) -> None:
    ref = save(store, "sampler", "policy-1")
    assert store.load("sampler", ref, SESSION).optimizer_state is None
    assert store.load("sampler", ref).weights.modules() == [
        "model.layers.0.self_attn.q_proj"
    ]


def test_the_folder_is_in_the_form_that_peft_reads(store: CheckpointStore) -> None:
    save(store, "training", "state-1")
    folder = store.state_dir / "checkpoints" / "local" / RUN / "state-1"
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA"
    assert (config["r"], config["lora_alpha"]) == (2, 16)
    assert config["target_modules"] == ["model.layers.0.self_attn.q_proj"]
    tensors = load_file(folder / "adapter_model.safetensors")
    assert set(tensors) == set(WEIGHTS.tensors)


def test_the_delta_is_alpha_over_rank_times_b_times_a() -> None:
    # [0.5, -1] @ [[0, 1, 2], [3, 4, 5]] = [-3, -3.5, -4], times 16 / 2.
    delta = WEIGHTS.delta("model.layers.0.self_attn.q_proj")
    assert delta.tolist() == [[-24.0, -28.0, -32.0]]


class DiskFull(OSError):
    """Raised in the place of a write."""


def _fail(*arguments: Any, **keywords: Any) -> None:
    raise DiskFull("no space left")


def _fail_on_call(number: int, real: Callable[..., None]) -> Callable[..., None]:
    calls = 0

    def write(*arguments: Any, **keywords: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == number:
            raise DiskFull("no space left")
        real(*arguments, **keywords)

    return write


@pytest.mark.parametrize("kind", ["sampler", "training"])
@pytest.mark.parametrize("moment", ["rename", "first file", "last file"])
def test_a_failed_write_leaves_nothing_behind(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, kind: Kind, moment: str
) -> None:
    kept = save(store, kind, "kept")
    before = files(store.state_dir)
    with monkeypatch.context() as patch:
        if moment == "rename":
            patch.setattr(os, "rename", _fail)
        else:
            number = 2 if (moment, kind) == ("last file", "training") else 1
            failing = _fail_on_call(number, store_module.save_file)
            patch.setattr(store_module, "save_file", failing)
        with pytest.raises(DiskFull):
            save(store, kind, "lost")
    assert files(store.state_dir) == before
    assert not list(store.state_dir.rglob(".draft-*"))
    assert store.names(RUN) == (["kept"] if kind == "training" else [])
    with pytest.raises(CheckpointError, match="there is no"):
        store.load(kind, CheckpointRef(RUN, "lost"), SESSION)
    store.load(kind, kept, SESSION)
    save(store, kind, "lost")  # and the name is free
    store.load(kind, CheckpointRef(RUN, "lost"), SESSION)


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_a_damaged_file_is_detected(
    store: CheckpointStore, name: str, damage: str
) -> None:
    ref = save(store, "training", "state-1")
    path = store.state_dir / "checkpoints" / "local" / RUN / "state-1" / name
    content = bytearray(path.read_bytes())
    if damage == "flipped":
        content[-1] ^= 1
        path.write_bytes(content)
    elif damage == "cut":
        path.write_bytes(content[:-8])
    else:
        path.unlink()
    with pytest.raises(CheckpointError, match=f"damaged: {name}"):
        store.load("training", ref)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_a_damaged_manifest_is_detected(store: CheckpointStore, text: str) -> None:
    ref = save(store, "training", "state-1")
    folder = store.state_dir / "checkpoints" / "local" / RUN / "state-1"
    (folder / "checkpoint.json").write_text(text)
    with pytest.raises(CheckpointError, match="damaged"):
        store.load("training", ref)


def test_the_wrong_kind_is_explained_both_ways(store: CheckpointStore) -> None:
    state, policy = save(store, "training", "state-1"), save(store, "sampler", "pol-1")
    with pytest.raises(CheckpointError, match=r"is a training checkpoint.*save_state"):
        store.load("sampler", state, SESSION)
    with pytest.raises(CheckpointError, match=r"is a sampler checkpoint.*save_state"):
        store.load("training", policy)
    with pytest.raises(CheckpointError, match="is a sampler checkpoint"):
        store.describe(policy)


def test_not_found_lists_what_there_is_oldest_first(store: CheckpointStore) -> None:
    for name in ("state-9", "state-10", "first"):
        save(store, "training", name)
    assert store.names(RUN) == ["state-9", "state-10", "first"]
    with pytest.raises(CheckpointError, match="state-9, state-10, first"):
        store.load("training", CheckpointRef(RUN, "state-11"))
    other = CheckpointRef("run-" + "c" * 32, "state-9")
    with pytest.raises(CheckpointError, match="of that run: none"):
        store.load("training", other)


BAD_NAMES = [
    "State_5",
    "step 5",
    "policy.1",
    "a" * 64,
    "..",
    ".",
    "",
    "a/b",
    "../a",
    "a\\b",
    "-a",
    "a-",
    "é",
    "a\n",
    "a\0",
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_that_are_no_dns_label_are_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match="1 to 63 lower-case"):
        check_label(name)
    with pytest.raises(CheckpointError):
        CheckpointRef.parse(name, own_run=RUN)
    with pytest.raises(CheckpointError):
        CheckpointRef.parse(f"local/{RUN}/{name}")


@pytest.mark.parametrize("name", ["a", "0", "state-5", "a" * 63, "a--b"])
def test_dns_labels_are_accepted(name: str) -> None:
    assert check_label(name) == name
    assert CheckpointRef.parse(name, own_run=RUN).path == f"local/{RUN}/{name}"
    assert CheckpointRef.parse(f"local/{RUN}/{name}") == CheckpointRef(RUN, name)


@pytest.mark.parametrize(
    "path",
    [
        None,
        7,
        "state-1",
        "acct/notrun/state-1",
        f"other/{RUN}/state-1",
        "local/run-123/state-1",
        f"local/{RUN.upper()}/state-1",
        f"local/{RUN}/state-1/more",
        f"/local/{RUN}/state-1",
        f"local/../{RUN}/state-1",
        "cross_job://job/state-1",
    ],
)
def test_references_of_another_form_are_refused(path: object) -> None:
    with pytest.raises(CheckpointError, match="cannot be a checkpoint here"):
        CheckpointRef.parse(path)


@pytest.mark.parametrize("session", ["", "ts-1", "..", "ts-" + "A" * 32, "/etc"])
def test_only_session_ids_name_a_session_folder(
    store: CheckpointStore, session: str
) -> None:
    with pytest.raises(CheckpointError, match="not a session"):
        store.close_session(session)


@pytest.mark.parametrize("kind", ["sampler", "training"])
def test_an_existing_name_is_not_overwritten(
    store: CheckpointStore, kind: Kind
) -> None:
    ref = save(store, kind, "taken")
    before = {
        name: (store.state_dir / name).read_bytes() for name in files(store.state_dir)
    }
    with pytest.raises(CheckpointError, match="exists already"):
        store.save(kind, SESSION, ref, "another/base", WEIGHTS, MOMENTS)
    after = {
        name: (store.state_dir / name).read_bytes() for name in files(store.state_dir)
    }
    assert after == before


def test_sampler_checkpoints_go_with_the_session_and_training_ones_stay(
    store: CheckpointStore,
) -> None:
    policy, state = save(store, "sampler", "pol-1"), save(store, "training", "state-1")
    store.close_session(SESSION)
    with pytest.raises(CheckpointError, match="go when their session ends"):
        store.load("sampler", policy, SESSION)
    with pytest.raises(CheckpointError, match="go when their session ends"):
        store.load("sampler", policy)
    store.load("training", state)
    assert not list((store.state_dir / "sessions").iterdir())
    again = CheckpointStore(store.state_dir)
    assert again.names(RUN) == ["state-1"]
    store.close_session(SESSION)  # closing twice is no error


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.parametrize("owner", ["dead", "damaged", "absent"])
def test_sessions_of_a_dead_process_are_removed(
    store: CheckpointStore, owner: str
) -> None:
    save(store, "sampler", "pol-1")
    save(store, "training", "state-1")
    path = store.state_dir / "sessions" / SESSION / "owner.json"
    if owner == "dead":
        path.write_text(json.dumps({"pid": dead_pid()}))
    elif owner == "damaged":
        path.write_text("{")
    else:
        path.unlink()
    again = CheckpointStore(store.state_dir)
    assert not (store.state_dir / "sessions" / SESSION).exists()
    assert again.names(RUN) == ["state-1"]


def test_sessions_of_a_live_process_stay(store: CheckpointStore) -> None:
    policy = save(store, "sampler", "pol-1")
    again = CheckpointStore(store.state_dir)
    assert torch.equal(
        again.load("sampler", policy).weights.tensors[f"{LAYER}.lora_B.weight"],
        WEIGHTS.tensors[f"{LAYER}.lora_B.weight"],
    )


def test_old_drafts_are_cleared_and_young_ones_are_left(
    store: CheckpointStore,
) -> None:
    save(store, "training", "state-1")
    folder = store.state_dir / "checkpoints" / "local" / RUN
    old, young = folder / ".draft-old", folder / ".draft-young"
    old.mkdir()
    young.mkdir()
    os.utime(old, (0, 0))
    again = CheckpointStore(store.state_dir)
    assert not old.exists()
    assert young.exists()
    assert again.names(RUN) == ["state-1"]
