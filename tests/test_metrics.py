"""What a run writes down, and how it reads back after trouble."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhelpers import metrics as module
from rlhelpers.metrics import (
    METRIC_KEYS,
    ROLLOUT_KEYS,
    DamagedFile,
    ResumeState,
    RolloutRecord,
    StepMetrics,
    append_metrics,
    append_rollouts,
    next_attempt,
    read_metrics,
    read_resume_state,
    read_rollouts,
    write_resume_state,
)

row = StepMetrics.example


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "metrics.jsonl"


def steps(path: Path) -> list[tuple[int, int]]:
    return [(r.step, r.attempt) for r in read_metrics(path)]


def test_round_trip_keeps_every_value(path: Path) -> None:
    written = [row(step=1, loss=-3.5, kl=None, snapshot="policy-1"), row(step=2)]
    for metrics in written:
        append_metrics(path, metrics)
    assert read_metrics(path) == written


def test_s14_one_key_list_for_writer_and_readers(path: Path) -> None:
    append_metrics(path, row())
    assert tuple(json.loads(path.read_text())) == METRIC_KEYS
    assert tuple(f.name for f in dataclasses.fields(StepMetrics)) == METRIC_KEYS


@pytest.mark.parametrize("loss", [None, math.nan, math.inf, np.float32("nan")])
def test_s14_missing_numbers_become_null(path: Path, loss: Any) -> None:
    append_metrics(path, row(loss=loss))
    text = path.read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    assert json.loads(text)["loss"] is None


def test_s14_numpy_and_torch_scalars_become_plain_numbers(path: Path) -> None:
    import torch

    append_metrics(
        path,
        row(
            loss=np.float32(0.5),
            reward_mean=np.float64(0.25),
            step=np.int64(3),
            updated=np.bool_(True),
            entropy=torch.tensor(0.125),
        ),
    )
    stored = json.loads(path.read_text())
    assert (stored["loss"], stored["reward_mean"], stored["step"]) == (0.5, 0.25, 3)
    assert stored["updated"] is True
    assert stored["entropy"] == 0.125


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward_mean": math.nan}, r"StepMetrics.reward_mean is nan, but every row"),
        ({"step": None}, "StepMetrics.step is None"),
        ({"step": 1.5}, "step is 1.5, not a value of type int"),
        ({"kept_groups": True}, "kept_groups is True"),
        ({"updated": 1}, "updated is 1, not a value of type bool"),
        ({"loss": "low"}, "loss is 'low'"),
        ({"snapshot": object()}, "JSON cannot hold"),
    ],
)
def test_a_value_in_the_wrong_place_is_named(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        row(**changes)


# Resuming (S10)


def test_s10_resumed_run_has_no_doubled_steps(path: Path) -> None:
    for step in range(1, 8):  # interrupted in step 8; the last checkpoint was at 5
        append_metrics(path, row(step=step))
    assert next_attempt(path, 6) == 2
    append_metrics(path, row(step=6, attempt=2))
    # Step 7 of the first attempt led nowhere: the run went on from step 5.
    assert steps(path) == [(s, 1) for s in range(1, 6)] + [(6, 2)]
    for step in range(7, 11):
        append_metrics(path, row(step=step, attempt=2))
    assert [step for step, _ in steps(path)] == list(range(1, 11))
    assert [attempt for _, attempt in steps(path)] == [1] * 5 + [2] * 5


def test_s10_resume_at_a_checkpoint_simply_goes_on(path: Path) -> None:
    for step in range(1, 6):
        append_metrics(path, row(step=step))
    assert next_attempt(path, 6) == 1
    for step in range(6, 11):
        append_metrics(path, row(step=step, attempt=2))
    assert [step for step, _ in steps(path)] == list(range(1, 11))


def test_step_retried_on_the_spot_keeps_what_follows(path: Path) -> None:
    for step, attempt in [(1, 1), (2, 1), (2, 2), (3, 1), (4, 1)]:
        append_metrics(path, row(step=step, attempt=attempt))
    assert steps(path) == [(1, 1), (2, 2), (3, 1), (4, 1)]


def test_row_written_twice_is_read_once(path: Path) -> None:
    append_metrics(path, row(step=1, loss=1.0))
    append_metrics(path, row(step=1, loss=2.0))
    assert [r.loss for r in read_metrics(path)] == [2.0]


def test_next_attempt_of_a_new_run(path: Path) -> None:
    assert next_attempt(path, 1) == 1


# Damage


def test_s10_damaged_last_row_names_file_line_and_remedy(path: Path) -> None:
    append_metrics(path, row(step=1))
    append_metrics(path, row(step=2))
    text = path.read_text()
    path.write_text(text[:-40])
    with pytest.raises(DamagedFile) as caught:
        read_metrics(path)
    message = str(caught.value)
    assert str(path) in message
    assert "line 2" in message
    assert "interrupted: delete that line" in message


def test_writer_does_not_append_to_a_half_written_row(path: Path) -> None:
    append_metrics(path, row(step=1))
    half = path.read_bytes()[:-40]
    path.write_bytes(half)
    with pytest.raises(DamagedFile, match="line 1"):
        append_metrics(path, row(step=2))
    assert path.read_bytes() == half


def test_writer_completes_a_whole_row_that_lacks_its_newline(path: Path) -> None:
    append_metrics(path, row(step=1))
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    append_metrics(path, row(step=2))
    assert steps(path) == [(1, 1), (2, 1)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("not json", "line 2: not a complete JSON row"),
        ("[1, 2]", "line 2: expected a JSON object"),
        ('{"step": 2}', "line 2: attempt, .* missing"),
        ("\x00\x00", "line 2: not a complete JSON row"),
    ],
)
def test_damage_in_the_middle_is_located(path: Path, line: str, message: str) -> None:
    append_metrics(path, row(step=1))
    with path.open("a") as file:
        file.write(line + "\n")
    append_metrics(path, row(step=3))
    with pytest.raises(DamagedFile, match=message) as caught:
        read_metrics(path)
    assert "restore the file from a copy" in str(caught.value)


def test_row_of_another_version_and_nan_are_refused(path: Path) -> None:
    stored = row().to_row()
    path.parent.mkdir()
    path.write_text(json.dumps({**stored, "colour": 1}) + "\n")
    with pytest.raises(DamagedFile, match="unknown key colour.*another version"):
        read_metrics(path)
    path.write_text(json.dumps({**stored, "loss": math.nan}) + "\n")
    with pytest.raises(DamagedFile, match="NaN is not JSON"):
        read_metrics(path)
    path.write_text(json.dumps({**stored, "step": "one"}) + "\n")
    with pytest.raises(DamagedFile, match="line 1: .*step is 'one'"):
        read_metrics(path)


def test_missing_file_is_explained(path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="finished no step yet"):
        read_metrics(path)
    with pytest.raises(FileNotFoundError, match="no training checkpoint yet"):
        read_resume_state(path)


def test_short_write_leaves_the_file_as_it_was(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append_metrics(path, row(step=1))
    before = path.read_bytes()
    genuine = os.write

    def full_disk(descriptor: int, data: bytes) -> int:
        return genuine(descriptor, data[:10])

    monkeypatch.setattr(module.os, "write", full_disk)
    with pytest.raises(OSError, match="only part of a row"):
        append_metrics(path, row(step=2))
    assert path.read_bytes() == before


# Rollouts


def test_rollout_round_trip_and_filters(
    tmp_path: Path, record: Callable[..., RolloutRecord]
) -> None:
    path = tmp_path / "rollouts.jsonl"
    batch = [
        record("t1", phase="train", step=1, text="é\ud800\n1692", seed=2**62),
        record("t1", phase="train", step=2, expected=1692, got=None),
        record("t1", phase="after", step=2, advantage=np.float32(0.5)),
    ]
    append_rollouts(path, batch)
    append_rollouts(path, [])
    assert read_rollouts(path) == batch
    assert read_rollouts(path, phase="train") == batch[:2]
    assert read_rollouts(path, phase="after", step=2) == batch[2:]
    first = path.read_text().splitlines()[0]
    assert tuple(json.loads(first)) == ROLLOUT_KEYS


def test_retried_step_doubles_no_rollout(
    tmp_path: Path, record: Callable[..., RolloutRecord]
) -> None:
    path = tmp_path / "rollouts.jsonl"

    def step(number: int, attempt: int, tasks: str) -> list[RolloutRecord]:
        return [
            record(t, phase="train", step=number, attempt=attempt, rollout_index=i)
            for t in tasks
            for i in range(2)
        ]

    append_rollouts(path, step(1, 1, "ab"))
    append_rollouts(path, step(2, 1, "cd"))
    append_rollouts(path, step(2, 2, "c"))  # a retry that was interrupted itself
    append_rollouts(path, step(2, 2, "cd"))
    rows = read_rollouts(path)
    assert [(r.step, r.attempt, r.task) for r in rows] == [
        *[(1, 1, t) for t in "aabb"],
        *[(2, 2, t) for t in "ccdd"],
    ]
    assert len({r.key for r in rows}) == len(rows)


def test_phases_do_not_replace_each_other(
    tmp_path: Path, record: Callable[..., RolloutRecord]
) -> None:
    path = tmp_path / "rollouts.jsonl"
    append_rollouts(path, [record(phase="train", step=5)])
    append_rollouts(path, [record(phase="before", step=0, attempt=3)])
    assert len(read_rollouts(path)) == 2


# Resume state


def state(**changes: Any) -> ResumeState:
    values: dict[str, Any] = {
        "run_id": "r1",
        "next_step": 6,
        "seed": 0,
        "pool_position": 5,
        "checkpoint": "local/run-1/state-5",
        "base_model": "local/tiny-arithmetic",
        "model": "tiny",
        "config": {"learning_rate": np.float64(4e-4), "ranges": (10, 99)},
    }
    return ResumeState(**{**values, **changes})


def test_resume_state_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "run" / "resume.json"
    write_resume_state(path, state())
    write_resume_state(path, state(next_step=11, attempt=2))
    read = read_resume_state(path)
    assert (read.next_step, read.attempt, read.pool_position) == (11, 2, 5)
    assert read.config == {"learning_rate": 4e-4, "ranges": [10, 99]}
    assert [p.name for p in path.parent.iterdir()] == ["resume.json"]


def test_interrupted_write_keeps_the_old_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "resume.json"
    write_resume_state(path, state(next_step=6))

    def interrupted(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module.os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_resume_state(path, state(next_step=11))
    assert read_resume_state(path).next_step == 6


def test_damaged_resume_state_is_explained(tmp_path: Path) -> None:
    path = tmp_path / "resume.json"
    path.write_text('{"run_id": "r1"')
    with pytest.raises(DamagedFile, match=r"resume\.json.*start a new run"):
        read_resume_state(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DamagedFile, match="not text"):
        read_resume_state(path)
