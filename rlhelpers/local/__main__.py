"""``python -m rlhelpers.local``: the service as a process of its own."""

from __future__ import annotations

import argparse
import signal
import sys

from .server import LocalService


def main() -> int:
    """Serve until interrupted; prints where, and with which key."""
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
    arguments = parser.parse_args()
    models = {}
    for item in arguments.model:
        name, separator, path = item.partition("=")
        if not separator:
            parser.error(f"--model takes NAME=PATH, got {item!r}")
        models[name] = path
    # A plain termination signal stops the service as cleanly as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with LocalService(
        arguments.state_dir, models=models, port=arguments.port
    ) as service:
        print(f"base_url={service.base_url}", flush=True)
        print(f"api_key={service.api_key}", flush=True)
        try:
            service.wait()
        except KeyboardInterrupt:
            print("stopping", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
