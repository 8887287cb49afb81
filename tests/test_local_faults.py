"""The local service misbehaves when told to, as often as told, and no longer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from local_helpers import TINY, Wire

from rlhelpers.local import LocalService
from rlhelpers.local.faults import Fault

pytest_plugins = ("local_fixtures",)


@pytest.fixture
def faulty(tiny_folder: Path, tmp_path: Path) -> Iterator[tuple[LocalService, Wire]]:
    models = {TINY: tiny_folder}
    faults = [Fault.parse("create_session=429*2"), Fault.parse("create_session=503")]
    with LocalService(tmp_path, models=models, faults=faults) as service:
        wire = Wire(service)
        with wire.http:
            yield service, wire


def test_each_fault_lasts_as_often_as_it_was_told(
    faulty: tuple[LocalService, Wire],
) -> None:
    service, wire = faulty
    answers = [wire.post("create_session", {"tags": []}) for _ in range(4)]
    assert [answer.status_code for answer in answers] == [429, 429, 503, 200]
    assert answers[0].json()["error"]["message"] == "too many requests"
    assert answers[2].json()["error"]["type"] == "server_error"
    assert service.faults == []


def test_a_pause_is_an_answer_to_ask_again(
    faulty: tuple[LocalService, Wire],
) -> None:
    service, wire = faulty
    service.faults[:] = [Fault("retrieve_future", "paused_capacity")]
    session_id = wire.session()
    ticket = wire.submit(
        "create_model",
        {
            "session_id": session_id,
            "model_seq_id": 0,
            "base_model": TINY,
            "lora_config": {"rank": 4, "seed": 1},
        },
    )
    first = wire.post("retrieve_future", {"request_id": ticket})
    assert first.status_code == 200
    assert first.json() == {
        "type": "try_again",
        "request_id": ticket,
        "queue_state": "paused_capacity",
    }
    assert str(wire.result(ticket)["model_id"]).startswith("run-")


@pytest.mark.parametrize(
    "text",
    [
        "completions",
        "completions=200",
        "completions=600",
        "completions=503*0",
        "completions=paused_capacity",
        "retrieve_future=paused_lunch",
        "completions=busy",
    ],
)
def test_a_fault_that_cannot_be(text: str) -> None:
    with pytest.raises(ValueError, match="no fault"):
        Fault.parse(text)


def test_reading_a_fault() -> None:
    assert Fault.parse("completions=503") == Fault("completions", 503, 1)
    assert Fault.parse("retrieve_future=paused_rate_limit*20") == Fault(
        "retrieve_future", "paused_rate_limit", 20
    )
