"""``python -m rlhelpers.local``: the service as a process of its own."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from types import FrameType

from .faults import Fault
from .server import LocalService, PortTaken


def main() -> int:
    """Serve until told to stop; prints where, and with which key.

    Returns 0 when told to, 1 if it could not start or stopped by itself.
    """
    arguments, models = _read_arguments()
    stop = _stop_on_signals()
    if arguments.stop_with_stdin:
        _stop_with_stdin(stop)
    service = LocalService(
        arguments.state_dir,
        models=models,
        port=arguments.port,
        faults=arguments.fault,
    )
    try:
        service.start()
    except (PortTaken, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    try:
        print(f"base_url={service.base_url}", flush=True)
        print(f"api_key={service.api_key}", flush=True)
        while not stop.wait(0.5):
            if not service.running:
                print("the service stopped by itself", file=sys.stderr)
                return 1
        print("stopping", file=sys.stderr)
    finally:
        service.close()
    return 0


def _read_arguments() -> tuple[argparse.Namespace, dict[str, str]]:
    """The command line, and the models that it names."""
    parser = argparse.ArgumentParser(
        prog="python -m rlhelpers.local",
        description="Serve the local training service.",
    )
    parser.add_argument("--state-dir", default="runs/service")
    parser.add_argument("--port", type=int, default=0, help="0 picks a free one")
    parser.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="serve a further causal LM: a Hugging Face folder, or a .gguf file",
    )
    parser.add_argument(
        "--fault",
        action="append",
        default=[],
        type=_fault,
        metavar="ENDPOINT=STATUS*TIMES",
        help="answer the first requests for an endpoint amiss, to try a client on it: "
        "completions=503*3, or retrieve_future=paused_capacity*20",
    )
    parser.add_argument(
        "--stop-with-stdin",
        action="store_true",
        help="stop when standard input ends, as it does with the program that holds it",
    )
    arguments = parser.parse_args()
    if not 0 <= arguments.port < 2**16:
        parser.error(f"--port must be from 0 to 65535, got {arguments.port}")
    models = {}
    for item in arguments.model:
        name, separator, path = item.partition("=")
        if not separator:
            parser.error(f"--model takes NAME=PATH, got {item!r}")
        models[name] = path
    return arguments, models


def _fault(text: str) -> Fault:
    try:
        return Fault.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _stop_on_signals() -> threading.Event:
    """An event that Ctrl-C or a termination signal sets; a second one kills."""
    stop = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    return stop


def _stop_with_stdin(stop: threading.Event) -> None:
    """Set ``stop`` when standard input ends; what is written there is dropped."""
    descriptor = sys.stdin.fileno()

    def read() -> None:
        # Not through sys.stdin, whose lock would be held while the interpreter exits.
        while os.read(descriptor, 4096):
            pass
        stop.set()

    threading.Thread(target=read, name="rlhelpers-local-stdin", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
