"""Rollouts a second as a step grows from 16 to 1,024 of them.

    python benchmarks/rollouts_per_second.py          # about three minutes
    python benchmarks/rollouts_per_second.py --quick

A rollout is the whole of it: HUD starts the task, the agent renders the prompt, the SDK
sends it over HTTP, the service samples, HUD grades the reply. Each size takes tasks of
its own in every round, in groups of 8, at the preset's token limit and temperature 1.
"""

from __future__ import annotations

import argparse
import asyncio
import time
import uuid
from collections.abc import Sequence

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
) -> Timing:
    """All rollouts of ``tasks``; the work is their number."""
    plan = RolloutPlan(
        phase="benchmark",
        step=step,
        seed=0,
        group_size=GROUP,
        settings=settings,
        job_id=uuid.uuid4().hex,
    )
    runtime = await session.runtime()
    started = time.perf_counter()
    runs = await collect_rollouts(sampler, tasks, plan=plan, runtime=runtime)
    return Timing(time.perf_counter() - started, len(runs))


async def measure(options: argparse.Namespace) -> None:
    """Run the rounds and print the report."""
    with open_session(options) as session:
        sampler = session.base_sampler()
        settings = SamplingSettings(options.max_tokens or session.preset.max_tokens)
        each_round = sum(size // GROUP for size in options.sizes)
        tasks = draw_tasks(session, each_round * (options.rounds + 1), options.seed)

        def of_size(size: int) -> Side:
            start = sum(s // GROUP for s in options.sizes if s < size)

            async def side(number: int) -> Timing:
                first = number * each_round + start
                chosen = tasks[first : first + size // GROUP]
                return await roll_out(session, sampler, chosen, settings, number)

            return side

        sides = {f"{size:,}": of_size(size) for size in options.sizes}
        timings = await alternate(sides, options.rounds)
    print(
        f"rollouts at once, in groups of {GROUP}, limit {settings.max_tokens}, "
        f"{session.preset.name}; {options.rounds} rounds"
    )
    report(timings)


def report(timings: dict[str, list[Timing]]) -> None:
    """Print the rate of every size, and how it compares with the size before."""
    print(where())
    names = list(timings)
    before = [None, *names]
    print_table(
        ("rollouts", "seconds", "rollouts/s", "CPU ms each", "against the size before"),
        [
            (
                name,
                f"{median_seconds(timings[name]):.2f}",
                f"{median_rate(timings[name]):.1f}",
                f"{1000 * median_cpu(timings[name]) / timings[name][0].work:.1f}",
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
    options = parser.parse_args(arguments)
    if options.quick:
        options.sizes, options.rounds, options.max_tokens = [8, 16], 1, 16
    if wrong := [size for size in options.sizes if size < GROUP or size % GROUP]:
        parser.error(f"--sizes must be multiples of the group of {GROUP}, got {wrong}")
    options.sizes.sort()
    asyncio.run(measure(options))


if __name__ == "__main__":
    main()
