"""Four programs train on one service for a thousand steps; does it stay as it was?

    python benchmarks/soak.py                # 1,000 steps, 250 a client
    python benchmarks/soak.py --steps 40

The service is a process of its own, the clients use the real SDK. A step samples a
group of 8 from a new snapshot, runs forward_backward and optim_step; every 10th saves
a training checkpoint, and every 20th ends the session and resumes in a new one. Before
that, the first client trains alone on another service: both times it must get the same
numbers. Prints the service's memory, its files, errors, and steps a second.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
# The telemetry of a client that ends soon after it began delays its end by seconds.
os.environ["TINKER_TELEMETRY"] = "0"

from local_crash import ServiceProcess
from local_helpers import write_tiny_model
from local_soak import Habits, Step, folder_megabytes, resident_megabytes, train

HABITS = Habits()


def alone(folder: Path, model: Path, steps: int) -> list[Step]:
    """The first client's steps, with the service to itself."""
    service = ServiceProcess(folder / "alone", model, errors=folder / "errors")
    try:
        (found,) = train(service.endpoint, clients=1, steps=steps, habits=HABITS)
    finally:
        service.stop()
    return found


def together(
    folder: Path, model: Path, clients: int, steps: int, early: int
) -> list[list[Step]]:
    """All clients' steps; prints what they cost the service."""
    state = folder / "together"
    service = ServiceProcess(state, model, errors=folder / "errors")
    pid = service.process.pid
    print(f"memory at start         {resident_megabytes(pid):8.1f} MB", flush=True)

    def report(total: int) -> None:
        if total == early or total % 100 == 0:
            used, files = resident_megabytes(pid), folder_megabytes(state / "sessions")
            print(
                f"after {total:5d} steps       {used:8.1f} MB, sampler checkpoints "
                f"{files:.1f} MB on disk",
                flush=True,
            )

    try:
        began = time.perf_counter()
        found = train(
            service.endpoint,
            clients=clients,
            steps=steps,
            habits=HABITS,
            on_step=report,
        )
        seconds = time.perf_counter() - began
        print(f"memory at end           {resident_megabytes(pid):8.1f} MB")
        left = len(list((state / "sessions").iterdir()))
        print(f"sessions left on disk   {left:8d}")
        print(f"steps per second        {clients * steps / seconds:8.1f}")
    finally:
        code = service.stop()
    print(f"exit code               {code:8d}")
    return found


def main() -> None:
    """Train alone, train together, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000, help="of all together")
    parser.add_argument("--clients", type=int, default=4)
    options = parser.parse_args()
    steps = max(options.steps // options.clients, 1)
    early = min(100, options.steps // 2)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_tiny_model(folder / "model")
        try:
            expected = alone(folder, model, steps)
            found = together(folder, model, options.clients, steps, early)
        except ExceptionGroup as errors:
            print(f"errors                  {len(errors.exceptions):8d}")
            raise
    losses = [step.loss for client in found for step in client]
    print(f"steps                   {len(losses):8d}")
    print(f"errors                  {0:8d}")
    print(f"losses not finite       {sum(not math.isfinite(x) for x in losses):8d}")
    same = sum(a == b for a, b in zip(expected, found[0], strict=True))
    print(f"client 1 as when alone  {same:8d} of {steps} steps, to the last digit")
    if same < steps:
        sys.exit("other clients changed what the first one got")


if __name__ == "__main__":
    main()
