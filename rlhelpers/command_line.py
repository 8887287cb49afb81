"""The command line: its flags, and what its exit codes mean.

    python -m rlhelpers check --tasks-file … --env-path …
    python -m rlhelpers calibrate
    python -m rlhelpers train --steps 10
    python -m rlhelpers evaluate --resume-from runs/full-run-…
    python -m rlhelpers diagnose runs/full-run-…
    python -m rlhelpers sessions --release

Exit codes: 0 done; 1 stopped half way, or ``check`` or ``diagnose`` found something;
2 refused before anything was sent, with the value and the remedy; 130 interrupted.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from typing import Any

from rlhelpers.command_settings import (
    as_flags,
    changed_settings,
    read_settings,
)
from rlhelpers.commands import (
    CALIBRATION,
    Stopped,
    calibrate_command,
    check_command,
    diagnose_command,
    evaluate_command,
    sessions_command,
    train_command,
)
from rlhelpers.models import BACKENDS, PRESETS
from rlhelpers.preflight import MissingKey, TokenizerUnavailable
from rlhelpers.refusals import ServiceRefused
from rlhelpers.tables import markdown_table, plain_text
from rlhelpers.training import LOSSES

_REFUSALS = (ValueError, OSError, MissingKey, TokenizerUnavailable)

_EPILOG = """\
A flag that is left out takes the preset's value. Nothing is sent before the banner is
printed. The default backend is local: no key, no network, no cost.
Exit codes: 0 done; 1 stopped half way (or check or diagnose found something); 2 refused
before anything was sent; 130 interrupted, and resumable.
"""
_TRAIN_EPILOG = """\
Ctrl-C is safe: the step in progress is finished or leaves no trace, a checkpoint is
saved, and the command to go on is printed. --resume-from RUN needs no other flag; with
a larger --steps a finished run goes on. --resume-from CHECKPOINT begins a new run from
those weights and that optimizer.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The arguments; default: those of the process.

    Returns:
        The exit code.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal without our arrows and signs shows question marks instead.
            stream.reconfigure(errors="replace")
    options = vars(_parser().parse_args(argv))
    command = options.pop("command")
    given = {name: value for name, value in options.items() if value is not None}
    try:
        return _dispatch(command, given)
    except _REFUSALS as error:
        _complain(f"refused: {error}")
        return 2
    except (Stopped, ServiceRefused) as error:
        _complain(f"stopped: {error}")
        return 1
    except KeyboardInterrupt as error:
        _complain(str(error) or "interrupted")
        return 130


def _complain(message: str) -> None:
    print(as_flags(message), file=sys.stderr, flush=True)


def _dispatch(command: str, given: dict[str, Any]) -> int:
    if command == "diagnose":
        return int(diagnose_command(given["run"]))
    if command == "sessions":
        sessions_command(given.get("runs_dir", "runs"), given.get("release"))
        return 0
    samples = given.pop("samples", None)
    settings, folder = read_settings(given)
    changed = changed_settings(given, folder) if folder is not None else []
    if command == "check":
        return int(check_command(settings, samples))
    if command == "calibrate":
        calibrate_command(settings)
    elif command == "evaluate":
        evaluate_command(settings, folder, own=bool(changed))
    elif changed:
        raise ValueError(
            f"the run in {folder} cannot go on with {', '.join(changed)}: leave that "
            "out, or start a new run"
        )
    else:
        train_command(settings, folder)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rlhelpers",
        description="Calibrate, train and evaluate a policy without a notebook.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, description: str, epilog: str = "") -> argparse.ArgumentParser:
        return commands.add_parser(
            name,
            help=description,
            description=description,
            epilog=f"{epilog}{_EPILOG}\n{_presets()}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    checking = add(
        "check", "Check tasks of your own, without a model: can they be trained on?"
    )
    _add_place(checking)
    _add_tasks(checking)
    _add_check(checking)

    calibrating = add(
        "calibrate", "Sample some tasks: is there anything to learn from?"
    )
    _add_place(calibrating)
    _add_tasks(calibrating)
    _add_calibration(calibrating)

    training = add("train", "Train, with evaluations around it.", _TRAIN_EPILOG)
    _add_place(training)
    _add_tasks(training)
    _add_training(training)

    evaluating = add("evaluate", "Evaluate greedily on held-out tasks.")
    _add_place(evaluating)
    _add_tasks(evaluating)
    _add_evaluation(evaluating)

    diagnosing = add("diagnose", "Say what looks wrong in a run, from its files alone.")
    diagnosing.add_argument(
        "run", metavar="RUN", help="the run's folder, finished or not"
    )

    listing = add(
        "sessions",
        "List sessions at Fireworks that were never given back, or end them.",
    )
    listing.add_argument(
        "--runs-dir", metavar="DIR", help="as for train (default: runs)"
    )
    listing.add_argument(
        "--release",
        nargs="*",
        metavar="ID",
        help="end these sessions; without an id those whose process is gone, except "
        "the ones that were left open on purpose. Their sampler checkpoints go",
    )
    return parser


def _presets() -> str:
    """The presets' values, which stand in for flags that are left out."""
    head = ["preset", "steps", "tasks per step", "group size", "max tokens"]
    head += ["learning rate", "operands", "held out"]
    rows = [
        [
            p.name,
            str(p.steps),
            str(p.tasks_per_step),
            str(p.group_size),
            str(p.max_tokens),
            f"{p.learning_rate:g}",
            f"{p.operands[0]}-{p.operands[1]}",
            str(p.evaluation_tasks),
        ]
        for p in PRESETS.values()
    ]
    return plain_text(markdown_table(head, rows))


def _add_place(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("where it runs")
    group.add_argument(
        "--backend",
        choices=BACKENDS,
        help="local (default): the training service of this package, in this process; "
        "fireworks: needs FIREWORKS_API_KEY, and costs money",
    )
    names = "; ".join(
        f"{backend}: "
        + ", ".join(p.name for p in PRESETS.values() if p.backend == backend)
        for backend in BACKENDS
    )
    group.add_argument("--model", metavar="NAME", help=f"a preset's name ({names})")
    group.add_argument(
        "--token-limit",
        type=int,
        metavar="N",
        help="most tokens that this call may use, checked before each request "
        "(default: no limit locally, 10 million on fireworks)",
    )
    group.add_argument(
        "--prices",
        type=float,
        nargs=3,
        metavar=("PREFILL", "SAMPLED", "TRAINED"),
        help="dollars per million tokens of each kind, for the cost in the banner",
    )
    group.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help="of adapter, tasks and rollouts (default: 0)",
    )
    group.add_argument(
        "--runs-dir",
        metavar="DIR",
        help="holds all runs, and the local service's checkpoints in DIR/service "
        "(default: runs)",
    )
    group.add_argument(
        "--run-dir",
        metavar="DIR",
        help="this run's own folder (default: a new one in the runs folder)",
    )


def _add_tasks(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("which tasks")
    for operand, word in (("a", "first"), ("b", "second")):
        for end, size in (("min", "smallest"), ("max", "largest")):
            group.add_argument(
                f"--{end}-{operand}",
                type=int,
                metavar="N",
                help=f"{size} {word} operand of the multiplication tasks",
            )
    group.add_argument(
        "--tasks-file",
        metavar="PATH",
        help="tasks of your own instead: a .json or .jsonl file of rows with env, id "
        "and args, or HUD tasks in a .py file or folder",
    )
    group.add_argument(
        "--env-path",
        metavar="PATH",
        help="the HUD environment of these tasks, a .py file or folder; not needed "
        "where the Python source of the tasks brings it along",
    )
    group.add_argument(
        "--taskset",
        metavar="NAME",
        help="a taskset hosted by HUD instead; needs HUD_API_KEY (not tried with an "
        "account)",
    )


def _add_sampling(group: Any, default: str = "") -> None:
    group.add_argument(
        "--tasks-per-step",
        type=int,
        metavar="N",
        help="tasks of a step, each of which makes one group" + default,
    )
    group.add_argument(
        "--group-size",
        type=int,
        metavar="N",
        help="rollouts of each task, at least 2" + default,
    )


def _add_length(group: Any) -> None:
    group.add_argument(
        "--max-tokens", type=int, metavar="N", help="longest reply, in tokens"
    )


def _add_held_out(group: Any) -> None:
    group.add_argument(
        "--evaluation-tasks",
        "--eval-tasks",
        dest="evaluation_tasks",
        type=int,
        metavar="N",
        help="tasks held out of training and evaluated",
    )


def _add_check(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the check")
    group.add_argument(
        "--samples",
        metavar="PATH",
        help="labelled replies, a .jsonl file of rows with task, reply, reward (a "
        "number or [least, most]) and why",
    )
    group.add_argument("--tasks-per-step", type=int, metavar="N", help="as for train")
    _add_held_out(group)
    _add_length(group)


def _add_calibration(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the calibration")
    tasks, rollouts, samples = CALIBRATION
    _add_sampling(group, f" (default: {tasks} tasks of {rollouts} rollouts)")
    _add_length(group)
    group.add_argument(
        "--debug-samples",
        type=int,
        metavar="N",
        help=f"sample texts to print beside their rewards (default: {samples})",
    )


def _add_training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the training")
    group.add_argument("--steps", type=int, metavar="N", help="optimizer steps")
    _add_sampling(group)
    _add_length(group)
    group.add_argument(
        "--learning-rate", type=float, metavar="X", help="Adam's learning rate"
    )
    group.add_argument(
        "--loss-fn",
        choices=LOSSES,
        help=f"the service's loss (default: {LOSSES[0]})",
    )
    group.add_argument(
        "--require-update",
        action="store_true",
        default=None,
        help="stop at a step whose groups are all flat",
    )
    group.add_argument(
        "--fixed-tasks",
        action="store_true",
        default=None,
        help="the same tasks at every step; the policy may then learn these tasks and "
        "not the skill",
    )
    group.add_argument(
        "--checkpoint-every",
        type=int,
        metavar="N",
        help="steps between checkpoints to resume from (default: 5)",
    )
    group.add_argument(
        "--kl-every",
        type=int,
        metavar="N",
        help="steps between measurements of the KL to the base model; 0 is never "
        "(default: 5 locally; never on fireworks, where its tokens are paid for)",
    )
    group.add_argument(
        "--kl-coefficient",
        type=float,
        metavar="X",
        help="holds the policy near the base model, which then reads every trained "
        "rollout once more (default: 0, off)",
    )
    group.add_argument(
        "--updates-per-batch",
        type=int,
        metavar="N",
        help="optimizer steps on each batch; above 1 prefer ppo or cispo (default: 1)",
    )
    _add_held_out(group)
    group.add_argument(
        "--eval-before",
        action=argparse.BooleanOptionalAction,
        help="evaluate before training too (default: yes locally, no on fireworks); "
        "--evaluation-tasks 0 evaluates neither before nor after",
    )
    group.add_argument(
        "--resume-from",
        metavar="RUN|CHECKPOINT",
        help="a run's folder, to go on with that run, or the path of a training "
        "checkpoint (…/state-0005), to begin a new run from it",
    )


def _add_evaluation(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the evaluation")
    group.add_argument(
        "--resume-from",
        metavar="RUN|CHECKPOINT",
        help="what to evaluate: where a run stands, on the tasks that it held out, or "
        "a training checkpoint (default: the base model). With other tasks, those "
        "that the run was trained on are left out",
    )
    _add_held_out(group)
    _add_length(group)
    group.add_argument(
        "--debug-samples",
        type=int,
        metavar="N",
        help="replies without a reward to print (default: none)",
    )
    group.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="as given to train, like the next: the three numbers decide which tasks "
        "are held out",
    )
    group.add_argument("--tasks-per-step", type=int, metavar="N", help="as for train")
