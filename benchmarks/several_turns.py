"""The guessing game on several seeds: does training teach strategy, and how fast?

    python benchmarks/several_turns.py                # seeds 0 to 4
    python benchmarks/several_turns.py --quick        # two small steps of one seed
    python benchmarks/several_turns.py --record data/several_turns.md

Every seed trains a fresh adapter of the tiny guesser through the SDK, HTTP and HUD, and
plays the same held-out games greedily before and after. Prints found games and mean
guesses, the numbers left after each guess beside those of bisection, and the time of a
step by part. Writes the same as JSON beside the runs; ``--record`` also writes the
tables that other documents quote, ``--rows`` makes them from an earlier JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hud.eval import LocalRuntime

from rlhelpers import EpisodeAgent, TrainConfig, connect, evaluate, train
from rlhelpers.analysis import wilson_interval
from rlhelpers.guessing import (
    GamesSummary,
    bisection_left,
    env,
    guesses_saved,
    make_guessing_tasks,
    mean_range_left,
    summarize_games,
)
from rlhelpers.models import resolve_preset

PARTS = ("sampling_seconds", "training_seconds", "hud_seconds", "other_seconds")


async def run_seed(seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train and evaluate one seed; everything that the report needs."""
    config = TrainConfig.from_preset(
        resolve_preset("tiny-guesser"),
        seed=seed,
        steps=2 if options.quick else options.steps,
        tasks_per_step=2 if options.quick else None,
        learning_rate=options.learning_rate,
    )
    training, held_out = make_guessing_tasks(
        train=config.steps * config.tasks_per_step,
        held_out=8 if options.quick else options.held_out,
        seed=options.split_seed,
    )
    with connect(
        model="tiny-guesser",
        runs_dir=options.runs_dir,
        seed=seed,
        task_runtime=LocalRuntime(env),
        agent=EpisodeAgent,
        quiet=True,
    ) as session:
        folder = session.new_run_dir(f"several-turns-seed{seed}")
        before = await evaluate(session, held_out, phase="before", run_dir=folder)
        result = await train(
            session, training, config=config, run_dir=folder, progress=False
        )
        after = await evaluate(
            session, held_out, phase="after", sampler=result.sampler, run_dir=folder
        )
    total = sum(row.seconds for row in result.metrics)
    return {
        "seed": seed,
        "before": dataclasses.asdict(summarize_games(before.records)),
        "after": dataclasses.asdict(summarize_games(after.records)),
        "saved": guesses_saved(before.records, after.records),
        "left": {
            "before": mean_range_left(before.records),
            "after": mean_range_left(after.records),
            "bisection": bisection_left(before.records),
        },
        "rewards": [row.reward_mean for row in result.metrics],
        "max_ratio_error": max(row.max_ratio_error or 0.0 for row in result.metrics),
        "train_seconds": result.seconds,
        "step_share": {
            part.removesuffix("_seconds"): sum(getattr(r, part) for r in result.metrics)
            / total
            for part in PARTS
        },
    }


def report(row: dict[str, Any]) -> None:
    """Print what one seed showed."""
    print(f"seed {row['seed']}")
    for side in ("before", "after"):
        print(f"  {side:7}{_cells(row[side], ' | ')}")
    for name, left in row["left"].items():
        print(f"  {name:10} left: " + "  ".join(f"{value:5.2f}" for value in left))
    mean, low, high = row["saved"]
    print(f"  {mean:.2f} guesses fewer ({low:.2f} to {high:.2f})")
    print("  rewards " + " ".join(f"{value:.2f}" for value in row["rewards"]))
    shares = "  ".join(
        f"{name} {share:.0%}" for name, share in row["step_share"].items()
    )
    print(f"  {row['train_seconds']:.1f} s of training: {shares}")
    print(f"  largest |ratio - 1| {row['max_ratio_error']:.1e}")


def _cells(side: dict[str, Any], between: str) -> str:
    summary = GamesSummary(**side)
    low, high = wilson_interval(summary.found, summary.games)
    found = f"{summary.found / summary.games:.1%}"
    return between.join(
        (
            f"{found} ({100 * low:.1f} to {100 * high:.1f})",
            f"{summary.mean_guesses:.2f}",
            f"{summary.wasted:.1%}",
        )
    )


def seeds_table(rows: list[dict[str, Any]]) -> str:
    """One line before training, and one for each seed after it."""
    lines = [
        "| | found | mean guesses | guesses ruled out before |",
        "|---|---|---|---|",
        f"| before | {_cells(rows[0]['before'], ' | ')} |",
    ]
    lines += [
        f"| after, seed {row['seed']} | {_cells(row['after'], ' | ')} |" for row in rows
    ]
    return "\n".join(lines)


def left_table(rows: list[dict[str, Any]]) -> str:
    """Mean numbers left after each guess; a range where the seeds differ."""
    headings = {
        "before": "before",
        "after": f"after, {len(rows)} seeds",
        "bisection": "bisection",
    }
    count = len(rows[0]["left"]["before"])
    lines = [
        "| guesses made | " + " | ".join(map(str, range(count))) + " |",
        "|---" + "|---:" * count + "|",
    ]
    for name, heading in headings.items():
        cells = []
        for values in zip(*(row["left"][name] for row in rows), strict=True):
            low, high = f"{min(values):.1f}", f"{max(values):.1f}"
            cells.append(low if low == high else f"{low} to {high}")
        lines.append(f"| {heading} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def record(rows: list[dict[str, Any]], target: Path) -> None:
    """Write the tables that other documents quote; scripts/quotes.py copies them."""
    tables = {"seeds": seeds_table(rows), "left": left_table(rows)}
    parts = ["Written by `python benchmarks/several_turns.py --record`."]
    parts += [f"<!-- {n} -->\n\n{t}\n\n<!-- /{n} -->" for n, t in tables.items()]
    target.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    print(f"tables written to {target}")


async def main(arguments: Sequence[str] | None = None) -> None:
    """Run the seeds one after another."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--held-out", type=int, default=128)
    parser.add_argument("--split-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--learning-rate", type=float, default=None)
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"))
    parser.add_argument("--quick", action="store_true", help="two small steps, seed 0")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write the tables")
    parser.add_argument("--rows", type=Path, metavar="JSON", help="of an earlier run")
    options = parser.parse_args(arguments)
    if options.rows is not None:
        rows = json.loads(options.rows.read_text(encoding="utf-8"))
    else:
        rows = []
        for seed in [0] if options.quick else options.seeds:
            rows.append(await run_seed(seed, options))
            report(rows[-1])
        stamp = time.strftime("%Y%m%d-%H%M%S")
        target = options.runs_dir / f"several-turns-{stamp}.json"
        target.write_text(json.dumps(rows, indent=1))
        print(f"written to {target}")
    print(f"\n{seeds_table(rows)}\n\n{left_table(rows)}")
    if options.record is not None:
        record(rows, options.record)


if __name__ == "__main__":
    asyncio.run(main())
