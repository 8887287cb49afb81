"""Checkpoint names and kinds: wrong ones are explained before anything is sent."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhelpers.checkpoints import (
    CheckpointError,
    ListedCheckpoint,
    PromotedModel,
    check_label,
    checkpoint_kind,
    checkpoint_name,
    folder_files,
    parse_checkpoint,
    require_sampler_checkpoint,
    require_training_checkpoint,
)

RUN = "run-" + "0123456789abcdef" * 2


@pytest.mark.parametrize(
    ("kind", "step", "tag", "expected"),
    [
        ("state", 5, None, "state-0005"),
        ("policy", 0, None, "policy-0000"),
        ("final-state", None, None, "final-state"),
        ("policy", 12, "LR 4e-4!", "policy-0012-lr-4e-4"),
        ("state", 12345, None, "state-12345"),
    ],
)
def test_names(kind: str, step: int | None, tag: str | None, expected: str) -> None:
    assert checkpoint_name(kind, step=step, tag=tag) == expected


def test_a_name_leaves_room_for_the_suffix_of_the_sdk() -> None:
    assert len(checkpoint_name("policy", tag="x" * 47)) == 54
    with pytest.raises(CheckpointError, match="at most 54"):
        checkpoint_name("policy", tag="x" * 48)


@pytest.mark.parametrize("kind", ["State_5", "policy.1", "-state", ""])
def test_names_that_cannot_exist(kind: str) -> None:
    with pytest.raises(CheckpointError):
        checkpoint_name(kind)


def test_a_negative_step_is_refused() -> None:
    with pytest.raises(CheckpointError, match="-1"):
        checkpoint_name("state", step=-1)


@pytest.mark.parametrize(
    ("label", "said"),
    [
        ("State_5", "'S', '_'"),
        ("step 5", "' '"),
        ("policy.1", "'.'"),
        ("a" * 64, "64 characters"),
        ("state-", "starting and ending"),
        ("", "empty"),
        ("straße", "'ß'"),
        ("state-5\n", "'\\n'"),
    ],
)
def test_labels_that_the_service_refuses(label: str, said: str) -> None:
    """S08: refused before anything is sent."""
    with pytest.raises(CheckpointError) as caught:
        check_label(label)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("policy-0005-1a2b3c4d", "sampler"),
        ("final-1a2b3c4d", "sampler"),
        ("final", "sampler"),
        ("state-0005", "training"),
        ("final-state", "training"),
        ("final-state-2", "training"),
        ("experiment", "unknown"),
        ("statement", "unknown"),
    ],
)
def test_kinds(name: str, kind: str) -> None:
    assert checkpoint_kind(name) == kind


def test_parsing_a_path() -> None:
    parsed = parse_checkpoint(f" local/{RUN}/state-0005 ")
    assert (parsed.account, parsed.run_id, parsed.name) == ("local", RUN, "state-0005")
    assert parsed.path == f"local/{RUN}/state-0005"


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("acct/notrun/state-1", "'notrun'"),
        (f"acct/{RUN}", "not a checkpoint path"),
        (f"a/{RUN}/state-1/x", "not a checkpoint path"),
        (f"a/{RUN}/State_5", "'State_5'"),
        (f"A b/{RUN}/state-1", "'A b'"),
        ("/tmp/state-1", "not a checkpoint path"),
    ],
)
def test_paths_that_cannot_exist(path: str, said: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse_checkpoint(path)
    assert said in str(caught.value)


def test_the_wrong_kind_names_the_kind_needed() -> None:
    """S07: in the package."""
    with pytest.raises(
        CheckpointError, match=r"sampler checkpoint.*training checkpoint"
    ):
        require_training_checkpoint(f"local/{RUN}/policy-0005-1a2b3c4d")
    with pytest.raises(CheckpointError, match=r"training checkpoint.*session.resume"):
        require_sampler_checkpoint(f"local/{RUN}/state-0005")


def test_the_right_kind_and_unknown_names_pass() -> None:
    assert require_training_checkpoint(f"local/{RUN}/state-0005").kind == "training"
    assert require_training_checkpoint(f"local/{RUN}/mine").kind == "unknown"
    assert require_sampler_checkpoint(f"local/{RUN}/final-1a2b3c4d").kind == "sampler"


@pytest.mark.parametrize(
    ("kind_of", "kind"),
    [
        ("CHECKPOINT_TYPE_INFERENCE_LORA", "sampler"),
        ("CHECKPOINT_TYPE_TRAINING_LORA", "training"),
        ("CHECKPOINT_TYPE_TRAINING", "training"),
        ("CHECKPOINT_TYPE_OTHER", "unknown"),
        ("", "unknown"),
    ],
)
def test_a_row_of_the_list_tells_its_kind(kind_of: str, kind: str) -> None:
    resource = f"accounts/a/trainingSessions/ts-1/checkpoints/{RUN}-state-0005"
    row = {"name": resource, "checkpointType": kind_of, "sizeBytes": "12"}
    listed = ListedCheckpoint.from_row(row)
    assert (listed.resource, listed.run_id) == (resource, RUN)
    assert (listed.name, listed.kind) == ("state-0005", kind)
    assert (listed.promotable, listed.size) == (False, 12)


def test_a_row_without_a_run_keeps_its_name() -> None:
    listed = ListedCheckpoint.from_row({"name": "a/b/odd-name"})
    assert (listed.run_id, listed.name, listed.size) == (None, "odd-name", None)


def test_a_promoted_model_knows_its_files_only_where_they_are(tmp_path: Path) -> None:
    (tmp_path / "b.bin").write_bytes(b"12345")
    (tmp_path / "a.json").write_bytes(b"{}")
    (tmp_path / "folder").mkdir()
    here = PromotedModel.from_row({"name": "m", "localFolder": str(tmp_path)}, "x")
    assert here.folder == tmp_path
    assert here.files == folder_files(tmp_path) == {"a.json": 2, "b.bin": 5}
    elsewhere = PromotedModel.from_row({"name": "accounts/a/models/x"}, "x")
    assert (elsewhere.name, elsewhere.folder) == ("accounts/a/models/x", None)
    assert elsewhere.files == {}
