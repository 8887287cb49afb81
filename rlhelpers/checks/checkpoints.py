"""Notebook 06: which checkpoint, what Adam remembers, and where a resume goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index
from typing import Any

from rlhelpers.checks.marking import (
    call,
    check_choices,
    check_number,
    is_function,
    shown,
)

#: What each purpose needs, and what the other kind lacks for it.
_PURPOSES: Mapping[str, tuple[str, str]] = {
    "go on training tomorrow": (
        "training",
        "a sampler checkpoint has no optimizer, and is gone by tomorrow",
    ),
    "sample the next step's rollouts": (
        "sampler",
        "a training checkpoint cannot be sampled until it is resumed",
    ),
    "evaluate step 15 a week later": (
        "training",
        "by then its session has ended, and its sampler checkpoints with it",
    ),
    "promote to a model": (
        "sampler",
        "a model has no optimizer; resume, save a sampler, and promote that",
    ),
}


def check_checkpoint_kinds(answers: object) -> bool:
    """The kind of checkpoint to have for each purpose.

    Args:
        answers: Purpose → ``"sampler"`` or ``"training"``; ``...`` where not tried yet.

    Returns:
        Whether every purpose has its kind.
    """
    return check_choices(
        answers,
        {purpose: kind for purpose, (kind, _) in _PURPOSES.items()},
        {purpose: hint for purpose, (_, hint) in _PURPOSES.items()},
        options=("sampler", "training"),
        wanted="a kind",
    )


def check_adam_step(
    gradients: Sequence[float], answer: object, *, beta1: float, beta2: float
) -> bool:
    """The size of Adam's last step, in units of the learning rate.

    Args:
        gradients: All gradients of one parameter, the last step's included.
        answer: The learner's number, to two decimals; ``...`` if not tried yet.
        beta1, beta2: The decay of Adam's two moments.
    """
    mean = square = 0.0
    for gradient in gradients:
        mean = beta1 * mean + (1 - beta1) * gradient
        square = beta2 * square + (1 - beta2) * gradient**2
    steps = len(gradients)
    right = mean / (1 - beta1**steps) / (square / (1 - beta2**steps)) ** 0.5
    last = gradients[-1]
    return check_number(
        answer,
        right,
        wanted="a number, to two decimals",
        well=f"right: a step of {right:.2f} learning rates",
        slips=[
            (
                (last > 0) - (last < 0),
                "that is a fresh Adam, which has forgotten the gradients before",
            ),
            (
                mean / square**0.5,
                "close: now correct both moments for their start at zero",
            ),
            (
                -right,
                "the size is right, the sign is not: that of the corrected mean counts",
            ),
        ],
        hint="update both moments with the last gradient, correct, divide",
        tolerance=0.011,
    )


#: (recorded steps, step of the checkpoint, tasks per step)
_STOPPED: tuple[tuple[list[int], int, int], ...] = (
    ([*range(1, 18)], 15, 8),
    ([*range(1, 11)], 10, 2),
    ([1, 2, 3], 0, 4),
)


def check_resume_plan(answer: object) -> bool:
    """What a resume keeps of a stopped run, and where it goes on.

    Args:
        answer: ``plan(rows, saved, tasks_per_step)`` → ``{"keep": ..., "step": ...,
            "tasks": ...}``: the recorded steps that still count, the step to take
            next, and the positions of its tasks in the pool, from 0; ``...`` if not
            tried yet.

    Returns:
        Whether it is right for three stopped runs.
    """
    if not is_function(answer, "broken_plan"):
        return False
    for rows, saved, tasks_per_step in _STOPPED:
        given, error = call(answer, rows, saved, tasks_per_step)
        problem = error or _plan_problem(given, rows, saved, tasks_per_step)
        if problem:
            print(
                f"✗ steps 1 to {rows[-1]} recorded, saved after step {saved}, "
                f"{tasks_per_step} tasks a step: {problem}"
            )
            return False
    print(f"✓ right for all {len(_STOPPED)} stopped runs: no step lost, none doubled")
    return True


def _plan_problem(
    given: Any, rows: Sequence[int], saved: int, tasks_per_step: int
) -> str | None:
    """What is wrong with a plan, if anything."""
    if not isinstance(given, Mapping) or set(given) != {"keep", "step", "tasks"}:
        return f"expected a dict with keep, step and tasks, got {shown(given)}"
    try:
        keep, tasks = ([index(n) for n in given[key]] for key in ("keep", "tasks"))
        step = index(given["step"])
    except TypeError:
        return f"step is an integer, keep and tasks are lists of them: {shown(given)}"
    for problem in (
        _step_problem(step, saved),
        _keep_problem(keep, rows, saved),
        _tasks_problem(tasks, saved, tasks_per_step),
    ):
        if problem:
            return problem
    return None


def _step_problem(step: int, saved: int) -> str | None:
    if step == saved + 1:
        return None
    if step == saved:
        return f"step {step} is in the checkpoint already and would be taken twice"
    return f"the checkpoint holds steps up to {saved}; next is not {step}"


def _keep_problem(keep: list[int], rows: Sequence[int], saved: int) -> str | None:
    if keep == [row for row in rows if row <= saved]:
        return None
    beyond = [row for row in keep if row in rows and row > saved]
    if beyond:
        return (
            f"step {beyond[0]} is kept, but its weights were lost: it is run again, "
            "and would be recorded twice"
        )
    return f"steps 1 to {saved} are in the checkpoint and stay, got {shown(keep)}"


def _tasks_problem(tasks: list[int], saved: int, tasks_per_step: int) -> str | None:
    first = saved * tasks_per_step
    if tasks == list(range(first, first + tasks_per_step)):
        return None
    if len(tasks) != tasks_per_step:
        return f"a step takes {tasks_per_step} tasks, got {len(tasks)}"
    return (
        f"{saved} steps used positions 0 to {first - 1}, so the next is {first}, "
        f"not {tasks[0]}"
        if saved
        else f"nothing was used yet, so the first position is 0, not {tasks[0]}"
    )
