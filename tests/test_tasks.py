"""Drawing, splitting, serving and loading tasks."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from hud.agents.base import Agent
from hud.eval import HUDRuntime, LocalRuntime, Run, Task, Taskset

from rlhelpers import TaskPool, load_tasks, make_taskset, split_taskset
from rlhelpers.arithmetic import env
from rlhelpers.tasks import multiplication_task, operand_pairs, training_pairs

TWO_DIGITS = {"min_a": 10, "max_a": 99, "min_b": 10, "max_b": 99}


def pair(task: Task) -> tuple[int, int]:
    low, high = sorted((task.args["a"], task.args["b"]))
    return low, high


def slugs(tasks: Any) -> list[str]:
    return [task.slug for task in tasks]


# Pairs


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((1, 3), (1, 3)),  # equal ranges
        ((1, 9), (3, 5)),  # one inside the other
        ((3, 5), (1, 9)),
        ((1, 5), (4, 9)),  # overlapping
        ((4, 9), (1, 5)),
        ((1, 3), (7, 9)),  # apart
        ((7, 9), (1, 3)),
        ((-3, 2), (-1, 4)),  # negative
        ((5, 5), (5, 5)),  # one number
    ],
)
def test_every_unordered_pair_is_numbered_once(
    a: tuple[int, int], b: tuple[int, int]
) -> None:
    pairs = operand_pairs(min_a=a[0], max_a=a[1], min_b=b[0], max_b=b[1])
    ordered = set(product(pairs.a, pairs.b))
    numbered = [pairs.pair(i) for i in range(pairs.size)]
    assert set(numbered) <= ordered  # a from a's range, b from b's
    unordered = {frozenset(p) for p in ordered}
    assert len(numbered) == len(unordered)
    assert {frozenset(p) for p in numbered} == unordered
    for p in numbered:
        assert pairs.both_ways(p) == (p in ordered and p[::-1] in ordered)


def test_the_whole_range_can_be_drawn() -> None:
    tasks = make_taskset(45, min_a=1, max_a=9, min_b=1, max_b=9, seed=3)
    assert len({pair(task) for task in tasks}) == 45


def test_more_tasks_than_pairs_gives_both_numbers() -> None:
    with pytest.raises(ValueError, match="46 tasks .* only 45 different") as caught:
        make_taskset(46, min_a=1, max_a=9, min_b=1, max_b=9, seed=3)
    assert "widen a range" in str(caught.value)


@pytest.mark.parametrize("operand", ["a", "b"])
def test_inverted_range_is_named(operand: str) -> None:
    ranges = {**TWO_DIGITS, f"min_{operand}": 99, f"max_{operand}": 10}
    with pytest.raises(ValueError, match=f"min_{operand} is 99 and max_{operand} is"):
        make_taskset(1, seed=0, **ranges)


def test_count_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="count is 0"):
        make_taskset(0, seed=0, **TWO_DIGITS)


def test_four_digit_and_huge_ranges_are_drawn_without_listing_them() -> None:
    started = time.process_time()
    large = make_taskset(1000, min_a=1000, max_a=9999, min_b=1000, max_b=9999, seed=1)
    top = 10**12
    huge = make_taskset(1000, min_a=1, max_a=top, min_b=1, max_b=top, seed=1)
    assert time.process_time() - started < 20
    for tasks in (large, huge):
        assert len({pair(task) for task in tasks}) == 1000
    assert all(1000 <= x <= 9999 for task in large for x in task.args.values())


def test_seed_decides_the_tasks_and_both_orders_occur() -> None:
    first = make_taskset(200, seed=7, **TWO_DIGITS)
    assert slugs(first) == slugs(make_taskset(200, seed=7, **TWO_DIGITS))
    assert slugs(first) != slugs(make_taskset(200, seed=8, **TWO_DIGITS))
    rising = sum(task.args["a"] < task.args["b"] for task in first)
    assert 60 < rising < 140


def test_slug_and_name_are_readable() -> None:
    assert multiplication_task(47, 36).slug == "multiply-47x36"
    assert multiplication_task(-36, 47).slug == "multiply--36x47"
    assert make_taskset(1, seed=0, name="easy", **TWO_DIGITS).name == "easy"


# Splits


def test_split_is_disjoint_and_repeatable() -> None:
    tasks = make_taskset(100, seed=0, **TWO_DIGITS)
    train, held_out = split_taskset(tasks, train=60, held_out=40, seed=5)
    assert (len(train), len(held_out)) == (60, 40)
    assert not {pair(t) for t in train} & {pair(t) for t in held_out}
    again = split_taskset(tasks, train=60, held_out=40, seed=5)
    assert slugs(train) == slugs(again[0])
    assert slugs(held_out) == slugs(again[1])
    other = split_taskset(tasks, train=60, held_out=40, seed=6)
    assert slugs(held_out) != slugs(other[1])
    assert train.name.endswith("-train")
    assert held_out.name.endswith("-held-out")


def test_split_keeps_swapped_operands_on_one_side() -> None:
    both = [(a, b) for a in range(2, 9) for b in range(2, 9) if a != b]
    tasks = Taskset("both", [multiplication_task(a, b) for a, b in both])
    for seed in range(20):
        train, held_out = split_taskset(tasks, held_out=7, seed=seed)
        assert len(held_out) == 7
        assert not {pair(t) for t in train} & {pair(t) for t in held_out}


def test_split_without_a_training_number_takes_the_rest() -> None:
    tasks = make_taskset(50, seed=0, **TWO_DIGITS)
    train, held_out = split_taskset(tasks, held_out=20, seed=0)
    assert (len(train), len(held_out)) == (30, 20)
    assert {*slugs(train), *slugs(held_out)} == set(slugs(tasks))


def test_split_error_gives_the_numbers() -> None:
    tasks = make_taskset(50, seed=0, **TWO_DIGITS)
    with pytest.raises(ValueError, match=r"40 training \+ 20 held-out = 60 .* has 50"):
        split_taskset(tasks, train=40, held_out=20, seed=0)
    with pytest.raises(ValueError, match="train is 0"):
        split_taskset(tasks, train=0, held_out=20, seed=0)


def test_split_tasks_stay_runnable() -> None:
    train, _ = split_taskset(
        make_taskset(4, seed=0, **TWO_DIGITS), train=2, held_out=2, seed=0
    )
    assert {task.env for task in train} == {"arithmetic"}


# The pool


def pool(count: int = 20, per_step: int = 4, **options: Any) -> TaskPool:
    tasks = make_taskset(count, seed=0, **TWO_DIGITS)
    return TaskPool(tasks, tasks_per_step=per_step, seed=1, **options)


def test_pool_serves_new_tasks_until_used_up_then_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    served = pool()
    assert served.steps_before_reshuffle == 5
    with caplog.at_level(logging.INFO, logger="rlhelpers.tasks"):
        steps = [served.tasks_for_step(i) for i in range(10)]
    first_round = Counter(t.slug for step in steps[:5] for t in step.tasks)
    assert set(first_round.values()) == {1}
    assert len(first_round) == 20
    assert [step.reshuffled for step in steps] == [False] * 5 + [True] + [False] * 4
    assert "all 20 training tasks were used" in str(steps[5].notice)
    assert "reshuffled" in caplog.text
    assert [slugs(s.tasks) for s in steps[:5]] != [slugs(s.tasks) for s in steps[5:]]


def test_pool_is_a_function_of_seed_and_position_alone() -> None:
    in_order = [slugs(pool().tasks_for_step(i).tasks) for i in range(8)]
    one = pool()
    assert [slugs(one.tasks_for_step(i).tasks) for i in reversed(range(8))] == (
        in_order[::-1]
    )


def test_no_step_of_the_pool_repeats_a_task_even_with_a_leftover() -> None:
    served = pool(count=11, per_step=4)
    for position in range(12):
        assert len(set(slugs(served.tasks_for_step(position).tasks))) == 4


def test_fixed_pool_reuses_one_set() -> None:
    served = pool(fixed=True)
    sets = {tuple(slugs(served.tasks_for_step(i).tasks)) for i in range(30)}
    assert len(sets) == 1
    assert not served.tasks_for_step(29).reshuffled


def test_pool_too_small_for_a_step_gives_both_numbers() -> None:
    with pytest.raises(ValueError, match="a step needs 8 tasks.* has 4"):
        pool(count=4, per_step=8)
    with pytest.raises(ValueError, match="tasks_per_step is 0"):
        pool(per_step=0)
    with pytest.raises(ValueError, match="position is -1"):
        pool().tasks_for_step(-1)


# Loading


def test_default_is_the_bundled_environment() -> None:
    loaded = load_tasks()
    assert loaded.taskset.environment_names() == {"arithmetic"}
    assert isinstance(loaded.runtime, LocalRuntime)
    chosen = load_tasks(default=lambda: make_taskset(3, seed=0, **TWO_DIGITS))
    assert len(chosen.taskset) == 3


ENV_SOURCE = """
from hud.environment import Environment

env = Environment("echo")


@env.template()
async def say(word: str):
    answer = yield f"Say {word}."
    yield 1.0 if answer == word else 0.0
"""


def write_tasks(folder: Path, env_name: str = "echo") -> Path:
    row = {"env": env_name, "id": "say", "args": {"word": "hi"}, "slug": "hi"}
    path = folder / "tasks.json"
    path.write_text(json.dumps([row]), encoding="utf-8")
    return path


class HiAgent(Agent):
    async def __call__(self, run: Run) -> None:
        run.trace.content = "hi"


async def test_local_file_with_its_environment_runs(tmp_path: Path) -> None:
    source = tmp_path / "echo_env.py"
    source.write_text(ENV_SOURCE, encoding="utf-8")
    loaded = load_tasks(tasks_file=write_tasks(tmp_path), env_path=source)
    job = await loaded.taskset.run(HiAgent(), runtime=loaded.runtime)
    assert [run.grade.reward for run in job.runs] == [1.0]


def test_saved_bundled_tasks_need_no_environment_path(tmp_path: Path) -> None:
    path = make_taskset(3, seed=0, **TWO_DIGITS).to_file(tmp_path / "tasks.jsonl")
    loaded = load_tasks(tasks_file=path)
    assert len(loaded.taskset) == 3


def test_local_file_errors_name_the_remedy(tmp_path: Path) -> None:
    tasks_file = write_tasks(tmp_path)
    with pytest.raises(ValueError, match=r"environment echo.*give env_path"):
        load_tasks(tasks_file=tasks_file)
    with pytest.raises(FileNotFoundError, match=r"env_path .*gone\.py does not exist"):
        load_tasks(tasks_file=tasks_file, env_path=tmp_path / "gone.py")
    with pytest.raises(FileNotFoundError, match="tasks_file"):
        load_tasks(tasks_file=tmp_path / "none.json")
    with pytest.raises(ValueError, match="needs a tasks_file"):
        load_tasks(env_path=tmp_path)
    with pytest.raises(ValueError, match="choose one"):
        load_tasks(tasks_file=tasks_file, taskset="team/tasks")
    (tmp_path / "empty.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ValueError, match="holds no tasks"):
        load_tasks(tasks_file=tmp_path / "empty.json", env_path=tmp_path)


def test_hosted_taskset_needs_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    from hud.settings import settings

    monkeypatch.setattr(settings, "api_key", None)
    with pytest.raises(PermissionError, match="HUD_API_KEY is not set"):
        load_tasks(taskset="team/tasks")


def test_hosted_taskset_with_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    from hud.settings import settings

    monkeypatch.setattr(settings, "api_key", None)
    monkeypatch.setenv("HUD_API_KEY", "test-key")
    hosted = Taskset("team/tasks", [multiplication_task(2, 3)])
    monkeypatch.setattr(Taskset, "from_api", lambda name: hosted)
    loaded = load_tasks(taskset="team/tasks")
    assert loaded.taskset is hosted
    assert isinstance(loaded.runtime, HUDRuntime)


def test_environment_is_named_as_tasks_name_it() -> None:
    assert env.name == "arithmetic"


# -- small operand ranges ---------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "pairs", "expected"),
    [
        (10, 4095, 40),  # one for every place
        (10, 72, 40),  # exactly enough beside 32
        (10, 45, 13),  # what is left of 9 × 10 / 2
    ],
)
def test_training_pairs(steps: int, pairs: int, expected: int) -> None:
    assert training_pairs(steps, 4, held_out=32, pairs=pairs) == expected


def test_a_range_without_room_for_one_step_names_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"45 pairs; with 42 held out 3 are left.*4"):
        training_pairs(10, 4, held_out=42, pairs=45)
    with pytest.raises(ValueError, match="0 are left.*MAX_OPERAND"):
        training_pairs(10, 4, held_out=50, pairs=45)


# -- sources of one's own ---------------------------------------------------------

TASKS_SOURCE = """
from echo_env import say

tasks = [say(word=word) for word in ("hi", "ho", "ha")]
"""


async def test_a_folder_brings_its_environment_along(tmp_path: Path) -> None:
    (tmp_path / "echo_env.py").write_text(ENV_SOURCE, encoding="utf-8")
    (tmp_path / "echo_tasks.py").write_text(TASKS_SOURCE, encoding="utf-8")
    loaded = load_tasks(tasks_file=tmp_path)
    assert sorted(task.args["word"] for task in loaded.taskset) == ["ha", "hi", "ho"]
    job = await loaded.taskset.run(HiAgent(), runtime=loaded.runtime)
    assert sorted(run.grade.reward for run in job.runs) == [0.0, 0.0, 1.0]


async def test_a_source_that_imports_its_environment(tmp_path: Path) -> None:
    (tmp_path / "echo_env.py").write_text(ENV_SOURCE, encoding="utf-8")
    path = tmp_path / "echo_tasks.py"
    path.write_text(TASKS_SOURCE, encoding="utf-8")
    loaded = load_tasks(tasks_file=path)
    job = await loaded.taskset.run(HiAgent(), runtime=loaded.runtime)
    assert sum(run.grade.reward for run in job.runs) == 1.0


async def test_a_source_named_as_the_bundled_environment_keeps_its_own(
    tmp_path: Path,
) -> None:
    """HUD's examples call theirs "arithmetic" too; ours would grade it silently."""
    source = ENV_SOURCE.replace('"echo"', '"arithmetic"')
    path = tmp_path / "own_arithmetic.py"
    path.write_text(source + '\ntasks = [say(word="hi")]\n', encoding="utf-8")
    loaded = load_tasks(tasks_file=path)
    job = await loaded.taskset.run(HiAgent(), runtime=loaded.runtime)
    assert [run.grade.reward for run in job.runs] == [1.0]


async def test_a_source_of_bundled_tasks(tmp_path: Path) -> None:
    path = tmp_path / "bundled.py"
    path.write_text(
        "from rlhelpers.tasks import multiplication_task\n"
        "tasks = [multiplication_task(2, 3)]\n",
        encoding="utf-8",
    )
    loaded = load_tasks(tasks_file=path)
    job = await loaded.taskset.run(HiAgent(), runtime=loaded.runtime)
    assert [run.grade.reward for run in job.runs] == [0.0]
    assert job.runs[0].grade.info["expected"] == 6


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.json", "[{", r"a\.json is not JSON: Expecting"),
        ("a.jsonl", '{"env"\n', r"a\.jsonl is not one JSON object a line"),
        ("a.json", '[{"env": "echo"}]', r"no task: id: Field required .*needs env, id"),
        ("a.json", '[{"env": "", "id": "say"}]', r"no task: env: "),
        ("a.json", "[3]", "each task entry must be an object; a .json or"),
        ("a.csv", "env,id", "unsupported taskset source"),
        ("a.py", "import no_such_module_here", "while it was imported: ModuleNotFound"),
        ("a.py", "tasks = 3", "holds no tasks"),
    ],
)
def test_a_source_that_cannot_be_read(
    tmp_path: Path, name: str, text: str, said: str
) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=said):
        load_tasks(tasks_file=tmp_path / name)


def test_an_environment_that_lacks_what_the_tasks_ask_for(tmp_path: Path) -> None:
    source = tmp_path / "echo_env.py"
    source.write_text(ENV_SOURCE, encoding="utf-8")
    with pytest.raises(ValueError, match=r"environment 'other' .*could not be loaded"):
        load_tasks(tasks_file=write_tasks(tmp_path, "other"), env_path=source)
    path = tmp_path / "tasks.json"
    path.write_text('[{"env": "echo", "id": "sya", "args": {}}]', encoding="utf-8")
    with pytest.raises(ValueError, match=r"ask for sya of .*'echo'.* defines say"):
        load_tasks(tasks_file=path, env_path=source)
    source.write_text("raise OSError('no disk')", encoding="utf-8")
    with pytest.raises(ValueError, match=r"OSError: no disk; env_path is"):
        load_tasks(tasks_file=path, env_path=source)


class Platform(BaseHTTPRequestHandler):
    """HUD's API as far as fetching a taskset needs it."""

    def do_GET(self) -> None:
        key = self.headers.get("Authorization", "")
        rows = [{"env": "shop", "scenario": "buy", "name": "b", "args": {"n": 1}}]
        answers = {
            "/v2/tasksets/by-name/team%2Ftasks": {
                "taskset_id": "0b8f1a52-4c1e-4a52-8a0e-0d9b8c1f2a3b",
                "name": "tasks",
            },
            "/v2/tasksets/0b8f1a52-4c1e-4a52-8a0e-0d9b8c1f2a3b/export": {
                "name": "tasks",
                "tasks": rows,
            },
        }
        answer = answers.get(self.path)
        status = 404 if answer is None else 200
        status = status if "good-key" in key else 401
        body = json.dumps(answer or {"detail": "no"}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """HUD's client, pointed at a stand-in on loopback."""
    from hud.settings import settings

    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Platform)
    thread = Thread(target=server.serve_forever)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(settings, "hud_api_url", url)
    monkeypatch.setattr(settings, "api_key", "good-key")
    yield
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_hosted_taskset_is_fetched_by_huds_client(platform: None) -> None:
    loaded = load_tasks(taskset="team/tasks")
    (task,) = loaded.taskset
    assert (task.env, task.id, task.slug, task.args) == ("shop", "buy", "b", {"n": 1})
    assert isinstance(loaded.runtime, HUDRuntime)
    with pytest.raises(ValueError, match="taskset not found: team/none"):
        load_tasks(taskset="team/none")


def test_a_refused_hud_key_is_not_shown(
    platform: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hud.settings import settings

    monkeypatch.setattr(settings, "api_key", "hud-secret")
    with pytest.raises(PermissionError, match="HUD refused HUD_API_KEY") as caught:
        load_tasks(taskset="team/tasks")
    assert "hud-secret" not in str(caught.value)
