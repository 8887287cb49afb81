"""Listing and promoting checkpoints through the real SDK; the result through PEFT."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fireworks.training.sdk import FiretitanServiceClient, types
from fireworks.training.sdk.fireworks_client import FireworksClient
from local_helpers import OTHER, TINY, Wire
from peft import PeftModel
from transformers import AutoModelForCausalLM

from rlhelpers.local import LocalService
from rlhelpers.local import promotion as promotion_module
from rlhelpers.local.adapters import AdapterWeights, LoraSettings
from rlhelpers.local.promotion import parse_row_id, promote, row_id
from rlhelpers.local.store import CheckpointError, CheckpointRef, CheckpointStore

pytest_plugins = ("local_fixtures",)

TOKENS = [72, 101, 108, 108, 111, 32]
TARGETS = [101, 108, 108, 111, 32, 119]


@pytest.fixture
def control(service: LocalService) -> Iterator[FireworksClient]:
    """The SDK's control-plane client."""
    root = service.base_url.removesuffix("/training/v1/serverless")
    with FireworksClient(api_key=service.api_key, base_url=root) as opened:
        yield opened


def trained(client: FiretitanServiceClient, base_model: str = TINY, **lora: Any) -> Any:
    """A training client that has taken a few steps, far from its base model."""
    policy = client.create_lora_training_client(base_model=base_model, rank=4, **lora)
    for sign in (1.0, 0.5, 1.0):
        policy.forward_backward([datum(sign)], "cross_entropy").result()
        policy.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    return policy


def datum(weight: float = 1.0) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(TOKENS),
        loss_fn_inputs={"target_tokens": TARGETS, "weights": [weight] * 6},
    )


def service_logprobs(policy: Any) -> list[float]:
    (output,) = policy.forward([datum()], "cross_entropy").result().loss_fn_outputs
    return [float(value) for value in output["logprobs"].data]


def logprobs_of(model: Any) -> list[float]:
    """Of the same targets, by transformers alone."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([TOKENS])).logits[0].float()
    chosen = torch.log_softmax(logits, -1).gather(1, torch.tensor(TARGETS)[:, None])
    return [float(value) for value in chosen[:, 0]]


def rows_of(control: FireworksClient, client: FiretitanServiceClient) -> list[Any]:
    return control.list_training_session_checkpoints(str(client.training_session_name))


# --- through the SDK ----------------------------------------------------------------


@pytest.mark.parametrize("model", [TINY, OTHER])
@pytest.mark.parametrize(
    "lora", [{}, {"train_unembed": False, "train_mlp": False}], ids=["all", "attention"]
)
def test_peft_reproduces_the_service(
    client: FiretitanServiceClient,
    control: FireworksClient,
    service: LocalService,
    tiny_folder: Path,
    model: str,
    lora: dict[str, Any],
) -> None:
    policy = trained(client, model, seed=3, **lora)
    policy.save_weights_for_sampler("final").result()
    (row,) = rows_of(control, client)
    name = f"adapter-{model.split('/')[1]}-{len(lora)}"
    promoted = control.promote_session_checkpoint(row["name"], name, model)

    folder = Path(promoted["localFolder"])
    assert folder == (service.state_dir / "promoted" / name).resolve()
    assert promoted["name"] == f"accounts/local/models/{name}"
    assert (promoted["state"], promoted["peftDetails"]["r"]) == ("READY", 4)
    files = sorted(path.name for path in folder.iterdir())
    assert files == ["adapter_config.json", "adapter_model.safetensors"]
    text = (folder / "adapter_config.json").read_text()
    assert json.loads(text)["base_model_name_or_path"] == model
    assert str(tiny_folder.parent) not in text

    base = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    before = logprobs_of(base)
    adapted = logprobs_of(PeftModel.from_pretrained(base, folder))
    expected = service_logprobs(policy)
    np.testing.assert_allclose(adapted, expected, atol=1e-4)
    assert np.abs(np.subtract(before, expected)).max() > 0.1  # there was something


def test_a_promoted_model_outlives_its_session(
    client: FiretitanServiceClient, control: FireworksClient
) -> None:
    trained(client).save_weights_for_sampler("final").result()
    (row,) = rows_of(control, client)
    folder = Path(
        control.promote_session_checkpoint(row["name"], "stays", TINY)["localFolder"]
    )
    client.delete_training_session()
    assert (folder / "adapter_model.safetensors").is_file()


def test_listing_holds_both_kinds_oldest_first(
    client: FiretitanServiceClient, control: FireworksClient, service: LocalService
) -> None:
    policy = trained(client)
    assert rows_of(control, client) == []
    paths = [
        policy.save_state("state-1").result().path,
        policy.save_weights_for_sampler("policy-1").result().path,
        policy.save_state("state-2").result().path,
    ]
    rows = rows_of(control, client)
    assert [row["path"] for row in rows] == paths
    session = client.training_session_name
    assert [row["name"] for row in rows] == [
        f"{session}/checkpoints/{path.removeprefix('local/').replace('/', '-')}"
        for path in paths
    ]
    kinds = [(row["promotable"], row["checkpointType"]) for row in rows]
    training = (False, "CHECKPOINT_TYPE_TRAINING_LORA")
    assert kinds == [training, (True, "CHECKPOINT_TYPE_INFERENCE_LORA"), training]
    times = [datetime.fromisoformat(row["createTime"]) for row in rows]
    assert times == sorted(times)
    folder = service.state_dir / "checkpoints" / paths[0]
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert rows[0]["sizeBytes"] == size - (folder / "checkpoint.json").stat().st_size
    assert {row["baseModel"] for row in rows} == {TINY}
    # In pages the list is the same.
    pages = control.list_training_session_checkpoints(str(session), page_size=2)
    assert pages == rows
    # Afterwards the training checkpoints are still listed.
    client.delete_training_session()
    assert [row["path"] for row in rows_of(control, client)] == [paths[0], paths[2]]


def test_the_training_client_lists_what_it_can_load(
    client: FiretitanServiceClient,
) -> None:
    policy = trained(client, seed=7)
    path = policy.save_state("state-7").result().path
    policy.save_weights_for_sampler("policy-7").result()
    expected = service_logprobs(policy)
    listed = policy.list_checkpoints()
    assert listed[-1] == path
    resumed = client.create_training_client_from_state(listed[-1])
    assert service_logprobs(resumed) == expected


def test_an_incomplete_or_damaged_checkpoint_is_not_listed(
    client: FiretitanServiceClient, control: FireworksClient, service: LocalService
) -> None:
    policy = trained(client)
    path = policy.save_state("state-1").result().path
    folder = service.state_dir / "checkpoints" / path
    whole = rows_of(control, client)
    draft = folder.with_name(".draft-0123456789abcdef")
    shutil.copytree(folder, draft)  # all there, but without its name
    shutil.copytree(folder, folder.with_name("state-2"))
    (folder.with_name("state-2") / "checkpoint.json").write_text("{")
    shutil.copytree(folder, folder.with_name("state-3"))
    (folder.with_name("state-3") / "optimizer.safetensors").unlink()
    assert rows_of(control, client) == whole
    for name in (".draft-0123456789abcdef", "state-2", "state-3"):
        shutil.rmtree(folder.with_name(name))


def test_what_cannot_be_promoted_is_explained(
    client: FiretitanServiceClient, control: FireworksClient, service: LocalService
) -> None:
    policy = trained(client)
    policy.save_state("state-1").result()
    policy.save_weights_for_sampler("policy-1").result()
    state, sampler = (row["name"] for row in rows_of(control, client))
    cases = [
        (state, TINY, "is a training checkpoint .*sampler checkpoint .*promote"),
        (f"{sampler}x", TINY, "there is no sampler checkpoint"),
        (f"{sampler.rsplit('/', 1)[0]}/policy-1", TINY, "names no checkpoint"),
        (sampler, OTHER, f"{OTHER}' does not match.*{TINY}"),
        (sampler.replace("ts-", "ts-x"), TINY, "is not a session"),
    ]
    for name, base_model, message in cases:
        with pytest.raises(RuntimeError, match=rf"(?s)HTTP 400.*{message}"):
            control.promote_session_checkpoint(name, "refused", base_model)
    assert not (service.state_dir / "promoted" / "refused").exists()


def test_a_taken_model_id_is_not_overwritten(
    client: FiretitanServiceClient, control: FireworksClient
) -> None:
    policy = trained(client)
    policy.save_weights_for_sampler("a").result()
    first = rows_of(control, client)[0]["name"]
    promoted = control.promote_session_checkpoint(first, "taken", TINY)
    # The SDK repeats a request whose answer was lost.
    assert control.promote_session_checkpoint(first, "taken", TINY) == promoted
    policy.forward_backward([datum()], "cross_entropy").result()
    policy.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    policy.save_weights_for_sampler("b").result()
    content = (Path(promoted["localFolder"]) / "adapter_model.safetensors").read_bytes()
    second = rows_of(control, client)[1]["name"]
    with pytest.raises(RuntimeError, match="'taken' exists already"):
        control.promote_session_checkpoint(second, "taken", TINY)
    path = Path(promoted["localFolder"]) / "adapter_model.safetensors"
    assert path.read_bytes() == content


def test_a_promoted_model_is_trained_on(
    connect: Callable[..., Any], client: Any, control: FireworksClient
) -> None:
    policy = trained(client, seed=5)
    expected = service_logprobs(policy)
    policy.save_weights_for_sampler("final").result()
    (row,) = rows_of(control, client)
    name = control.promote_session_checkpoint(row["name"], "onwards", TINY)["name"]
    client.delete_training_session()

    other = trained(connect(), seed=6)
    assert service_logprobs(other) != expected
    answer = other.load_adapter(name).result()
    assert (answer.model_id, answer.adapter_path) == (other.model_id, name)
    assert service_logprobs(other) == expected
    other.forward_backward([datum()], "cross_entropy").result()
    other.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    assert service_logprobs(other) != expected


def test_adapters_that_do_not_fit_are_refused(
    connect: Callable[..., Any], client: Any, control: FireworksClient
) -> None:
    policy = trained(client, seed=5)
    policy.save_weights_for_sampler("final").result()
    (row,) = rows_of(control, client)
    name = control.promote_session_checkpoint(row["name"], "fits", TINY)["name"]
    make = connect().create_lora_training_client
    cases = [
        (make(OTHER, rank=4), name, f"{TINY}.*{OTHER}.*a new run"),
        (make(TINY, rank=8), name, "rank 4.*rank 8"),
        (connect().create_training_client(TINY, 4, lora_alpha=16), name, "alpha 32"),
        (policy, "accounts/local/models/none", "no promoted model"),
        (policy, "accounts/local/models/../../x", "no promoted model"),
        (policy, "gs://bucket/adapter", "no promoted model"),
    ]
    for model, path, message in cases:
        with pytest.raises(Exception, match=f"(?s){message}"):
            model.load_adapter(path).result()
        assert len(service_logprobs(model)) == 6


def test_a_damaged_adapter_is_named(client: Any, control: FireworksClient) -> None:
    policy = trained(client, seed=5)
    policy.save_weights_for_sampler("final").result()
    (row,) = rows_of(control, client)
    promoted = control.promote_session_checkpoint(row["name"], "damaged", TINY)
    path = Path(promoted["localFolder"]) / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(Exception, match="'damaged' is damaged"):
        policy.load_adapter(promoted["name"]).result()


# --- raw HTTP and the store ---------------------------------------------------------


def test_bad_queries_and_models_are_refused(wire: Wire) -> None:
    session = f"{wire.root}/v1/accounts/local/trainingSessions/{wire.session()}"
    for query in ("pageSize=0", "pageSize=x", "pageToken=-1", "pageToken=²"):
        answer = wire.http.get(f"{session}/checkpoints?{query}")
        assert answer.status_code == 400
        assert query.split("=")[0] in answer.text
    gone = session[:-32] + "0" * 32
    assert wire.http.get(f"{gone}/checkpoints").status_code == 404
    url = f"{session}/checkpoints/run-{'0' * 32}-a:promote"
    for model in (None, 7, "x", "accounts/local/models/", "accounts/local/models/.."):
        body = {"output_model": model, "base_model": TINY}
        answer = wire.http.post(url, json=body)
        assert answer.status_code == 400
        assert "output_model" in answer.text
    answer = wire.http.post(url, json={"output_model": "x", "hot_load": 1})
    assert "['hot_load']" in answer.text


SESSION, RUN = "ts-" + "a" * 32, "run-" + "b" * 32
LAYER = "base_model.model.model.layers.0.self_attn.q_proj"
WEIGHTS = AdapterWeights(
    LoraSettings(rank=2, alpha=16),
    {
        f"{LAYER}.lora_A.weight": torch.arange(6.0).reshape(2, 3),
        f"{LAYER}.lora_B.weight": torch.tensor([[0.5, -1.0]]),
    },
)


def test_a_failed_promotion_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path)
    store.open_session(SESSION)
    ref = CheckpointRef(RUN, "policy-1")
    store.save("sampler", SESSION, ref, "test/tiny", WEIGHTS)
    target = "accounts/local/models/lost"

    def disk_full(*arguments: Any) -> None:
        write_adapter(*arguments)
        raise OSError("no space left")

    write_adapter = promotion_module.write_adapter
    with monkeypatch.context() as patch:
        patch.setattr(promotion_module, "write_adapter", disk_full)
        with pytest.raises(OSError, match="no space left"):
            promote(store, SESSION, ref, target, "test/tiny")
    assert list((tmp_path / "promoted").iterdir()) == []
    assert promote(store, SESSION, ref, target, "test/tiny").folder.is_dir()


@pytest.mark.parametrize(
    ("base_model", "public"),
    [
        ("test/tiny", "test/tiny"),
        ("/home/me/models/tiny", "tiny"),
        ("../models/tiny", "tiny"),
        ("~/tiny", "tiny"),
    ],
)
def test_no_path_of_this_machine_is_written(
    tmp_path: Path, base_model: str, public: str
) -> None:
    store = CheckpointStore(tmp_path)
    store.open_session(SESSION)
    ref = CheckpointRef(RUN, "policy-1")
    store.save("sampler", SESSION, ref, base_model, WEIGHTS)
    promoted = promote(store, SESSION, ref, "accounts/local/models/a", base_model)
    config = json.loads((promoted.folder / "adapter_config.json").read_text())
    assert (promoted.base_model, config["base_model_name_or_path"]) == (public, public)
    assert config["target_modules"] == ["q_proj"]


def test_row_ids_and_references_are_inverse() -> None:
    ref = CheckpointRef(RUN, "policy-1-0123abcd")
    assert row_id(ref) == f"{RUN}-policy-1-0123abcd"
    assert parse_row_id(row_id(ref)) == ref
    for text in ("", "policy-1", f"{RUN}-", f"{RUN}-A", f"{RUN}-..", f"{RUN}-a/b"):
        with pytest.raises(CheckpointError):
            parse_row_id(text)
