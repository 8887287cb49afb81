"""Draw the learning curve of the newest full run into docs/learning_curve.png.

    make run ARGS="--only 04"            # or run notebook 04
    python benchmarks/learning_curve.py

The picture in the README is made by this, from what a run wrote and from nothing else.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rlhelpers.analysis import summarize_outcomes
from rlhelpers.models import DEFAULT_MODEL, resolve_preset
from rlhelpers.plots import plot_learning_curve
from rlhelpers.runs import find_run

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Draw the curve; 1 if there is no finished run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs-dir", type=Path, default=ROOT / "runs")
    parser.add_argument("--model", default=DEFAULT_MODEL["local"])
    parser.add_argument(
        "--output", type=Path, default=ROOT / "docs" / "learning_curve.png"
    )
    options = parser.parse_args()
    run = find_run(options.runs_dir, resolve_preset(options.model))
    if run is None:
        print(
            f"no finished run of {options.model} in {options.runs_dir}: run notebook "
            "04 first, or give --runs-dir",
            file=sys.stderr,
        )
        return 1
    shares = {}
    for step, records in ((0, run.before), (run.steps, run.after)):
        summary = summarize_outcomes(records)
        shares[step] = summary.correct / summary.n
    figure = plot_learning_curve(run.metrics, held_out=shares)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.output, dpi=120)
    print(f"{run}\nwritten to {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
