"""What looks wrong in a run: every check on rows made by hand."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from rlhelpers import diagnose
from rlhelpers.diagnosis import CHECKS, Diagnosis
from rlhelpers.metrics import (
    ResumeState,
    RolloutRecord,
    StepMetrics,
    append_metrics,
    append_rollouts,
    write_resume_state,
)


def rollout(
    step: int, task: int, index: int, *, right: bool = True, **changes: Any
) -> RolloutRecord:
    """A training rollout: right, or else a wrong integer."""
    values: dict[str, Any] = {
        "run_id": "run",
        "phase": "train",
        "step": step,
        "task": f"multiply-{step}x{task}",
        "task_index": task,
        "rollout_index": index,
        "text": "12",
        "reward": float(right),
        "outcome": "correct" if right else "wrong_integer",
        "prompt_tokens": 38,
        "output_tokens": 30,
    }
    return RolloutRecord(**{**values, **changes})


def group(
    step: int, task: int, right: int, size: int = 4, **changes: Any
) -> list[RolloutRecord]:
    """A group with ``right`` right replies of ``size``."""
    return [
        rollout(step, task, index, right=index < right, **changes)
        for index in range(size)
    ]


def mixed_rollouts(steps: Iterable[int]) -> list[RolloutRecord]:
    """Four groups a step, two of them mixed, mean reward 0.5."""
    return [
        record
        for step in steps
        for task, right in enumerate((4, 2, 2, 0))
        for record in group(step, task, right)
    ]


def row(step: int, **changes: Any) -> StepMetrics:
    """A healthy step of four groups of four, two of them kept."""
    values: dict[str, Any] = {
        "run_id": "run",
        "step": step,
        "rollouts": 16,
        "valid_rollouts": 16,
        "kept_groups": 2,
        "correct": 8,
        "wrong_integer": 4,
        "invalid_final_line": 4,
        "entropy": 0.1,
        "mean_output_tokens": 30.0,
        "max_ratio_error": 2e-5,
        "seconds": 2.0,
    }
    return StepMetrics.example(**{**values, **changes})


def state(steps: int, next_step: int, **changes: Any) -> ResumeState:
    values: dict[str, Any] = {
        "run_id": "run",
        "next_step": next_step,
        "seed": 0,
        "pool_position": next_step - 1,
        "checkpoint": "local/run-" + "a" * 32 + "/final-state",
        "base_model": "local/tiny-arithmetic",
        "model": "tiny-arithmetic",
        "config": {"steps": steps, "tasks_per_step": 4, "group_size": 4},
    }
    return ResumeState(**{**values, **changes})


def write(
    folder: Path,
    metrics: Iterable[StepMetrics] = (),
    rollouts: Iterable[RolloutRecord] | None = None,
    resume: ResumeState | None = None,
) -> Path:
    """A run's folder; without ``rollouts`` mixed ones for every step."""
    rows = list(metrics)
    for step in rows:
        append_metrics(folder / "metrics.jsonl", step)
    if rollouts is None:
        rollouts = mixed_rollouts(step.step for step in rows)
    append_rollouts(folder / "rollouts.jsonl", rollouts)
    if resume is not None:
        write_resume_state(folder / "resume.json", resume)
    return folder


def only(diagnosis: Diagnosis, code: str) -> Any:
    assert diagnosis.codes == (code,), str(diagnosis)
    return diagnosis[0]


# -- nothing wrong ----------------------------------------------------------------


def test_a_healthy_run_gives_no_finding(tmp_path: Path) -> None:
    rows = [row(step, reward_mean=0.5 + 0.04 * step) for step in range(1, 11)]
    folder = write(tmp_path, rows, resume=state(10, 11))
    diagnosis = diagnose(folder, now=os.path.getmtime(folder / "metrics.jsonl") + 9e9)
    assert list(diagnosis) == []
    assert len(diagnosis) == 0
    assert str(diagnosis) == (
        f"Nothing looks wrong: 10 steps, 160 training rollouts, {len(CHECKS)} checks."
    )


def test_mastery_at_the_end_is_no_fault(tmp_path: Path) -> None:
    """All right, flat, no entropy left, no update: that is what success looks like."""
    end = {"reward_mean": 1.0, "kept_groups": 0, "updated": False, "entropy": 0.0}
    rows = [row(step) for step in range(1, 6)]
    rows += [row(step, **end) for step in range(6, 16)]
    rollouts = mixed_rollouts(range(1, 6))
    for step in range(6, 16):
        for task in range(4):
            rollouts += group(step, task, right=4)
    assert diagnose(write(tmp_path, rows, rollouts)).codes == ()


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"gone does not exist; give the"):
        diagnose(tmp_path / "gone")
    with pytest.raises(FileNotFoundError, match=r"holds no metrics\.jsonl"):
        diagnose(tmp_path)


def test_diagnosis_changes_nothing(tmp_path: Path) -> None:
    folder = write(tmp_path, [row(1), row(2)], resume=state(2, 3))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    diagnose(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


# -- reward -----------------------------------------------------------------------


@pytest.mark.parametrize("reward", ["NaN", "Infinity", "null", '"1"', "true"])
def test_a_reward_that_is_no_finite_number(tmp_path: Path, reward: str) -> None:
    folder = write(tmp_path, [row(1)])
    good = json.dumps(rollout(1, 0, 3).to_row())
    line = good.replace('"reward": 1.0', f'"reward": {reward}')
    assert line != good
    with (folder / "rollouts.jsonl").open("a") as file:
        file.write(line + "\n")
    finding = only(diagnose(folder), "bad_reward")
    assert finding.area == "environment"
    assert "1 in all, the first: " in finding.numbers
    assert "line 17" in finding.numbers


def test_a_missing_reward(tmp_path: Path) -> None:
    folder = write(tmp_path, [row(1)])
    values = rollout(1, 0, 3).to_row()
    del values["reward"]
    with (folder / "rollouts.jsonl").open("a") as file:
        file.write(json.dumps(values) + "\n")
    assert "reward missing" in only(diagnose(folder), "bad_reward").numbers


# -- flat reward ------------------------------------------------------------------


def flat_run(folder: Path, steps: int = 2, size: int = 4, **changes: Any) -> Any:
    rollouts = [
        record
        for step in range(1, steps + 1)
        for task in range(4)
        for record in group(step, task, size=size, **changes)
    ]
    mean = sum(record.reward for record in rollouts) / len(rollouts)
    numbers = {"kept_groups": 0, "updated": False, "reward_mean": mean}
    rows = [row(step, **numbers) for step in range(1, steps + 1)]
    return only(diagnose(write(folder, rows, rollouts)), "flat_reward")


@pytest.mark.parametrize(
    ("changes", "area", "said"),
    [
        ({"right": 4}, "input", "Too easy."),
        ({"right": 0}, "input", "Too hard."),
        (
            {"right": 0, "outcome": "invalid_final_line", "token_limit": True},
            "parameters",
            "Token limit first.",
        ),
        ({"right": 0, "outcome": "invalid_final_line"}, "input", "never valid"),
        ({"right": 4, "outcome": None}, "input", "Too easy."),
        ({"right": 0, "outcome": None}, "input", "Too hard."),
        (
            {"right": 0, "outcome": None, "token_limit": True},
            "parameters",
            "Token limit first.",
        ),
    ],
)
def test_flat_reward_names_its_cause(
    tmp_path: Path, changes: dict[str, Any], area: str, said: str
) -> None:
    finding = flat_run(tmp_path, **changes)
    assert finding.area == area
    assert said in finding.headline
    assert "0 of 8 groups of the first 2 steps have a spread" in finding.numbers
    right = changes["right"] / 4
    assert f"mean reward {right:.2f}" in finding.numbers


def test_flat_groups_behind_a_healthy_mean(tmp_path: Path) -> None:
    """Half of the tasks all right, half all wrong: mean 0.5, nothing to learn."""
    rollouts = [
        record
        for step in (1, 2)
        for task in range(4)
        for record in group(step, task, right=4 if task % 2 else 0)
    ]
    rows = [row(step, kept_groups=0, updated=False) for step in (1, 2)]
    finding = only(diagnose(write(tmp_path, rows, rollouts)), "flat_reward")
    assert "mean reward 0.50" in finding.numbers
    assert finding.headline == "Flat reward. No signal."


def test_a_quarter_of_the_groups_with_a_spread_is_enough(tmp_path: Path) -> None:
    rollouts = [r for task, n in enumerate((4, 3, 4, 4)) for r in group(1, task, n)]
    assert diagnose(write(tmp_path, [row(1)], rollouts)).codes == ()


def test_rewards_that_go_flat_before_mastery(tmp_path: Path) -> None:
    rows = [row(step) for step in range(1, 13)]
    rollouts = mixed_rollouts(range(1, 8))
    for step in range(8, 13):
        for task in range(4):
            rollouts += group(step, task, right=0)
    finding = only(diagnose(write(tmp_path, rows, rollouts)), "flat_reward")
    assert "0 of 20 groups of the last 5 steps" in finding.numbers
    assert "Too hard." in finding.headline


def test_a_calibration_is_judged_too(tmp_path: Path) -> None:
    rollouts = [r for task in range(6) for r in group(0, task, 4, phase="calibrate")]
    finding = only(diagnose(write(tmp_path, rollouts=rollouts)), "flat_reward")
    assert "Too easy." in finding.headline


# -- empty answers ----------------------------------------------------------------


def test_empty_answers(tmp_path: Path) -> None:
    rollouts = mixed_rollouts([1, 2, 3])
    empty = [
        rollout(3, 9, index, right=False, text=" \n", output_tokens=index)
        for index in range(3)
    ]
    finding = only(
        diagnose(write(tmp_path, [row(n) for n in (1, 2, 3)], [*rollouts, *empty])),
        "empty_answers",
    )
    # 48 + 3 rollouts; of the three empty ones two have at most one token.
    assert "3 of 51 rollouts; 2 of them ended at once, 0 were cut off" in (
        finding.numbers
    )
    assert finding.area == "input"


def test_two_empty_answers_are_left_alone(tmp_path: Path) -> None:
    empty = [rollout(1, 9, n, right=False, text="") for n in range(2)]
    rollouts = [*mixed_rollouts([1]), *empty]
    assert diagnose(write(tmp_path, [row(1)], rollouts)).codes == ()


# -- no update --------------------------------------------------------------------


@pytest.mark.parametrize(("stalled", "found"), [(4, False), (5, True)])
def test_steps_without_an_update(tmp_path: Path, stalled: int, found: bool) -> None:
    rows = [
        row(step, updated=not 3 <= step < 3 + stalled, note="all flat")
        for step in range(1, 13)
    ]
    diagnosis = diagnose(write(tmp_path, rows))
    if not found:
        assert diagnosis.codes == ()
        return
    finding = only(diagnosis, "no_update")
    assert "steps 3 to 7 had no group with a spread" in finding.numbers
    assert "mean reward of 0.50" in finding.numbers
    assert "all flat" in finding.advice


# -- failed rollouts --------------------------------------------------------------


def test_rollouts_missing_from_a_step(tmp_path: Path) -> None:
    rows = [row(1), row(2, valid_rollouts=15, wrong_integer=3)]
    finding = only(diagnose(write(tmp_path, rows)), "failed_rollouts")
    assert finding.area == "environment"
    assert finding.numbers == "step 2 has 15 of 16 rollouts"


def test_a_step_that_stopped_half_way(tmp_path: Path) -> None:
    rollouts = [*mixed_rollouts([1, 2]), *group(3, 0, 2), rollout(3, 1, 0)]
    folder = write(tmp_path, [row(1), row(2)], rollouts)
    assert only(diagnose(folder), "failed_rollouts").numbers == (
        "step 3 has 5 of 16 rollouts"
    )


def test_a_first_step_that_stopped_half_way(tmp_path: Path) -> None:
    folder = write(tmp_path, rollouts=group(1, 0, 2), resume=state(4, 1))
    now = os.path.getmtime(folder / "rollouts.jsonl")
    assert only(diagnose(folder, now=now), "failed_rollouts").numbers == (
        "step 1 has 4 of 16 rollouts"
    )


def test_a_step_that_is_sampled_and_not_yet_trained_on_is_none(tmp_path: Path) -> None:
    assert diagnose(write(tmp_path, [row(1)], mixed_rollouts([1, 2]))).codes == ()


def test_an_evaluation_with_fewer_tasks_than_its_twin(tmp_path: Path) -> None:
    sides = [rollout(0, task, 0, phase="before") for task in range(8)]
    sides += [rollout(0, task, 0, phase="after") for task in range(6)]
    folder = write(tmp_path, [row(1)], [*mixed_rollouts([1]), *sides])
    assert only(diagnose(folder), "failed_rollouts").numbers == (
        "phase 'after' has 6 of 8 rollouts"
    )


# -- trends -----------------------------------------------------------------------


def two_halves(
    folder: Path, first: dict[str, Any], last: dict[str, Any], steps: int = 10
) -> Diagnosis:
    rows = [
        row(step, **(first if step <= steps // 2 else last))
        for step in range(1, steps + 1)
    ]
    return diagnose(write(folder, rows))


BETTER_FORM = {"correct": 8, "wrong_integer": 2, "invalid_final_line": 6}


def test_the_form_improves_while_wrong_integers_grow(tmp_path: Path) -> None:
    worse = {"correct": 7, "wrong_integer": 9, "invalid_final_line": 0}
    finding = only(
        two_halves(tmp_path, BETTER_FORM, {**worse, "learning_rate": 2e-3}),
        "wrong_integers_grow",
    )
    # 2 of 10 valid endings, then 9 of 16; 6 of 16 invalid, then none.
    assert "wrong integers among valid endings 20% → 56%" in finding.numbers
    assert "invalid endings 38% → 0%" in finding.numbers
    assert "learning rate of 0.002" in finding.numbers
    assert finding.area == "parameters"


def test_cut_off_replies_that_become_wrong_ones_are_no_such_rise(
    tmp_path: Path,
) -> None:
    """From 6 invalid to none, and the share right among valid endings unchanged."""
    same = {"correct": 13, "wrong_integer": 3, "invalid_final_line": 0}
    assert two_halves(tmp_path, BETTER_FORM, same).codes == ()


def test_a_rise_within_chance_is_left_alone(tmp_path: Path) -> None:
    """20 groups a side: two standard errors of a share near 0.29 are 0.29."""
    little = {"correct": 10, "wrong_integer": 6, "invalid_final_line": 0}
    assert two_halves(tmp_path, BETTER_FORM, little).codes == ()


def test_a_few_steps_have_no_trend(tmp_path: Path) -> None:
    worse = {"correct": 0, "wrong_integer": 16, "invalid_final_line": 0}
    assert two_halves(tmp_path, BETTER_FORM, worse, steps=5).codes == ()


# -- held-out tasks ---------------------------------------------------------------


RIGHT, WRONG, INVALID = "correct", "wrong_integer", "invalid_final_line"


def held_out(folder: Path, *counts: tuple[int, str, str]) -> Diagnosis:
    """A run evaluated on as many tasks as ``counts`` say: how many, before, after."""
    sides = []
    task = 0
    for count, *outcomes in counts:
        for _ in range(count):
            for phase, outcome in zip(("before", "after"), outcomes, strict=True):
                place = {"phase": phase, "outcome": outcome}
                right = outcome == RIGHT
                sides.append(rollout(0, task, 0, right=right, **place))
            task += 1
    return diagnose(write(folder, [row(1)], [*mixed_rollouts([1]), *sides]))


def test_held_out_tasks_that_get_worse(tmp_path: Path) -> None:
    """Nine of nine changes for the worse: 2 / 2^9 = 0.0039 by chance."""
    diagnosis = held_out(tmp_path, (11, RIGHT, RIGHT), (9, RIGHT, INVALID))
    finding = only(diagnosis, "held_out_worse")
    assert finding.area == "parameters"
    assert finding.headline == "Held-out tasks earn less than before training."
    assert finding.numbers == (
        "of 20 tasks 9 earn less and 0 more than before (exact sign test, p = 0.0039) "
        "at a learning rate of 0.0001"
    )


def test_repaired_endings_do_not_hide_integers_that_became_wrong(
    tmp_path: Path,
) -> None:
    """In all 20 better and 12 worse; of those valid on both sides 1 and 12."""
    diagnosis = held_out(
        tmp_path,
        (30, RIGHT, RIGHT),
        (19, INVALID, RIGHT),
        (12, RIGHT, WRONG),
        (1, WRONG, RIGHT),
    )
    finding = only(diagnosis, "held_out_worse")
    assert "valid ending now end on wrong integers" in finding.headline
    # 2 · (1 + 13) / 2^13
    assert "of 43 tasks 12 earn less and 1 more than before" in finding.numbers
    assert "p = 0.0034" in finding.numbers


@pytest.mark.parametrize(
    "counts",
    [
        ((7, RIGHT, WRONG),),  # 2 / 2^7 = 0.016 by chance
        ((10, RIGHT, WRONG), (1, WRONG, RIGHT)),  # 2 · 12 / 2^11 = 0.012
        ((9, INVALID, WRONG),),  # cut off before, wrong now: no loss
        ((9, WRONG, RIGHT), (20, INVALID, RIGHT)),  # better
    ],
)
def test_held_out_tasks_that_changed_by_chance_or_for_the_better(
    tmp_path: Path, counts: tuple[tuple[int, str, str], ...]
) -> None:
    assert held_out(tmp_path, *counts).codes == ()


def test_held_out_rewards_without_outcomes(tmp_path: Path) -> None:
    sides = [
        rollout(0, n, 0, phase=phase, outcome=None, reward=reward)
        for n in range(8)
        for phase, reward in (("before", 0.6), ("after", 0.5))
    ]
    folder = write(tmp_path, [row(1)], [*mixed_rollouts([1]), *sides])
    # Eight of eight: 2 / 2^8 = 0.0078.
    assert "8 earn less and 0 more than before (exact sign test, p = 0.0078)" in (
        only(diagnose(folder), "held_out_worse").numbers
    )


# -- the size of an update --------------------------------------------------------


def moved(folder: Path, *nats: float, resume: Any = None, **changes: Any) -> Diagnosis:
    """A step for each KL, in nats per reply of 30 tokens; 16 rollouts a step."""
    rows = [row(n, kl=kl / 30, **changes) for n, kl in enumerate(nats, start=1)]
    return diagnose(write(folder, rows, resume=resume))


def test_updates_that_are_too_large(tmp_path: Path) -> None:
    """2 nats less 2·√(2·2/16) are 1: 1, 1/4, 1/9 and 1/16 for a single update."""
    finding = only(moved(tmp_path, 0, 2, 2, 2, 2), "large_updates")
    assert finding.area == "parameters"
    assert finding.numbers == (
        "step 2, 1 updates from the base: KL 2.00 nats per reply, at least 1.00 for "
        "each update; 0.08 or more at 3 steps, at a learning rate of 0.0001"
    )


@pytest.mark.parametrize(
    "nats",
    [
        (0, 2, 0, 0, 2),  # 1/16 at step 5: one step alone shows it
        (0, 0.5, 0.5, 0.5, 0.5),  # 0.5 less 2·√(2·0.5/16): nothing is left
        (0, 0.01, 0.1, 0.3, 0.6),  # 0.0375 a square of updates, as a healthy run
        (0, -0.1, -0.2, -0.1, 0.1),  # an estimate may be below 0
    ],
)
def test_updates_that_are_not(tmp_path: Path, nats: tuple[float, ...]) -> None:
    assert moved(tmp_path, *nats).codes == ()


def test_several_updates_a_step_are_each_smaller(tmp_path: Path) -> None:
    """Four a step: 1/16 and 1/64 where one would be 1 and 1/4."""
    config = {"tasks_per_step": 4, "group_size": 4, "updates_per_batch": 4}
    resume = state(3, 4, config={"steps": 3, **config})
    assert moved(tmp_path, 0, 2, 2, resume=resume).codes == ()


def test_a_step_without_an_update_moves_nothing(tmp_path: Path) -> None:
    """After one update and no more the policy stays 1 nat away: seen at each step."""
    rows = [row(1, kl=0.0), *(row(n, kl=2 / 30, updated=False) for n in (2, 3, 4))]
    finding = only(diagnose(write(tmp_path, rows)), "large_updates")
    assert "1 updates from the base" in finding.numbers
    assert "at 3 steps" in finding.numbers


def test_a_run_whose_beginning_is_elsewhere_is_not_judged(tmp_path: Path) -> None:
    rows = [row(n, kl=2 / 30) for n in (6, 7, 8)]
    assert diagnose(write(tmp_path, rows)).codes == ()


#: What eight steps of real runs wrote: rollouts a step, KL in nats per token, tokens of
#: a reply, and whether the step updated the weights. The tiny policy on the tasks of
#: notebook 08, at the rate that fits (6e-4) and at ten times that.
FITTING = {
    "seed 0": (32, "0 -.0003 .0021 .0036 .0003 .0128 .0133 .0191",
               "35 43 40 38 29 31 32 40", "11111101"),
    "seed 1": (32, "0 .0006 .0013 .0005 .0010 .0099 .0104 .0093",
               "33 40 36 38 44 32 36 31", "11111111"),
    "seed 2": (32, "0 .0006 -.0004 .0037 .0068 .0133 .0113 .0221",
               "45 35 44 46 36 39 35 29", "11111011"),
    "held, seed 2": (32, "0 .0006 -.0002 .0011 .0015 -.0003 .0001 .0048",
                     "45 35 44 52 38 61 52 30", "11111111"),
    "64 rollouts, seed 0": (64, "0 .0001 .0003 .0069 .0043 .0016 .0037 .0083",
                            "38 50 38 37 33 34 34 25", "11110001"),
}  # fmt: skip
TOO_HIGH = {
    "seed 0": (32, "0 .0250 .0119 .0345 .0020 .0256 .0196 .0349",
               "35 30 35 33 29 35 30 36", "11010001"),
    "seed 1": (32, "0 .0214 .0341 .0739 .0135 .0357 .0681 .0599",
               "33 50 36 39 36 35 40 30", "11011011"),
    "seed 2": (32, "0 .0213 .0181 .0343 .0217 .0216 .0250 .0444",
               "45 29 36 30 36 35 30 36", "11000000"),
    "64 rollouts, seed 0": (64, "0 .0117 .0171 .0947 .0178 .0021 .0135 .1029",
                            "38 34 31 27 33 34 33 29", "11111111"),
    "64 rollouts, seed 1": (64, "0 .0079 .0343 .0584 .0466 .0590 .0390 .0725",
                            "63 37 31 35 33 33 33 34", "11111111"),
    "64 rollouts, seed 2": (64, "0 .0025 .0234 .0635 .0213 .0157 .0307 .0348",
                            "46 37 32 31 33 35 35 33", "11100111"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("seen", "codes"),
    [(seen, ()) for seen in FITTING.values()]
    + [(seen, ("large_updates",)) for seen in TOO_HIGH.values()],
    ids=[f"fits, {name}" for name in FITTING]
    + [f"too high, {name}" for name in TOO_HIGH],
)
def test_real_runs_are_told_apart_by_the_size_of_their_updates(
    tmp_path: Path, seen: tuple[int, str, str, str], codes: tuple[str, ...]
) -> None:
    rollouts, kls, tokens, updated = seen
    parts = zip(kls.split(), tokens.split(), updated, strict=True)
    rows = [
        row(
            step,
            kl=float(kl),
            mean_output_tokens=float(length),
            updated=flag == "1",
            reward_mean=0.95,  # no update is no fault where the tasks are mastered
            rollouts=rollouts,
            valid_rollouts=rollouts,
        )
        for step, (kl, length, flag) in enumerate(parts, start=1)
    ]
    assert diagnose(write(tmp_path, rows)).codes == codes


def test_entropy_collapse(tmp_path: Path) -> None:
    collapsed = {"entropy": 0.01, "kept_groups": 0}
    finding = only(two_halves(tmp_path, {}, collapsed), "entropy_collapse")
    assert "0.100 → 0.010 nats per token, mean reward 0.50, 0 of 20 groups" in (
        finding.numbers
    )
    assert finding.area == "parameters"


@pytest.mark.parametrize(
    "last",
    [
        {"entropy": 0.03, "kept_groups": 0},  # three tenths are left
        {"entropy": 0.01, "kept_groups": 1},  # a quarter of the groups is kept
        {"entropy": 0.01, "kept_groups": 0, "reward_mean": 0.95},  # mastered
        {"entropy": None, "kept_groups": 0},  # not measured
    ],
)
def test_less_entropy_alone_is_no_collapse(
    tmp_path: Path, last: dict[str, Any]
) -> None:
    assert two_halves(tmp_path, {}, last).codes == ()


def test_runaway_length(tmp_path: Path) -> None:
    finding = only(
        two_halves(tmp_path, {}, {"mean_output_tokens": 90.0}), "runaway_length"
    )
    assert "30 → 90 tokens, cut off 0% → 0%, mean reward 0.50 → 0.50" in (
        finding.numbers
    )


def test_longer_replies_that_earn_more_are_fine_until_they_are_cut_off(
    tmp_path: Path,
) -> None:
    longer = {"mean_output_tokens": 90.0, "reward_mean": 0.7}
    assert two_halves(tmp_path / "a", {}, longer).codes == ()
    cut = {**longer, "token_limit_share": 0.3}
    finding = only(two_halves(tmp_path / "b", {}, cut), "runaway_length")
    assert "cut off 0% → 30%" in finding.numbers


# -- ratios -----------------------------------------------------------------------


def test_ratios_off_one(tmp_path: Path) -> None:
    rows = [row(1), row(2, max_ratio_error=0.2), row(3, max_ratio_error=0.01)]
    finding = only(diagnose(write(tmp_path, rows)), "ratio_off")
    assert finding.area == "framework"
    assert "2 of 3 steps above 0.001" in finding.numbers
    assert "|ratio − 1| is 0.2 in step 2" in finding.numbers


def test_ratios_off_one_by_the_temperature(tmp_path: Path) -> None:
    rows = [row(1, max_ratio_error=0.2, temperature=0.6)]
    finding = only(diagnose(write(tmp_path, rows)), "ratio_off")
    assert finding.area == "parameters"
    assert "temperature 0.6" in finding.numbers
    assert "temperature 1" in finding.advice


def test_another_service_may_be_less_exact(tmp_path: Path) -> None:
    remote = {"base_model": "accounts/fireworks/models/qwen3p8-27b"}
    for name, error, codes in (("a", 0.2, ()), ("b", 0.8, ("ratio_off",))):
        rows = [row(1, max_ratio_error=error)]
        folder = write(tmp_path / name, rows, resume=state(1, 2, **remote))
        assert diagnose(folder).codes == codes


def test_rows_of_an_earlier_version_have_no_ratio(tmp_path: Path) -> None:
    values = row(1).to_row()
    del values["max_ratio_error"]
    (tmp_path / "metrics.jsonl").write_text(json.dumps(values) + "\n")
    append_rollouts(tmp_path / "rollouts.jsonl", mixed_rollouts([1]))
    assert diagnose(tmp_path).codes == ()


# -- silence, files ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("minutes", "seconds", "found"),
    [(4, 2.0, False), (6, 2.0, True), (6, 60.0, False), (11, 60.0, True)],
)
def test_silence(tmp_path: Path, minutes: int, seconds: float, found: bool) -> None:
    """Five minutes, or ten of the run's own steps."""
    rows = [row(1, seconds=seconds), row(2, seconds=seconds)]
    folder = write(tmp_path, rows, resume=state(30, 3))
    now = os.path.getmtime(folder / "rollouts.jsonl") + 60 * minutes
    diagnosis = diagnose(folder, now=now)
    if not found:
        assert diagnosis.codes == ()
        return
    finding = only(diagnosis, "silence")
    assert "step 2 of 30 is the last" in finding.numbers
    assert f"nothing was written for {minutes} minutes" in finding.numbers
    assert f"a step took {seconds:.0f} s" in finding.numbers


def test_a_damaged_line_is_named_and_the_rest_is_judged(tmp_path: Path) -> None:
    folder = write(tmp_path, [row(1), row(2)])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"run_id": "run", "st')
    (folder / "resume.json").write_text("{")
    diagnosis = diagnose(folder)
    finding = only(diagnosis, "damaged_file")
    assert "2 in all, the first: " in finding.numbers
    assert "metrics.jsonl, line 3: not a complete JSON row" in finding.numbers
    assert diagnosis.steps == 2


def test_findings_print_what_where_and_why(tmp_path: Path) -> None:
    rows = [row(1), row(2, max_ratio_error=0.2, valid_rollouts=15, wrong_integer=3)]
    diagnosis = diagnose(write(tmp_path, rows))
    assert diagnosis.codes == ("failed_rollouts", "ratio_off")
    text = str(diagnosis)
    assert text.startswith("2 findings: 2 steps, 32 training rollouts")
    assert "1. Rollouts failed.\n  seen: step 2 has 15 of 16 rollouts\n" in text
    assert "  look at: environment. The error that stopped" in text
    markdown = diagnosis._repr_markdown_()
    assert "| Rollouts failed. | step 2 has 15 of 16 rollouts | environment |" in (
        markdown
    )
