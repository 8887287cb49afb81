"""``python -m rlhelpers``: real runs of small size, exit codes and messages."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhelpers import (
    TaskPool,
    TrainConfig,
    calibrate,
    connect,
    diagnose,
    evaluate,
    make_taskset,
    split_taskset,
    train,
)
from rlhelpers.calibration import CalibrationSettings
from rlhelpers.command_line import _parser, main
from rlhelpers.command_settings import as_flags, read_settings
from rlhelpers.commands import draw_tasks
from rlhelpers.metrics import (
    ResumeState,
    StepMetrics,
    append_metrics,
    read_metrics,
    read_resume_state,
    read_rollouts,
    write_resume_state,
)
from rlhelpers.models import PRESETS
from rlhelpers.runs import find_run
from rlhelpers.sampling import SamplingSettings
from rlhelpers.tables import plain_text
from rlhelpers.tasks import operand_pairs, training_pairs

ROOT = Path(__file__).resolve().parents[1]
TINY = PRESETS["tiny-arithmetic"]


def words(text: str) -> list[str]:
    return text.split()


SMALL = words(
    "--steps 2 --tasks-per-step 4 --group-size 6 --max-tokens 64 --evaluation-tasks 4"
)


@pytest.fixture
def cli(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Run a command in this process; returns exit code, output and errors."""

    def run(*arguments: str) -> tuple[int, str, str]:
        place = [] if arguments[0] == "diagnose" else ["--runs-dir", str(tmp_path)]
        code = main([*arguments, *place])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a small run of the command was trained; not to be written to."""
    folder = tmp_path_factory.mktemp("finished")
    place = ["--runs-dir", str(folder), "--run-dir", str(folder / "full-run-mine")]
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(["train", *place, *SMALL]) == 0
    return folder


@pytest.fixture
def own_run(finished: Path, tmp_path: Path) -> Path:
    """The folder of that run, in a copy."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    return tmp_path / "full-run-mine"


def refuse(*arguments: str) -> int:
    """The exit code of arguments that argparse itself refuses."""
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    return int(str(caught.value.code))


# -- the same as in the notebooks -------------------------------------------------


async def by_hand(folder: Path, steps: int = 2) -> Path:
    """What notebook 04 does, written out, with the small settings."""
    config = TrainConfig.from_preset(
        TINY, steps=steps, tasks_per_step=4, group_size=6, max_tokens=64, seed=3
    )
    ranges = {"min_a": 10, "max_a": 99, "min_b": 10, "max_b": 99}
    count = training_pairs(steps, 4, 4, operand_pairs(**ranges).size)
    tasks = make_taskset(count + 4, **ranges, seed=3)
    training, held_out = split_taskset(tasks, train=count, held_out=4, seed=3)
    with connect(runs_dir=folder, seed=3, quiet=True) as session:
        run_dir = session.new_run_dir("full-run")
        greedy = SamplingSettings.greedy(64)
        await evaluate(
            session,
            held_out,
            phase="before",
            sampler=session.base_sampler(),
            settings=greedy,
            run_dir=run_dir,
        )
        result = await train(
            session,
            training,
            config=config,
            run_dir=run_dir,
            watch=list(held_out)[:3],
            progress=False,
        )
        await evaluate(
            session,
            held_out,
            phase="after",
            sampler=result.sampler,
            settings=greedy,
            step=steps,
            run_dir=run_dir,
        )
    return run_dir


@pytest.fixture(scope="module")
def made_by_hand(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of such a run; not to be written to."""
    return asyncio.run(by_hand(tmp_path_factory.mktemp("by-hand")))


def replies(run_dir: Path, phase: str) -> list[tuple[int, str, str, float]]:
    rows = read_rollouts(run_dir / "rollouts.jsonl", phase=phase)
    return [(row.step, row.task, row.text, row.reward) for row in rows]


def test_training_gives_what_the_notebook_gives(
    made_by_hand: Path, tmp_path: Path, cli: Callable[..., tuple[int, str, str]]
) -> None:
    expected = made_by_hand
    code, out, err = cli("train", "--seed", "3", *SMALL)
    assert (code, err) == (0, "")
    run = find_run(tmp_path, TINY)
    assert run is not None  # where notebooks 05 and 06 look for it
    for phase in ("before", "train", "after"):
        assert replies(run.run_dir, phase) == replies(expected, phase)
    assert any(row.updated for row in run.metrics)
    assert [row.reward_mean for row in run.metrics] == [
        row.reward_mean for row in read_metrics(expected / "metrics.jsonl")
    ]
    assert out.index("Backend          local") < out.index("before: mean reward")
    assert re.search(r"step 1/2  reward \d\.\d\d  spread", out)
    assert re.search(r"^4 held-out tasks +before +after$", out, re.M)
    assert "exact McNemar test" in out
    assert "Diagnosis. " in out
    assert str(run.run_dir / "rollouts.jsonl") in out
    assert run.state.checkpoint in out
    # 48 training rollouts, twice 4 held-out tasks, 3 watch prompts at 2 looks.
    assert "Rollouts planned 62" in out


def test_calibration_gives_what_the_notebook_gives(
    tmp_path: Path, cli: Callable[..., tuple[int, str, str]]
) -> None:
    drawn = CalibrationSettings(
        a=(10, 99), b=(10, 30), tasks=2, group_size=4, max_tokens=64, seed=1
    )
    with connect(runs_dir=tmp_path / "by hand", seed=1, quiet=True) as session:
        expected = asyncio.run(
            calibrate(
                session,
                drawn.draw_tasks(),
                group_size=4,
                settings=SamplingSettings(64),
                seed=1,
            )
        )
    flags = "--tasks-per-step 2 --group-size 4 --max-tokens 64 --max-b 30 --seed 1"
    code, out, _ = cli("calibrate", *words(flags))
    assert code == 0
    (folder,) = tmp_path.glob("calibrate-*")
    rows = read_rollouts(folder / "rollouts.jsonl")
    assert [(r.task, r.text) for r in rows] == [
        (r.task, r.text) for r in expected.records
    ]
    assert out.count("--- reward ") == 4  # sample texts, by default four
    assert f"Mean reward {expected.reward_mean:.2f}" in out
    assert expected.verdict is not None
    assert expected.verdict.headline in out
    assert "**" not in out


def test_evaluation_of_base_run_and_other_tasks(
    own_run: Path, tmp_path: Path, cli: Callable[..., tuple[int, str, str]]
) -> None:
    run = find_run(tmp_path, TINY)
    assert run is not None
    assert run.run_dir == own_run
    flags = "--steps 2 --tasks-per-step 4 --max-tokens 64 --evaluation-tasks 4"
    code, out, _ = cli("evaluate", *words(flags), "--debug-samples", "1")
    assert code == 0
    assert "held out" in out

    def last() -> list[tuple[str, str]]:
        folder = max(tmp_path.glob("evaluate-*"), key=os.path.getmtime)
        rows = read_rollouts(folder / "rollouts.jsonl")
        return [(row.task, row.text) for row in rows]

    assert last() == [(row.task, row.text) for row in run.before]
    code, out, _ = cli("evaluate", "--resume-from", str(run.run_dir))
    assert code == 0
    assert last() == [(row.task, row.text) for row in run.after]
    assert re.search(r"^4 held-out tasks +before +after$", out, re.M)

    wider = ["--min-a", "1", "--max-a", "9", "--evaluation-tasks", "6"]
    code, out, _ = cli("evaluate", "--resume-from", str(run.run_dir), *wider)
    assert code == 0
    assert len(last()) == 6
    assert all(1 <= int(re.split(r"[-x]", task)[1]) <= 9 for task, _ in last())

    code, out, _ = cli("evaluate", "--resume-from", run.state.checkpoint, *words(flags))
    assert code == 0
    assert last() == [(row.task, row.text) for row in run.after]


def test_tasks_that_a_run_was_trained_on_are_left_out(
    tmp_path: Path, cli: Callable[..., tuple[int, str, str]]
) -> None:
    """45 pairs of one digit, 2 × 2 of them trained on: 41 are left to evaluate."""
    one_digit = words("--min-a 1 --max-a 9 --min-b 1 --max-b 9 --max-tokens 32")
    flags = "--steps 2 --tasks-per-step 2 --group-size 2 --evaluation-tasks 1"
    assert cli("train", *words(flags), *one_digit)[0] == 0
    (run_dir,) = tmp_path.glob("full-run-*")
    trained = {row[1] for row in replies(run_dir, "train")}
    assert len(trained) == 4
    again = ["--resume-from", str(run_dir), "--evaluation-tasks", "43"]
    code, _, err = cli("evaluate", *again)
    assert (code, err) == (0, "")
    (folder,) = tmp_path.glob("evaluate-*")
    asked = {row[1] for row in replies(folder, "evaluate")}
    assert 39 <= len(asked) <= 43
    assert not asked & trained


# -- refusals ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("train --group-size 1", "--group-size = 1: must be a whole number of at leas"),
        ("train --steps 0", "--steps = 0: must be a whole number of at least 1; leave"),
        ("train --learning-rate 0", "--learning-rate = 0.0: must be a number above 0"),
        ("train --learning-rate nan", "--learning-rate = nan"),
        ("train --seed -1", "--seed = -1: must be a whole number of at least 0"),
        ("train --max-tokens 1024", "--max-tokens = 1024: prompt and reply share"),
        ("train --max-tokens 1000", "over the context of 1024; lower max_tokens to at"),
        ("train --min-a 50 --max-a 20", "min_a is 50 and max_a is 20: the range is in"),
        ("train --min-a 100", "min_a is 100 and max_a is 99"),
        ("train --max-a 11 --max-b 11", "holds 3 pairs; with 128 held out 0 are left"),
        ("train --max-a 11 --max-b 11", "or lower --evaluation-tasks or --tasks-per-"),
        ("train --model qwen3p8-27b", "runs under --backend='fireworks'"),
        ("train --model nope", "unknown model 'nope'; known models: tiny-arithmetic"),
        ("train --token-limit 0", "--token-limit = 0: must be a whole number of at le"),
        ("train --prices -1 1 1", "--prices = [-1.0, 1.0, 1.0]: must be three prices"),
        ("train --checkpoint-every 0", "--checkpoint-every = 0"),
        ("train --backend fireworks", "needs an API key and FIREWORKS_API_KEY is not"),
        ("train --resume-from nowhere", "neither a run's folder (there is no 'nowhere"),
        ("train --resume-from a/b", "is not a checkpoint path"),
        (
            "train --resume-from a/run-{run}/policy-0001-0a1b2c3d",
            "is a sampler checkpoint",
        ),
        ("train --env-path somewhere", "needs a tasks_file"),
        ("train --tasks-file gone.json", "tasks_file gone.json does not exist"),
        ("train --taskset x", "HUD_API_KEY is not set"),
        ("calibrate --group-size 1", "--group-size = 1: must be a whole number of at"),
        ("calibrate --tasks-per-step 5000", "hold only 4095 different operand pairs"),
        ("calibrate --debug-samples -1", "--debug-samples = -1"),
        ("evaluate --evaluation-tasks 0", "--evaluation-tasks = 0: must be a whole nu"),
        ("diagnose nowhere", "nowhere does not exist; give the folder of one run"),
    ],
)
def test_bad_input_is_refused_before_anything_is_sent(
    arguments: str,
    said: str,
    tmp_path: Path,
    cli: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = cli(*arguments.format(run="a" * 32).split())
    assert code == 2
    assert err.startswith("refused: ")
    assert said in err
    assert "Traceback" not in err
    assert out == ""
    assert list(tmp_path.iterdir()) == []  # no run, no service


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["trian"],
        ["train", "--group-size", "four"],
        ["train", "--loss-fn", "mse"],
        ["train", "--backend", "cloud"],
        ["train", "--group", "4"],  # no abbreviations: a typing slip must not pass
        ["calibrate", "--steps", "3"],
        ["train", "--prices", "1", "2"],
        ["diagnose"],
    ],
)
def test_flags_that_do_not_exist_are_refused(arguments: list[str]) -> None:
    assert refuse(*arguments) == 2


@pytest.mark.parametrize(
    "command", ["check", "calibrate", "train", "evaluate", "diagnose"]
)
def test_help_describes_every_flag(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refuse(command, "--help") == 0
    text = capsys.readouterr().out
    assert "Exit codes: 0 done" in text
    flags = set(re.findall(r"^  (--[a-z-]+)", text, re.M))
    expected = {"--group-size", "--max-tokens", "--min-a", "--tasks-file", "--taskset"}
    assert command not in ("calibrate", "train") or expected <= flags
    if command == "train":
        assert {"--require-update", "--resume-from", "--loss-fn"} <= flags
        assert "tiny-arithmetic" in text
    assert str(ROOT) not in text


def test_help_of_all_commands() -> None:
    assert refuse("--help") == 0


def test_a_folder_that_holds_a_run_is_not_written_to(
    tmp_path: Path, cli: Callable[..., tuple[int, str, str]]
) -> None:
    taken = tmp_path / "taken"
    append_metrics(taken / "metrics.jsonl", StepMetrics.example())
    code, out, err = cli("train", "--run-dir", str(taken), *SMALL)
    assert (code, out) == (2, "")
    assert f"go on with --resume-from {taken}, or give another --run-dir" in err


# -- stopping and going on --------------------------------------------------------


def test_a_step_without_signal_stops_under_require_update(
    tmp_path: Path, cli: Callable[..., tuple[int, str, str]]
) -> None:
    source = tmp_path / "echo_tasks.py"
    source.write_text(ECHO.replace("yield sum(", "yield 0 * sum("), encoding="utf-8")
    sizes = words("--steps 2 --tasks-per-step 2 --group-size 2 --max-tokens 8")
    own = ["--tasks-file", str(source), "--evaluation-tasks", "2", "--no-eval-before"]
    code, out, err = cli("train", *sizes, *own, "--require-update")
    assert code == 1
    assert err.startswith("stopped: step 1: no update: every group is flat")
    (run_dir,) = tmp_path.glob("train-*")
    assert f"To go on: python -m rlhelpers train --resume-from {run_dir}" in err
    assert "before: " not in out


def test_a_token_limit_stops_the_run_and_a_higher_one_goes_on(
    tmp_path: Path, cli: Callable[..., tuple[int, str, str]]
) -> None:
    code, out, err = cli("train", *SMALL, "--token-limit", "1500")
    assert code == 1
    assert "Token ceiling    1,500, checked before each request" in out
    assert "not sent: this request may use" in err
    assert "token_limit=1,500" in err
    (run_dir,) = tmp_path.glob("full-run-*")
    code, _, err = cli(
        "train", "--resume-from", str(run_dir), "--token-limit", "100000"
    )
    assert (code, err) == (0, "")
    assert [row.step for row in read_metrics(run_dir / "metrics.jsonl")] == [1, 2]


def test_a_finished_run_goes_on_with_the_same_held_out_tasks(
    own_run: Path, cli: Callable[..., tuple[int, str, str]]
) -> None:
    run_dir = own_run
    kept = json.loads((run_dir / "command.json").read_text())
    assert kept["drawn_for"] == 2
    assert "run_dir" not in kept
    before = replies(run_dir, "before")
    code, out, err = cli("train", "--resume-from", str(run_dir), "--steps", "4")
    assert (code, err) == (0, "")
    assert "before: " not in out  # it is recorded already
    rows = read_metrics(run_dir / "metrics.jsonl")
    assert [row.step for row in rows] == [1, 2, 3, 4]
    assert replies(run_dir, "before") == before
    # An evaluation stands at each of the two ends, of the same tasks.
    after = [(step, task) for step, task, *_ in replies(run_dir, "after")]
    assert after == [(end, row[1]) for end in (2, 4) for row in before]
    assert "failed_rollouts" not in diagnose(run_dir).codes
    # Two steps of four tasks were drawn; then the pool is reshuffled, and says so.
    assert "all 8 training tasks were used" in out
    assert json.loads((run_dir / "command.json").read_text())["drawn_for"] == 2

    code, out, err = cli("train", "--resume-from", str(run_dir), "--seed", "5")
    assert (code, out) == (2, "")
    assert "cannot go on with --seed 5 (was 0): leave that out" in err
    code, out, err = cli("train", "--resume-from", str(run_dir), "--group-size", "8")
    assert (code, out) == (2, "")
    assert "--group-size 8 (was 6)" in err


def test_a_checkpoint_begins_a_new_run(
    own_run: Path, tmp_path: Path, cli: Callable[..., tuple[int, str, str]]
) -> None:
    first, second = own_run, tmp_path / "second"
    checkpoint = read_resume_state(first / "resume.json").checkpoint
    code, _, err = cli(
        *("train", "--resume-from", checkpoint, "--run-dir", str(second)), *SMALL
    )
    assert (code, err) == (0, "")
    assert [row.step for row in read_metrics(second / "metrics.jsonl")] == [1, 2]
    # Before this run means after the first one: the same tasks, the same weights.
    assert [row[2] for row in replies(second, "before")] == [
        row[2] for row in replies(first, "after")
    ]


def interrupted(run_dir: Path, runs: Path, *flags: str) -> subprocess.Popen[str]:
    """A training process of its own, interrupted once its first step is on disk."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    # A shell's background job ignores Ctrl-C, and so would its children.
    ours = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "rlhelpers", "train"),
            *("--run-dir", str(run_dir), "--runs-dir", str(runs), *flags),
        ],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    signal.signal(signal.SIGINT, ours)
    deadline = time.monotonic() + 300
    while not (run_dir / "metrics.jsonl").exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    return process


@pytest.mark.skipif(os.name == "nt", reason="sends a POSIX signal")
def test_ctrl_c_leaves_a_run_that_goes_on(
    tmp_path: Path, cli: Callable[..., tuple[int, str, str]]
) -> None:
    run_dir, whole = tmp_path / "cut", tmp_path / "whole"
    flags = [*SMALL, "--steps", "6"]
    process = interrupted(run_dir, tmp_path, *flags)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert (
        f"interrupted\nTo go on: python -m rlhelpers train --resume-from {run_dir}"
        in (err)
    )
    assert "Traceback" not in err
    assert "before: mean reward" in out
    done = len(read_metrics(run_dir / "metrics.jsonl"))
    assert 1 <= done < 6
    assert read_resume_state(run_dir / "resume.json").next_step == done + 1

    code, out, err = cli("train", "--resume-from", str(run_dir))
    assert (code, err) == (0, "")
    assert cli("train", "--run-dir", str(whole), *flags)[0] == 0
    for phase in ("before", "train", "after"):
        assert replies(run_dir, phase) == replies(whole, phase)


# -- tasks of one's own -----------------------------------------------------------

ECHO = """
from hud.environment import Environment

env = Environment("echo")


@env.template()
async def digits(n: int):
    answer = yield f"Compute {n} * 11. Write the integer on the last line."
    yield sum(character.isdigit() for character in answer) / (1 + len(answer))


tasks = [digits(n) for n in range(10, 22)]
"""


def test_own_tasks_are_calibrated_trained_and_evaluated(
    tmp_path: Path, cli: Callable[..., tuple[int, str, str]]
) -> None:
    source = tmp_path / "echo_tasks.py"
    source.write_text(ECHO, encoding="utf-8")
    own = ["--tasks-file", str(source), "--max-tokens", "24"]
    sizes = ["--tasks-per-step", "2", "--group-size", "3"]
    code, out, err = cli("calibrate", *own, *sizes, "--debug-samples", "2")
    assert (code, err) == (0, "")
    assert "These tasks have no outcome classes" in out
    assert re.search(r"[✓✗] calibration shows signal: \d of 2 groups", out)
    assert out.count("--- reward ") == 2

    code, out, err = cli(
        "train", *own, *sizes, "--steps", "2", "--evaluation-tasks", "3"
    )
    assert (code, err) == (0, "")
    assert "3 tasks  mean reward" in out
    assert re.search(r"\d tasks earn more than before, \d earn less", out)
    (run_dir,) = tmp_path.glob("train-*")
    held = {row[1] for row in replies(run_dir, "before")}
    assert len(held) == 3
    assert not held & {row[1] for row in replies(run_dir, "train")}

    code, out, _ = cli("evaluate", "--resume-from", str(run_dir))
    assert code == 0
    assert "before" in out


def test_too_few_own_tasks_give_both_numbers(
    tmp_path: Path, cli: Callable[..., tuple[int, str, str]]
) -> None:
    source = tmp_path / "echo_tasks.py"
    source.write_text(ECHO, encoding="utf-8")
    code, out, err = cli("train", "--tasks-file", str(source))
    assert (code, out) == (2, "")
    assert "'echo_tasks' has 12 tasks; a step takes 8 (--tasks-per-step) and 128" in err
    assert "(--evaluation-tasks), together 136: add tasks" in err


def test_a_grader_that_breaks_stops_the_run(
    tmp_path: Path, cli: Callable[..., tuple[int, str, str]]
) -> None:
    source = tmp_path / "echo_tasks.py"
    broken = ECHO.replace("yield sum(", "raise KeyError('gone')\n    yield sum(")
    source.write_text(broken, encoding="utf-8")
    code, _, err = cli("calibrate", "--tasks-file", str(source), "--max-tokens", "8")
    assert code == 1
    assert err.startswith("stopped: ")
    assert "digits-" in err
    assert "gone" in err


def test_a_reward_that_is_no_number_stops_and_the_others_are_kept(
    tmp_path: Path, cli: Callable[..., tuple[int, str, str]]
) -> None:
    source = tmp_path / "echo_tasks.py"
    pays = 'yield float("nan") if n == 15 else 1.0\n    yield sum('
    source.write_text(ECHO.replace("yield sum(", pays), encoding="utf-8")
    sizes = words("--tasks-per-step 12 --group-size 2 --max-tokens 4")
    code, _, err = cli("calibrate", "--tasks-file", str(source), *sizes)
    assert code == 1
    assert err.startswith("stopped: ")
    assert "digits-" in err
    (folder,) = tmp_path.glob("calibrate-*")
    assert len(read_rollouts(folder / "rollouts.jsonl")) == 22


# -- a run of a notebook, and diagnosis -------------------------------------------


def test_a_notebooks_run_is_taken_up(
    made_by_hand: Path, tmp_path: Path, cli: Callable[..., tuple[int, str, str]]
) -> None:
    shutil.copytree(made_by_hand.parent, tmp_path, dirs_exist_ok=True)
    run_dir = tmp_path / made_by_hand.name
    code, _, err = cli("train", "--resume-from", str(run_dir), "--steps", "3")
    assert (code, err) == (0, "")
    rows = read_metrics(run_dir / "metrics.jsonl")
    assert [row.step for row in rows] == [1, 2, 3]
    run = find_run(tmp_path, TINY)
    assert run is not None  # its last evaluation is the one that counts
    assert [row.step for row in run.after] == [3] * 4


def test_a_run_with_other_held_out_tasks_is_refused(
    tmp_path: Path, cli: Callable[..., tuple[int, str, str]]
) -> None:
    run_dir = tmp_path / "mine"
    assert cli("train", "--run-dir", str(run_dir), "--max-a", "60", *SMALL)[0] == 0
    (run_dir / "command.json").unlink()  # as if a notebook had made it
    code, out, err = cli("train", "--resume-from", str(run_dir))
    assert (code, out) == (2, "")
    assert "do not hold out the tasks that the run evaluated before" in err


def test_diagnose_says_what_looks_wrong(
    tmp_path: Path, cli: Callable[..., tuple[int, str, str]]
) -> None:
    append_metrics(tmp_path / "metrics.jsonl", StepMetrics.example())
    code, out, _ = cli("diagnose", str(tmp_path))
    assert code == 0
    assert out.startswith("Nothing looks wrong: 1 steps")
    append_metrics(
        tmp_path / "metrics.jsonl", StepMetrics.example(step=2, max_ratio_error=0.3)
    )
    code, out, _ = cli("diagnose", str(tmp_path))
    assert code == 1
    assert "1. Importance ratios are off 1 before the update." in out


@pytest.mark.slow
def test_the_default_run_is_healthy(
    tmp_path: Path, cli: Callable[..., tuple[int, str, str]]
) -> None:
    code, out, err = cli("train", "--evaluation-tasks", "32")
    assert (code, err) == (0, "")
    assert "Diagnosis. Nothing looks wrong: 30 steps, 1,920 training rollouts" in out
    (run_dir,) = tmp_path.glob("full-run-*")
    assert cli("diagnose", str(run_dir))[0] == 0


# -- pieces -----------------------------------------------------------------------


def test_messages_are_put_into_flags() -> None:
    assert as_flags("widen the range (MIN_OPERAND, MAX_OPERAND), or lower") == (
        "widen the range (--min-a, --min-b, --max-a, --max-b), or lower"
    )
    assert as_flags("set HUD_API_KEY, FIREWORKS_API_KEY") == (
        "set HUD_API_KEY, FIREWORKS_API_KEY"
    )
    assert as_flags("use BACKEND='local'") == "use --backend='local'"


def test_settings_of_a_damaged_command_file(tmp_path: Path) -> None:
    (tmp_path / "command.json").write_text('{"lerning_rate": 1}')
    with pytest.raises(ValueError, match=r"command\.json cannot be read.*lerning_rate"):
        read_settings({"resume_from": str(tmp_path)})


def test_settings_of_a_notebooks_run(tmp_path: Path) -> None:
    config = {"steps": 7, "tasks_per_step": 3, "group_size": 5, "max_tokens": 99}
    write_resume_state(
        tmp_path / "resume.json",
        ResumeState(
            run_id="run",
            next_step=8,
            seed=4,
            pool_position=7,
            checkpoint="local/run-" + "a" * 32 + "/final-state",
            base_model=TINY.base_model,
            model=TINY.name,
            config={**config, "learning_rate": 1e-3, "beta1": 0.9},
        ),
    )
    settings, folder = read_settings({"resume_from": str(tmp_path), "steps": 9})
    assert folder == tmp_path
    assert settings.train_config() == TrainConfig.from_preset(
        TINY, **{**config, "steps": 9}, learning_rate=1e-3, seed=4
    )
    assert settings.drawn_for == 7
    assert settings.resume_from is None


def test_drawn_tasks_do_not_depend_on_a_resumes_steps() -> None:
    from rlhelpers.command_settings import Settings

    small = Settings(tasks_per_step=2, evaluation_tasks=4, steps=3, drawn_for=3)
    longer = Settings(tasks_per_step=2, evaluation_tasks=4, steps=30, drawn_for=3)
    drawn = [draw_tasks(s, s.train_config()) for s in (small, longer)]
    first, second = ([task.slug for task in side.held_out] for side in drawn)
    assert first == second
    assert [len(side.training) for side in drawn] == [6, 6]
    assert TaskPool(drawn[0].training, tasks_per_step=2, seed=0).tasks


def test_plain_text_aligns_tables() -> None:
    text = "**Bold** words\n\n| a | long |\n|---|---:|\n| x | 1 |\n| yy | 22 |\nend"
    assert plain_text(text) == "Bold words\n\na   long\nx      1\nyy    22\nend"


# -- the example of notebook 07 ---------------------------------------------------

EXAMPLE = ROOT / "examples" / "estimate"
OWN = [
    "--tasks-file",
    str(EXAMPLE / "tasks.jsonl"),
    "--env-path",
    str(EXAMPLE / "estimates.py"),
    "--max-tokens",
    "12",
]


def test_checking_own_tasks_sends_nothing(
    tmp_path: Path, cli: Callable[..., tuple[int, str, str]]
) -> None:
    labelled = str(EXAMPLE / "labelled.jsonl")
    code, out, err = cli("check", *OWN, "--samples", labelled)
    assert (code, err) == (0, "")
    assert [line[0] for line in out.splitlines()] == ["✓"] * 5 + ["R"]
    assert "360 different tasks, 232 to train on: a step takes 8" in out
    code, out, _ = cli("check", *OWN, "--evaluation-tasks", "355")
    assert code == 1
    assert "✗ enough tasks: 360 different tasks; a step takes 8, calibration 6," in out
    assert "together 363. Add 3 tasks, or hold fewer out" in out
    assert "✗ grader as labelled: 0 labelled replies, none worse" in out
    assert list(tmp_path.iterdir()) == []  # no run, no service
    code, _, err = cli("check")
    assert code == 2
    assert "give --tasks-file with --env-path, or --taskset" in err


def test_tasks_with_tools_are_refused_before_anything_is_sent(
    tmp_path: Path, cli: Callable[..., tuple[int, str, str]]
) -> None:
    source = tmp_path / "echo_tasks.py"
    tools = """
from hud.capabilities import Capability
env.add_capability(Capability("shell", "mcp/1", "http://127.0.0.1:9/mcp"))
"""
    source.write_text(ECHO + tools, encoding="utf-8")
    for command in ("calibrate", "train"):
        sizes = words("--tasks-per-step 2 --group-size 2")
        sizes += words("--evaluation-tasks 2") if command == "train" else []
        code, out, err = cli(command, "--tasks-file", str(source), *sizes)
        assert (code, out) == (2, "")
        assert "refused: one turn, text only: digits-" in err
        assert "offers shell, which takes several turns" in err
    assert not (tmp_path / "service").exists()


@pytest.mark.slow
def test_the_command_line_learns_the_example(
    tmp_path: Path, cli: Callable[..., tuple[int, str, str]]
) -> None:
    sizes = words("--steps 16 --evaluation-tasks 48 --kl-every 0")
    sizes += words("--learning-rate 1.2e-3")
    code, out, err = cli("train", *OWN, *sizes)
    assert (code, err) == (0, "")
    (run_dir,) = tmp_path.glob("train-*")
    before, after = (
        [row[3] for row in replies(run_dir, phase)] for phase in ("before", "after")
    )
    assert len(before) == len(after) == 48
    assert sum(after) / 48 > sum(before) / 48 + 0.15
    assert re.search(r"Mean reward changed by \+0\.\d+ \[\+0", out)
    assert "Diagnosis. " in out


def test_the_commands_in_notebook_07_are_real() -> None:
    notebook = (ROOT / "notebooks" / "07_your_own_task.ipynb").read_text("utf-8")
    cells = ["".join(cell["source"]) for cell in json.loads(notebook)["cells"]]
    (text,) = [cell for cell in cells if "python -m rlhelpers check" in cell]
    block = re.search(r"```sh\n(.+?)```", text, re.S)
    assert block is not None
    commands = block[1].replace("\\\n", " ").strip().splitlines()
    assert [command.split()[3] for command in commands] == [
        "check",
        "calibrate",
        "train",
    ]
    for command in commands:
        options = vars(_parser().parse_args(command.split()[3:]))
        options.pop("command")
        samples = options.pop("samples", None)
        given = {name: value for name, value in options.items() if value is not None}
        settings, _ = read_settings(given)
        settings.check()
        for path in (settings.tasks_file, settings.env_path, samples):
            assert path is None or (ROOT / path).is_file()
