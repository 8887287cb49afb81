"""Sets of tasks: drawing them, splitting them, and serving them step by step.

A multiplication task is an *unordered* pair of operands here: ``47 × 36`` and
``36 × 47`` have one answer, so only one of the two is ever drawn, and a split never
puts them on both sides.
"""

from __future__ import annotations

import json
import logging
import math
import os
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hud.environment import load_environment
from hud.eval import HUDRuntime, LocalRuntime, Provider, Task, Taskset
from hud.utils.exceptions import HudException
from pydantic import ValidationError

from rlhelpers.arithmetic import env, multiply
from rlhelpers.preflight import setting

logger = logging.getLogger(__name__)

StrPath = str | os.PathLike[str]


# Drawing operand pairs


@dataclass(frozen=True)
class OperandPairs:
    """All unordered operand pairs of two ranges, numbered from 0, never listed.

    Four-digit ranges hold 40 million pairs; numbering them lets any be drawn without
    building the others. With I the overlap of the two ranges, the pairs with at least
    one operand outside I come first (there, order cannot repeat a pair), then the
    |I|·(|I|+1)/2 unordered pairs within I.
    """

    a: range
    b: range

    @property
    def overlap(self) -> range:
        """The operands that can stand on either side."""
        return range(
            max(self.a.start, self.b.start),
            max(
                min(self.a.stop, self.b.stop),
                max(self.a.start, self.b.start),
            ),
        )

    @property
    def size(self) -> int:
        """How many unordered pairs there are."""
        shared = _length(self.overlap)
        return _length(self.a) * _length(self.b) - shared * shared + _triangle(shared)

    def pair(self, number: int) -> tuple[int, int]:
        """The pair with this number, 0 ≤ number < size."""
        inside = self.overlap
        shared = _length(inside)
        only_a = _length(self.a) - shared
        only_b = _length(self.b) - shared
        if number < only_a * _length(self.b):
            i, j = divmod(number, _length(self.b))
            return _outside(self.a, inside, i), self.b.start + j
        number -= only_a * _length(self.b)
        if number < shared * only_b:
            i, j = divmod(number, only_b)
            return inside.start + i, _outside(self.b, inside, j)
        number -= shared * only_b
        row = (math.isqrt(8 * number + 1) - 1) // 2
        return inside.start + row, inside.start + number - _triangle(row)

    def both_ways(self, pair: tuple[int, int]) -> bool:
        """Whether the pair can also be asked with its operands swapped."""
        inside = self.overlap
        return all(inside.start <= operand < inside.stop for operand in pair)


def _length(values: range) -> int:
    # len() refuses ranges longer than a machine word.
    return values.stop - values.start


def _triangle(n: int) -> int:
    return n * (n + 1) // 2


def _outside(values: range, inside: range, i: int) -> int:
    """The i-th of ``values`` that is not in ``inside``, a sub-range of it."""
    if not _length(inside):
        return values.start + i
    before = inside.start - values.start
    return values.start + i if i < before else inside.stop + i - before


def _draw_numbers(rng: random.Random, size: int, count: int) -> list[int]:
    """``count`` different numbers below ``size``, in random order."""
    if size < 2**62:
        return rng.sample(range(size), count)
    drawn: dict[int, None] = {}  # so many numbers that a repeat is never seen twice
    while len(drawn) < count:
        drawn[rng.randrange(size)] = None
    return list(drawn)


def make_taskset(
    count: int,
    *,
    min_a: int,
    max_a: int,
    min_b: int,
    max_b: int,
    seed: int,
    name: str = "multiplication",
) -> Taskset:
    """Draw multiplication tasks without replacement.

    Args:
        count: How many tasks.
        min_a, max_a: Range of the first operand, both ends included.
        min_b, max_b: Range of the second operand, both ends included.
        seed: The same arguments and seed give the same tasks in the same order.
        name: The taskset's name.

    Returns:
        A HUD taskset; task ``47 × 36`` has the slug ``multiply-47x36``. No two tasks
        have the same unordered pair of operands.

    Raises:
        ValueError: A range is inverted, ``count`` is below one, or the ranges hold
            fewer pairs than ``count``.

    >>> tasks = make_taskset(2, min_a=2, max_a=3, min_b=2, max_b=3, seed=0)
    >>> len(tasks)
    2
    """
    pairs = operand_pairs(min_a=min_a, max_a=max_a, min_b=min_b, max_b=max_b)
    if count < 1:
        raise ValueError(f"count is {count}; ask for at least one task")
    if count > pairs.size:
        raise ValueError(
            f"{count} tasks asked for, but a in {min_a}..{max_a} and b in "
            f"{min_b}..{max_b} hold only {pairs.size} different operand pairs "
            "(a × b and b × a count once): widen a range or ask for fewer tasks"
        )
    rng = random.Random(seed)
    tasks = []
    for number in _draw_numbers(rng, pairs.size, count):
        a, b = pairs.pair(number)
        swap = rng.random() < 0.5  # drawn for every pair, to keep the seed's order
        if swap and pairs.both_ways((a, b)):
            a, b = b, a
        tasks.append(multiplication_task(a, b))
    return Taskset(name, tasks)


def operand_pairs(*, min_a: int, max_a: int, min_b: int, max_b: int) -> OperandPairs:
    """The unordered pairs of two operand ranges, ends included.

    >>> operand_pairs(min_a=1, max_a=3, min_b=1, max_b=3).size
    6

    Raises:
        ValueError: A range is inverted.
    """
    for operand, low, high in (("a", min_a, max_a), ("b", min_b, max_b)):
        if low > high:
            raise ValueError(
                f"min_{operand} is {low} and max_{operand} is {high}: the range is "
                "inverted; swap the two"
            )
    return OperandPairs(range(min_a, max_a + 1), range(min_b, max_b + 1))


def multiplication_task(a: int, b: int) -> Task:
    """One multiplication task with a readable slug.

    >>> multiplication_task(47, 36).slug
    'multiply-47x36'
    """
    task = multiply(a, b)
    task.slug = f"multiply-{a}x{b}"
    return task


# Splitting


def split_taskset(
    taskset: Taskset, *, train: int | None = None, held_out: int, seed: int
) -> tuple[Taskset, Taskset]:
    """Split a taskset into disjoint training and held-out tasks.

    Tasks with the same content, ``a × b`` and ``b × a`` included, stay on one side:
    the held-out score would otherwise measure memory.

    Args:
        taskset: Any HUD taskset.
        train: Number of training tasks; ``None`` takes all that are left.
        held_out: Number of held-out tasks, never trained on.
        seed: The same seed gives the same split.

    Returns:
        ``(training taskset, held-out taskset)``.

    Raises:
        ValueError: Fewer tasks than ``train + held_out``, or a negative number.
    """
    wanted = 1 if train is None else train
    if wanted < 1 or held_out < 0:
        raise ValueError(
            f"train is {train} and held_out is {held_out}; at least one training "
            "task is needed, and held_out cannot be negative"
        )
    groups: dict[str, list[Task]] = {}
    for task in taskset:
        groups.setdefault(content_key(task), []).append(task)
    shuffled = list(groups.values())
    random.Random(seed).shuffle(shuffled)
    held: list[Task] = []
    rest: list[Task] = []
    for group in shuffled:
        room = held_out - len(held)
        # What does not fit beside its twin is left out of both sides.
        (held if room > 0 else rest).extend(group[:room] if room > 0 else group)
    if len(held) < held_out or len(rest) < wanted:
        raise ValueError(
            f"the split needs {wanted} training + {held_out} held-out = "
            f"{wanted + held_out} tasks, but {taskset.name!r} has {len(taskset)} "
            f"({len(groups)} with different content): make a larger taskset or ask "
            "for fewer"
        )
    return (
        _named(taskset, "train", rest if train is None else rest[:train]),
        _named(taskset, "held-out", held),
    )


def _named(taskset: Taskset, part: str, tasks: Iterable[Task]) -> Taskset:
    return Taskset(f"{taskset.name}-{part}", tasks, taskset_id=taskset.taskset_id)


def content_key(task: Task) -> str:
    """Equal for tasks that ask the same, whatever their slug or operand order."""
    args = dict(task.args)
    if task.env == env.name and task.id == multiply.id and args.keys() == {"a", "b"}:
        args = {"operands": sorted(args.values(), key=str)}
    return json.dumps([task.env, task.id, args], sort_keys=True, default=str)


def training_pairs(steps: int, tasks_per_step: int, held_out: int, pairs: int) -> int:
    """How many training tasks to draw beside the held-out ones.

    One for every place in every step where the operand range has as many pairs. In a
    small range all that are left, so that :class:`TaskPool` serves them again.

    Args:
        steps, tasks_per_step: Of the run.
        held_out: Held-out tasks, which no training task may repeat.
        pairs: How many pairs the range holds (:func:`operand_pairs`).

    Raises:
        ValueError: Beside the held-out tasks not even one step's are left.

    >>> training_pairs(10, 4, held_out=32, pairs=45)
    13
    """
    left = pairs - held_out
    if left < tasks_per_step:
        raise ValueError(
            f"the operand range holds {pairs} pairs; with {held_out} held out "
            f"{max(left, 0)} are left, and a step needs {tasks_per_step}: widen the "
            "range (MIN_OPERAND, MAX_OPERAND), or lower EVALUATION_TASKS or "
            "TASKS_PER_STEP"
        )
    return min(steps * tasks_per_step, left)


def draw_sides(
    a: tuple[int, int],
    b: tuple[int, int],
    *,
    steps: int,
    tasks_per_step: int,
    held_out: int,
    seed: int,
) -> tuple[Taskset, Taskset]:
    """Multiplication tasks for a run: those to train on, and those held out.

    Args:
        a, b: Smallest and largest first and second operand.
        steps, tasks_per_step, held_out: As of :func:`training_pairs`.
        seed: Of the draw and of the split.

    Raises:
        ValueError: The ranges hold too few pairs, or one is inverted.
    """
    pairs = operand_pairs(min_a=a[0], max_a=a[1], min_b=b[0], max_b=b[1]).size
    train = training_pairs(steps, tasks_per_step, held_out, pairs)
    tasks = make_taskset(
        train + held_out, min_a=a[0], max_a=a[1], min_b=b[0], max_b=b[1], seed=seed
    )
    return split_taskset(tasks, train=train, held_out=held_out, seed=seed)


# Serving training tasks


class StepTasks(NamedTuple):
    """The tasks of one training step."""

    tasks: tuple[Task, ...]
    reshuffled: bool  # this step is the first that repeats earlier tasks
    notice: str | None  # the same in words, for the reader


class TaskPool:
    """Serves the training tasks of each step; new ones until none are left.

    Which tasks a step gets depends only on the seed and the step's position, so a
    resumed run goes on with the tasks it would have had: its whole state is the
    position, a plain int.

    Args:
        tasks: The training tasks (a taskset, or any sequence of tasks).
        tasks_per_step: How many a step gets.
        seed: Orders the pool.
        fixed: Serve the same ``tasks_per_step`` tasks at every step. Cheaper to look
            at, but the policy may then learn these tasks and not the skill.

    Raises:
        ValueError: The pool is smaller than one step.
    """

    def __init__(
        self,
        tasks: Taskset | Sequence[Task],
        *,
        tasks_per_step: int,
        seed: int,
        fixed: bool = False,
    ) -> None:
        self.tasks = tuple(tasks)
        self.tasks_per_step = tasks_per_step
        self.seed = seed
        self.fixed = fixed
        if tasks_per_step < 1:
            raise ValueError(f"tasks_per_step is {tasks_per_step}; use at least 1")
        if len(self.tasks) < tasks_per_step:
            raise ValueError(
                f"a step needs {tasks_per_step} tasks, but the training set has "
                f"{len(self.tasks)}: make a larger taskset or lower tasks_per_step"
            )

    @property
    def steps_before_reshuffle(self) -> int:
        """How many steps the pool serves before a task comes a second time."""
        return len(self.tasks) // self.tasks_per_step

    def tasks_for_step(self, position: int) -> StepTasks:
        """The tasks of the step at ``position``, counted from 0 over the whole run.

        A leftover smaller than a step waits for the next shuffle, so that no step
        asks one task twice.
        """
        if position < 0:
            raise ValueError(f"position is {position}; the first step has position 0")
        if self.fixed:
            position = 0
        round_number, turn = divmod(position, self.steps_before_reshuffle)
        order = list(self.tasks)
        # A text seed is hashed in full, so that rounds of neighbouring seeds differ.
        random.Random(f"pool {self.seed} {round_number}").shuffle(order)
        start = turn * self.tasks_per_step
        notice = None
        if reshuffled := round_number > 0 and turn == 0:
            notice = (
                f"all {len(self.tasks)} training tasks were used; they are reshuffled "
                f"and used again (round {round_number + 1})"
            )
            logger.info(notice)
        return StepTasks(
            tuple(order[start : start + self.tasks_per_step]), reshuffled, notice
        )


# Loading tasks of one's own


class LoadedTasks(NamedTuple):
    """Tasks, and where HUD runs their environment (its ``runtime=`` argument).

    The runtime is the plain provider. To let many rollouts of one environment run at
    the same time, wrap it: ``Shared(runtime, width=64)``.
    """

    taskset: Taskset
    runtime: Provider


def load_tasks(
    *,
    tasks_file: StrPath | None = None,
    env_path: StrPath | None = None,
    taskset: str | None = None,
    default: Callable[[], Taskset] | None = None,
) -> LoadedTasks:
    """Load tasks from one of three places.

    ========================  =====================================================
    nothing                   the bundled arithmetic environment (``default()``)
    ``tasks_file=``           a local ``.json``, ``.jsonl`` or ``.py`` file, or a
                              folder of ``.py`` files, with its environment in
                              ``env_path`` (a ``.py`` file or folder)
    ``taskset=``              a taskset hosted by HUD; needs ``HUD_API_KEY``
    ========================  =====================================================

    A local environment is imported here once, so that a missing template is found
    before anything is sampled; its code runs, as with any import. A hosted taskset is
    fetched by HUD's own client, and its environment runs on HUD's machines. That path
    has been tried against a stand-in for HUD's API only, never with an account.

    Args:
        tasks_file: Task rows, each with ``env``, ``id`` and ``args``; or Python source
            that holds tasks, lists of tasks or tasksets under public names.
        env_path: The source of their environment. May be left out for Python source
            that defines or imports it, and for rows of the bundled ``arithmetic``.
        taskset: Name or id of a hosted taskset.
        default: Makes the bundled taskset; 256 two-digit tasks if left out.

    Raises:
        ValueError: The arguments contradict each other, no tasks were found, a row or
            source cannot be read, or the environment lacks a template.
        FileNotFoundError: A file is not there.
        PermissionError: A hosted taskset was asked for without ``HUD_API_KEY``, or HUD
            refused the key.
        ConnectionError: HUD could not be reached.
    """
    if taskset is not None and (tasks_file is not None or env_path is not None):
        raise ValueError(
            f"both a hosted taskset ({taskset!r}) and local files were given; "
            "choose one"
        )
    if taskset is not None:
        loaded = LoadedTasks(_hosted_taskset(taskset), HUDRuntime())
    elif tasks_file is not None:
        loaded = _local_tasks(_existing(tasks_file, "tasks_file"), env_path)
    elif env_path is not None:
        raise ValueError(f"env_path={env_path!s} needs a tasks_file with the tasks")
    else:
        loaded = LoadedTasks((default or _bundled_taskset)(), LocalRuntime(env))
    if not len(loaded.taskset):
        raise ValueError(f"taskset {loaded.taskset.name!r} holds no tasks")
    return loaded


def _bundled_taskset() -> Taskset:
    return make_taskset(256, min_a=10, max_a=99, min_b=10, max_b=99, seed=0)


def _local_tasks(path: Path, env_path: StrPath | None) -> LoadedTasks:
    tasks = _tasks_in(path)
    source = path.suffix == ".py" or path.is_dir()
    if env_path is None and not source:
        names = tasks.environment_names()
        if names <= {env.name}:
            return LoadedTasks(tasks, LocalRuntime(env))
        raise ValueError(
            f"{path} refers to environment {', '.join(sorted(names))}, but not to its "
            "source: give env_path, the .py file or folder that defines it"
        )
    place = path if env_path is None else _existing(env_path, "env_path")
    _check_templates(tasks, place)
    return LoadedTasks(tasks, LocalRuntime(place))


def _tasks_in(path: Path) -> Taskset:
    """HUD's reader, whose errors leave out the file, the row and what to change."""
    try:
        return Taskset.from_file(path)
    except json.JSONDecodeError as error:
        kind = "one JSON object a line" if path.suffix == ".jsonl" else "JSON"
        raise ValueError(f"{path} is not {kind}: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "row"
        raise ValueError(
            f"{path} holds a row that is no task: {field}: {first['msg']} (in "
            f"{str(first['input'])[:120]}); a row needs env, id and args"
        ) from error
    except ValueError as error:
        raise ValueError(
            f"{path} cannot be read as tasks: {error}; a .json or .jsonl file holds "
            "rows with env, id and args, a .py file or folder defines tasks"
        ) from error
    except Exception as error:  # whatever somebody's source raises at import
        raise ValueError(
            f"{path} failed while it was imported: {type(error).__name__}: {error}"
        ) from error


def _check_templates(tasks: Taskset, place: Path) -> None:
    """Find every template in its source, before a rollout looks for it."""
    needed: dict[str, set[str]] = {}
    for task in tasks:
        needed.setdefault(task.env, set()).add(task.id)
    for name, templates in needed.items():
        try:
            known = load_environment(place, name=name).tasks
        except Exception as error:  # whatever somebody's source raises at import
            raise ValueError(
                f"environment {name!r} of the tasks could not be loaded from {place}: "
                f"{type(error).__name__}: {error}; env_path is the .py file or folder "
                "that defines it"
            ) from error
        if missing := sorted(templates - known.keys()):
            raise ValueError(
                f"the tasks ask for {', '.join(missing)} of environment {name!r}, and "
                f"{place} defines {', '.join(sorted(known)) or 'no template'}; correct "
                "the rows' id, or the environment"
            )


def _hosted_taskset(name: str) -> Taskset:
    from hud.settings import settings

    key = settings.api_key or setting("HUD_API_KEY")
    if not key:
        raise PermissionError(
            f"taskset {name!r} is hosted by HUD and HUD_API_KEY is not set: set it, or "
            "use a local tasks_file with its env_path"
        )
    settings.api_key = key  # HUD reads the environment only when it is imported
    try:
        return Taskset.from_api(name)
    except HudException as error:
        if getattr(error, "status_code", None) in (401, 403):
            raise PermissionError(
                f"HUD refused HUD_API_KEY for taskset {name!r} ({error.message}); "
                "check the key, and whether its account may read the taskset"
            ) from error
        raise ConnectionError(
            f"taskset {name!r} could not be fetched from HUD ({error.message}); try "
            "later, or use a local tasks_file with its env_path"
        ) from error


def _existing(path: StrPath, name: str) -> Path:
    found = Path(path)
    if not found.exists():
        raise FileNotFoundError(
            f"{name} {found} does not exist (looked in {Path.cwd()})"
        )
    return found
