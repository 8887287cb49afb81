"""What the side-by-side benchmarks share: options, alternating rounds, the report.

The sides take turns within every round, and every second round runs them backwards, so
that whatever else the machine does falls on all of them alike. A ratio is the median of
the rounds' ratios.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from hud.eval.task import Task

from rlhelpers import connect, make_taskset
from rlhelpers.arithmetic import PROMPT_TEMPLATE
from rlhelpers.sampling import PolicySampler, render_prompt
from rlhelpers.service import TrainingSession


@dataclass(frozen=True)
class Timing:
    """One side in one round: wall seconds, how much work they did, CPU seconds.

    The CPU time is that of the whole process. Other processes hardly change it, so on a
    busy machine it tells more than the wall time.
    """

    seconds: float
    work: float
    cpu: float = 0.0

    @property
    def rate(self) -> float:
        """Work per second."""
        return self.work / self.seconds


@dataclass(frozen=True)
class Ratio:
    """How many times as fast one side is as another; the range over the rounds."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} × ({self.low:.2f} to {self.high:.2f})"


Side = Callable[[int], Awaitable[Timing]]


async def alternate(sides: Mapping[str, Side], rounds: int) -> dict[str, list[Timing]]:
    """Run every side once a round, after a round that warms up and is not counted.

    A side is called with the round's number, 0 while warming up.
    """
    timings: dict[str, list[Timing]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        order = list(sides) if number % 2 else list(reversed(sides))
        for name in order:
            before = time.process_time()
            timing = await sides[name](number)
            used = time.process_time() - before
            if number:
                timings[name].append(replace(timing, cpu=used))
    return timings


def ratio(ours: Sequence[Timing], theirs: Sequence[Timing]) -> Ratio:
    """Rate of ``ours`` over rate of ``theirs``, round by round.

    >>> ratio([Timing(1, 6)], [Timing(2, 4)]).median
    3.0
    """
    values = [a.rate / b.rate for a, b in zip(ours, theirs, strict=True)]
    return Ratio(statistics.median(values), min(values), max(values))


def cpu_ratio(ours: Sequence[Timing], theirs: Sequence[Timing]) -> Ratio:
    """The same with work per CPU second."""
    return ratio(
        [Timing(timing.cpu, timing.work) for timing in ours],
        [Timing(timing.cpu, timing.work) for timing in theirs],
    )


def median_cpu(timings: Sequence[Timing]) -> float:
    """Median CPU time of a side's rounds."""
    return statistics.median(timing.cpu for timing in timings)


def median_seconds(timings: Sequence[Timing]) -> float:
    """Median wall time of a side's rounds."""
    return statistics.median(timing.seconds for timing in timings)


def median_rate(timings: Sequence[Timing]) -> float:
    """Median work per second of a side's rounds."""
    return statistics.median(timing.rate for timing in timings)


def base_parser(doc: str | None, *, rounds: int) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--model", default=None, help="a local preset's name")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument(
        "--quick", action="store_true", help="a few seconds, to see that it works"
    )
    return parser


def add_threads(parser: argparse.ArgumentParser) -> None:
    """Torch threads of the rival: by default one, and then as many as cores."""
    parser.add_argument(
        "--threads",
        type=int,
        nargs="+",
        default=sorted({1, os.cpu_count() or 1}),
        help="torch threads of the other side; the ratio is to the fastest of them",
    )


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Give torch ``count`` threads; afterwards one, as the service's small models have.

    The setting reaches the matrix products of every thread of the process, the
    service's too.
    """
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(1)


@contextmanager
def open_session(
    options: argparse.Namespace, *, own_process: bool = False
) -> Iterator[TrainingSession]:
    """A session of the local service whose files are thrown away."""
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        connect(
            model=options.model,
            runs_dir=folder,
            seed=options.seed,
            own_process=own_process,
            quiet=True,
        ) as session,
    ):
        yield session


def draw_tasks(session: TrainingSession, count: int, seed: int) -> list[Task]:
    """``count`` multiplication tasks in the preset's range."""
    low, high = session.preset.operands
    taskset = make_taskset(
        count, min_a=low, max_a=high, min_b=low, max_b=high, seed=seed
    )
    return list(taskset)


def prompt_of(sampler: PolicySampler, task: Task) -> list[int]:
    """Token ids of a task's prompt, as the agent renders it."""
    message = {"role": "user", "content": PROMPT_TEMPLATE.format(**task.args)}
    return render_prompt(
        sampler.tokenizer, sampler.preset, [message], examples=sampler.examples
    )


def where() -> str:
    """The machine and what else runs on it, for the first line of a report."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    return f"{os.cpu_count()} cores, load {load:.1f}, torch {torch.__version__}"


def verdict(goal: float, reached: float) -> str:
    """The last line of a report that has a goal."""
    word = "reached" if reached >= goal else "MISSED"
    return f"goal at least {goal:g} ×: {word}"


def print_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Columns as wide as they need to be; the first to the left, the others right."""
    lines = [list(map(str, line)) for line in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        first, *rest = (
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        print("  ".join([first, *rest]).rstrip())
