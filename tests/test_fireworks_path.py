"""The paid path, with the local service standing in for the endpoint.

The real SDK talks to a real service under the Fireworks preset; every request that
reaches it is noted, so that "nothing was sent" is counted and not believed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import re
import traceback
from pathlib import Path
from typing import Any

import papermill
import pytest
from fireworks.training.sdk import Datum
from noise_policy import plain
from paid_helpers import COMPLETIONS, KEY, QWEN, count, opened
from test_notebooks import run_up_to_an_error

from rlhelpers import preflight
from rlhelpers.evaluation import evaluate
from rlhelpers.local import LocalService
from rlhelpers.metrics import read_metrics, read_resume_state, read_rollouts
from rlhelpers.models import ModelPreset
from rlhelpers.parameters import ParameterError
from rlhelpers.preflight import MissingKey, TokenizerUnavailable
from rlhelpers.refusals import ServiceRefused
from rlhelpers.sampling import SamplingSettings
from rlhelpers.service import connect
from rlhelpers.training import TrainConfig, train, train_step
from rlhelpers.usage import TokenLimitReached

pytest_plugins = ("paid_fixtures",)

NOTEBOOK = Path(__file__).resolve().parents[1] / "notebooks" / "04_full_run.ipynb"


# -- the order of things ----------------------------------------------------------


class Printed(io.StringIO):
    """Standard output, whose lines are noted among the requests."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self._events = events

    def write(self, text: str) -> int:
        self._events += [f"printed {line}" for line in text.splitlines()]
        return len(text)


def test_the_banner_precedes_every_request(
    endpoint: LocalService, paid: ModelPreset, tmp_path: Path, events: list[str]
) -> None:
    with (
        contextlib.redirect_stdout(Printed(events)),
        opened(
            endpoint,
            paid,
            tmp_path,
            quiet=False,
            token_limit=5_000,
            prices=[1, 2, 4],
            planned_rollouts=10,
            planned_datums=4,
            max_tokens=16,
        ) as session,
    ):
        session.base_sampler()
    kinds = [event.split()[0] for event in events]
    first = next(n for n, kind in enumerate(kinds) if kind != "printed")
    banner = "\n".join(events[:first])
    assert set(kinds[:first]) == {"printed"}
    assert "printed Backend          fireworks" in banner
    assert re.search(r"Service +127\.0\.0\.1:\d+$", banner, re.M)
    assert "Rollouts planned 10" in banner
    # Own tasks may fill the context of 256: 10 × 256, and 4 × 255 to train on.
    assert "Tokens planned   at most 3,580" in banner
    assert "Token ceiling    5,000" in banner
    # 10 × 240 at 1, 10 × 16 at 2, 1,020 at 4 dollars a million.
    assert "at most $0.01 for the planned work, $0.02 up to the ceiling" in banner
    # What was used is said when all is over.
    last = len(kinds) - kinds[::-1].index("DELETE")
    assert "printed" not in kinds[first:last]
    assert re.search(r"printed tokens +used  planned at most", "\n".join(events[last:]))


def test_the_session_ends_also_after_an_error(
    endpoint: LocalService, paid: ModelPreset, tmp_path: Path, events: list[str]
) -> None:
    """S11: it would hold a slot of the quota."""
    with pytest.raises(KeyError), opened(endpoint, paid, tmp_path):
        raise KeyError("a cell failed")
    # It would hold a slot of the account's quota.
    assert count(events, "create_session") == 1
    assert sum(event.startswith("DELETE") for event in events) == 1


# -- the token limit --------------------------------------------------------------


async def test_the_limit_stops_requests_before_they_are_sent(
    endpoint: LocalService, paid: ModelPreset, tmp_path: Path, events: list[str]
) -> None:
    tasks = [plain(n) for n in range(8)]
    with opened(endpoint, paid, tmp_path) as session:
        full = await evaluate(session, tasks, sampler=session.base_sampler())
    assert events.count(COMPLETIONS) == 8
    used = [r.prompt_tokens + r.output_tokens for r in full.records]
    bounds = [r.prompt_tokens + 16 for r in full.records]
    limit = sum(used[:3]) + bounds[3]  # four fit, whatever the fourth takes

    events.clear()
    with opened(endpoint, paid, tmp_path, token_limit=limit) as session:
        with pytest.raises(TokenLimitReached, match=f"token_limit={limit:,}"):
            await evaluate(
                session, tasks, sampler=session.base_sampler(), run_dir=tmp_path / "run"
            )
        sent = events.count(COMPLETIONS)
        assert session.usage.counts.total <= limit
    assert 4 <= sent < 8
    # The first refusal ends it: a later, shorter prompt is not sent instead.
    assert sum(used[:sent]) + bounds[sent] > limit
    assert len(read_rollouts(tmp_path / "run" / "rollouts.jsonl")) == sent


async def test_the_limit_stops_an_update_and_the_run_goes_on(
    endpoint: LocalService, paid: ModelPreset, tmp_path: Path, events: list[str]
) -> None:
    tasks = [plain(n) for n in range(12)]
    config = TrainConfig.from_preset(paid, steps=3, tasks_per_step=4)

    def told(folder: str, **how: Any) -> dict[str, Any]:
        return {"config": config, "run_dir": tmp_path / folder, "progress": False} | how

    with opened(endpoint, paid, tmp_path) as session:
        whole = await train(session, tasks, **told("whole"))
    first, second = whole.metrics[:2]
    assert first.updated
    assert second.updated
    done = _tokens(first) + sum(_used(whole.run_dir, 1, "train", trained=True))
    sampled = _tokens(second) + paid.max_tokens

    events.clear()
    with opened(endpoint, paid, tmp_path, token_limit=done + sampled) as session:
        with pytest.raises(TokenLimitReached, match="resume"):
            await train(session, tasks, **told("cut"))
        # Step 2 was sampled; its update was never sent.
        assert count(events, "forward_backward") == count(events, "optim_step") == 1
        assert session.updates == 1
        cut = tmp_path / "cut"
        assert [row.step for row in read_metrics(cut / "metrics.jsonl")] == [1]
        assert read_resume_state(cut / "resume.json").next_step == 2
        assert len(_used(cut, 2, "train")) == 16

        session.usage.limit = None
        result = await train(session, tasks, **told("cut", resume=True))
    assert [row.step for row in result.metrics] == [1, 2, 3]
    assert [row.attempt for row in result.metrics] == [1, 2, 2]
    assert [r.reward_mean for r in result.metrics] == [
        r.reward_mean for r in whole.metrics
    ]


def _tokens(row: Any) -> int:
    return int(row.prefill_tokens + row.sampled_tokens)


def _used(run_dir: Path, step: int, phase: str, *, trained: bool = False) -> list[int]:
    """Tokens of a step's rollouts; of those trained on, as datums."""
    rows = read_rollouts(run_dir / "rollouts.jsonl", phase=phase)
    return [
        row.prompt_tokens + row.output_tokens - trained
        for row in rows
        if row.step == step and not (trained and row.advantage is None)
    ]


async def test_every_way_to_train_is_counted_first(
    endpoint: LocalService, paid: ModelPreset, tmp_path: Path, events: list[str]
) -> None:
    from rlhelpers.datums import make_datum

    datum = make_datum([5, 6, 7], [8, 9, 2], [-1.0, -1.0, -1.0], 1.0)  # five tokens
    with opened(endpoint, paid, tmp_path, token_limit=14) as session:
        client = session.training_client
        client.forward([datum], "importance_sampling").result()
        await client.forward_backward_async([datum], "importance_sampling")
        assert session.usage.counts.prefill == session.usage.counts.trained == 5
        sent = count(events, "forward") + count(events, "forward_backward")
        with pytest.raises(TokenLimitReached):
            client.forward_backward([datum], "importance_sampling")
        with pytest.raises(TokenLimitReached):
            await client.forward_async([datum], "importance_sampling")
        targets = {"target_tokens": datum.loss_fn_inputs["target_tokens"]}
        plain_datum = Datum(model_input=datum.model_input, loss_fn_inputs=targets)
        with pytest.raises(TokenLimitReached):
            await client.forward_backward_custom_async([plain_datum], _no_loss)
        assert count(events, "forward") + count(events, "forward_backward") == sent

        # A client made by a resume is counted as well.
        session.resume(session.save_state("state-0001"))
        with pytest.raises(TokenLimitReached):
            session.training_client.forward([datum], "importance_sampling")


def _no_loss(data: Any, logprobs: Any) -> Any:
    return sum(values.sum() for values in logprobs) * 0.0, {}


# -- the key ----------------------------------------------------------------------


def test_a_key_with_a_line_break_still_works(
    endpoint: LocalService,
    paid: ModelPreset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FIREWORKS_API_KEY", f" {KEY}\n")
    with opened(endpoint, paid, tmp_path, api_key=None) as session:
        session.base_sampler()


def test_a_damaged_key_is_refused_without_being_shown(
    endpoint: LocalService, paid: ModelPreset, tmp_path: Path, events: list[str]
) -> None:
    with pytest.raises(MissingKey, match="copy the key again") as caught:
        opened(endpoint, paid, tmp_path, api_key=f"{KEY}\n{KEY}")
    assert KEY not in "".join(traceback.format_exception(caught.value))
    assert events == []


def test_a_refused_key_is_not_shown(
    endpoint: LocalService, paid: ModelPreset, tmp_path: Path
) -> None:
    wrong = "fw_wrong_9876543210"
    with pytest.raises(ServiceRefused, match="FIREWORKS_API_KEY") as caught:
        opened(endpoint, paid, tmp_path, api_key=wrong)
    assert wrong not in "".join(traceback.format_exception(caught.value))
    # A verbose traceback shows local variables; ours do not give the key away.
    shown = traceback.TracebackException.from_exception(
        caught.value, capture_locals=True
    )
    ours = [
        (frame.locals or {})
        for frame in shown.stack
        if frame.filename.endswith(("rlhelpers/service.py", "rlhelpers/preflight.py"))
    ]
    assert ours
    texts = [text for values in ours for n, text in values.items() if n != "api_key"]
    assert not any(wrong in text for text in texts)


def test_with_a_key_set_the_default_is_still_local(
    preset: ModelPreset,
    endpoint: LocalService,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FIREWORKS_API_KEY", KEY)
    monkeypatch.setenv("FIREWORKS_BASE_URL", endpoint.base_url)
    monkeypatch.setattr(
        preflight, "find_key", lambda _: pytest.fail("the key was looked up")
    )
    with connect(model=preset, runs_dir=tmp_path, quiet=True) as session:
        session.base_sampler()
        assert session.banner.backend == "local"
    assert endpoint._api is not None
    assert not endpoint._api.registry.sessions  # nobody ever called it


# -- address, model, tokenizer ----------------------------------------------------


@pytest.mark.parametrize(
    ("given", "used"),
    [
        (None, "https://api.fireworks.ai/training/v1/serverless"),
        ("https://a.example", "https://a.example/training/v1/serverless"),
        ("https://a.example/", "https://a.example/training/v1/serverless"),
        ("http://127.0.0.1:9/x/", "http://127.0.0.1:9/x/training/v1/serverless"),
        (
            "http://localhost:9/training/v1/serverless/",
            "http://localhost:9/training/v1/serverless",
        ),
    ],
)
def test_the_address_comes_from_the_environment(
    given: str | None, used: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FIREWORKS_BASE_URL", raising=False)
    if given is not None:
        monkeypatch.setenv("FIREWORKS_BASE_URL", given)
    assert preflight.fireworks_url(None) == used


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("http://a.example", "unencrypted"),
        ("a.example", "must be an address"),
        ("ftp://a.example", "must be an address"),
    ],
)
def test_an_address_that_cannot_be_used(given: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        connect("fireworks", api_key=KEY, base_url=given, quiet=True)


def test_the_banner_shows_no_password_of_an_address() -> None:
    assert preflight.host_of("https://me:secret@a.example:8/x") == "a.example:8"


async def test_an_unknown_base_model_is_explained(
    endpoint: LocalService, paid: ModelPreset, tmp_path: Path, events: list[str]
) -> None:
    """S13: a model that was retired, before a session is opened and after."""
    retired = dataclasses.replace(paid, base_model="accounts/fireworks/models/gone")
    with pytest.raises(ServiceRefused, match="models/gone.*retired"):
        opened(endpoint, retired, tmp_path)
    assert events == ["GET /v1/accounts/fireworks/models/gone"]
    with opened(endpoint, paid, tmp_path) as session:
        session.preset = retired
        with pytest.raises(ServiceRefused, match="models/gone.*retired"):
            _ = session.training_client
        with pytest.raises(ServiceRefused, match="models/gone.*retired"):
            await session.base_sampler().sample([5, 6], SamplingSettings(4), seed=0)
        # The step that would train it stops before it samples anything.
        sampled = events.count(COMPLETIONS)
        with pytest.raises(ServiceRefused, match="models/gone"):
            await train_step(session, [plain(1)], run_dir=tmp_path / "run")
    assert events.count(COMPLETIONS) == sampled


@pytest.mark.parametrize(
    ("base_model", "tokenizer", "alike"),
    [
        (QWEN.base_model, QWEN.tokenizer, True),
        ("accounts/fireworks/models/qwen3p8-27b-instruct", "Qwen/Qwen3.8-27B", True),
        ("accounts/fireworks/models/glm-5", "Qwen/Qwen3.8-27B", False),
        ("accounts/fireworks/models/qwen3p8-27b", "Qwen/Qwen3.8-4B", False),
    ],
)
def test_a_tokenizer_of_another_model_is_noticed_before_anything_is_paid(
    base_model: str, tokenizer: str, alike: bool, recwarn: pytest.WarningsRecorder
) -> None:
    """S13: a model with another model's tokenizer."""
    preset = dataclasses.replace(QWEN, base_model=base_model, tokenizer=tokenizer)
    preflight.warn_if_unlike(preset)
    texts = [str(warning.message) for warning in recwarn]
    assert [base_model in text and tokenizer in text for text in texts] == (
        [] if alike else [True]
    )


def test_a_tokenizer_that_cannot_be_downloaded(
    endpoint: LocalService,
    tmp_path: Path,
    events: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(TokenizerUnavailable) as caught:
        connect("fireworks", api_key=KEY, base_url=endpoint.base_url, quiet=True)
    said = str(caught.value)
    for text in (str(QWEN.tokenizer), QWEN.base_model, "hf download", "Nothing was"):
        assert text in said
    assert events == []


# -- the notebook itself ----------------------------------------------------------


SMALL = {
    "BACKEND": "fireworks",
    "MIN_OPERAND": 10,
    "MAX_OPERAND": 99,
    "STEPS": 2,
    "TASKS_PER_STEP": 2,
    "GROUP_SIZE": 4,
    "MAX_TOKENS": 96,
    "EVALUATION_TASKS": 4,
    "INTERRUPT_AFTER": 1,
    "PRICES": [1.0, 2.0, 4.0],
}


def execute(folder: Path, notebook: Path = NOTEBOOK, **changes: Any) -> Any:
    declared = papermill.inspect_notebook(str(notebook))
    small = {name: value for name, value in SMALL.items() if name in declared}
    return papermill.execute_notebook(
        str(notebook),
        str(folder / "executed.ipynb"),
        parameters={**small, "RUNS_DIR": str(folder / "runs"), **changes},
        kernel_name="python3",
        cwd=str(notebook.parent),
        progress_bar=False,
    )


def keyless(folder: Path) -> bool:
    """Whether the key stands nowhere in what the notebook left behind."""
    files = [folder / "executed.ipynb", *(folder / "runs").rglob("*")]
    return not any(
        KEY.encode() in path.read_bytes() for path in files if path.is_file()
    )


@pytest.mark.slow
def test_notebook_04_runs_on_the_paid_backend(account: Path, events: list[str]) -> None:
    executed = execute(account, KL_EVERY=1)  # off unless asked for: it is paid for
    assert count(events, "/forward") == 2  # one a step
    cells = {cell.id: cell for cell in executed.cells}
    banner = "".join(output.text for output in cells["c11"].outputs)
    assert "Backend          fireworks" in banner
    assert QWEN.base_model in banner
    # 16 rollouts, 8 held-out tasks, 6 watch prompts at most.
    assert "Rollouts planned 30" in banner
    assert "Token ceiling    10,000,000" in banner
    assert re.search(r"at most \$0\.\d\d for the planned work, \$40\.00 up to", banner)
    records = read_rollouts(next((account / "runs").glob("full-run-*/rollouts.jsonl")))
    watched = read_rollouts(next((account / "runs").glob("full-run-*/watch.jsonl")))
    assert len(records) == 16 + 8
    assert events.count(COMPLETIONS) == len(records) + len(watched) <= 30
    planned = int(re.search(r"at most ([\d,]+)\n", banner)[1].replace(",", ""))
    text = json.dumps([cell.get("outputs") for cell in executed.cells])
    used = int(re.search(r"in all ([\d,]+)", text)[1].replace(",", ""))
    assert used <= planned
    assert not (account / "runs" / "service").exists()  # no service of its own
    # Every session that was opened was given back, the resumed one included.
    deleted = sum(event.startswith("DELETE") for event in events)
    assert count(events, "create_session") == deleted == 2
    assert keyless(account)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("02_calibration", {"TASKS": 2}),
        ("03_one_update", {}),
        ("05_before_and_after", {"RANGES": [[10, 99], [100, 300]]}),
        ("06_checkpoints", {"STEPS": 4}),
        ("07_your_own_task", {"MAX_TOKENS": 12}),
        (
            "08_losses_and_stability",
            {"UPDATES": 2, "POOL_TASKS": 4, "POOL_GROUP": 4},
        ),
        ("09_several_turns", {}),
        ("10_reward_design", {}),
    ],
)
def test_the_other_notebooks_run_on_the_paid_backend(
    name: str, changes: dict[str, Any], account: Path, events: list[str]
) -> None:
    executed = execute(account, NOTEBOOK.with_name(f"{name}.ipynb"), **changes)
    text = "".join(
        output.get("text", "")
        for cell in executed.cells
        for output in cell.get("outputs", ())
    )
    assert "Backend          fireworks" in text
    planned = int(re.search(r"Rollouts planned ([\d,]+)", text)[1].replace(",", ""))
    assert 0 < events.count(COMPLETIONS) <= planned
    # Every session was given back, also where the notebook leaves that to its kernel.
    deleted = sum(event.startswith("DELETE") for event in events)
    assert count(events, "create_session") == deleted >= 1
    assert not (account / "runs" / "service").exists()
    assert keyless(account)


@pytest.mark.slow
def test_notebook_04_stops_at_its_token_limit(account: Path, events: list[str]) -> None:
    with pytest.raises(papermill.PapermillExecutionError) as caught:
        execute(account, TOKEN_LIMIT=400, EVALUATION_TASKS=20)
    assert "TokenLimitReached" in str(caught.value)
    assert "TOKEN_LIMIT" in str(caught.value)
    rollouts = next((account / "runs").glob("full-run-*/rollouts.jsonl"))
    records = read_rollouts(rollouts)
    # What was answered is on disk, and fits; a fifth request of 130 would not.
    assert events.count(COMPLETIONS) == len(records) < 20
    assert sum(r.prompt_tokens + r.output_tokens for r in records) <= 400
    assert count(events, "create_session") == 1
    assert sum(event.startswith("DELETE") for event in events) == 1
    assert keyless(account)


@pytest.mark.usefixtures("account")
def test_a_wrong_parameter_stops_notebook_04_before_anything_is_sent(
    events: list[str], tmp_path: Path
) -> None:
    wrong = {"GROUP_SIZE": "8", "STEP": 3, "RUNS_DIR": str(tmp_path / "runs")}
    with pytest.raises(ParameterError) as caught:
        run_up_to_an_error(NOTEBOOK, **{**SMALL, **wrong})
    assert "GROUP_SIZE = '8': must be a whole number" in str(caught.value)
    assert "STEP is no parameter of this notebook (did you mean STEPS?)" in str(
        caught.value
    )
    assert events == []
