"""The grader and the HUD environment. Ids such as G01 name known failures."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import pytest
from hud.agents.base import Agent
from hud.agents.types import AgentStep, Sample
from hud.eval import LocalRuntime, Run, Shared, Taskset

import rlhelpers.arithmetic as arithmetic
from rlhelpers.analysis import classify_outcome
from rlhelpers.answers import LongInteger, final_line, parse_final_integer
from rlhelpers.arithmetic import PROMPT_TEMPLATE, env, grade_final_integer
from rlhelpers.tasks import multiplication_task

NINES = "9" * 5000

# (case, answer, expected, outcome, what the grader records as read)
CASES: list[tuple[str, Any, int, str, Any]] = [
    ("G01", "36*47=1692\nThat took 3 steps.", 1692, "invalid_final_line", None),
    ("G02", "1440 + 252\nThe answer is 1692.", 1692, "invalid_final_line", None),
    ("G03", "1,692", 1692, "correct", 1692),
    ("G03", "1,234,567", 1234567, "correct", 1234567),
    ("G03-bad-groups", "1,23,4567", 1234567, "invalid_final_line", None),
    ("G03-bad-groups", "1234,567", 1234567, "invalid_final_line", None),
    ("G03-bad-groups", "1692,", 1692, "invalid_final_line", None),
    ("G03-bad-groups", ",692", 692, "invalid_final_line", None),
    ("G05", "**1692**", 1692, "correct", 1692),
    ("G05", r"\boxed{1692}", 1692, "correct", 1692),
    ("G05", "`1692`", 1692, "correct", 1692),
    ("G05", "$1692$", 1692, "correct", 1692),
    ("G05-nested", r"$\boxed{1,692}$.", 1692, "correct", 1692),
    ("G05-nested", r"\boxed{$1692$}.", 1692, "correct", 1692),
    ("G05-nested", "**1692.**", 1692, "correct", 1692),
    ("G05-open", r"\boxed{1692", 1692, "invalid_final_line", None),
    ("G05-twice", r"\boxed{1}\boxed{692}", 1692, "invalid_final_line", None),
    ("G07", "1692.", 1692, "correct", 1692),
    ("G07", "$1,692", 1692, "correct", 1692),
    ("G07", "1692!", 1692, "invalid_final_line", None),
    ("G07-decimal", "1692.0", 1692, "invalid_final_line", None),
    ("G07-dots", "1692...", 1692, "invalid_final_line", None),
    ("G09", "-1692", -1692, "correct", -1692),
    ("G09", "1692", -1692, "wrong_integer", 1692),
    ("G09", "+1692", 1692, "correct", 1692),
    ("G09", "-1692", 1692, "wrong_integer", -1692),
    ("G09-minus-sign", "\N{MINUS SIGN}1692", -1692, "invalid_final_line", None),
    ("G11", "01692", 1692, "correct", 1692),
    ("G11", "0", 0, "correct", 0),
    ("G11", "00", 0, "correct", 0),
    ("G11", "-0", 0, "correct", 0),
    ("G11-long", "0" * 5000 + "1692", 1692, "correct", 1692),
    ("G13", "1_692", 1692, "invalid_final_line", None),
    ("G13-digits", "١٦٩٢", 1692, "invalid_final_line", None),
    ("G13-digits", "１６９２", 1692, "invalid_final_line", None),
    ("G13-superscript", "169²", 1692, "invalid_final_line", None),
    ("G15", NINES, 1692, "wrong_integer", "an integer of 5000 digits"),
    ("G15", "-" + NINES, 1692, "wrong_integer", "an integer of 5000 digits"),
    ("G17", "", 1692, "invalid_final_line", None),
    ("G17", "\n\n  ", 1692, "invalid_final_line", None),
    ("G17", None, 1692, "invalid_final_line", None),
    ("G17-not-text", 1692, 1692, "invalid_final_line", None),
    ("G17-not-text", {"answer": "1692"}, 1692, "invalid_final_line", None),
    ("G18", "1428", 42, "wrong_integer", 1428),
    ("G18", "42 or 43", 42, "invalid_final_line", None),
    ("G18", "x42", 42, "invalid_final_line", None),
    ("G19", "1692 1692", 1692, "invalid_final_line", None),
    ("G19", "1692, 1692", 1692, "invalid_final_line", None),
    ("G19", "1692/1692", 1692, "invalid_final_line", None),
    ("G20", "121932631112635268", 121932631112635269, "wrong_integer", ...),
    ("G20", "121932631112635269", 121932631112635269, "correct", ...),
    ("G23", "36*40=1440\n1440", 1692, "wrong_integer", 1440),
    ("G23-cut-but-right", "36*40=1440\n1692", 1692, "correct", 1692),
    ("G23-open-thought", "<think>36*40\n1692", 1692, "invalid_final_line", None),
    ("G23-thought", "<think>36*40</think>\n1692", 1692, "correct", 1692),
    ("lines", "1692\n\n \t\n", 1692, "correct", 1692),
    ("lines", "work\r\n1692\r\n", 1692, "correct", 1692),
    ("lines", "1692\nDone", 1692, "invalid_final_line", None),
    ("blanks", "  ** 1692 **  ", 1692, "correct", 1692),
    ("blanks", "- 1692", -1692, "invalid_final_line", None),
    ("surrogate", "\ud800\n1692", 1692, "correct", 1692),
]


@pytest.mark.parametrize(
    ("answer", "expected", "outcome", "got"),
    [case[1:] for case in CASES],
    ids=[f"{case[0]}-{i}" for i, case in enumerate(CASES)],
)
def test_grader_and_outcome_agree(
    answer: Any, expected: int, outcome: str, got: Any
) -> None:
    result = grade_final_integer(answer, expected)
    assert result.reward == (1.0 if outcome == "correct" else 0.0)
    assert classify_outcome(answer, expected) == outcome
    assert result.info["expected"] == expected
    if got is not ...:
        assert result.info["got"] == got
    assert not result.isError
    json.dumps(result.model_dump(mode="json"), allow_nan=False)


def test_content_is_the_graded_text() -> None:
    assert grade_final_integer("36\n1692", 1692).content == "36\n1692"
    assert grade_final_integer(None, 1692).content == ""


def test_g15_limit_does_not_depend_on_the_interpreter_setting() -> None:
    limit = sys.get_int_max_str_digits()
    try:
        for setting in (640, 0):
            sys.set_int_max_str_digits(setting)
            assert parse_final_integer(NINES) == LongInteger(5000)
        sys.set_int_max_str_digits(640)
        assert parse_final_integer("9" * 1000) == LongInteger(1000)
    finally:
        sys.set_int_max_str_digits(limit)


@pytest.mark.parametrize(
    "answer",
    [
        "9" * 2_000_000,
        "1," + "234," * 500_000,
        "1" + ",234" * 500_000 + "x",
        "*" * 2_000_000 + "1",
        r"\boxed{" * 300_000 + "}" * 300_000,
        "\n " * 1_000_000,
        " ." * 1_000_000,
        "<think>" * 300_000,
    ],
    ids=["nines", "commas", "groups", "stars", "boxes", "blank", "stops", "thoughts"],
)
def test_adversarial_text_takes_linear_time(answer: str) -> None:
    def seconds(text: str) -> float:
        started = time.process_time()
        grade_final_integer(text, 1692)
        return time.process_time() - started

    # CPU time. Quadratic work on two million characters takes minutes, not seconds.
    assert seconds(answer) < 5


def test_final_line_of_a_reply() -> None:
    assert final_line("a\n  b  \n\n") == "b"
    assert final_line(None) == ""


def test_parse_is_the_same_for_any_wrapping_that_is_accepted() -> None:
    for text in ("1692", "**1692**", "`1692`.", "$1692.$", r"**\boxed{1,692}**"):
        assert parse_final_integer(text) == 1692


# Through the real HUD


class ScriptedAgent(Agent):
    """Answers from a table, as a policy agent would: a step with a token sample."""

    def __init__(self, replies: dict[str, Any]) -> None:
        super().__init__()
        self.replies = replies
        self.prompts: list[str] = []

    async def __call__(self, run: Run) -> None:
        self.prompts.append(run.prompt_text)
        reply = self.replies[run.prompt_text]
        if isinstance(reply, Exception):
            raise reply
        if callable(reply):
            reply = reply(run)
        sample = Sample(
            prompt_token_ids=[1, 2], output_token_ids=[3], output_logprobs=[-0.5]
        )
        run.record(AgentStep(content=reply, sample=sample, done=True))
        run.trace.content = reply


def prompt(a: int, b: int) -> str:
    return PROMPT_TEMPLATE.format(a=a, b=b)


async def run_tasks(
    replies: dict[tuple[int, int], Any], group: int = 1
) -> dict[str, list[Run]]:
    agent = ScriptedAgent({prompt(a, b): reply for (a, b), reply in replies.items()})
    tasks = Taskset("test", [multiplication_task(a, b) for a, b in replies])
    runtime = Shared(LocalRuntime(env), width=8)
    job = await tasks.run(agent, runtime=runtime, group=group)
    runs: dict[str, list[Run]] = {}
    for run in job.runs:
        runs.setdefault(str(run.slug), []).append(run)
    return runs


def test_prompt_is_exactly_as_published() -> None:
    assert prompt(47, 36) == (
        "Compute 47 * 36. Work step by step, then write only the final integer on "
        "the last line."
    )


async def test_hud_run_carries_reward_content_and_info() -> None:
    runs = await run_tasks(
        {
            (36, 47): "36 * 47 = 1440 + 252\n1692",
            (12, 12): "The answer is 144.",
            (11, 11): "122",
            (9, 9): NINES,
        },
        group=2,
    )
    right = runs["multiply-36x47"][0]
    assert right.trace.status == "completed"
    assert not right.grade.is_error
    assert right.grade.reward == 1.0
    assert right.grade.content == "36 * 47 = 1440 + 252\n1692"
    assert right.grade.info == {"expected": 1692, "got": 1692}
    assert runs["multiply-12x12"][0].grade.info == {"expected": 144, "got": None}
    assert runs["multiply-11x11"][0].grade.info == {"expected": 121, "got": 122}
    assert runs["multiply-9x9"][0].grade.info["got"] == "an integer of 5000 digits"
    assert [run.grade.reward for run in runs["multiply-11x11"]] == [0.0, 0.0]
    first, second = runs["multiply-36x47"]
    assert first.group_id == second.group_id != runs["multiply-12x12"][0].group_id


async def test_hud_keeps_a_number_of_four_thousand_digits() -> None:
    run = (await run_tasks({(2, 3): "9" * 4000}))["multiply-2x3"][0]
    assert run.trace.status == "completed"
    assert run.grade.info["got"] == int("9" * 4000)


@pytest.mark.parametrize("reply", ["", None, lambda run: run.prompt_text])
async def test_g21_prompt_is_never_graded_as_the_reply(reply: Any) -> None:
    run = (await run_tasks({(1, 1): reply}))["multiply-1x1"][0]
    assert run.trace.status == "completed"
    assert run.grade.reward == 0.0
    assert run.grade.info == {"expected": 1, "got": None}


async def test_g25_grader_that_raises_is_a_failed_run_not_a_zero(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from rlhelpers.datums import RolloutFailed, check_run, make_training_batch

    genuine = grade_final_integer

    def broken(answer: object, expected: int) -> Any:
        if answer == "13":
            raise RuntimeError("the grader broke")
        return genuine(answer, expected)

    monkeypatch.setattr(arithmetic, "grade_final_integer", broken)
    runs = await run_tasks({(2, 3): "6", (3, 4): "13"})
    check_run(runs["multiply-2x3"][0])
    failed = runs["multiply-3x4"][0]
    assert failed.trace.status == "error"
    with pytest.raises(RolloutFailed, match="multiply-3x4"):
        check_run(failed)
    with pytest.raises(RolloutFailed, match="grader broke"):
        make_training_batch([run for group in runs.values() for run in group])


async def test_a09_agent_that_raises_after_a_right_answer_does_not_count() -> None:
    from rlhelpers.datums import RolloutFailed, check_run

    def answer_then_break(run: Run) -> str:
        run.trace.content = "6"
        raise RuntimeError("connection lost")

    run = (await run_tasks({(2, 3): answer_then_break}))["multiply-2x3"][0]
    assert run.grade.reward == 1.0  # HUD graded what was there
    with pytest.raises(RolloutFailed, match=r"multiply-2x3.*connection lost"):
        check_run(run)
