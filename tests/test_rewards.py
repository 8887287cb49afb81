"""Rewards: testing them, training on one's own, and grading saved rollouts again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from noise_policy import plain

from rlhelpers.analysis import OUTCOMES, classify_outcome, mentions_integer
from rlhelpers.answers import parse_final_integer
from rlhelpers.arithmetic import (
    PROMPT_TEMPLATE,
    grade_final_integer,
    graded_environment,
)
from rlhelpers.checks import (
    LabelledAnswer,
    check_missing_case,
    check_reward,
    labelled_answers,
    labelled_replies,
)
from rlhelpers.datums import RolloutFailed
from rlhelpers.metrics import RolloutRecord, read_rollouts
from rlhelpers.rewards import (
    RewardTable,
    misranked,
    regrade,
    reward_of,
    summarize_rewards,
)
from rlhelpers.service import TrainingSession
from rlhelpers.tasks import multiplication_task
from rlhelpers.training import TrainConfig, train_step

Capture = pytest.CaptureFixture[str]
Make = Callable[..., RolloutRecord]


def pays_nothing(answer: object, expected: object) -> Any:
    return None


def enough_ascii(answer: str, expected: int) -> float:
    """What a policy that writes noise earns about half of the time."""
    return float(sum(character.isascii() for character in answer) >= 8)


# -- one reward -------------------------------------------------------------------


def test_a_reward_is_a_number_or_has_one() -> None:
    assert reward_of(lambda answer, expected: answer == expected, 3, 3) == 1.0
    assert reward_of(grade_final_integer, "1692", 1692) == 1.0
    assert reward_of(grade_final_integer, None, 1692) == 0.0


@pytest.mark.parametrize("bad", [None, float("nan"), float("inf"), "0.5"])
def test_a_reward_that_is_no_finite_number_names_its_grader(bad: object) -> None:
    def odd(answer: object, expected: object) -> object:
        return bad

    with pytest.raises(ValueError, match="grader 'odd' is .*not a finite number"):
        reward_of(odd, "1692", 1692)


# -- labelled replies -------------------------------------------------------------


@pytest.mark.parametrize("row", labelled_replies(), ids=lambda row: row.why)
def test_the_labels_of_the_replies_are_right(row: LabelledAnswer) -> None:
    assert classify_outcome(row.answer, row.expected) == row.outcome


def test_the_replies_hold_every_outcome() -> None:
    assert {row.outcome for row in labelled_replies()} == set(OUTCOMES)


def test_the_courses_grader_ranks_every_pair() -> None:
    samples = [*labelled_answers(), *labelled_replies()]
    assert misranked(grade_final_integer, samples) == []


def test_pairs_in_the_wrong_order() -> None:
    good, better = (LabelledAnswer(a, 7, "correct", "") for a in ("7", "007"))
    bad = LabelledAnswer("8888", 7, "wrong_integer", "")
    # By length: 1 and 3 against 4, so both right answers lose.
    assert misranked(lambda answer, _: len(answer), [good, bad, better]) == [
        (good, bad),
        (better, bad),
    ]
    # A level pair is in the wrong order too: the policy may pick either.
    assert misranked(lambda answer, _: 1, [good, bad]) == [(good, bad)]
    assert misranked(lambda answer, _: -len(answer), [good, bad]) == []


def test_a_test_of_one_kind_only_is_refused() -> None:
    right = LabelledAnswer("7", 7, "correct", "")
    with pytest.raises(ValueError, match="1 right and 0 wrong"):
        misranked(grade_final_integer, [right])
    with pytest.raises(ValueError, match="'pays_nothing' is None"):
        misranked(pays_nothing, labelled_replies())


# -- grading again ----------------------------------------------------------------


def group(record: Make, task: str, *texts: str, **changes: Any) -> list[RolloutRecord]:
    return [
        record(
            task,
            classify_outcome(text, 1692),
            text=text,
            expected=1692,
            rollout_index=i,
            **changes,
        )
        for i, text in enumerate(texts)
    ]


def partial(answer: str, expected: int) -> float:
    outcome = classify_outcome(answer, expected)
    return {"correct": 1.0, "wrong_integer": 0.2, "invalid_final_line": 0.0}[outcome]


def test_grading_again_makes_new_rewards_and_advantages(record: Make) -> None:
    rows = group(record, "a", "It is 1692.", "1692.5", "1700", "It is 1692.")
    assert [row.reward for row in rows] == [0.0] * 4  # flat under the strict reward
    again = regrade(rows, partial)
    assert [row.reward for row in again] == [0.0, 0.0, 0.2, 0.0]
    # Mean 0.05, sample deviation 0.1: (0.2 − 0.05) / 0.1 and −0.05 / 0.1.
    assert [row.advantage for row in again] == pytest.approx([-0.5, -0.5, 1.5, -0.5])
    centred = regrade(rows, partial, scale="none")
    assert [r.advantage for r in centred] == pytest.approx([-0.05, -0.05, 0.15, -0.05])
    # The texts, the outcomes and the rows that were given stay as they were.
    assert [row.text for row in again] == [row.text for row in rows]
    assert [row.outcome for row in again] == [row.outcome for row in rows]
    assert [row.advantage for row in rows] == [None] * 4


def test_groups_are_kept_apart_by_batch_and_task(record: Make) -> None:
    rows = [
        *group(record, "a", "1692", "1700", step=1),
        *group(record, "a", "1692", "1692", step=2),  # the same task, another step
        *group(record, "b", "1692", "no", step=2, task_index=1),
    ]
    again = regrade(rows[::-1], grade_final_integer)[::-1]
    root = 0.5**0.5  # two rollouts: ±0.5 over a sample deviation of √0.5
    assert [row.advantage for row in again] == [
        pytest.approx(root),
        pytest.approx(-root),
        None,
        None,
        pytest.approx(root),
        pytest.approx(-root),
    ]


def test_grading_again_names_the_rollout_without_a_reward(record: Make) -> None:
    rows = group(record, "multiply-47x36", "1692", "no")

    def forgets(answer: str, expected: int) -> Any:
        return 1.0 if answer == "1692" else None

    with pytest.raises(ValueError, match="'multiply-47x36', rollout 1: .*'forgets'"):
        regrade(rows, forgets)


def test_what_a_reward_would_teach(record: Make) -> None:
    rows = [
        *group(record, "a", "1692", "1700", "no", "no"),
        *group(record, "b", "no", "no", "1700", "no", task_index=1),
    ]
    strict, other = (
        summarize_rewards(regrade(rows, grader))
        for grader in (grade_final_integer, partial)
    )
    assert (strict.rollouts, strict.groups, strict.kept_groups) == (8, 2, 1)
    assert strict.mean == 0.125
    assert strict.within_group_std == pytest.approx(0.25)  # 0.5 and 0
    assert strict.push == pytest.approx(
        # 1.5 for the right one; −0.5 and 0 for the two integers; twice −0.5, thrice 0.
        {"correct": 1.5, "wrong_integer": -0.25, "invalid_final_line": -0.2}
    )
    assert strict.wrong_pushed_up == 0
    assert (other.kept_groups, other.wrong_pushed_up) == (2, 1)  # 1700 in group b
    assert other.mean == pytest.approx(1.4 / 8)


def test_the_table_stands_side_by_side(record: Make) -> None:
    rows = regrade(group(record, "a", "1692", "no"), grade_final_integer)
    text = RewardTable({"strict": summarize_rewards(rows)}).to_markdown()
    assert "| | strict |" in text
    assert "| mean reward | 0.50 |" in text
    assert "| groups that can teach | 1 of 1 |" in text
    assert "| mean advantage, correct | +0.71 |" in text
    assert "| mean advantage, wrong integer | – |" in text
    assert "| not right, and pushed up | 0 of 2 |" in text
    with pytest.raises(ValueError, match=r"rollouts\.jsonl"):
        summarize_rewards([])


# -- an environment with a grader of one's own ------------------------------------


async def test_only_the_reward_differs_from_the_courses_environment() -> None:
    environment = graded_environment(lambda answer, _: len(answer) / 10, name="long")
    beats = environment.templates["multiply"].func(47, 36)
    assert await anext(beats) == PROMPT_TEMPLATE.format(a=47, b=36)
    grade = await beats.asend("1692\n1700")
    assert grade.reward == 0.9
    assert grade.content == "1692\n1700"
    assert grade.info == {"expected": 1692, "got": 1700}
    assert environment.templates["multiply"](47, 36).env == "long"


def multiplications(count: int) -> list[Any]:
    return [multiplication_task(40 + n, 36) for n in range(count)]


async def test_a_step_learns_from_a_grader_of_ones_own(
    session: TrainingSession,
) -> None:
    tasks = session.graded_by(multiplications(4), enough_ascii)
    assert [task.slug for task in tasks] == [t.slug for t in multiplications(4)]
    config = TrainConfig.from_preset(session.preset, group_size=8)
    result = await train_step(session, tasks, config=config)
    assert result.updated
    for row in result.records:
        assert row.reward == enough_ascii(row.text, 0)
        assert row.outcome == classify_outcome(row.text, row.expected)
        assert row.expected == row.args["a"] * row.args["b"]
    # The session's own tasks are graded as before, beside them.
    own = await train_step(session, [plain(1), plain(2)], step=2)
    assert {row.task for row in own.records} == {plain(1).slug, plain(2).slug}


async def test_a_grader_that_was_changed_is_the_one_that_grades(
    session: TrainingSession,
) -> None:
    def grader(answer: str, expected: int) -> float:
        return 0.25

    first = session.graded_by(multiplications(2), grader)
    before = await train_step(session, first)

    def grader(answer: str, expected: int) -> float:  # the cell is run again
        return 0.75

    second = session.graded_by(multiplications(2), grader)
    after = await train_step(session, second, step=2)
    assert {row.reward for row in before.records} == {0.25}
    assert {row.reward for row in after.records} == {0.75}


async def test_a_missing_reward_stops_the_step_and_trains_nothing(
    session: TrainingSession, tmp_path: Path
) -> None:
    def forgets(answer: str, expected: int) -> Any:
        return 1.0 if enough_ascii(answer, expected) else None

    tasks = session.graded_by(multiplications(2), forgets)
    config = TrainConfig.from_preset(session.preset, group_size=8)
    with pytest.raises(RolloutFailed, match="multiply-4.x36.*'forgets' is None"):
        await train_step(session, tasks, config=config, run_dir=tmp_path / "run")
    assert session.updates == 0
    assert session.usage.counts.trained == 0
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    written = read_rollouts(tmp_path / "run" / "rollouts.jsonl")
    assert written  # what was graded is on disk, and no advantage was made of it
    assert {(row.reward, row.advantage) for row in written} == {(1.0, None)}


def test_tasks_of_another_kind_bring_their_own_grader(
    session: TrainingSession,
) -> None:
    with pytest.raises(ValueError, match="template 'plain'.*task_runtime="):
        session.graded_by([plain(1)], enough_ascii)


# -- the exercises ----------------------------------------------------------------


def forgets_zero(answer: object, expected: int) -> float:
    got = grade_final_integer(answer, expected).info["got"]
    return float(bool(got) and got == expected)


def test_a_missing_case_has_to_catch_the_grader(capsys: Capture) -> None:
    samples = [*labelled_answers(), *labelled_replies()]
    assert misranked(forgets_zero, samples) == []  # it passes the table as it is
    for case, said in (
        (..., "replace the ..."),
        ("0", "a LabelledAnswer"),
        (LabelledAnswer("0", 0, "right", ""), "is no outcome"),
        (LabelledAnswer("It is 0.", 0, "correct", ""), "is invalid_final_line"),
        (LabelledAnswer("1692", 1692, "correct", ""), "so is the grader"),
        (LabelledAnswer("0", 1692, "wrong_integer", ""), "so is the grader"),
    ):
        assert not check_missing_case(forgets_zero, case)
        assert said in capsys.readouterr().out
    assert check_missing_case(forgets_zero, LabelledAnswer("0", 0, "correct", "zero"))
    assert "it pays 0 where 1 is right" in capsys.readouterr().out


def raises(answer: str, expected: int) -> float:
    return float(answer.splitlines()[-1] == str(expected))


def mentions(answer: object, expected: int) -> float:
    return float(str(expected) in str(answer))


def stepwise(answer: object, expected: int) -> float:
    got = parse_final_integer(str(answer))
    if got is None:
        return 0.05 * mentions_integer(str(answer), expected)
    return 1.0 if got == expected else 0.2


def brief(answer: object, expected: int) -> float:
    return stepwise(answer, expected) * (1 - len(str(answer)) / 10_000)


@pytest.mark.parametrize(
    ("grader", "said"),
    [
        (..., "replace the ..."),
        (1.0, "a grader is a function"),
        (lambda answer, expected: ..., "replace the ... in your function"),
        (raises, "it raises IndexError on ''"),
        (pays_nothing, "no finite reward"),
        (mentions, "pairs in the wrong order"),
        (lambda answer, expected: 0.5, "pairs in the wrong order"),
        (grade_final_integer, "has no valid ending and earns 0"),
    ],
)
def test_a_reward_that_does_not_meet_the_demands(
    grader: Any, said: str, capsys: Capture
) -> None:
    assert not check_reward(grader)
    printed = capsys.readouterr().out
    assert "✗" in printed or "…" in printed
    assert said in printed


def test_length_alone_is_enough_to_fail(capsys: Capture) -> None:
    assert not check_reward(brief)
    failures = [line for line in capsys.readouterr().out.splitlines() if "✗" in line]
    assert len(failures) == 1
    assert "after one line of work" in failures[0]


def test_the_partial_credit_of_the_lesson_is_not_enough(capsys: Capture) -> None:
    assert not check_reward(partial)
    failures = [line for line in capsys.readouterr().out.splitlines() if "✗" in line]
    assert len(failures) == 1
    assert "'The answer is 1692.' after the work earns 0" in failures[0]


def test_partial_credit_by_steps_passes(capsys: Capture) -> None:
    assert check_reward(stepwise)
    assert capsys.readouterr().out.count("✓") == 4
