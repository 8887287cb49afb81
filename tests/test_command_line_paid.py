"""The command line on the paid backend, and its flags beside the reference's."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from paid_helpers import COMPLETIONS, KEY, QWEN, count

from rlhelpers.command_line import _parser, main
from rlhelpers.local import LocalService
from rlhelpers.metrics import read_metrics, read_rollouts

pytest_plugins = ("paid_fixtures",)


def words(text: str) -> list[str]:
    return text.split()


SMALL = words(
    "--backend fireworks --min-a 10 --max-a 99 --min-b 10 --max-b 99 --max-tokens 96 "
    "--tasks-per-step 2 --group-size 4"
)


@pytest.fixture
def cli(commands: Callable[..., Any]) -> Callable[..., tuple[int, str, str]]:
    """Run a command in this process; returns exit code, output and errors."""
    run: Callable[..., tuple[int, str, str]] = commands(main)
    return run


@pytest.mark.slow
def test_training_on_the_paid_backend(
    cli: Callable[..., tuple[int, str, str]], account: Path, events: list[str]
) -> None:
    flags = words("--steps 2 --evaluation-tasks 4 --eval-before --prices 1 2 4")
    code, out, err = cli("train", *SMALL, *flags)
    assert (code, err) == (0, "")
    assert "Backend          fireworks" in out
    assert QWEN.base_model in out
    assert "Token ceiling    10,000,000, checked before each request" in out
    # 16 training rollouts, twice 4 held-out ones, 3 watch prompts at 2 looks.
    assert "Rollouts planned 30" in out
    (run_dir,) = (account / "runs").glob("full-run-*")
    records = read_rollouts(run_dir / "rollouts.jsonl")
    watched = read_rollouts(run_dir / "watch.jsonl")
    assert len(records) == 16 + 8
    assert events.count(COMPLETIONS) == len(records) + len(watched) <= 30
    # The report at the end: what was used, and the bound that the banner gave.
    rows = dict(re.findall(r"^(prefill|sampled|trained) +([\d,]+) +[\d,]+$", out, re.M))
    replies = [*records, *watched]
    assert rows["prefill"] == f"{sum(r.prompt_tokens for r in replies):,}"
    assert rows["sampled"] == f"{sum(r.output_tokens for r in replies):,}"
    planned = re.search(r"Tokens planned +at most ([\d,]+)", out)
    together = re.search(r"^together +([\d,]+) +([\d,]+)$", out, re.M)
    assert planned is not None
    assert together is not None
    assert together[2] == planned[1]
    assert re.search(r"^cost +\$\d\.\d\d +\$\d\.\d\d$", out, re.M)
    deleted = sum(event.startswith("DELETE") for event in events)
    assert count(events, "create_session") == deleted == 1
    assert KEY not in out
    assert not any(
        KEY.encode() in path.read_bytes() for path in run_dir.rglob("*.json*")
    )


@pytest.mark.slow
def test_the_limit_stops_a_command_and_says_how_to_go_on(
    cli: Callable[..., tuple[int, str, str]], account: Path, events: list[str]
) -> None:
    flags = words("--steps 2 --evaluation-tasks 0 --token-limit 1500")
    code, out, err = cli("train", *SMALL, *flags)
    assert code == 1
    assert "Token ceiling    1,500" in out
    assert "would stop there" in out
    assert err.startswith("stopped: ")
    assert "over token_limit=1,500" in err
    assert "python -m rlhelpers train --resume-from" in err
    (run_dir,) = (account / "runs").glob("full-run-*")
    records = read_rollouts(run_dir / "rollouts.jsonl")
    assert events.count(COMPLETIONS) == len(records)
    assert sum(r.prompt_tokens + r.output_tokens for r in records) <= 1500
    used = re.search(r"^together +([\d,]+)", out, re.M)  # said also after a stop
    assert used is not None
    assert int(used[1].replace(",", "")) <= 1500
    assert sum(event.startswith("DELETE") for event in events) == 1

    events.clear()
    code, out, err = cli(
        "train", "--resume-from", str(run_dir), "--token-limit", "100000"
    )
    assert (code, err) == (0, "")
    assert "Backend          fireworks" in out
    assert [r.step for r in read_metrics(run_dir / "metrics.jsonl")] == [1, 2]


def test_calibration_on_the_paid_backend(
    cli: Callable[..., tuple[int, str, str]], endpoint: LocalService, events: list[str]
) -> None:
    code, out, err = cli("calibrate", *SMALL, "--debug-samples", "1")
    assert (code, err) == (0, "")
    assert "Rollouts planned 8" in out
    assert events.count(COMPLETIONS) == 8
    assert out.count("--- reward ") == 1
    assert count(events, "create_model") == 0  # the base model needs no run


def test_the_flags_have_the_references_names() -> None:
    """What whoever comes from the cookbook's train.py types."""
    (commands,) = (
        action.choices for action in _parser()._actions if action.dest == "command"
    )
    known = {
        name: {flag for action in command._actions for flag in action.option_strings}
        for name, command in commands.items()  # type: ignore[union-attr]
    }
    shared = words(
        "--tasks-per-step --group-size --max-tokens --min-a --max-a --min-b --max-b "
        "--tasks-file --env-path --taskset --seed"
    )
    assert known["calibrate"] >= {*shared, "--debug-samples"}
    assert known["train"] >= {
        *shared,
        *words("--steps --learning-rate --loss-fn --require-update --resume-from"),
        *words("--eval-before --eval-tasks --checkpoint-every"),
    }
    assert known["evaluate"] >= {"--resume-from", "--eval-tasks", "--debug-samples"}
