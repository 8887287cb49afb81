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
    flag,
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
those weights and that optimizer. On the local backend a run of 1,000 rollouts or more
has the service in a process of its own, which is faster and gives the same results.
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
    layout: dict[str, Any] = {
        "formatter_class": argparse.RawDescriptionHelpFormatter,
        "allow_abbrev": False,
    }
    parser = argparse.ArgumentParser(
        prog="python -m rlhelpers",
        description="Calibrate, train and evaluate a policy without a notebook.",
        epilog=_EPILOG,
        **layout,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, description: str, epilog: str = "") -> argparse.ArgumentParser:
        return commands.add_parser(
            name,
            help=description,
            description=description,
            epilog=f"{epilog}{_EPILOG}\n{_presets()}",
            **layout,
        )

    _add_flags(
        add(
            "check", "Check tasks of your own, without a model: can they be trained on?"
        ),
        "the check",
        ("samples", "tasks_per_step", "evaluation_tasks", "max_tokens"),
        tasks_per_step="as for train",
    )
    tasks, rollouts, samples = CALIBRATION
    default = f" (default: {tasks} tasks of {rollouts} rollouts)"
    _add_flags(
        add("calibrate", "Sample some tasks: is there anything to learn from?"),
        "the calibration",
        ("tasks_per_step", "group_size", "max_tokens", "debug_samples"),
        tasks_per_step=f"{_FLAGS['tasks_per_step']['help']}{default}",
        group_size=f"{_FLAGS['group_size']['help']}{default}",
        debug_samples="sample texts to print beside their rewards "
        f"(default: {samples})",
    )
    _add_flags(
        add("train", "Train, with evaluations around it.", _TRAIN_EPILOG),
        "the training",
        _TRAINING,
    )
    _add_flags(
        add("evaluate", "Evaluate greedily on held-out tasks."),
        "the evaluation",
        _EVALUATION,
        resume_from="what to evaluate: where a run stands, on the tasks that it held "
        "out, or a training checkpoint (default: the base model). With other tasks, "
        "those that the run was trained on are left out",
        steps="as given to train, like the next: the three numbers decide which tasks "
        "are held out",
        tasks_per_step="as for train",
    )
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


# -- flags ------------------------------------------------------------------------


def _text(metavar: str, said: str) -> dict[str, Any]:
    return {"metavar": metavar, "help": said}


def _whole(said: str) -> dict[str, Any]:
    return {"type": int, "metavar": "N", "help": said}


def _number(said: str) -> dict[str, Any]:
    return {"type": float, "metavar": "X", "help": said}


def _switch(said: str) -> dict[str, Any]:
    return {"action": "store_true", "default": None, "help": said}


_NAMES = "; ".join(
    f"{backend}: " + ", ".join(p.name for p in PRESETS.values() if p.backend == backend)
    for backend in BACKENDS
)

#: Flag → how argparse takes it. The names are those of ``Settings``.
_FLAGS: dict[str, dict[str, Any]] = {
    # where it runs
    "backend": {
        "choices": BACKENDS,
        "help": "local (default): the training service of this package, in this "
        "process; fireworks: needs FIREWORKS_API_KEY, and costs money",
    },
    "model": _text("NAME", f"a preset's name ({_NAMES})"),
    "token_limit": _whole(
        "most tokens that this call may use, checked before each request (default: no "
        "limit locally, 10 million on fireworks)"
    ),
    "prices": {
        "type": float,
        "nargs": 3,
        "metavar": ("PREFILL", "SAMPLED", "TRAINED"),
        "help": "dollars per million tokens of each kind, for the cost in the banner",
    },
    "seed": _whole("of adapter, tasks and rollouts (default: 0)"),
    "runs_dir": _text(
        "DIR",
        "holds all runs, and the local service's checkpoints in DIR/service (default: "
        "runs)",
    ),
    "run_dir": _text(
        "DIR", "this run's own folder (default: a new one in the runs folder)"
    ),
    # which tasks
    "min_a": _whole("smallest first operand of the multiplication tasks"),
    "max_a": _whole("largest first operand of the multiplication tasks"),
    "min_b": _whole("smallest second operand of the multiplication tasks"),
    "max_b": _whole("largest second operand of the multiplication tasks"),
    "tasks_file": _text(
        "PATH",
        "tasks of your own instead: a .json or .jsonl file of rows with env, id and "
        "args, or HUD tasks in a .py file or folder",
    ),
    "env_path": _text(
        "PATH",
        "the HUD environment of these tasks, a .py file or folder; not needed where "
        "the Python source of the tasks brings it along",
    ),
    "taskset": _text(
        "NAME",
        "a taskset hosted by HUD instead; needs HUD_API_KEY (not tried with an "
        "account)",
    ),
    # what is done with them
    "samples": _text(
        "PATH",
        "labelled replies, a .jsonl file of rows with task, reply, reward (a number "
        "or [least, most]) and why",
    ),
    "steps": _whole("optimizer steps"),
    "tasks_per_step": _whole("tasks of a step, each of which makes one group"),
    "group_size": _whole("rollouts of each task, at least 2"),
    "max_tokens": _whole("longest reply, in tokens"),
    "learning_rate": _number("Adam's learning rate"),
    "loss_fn": {
        "choices": LOSSES,
        "help": f"the service's loss (default: {LOSSES[0]})",
    },
    "require_update": _switch("stop at a step whose groups are all flat"),
    "fixed_tasks": _switch(
        "the same tasks at every step; the policy may then learn these tasks and not "
        "the skill"
    ),
    "checkpoint_every": _whole("steps between checkpoints to resume from (default: 5)"),
    "kl_every": _whole(
        "steps between measurements of the KL to the base model; 0 is never (default: "
        "5 locally; never on fireworks, where its tokens are paid for)"
    ),
    "kl_coefficient": _number(
        "holds the policy near the base model, which then reads every trained rollout "
        "once more (default: 0, off)"
    ),
    "updates_per_batch": _whole(
        "optimizer steps on each batch; above 1 prefer ppo or cispo (default: 1)"
    ),
    "evaluation_tasks": _whole("tasks held out of training and evaluated"),
    "eval_before": {
        "action": argparse.BooleanOptionalAction,
        "help": "evaluate before training too (default: yes locally, no on fireworks); "
        "--evaluation-tasks 0 evaluates neither before nor after",
    },
    "resume_from": _text(
        "RUN|CHECKPOINT",
        "a run's folder, to go on with that run, or the path of a training checkpoint "
        "(…/state-0005), to begin a new run from it",
    ),
    "debug_samples": _whole("replies without a reward to print (default: none)"),
}

_PLACE = ("backend", "model", "token_limit", "prices", "seed", "runs_dir", "run_dir")
_TASKS = ("min_a", "max_a", "min_b", "max_b", "tasks_file", "env_path", "taskset")
_TRAINING = (
    "steps",
    "tasks_per_step",
    "group_size",
    "max_tokens",
    "learning_rate",
    "loss_fn",
    "require_update",
    "fixed_tasks",
    "checkpoint_every",
    "kl_every",
    "kl_coefficient",
    "updates_per_batch",
    "evaluation_tasks",
    "eval_before",
    "resume_from",
)
_EVALUATION = (
    "resume_from",
    "evaluation_tasks",
    "max_tokens",
    "debug_samples",
    "steps",
    "tasks_per_step",
)
_ALIASES = {"evaluation_tasks": ("--eval-tasks",)}


def _add_flags(
    parser: argparse.ArgumentParser, title: str, names: Sequence[str], **said: str
) -> None:
    """Add the flags that all commands with tasks share, then a command's own.

    Args:
        parser: The command's.
        title: Of the group of its own flags.
        names: These flags, in order.
        said: What the help says of a flag in place of :data:`_FLAGS`.
    """
    for heading, group in (
        ("where it runs", _PLACE),
        ("which tasks", _TASKS),
        (title, names),
    ):
        flags = parser.add_argument_group(heading)
        for name in group:
            how = {**_FLAGS[name], "help": said.get(name, _FLAGS[name]["help"])}
            flags.add_argument(flag(name), *_ALIASES.get(name, ()), **how)
