"""Sampling settings through the real SDK: prompt log-probabilities, stops, filters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fireworks.training.sdk import FixedConcurrencyController, types
from local_helpers import CONTEXT, TINY, Wire, byte_tokenizer

pytest_plugins = ("local_fixtures",)

PROMPT = list(range(40, 70))


@pytest.fixture
def policy(client: Any) -> Any:
    """A LoRA training client that is a few steps away from its base model."""
    policy = client.create_lora_training_client(base_model=TINY, rank=4, seed=1)
    data = types.Datum(
        model_input=types.ModelInput.from_ints(PROMPT[:-1]),
        loss_fn_inputs={"target_tokens": PROMPT[1:], "weights": [1.0] * 29},
    )
    for _ in range(2):
        policy.forward_backward([data], "cross_entropy").result()
        policy.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    return policy


@pytest.fixture
def source(client: Any, policy: Any) -> Any:
    """A sampler of that client's snapshot."""
    path = policy.save_weights_for_sampler("policy").result().path
    return client.create_sampling_client(
        model_path=path, concurrency_controller=FixedConcurrencyController(32)
    )


def sample(
    source: Any,
    prompt: list[int] = PROMPT,
    samples: int = 1,
    echo: bool = False,
    **s: Any,
) -> Any:
    return source.sample(
        prompt=types.ModelInput.from_ints(prompt),
        num_samples=samples,
        sampling_params=types.SamplingParams(**{"max_tokens": 12, "seed": 3, **s}),
        include_prompt_logprobs=echo,
    ).result(timeout=120)


def forward_logprobs(policy: Any, tokens: list[int]) -> list[float]:
    """The trainer's log-probabilities of ``tokens`` after the first."""
    data = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:]},
    )
    (output,) = policy.forward([data], "cross_entropy").result().loss_fn_outputs
    return [float(value) for value in output["logprobs"].data]


# --- prompt log-probabilities -------------------------------------------------------


@pytest.mark.filterwarnings("ignore:We don't recommend")
@pytest.mark.parametrize("length", [2, 30, 300, CONTEXT - 1])
def test_compute_logprobs_gives_the_trainers(
    policy: Any, source: Any, length: int
) -> None:
    prompt = [40 + (7 * i) % 200 for i in range(length)]
    found = source.compute_logprobs(types.ModelInput.from_ints(prompt)).result(120)
    assert found[0] is None  # nothing comes before the first token
    np.testing.assert_allclose(found[1:], forward_logprobs(policy, prompt), atol=1e-4)


@pytest.mark.filterwarnings("ignore:We don't recommend")
def test_a_prompt_of_one_token(source: Any) -> None:
    prompt = types.ModelInput.from_ints([65])
    assert source.compute_logprobs(prompt).result(120) == [None]


def test_asking_for_them_changes_no_sample(policy: Any, source: Any) -> None:
    plain, echoed = sample(source), sample(source, echo=True)
    assert plain.prompt_logprobs is None
    for settings in ({}, {"temperature": 0.5, "top_p": 0.8}):
        plain = sample(source, **settings).sequences[0]
        echoed = sample(source, echo=True, **settings)
        (sequence,) = echoed.sequences
        assert sequence.tokens == plain.tokens
        assert sequence.logprobs == plain.logprobs
        # Those of the prompt are the model's own, at whatever temperature.
        expected = forward_logprobs(policy, PROMPT)
        np.testing.assert_allclose(echoed.prompt_logprobs[1:], expected, atol=1e-4)


def test_the_echo_on_the_wire(wire: Wire) -> None:
    body = {
        "model": f"accounts/local/trainingSamplers/{TINY}",
        "prompt": PROMPT,
        "max_tokens": 4,
        "seed": 1,
    }
    text = wire.http.post(wire.completions, json={**body, "echo": True}).text
    assert '"logprob": 0.0, "sampling_logprob": null' in text
    for echo in (False, None):
        answer = wire.http.post(wire.completions, json={**body, "echo": echo})
        assert "null" not in answer.text


# --- stops --------------------------------------------------------------------------


def test_a_stop_over_several_tokens_ends_the_sequence(source: Any) -> None:
    tokenizer = byte_tokenizer()
    for seed in range(200):
        tokens = sample(source, seed=seed, max_tokens=40).sequences[0].tokens
        text = tokenizer.decode(tokens)
        ends = [i for i in range(6, len(text)) if text[i - 3 : i].isascii()]
        ends = [i for i in ends if text.index(text[i - 3 : i]) == i - 3]
        if ends and text[: ends[0]].isascii():
            break
    stop = text[ends[0] - 3 : ends[0]]
    (cut,) = sample(source, seed=seed, max_tokens=40, stop=["~~", stop]).sequences
    assert cut.stop_reason == "stop"
    # One byte is one token here, and the stop itself is kept.
    assert tokenizer.decode(cut.tokens) == text[: ends[0]]
    assert cut.tokens == tokens[: ends[0]]


def test_a_stop_that_only_began_ends_nothing(source: Any) -> None:
    tokens = sample(source, max_tokens=20).sequences[0].tokens
    last = byte_tokenizer().decode(tokens[-1:])
    (whole,) = sample(source, max_tokens=20, stop=[last + "…"]).sequences
    assert whole.tokens == tokens


# --- filters and several samples ----------------------------------------------------


@pytest.mark.parametrize("settings", [{"top_k": 1}, {"top_p": 1e-9}])
def test_a_filter_that_leaves_one_token_is_greedy(
    source: Any, settings: dict[str, Any]
) -> None:
    greedy = sample(source, temperature=0.0).sequences[0]
    for seed in (1, 2):
        filtered = sample(source, seed=seed, **settings).sequences[0]
        assert filtered.tokens == greedy.tokens
        assert filtered.logprobs == [0.0] * len(filtered.tokens)


def test_filters_keep_to_the_most_probable_tokens(policy: Any, source: Any) -> None:
    data = types.Datum(
        model_input=types.ModelInput.from_ints(PROMPT),
        loss_fn_inputs={"target_tokens": [0] * len(PROMPT)},
    )
    result = policy.forward([data], "cross_entropy", {"top_k": 259}).result()
    output = result.loss_fn_outputs[0]
    ranked = output["top_k_indices"].to_numpy()[-1].tolist()
    mass = np.exp(output["top_k_logprobs"].to_numpy()[-1]).cumsum()
    nucleus = int(np.searchsorted(mass, 0.6)) + 1
    for settings, kept in (({"top_k": 5}, 5), ({"top_p": 0.6}, nucleus)):
        drawn = [
            sample(source, max_tokens=1, seed=seed, **settings).sequences[0]
            for seed in range(60)
        ]
        tokens = [sequence.tokens[0] for sequence in drawn]
        assert set(tokens) <= set(ranked[:kept])
        assert len(set(tokens)) > 1
        # Renormalised over what was kept.
        expected = output["top_k_logprobs"].to_numpy()[-1][ranked.index(tokens[0])]
        expected -= np.log(mass[kept - 1])
        assert drawn[0].logprobs[0] == pytest.approx(expected, abs=1e-4)


def test_several_samples_share_a_given_seed(source: Any) -> None:
    """The SDK sends one request per sample, all with the same seed."""
    seeded = {tuple(s.tokens) for s in sample(source, samples=3).sequences}
    assert len(seeded) == 1
    free = {tuple(s.tokens) for s in sample(source, samples=3, seed=None).sequences}
    assert len(free) == 3
