"""The default full run on several seeds, before and after on 1,000 held-out tasks.

    python benchmarks/full_run.py                # seeds 0 to 4
    python benchmarks/full_run.py --seeds 0 0    # one seed twice: does it repeat?
    python benchmarks/full_run.py --record data/full_run.md    # the documents' tables

Every seed trains a fresh adapter through the SDK, HTTP and HUD, on the same split.
Prints a table with 95 % Wilson intervals, the time of a step by part, the largest
|ratio - 1| of any trained token, and whether runs of one seed earned the same rewards
step by step. Writes the same as JSON beside the runs. With ``--record`` it also writes
the two tables that the README and the model card quote; ``--rows`` makes them from the
JSON of an earlier run.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import time
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

from rlhelpers import (
    TrainConfig,
    connect,
    evaluate,
    make_taskset,
    split_taskset,
    train,
)
from rlhelpers.analysis import OutcomeSummary, wilson_interval
from rlhelpers.models import resolve_preset
from rlhelpers.training import StepResult

PARTS = ("sampling_seconds", "training_seconds", "hud_seconds", "other_seconds")


async def run_seed(seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train and evaluate one seed; everything that the report needs."""
    preset = resolve_preset(options.model)
    config = TrainConfig.from_preset(
        preset, seed=seed, steps=options.steps, learning_rate=options.learning_rate
    )
    low, high = preset.operands
    count = config.steps * config.tasks_per_step
    taskset = make_taskset(
        count + options.held_out,
        min_a=low,
        max_a=high,
        min_b=low,
        max_b=high,
        seed=options.split_seed,
    )
    training, held_out = split_taskset(
        taskset, train=count, held_out=options.held_out, seed=options.split_seed
    )
    worst = 0.0

    def note_ratio(result: StepResult) -> None:
        nonlocal worst
        worst = max(worst, result.max_ratio_error or 0.0)

    started = time.perf_counter()
    with connect(
        model=options.model, runs_dir=options.runs_dir, seed=seed, quiet=True
    ) as session:
        ready = time.perf_counter()
        folder = session.new_run_dir(f"benchmark-seed{seed}")
        before = await evaluate(session, held_out, phase="before", run_dir=folder)
        evaluated = time.perf_counter()
        result = await train(
            session,
            training,
            config=config,
            run_dir=folder,
            on_step=note_ratio,
            progress=False,
        )
        trained = time.perf_counter()
        after = await evaluate(
            session, held_out, phase="after", sampler=result.sampler, run_dir=folder
        )
        done = time.perf_counter()
    total = sum(row.seconds for row in result.metrics)
    return {
        "seed": seed,
        "before": dataclasses.asdict(before.outcomes),
        "after": dataclasses.asdict(after.outcomes),
        "rewards": [row.reward_mean for row in result.metrics],
        "losses": [row.loss for row in result.metrics],
        "max_ratio_error": worst,
        "seconds": {
            "connect": ready - started,
            "before": evaluated - ready,
            "train": trained - evaluated,
            "after": done - trained,
        },
        "step_share": {
            part.removesuffix("_seconds"): sum(
                getattr(row, part) for row in result.metrics
            )
            / total
            for part in PARTS
        },
        "step_seconds": total / len(result.metrics),
    }


def describe(summary: dict[str, Any]) -> str:
    """One side of the table."""
    s = OutcomeSummary(**summary)
    low, high = wilson_interval(s.correct, s.n)
    return (
        f"{s.correct / s.n:6.1%} [{low:.1%}, {high:.1%}]  "
        f"invalid {s.invalid_final_line:3}  wrong {s.wrong_integer:3}  "
        f"limit {s.token_limit:3}  tokens {s.mean_output_tokens:5.1f}"
    )


def report(rows: list[dict[str, Any]]) -> None:
    """Print what was measured."""
    for row in rows:
        print(f"seed {row['seed']}")
        print(f"  before {describe(row['before'])}")
        print(f"  after  {describe(row['after'])}")
        fewer = (
            1
            - row["after"]["mean_output_tokens"] / (row["before"]["mean_output_tokens"])
        )
        parts = "  ".join(f"{name} {s:.1f} s" for name, s in row["seconds"].items())
        shares = "  ".join(f"{name} {s:.0%}" for name, s in row["step_share"].items())
        print(f"  {fewer:.0%} fewer tokens   {parts}")
        print(f"  step {row['step_seconds']:.2f} s: {shares}")
        print(f"  largest |ratio - 1| {row['max_ratio_error']:.1e}")
    by_seed: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        by_seed.setdefault(row["seed"], []).append(row)
    for seed, same in by_seed.items():
        if len(same) > 1:
            rewards = len({tuple(row["rewards"]) for row in same}) == 1
            losses = len({tuple(row["losses"]) for row in same}) == 1
            print(
                f"seed {seed}, {len(same)} times: rewards step by step "
                f"{'equal' if rewards else 'DIFFER'}, losses bit for bit "
                f"{'equal' if losses else 'DIFFER'}"
            )


def summary_table(rows: list[dict[str, Any]]) -> str:
    """Before and after in five lines; a range where the seeds differ."""

    def cells(value: Callable[[dict[str, Any]], float], form: str) -> list[str]:
        shown = []
        for side in ("before", "after"):
            values = [value(row[side]) for row in rows]
            low, high = f"{min(values):{form}}", f"{max(values):{form}}"
            shown.append(low if low == high else f"{low} to {high}")
        return shown

    before, after = cells(lambda side: 100 * side["correct"] / side["n"], ".1f")
    lines = [
        f"| | before | after, {len(rows)} seeds |",
        "|---|---:|---:|",
        f"| accuracy | {before} % | {after} % |",
    ]
    for name, column, form in (
        ("invalid final line", "invalid_final_line", "d"),
        ("wrong integer", "wrong_integer", "d"),
        ("token limit hit", "token_limit", "d"),
        ("mean output tokens", "mean_output_tokens", ".1f"),
    ):
        before, after = cells(itemgetter(column), form)
        lines.append(f"| {name} | {before} | {after} |")
    return "\n".join(lines)


def seeds_table(rows: list[dict[str, Any]]) -> str:
    """One line before training, and one for each seed after it."""
    lines = [
        "| | accuracy | wrong integer | invalid final line | token limit "
        "| mean tokens |",
        "|---|---|---|---|---|---|",
    ]
    sides = [("before", rows[0]["before"])]
    sides += [(f"after, seed {row['seed']}", row["after"]) for row in rows]
    for name, s in sides:
        low, high = wilson_interval(s["correct"], s["n"])
        lines.append(
            f"| {name} | {s['correct'] / s['n']:.1%} ({100 * low:.1f} to "
            f"{100 * high:.1f}) | {s['wrong_integer']} | {s['invalid_final_line']} "
            f"| {s['token_limit']} | {s['mean_output_tokens']:.1f} |"
        )
    return "\n".join(lines)


def record(rows: list[dict[str, Any]], target: Path) -> None:
    """Write the tables that other documents quote; scripts/quotes.py copies them."""
    tables = {"five-seeds": summary_table(rows), "seeds": seeds_table(rows)}
    parts = ["Written by `python benchmarks/full_run.py --record`."]
    parts += [f"<!-- {n} -->\n\n{t}\n\n<!-- /{n} -->" for n, t in tables.items()]
    target.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    print(f"tables written to {target}")


async def main() -> None:
    """Run the seeds one after another."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--held-out", type=int, default=1000)
    parser.add_argument("--split-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--learning-rate", type=float, default=None)
    parser.add_argument("--model", default=None)
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"))
    parser.add_argument("--record", type=Path, metavar="FILE", help="write the tables")
    parser.add_argument("--rows", type=Path, metavar="JSON", help="of an earlier run")
    options = parser.parse_args()
    if options.rows is not None:
        rows = json.loads(options.rows.read_text(encoding="utf-8"))
        report(rows)
        if options.record is not None:
            record(rows, options.record)
        return
    rows = []
    for seed in options.seeds:
        rows.append(await run_seed(seed, options))
        report(rows[-1:])
    print("\nAll seeds")
    report(rows)
    target = options.runs_dir / f"full-run-{time.strftime('%Y%m%d-%H%M%S')}.json"
    target.write_text(json.dumps(rows, indent=1))
    print(f"written to {target}")
    if options.record is not None:
        record(rows, options.record)


if __name__ == "__main__":
    asyncio.run(main())
