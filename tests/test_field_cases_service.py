"""Failures that others reported of sampling and services, where no other file has them.

The ids are those of the collected field cases; test_field_cases_coverage.py says where
the others are.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fireworks.training.sdk import types
from noise_policy import plain

from rlhelpers.analysis import summarize_outcomes
from rlhelpers.local import LocalService
from rlhelpers.models import ModelPreset
from rlhelpers.refusals import ServiceRefused, explained
from rlhelpers.sampling import (
    RolloutPlan,
    SamplingSettings,
    collect_rollouts,
    to_record,
)
from rlhelpers.service import TrainingSession, connect


@pytest.fixture
def service(preset: ModelPreset, tmp_path: Path) -> Iterator[LocalService]:
    """A service as another process would run it."""
    models = {preset.base_model: preset.tokenizer}
    with LocalService(state_dir=tmp_path / "state", models=models) as running:
        yield running


def join(service: LocalService, preset: ModelPreset, tmp_path: Path) -> TrainingSession:
    return connect(
        model=preset,
        base_url=service.base_url,
        api_key=service.api_key,
        runs_dir=tmp_path / "runs",
        quiet=True,
    )


def open_sessions(service: LocalService) -> list[str]:
    return sorted(path.name for path in (service.state_dir / "sessions").iterdir())


def test_s11_connecting_three_times_leaves_one_session(
    service: LocalService, preset: ModelPreset, tmp_path: Path
) -> None:
    seen: set[str] = set()
    for _ in range(3):
        session = join(service, preset, tmp_path)
        session.new_sampler("policy-0000")
        (only,) = open_sessions(service)
        seen.add(only)
    assert len(seen) == 3
    session.close()
    assert open_sessions(service) == []


def test_s11_an_error_in_mid_run_leaves_no_session(
    service: LocalService, preset: ModelPreset, tmp_path: Path
) -> None:
    def run(session: TrainingSession) -> None:
        with session:
            session.new_sampler("policy-0000")
            assert len(open_sessions(service)) == 1
            raise ZeroDivisionError

    session = join(service, preset, tmp_path)
    with pytest.raises(ZeroDivisionError):
        run(session)
    assert session.closed
    assert open_sessions(service) == []


def test_s11_quota_balance_and_outage_are_told_apart(preset: ModelPreset) -> None:
    said = {}
    for status in (402, 409, 429, 500, 503):
        request = httpx.Request("POST", "http://127.0.0.1/")
        response = httpx.Response(status, text="(server text)", request=request)
        with pytest.raises(ServiceRefused) as caught, explained(preset):
            response.raise_for_status()
        said[status] = str(caught.value)
        assert f"(status {status}: (server text))" in said[status]
    assert said[402].startswith("the account's balance does not cover it")
    for quota in (409, 429):
        assert said[quota].startswith("the account's limit of open runs or requests")
        assert "close other sessions" in said[quota]
    for outage in (500, 503):
        assert said[outage].startswith("the service is unavailable")
        assert "nothing is wrong with the parameters" in said[outage]


class Remote:
    """In place of the SDK's client: a service with limits of its own."""

    def __init__(self, *replies: tuple[int, str]) -> None:
        self.replies = list(replies)

    async def sample_async(self, **request: Any) -> types.SampleResponse:
        length, reason = self.replies.pop(0)
        sequence = types.SampledSequence(
            stop_reason=reason,  # type: ignore[arg-type]
            tokens_np=np.full(length, 40),
            logprobs_np=np.full(length, -0.5),
        )
        return types.SampleResponse(sequences=[sequence])


async def test_s04_a_reply_that_the_context_cut_off_early_is_a_hit(
    session: TrainingSession,
) -> None:
    """Four tokens of sixteen for want of room; sixteen that ended by themselves."""
    sampler = session.base_sampler()
    sampler.close()
    sampler.client = Remote((4, "length"), (16, "stop"))  # type: ignore[assignment]
    plan = RolloutPlan("train", 1, 0, 2, SamplingSettings(max_tokens=16), "job")
    runs = await collect_rollouts(
        sampler, [plain(1)], plan=plan, runtime=await session.runtime()
    )
    records = [to_record(run, plain(1), run_id="r") for run in runs]
    by_length = {record.output_tokens: record.token_limit for record in records}
    assert by_length == {4: True, 16: False}
    assert summarize_outcomes(records).token_limit == 1
