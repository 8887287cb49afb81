"""How much of a training step is the model's own compute, and how far from the floor.

    python benchmarks/step_share.py           # 10 steps of 8 × 8 after a first
    python benchmarks/step_share.py --quick

**The model's own compute** is what a loop in plain torch would have to do as well, with
no service, SDK, HTTP, HUD or JSON around it: forward passes while sampling, drawing the
next token from their logits, forward and backward passes of training, the Adam step. It
is measured by wrapping these functions of the service, inside its compute thread.
Everything else counts as outside, also what the compute thread does between them:
batching and compacting rows, parsing data, saving and merging the snapshot.

Inside is given twice. By wall clock it includes the moments in which the compute thread
waits for Python's global lock, held by the threads that serve HTTP and run HUD. By CPU
time of the compute thread it leaves those out, and so counts them as outside: the
stricter figure, and the one that the goal is held against. On a busy machine it also
counts as outside what other processes take; there, read the third figure, the share of
all CPU time that the process uses, which takes no account of what runs side by side.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from floor import Shape, StepWork, count_step, product_speed
from sampling import load_plain_model
from side_by_side import base_parser, draw_tasks, open_session, print_table, where
from transformers import PreTrainedModel

from rlhelpers import TrainConfig, train_step
from rlhelpers.local import decoding
from rlhelpers.local.llama import LlamaPass
from rlhelpers.local.trainer import PolicyTrainer
from rlhelpers.training import StepResult

COMPUTE_THREAD = "rlhelpers-local-compute"
GOAL = 0.10
SECTIONS: tuple[tuple[str, Any, str], ...] = (
    ("passes while sampling", PreTrainedModel, "__call__"),
    ("passes while sampling", LlamaPass, "__call__"),
    ("passes while sampling", LlamaPass, "read"),
    ("drawing tokens", decoding, "draw"),
    ("passes of training", PolicyTrainer, "run"),
    ("the Adam step", PolicyTrainer, "optim_step"),
)


@dataclass
class Meter:
    """Wall and CPU seconds that the compute thread spends in wrapped functions.

    Where one wrapped function calls another, the outer one counts.
    """

    wall: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    cpu: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _open: bool = False

    def clear(self) -> None:
        """Forget what was measured."""
        self.wall.clear()
        self.cpu.clear()

    def timed(self, label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, measured where the compute thread enters it from outside."""

        @functools.wraps(function)
        def measured(*args: Any, **kwargs: Any) -> Any:
            if self._open or threading.current_thread().name != COMPUTE_THREAD:
                return function(*args, **kwargs)
            self._open = True
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.wall[label] += time.perf_counter() - wall
                self.cpu[label] += time.thread_time() - cpu
                self._open = False

        return measured


@contextmanager
def measuring(sections: Sequence[tuple[str, Any, str]] = SECTIONS) -> Iterator[Meter]:
    """Wrap the functions of ``sections``, (label, owner, name); put them back."""
    meter, inherited, replaced = Meter(), [], []
    for label, owner, name in sections:
        original = getattr(owner, name)
        (replaced if name in vars(owner) else inherited).append((owner, name, original))
        setattr(owner, name, meter.timed(label, original))
    try:
        yield meter
    finally:
        for owner, name, original in replaced:
            setattr(owner, name, original)
        for owner, name, _ in inherited:
            delattr(owner, name)


def thread_seconds() -> dict[str, float]:
    """CPU seconds of every thread so far, by what it does; empty where unknown."""
    clock_of = getattr(time, "pthread_getcpuclockid", None)
    if clock_of is None:  # macOS, Windows
        return {}
    known = {
        threading.main_thread().name: "HUD, agents, grading, datums",
        COMPUTE_THREAD: "compute thread",
        "rlhelpers-local-http": "service's HTTP",
    }
    total = time.process_time()
    seconds = {
        known[thread.name]: time.clock_gettime(clock_of(thread.ident))
        for thread in threading.enumerate()
        if thread.name in known and thread.ident is not None
    }
    # Threads that have ended are in the total only.
    others = total - sum(seconds.values())
    return {**seconds, "SDK and others": others, "all threads": total}


@dataclass(frozen=True)
class MeasuredStep:
    """One step: its wall seconds, what was inside, and its result."""

    seconds: float
    wall: dict[str, float]
    cpu: dict[str, float]
    threads: dict[str, float]
    result: StepResult

    @property
    def outside_by_wall(self) -> float:
        """Share of the step outside the model's own compute."""
        return 1 - sum(self.wall.values()) / self.seconds

    @property
    def outside_by_cpu(self) -> float:
        """The same, where waiting for the lock counts as outside."""
        return 1 - sum(self.cpu.values()) / self.seconds


async def run_steps(
    options: argparse.Namespace, meter: Meter
) -> tuple[list[MeasuredStep], Shape, TrainConfig]:
    """Real training steps on new tasks, measured one by one after a first."""
    with open_session(options) as session:
        config = TrainConfig.from_preset(
            session.preset,
            tasks_per_step=options.tasks,
            group_size=options.group,
            max_tokens=options.max_tokens,
        )
        tasks = draw_tasks(session, config.tasks_per_step * (options.rounds + 1), 0)
        folder = session.new_run_dir("step-share")
        steps = []
        for step in range(options.rounds + 1):
            chosen = tasks[step * options.tasks : (step + 1) * options.tasks]
            meter.clear()
            before, started = thread_seconds(), time.perf_counter()
            result = await train_step(
                session, chosen, step=step + 1, config=config, run_dir=folder
            )
            seconds = time.perf_counter() - started
            used = {
                name: total - before.get(name, 0.0)
                for name, total in thread_seconds().items()
            }
            steps.append(
                MeasuredStep(seconds, dict(meter.wall), dict(meter.cpu), used, result)
            )
        model = load_plain_model(session.preset)
        shape = Shape.of(model, session.preset.lora_rank)
    return steps[1:], shape, config


def work_of(step: MeasuredStep, shape: Shape, group: int) -> StepWork:
    """The arithmetic that the step needed."""
    records = step.result.records
    sampled = [(r.prompt_tokens, r.output_tokens) for r in records]
    trained = [
        (r.prompt_tokens, r.output_tokens) for r in records if r.advantage is not None
    ]
    return count_step(shape, sampled, trained, group)


def middle(values: Sequence[float]) -> float:
    """The median, in a shorter word."""
    return statistics.median(values)


def report_share(steps: Sequence[MeasuredStep], config: TrainConfig) -> None:
    """Print where the time of a step goes."""
    seconds = middle([step.seconds for step in steps])
    datums = middle([len(step.result.datums) for step in steps])
    replies = middle([step.result.metrics.mean_output_tokens for step in steps])
    print(
        f"{len(steps)} steps of {config.tasks_per_step} × {config.group_size}: median "
        f"{seconds:.3f} s, {datums:g} datums, {replies:.1f} tokens a reply"
    )
    print(where())
    rows = []
    for label in dict.fromkeys(label for label, _, _ in SECTIONS):
        wall = middle([step.wall.get(label, 0.0) for step in steps])
        cpu = middle([step.cpu.get(label, 0.0) for step in steps])
        rows.append((label, f"{wall:.3f}", f"{cpu:.3f}", f"{cpu / seconds:.1%}"))
    print_table(("median a step", "wall s", "CPU s", "CPU, of the step"), rows)
    by_thread = [
        (name, f"{middle([step.threads.get(name, 0.0) for step in steps]):.3f}")
        for name in steps[0].threads
    ]
    if by_thread:
        print_table(("median a step, by thread", "CPU s"), by_thread)
    outside = middle([step.outside_by_cpu for step in steps])
    by_wall = middle([step.outside_by_wall for step in steps])
    print(
        f"outside the model's own compute: {outside:.1%} (by wall clock {by_wall:.1%})"
    )
    everything = [step.threads.get("all threads", 0.0) for step in steps]
    if all(everything):
        shares = [1 - sum(s.cpu.values()) / s.threads["all threads"] for s in steps]
        print(f"outside it, of the process's CPU time: {middle(shares):.1%}")
    print(f"goal under {GOAL:.0%}: {'reached' if outside < GOAL else 'MISSED'}")


def report_floor(
    steps: Sequence[MeasuredStep], shape: Shape, config: TrainConfig
) -> None:
    """Print the arithmetic of a step and what it takes at the products' speed."""
    group = config.group_size
    works = [work_of(step, shape, group) for step in steps]
    narrow = product_speed(shape, config.rollouts_per_step)
    wide = product_speed(shape, 4096)
    parts = {
        "reading prompts": (middle([w.prompts for w in works]), wide),
        "sampling": (middle([w.sampling for w in works]), narrow),
        "training": (middle([w.training for w in works]), wide),
    }
    print_table(
        ("median a step", "GFLOP", "GFLOP per CPU s", "floor s"),
        [
            (name, f"{work / 1e9:.2f}", f"{speed / 1e9:.0f}", f"{work / speed:.3f}")
            for name, (work, speed) in parts.items()
        ],
    )
    floor = sum(work / speed for work, speed in parts.values())
    seconds = middle([step.seconds for step in steps])
    own = middle([sum(step.cpu.values()) for step in steps])
    print(
        f"floor {floor:.3f} s of CPU time; the model's own compute takes "
        f"{own / floor:.1f} times as long, the step {seconds / floor:.1f} times"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the options, run the steps, print both reports."""
    parser = base_parser(__doc__, rounds=10)
    parser.add_argument("--tasks", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=None)
    options = parser.parse_args(arguments)
    if options.quick:
        options.tasks, options.group, options.rounds = 2, 4, 2
        options.max_tokens = 64
    with measuring() as meter:
        steps, shape, config = asyncio.run(run_steps(options, meter))
    report_share(steps, config)
    report_floor(steps, shape, config)


if __name__ == "__main__":
    main()
