"""Connecting: keys, limits, addresses, closing, and resuming by path."""

from __future__ import annotations

import dataclasses
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fireworks.training.sdk import AdamParams

from rlhelpers.checkpoints import CheckpointError
from rlhelpers.datums import make_datum
from rlhelpers.local import LocalService
from rlhelpers.models import ModelPreset
from rlhelpers.preflight import Banner, MissingKey
from rlhelpers.refusals import ServiceRefused
from rlhelpers.service import TrainingSession, connect
from rlhelpers.usage import PlannedWork

KEY = "fw_secret_0123456789"


class Listener:
    """A loopback port that counts who calls."""

    def __init__(self) -> None:
        self.calls = 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/training/v1/serverless"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self.calls += 1
            connection.close()

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def listener() -> Iterator[Listener]:
    opened = Listener()
    yield opened
    opened.close()


@pytest.fixture
def no_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FIREWORKS_API_KEY", raising=False)
    monkeypatch.chdir(tmp_path)  # away from any .env file


@pytest.fixture(scope="module")
def service(
    preset: ModelPreset, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalService]:
    """A service of its own, as another process would run it, with two base models."""
    models = {preset.base_model: preset.tokenizer, "local/other": preset.tokenizer}
    with LocalService(
        state_dir=tmp_path_factory.mktemp("service"), models=models
    ) as running:
        yield running


def joined(
    service: LocalService, preset: ModelPreset, tmp_path: Path, **how: object
) -> TrainingSession:
    return connect(
        model=preset,
        base_url=service.base_url,
        api_key=service.api_key,
        runs_dir=tmp_path / "runs",
        quiet=True,
        **how,  # type: ignore[arg-type]
    )


# -- before anything is sent ------------------------------------------------------


@pytest.mark.usefixtures("no_key")
def test_fireworks_without_a_key_sends_nothing(listener: Listener) -> None:
    with pytest.raises(MissingKey) as caught:
        connect("fireworks", base_url=listener.url, quiet=True)
    assert "FIREWORKS_API_KEY" in str(caught.value)
    assert "BACKEND='local'" in str(caught.value)
    assert listener.calls == 0


@pytest.mark.usefixtures("no_key")
def test_an_empty_key_is_no_key() -> None:
    with pytest.raises(MissingKey):
        connect("fireworks", api_key="", quiet=True)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"backend": "cloud"}, "unknown backend 'cloud'"),
        ({"model": "gpt-99"}, "unknown model 'gpt-99'"),
        (
            {"backend": "fireworks", "model": "tiny-arithmetic"},
            "BACKEND is 'fireworks'",
        ),
        ({"token_limit": 0}, "token_limit must be at least 1, got 0"),
        ({"token_limit": "9"}, "token_limit must be at least 1, got '9'"),
        ({"prices": (1.0, 2.0)}, "three numbers"),
        ({"prices": (1.0, 2.0, -1.0)}, "three numbers"),
        ({"prices": "123"}, "three numbers"),
        ({"resume_from": "acct/notrun/state-1"}, "'notrun'"),
        ({"resume_from": "State_5"}, "'State_5'"),
        ({"base_url": "https://example.org/x", "api_key": "k"}, "loopback only"),
    ],
)
def test_bad_arguments(how: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError) as caught:
        connect(quiet=True, **how)  # type: ignore[arg-type]
    assert said in str(caught.value)


def test_resuming_a_sampler_checkpoint_is_explained_before_connecting(
    listener: Listener, preset: ModelPreset
) -> None:
    path = f"local/run-{'0' * 32}/policy-0005-1a2b3c4d"
    with pytest.raises(CheckpointError, match="give a training checkpoint"):
        connect(model=preset, base_url=listener.url, api_key="k", resume_from=path)
    assert listener.calls == 0


def test_a_preset_of_the_other_backend(preset: ModelPreset) -> None:
    with pytest.raises(ValueError, match="BACKEND='local'"):
        connect("fireworks", preset, api_key=KEY, quiet=True)


def test_a_local_service_elsewhere_needs_its_key(preset: ModelPreset) -> None:
    url = "http://127.0.0.1:9/training/v1/serverless"
    with pytest.raises(MissingKey, match="api_key"):
        connect(model=preset, base_url=url, quiet=True)


def test_missing_model_files_name_the_remedy(
    preset: ModelPreset, tmp_path: Path
) -> None:
    absent = dataclasses.replace(preset, tokenizer=tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match=r"rlhelpers\.local\.pretrain"):
        connect(model=absent, runs_dir=tmp_path, quiet=True)


def test_a_tokenizer_without_chat_template_does_not_fit(
    preset: ModelPreset, policy_folder: Path, tmp_path: Path
) -> None:
    for file in policy_folder.iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    wrong = dataclasses.replace(preset, tokenizer=tmp_path)
    with pytest.raises(ValueError, match="no chat template") as caught:
        connect(model=wrong, runs_dir=tmp_path, quiet=True)
    assert preset.base_model in str(caught.value)


# -- the banner -------------------------------------------------------------------


def test_the_banner_of_the_local_backend(
    preset: ModelPreset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with connect(model=preset, runs_dir=tmp_path) as session:
        printed = capsys.readouterr().out
        assert printed.strip() == str(session.banner)
        assert "local/noise" in printed
        assert "32" in printed  # 4 steps of 2 tasks and 4 rollouts
        assert "nothing leaves this machine" in printed
        assert "| Backend | local |" in session.banner._repr_markdown_()


def test_the_banner_bounds_the_cost() -> None:
    # Prefill 10,000, sampled 100,000, trained 1,000 × (10 + 100 - 1) = 109,000.
    work = PlannedWork(1_000, 1_000, prompt_tokens=10, max_tokens=100)
    banner = Banner("fireworks", "m", "b", "l", work, 3_000_000, (1.0, 2.0, 4.0), "h")
    # 0.01 + 0.20 + 0.436 dollars; 3 million tokens at the dearest price are 12.
    assert banner.cost == (
        "at most $0.65 for the planned work, $12.00 up to the ceiling, "
        "at the prices given"
    )
    assert "Tokens planned   at most 219,000" in str(banner)
    assert "Token ceiling    3,000,000, checked before each request" in str(banner)
    assert "Service          h" in str(banner)
    low = dataclasses.replace(banner, token_ceiling=100_000)
    assert "would stop there" in low.ceiling
    assert low.cost.startswith("at most $0.40 for the planned work, $0.40")
    assert "unbounded" in dataclasses.replace(banner, token_ceiling=None).cost
    assert "PRICES" in dataclasses.replace(banner, prices=None).cost


def test_the_planned_work_counts_real_prompts(
    preset: ModelPreset, tmp_path: Path
) -> None:
    with connect(
        model=preset,
        runs_dir=tmp_path,
        planned_rollouts=0,
        planned_forwards=3,
        max_tokens=7,
        max_operand=123,
        quiet=True,
    ) as session:
        work = session.banner.work
        prompt = (
            "<|im_start|>user\nCompute 123 * 123. Work step by step, then write only "
            "the final integer on the last line.<|im_end|>\n<|im_start|>assistant\n"
        )
        rendered = session.tokenizer.encode(prompt, add_special_tokens=False)
    assert (work.rollouts, work.datums, work.max_tokens) == (0, 0, 7)
    assert work.forwards == 3
    assert work.prompt_tokens == len(rendered)


# -- the local session ------------------------------------------------------------


def test_local_ignores_a_fireworks_key_and_never_shows_one(
    preset: ModelPreset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FIREWORKS_API_KEY", KEY)
    monkeypatch.setenv("FIREWORKS_BASE_URL", "http://192.0.2.1")
    with connect(model=preset, runs_dir=tmp_path) as session:
        session.new_sampler("policy-0000")
        shown = repr(session) + str(session.banner) + capsys.readouterr().out
    assert KEY not in shown
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(KEY.encode() in path.read_bytes() for path in written)


def test_loopback_stays_out_of_a_proxy(
    preset: ModelPreset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://192.0.2.1:3128")
    monkeypatch.setenv("NO_PROXY", "example.org")
    monkeypatch.delenv("no_proxy", raising=False)
    with connect(model=preset, runs_dir=tmp_path, quiet=True) as session:
        session.base_sampler()
    for variable in ("NO_PROXY", "no_proxy"):
        assert "127.0.0.1" in os.environ[variable].split(",")
    assert "example.org" in os.environ["NO_PROXY"]


def test_connecting_again_closes_the_earlier_session(
    preset: ModelPreset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """S11: a connect cell that is run again."""
    first = connect(model=preset, runs_dir=tmp_path, quiet=True)
    sampler = first.base_sampler()
    with connect(model=preset, runs_dir=tmp_path) as second:
        assert "Closing the session opened earlier" in capsys.readouterr().out
        assert first.closed
        assert not second.closed
        assert sampler.client._closed
        with pytest.raises(RuntimeError, match="call connect"):
            first.new_sampler("policy-0000")
    second.close()  # once more is harmless
    assert "closed" in repr(second)


def test_a_new_sampler_closes_the_one_before(session: TrainingSession) -> None:
    first = session.new_sampler("policy-0000")
    second = session.new_sampler("policy-0001")
    third = session.new_sampler("policy-0002", keep_earlier=True)
    assert first.client._closed
    assert not second.client._closed
    assert third.snapshot != second.snapshot


def test_a_name_used_twice_gets_a_number(session: TrainingSession) -> None:
    first = session.save_state("state-0001")
    second = session.save_state("state-0001")
    assert first.endswith("/state-0001")
    assert second.endswith("/state-0001-2")


def test_names_are_checked_before_sending(session: TrainingSession) -> None:
    with pytest.raises(CheckpointError, match="'State_5'"):
        session.save_state("State_5")
    with pytest.raises(CheckpointError, match="at most 54"):
        session.new_sampler("policy-" + "x" * 48)
    with pytest.raises(CheckpointError, match="to sample from it"):
        session.open_sampler(session.save_state("state-0001"))


# -- a service that runs elsewhere ------------------------------------------------


def test_joining_a_running_service(
    service: LocalService, preset: ModelPreset, tmp_path: Path
) -> None:
    with joined(service, preset, tmp_path) as session:
        assert session.new_sampler("policy-0000").snapshot


def test_a_wrong_key_is_refused(
    service: LocalService, preset: ModelPreset, tmp_path: Path
) -> None:
    with pytest.raises(ServiceRefused, match="the API key was refused.*401"):
        connect(
            model=preset,
            base_url=service.base_url,
            api_key="wrong",
            runs_dir=tmp_path,
            quiet=True,
        )


# -- resuming ---------------------------------------------------------------------


def one_update(session: TrainingSession) -> None:
    datum = make_datum([5, 6, 7], [8, 9, 2], [-1.0, -1.0, -1.0], 1.0)
    client = session.training_client
    client.forward_backward([datum], "importance_sampling").result()
    client.optim_step(AdamParams(learning_rate=1e-2)).result()


def logprobs(session: TrainingSession) -> np.ndarray:
    datum = make_datum([5, 6, 7], [8, 9, 2], [-1.0, -1.0, -1.0], 1.0)
    output = session.training_client.forward([datum], "importance_sampling").result()
    return np.asarray(output.loss_fn_outputs[0]["logprobs"].to_numpy())


def test_resuming_with_and_without_the_optimizer(
    service: LocalService, preset: ModelPreset, tmp_path: Path
) -> None:
    with joined(service, preset, tmp_path) as session:
        fresh = logprobs(session)
        one_update(session)
        state, at_state = session.save_state("state-0001"), logprobs(session)
        one_update(session)
        unbroken = logprobs(session)

        session.resume(state)
        np.testing.assert_allclose(logprobs(session), at_state, atol=1e-6)
        one_update(session)
        np.testing.assert_allclose(logprobs(session), unbroken, atol=1e-6)

        session.resume(state, with_optimizer=False)
        np.testing.assert_allclose(logprobs(session), at_state, atol=1e-6)
        one_update(session)
        assert np.abs(logprobs(session) - unbroken).max() > 1e-4
        assert np.abs(fresh - at_state).max() > 1e-4


def test_resuming_at_connect(
    service: LocalService, preset: ModelPreset, tmp_path: Path
) -> None:
    with joined(service, preset, tmp_path) as session:
        one_update(session)
        state, trained = session.save_state("state-0001"), logprobs(session)
    with joined(service, preset, tmp_path, resume_from=state) as session:
        np.testing.assert_allclose(logprobs(session), trained, atol=1e-6)


def test_what_cannot_be_resumed(
    service: LocalService, preset: ModelPreset, tmp_path: Path
) -> None:
    """S08: a reference that cannot exist is explained."""
    absent = f"local/run-{'0' * 32}/state-0001"
    with joined(service, preset, tmp_path) as session:
        one_update(session)
        before = logprobs(session)
        sampler = session.new_sampler("policy-0001").snapshot
        for path, said in (
            (sampler, "sampler checkpoint"),
            (absent, "has no training checkpoint"),
            ("state-0001", "names no run"),
            ("local/notrun/state-0001", "'notrun'"),
        ):
            with pytest.raises(CheckpointError) as caught:
                session.resume(path)
            assert said in str(caught.value)
            assert "Error code" not in str(caught.value)
        # The current adapter is untouched by all of these.
        np.testing.assert_array_equal(logprobs(session), before)


def test_resuming_under_another_base_model(
    service: LocalService, preset: ModelPreset, tmp_path: Path
) -> None:
    with joined(service, preset, tmp_path) as session:
        state = session.save_state("state-0001")
    other = dataclasses.replace(preset, name="other", base_model="local/other")
    with pytest.raises(CheckpointError) as caught:
        joined(service, other, tmp_path, resume_from=state)
    assert "'local/noise'" in str(caught.value)
    assert "'local/other'" in str(caught.value)


def test_a_new_policy_starts_from_fresh_weights(session: TrainingSession) -> None:
    fresh = logprobs(session)
    one_update(session)
    assert np.abs(logprobs(session) - fresh).max() > 1e-4
    session.new_policy()
    np.testing.assert_allclose(logprobs(session), fresh, atol=1e-6)


# -- the session's list, and promotion --------------------------------------------


def test_the_list_tells_both_kinds_apart(session: TrainingSession) -> None:
    assert session.list_checkpoints() == []
    one_update(session)
    state = session.save_state("state-0001")
    snapshot = session.new_sampler("policy-0001").snapshot
    listed = session.list_checkpoints()
    assert [(row.kind, row.promotable) for row in listed] == [
        ("training", False),
        ("sampler", True),
    ]
    for row, path in zip(listed, (state, snapshot), strict=True):
        assert f"local/{row.run_id}/{row.name}" == path
    sizes = [row.size or 0 for row in listed]
    assert sizes[0] > 2 * sizes[1] > 0  # Adam keeps two numbers per weight
    session.new_policy()
    assert session.list_checkpoints() == []


def test_a_promoted_adapter_outlives_its_session(session: TrainingSession) -> None:
    one_update(session)
    snapshot = session.new_sampler("final").snapshot
    model = session.promote(snapshot, "mine")
    assert model.name == "accounts/local/models/mine"
    assert session.promote(snapshot, "mine") == model  # the same weights once more
    session.close()
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(model.files)


def test_what_cannot_be_promoted(session: TrainingSession) -> None:
    one_update(session)
    state = session.save_state("state-0001")
    first = session.new_sampler("policy-0001").snapshot
    session.promote(first, "taken")
    one_update(session)
    second = session.new_sampler("policy-0002").snapshot
    for path, output, said in (
        (state, "mine", "training checkpoint"),
        (second, "Mine_1", "'M', '_'"),
        (second, "taken", "exists already"),
        (f"local/run-{'0' * 32}/final-1a2b3c4d", "mine", "holds no sampler checkpoint"),
    ):
        with pytest.raises(CheckpointError) as caught:
            session.promote(path, output)
        assert said in str(caught.value)
    session.new_policy()
    with pytest.raises(CheckpointError, match="before the session ends"):
        session.promote(second, "late")


def test_a_sampler_checkpoint_ends_with_its_session(session: TrainingSession) -> None:
    snapshot = session.new_sampler("policy-0000").snapshot
    assert session.open_sampler(snapshot).snapshot == snapshot
    session.new_policy()
    with pytest.raises(CheckpointError, match="end with their session"):
        session.open_sampler(snapshot)
