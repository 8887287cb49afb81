"""Checks of one's own tasks before spending, through real HUD and without a model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hud.eval import Taskset

from rlhelpers.models import PRESETS
from rlhelpers.preflight import load_tokenizer
from rlhelpers.readiness import (
    LabelledReply,
    NotReady,
    Readiness,
    ReadinessCheck,
    check_count,
    check_signal,
    check_tasks,
    grade_replies,
    read_labelled_replies,
)
from rlhelpers.tasks import LoadedTasks, load_tasks

SOURCE = """
from hud.environment import Environment

env = Environment("words")
seen = []


@env.template()
async def say(word: str, copies: int = 1):
    answer = yield PROMPT
    yield REWARD


tasks = [say(word=word) for word in ("ja", "nein", "vielleicht", "doch", "nie")]
"""
PROMPT = 'f"Say {word}."'
REWARD = "1.0 if answer == word else 0.4 if word in answer else 0.0"


def words(
    folder: Path, *, prompt: str = PROMPT, reward: str = REWARD, more: str = ""
) -> LoadedTasks:
    """Five tasks: say a word; saying it among others earns 0.4."""
    path = folder / "words.py"
    source = SOURCE.replace("PROMPT", prompt).replace("REWARD", reward)
    path.write_text(source + more, encoding="utf-8")
    return load_tasks(tasks_file=path)


def samples_of(loaded: LoadedTasks) -> list[LabelledReply]:
    slugs = {task.args["word"]: task.slug for task in loaded.taskset}
    return [
        LabelledReply(slugs["ja"], "ja", 1, 1, "right"),
        LabelledReply(slugs["ja"], "oh ja", 0.3, 0.5, "among others"),
        LabelledReply(slugs["nie"], "immer", 0, 0, "wrong"),
    ]


async def checked(loaded: LoadedTasks, **how: Any) -> dict[str, ReadinessCheck]:
    how = {"samples": samples_of(loaded), "calibration": 2} | how
    readiness = await check_tasks(loaded, tasks_per_step=2, held_out=2, **how)
    return {check.name: check for check in readiness.checks}


# -- grading without a model ------------------------------------------------------


async def test_texts_are_graded_by_the_tasks_own_grader(tmp_path: Path) -> None:
    loaded = words(tmp_path)
    task = next(iter(loaded.taskset))
    graded = await grade_replies(
        loaded.runtime, [(task, "ja"), (task, ""), (task, "j")]
    )
    assert [g.reward for g in graded] == [1.0, 0.0, 0.0]
    assert graded[0].turns == (("user", "Say ja."),)
    assert (graded[0].tools, graded[0].error) == ((), None)


# -- the checks -------------------------------------------------------------------


async def test_sound_tasks_pass_every_check(tmp_path: Path) -> None:
    loaded = words(tmp_path)
    preset = PRESETS["tiny-arithmetic"]
    found = await checked(loaded, tokenizer=load_tokenizer(preset), preset=preset)
    assert list(found) == [
        "one turn, text only",
        "enough tasks",
        "sides apart",
        "prompts fit",
        "grader as labelled",
    ]
    assert all(check.passed for check in found.values())
    assert found["enough tasks"].seen == (
        "5 different tasks, 3 to train on: a step takes 2, calibration 2, and 2 are "
        "held out; a task comes again after 1 steps"
    )
    assert found["sides apart"].seen.startswith("3 to train on, 2 held out")
    assert found["grader as labelled"].seen.startswith("3 of 3 labelled replies")
    Readiness(tuple(found.values())).require()


async def test_too_few_tasks_give_the_numbers(tmp_path: Path) -> None:
    loaded = words(tmp_path)
    readiness = await check_tasks(
        loaded, tasks_per_step=4, held_out=3, calibration=6, samples=samples_of(loaded)
    )
    with pytest.raises(NotReady) as caught:
        readiness.require()
    assert str(caught.value) == (
        "enough tasks: 5 different tasks; a step takes 4, calibration 6, and 3 are "
        "held out: together 9. Add 4 tasks, or hold fewer out"
    )
    assert not readiness.ready


def test_a_repeated_task_counts_once() -> None:
    tasks = load_tasks().taskset
    first, second, *_ = tasks
    twin = first.model_copy(update={"slug": "twin"})
    check = check_count(
        Taskset("three", [first, second, twin]),
        tasks_per_step=1,
        held_out=1,
        calibration=1,
    )
    assert check.passed
    assert check.seen.startswith("2 different tasks, 1 to train on")


async def test_a_prompt_on_both_sides_is_found(tmp_path: Path) -> None:
    """Other arguments, same prompt: the held-out score would measure memory."""
    more = "\ntasks += [say(word=task.args['word'], copies=2) for task in tasks]\n"
    found = await checked(words(tmp_path, more=more))
    assert not found["sides apart"].passed
    assert "held-out prompts are trained on too" in found["sides apart"].seen


async def test_tools_and_pictures_are_not_for_the_one_turn_agent(
    tmp_path: Path,
) -> None:
    more = """
from hud.capabilities import Capability
env.add_capability(Capability("calculator", "mcp/1", "http://127.0.0.1:9/mcp"))
"""
    found = await checked(words(tmp_path, more=more))
    assert "offers calculator, which takes several" in found["one turn, text only"].seen
    picture = '[{"role": "user", "content": [{"type": "image", "data": "", '
    picture += '"mimeType": "image/png"}]}]'
    folder = tmp_path / "second"
    folder.mkdir()
    found = await checked(words(folder, prompt=picture))
    assert "holds more than text" in found["one turn, text only"].seen


async def test_a_task_that_does_not_start_is_named(tmp_path: Path) -> None:
    found = await checked(words(tmp_path, prompt="[][0]"))
    seen = found["one turn, text only"].seen
    assert seen.startswith("5 of 5 tasks did not start, such as say-")
    assert "list index out of range" in seen


async def test_a_prompt_over_the_context_is_named(tmp_path: Path) -> None:
    preset = PRESETS["tiny-arithmetic"]
    loaded = words(tmp_path, prompt="word * 200")  # vielleicht: 2,000 letters
    found = await checked(loaded, tokenizer=load_tokenizer(preset), preset=preset)
    assert not found["prompts fit"].passed
    assert "+ reply 160, context 1024 (say-" in found["prompts fit"].seen


# -- the grader -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        ("float(answer == word)", "0 for 'oh ja' to say-"),
        ("len(answer) / 0", "no reward for '' to say-"),
        ("float('nan')", "no reward for '' to say-"),
        ("1.0 / len(answer)", "division by zero"),
    ],
)
async def test_a_grader_that_is_not_as_labelled(
    tmp_path: Path, reward: str, said: str
) -> None:
    check = (await checked(words(tmp_path, reward=reward)))["grader as labelled"]
    assert not check.passed
    assert said in check.seen
    assert check.remedy


async def test_a_reward_that_changes_is_found(tmp_path: Path) -> None:
    """The label allows both rewards, yet the second grading must give the first."""
    reward = "(seen.append(1), 1.0 if answer == word else 0.001 * len(seen))[1]"
    loaded = words(tmp_path, reward=reward)
    slug = samples_of(loaded)[0].task
    samples = [LabelledReply(slug, "ja", 1, 1), LabelledReply(slug, "no", 0, 0.5)]
    check = (await checked(loaded, samples=samples))["grader as labelled"]
    assert check.seen == "the same reply earned something else the second time"


async def test_labels_that_tell_nothing(tmp_path: Path) -> None:
    loaded = words(tmp_path)
    for samples in ([], samples_of(loaded)[:1]):
        check = (await checked(loaded, samples=samples))["grader as labelled"]
        assert not check.passed
        assert "none worse than another" in check.seen
    lost = [*samples_of(loaded), LabelledReply("say-gone", "x", 0, 0)]
    check = (await checked(loaded, samples=lost))["grader as labelled"]
    assert check.seen == "no task 'say-gone'"


def test_labelled_replies_are_read(tmp_path: Path) -> None:
    path = tmp_path / "labelled.jsonl"
    rows = [
        {"task": "t", "reply": "7", "reward": [0.5, 1], "why": "near"},
        {"task": "t", "reply": "", "reward": 0},
    ]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n", encoding="utf-8")
    assert read_labelled_replies(path) == [
        LabelledReply("t", "7", 0.5, 1.0, "near"),
        LabelledReply("t", "", 0.0, 0.0, ""),
    ]
    path.write_text('{"task": "t", "reply": "7"}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"line 1 is no labelled reply .*reward"):
        read_labelled_replies(path)
    path.write_text('{"task": "t", "reply": "7", "reward": NaN}', encoding="utf-8")
    with pytest.raises(ValueError, match="line 1 is no labelled reply"):
        read_labelled_replies(path)


# -- a calibration's signal -------------------------------------------------------


def rows(record: Callable[..., Any], *groups: list[float], cut: bool = False) -> Any:
    return [
        record(f"t{number}", reward=reward, rollout_index=i, token_limit=cut)
        for number, group in enumerate(groups)
        for i, reward in enumerate(group)
    ]


def test_a_signal_is_a_spread_within_a_group(record: Callable[..., Any]) -> None:
    check = check_signal(rows(record, [0.2, 0.4], [0.5, 0.5]))
    assert check.passed
    # Means 0.3 and 0.5; spreads 0.2 / √2 and 0.
    assert check.seen == (
        "1 of 2 groups have a reward spread; mean reward 0.40, within-group spread "
        "0.07, 0 of 4 replies cut off"
    )


def test_without_a_signal_the_cause_is_named(record: Callable[..., Any]) -> None:
    flat = check_signal(rows(record, [0, 0], [0, 0]))
    assert not flat.passed
    assert flat.remedy.startswith("Every reply earns the same")
    assert check_signal(rows(record, [0, 0], cut=True)).remedy.startswith("Raise max")
    apart = check_signal(rows(record, [1, 1], [0, 0]))
    assert apart.remedy.startswith("Draw more tasks or larger groups")
    with pytest.raises(ValueError, match="no group to summarise"):
        check_signal([])


def test_the_table_shows_marks_and_remedies() -> None:
    passed = ReadinessCheck("a", True, "1 of 1")
    failed = ReadinessCheck("b", False, "0 of 1", "Add one")
    readiness = Readiness((passed, failed))
    assert readiness.to_markdown().splitlines()[2:] == [
        "| ✓ | a | 1 of 1 | |",
        "| ✗ | b | 0 of 1 | Add one |",
    ]
    assert str(readiness) == "✓ a: 1 of 1\n✗ b: 0 of 1. Add one"
