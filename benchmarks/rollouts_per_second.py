"""Rollouts a second as a step grows from 16 to 1,024 of them.

    python benchmarks/rollouts_per_second.py          # about six minutes
    python benchmarks/rollouts_per_second.py --own-process
    python benchmarks/rollouts_per_second.py --quick

A rollout is the whole of it: HUD starts the task, the agent renders the prompt, the SDK
sends it over HTTP, the service samples, HUD grades the reply. Each size takes tasks of
its own in every round, in groups of 8, at the preset's token limit and temperature 1.

Every size makes as many rollouts as the largest: 1,024 of them 16 at a time, 64 at a
time and so on. A single step of 16 has two tasks, and how long their replies are, and
whether a full garbage collection falls into it, would be left to chance.

The service runs in this process, as in a notebook, or with ``--own-process`` in one of
its own, whose CPU time is then not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import time
import uuid
from collections.abc import Sequence
from itertools import islice
from statistics import fmean

from hud.eval.task import Task
from side_by_side import (
    Side,
    Timing,
    alternate,
    base_parser,
    draw_tasks,
    median_cpu,
    median_rate,
    median_seconds,
    open_session,
    print_table,
    ratio,
    where,
)

from rlhelpers.datums import check_run
from rlhelpers.sampling import (
    PolicySampler,
    RolloutPlan,
    SamplingSettings,
    collect_rollouts,
)
from rlhelpers.service import TrainingSession

SIZES = (16, 64, 256, 1024)
GROUP = 8


async def roll_out(
    session: TrainingSession,
    sampler: PolicySampler,
    tasks: Sequence[Task],
    settings: SamplingSettings,
    step: int,
) -> list[int]:
    """All rollouts of ``tasks`` at once; the length of each reply in tokens."""
    plan = RolloutPlan(
        phase="benchmark",
        step=step,
        seed=0,
        group_size=GROUP,
        settings=settings,
        job_id=uuid.uuid4().hex,
    )
    runtime = await session.runtime()
    runs = await collect_rollouts(sampler, tasks, plan=plan, runtime=runtime)
    return [len(check_run(run).output_token_ids) for run in runs]


async def measure(options: argparse.Namespace) -> None:
    """Run the rounds and print the report."""
    with open_session(options, own_process=options.own_process) as session:
        sampler = session.base_sampler()
        settings = SamplingSettings(options.max_tokens or session.preset.max_tokens)
        share = max(options.sizes) // GROUP  # tasks of one size in one round
        count = share * len(options.sizes) * (options.rounds + 1)
        tasks = iter(draw_tasks(session, count, options.seed))
        lengths: dict[str, list[int]] = {f"{size:,}": [] for size in options.sizes}

        def of_size(size: int) -> Side:
            async def side(number: int) -> Timing:
                done: list[int] = []
                started = time.perf_counter()
                for _ in range(0, share, size // GROUP):
                    chosen = list(islice(tasks, size // GROUP))
                    done += await roll_out(session, sampler, chosen, settings, number)
                lengths[f"{size:,}"] += done
                return Timing(time.perf_counter() - started, len(done))

            return side

        sides = {f"{size:,}": of_size(size) for size in options.sizes}
        timings = await alternate(sides, options.rounds)
    print(
        f"rollouts at once, in groups of {GROUP}, limit {settings.max_tokens}, "
        f"{session.preset.name}; {options.rounds} rounds"
    )
    report(timings, {name: fmean(found) for name, found in lengths.items()})


def report(timings: dict[str, list[Timing]], tokens: dict[str, float]) -> None:
    """Print the rate of every size, and how it compares with the size before."""
    print(where())
    names = list(timings)
    before = [None, *names]
    print_table(
        (
            "at once",
            "seconds",
            "rollouts/s",
            "CPU ms each",
            "tokens each",
            "against the size before",
        ),
        [
            (
                name,
                f"{median_seconds(timings[name]):.2f}",
                f"{median_rate(timings[name]):.1f}",
                f"{1000 * median_cpu(timings[name]) / timings[name][0].work:.1f}",
                f"{tokens[name]:.1f}",
                "" if last is None else str(ratio(timings[name], timings[last])),
            )
            for name, last in zip(names, before, strict=False)
        ],
    )
    rates = [median_rate(timings[name]) for name in names]
    falls = [n for n, a, b in zip(names[1:], rates, rates[1:], strict=False) if b < a]
    print(f"goal no fall: {'MISSED at ' + ', '.join(falls) if falls else 'reached'}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the options and measure."""
    parser = base_parser(__doc__, rounds=3)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--max-tokens", type=int, default=None)
    parser.add_argument("--own-process", action="store_true")
    options = parser.parse_args(arguments)
    if options.quick:
        options.sizes, options.rounds, options.max_tokens = [8, 16], 1, 16
    if wrong := [size for size in options.sizes if size < GROUP or size % GROUP]:
        parser.error(f"--sizes must be multiples of the group of {GROUP}, got {wrong}")
    options.sizes.sort()
    if wrong := [size for size in options.sizes if options.sizes[-1] % size]:
        parser.error(f"--sizes must divide the largest, {wrong} do not")
    asyncio.run(measure(options))


if __name__ == "__main__":
    main()
