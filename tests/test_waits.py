"""What a session waits for is told, by kind, and so is that it goes on.

The local service refuses and pauses as it is told to; the SDK repeats by itself.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fireworks.training.sdk import AdamParams
from fireworks.training.sdk._core import _base_client
from fireworks.training.sdk.sampling import DeploymentSampler
from paid_helpers import opened

from rlhelpers import waits as module
from rlhelpers.datums import RolloutFailed, make_datum
from rlhelpers.evaluation import evaluate
from rlhelpers.local import LocalService
from rlhelpers.local.faults import Fault
from rlhelpers.models import ModelPreset
from rlhelpers.refusals import ServiceRefused
from rlhelpers.sampling import SamplingSettings
from rlhelpers.service import TrainingSession
from rlhelpers.waits import Waits, reason_of

pytest_plugins = ("paid_fixtures",)


@pytest.fixture(autouse=True)
def told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.0)
    monkeypatch.setattr(module, "_TICK_SECONDS", 0.05)


@pytest.fixture
def paid_session(
    endpoint: LocalService, paid: ModelPreset, tmp_path: Path
) -> Iterator[TrainingSession]:
    with opened(endpoint, paid, tmp_path) as session:
        yield session


@pytest.fixture
def lines(paid_session: TrainingSession) -> list[str]:
    """What the session tells."""
    told: list[str] = []
    paid_session.waits.say = told.append
    return told


def until_over(waits: Waits) -> None:
    """The teller notices a moment later that a wait is over."""
    for _ in range(100):
        if waits._ticker is None:
            return
        time.sleep(0.05)
    pytest.fail(f"still told: {waits.describe()}")


# -- the kinds --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "endpoint", "said"),
    [
        (200, "completions", None),
        (400, "completions", None),
        (401, "create_session", None),
        (404, "weights_info", None),
        (402, "optim_step", "the account's balance does not cover it"),
        (409, "create_model", "the account's limit of open runs is reached"),
        (429, "create_session", "the account's limit of open runs is reached"),
        (429, "completions", "too many requests at once"),
        (429, "retrieve_future", "too many requests at once"),
        (404, "completions", "the model or snapshot is still being loaded"),
        (425, "completions", "the model or snapshot is still being loaded"),
        (408, "retrieve_future", "the service took too long"),
        (504, "completions", "the service took too long"),
        (500, "forward", "the service is unavailable or overloaded"),
        (503, "retrieve_future", "the service is unavailable or overloaded"),
    ],
)
def test_every_refusal_has_its_own_words(
    status: int, endpoint: str, said: str | None
) -> None:
    reason = reason_of(status, endpoint)
    if said is None:
        assert reason is None
    else:
        assert reason is not None
        assert reason.startswith(said)
        assert reason.endswith(f"({status})")


def test_the_page_says_what_is_said() -> None:
    page = (Path(__file__).resolve().parents[1] / "docs" / "fireworks.md").read_text()
    table = page.partition("<!-- waits -->")[2].partition("<!-- /waits -->")[0]
    rows = re.findall(r"^\| ([\d, ]+) \| (.+?) \| (.+?) \| .+ \|$", table, re.M)
    assert len(rows) == 8
    for statuses, endpoints, said in rows:
        for status in map(int, statuses.split(",")):
            for endpoint in re.findall(r"`(\w+)`", endpoints):
                assert reason_of(status, endpoint) == f"{said} ({status})"
    for said in (
        module._CAPACITY,
        module._TOO_MANY_CLIENTS,
        module._UNREACHABLE,
        module._SILENT,
    ):
        assert f"`{said}`" in " ".join(page.split())


# -- through the service ----------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (503, "the service is unavailable or overloaded"),
        (429, "too many requests at once"),
    ],
)
async def test_sampling_waits_and_goes_on(
    endpoint: LocalService,
    paid_session: TrainingSession,
    lines: list[str],
    caplog: pytest.LogCaptureFixture,
    status: int,
    said: str,
) -> None:
    sampler = paid_session.base_sampler()
    endpoint.faults.append(Fault("completions", status))
    sequence = await sampler.sample([5, 6, 7], SamplingSettings(4), seed=0)
    assert sequence.tokens
    until_over(paid_session.waits)
    waiting, over = lines
    assert "(since " in waiting
    assert f"for sampling: {said}" in waiting
    assert waiting.endswith(f"({status})")
    assert over.startswith("going on after ")
    assert not endpoint.faults
    # The SDK's own line for every request would say it a second time.
    assert "Transient" not in caplog.text


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("paused_capacity", "short of capacity; the request is queued (paused)"),
        ("paused_rate_limit", "trains too much at once; the request is queued"),
        (429, "too many requests at once"),
        (503, "the service is unavailable or overloaded"),
    ],
)
def test_an_update_waits_and_goes_on(
    endpoint: LocalService,
    paid_session: TrainingSession,
    lines: list[str],
    answer: int | str,
    said: str,
) -> None:
    datum = make_datum([5, 6, 7], [8, 9, 2], [-1.0, -1.0, -1.0], 1.0)
    client = paid_session.training_client
    endpoint.faults.append(Fault("retrieve_future", answer, times=3))
    with paid_session.waits.operation("the update"):
        client.forward_backward([datum], "importance_sampling").result()
        client.optim_step(AdamParams(learning_rate=1e-3)).result()
    until_over(paid_session.waits)
    assert "for the update: " in lines[0]
    assert said in lines[0]
    assert lines[-1].startswith("going on after ")


def test_no_credit_is_said_while_the_sdk_waits_for_it(
    endpoint: LocalService, paid_session: TrainingSession, lines: list[str]
) -> None:
    _ = paid_session.training_client
    endpoint.faults.append(Fault("save_weights", 402))
    assert paid_session.save_state("state-0000")
    until_over(paid_session.waits)
    assert "for a checkpoint: the account's balance does not cover it" in lines[0]
    assert lines[-1].startswith("going on after ")


def test_a_full_quota_is_told_apart_from_too_many_requests(
    endpoint: LocalService,
    paid: ModelPreset,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    endpoint.faults.append(Fault("create_session", 429, times=2))
    with opened(endpoint, paid, tmp_path) as session:
        until_over(session.waits)
    printed = capsys.readouterr().out
    assert "for a session: the account's limit of open runs is reached" in printed
    assert "going on after " in printed


# -- giving up --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (429, "too many requests at once, also after several tries; lower the"),
        (503, "the service is unavailable; nothing is wrong with the parameters"),
        (402, "the account's balance does not cover it; see its billing page"),
    ],
)
async def test_what_the_sdk_gives_up_on_is_explained(
    endpoint: LocalService,
    paid_session: TrainingSession,
    lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    said: str,
) -> None:
    monkeypatch.setattr(DeploymentSampler, "_RETRY_BASE_BACKOFF_S", 0.05)
    sampler = paid_session.base_sampler()
    endpoint.faults.append(Fault("completions", status, times=7))
    with pytest.raises(ServiceRefused) as caught:
        await sampler.sample([5, 6, 7], SamplingSettings(4), seed=0)
    assert str(caught.value).startswith(said)
    assert f"(status {status}" in str(caught.value)
    until_over(paid_session.waits)
    assert not any(line.startswith("going on") for line in lines)
    # The tokens of a request without an answer count with their bound: 3 + 4.
    assert paid_session.usage_report.unanswered.total == 7


def test_a_quota_that_stays_full_names_the_remedy(
    endpoint: LocalService,
    paid: ModelPreset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_base_client, "INITIAL_RETRY_DELAY", 0.02)
    monkeypatch.setattr(_base_client, "MAX_RETRY_DELAY", 0.02)
    endpoint.faults.append(Fault("create_session", 429, times=100))
    with pytest.raises(ServiceRefused, match="python -m rlhelpers sessions"):
        opened(endpoint, paid, tmp_path)


async def test_a_service_that_is_gone_is_explained(
    endpoint: LocalService,
    paid_session: TrainingSession,
    lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    from noise_policy import plain

    monkeypatch.setattr(DeploymentSampler, "_RETRY_BASE_BACKOFF_S", 0.05)
    sampler = paid_session.base_sampler()
    paid_session._keep_session = True  # the fixture must not wait for it to end
    endpoint.close()
    with pytest.raises(RolloutFailed, match="cannot be reached; check the network"):
        await evaluate(
            paid_session, [plain(1)], sampler=sampler, run_dir=tmp_path / "run"
        )
    assert "the service cannot be reached; the SDK asks again (Connect" in lines[0]


# -- the teller -------------------------------------------------------------------


def test_one_line_for_many_requests_and_the_bar_in_between() -> None:
    told: list[str] = []
    shown: list[str | None] = []
    waits = Waits(told.append, grace=0.0)
    release = threading.Event()

    def request() -> None:
        with waits.operation("sampling"):
            operation = module._OPERATION.get()
            assert operation is not None
            waits.note(operation, "busy (429)")
            release.wait()

    with waits.shown_by(shown.append):
        threads = [threading.Thread(target=request) for _ in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(100):
            if any("(3 requests)" in (text or "") for text in shown):
                break
            time.sleep(0.05)
        release.set()
        for thread in threads:
            thread.join()
        until_over(waits)
        time.sleep(0.1)
    assert len(told) == 2
    assert told[0].startswith("waiting 0 s (since ")
    assert told[1] == "going on after 0 s" or told[1].startswith("going on after ")
    assert shown[-1] is None
    assert waits.describe() is None


def test_another_reason_is_told_when_it_takes_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "CHANGE_SECONDS", 0.0)
    told: list[str] = []
    waits = Waits(told.append, grace=0.0)

    def until(count: int) -> None:
        for _ in range(100):
            if len(told) == count:
                return
            time.sleep(0.05)
        pytest.fail(str(told))

    with waits.operation("sampling"):
        operation = module._OPERATION.get()
        assert operation is not None
        for number, reason in enumerate(("busy (429)", "broken (503)"), start=1):
            waits.note(operation, reason)
            until(number)
            assert told[-1].endswith(f"for sampling: {reason}")
        waits.note(operation, None)
    until(3)


def test_a_short_wait_is_not_worth_a_line() -> None:
    told: list[str] = []
    waits = Waits(told.append, grace=60.0)
    with waits.operation("sampling"):
        operation = module._OPERATION.get()
        assert operation is not None
        waits.note(operation, "busy (429)")
        assert "for sampling: busy (429)" in str(waits.describe())
        waits.note(operation, None)
    until_over(waits)
    assert told == []


def test_an_answer_that_comes_after_the_end_starts_no_wait() -> None:
    waits = Waits(print, grace=0.0)
    with waits.operation("sampling"):
        operation = module._OPERATION.get()
    assert operation is not None
    waits.note(operation, "busy (429)")
    assert waits.describe() is None


def test_a_service_that_falls_silent_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost connection, which the SDK repeats without end and without a word."""
    monkeypatch.setattr(module, "_SILENCE_SECONDS", 0.2)
    told: list[str] = []
    waits = Waits(told.append, grace=0.0)
    with waits.operation("sampling"):  # may take as long as it likes
        time.sleep(0.5)
    assert told == []
    with waits.operation("the update", polls=True):
        time.sleep(0.5)
        assert "for the update: the service does not answer any more" in told[0]
        operation = module._OPERATION.get()
        assert operation is not None
        waits.note(operation, None)
        assert waits.describe() is None
    until_over(waits)
    assert told[-1].startswith("going on after ")


def test_a_pause_that_nobody_takes_back_ends_by_itself() -> None:
    waits = Waits(lambda line: None, grace=0.0)
    with waits.operation("the update"):
        operation = module._OPERATION.get()
        assert operation is not None
        waits.note(operation, "queued (paused)", lasts=0.1)
        waits.note(operation, None)  # an answer with status 200, as a pause has
        assert waits.describe() is not None
        time.sleep(0.2)
        assert waits.describe() is None


def test_listening_leaves_the_loggers_as_they_were(
    paid_session: TrainingSession, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("httpx")
    paid_session.base_sampler()
    # Heard, and shown to nobody who had not asked for it.
    assert "HTTP Request" not in caplog.text
    paid_session.close()
    assert logger.level != logging.INFO
    assert not any(isinstance(known, module._Ear) for known in logger.filters)
