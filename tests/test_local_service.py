"""The local service through the real SDK, and through raw HTTP for the rest."""

from __future__ import annotations

import json
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fireworks.training.sdk import (
    FiretitanServiceClient,
    FixedConcurrencyController,
    types,
)
from local_helpers import CONTEXT, OTHER, TINY, Wire, byte_tokenizer

from rlhelpers.local import LocalService
from rlhelpers.local import app as app_module

pytest_plugins = ("local_fixtures",)

PROMPT = list(range(40, 70))
ADAM = types.AdamParams(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-8)
Client = FiretitanServiceClient
Sampled = tuple[list[int], list[float], str]


@pytest.fixture
def policy(client: Client) -> Any:
    """A LoRA training client on the tiny model."""
    return client.create_lora_training_client(base_model=TINY, rank=4, seed=1)


def sampler(client: Client, path: str, tokenizer: Any = None) -> Any:
    return client.create_sampling_client(
        model_path=path,
        tokenizer=tokenizer,
        concurrency_controller=FixedConcurrencyController(64),
    )


def ask(
    source: Any,
    seed: int | None,
    max_tokens: int = 16,
    prompt: list[int] = PROMPT,
    **settings: Any,
) -> Future[Any]:
    future: Future[Any] = source.sample(
        prompt=types.ModelInput.from_ints(prompt),
        num_samples=1,
        sampling_params=types.SamplingParams(
            max_tokens=max_tokens, seed=seed, **settings
        ),
    )
    return future


def read(future: Future[Any]) -> Sampled:
    (sequence,) = future.result(timeout=60).sequences
    return sequence.tokens, sequence.logprobs, sequence.stop_reason


def snapshot(policy: Any, name: str = "policy") -> str:
    return str(policy.save_weights_for_sampler(name).result().path)


def datum(tokens: list[int], **inputs: Any) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs
    )


def policy_datum(sampled: Sampled, advantage: float) -> types.Datum:
    """A rollout as training data: prompt positions carry zeros."""
    full, zeros = PROMPT + sampled[0], [0.0] * (len(PROMPT) - 1)
    return datum(
        full[:-1],
        target_tokens=full[1:],
        logprobs=zeros + sampled[1],
        advantages=zeros + [advantage] * len(sampled[0]),
    )


FIXED_TOKENS = [72, 101, 108, 108, 111, 32]
FIXED_TARGETS = [101, 108, 108, 111, 32, 119]


def fixed_datum() -> types.Datum:
    return datum(FIXED_TOKENS, target_tokens=FIXED_TARGETS, weights=[1.0] * 6)


def update(policy: Any, advantage: float = 1.0) -> None:
    weights = [advantage] * 6
    data = [datum(FIXED_TOKENS, target_tokens=FIXED_TARGETS, weights=weights)]
    policy.forward_backward(data, "cross_entropy").result()
    policy.optim_step(ADAM).result()


def fixed_logprobs(policy: Any) -> list[float]:
    (output,) = (
        policy.forward([fixed_datum()], "cross_entropy").result().loss_fn_outputs
    )
    return [float(value) for value in output["logprobs"].data]


# --- through the SDK: models and sampling -------------------------------------------


def test_create_and_get_info(policy: Any) -> None:
    info = policy.get_info()
    assert (info.model_data.model_name, info.is_lora, info.lora_rank) == (TINY, True, 4)
    assert info.model_id == policy.model_id
    assert policy.model_id.startswith("run-")


def test_sampling_logprobs_are_the_trainers(client: Client, policy: Any) -> None:
    for _ in range(3):
        update(policy)
    source = sampler(client, snapshot(policy))
    sampled = [read(f) for f in [ask(source, seed) for seed in range(64)]]
    assert all(1 <= len(tokens) <= 16 for tokens, _, _ in sampled)
    assert len({tuple(tokens) for tokens, _, _ in sampled}) > 60
    data = [policy_datum(one, advantage=1.0) for one in sampled]
    outputs = policy.forward(data, "importance_sampling").result().loss_fn_outputs
    for (_, logprobs, _), output in zip(sampled, outputs, strict=True):
        trained = output["logprobs"].data[len(PROMPT) - 1 :]
        np.testing.assert_allclose(trained, logprobs, atol=1e-4)


def test_a_repeated_group_is_bit_identical_in_any_order(
    client: Client, policy: Any
) -> None:
    source = sampler(client, snapshot(policy))
    lengths = {seed: 4 + 5 * (seed % 7) for seed in range(48)}
    rounds = []
    for order in (range(48), reversed(range(48)), [*range(24, 48), *range(24)]):
        futures = {seed: ask(source, seed, lengths[seed]) for seed in order}
        rounds.append({seed: read(future) for seed, future in futures.items()})
    alone = read(ask(source, 17, lengths[17]))
    assert rounds[0] == rounds[1] == rounds[2]
    assert rounds[0][17] == alone


def test_seeds(client: Client, policy: Any) -> None:
    source = sampler(client, snapshot(policy))
    assert read(ask(source, 5)) == read(ask(source, 5))
    assert read(ask(source, 5))[0] != read(ask(source, 6))[0]
    unseeded = {tuple(read(ask(source, None))[0]) for _ in range(4)}
    assert len(unseeded) == 4


def test_greedy_sampling_does_not_depend_on_the_seed(
    client: Client, policy: Any
) -> None:
    source = sampler(client, snapshot(policy))
    one, other = (read(ask(source, seed, temperature=0.0)) for seed in (1, 2))
    assert one == other
    assert one[1] == [0.0] * len(one[0])


def test_the_stop_reason_decides_and_not_the_length(
    client: Client, policy: Any
) -> None:
    """S04: a reply of max_tokens tokens may have ended by itself."""
    source = sampler(client, snapshot(policy))
    tokens, _, reason = read(ask(source, 3, 12))
    assert (len(tokens), reason) == (12, "length")
    text = byte_tokenizer().decode(tokens)
    stop = next(c for c in text[3:] if c.isascii() and c.isprintable())
    cut, _, reason = read(ask(source, 3, 12, stop=[stop]))
    assert reason == "stop"
    assert cut == tokens[: len(cut)]
    again, _, reason = read(ask(source, 3, len(cut), stop=[stop]))
    assert (again, reason) == (cut, "stop")  # although it has max_tokens tokens


def test_stop_lists_as_text_and_as_token_ids(client: Client, policy: Any) -> None:
    """S03: both ways stop at the same token."""
    tokenizer = byte_tokenizer()
    source = sampler(client, snapshot(policy), tokenizer)
    tokens, _, _ = read(ask(source, 8, 40))
    wanted = next(t for t in tokens[5:] if tokenizer.decode([t]).isalnum())
    expected = tokens[: tokens.index(wanted) + 1]
    for stop in ([tokenizer.decode([wanted])], [wanted], [256, wanted]):
        cut, _, reason = read(ask(source, 8, 40, stop=stop))
        assert (cut, reason) == (expected, "stop")


def test_several_samples_of_one_call(client: Client, policy: Any) -> None:
    source = sampler(client, snapshot(policy))
    response = source.sample(
        prompt=types.ModelInput.from_ints(PROMPT),
        num_samples=3,
        sampling_params=types.SamplingParams(max_tokens=5),
    ).result(timeout=60)
    assert len({tuple(s.tokens) for s in response.sequences}) == 3


def test_sampling_from_the_base_model(
    connect: Callable[..., Client], policy: Any, client: Client
) -> None:
    """A fresh adapter changes nothing, so it samples what its base model does."""
    base = connect().create_sampling_client(
        base_model=TINY, concurrency_controller=FixedConcurrencyController(4)
    )
    fresh = sampler(client, snapshot(policy))
    assert read(ask(base, 4)) == read(ask(fresh, 4))


def test_a_program_finds_the_service_through_its_environment(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names no service, and its base model as on Fireworks."""
    name = "accounts/fireworks/models/qwen3p8-27b"
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with LocalService(tmp_path, models={name: tiny_folder}) as service:
        for variable in ("TINKER_BASE_URL", "FIREWORKS_BASE_URL"):
            monkeypatch.setenv(variable, service.base_url)
        monkeypatch.setenv("FIREWORKS_API_KEY", service.api_key)
        client = FiretitanServiceClient()
        policy = client.create_lora_training_client(base_model=name, rank=4)
        before = fixed_logprobs(policy)
        update(policy)
        assert sum(fixed_logprobs(policy)) > sum(before)
        source = sampler(client, snapshot(policy))
        assert read(ask(source, 1))[0]
        source.close()
        client.delete_training_session()
        client.close()


# --- through the SDK: training ------------------------------------------------------


def expected_loss(name: str, lp: np.ndarray, q: np.ndarray, a: np.ndarray) -> float:
    ratio = np.exp(lp - q)
    clipped = np.clip(ratio, 0.8, 1.2)
    return float(
        {
            "cross_entropy": -a * lp,
            "importance_sampling": -ratio * a,
            "ppo": -np.minimum(ratio * a, clipped * a),
            "cispo": -clipped * lp * a,
            "dro": -(lp * a - 0.025 * (lp - q) ** 2 * (a != 0)),
        }[name].sum()
    )


@pytest.mark.parametrize(
    "loss", ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro"]
)
def test_forward_backward_reports_the_summed_loss(policy: Any, loss: str) -> None:
    lp = np.array(fixed_logprobs(policy))
    q = lp + np.array([0.5, -0.5, 0.1, -0.1, 0.6, 0.0])
    a = np.array([1.0, 1.0, -2.0, 0.0, -1.0, 0.5])
    inputs = (
        {"weights": a.tolist()}
        if loss == "cross_entropy"
        else {"logprobs": q.tolist(), "advantages": a.tolist()}
    )
    data = [datum(FIXED_TOKENS, target_tokens=FIXED_TARGETS, **inputs)]
    result = policy.forward_backward(data, loss).result()
    expected = expected_loss(loss, lp, q, a)
    assert result.metrics["loss:sum"] == pytest.approx(expected, rel=1e-4)
    assert result.metrics["total_tokens:sum"] == 6
    assert result.metrics["num_loss_tokens:sum"] == 5
    np.testing.assert_allclose(
        result.loss_fn_outputs[0]["logprobs"].data, lp, atol=1e-5
    )
    if loss in ("ppo", "cispo"):  # ratios 0.61, 1.65, 0.90, (1.11), 0.55 and 1
        assert result.metrics["clipped_tokens:sum"] == 3


def test_clip_thresholds_are_passed_on(policy: Any) -> None:
    lp = np.array(fixed_logprobs(policy))
    data = [
        datum(
            FIXED_TOKENS,
            target_tokens=FIXED_TARGETS,
            logprobs=(lp - 1.0).tolist(),
            advantages=[1.0] * 6,
        )
    ]
    config = {"clip_low_threshold": 0.0, "clip_high_threshold": 2.0}
    result = policy.forward_backward(data, "ppo", config).result()
    assert result.metrics["loss:sum"] == pytest.approx(-12.0, rel=1e-5)


def test_the_dro_penalty_is_set_by_beta(policy: Any) -> None:
    lp = np.array(fixed_logprobs(policy))
    inputs = {"logprobs": (lp - 2.0).tolist(), "advantages": [1.0] * 5 + [0.0]}
    data = [datum(FIXED_TOKENS, target_tokens=FIXED_TARGETS, **inputs)]
    losses = [
        policy.forward_backward(data, "dro", {"beta": beta}).result().metrics
        for beta in (0.0, 0.5)
    ]
    # Five tokens at 2 from the sampling policy: 5 * 0.5 / 2 * 2^2.
    difference = losses[1]["loss:sum"] - losses[0]["loss:sum"]
    assert difference == pytest.approx(5.0, rel=1e-4)
    assert losses[0]["loss:sum"] == pytest.approx(-lp[:5].sum(), rel=1e-4)


def test_advantages_move_the_logprobs_they_belong_to(
    client: Client, policy: Any
) -> None:
    source = sampler(client, snapshot(policy))
    sampled = [read(ask(source, seed)) for seed in range(4)]
    advantages = [1.5, -0.5, -0.5, -0.5]
    data = [policy_datum(s, a) for s, a in zip(sampled, advantages, strict=True)]
    before = policy.forward_backward(data, "importance_sampling")
    policy.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    after = policy.forward(data, "importance_sampling").result().loss_fn_outputs
    gain = 0.0
    for d, one, other in zip(data, before.result().loss_fn_outputs, after, strict=True):
        change = np.subtract(other["logprobs"].data, one["logprobs"].data)
        gain += float(change @ np.array(d.loss_fn_inputs["advantages"].data))
    assert gain > 0


def test_pipelined_operations_run_in_order(
    connect: Callable[..., Client], policy: Any
) -> None:
    waited = connect().create_lora_training_client(base_model=TINY, rank=4, seed=1)
    for _ in range(3):
        update(waited)
    futures = []
    for _ in range(3):
        futures.append(policy.forward_backward([fixed_datum()], "cross_entropy"))
        futures.append(policy.optim_step(ADAM))
    metrics = [future.result().metrics for future in futures]
    assert metrics[1]["lr:last"] == pytest.approx(1e-2)
    losses = [m["loss:sum"] for m in metrics[::2]]
    assert losses[0] > losses[1] > losses[2]
    assert fixed_logprobs(policy) == fixed_logprobs(waited)


def test_a_sampler_never_sees_later_weights(client: Client, policy: Any) -> None:
    """S05: a sampler is bound to the weights it was saved with."""
    old = sampler(client, snapshot(policy, "policy-0"))
    before = [read(ask(old, seed)) for seed in range(4)]
    for _ in range(3):
        update(policy)
    new = sampler(client, snapshot(policy, "policy-1"))
    pairs = [(ask(old, seed), ask(new, seed)) for seed in range(4)]
    assert [read(pair[0]) for pair in pairs] == before
    assert [read(pair[1]) for pair in pairs] != before


# --- through the SDK: checkpoints ---------------------------------------------------


def test_resume_in_a_second_client_and_in_a_second_service(
    connect: Callable[..., Client],
    policy: Any,
    service: LocalService,
    tiny_folder: Path,
) -> None:
    update(policy)
    update(policy, advantage=-0.5)
    path = policy.save_state("state-2").result().path
    saved = fixed_logprobs(policy)
    update(policy)
    expected = fixed_logprobs(policy)

    resumed = connect().create_training_client_from_state_with_optimizer(path)
    assert fixed_logprobs(resumed) == saved
    update(resumed)
    assert fixed_logprobs(resumed) == expected

    weights_only = connect().create_training_client_from_state(path)
    assert fixed_logprobs(weights_only) == saved
    update(weights_only)
    assert fixed_logprobs(weights_only) != expected

    with LocalService(service.state_dir, models={TINY: tiny_folder}) as second:
        client = connect(second)
        elsewhere = client.create_training_client_from_state_with_optimizer(path)
        update(elsewhere)
        assert fixed_logprobs(elsewhere) == expected
        # A later notebook samples from what it loaded by saving a sampler anew.
        source = sampler(client, snapshot(elsewhere))
        tokens, logprobs, _ = read(ask(source, 1))
        data = [policy_datum((tokens, logprobs, ""), 1.0)]
        (output,) = elsewhere.forward(data, "ppo").result().loss_fn_outputs
        np.testing.assert_allclose(
            output["logprobs"].data[len(PROMPT) - 1 :], logprobs, atol=1e-4
        )
        client.close()  # once its service is gone, closing takes the SDK 30 s


def test_a_second_service_leaves_the_firsts_samplers_alone(
    client: Client, policy: Any, service: LocalService, tiny_folder: Path
) -> None:
    source = sampler(client, snapshot(policy))
    with LocalService(service.state_dir, models={TINY: tiny_folder}):
        pass
    assert len(read(ask(source, 1))[0]) > 0


def refusal(error: pytest.ExceptionInfo[httpx.HTTPStatusError]) -> str:
    assert error.value.response.status_code == 400
    return str(error.value.response.json()["error"]["message"])


def test_the_wrong_kind_of_checkpoint_is_explained(client: Client, policy: Any) -> None:
    """S07: the message names the kind that is needed."""
    state, sampler_path = policy.save_state("state-1").result().path, snapshot(policy)
    with pytest.raises(Exception, match=r"is a sampler checkpoint.*save_state"):
        client.create_training_client_from_state_with_optimizer(sampler_path)
    with pytest.raises(Exception, match=r"is a sampler checkpoint.*save_state"):
        policy.load_state_with_optimizer(sampler_path).result()
    with pytest.raises(httpx.HTTPStatusError) as error:
        read(ask(sampler(client, state), 1))
    assert "is a training checkpoint" in refusal(error)
    update(policy)  # the client still works


def test_resuming_under_another_base_model_is_refused(
    connect: Callable[..., Client], policy: Any
) -> None:
    path = policy.save_state("state-1").result().path
    other = connect().create_lora_training_client(base_model=OTHER, rank=4)
    with pytest.raises(Exception, match=f"{TINY}.*{OTHER}.*a new run"):
        other.load_state_with_optimizer(path).result()


def test_names_that_cannot_exist_are_refused(client: Client, policy: Any) -> None:
    """S08: by the service, which is the last to check."""
    for name in ("State_5", "step 5", "policy.1", "a" * 64):
        with pytest.raises(Exception, match="1 to 63 lower-case"):
            policy.save_state(name).result()
    with pytest.raises(Exception, match="cannot be a checkpoint here"):
        client.create_training_client_from_state_with_optimizer("acct/notrun/state-1")
    policy.save_state("state-1").result()
    with pytest.raises(Exception, match="exists already"):
        policy.save_state("state-1").result()
    with pytest.raises(Exception, match="training checkpoints of that run: state-1"):
        policy.load_state("state-2").result()


def test_deleting_the_session_removes_its_sampler_checkpoints(
    client: Client, policy: Any, service: LocalService
) -> None:
    state, path = policy.save_state("state-1").result().path, snapshot(policy)
    source = sampler(client, path)
    read(ask(source, 1))
    folder = service.state_dir / "sessions" / str(client.training_session_id)
    assert folder.is_dir()
    client.delete_training_session()
    assert not folder.exists()
    assert (service.state_dir / "checkpoints" / state).is_dir()
    with pytest.raises(httpx.HTTPStatusError) as error:
        read(ask(source, 1))
    assert "is not open" in refusal(error)


# --- through the SDK: refusals ------------------------------------------------------


def test_an_unknown_base_model_is_refused_with_the_known_ones(
    connect: Callable[..., Client], client: Client
) -> None:
    with pytest.raises(Exception, match=f"'no/such' is not known.*{TINY}"):
        client.create_lora_training_client(base_model="no/such", rank=4)
    source = connect().create_sampling_client(
        base_model="no/such", concurrency_controller=FixedConcurrencyController(4)
    )
    with pytest.raises(httpx.HTTPStatusError) as error:
        read(ask(source, 1))
    assert "'no/such' is not known" in refusal(error)


def test_prompt_and_max_tokens_over_the_context(client: Client, policy: Any) -> None:
    """S16: the service names the three numbers."""
    source = sampler(client, snapshot(policy))
    room = CONTEXT - len(PROMPT)
    with pytest.raises(httpx.HTTPStatusError) as error:
        read(ask(source, 1, room + 1))
    message = refusal(error)
    assert all(str(n) in message for n in (len(PROMPT), room + 1, CONTEXT))
    assert len(read(ask(source, 1, 3, prompt=[65] * (CONTEXT - 3)))[0]) <= 3


def test_bad_training_data_fail_alone(policy: Any) -> None:
    """Each is refused by name, and the client goes on working."""
    before = fixed_logprobs(policy)
    good = {"target_tokens": FIXED_TARGETS, "weights": [1.0] * 6}
    short = {"target_tokens": FIXED_TARGETS[:5], "weights": [1.0] * 6}
    outside = {"target_tokens": [*FIXED_TARGETS[:5], 259], "weights": [1.0] * 6}
    policy_inputs = {**good, "logprobs": [0.0] * 6}
    far = {
        "target_tokens": FIXED_TARGETS,
        "logprobs": [-200.0] * 6,
        "advantages": [1.0] * 6,
    }
    cases: list[tuple[list[int], dict[str, Any], str, str]] = [
        (FIXED_TOKENS, good, "gspo", "'gspo' is not supported"),
        (FIXED_TOKENS, short, "cross_entropy", "5 values for 6 input tokens"),
        (FIXED_TOKENS, outside, "cross_entropy", "259, outside the vocabulary of 259"),
        ([*FIXED_TOKENS[:5], -1], good, "cross_entropy", "outside the vocabulary"),
        (FIXED_TOKENS, policy_inputs, "cross_entropy", r"\['logprobs'\]; remove"),
        (FIXED_TOKENS, good, "ppo", r"\['advantages', 'logprobs'\], which are miss"),
        (FIXED_TOKENS, {"weights": [1.0] * 6}, "cross_entropy", "target_tokens"),
        (FIXED_TOKENS, far, "importance_sampling", "loss of this batch is -inf"),
        ([65] * 513, {"target_tokens": [65] * 513}, "cross_entropy", "context of 512"),
    ]
    for tokens, inputs, loss, message in cases:
        with pytest.raises(Exception, match=message):
            policy.forward_backward([datum(tokens, **inputs)], loss).result()
    with pytest.raises(Exception, match="call forward_backward first"):
        policy.optim_step(ADAM).result()
    assert fixed_logprobs(policy) == before


def test_nan_is_stopped_by_the_client_and_the_service_lives(
    connect: Callable[..., Client], policy: Any
) -> None:
    bad = datum([1, 2], target_tokens=[2, 3], weights=[float("nan"), 1.0])
    with pytest.raises(ValueError, match="JSON"):
        policy.forward_backward([bad], "cross_entropy").result()
    update(connect().create_lora_training_client(base_model=TINY, rank=4))


def test_diverged_training_is_named_and_harms_no_other_model(
    connect: Callable[..., Client], client: Client, policy: Any
) -> None:
    policy.forward_backward([fixed_datum()], "cross_entropy").result()
    policy.optim_step(types.AdamParams(learning_rate=1e30)).result()
    with pytest.raises(Exception, match="loss of this batch is nan"):
        policy.forward_backward([fixed_datum()], "cross_entropy").result()
    with pytest.raises(httpx.HTTPStatusError) as error:
        read(ask(sampler(client, snapshot(policy)), 1))
    assert "its training has diverged" in refusal(error)
    healthy = connect().create_lora_training_client(base_model=TINY, rank=4)
    update(healthy)
    read(ask(sampler(client, snapshot(healthy)), 1))


def test_a_damaged_sampler_fails_no_other_of_its_base_model(
    connect: Callable[..., Client], client: Client, service: LocalService
) -> None:
    """All three are of one base model and queued at once."""
    policy = client.create_lora_training_client(base_model=TINY, rank=4)
    paths = [snapshot(policy, f"policy-{n}") for n in range(3)]
    sources = [sampler(client, path) for path in paths]
    expected = [read(ask(source, 1)) for source in sources]
    folder = service.state_dir / "sessions" / str(client.training_session_id)
    damaged = folder / paths[1] / "adapter_model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-4] + b"abcd")
    futures = [ask(source, 1) for source in sources for _ in range(4)]
    for index, future in enumerate(futures):
        if index // 4 == 1:
            with pytest.raises(httpx.HTTPStatusError) as error:
                read(future)
            assert "damaged: adapter_model.safetensors" in refusal(error)
        else:
            assert read(future) == expected[index // 4]


def test_a_sampler_damaged_on_disk_fails_alone(
    connect: Callable[..., Client], client: Client, service: LocalService
) -> None:
    """Its weights were evicted and have to be read again."""
    policy = client.create_lora_training_client(base_model=TINY, rank=4)
    path = snapshot(policy, "policy-0")
    old = sampler(client, path)
    read(ask(old, 1))
    read(ask(sampler(client, snapshot(policy, "policy-1")), 1))
    folder = service.state_dir / "sessions" / str(client.training_session_id) / path
    damaged = folder / "adapter_model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-4] + b"abcd")
    other = connect().create_sampling_client(
        base_model=OTHER, concurrency_controller=FixedConcurrencyController(8)
    )
    long = [ask(other, seed, 300, stop=["no such text"]) for seed in range(8)]
    with pytest.raises(httpx.HTTPStatusError) as error:
        read(ask(old, 1))
    assert "damaged: adapter_model.safetensors" in refusal(error)
    assert all(read(future)[0] for future in long)
    read(ask(sampler(client, snapshot(policy, "policy-2")), 1))


def test_a_sampler_is_checked_whenever_its_weights_return(
    client: Client, service: LocalService
) -> None:
    """Also if no other sampler was read in between."""
    policy = client.create_lora_training_client(base_model=TINY, rank=4)
    update(policy)
    path = snapshot(policy)
    trained = sampler(client, path)
    expected = read(ask(trained, 1))
    base = client.create_sampling_client(
        base_model=TINY, concurrency_controller=FixedConcurrencyController(8)
    )
    assert read(ask(base, 1)) != expected
    assert read(ask(trained, 1)) == expected
    read(ask(base, 1))
    folder = service.state_dir / "sessions" / str(client.training_session_id) / path
    damaged = folder / "adapter_model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-4] + b"abcd")
    with pytest.raises(httpx.HTTPStatusError) as error:
        read(ask(trained, 1))
    assert "damaged: adapter_model.safetensors" in refusal(error)


# --- raw HTTP -----------------------------------------------------------------------


def message(answer: httpx.Response) -> str:
    return str(answer.json()["error"]["message"])


def forward_body(model_id: str, seq_id: int, weights: list[Any]) -> dict[str, Any]:
    n = len(weights)
    chunk = {"type": "encoded_text", "tokens": list(range(65, 65 + n))}
    inputs = {
        "target_tokens": {"data": list(range(66, 66 + n)), "dtype": "int64"},
        "weights": {"data": weights, "dtype": "float32"},
    }
    data = [{"model_input": {"chunks": [chunk]}, "loss_fn_inputs": inputs}]
    return {
        "model_id": model_id,
        "seq_id": seq_id,
        "forward_backward_input": {"data": data, "loss_fn": "cross_entropy"},
    }


def completion_body(**changes: Any) -> dict[str, Any]:
    body = {
        "model": f"accounts/local/trainingSamplers/{TINY}",
        "prompt": PROMPT,
        "max_tokens": 4,
        "seed": 1,
        "stream": True,
        "raw_output": True,
        "logprobs": True,
    }
    return {**body, **changes}


def completed(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.text.split("\n\n")
    assert events[1:] == ["data: [DONE]", ""]
    choice: dict[str, Any] = json.loads(events[0].removeprefix("data: "))["choices"][0]
    return choice


def alive(wire: Wire) -> None:
    """The service still completes a request."""
    completed(wire.http.post(wire.completions, json=completion_body()))


def test_a_wrong_or_missing_key_is_refused_on_every_tree(wire: Wire) -> None:
    urls = [
        ("POST", f"{wire.training}/create_session"),
        ("POST", wire.completions),
        ("GET", f"{wire.root}/v1/accounts"),
        ("GET", f"{wire.root}/nowhere"),
    ]
    key = wire.http.headers["X-API-Key"]
    with httpx.Client(trust_env=False) as http:
        for method, url in urls:
            for headers in (
                {},
                {"X-API-Key": "wrong"},
                {"X-API-Key": key[:-1]},
                {"X-API-Key": key + "x"},
                {"Authorization": "Bearer wrong"},
                {"Authorization": ""},
            ):
                answer = http.request(method, url, headers=headers, json={})
                assert answer.status_code == 401, (url, headers)
                assert "key is missing or wrong" in message(answer)
        for headers in ({"X-Api-Key": key}, {"Authorization": f"Bearer {key}"}):
            answer = http.get(f"{wire.root}/v1/accounts", headers=headers)
            assert answer.json() == {"accounts": [{"name": "accounts/local"}]}


def test_operations_run_in_the_order_of_their_numbers(wire: Wire) -> None:
    """Seen by their effect: save, step and pass arrive as 3, 1, 2."""
    session = wire.session()
    model, waited = wire.model(session), wire.model(session, 1)
    adam = {"learning_rate": 0.01}
    save = {"model_id": model, "seq_id": 3, "path": "state-a"}
    third = wire.submit("save_weights", save)
    time.sleep(0.05)
    first = wire.submit("forward_backward", forward_body(model, 1, [1.0, 2.0]))
    step = {"model_id": model, "seq_id": 2, "adam_params": adam}
    second = wire.submit("optim_step", step)
    for ticket in (second, third, first):
        assert "error" not in wire.result(ticket)
    # Model "waited" does the same one after the other.
    wire.result(wire.submit("forward_backward", forward_body(waited, 1, [1.0, 2.0])))
    step = {"model_id": waited, "seq_id": 2, "adam_params": adam}
    wire.result(wire.submit("optim_step", step))
    values = [
        wire.result(wire.submit("forward_backward", forward_body(m, n, [1.0, 2.0])))
        for m, n in ((model, 4), (waited, 3))
    ]
    assert values[0] == values[1]
    # The checkpoint was written after the step.
    path = str(wire.result(third)["path"])
    load = {"model_id": model, "seq_id": 5, "path": path, "optimizer": True}
    wire.result(wire.submit("load_weights", load))
    again = wire.submit("forward_backward", forward_body(model, 6, [1.0, 2.0]))
    assert wire.result(again) == values[0]


def test_a_repeated_submission_runs_once(wire: Wire) -> None:
    model = wire.model(wire.session())
    body = forward_body(model, 1, [1.0, 1.0])
    tickets = {wire.submit("forward_backward", body) for _ in range(3)}
    assert len(tickets) == 1
    once = wire.result(tickets.pop())
    step = {"model_id": model, "seq_id": 2, "adam_params": {}}
    norm = wire.result(wire.submit("optim_step", step))["metrics"]
    assert {wire.submit("forward_backward", body)} == {
        wire.submit("forward_backward", body)
    }
    other = wire.model(wire.session())
    assert wire.result(wire.submit("forward_backward", forward_body(other, 1, [1, 1])))
    step["model_id"] = other
    assert wire.result(wire.submit("optim_step", step))["metrics"] == norm
    assert wire.result(wire.submit("forward_backward", body)) == once


def test_a_result_can_be_read_again(wire: Wire) -> None:
    model = wire.model(wire.session())
    ticket = wire.submit("forward_backward", forward_body(model, 1, [1.0]))
    assert wire.result(ticket) == wire.result(ticket)


def test_a_repeated_create_model_makes_one_model(wire: Wire) -> None:
    session = wire.session()
    assert wire.model(session, 0) == wire.model(session, 0)
    assert wire.model(session, 1) != wire.model(session, 0)


def test_unknown_routes_are_404_with_a_message(wire: Wire) -> None:
    for method, url in (
        ("POST", f"{wire.training}/weight_sync"),
        ("GET", f"{wire.training}/nothing"),
        ("GET", f"{wire.root}/"),
    ):
        answer = wire.http.request(method, url)
        assert answer.status_code == 404
        assert f"{method} {httpx.URL(url).path} is not supported" in message(answer)


def test_a_wrong_method_is_405_and_names_the_right_one(wire: Wire) -> None:
    session = f"{wire.root}/v1/accounts/local/trainingSessions/{wire.session()}"
    for method, url, right in (
        ("GET", f"{wire.training}/forward_backward", "POST"),
        ("PUT", wire.completions, "POST"),
        ("GET", session, "DELETE"),
        ("GET", f"{session}/checkpoints/x:promote", "POST"),
    ):
        answer = wire.http.request(method, url)
        assert answer.status_code == 405
        assert answer.headers["allow"] == right
        path = httpx.URL(url).path
        assert message(answer) == f"{path} takes {right}, not {method}"


def test_unknown_names_are_404(wire: Wire) -> None:
    for endpoint, body in (
        ("get_info", {"model_id": "run-x:train:0"}),
        ("forward_backward", {"model_id": None, "seq_id": 1}),
        ("session_heartbeat", {"session_id": "ts-x"}),
        ("retrieve_future", {"request_id": "nothing"}),
        ("create_model", {"session_id": ["ts-x"]}),
    ):
        answer = wire.post(endpoint, body)
        assert answer.status_code == 404, endpoint
        assert message(answer)


def test_an_unknown_field_is_refused_by_name(wire: Wire) -> None:
    session = wire.session()
    model = wire.model(session)
    answer = wire.http.post(wire.completions, json=completion_body(min_p=0.1))
    assert answer.status_code == 400
    assert "['min_p']" in message(answer)
    answer = wire.http.post(wire.completions, json=completion_body(echo_last=3))
    assert "['echo_last']" in message(answer)
    answer = wire.post("create_model", {"session_id": session, "projection": 3})
    assert "['projection']" in message(answer)
    step = {"model_id": model, "seq_id": 1, "adam_params": {"amsgrad": True}}
    result = wire.result(wire.submit("optim_step", step))
    assert "['amsgrad']" in str(result["error"])
    assert result["category"] == "user"
    body = forward_body(model, 2, [1.0])
    body["forward_backward_input"]["replay"] = 1
    result = wire.result(wire.submit("forward_backward", body))
    assert "['replay']" in str(result["error"])


@pytest.mark.parametrize(
    ("lora", "named"),
    [
        ({"rank": 0}, "full-parameter"),
        ({"rank": "4"}, "rank must be an integer"),
        ({"rank": 4, "dropout": 0.1}, "dropout"),
        ({"rank": 4, "init_method": "nora"}, "init_method"),
        ({"rank": 4, "alpha": "32"}, "alpha must be of type int"),
        ({"rank": 4, "seed": 2**80}, "seed must be of type int"),
        ({"rank": 4, "train_mlp": 1}, "train_mlp must be of type bool"),
        (
            {
                "rank": 4,
                "train_mlp": False,
                "train_attn": False,
                "train_unembed": False,
            },
            "trains nothing",
        ),
        (None, "either a lora_config .* or base_only"),
    ],
)
def test_lora_settings_are_checked(
    wire: Wire, lora: dict[str, Any] | None, named: str
) -> None:
    body = {
        "session_id": wire.session(),
        "model_seq_id": 0,
        "base_model": TINY,
        "lora_config": lora,
    }
    answer = wire.post("create_model", body)
    assert answer.status_code == 400
    assert re.search(named, message(answer))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"n": 2}, "n must be 1"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 10**400}, "temperature must be finite"),
        ({"temperature": "hot"}, "temperature must be a number"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"seed": 1.5}, "seed"),
        ({"seed": -1}, "seed"),
        ({"stop": "END"}, "stop must be a list"),
        ({"stop": [""]}, "stop must be a list"),
        ({"stop": [3]}, "stop must be a list"),
        ({"echo": "yes"}, "echo must be true or false"),
        ({"prompt": []}, "at least one token"),
        ({"prompt": "text"}, "list of token ids"),
        ({"prompt": [1, 259]}, "259, outside the vocabulary"),
        ({"prompt": [True]}, "no integer"),
        ({"prompt": [1] * 600}, "over the model's context"),
        ({"model": None}, "no sampler"),
        ({"model": "accounts/local/trainingSamplers/" + "x" * 9000}, "not known"),
        ({"model": "accounts/local/trainingSamplers/checkpoints/x"}, "cannot be"),
        (
            {
                "model": "accounts/local/trainingSamplers/checkpoints/local/run-"
                + "0" * 32
                + "/policy"
            },
            "no run of this service",
        ),
    ],
)
def test_unusable_completion_requests_are_400(
    wire: Wire, changes: dict[str, Any], named: str
) -> None:
    answer = wire.http.post(wire.completions, json=completion_body(**changes))
    assert answer.status_code == 400
    assert named in message(answer)


def test_a_completion_on_the_wire(wire: Wire) -> None:
    answer = wire.http.post(
        wire.completions, json=completion_body(temperature=0.5, max_tokens=6)
    )
    assert answer.headers["connection"] == "close"
    choice = completed(answer)
    ids, content = choice["raw_output"]["completion_token_ids"], choice["logprobs"]
    assert choice["finish_reason"] == "length"
    assert [entry["token_id"] for entry in content["content"]] == ids
    assert len(ids) == 6
    for entry in content["content"]:
        assert entry["logprob"] < 0.0
        assert entry["sampling_logprob"] != entry["logprob"]


NON_NUMBERS = ["NaN", "Infinity", "-Infinity", "1e39", "1" + "0" * 400, "null", '"1"']


@pytest.mark.parametrize("value", NON_NUMBERS)
def test_values_that_are_no_finite_number_fail_through_the_future(
    wire: Wire, value: str
) -> None:
    model = wire.model(wire.session())
    text = json.dumps(forward_body(model, 1, [1.0, 777])).replace(", 777", f", {value}")
    answer = wire.http.post(f"{wire.training}/forward_backward", content=text)
    result = wire.result(str(answer.json()["request_id"]))
    assert "data[0].weights has a value that is no finite number" in str(result)
    assert result["category"] == "user"
    ticket = wire.submit("forward_backward", forward_body(model, 2, [1.0]))
    assert "error" not in wire.result(ticket)


@pytest.mark.parametrize(
    "change",
    [
        {"data": []},
        {"data": {}},
        {"data": [1]},
        {"data": [{}]},
        {"data": [{"model_input": {"chunks": [{"type": "image"}]}}]},
        {"data": [{"model_input": {"chunks": []}, "loss_fn_inputs": {}}]},
        {"loss_fn": None},
        {"loss_fn": ["cross_entropy"]},
        {"loss_fn_config": []},
        {"loss_fn_config": [1]},
        {"loss_fn_config": {"beta": 1}},
    ],
)
def test_malformed_training_requests_are_the_users_errors(
    wire: Wire, change: dict[str, Any]
) -> None:
    body = forward_body(wire.model(wire.session()), 1, [1.0])
    body["forward_backward_input"].update(change)
    result = wire.result(wire.submit("forward_backward", body))
    assert result.get("category") == "user", result


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "1",
        '"text"',
        "null",
        "{'a': 1}",
        "[" * 100_000,
        '{"a":' * 100_000,
        "9" * 5000,
    ],
)
def test_broken_bodies_are_400_and_the_service_lives(wire: Wire, text: str) -> None:
    for url in (f"{wire.training}/create_session", wire.completions):
        answer = wire.http.post(url, content=text)
        assert answer.status_code == 400, answer.text
        assert message(answer)
    alive(wire)


def test_bytes_that_are_no_text_are_400(wire: Wire) -> None:
    answer = wire.http.post(f"{wire.training}/forward", content=b'{"a": "\xff"}')
    assert answer.status_code == 400
    alive(wire)


def test_nesting_within_what_a_parser_takes_is_answered(wire: Wire) -> None:
    for depth in (100, 500, 900):
        text = '{"model_id":' + "[" * depth + "]" * depth + "}"
        answer = wire.http.post(f"{wire.training}/get_info", content=text)
        assert 400 <= answer.status_code < 500
    alive(wire)


def test_an_oversized_body_is_413(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "MAX_BODY_BYTES", 2000)
    body = json.dumps({"tags": ["x" * 3000]}).encode()

    def chunks() -> Iterator[bytes]:  # sent without a declared length
        yield body[:1500]
        yield body[1500:]

    for url in (f"{wire.training}/create_session", wire.completions):
        for content in (body, chunks()):
            answer = wire.http.post(url, content=content)
            assert answer.status_code == 413
            assert "larger than" in message(answer)
    alive(wire)


def test_telemetry_and_heartbeat_answer(wire: Wire) -> None:
    session = wire.session()
    body = {"events": [], "platform": "x", "sdk_version": "1", "session_id": session}
    assert wire.post("telemetry", body).json() == {"status": "accepted"}
    beat = wire.post("session_heartbeat", {"session_id": session})
    assert beat.json() == {"type": "session_heartbeat"}


def test_deleting_an_unknown_session_is_404(wire: Wire) -> None:
    assert wire.end_session(f"ts-{'0' * 32}").status_code == 404


def test_unloading_waits_for_what_was_submitted(wire: Wire) -> None:
    model = wire.model(wire.session())
    long = [1.0] * 150
    tickets = [
        wire.submit("forward_backward", forward_body(model, n, long)) for n in (1, 2, 3)
    ]
    late = wire.submit("forward_backward", forward_body(model, 5, [1.0]))
    unload = wire.submit("unload_model", {"model_id": model})
    assert wire.result(unload) == {"type": "unload_model", "model_id": model}
    for ticket in tickets:
        assert "loss:sum" in str(wire.result(ticket))
    # Number 4 never came, so number 5 could not run.
    assert "being unloaded" in str(wire.result(late)["error"])


def test_a_sampler_outlives_its_training_client(client: Client, policy: Any) -> None:
    source = sampler(client, snapshot(policy))
    before = read(ask(source, 1))
    policy.unload_model().result()
    assert read(ask(source, 1)) == before


def test_deleting_a_session_fails_what_is_queued_and_nothing_else(wire: Wire) -> None:
    session, other = wire.session(), wire.session()
    model, bystander = wire.model(session), wire.model(other)
    long = [1.0] * 150
    tickets = [
        wire.submit("forward_backward", forward_body(model, n, long))
        for n in range(1, 30)
    ]
    assert wire.end_session(session).status_code == 200
    results = [wire.result(ticket) for ticket in tickets]
    ended = [r for r in results if r.get("error") == SESSION_ENDED]
    assert all("loss:sum" in str(r) for r in results if r not in ended)
    assert ended == results[len(results) - len(ended) :]  # the last ones
    assert wire.post("get_info", {"model_id": model}).status_code == 404
    ticket = wire.submit("forward_backward", forward_body(bystander, 1, long))
    assert "loss:sum" in str(wire.result(ticket))


def test_ending_a_session_while_a_model_unloads(wire: Wire) -> None:
    for _ in range(5):
        session = wire.session()
        model = wire.model(session)
        wire.submit("forward_backward", forward_body(model, 1, [1.0] * 50))
        ticket = wire.submit("unload_model", {"model_id": model})
        assert wire.end_session(session).status_code == 200
        result = wire.result(ticket)
        assert result.get("error") in (None, SESSION_ENDED)


SESSION_ENDED = "the session has ended: connect again"


def test_unloading_a_model_frees_its_name(wire: Wire) -> None:
    model = wire.model(wire.session())
    wire.result(wire.submit("unload_model", {"model_id": model}))
    assert wire.post("get_info", {"model_id": model}).status_code == 404


# --- starting and stopping ----------------------------------------------------------


def test_it_listens_on_loopback_only(service: LocalService) -> None:
    host, port = service.base_url.split("/")[2].split(":")
    assert host == "127.0.0.1"
    with socket.create_connection((host, int(port)), timeout=5):
        pass
    # Every address in 127.0.0.0/8 is this machine: a wildcard socket would answer.
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", int(port)), timeout=5)


def test_close_twice_is_safe_and_cleans_up(tiny_folder: Path, tmp_path: Path) -> None:
    service = LocalService(tmp_path, models={TINY: tiny_folder})
    with pytest.raises(RuntimeError, match="not running"):
        _ = service.base_url
    service.start()
    with pytest.raises(RuntimeError, match="running already"):
        service.start()
    wire = Wire(service)
    with wire.http:
        wire.session()
        assert len(list((tmp_path / "sessions").iterdir())) == 1
        service.close()
        service.close()
        assert not list((tmp_path / "sessions").iterdir())
        with pytest.raises(httpx.ConnectError):
            wire.session()


def test_a_closed_service_can_be_started_again(
    tiny_folder: Path, tmp_path: Path
) -> None:
    service = LocalService(tmp_path, models={TINY: tiny_folder})
    for _ in range(2):
        with service:
            wire = Wire(service)
            with wire.http:
                alive(wire)


def test_close_with_a_completion_in_flight_returns(
    tiny_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    service = LocalService(tmp_path, models={TINY: tiny_folder}).start()
    wire = Wire(service)
    answers: list[httpx.Response] = []

    def keep_asking() -> None:
        body = completion_body(max_tokens=470, prompt=[65], stop=["no such text"])
        for seed in range(1000):
            try:
                answer = wire.http.post(wire.completions, json={**body, "seed": seed})
            except httpx.TransportError:
                return
            answers.append(answer)
            if answer.status_code != 200:
                return

    with wire.http:
        alive(wire)
        threads = [threading.Thread(target=keep_asking) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        with caplog.at_level(logging.WARNING):
            service.close()
        for thread in threads:
            thread.join(timeout=60)
            assert not thread.is_alive()
    assert {answer.status_code for answer in answers} <= {200, 503}
    assert not [r for r in caplog.records if r.exc_info], "a traceback was logged"
