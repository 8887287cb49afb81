"""What a run writes down: metrics, rollouts, and the state a resume needs.

One definition of each row, used by the writer, the plots and the text:

``metrics.jsonl``   one :class:`StepMetrics` per step
``rollouts.jsonl``  one :class:`RolloutRecord` per rollout (``watch.jsonl`` too)
``resume.json``     one :class:`ResumeState`

Rows are strict JSON (no NaN, no numpy values) and are written whole or not at all.
After a resume, steps run again carry a higher ``attempt``; the readers return the
history that led to the present weights, so that no step appears twice. Files only:
this module knows no service.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

StrPath = str | os.PathLike[str]


class DamagedFile(ValueError):
    """A file of a run cannot be read; the message names the line and the remedy."""


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One training step, as a row of ``metrics.jsonl``.

    Numbers may be numpy or torch scalars; they are stored as plain Python ones. Where
    a value may be missing, NaN and infinity become ``None`` (JSON ``null``); anywhere
    else they are refused.

    >>> import numpy as np
    >>> StepMetrics.example(loss=np.float32("nan"), entropy=np.float32(0.5)).to_row()[
    ...     "entropy"
    ... ]
    0.5
    """

    run_id: str
    step: int  # 1, 2, …; goes on after a resume
    attempt: int  # 1, then one more each time a step is run again

    reward_mean: float  # over the valid rollouts
    within_group_std: float  # mean over groups of the sample standard deviation
    rollouts: int  # asked for
    valid_rollouts: int  # completed and graded
    kept_groups: int  # groups with a reward spread
    datums: int  # rollouts trained on
    updated: bool  # whether the weights changed
    note: str | None = None  # why there was no update; a reshuffled task pool

    loss: float | None = None  # summed over tokens, as the service reports it
    loss_per_token: float | None = None  # loss / trained_tokens
    snapshot: str | None = None  # the sampler checkpoint the rollouts came from

    seconds: float  # the whole step; the four parts below add up to it
    sampling_seconds: float | None = None  # waiting for completions
    training_seconds: float | None = None  # forward_backward, optim_step, saving, KL
    hud_seconds: float | None = None  # task start, grading, traces
    other_seconds: float | None = None

    mean_output_tokens: float | None = None
    token_limit_share: float  # 0 to 1, from the finish reason; overlaps the outcomes
    correct: int  # the three outcome counts add up to valid_rollouts
    wrong_integer: int
    invalid_final_line: int
    entropy: float | None = None  # nats per token: mean of −sampling log-probability
    kl: float | None = None  # nats per token, to the base model; None: not measured
    max_ratio_error: float | None = None  # largest |ratio − 1| of a trained token

    prefill_tokens: int  # prompts read while sampling; rollouts read for the KL
    sampled_tokens: int
    trained_tokens: int  # output tokens in the datums

    temperature: float
    top_p: float
    top_k: int  # -1 is off
    max_tokens: int
    loss_fn: str
    learning_rate: float

    def __post_init__(self) -> None:
        _normalise(self)

    def to_row(self) -> dict[str, Any]:
        """The row as a plain dict, in the order of :data:`METRIC_KEYS`."""
        return {key: getattr(self, key) for key in METRIC_KEYS}

    @classmethod
    def example(cls, **changes: Any) -> StepMetrics:
        """A made-up row for tests and toy plots, with ``changes`` applied."""
        values: dict[str, Any] = {
            "run_id": "example",
            "step": 1,
            "attempt": 1,
            "reward_mean": 0.5,
            "within_group_std": 0.4,
            "rollouts": 4,
            "valid_rollouts": 4,
            "kept_groups": 1,
            "datums": 4,
            "updated": True,
            "seconds": 1.0,
            "token_limit_share": 0.0,
            "correct": 2,
            "wrong_integer": 1,
            "invalid_final_line": 1,
            "prefill_tokens": 40,
            "sampled_tokens": 80,
            "trained_tokens": 80,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "max_tokens": 160,
            "loss_fn": "importance_sampling",
            "learning_rate": 1e-4,
        }
        return cls(**{**values, **changes})


#: The keys of a ``metrics.jsonl`` row: the one list that writer and readers share.
METRIC_KEYS: tuple[str, ...] = tuple(f.name for f in dataclasses.fields(StepMetrics))


@dataclass(frozen=True, kw_only=True)
class RolloutRecord:
    """One graded rollout, as a row of ``rollouts.jsonl`` or ``watch.jsonl``."""

    run_id: str
    phase: str  # "calibrate", "train", "before", "after", "watch", …
    step: int  # 0 where the phase has no steps
    attempt: int = 1
    task: str  # the task's slug
    task_index: int  # position of the task in its batch
    rollout_index: int  # position within the task's group
    seed: int | None = None

    args: dict[str, Any] = field(default_factory=dict)  # the task's, such as a and b
    expected: Any = None
    got: Any = None
    prompt: str = ""
    text: str  # the graded reply
    reward: float
    outcome: str | None = None  # None: the task has no outcome classes
    token_limit: bool = False  # the token limit ended the reply
    finish_reason: str | None = None
    prompt_tokens: int
    output_tokens: int
    entropy: float | None = None  # nats per token, as in StepMetrics
    advantage: float | None = None  # None: not trained on
    snapshot: str | None = None

    def __post_init__(self) -> None:
        _normalise(self)

    @property
    def key(self) -> tuple[str, int, int, str, int]:
        """What makes a rollout one and the same when it is written twice."""
        return (self.phase, self.step, self.attempt, self.task, self.rollout_index)

    def to_row(self) -> dict[str, Any]:
        """The row as a plain dict."""
        return {key: getattr(self, key) for key in ROLLOUT_KEYS}


ROLLOUT_KEYS: tuple[str, ...] = tuple(f.name for f in dataclasses.fields(RolloutRecord))


@dataclass(frozen=True, kw_only=True)
class ResumeState:
    """Where a run stands: enough to go on with the next step in a new process."""

    run_id: str
    next_step: int
    seed: int
    pool_position: int  # what TaskPool.tasks_for_step gets for next_step
    checkpoint: str  # a training checkpoint ("state-…"): weights and optimizer
    base_model: str  # resuming under another base model is refused
    model: str  # the preset's name
    attempt: int = 1  # of the process that wrote this; a resume runs attempt + 1
    config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _normalise(self)


RowT = TypeVar("RowT", StepMetrics, RolloutRecord)
RecordT = TypeVar("RecordT", StepMetrics, RolloutRecord, ResumeState)


# Metrics


def append_metrics(path: StrPath, row: StepMetrics) -> None:
    """Append one step to ``metrics.jsonl``, whole or not at all."""
    _append_lines(path, [row.to_row()])


def read_metrics(path: StrPath) -> list[StepMetrics]:
    """Read ``metrics.jsonl``: one row per step, oldest first.

    A row is left out if a later one of a higher attempt stands at the same step or
    an earlier one: that work was abandoned when the run was resumed before it.

    Raises:
        FileNotFoundError: No such file: no step has finished yet.
        DamagedFile: A line is not a complete row; names the line and the remedy.
    """
    rows = _read_lines(path, StepMetrics)
    return _current(rows, lambda row: row.run_id, lambda row: (row.run_id, row.step))


def next_attempt(path: StrPath, step: int) -> int:
    """The attempt number with which ``step`` is to be run (again): 1 if it is new."""
    if not Path(path).exists():
        return 1
    rows = _read_lines(path, StepMetrics)
    return 1 + max((row.attempt for row in rows if row.step >= step), default=0)


# Rollouts


def append_rollouts(path: StrPath, records: Iterable[RolloutRecord]) -> None:
    """Append rollouts in one write: all of a batch is on disk, or none of it."""
    _append_lines(path, [record.to_row() for record in records])


def read_rollouts(
    path: StrPath, *, phase: str | None = None, step: int | None = None
) -> list[RolloutRecord]:
    """Read ``rollouts.jsonl`` or ``watch.jsonl``, each rollout once.

    Of a step that ran more than once only the last attempt is returned, and of a
    record written twice the later copy.

    Args:
        phase: Only this phase, e.g. ``"before"``.
        step: Only this step.

    Raises:
        FileNotFoundError, DamagedFile: As :func:`read_metrics`.
    """
    rows = _read_lines(path, RolloutRecord)
    current = _current(
        rows, lambda row: (row.run_id, row.phase), lambda row: (row.run_id, *row.key)
    )
    return [
        row
        for row in current
        if (phase is None or row.phase == phase) and (step is None or row.step == step)
    ]


def latest_step(records: Iterable[RolloutRecord]) -> list[RolloutRecord]:
    """The records of the highest step among them.

    A run that went on after its end has one evaluation for each of its ends.
    """
    rows = list(records)
    last = max((row.step for row in rows), default=0)
    return [row for row in rows if row.step == last]


# Damaged files


@dataclass(frozen=True)
class DamagedLine:
    """A line of a run's file that is no complete row."""

    number: int  # from 1
    text: str
    error: str  # names the file, the line and the remedy


def salvage_metrics(path: StrPath) -> tuple[list[StepMetrics], list[DamagedLine]]:
    """Read ``metrics.jsonl`` as :func:`read_metrics` does, leaving out damaged lines.

    Returns:
        The rows that can be read, and the lines that cannot; two empty lists without
        a file.
    """
    rows, damaged = _salvage(path, StepMetrics)
    current = _current(rows, lambda row: row.run_id, lambda row: (row.run_id, row.step))
    return current, damaged


def salvage_rollouts(path: StrPath) -> tuple[list[RolloutRecord], list[DamagedLine]]:
    """Read ``rollouts.jsonl`` as :func:`read_rollouts` does, without damaged lines.

    Returns:
        As :func:`salvage_metrics`.
    """
    rows, damaged = _salvage(path, RolloutRecord)
    current = _current(
        rows, lambda row: (row.run_id, row.phase), lambda row: (row.run_id, *row.key)
    )
    return current, damaged


def _salvage(path: StrPath, kind: type[RowT]) -> tuple[list[RowT], list[DamagedLine]]:
    rows: list[RowT] = []
    damaged: list[DamagedLine] = []
    if not Path(path).is_file():
        return rows, damaged
    text = Path(path).read_bytes().decode("utf-8", errors="replace")
    lines = [line for line in enumerate(text.split("\n"), 1) if line[1].strip()]
    for number, line in lines:
        try:
            remedy = _remedy(number, lines[-1][0])
            rows.append(_parse(line, kind, f"{path}, line {number}", remedy))
        except DamagedFile as error:
            damaged.append(DamagedLine(number, line, str(error)))
    return rows, damaged


# Resume state


def write_resume_state(path: StrPath, state: ResumeState) -> None:
    """Replace ``resume.json`` in one move: a crash leaves the old file or the new."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(target.name + ".tmp")
    text = json.dumps(
        dataclasses.asdict(state), indent=2, allow_nan=False, ensure_ascii=True
    )
    with temporary.open("w", encoding="ascii", newline="\n") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, target)


def read_resume_state(path: StrPath) -> ResumeState:
    """Read ``resume.json``.

    Raises:
        FileNotFoundError: The run has saved no training checkpoint yet.
        DamagedFile: The file is not a complete state.
    """
    remedy = "resume from a training checkpoint by its path, or start a new run"
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path} does not exist: the run has saved no training checkpoint yet; "
            "start it from the beginning"
        ) from None
    except UnicodeDecodeError as error:
        raise DamagedFile(f"{path} is not text ({error}); {remedy}") from error
    return _parse(text, ResumeState, str(path), remedy)


# One normalisation, one writer, one reader


def _normalise(record: Any) -> None:
    """Make every field of a frozen dataclass plain, finite and JSON-safe, in place."""
    for spec in dataclasses.fields(record):
        name = f"{type(record).__name__}.{spec.name}"
        value = _plain(getattr(record, spec.name), name)
        kind = str(spec.type)
        if value is None and "None" not in kind and kind != "Any":
            raise ValueError(
                f"{name} is {getattr(record, spec.name)!r}, but every row needs it"
            )
        object.__setattr__(record, spec.name, _typed(value, kind, name))


def _plain(value: Any, name: str) -> Any:
    """Python's own scalars for numpy's and torch's; ``None`` for NaN and infinity."""
    if not isinstance(value, (str, bytes)) and hasattr(value, "item"):
        value = value.item()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {
            str(key): _plain(item, f"{name}[{key!r}]") for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{name}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise ValueError(
        f"{name} is a {type(value).__name__}, which JSON cannot hold; store a number, "
        "a text, a list or a dict"
    )


_SCALARS: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "str": (str,),
}


def _typed(value: Any, kind: str, name: str) -> Any:
    """Check a scalar against its annotation, so that a misplaced value is named."""
    wanted = kind.split(" | ")[0]
    if value is None or wanted not in _SCALARS:
        return value
    fits = isinstance(value, _SCALARS[wanted])
    if not fits or (isinstance(value, bool) and wanted != "bool"):
        raise ValueError(f"{name} is {value!r}, not a value of type {wanted}")
    return float(value) if wanted == "float" else value


def _append_lines(path: StrPath, rows: Sequence[dict[str, Any]]) -> None:
    """Append rows with one write that reaches the disk, or leave the file as it was."""
    if not rows:
        return
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(row, allow_nan=False, ensure_ascii=True) for row in rows)
    data = "".join(line + "\n" for line in lines).encode("ascii")
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
    descriptor = os.open(target, flags, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        if size and not _ends_with_newline(descriptor, size):
            # Appending would glue two rows together and damage both.
            _read_lines(target, None)
            data = b"\n" + data
        try:
            if os.write(descriptor, data) != len(data):
                raise OSError(f"{target}: the disk took only part of a row")
            os.fsync(descriptor)
        except OSError:
            os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)


def _ends_with_newline(descriptor: int, size: int) -> bool:
    os.lseek(descriptor, size - 1, os.SEEK_SET)
    return os.read(descriptor, 1) == b"\n"


def _read_lines(path: StrPath, kind: type[RowT] | None) -> list[RowT]:
    """Parse every line of a JSONL file; with ``kind`` None only check each is JSON."""
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path} does not exist: the run has finished no step yet, or its folder "
            "is another one"
        ) from None
    lines = data.split(b"\n")
    last = max((i for i, line in enumerate(lines, start=1) if line.strip()), default=0)
    rows: list[RowT] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        remedy = _remedy(number, last)
        text = line.decode("utf-8", errors="replace")
        if kind is None:
            _load_object(text, where, remedy)
        else:
            rows.append(_parse(text, kind, where, remedy))
    return rows


def _remedy(number: int, last: int) -> str:
    if number == last:
        return (
            "it is the last line, so writing it was probably interrupted: delete that "
            "line; a resume runs its step again"
        )
    return "restore the file from a copy, or delete that line and lose its step"


def _load_object(text: str, where: str, remedy: str) -> dict[str, Any]:
    try:
        row = json.loads(text, parse_constant=_refuse_constant)
    except ValueError as error:
        raise DamagedFile(
            f"{where}: not a complete JSON row ({error}); {remedy}"
        ) from (error)
    if not isinstance(row, dict):
        raise DamagedFile(f"{where}: expected a JSON object; {remedy}")
    return row


def _parse(text: str, kind: type[RecordT], where: str, remedy: str) -> RecordT:
    row = _load_object(text, where, remedy)
    specs = dataclasses.fields(kind)
    known = {spec.name for spec in specs}
    required = {
        spec.name
        for spec in specs
        if spec.default is dataclasses.MISSING
        and spec.default_factory is dataclasses.MISSING
    }
    if missing := sorted(required - row.keys()):
        raise DamagedFile(f"{where}: {', '.join(missing)} missing; {remedy}")
    if unknown := sorted(row.keys() - known):
        raise DamagedFile(
            f"{where}: unknown key {', '.join(unknown)}; the file was written by "
            "another version of rlhelpers: read it with that one"
        )
    try:
        return kind(**row)
    except ValueError as error:
        raise DamagedFile(f"{where}: {error}; {remedy}") from error


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _current(
    rows: Sequence[RowT],
    run_of: Callable[[RowT], Any],
    key_of: Callable[[RowT], Any],
) -> list[RowT]:
    """Keep the rows that a later attempt did not replace, in file order.

    Read from the end: a row goes if a later one of the same run has a higher attempt
    at its step or before it, or has the same key.
    """
    first_steps: dict[Any, dict[int, int]] = {}  # run -> attempt -> earliest step
    seen: set[Any] = set()
    kept: list[RowT] = []
    for row in reversed(rows):
        attempts = first_steps.setdefault(run_of(row), {})
        replaced = any(
            attempt > row.attempt and step <= row.step
            for attempt, step in attempts.items()
        )
        earliest = attempts.get(row.attempt, row.step)
        attempts[row.attempt] = min(row.step, earliest)
        if not replaced and key_of(row) not in seen:
            seen.add(key_of(row))
            kept.append(row)
    return kept[::-1]
