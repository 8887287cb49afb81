"""Kill the service process at random moments of saving, again and again.

    python benchmarks/kill_service.py             # 50 times
    python benchmarks/kill_service.py --times 5

After every kill all acknowledged checkpoints and promoted models must load, and
everything that is listed must be complete. Prints one line a kill and a summary.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from local_crash import (
    Acknowledged,
    ServiceProcess,
    check_what_is_left,
    save_until_killed,
)
from local_helpers import write_tiny_model


def main() -> None:
    """Kill, check, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    acknowledged, interrupted = Acknowledged(), 0
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder) / "state"
        model = write_tiny_model(Path(folder) / "model")
        for number in range(options.times):
            before = len(acknowledged.training)
            service = ServiceProcess(state, model)
            moment = random.Random(f"{options.seed}/{number}")
            save_until_killed(service, moment, acknowledged)
            drafts = len(list(state.rglob(".draft-*")))
            listed = check_what_is_left(state, acknowledged)
            new = len(acknowledged.training) - before
            print(
                f"kill {number + 1:3d}: {new:3d} checkpoints acknowledged, {listed} "
                f"listed in all, {drafts} drafts left so far",
                flush=True,
            )
            interrupted = drafts
    print(
        f"{options.times} kills, {len(acknowledged.training)} training checkpoints and "
        f"{len(acknowledged.promoted)} promoted models acknowledged: all of them load; "
        f"{interrupted} writes were cut short and none of them is listed"
    )


if __name__ == "__main__":
    main()
