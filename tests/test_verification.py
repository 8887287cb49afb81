"""``make verify-fireworks``, run as far as it can be: against the local service."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from paid_helpers import COMPLETIONS, KEY, QWEN, count, opened

from rlhelpers import verification
from rlhelpers.local import LocalService, losses
from rlhelpers.local.faults import Fault
from rlhelpers.models import TINY_POLICY_FOLDER

pytest_plugins = ("paid_fixtures",)


@pytest.fixture
def ask(
    commands: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """Run the command in this process; returns exit code, output and errors."""
    monkeypatch.setattr(verification.sys.stdin, "isatty", lambda: False, raising=False)
    run: Callable[..., tuple[int, str, str]] = commands(verification.main)
    return run


def number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    assert match is not None, text
    return int(match[1].replace(",", ""))


@pytest.mark.slow
def test_every_check_passes_on_the_local_service(
    ask: Callable[..., tuple[int, str, str]],
    account: Path,
    endpoint: LocalService,
    events: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CONFIRM", "yes")
    code, out, err = ask("--prices", "1", "2", "4")
    assert (code, err) == (0, "")
    findings = json.loads(next(account.glob("runs/verify-*/findings.json")).read_text())
    assert [row["verdict"] for row in findings["findings"]] == ["as expected"] * len(
        verification.CHECKS
    )
    # What was announced: completions, passes, sessions; and all of them given back.
    assert events.count(COMPLETIONS) == verification.COMPLETIONS
    assert count(events, "/forward") * verification.GROUP == verification.FORWARDED
    assert count(events, "/forward_backward") == 3
    deleted = sum(event.startswith("DELETE") for event in events)
    assert count(events, "create_session") == deleted == verification.SESSIONS
    assert f"sessions   {verification.SESSIONS}, one after the other" in out
    planned = number(r"tokens     at most ([\d,]+):", out)
    used = number(r"together +([\d,]+)", out)
    assert 0 < used <= planned == number(r"together +[\d,]+ +([\d,]+)", out)
    assert re.search(r"cost       at most \$0\.0\d+ at the prices given", out)
    assert KEY not in out
    assert not any(
        KEY.encode() in path.read_bytes()
        for path in (account / "runs").rglob("*")
        if path.is_file()
    )
    # On one machine trainer and sampler agree to rounding.
    gap = re.search(r"differ by (\S+) in the mean and (\S+) at most", out)
    assert gap is not None
    assert float(gap[2]) < 1e-4


def test_nothing_is_sent_without_a_yes(
    ask: Callable[..., tuple[int, str, str]],
    events: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for answer in (None, "no", "YES PLEASE"):
        if answer is None:
            monkeypatch.delenv("CONFIRM", raising=False)
        else:
            monkeypatch.setenv("CONFIRM", answer)
        code, out, err = ask()
        assert code == 2
        # What it would use was said first.
        assert "tokens     at most " in out
        assert "cost       unknown (give --prices" in out
        assert "set CONFIRM=yes. Nothing was sent" in err
    assert events == []


def test_a_yes_at_a_terminal_counts_and_a_no_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CONFIRM", raising=False)
    monkeypatch.setattr(verification.sys.stdin, "isatty", lambda: True, raising=False)
    for typed, goes in (("yes", True), ("y", False), ("", False)):
        monkeypatch.setattr("builtins.input", lambda _, typed=typed: typed)
        assert verification._confirmed() is goes


def test_nothing_is_sent_without_a_key(
    ask: Callable[..., tuple[int, str, str]],
    events: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("CONFIRM", "yes")
    monkeypatch.setenv("FIREWORKS_API_KEY", "")
    code, out, err = ask()
    assert (code, out) == (2, "")
    assert "FIREWORKS_API_KEY is not set" in err
    assert events == []


QWEN_STAND_IN = dataclasses.replace(QWEN, tokenizer=TINY_POLICY_FOLDER)


async def found(
    endpoint: LocalService, folder: Path, **how: Any
) -> dict[str, verification.Finding]:
    with opened(endpoint, QWEN_STAND_IN, folder, **how) as session:
        findings = await verification.verify(session)
    return {finding.name: finding for finding in findings}


@pytest.mark.slow
async def test_the_bound_stops_the_checks_before_a_request(
    account: Path, endpoint: LocalService, events: list[str]
) -> None:
    # The first completion may take its prompt and 64 tokens: one too many.
    work = verification.plan(QWEN_STAND_IN)
    limit = work.prompt_tokens + verification.REPLY_TOKENS - 1
    result = await found(endpoint, account, token_limit=limit)
    assert result["samples"].verdict == "failed"
    assert result["samples"].said.startswith("TokenLimitReached: not sent")
    assert {result[name].verdict for name in ("a run", "losses", "resuming")} == {
        "left out"
    }
    assert events.count(COMPLETIONS) == 0
    assert count(events, "forward_backward") == 0


@pytest.mark.slow
async def test_a_service_with_another_loss_is_noticed(
    account: Path, endpoint: LocalService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mean over tokens in place of the sum: a small number where 100 are due."""
    sums = losses.LOSSES["ppo"]
    mean = dataclasses.replace(
        sums, token_loss=lambda lp, *rest: sums.token_loss(lp, *rest) / lp.numel()
    )
    monkeypatch.setitem(losses.LOSSES, "ppo", mean)
    result = await found(endpoint, account)
    assert result["losses"].verdict == "otherwise"
    assert "ppo" in result["losses"].said
    assert "not the formula's sum over tokens" in result["losses"].said
    assert result["trainer and sampler"].verdict == "as expected"
    assert result["resuming"].verdict == "as expected"


@pytest.mark.slow
async def test_a_failure_is_told_and_the_session_given_back(
    account: Path, endpoint: LocalService, events: list[str]
) -> None:
    endpoint.faults.append(Fault("save_weights", 403))
    result = await found(endpoint, account)
    assert result["checkpoints"].verdict == "failed"
    assert result["resuming"].verdict == "left out"
    deleted = sum(event.startswith("DELETE") for event in events)
    assert count(events, "create_session") == deleted == 1
