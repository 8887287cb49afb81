"""Forward passes through the real SDK: reference models, top-k, many targets, custom
losses. Expected values come from transformers alone, in double precision."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fireworks.training.sdk import types
from local_helpers import TINY, Wire
from transformers import AutoModelForCausalLM

from rlhelpers.local import batches as batches_module
from rlhelpers.local.batches import BatchError, BatchLimits, parse_data

pytest_plugins = ("local_fixtures",)

TOKENS = [72, 101, 108, 108, 111, 32]
TARGETS = [101, 108, 108, 111, 32, 119]
ADAM = types.AdamParams(learning_rate=1e-2)
LIMITS = BatchLimits(vocab_size=259, context_length=512)


def datum(tokens: list[int] = TOKENS, **inputs: Any) -> types.Datum:
    inputs = inputs or {"target_tokens": TARGETS, "weights": [1.0] * len(TARGETS)}
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs
    )


def train(policy: Any, weight: float = 1.0) -> None:
    data = [datum(target_tokens=TARGETS, weights=[weight] * 6)]
    policy.forward_backward(data, "cross_entropy").result()
    policy.optim_step(ADAM).result()


def outputs(policy: Any, *data: types.Datum, **config: Any) -> list[Any]:
    result = policy.forward(list(data), "cross_entropy", config or None).result()
    return list(result.loss_fn_outputs)


def logprobs(policy: Any) -> list[float]:
    return [float(value) for value in outputs(policy, datum())[0]["logprobs"].data]


@pytest.fixture
def policy(client: Any) -> Any:
    return client.create_lora_training_client(base_model=TINY, rank=4, seed=1)


@pytest.fixture(scope="module")
def table(tiny_folder: Path) -> np.ndarray:
    """The base model's log-probabilities, [position, vocabulary]."""
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float64)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([TOKENS])).logits[0]
    values: np.ndarray = torch.log_softmax(logits, -1).numpy()
    return values


# --- reference models ---------------------------------------------------------------


def test_a_reference_is_the_base_model_whatever_is_trained(
    client: Any, policy: Any, table: np.ndarray
) -> None:
    reference = client.create_reference_client(TINY)
    expected = table[range(6), TARGETS]
    np.testing.assert_allclose(logprobs(reference), expected, atol=1e-5)
    for _ in range(3):
        train(policy)
    trained = logprobs(policy)
    assert np.abs(np.subtract(trained, expected)).max() > 0.1
    before = logprobs(reference)
    np.testing.assert_allclose(before, expected, atol=1e-5)
    assert logprobs(policy) == trained  # its adapter is active again
    train(policy)
    assert logprobs(reference) == before


def test_a_reference_without_any_adapter(
    connect: Callable[..., Any], table: np.ndarray
) -> None:
    """Before a policy exists, and after the last one is gone."""
    client = connect()
    reference = client.create_base_training_client(TINY)
    assert reference.run_id is None
    info = reference.get_info()
    assert (info.is_lora, info.lora_rank) == (False, None)
    policy = client.create_lora_training_client(base_model=TINY, rank=4)
    train(policy)
    policy.unload_model().result()
    np.testing.assert_allclose(logprobs(reference), table[range(6), TARGETS], atol=1e-5)
    reference.unload_model().result()


def test_a_reference_outlives_the_policies(
    client: Any, policy: Any, table: np.ndarray
) -> None:
    reference = client.create_reference_client(TINY)
    expected = table[range(6), TARGETS]
    train(policy)
    later = client.create_lora_training_client(base_model=TINY, rank=4, seed=2)
    policy.unload_model().result()  # the one that computed last
    np.testing.assert_allclose(logprobs(reference), expected, atol=1e-5)
    later.unload_model().result()
    np.testing.assert_allclose(logprobs(reference), expected, atol=1e-5)


def test_a_reference_only_answers_forward(client: Any) -> None:
    reference = client.create_reference_client(TINY)
    message = "reference model .* answers forward only"
    for call in (
        lambda: reference.forward_backward([datum()], "cross_entropy").result(),
        lambda: reference.optim_step(ADAM).result(),
        lambda: reference.save_state("state-1").result(),
        lambda: reference.save_weights_for_sampler("policy-1").result(),
        lambda: reference.load_state(f"local/run-{'0' * 32}/state-1").result(),
    ):
        with pytest.raises(Exception, match=message):
            call()
    assert len(logprobs(reference)) == 6


def test_base_only_with_an_adapter_is_refused(wire: Wire) -> None:
    body = {"session_id": wire.session(), "model_seq_id": 0, "base_model": TINY}
    for change in (
        {"base_only": True, "lora_config": {"rank": 4}},
        {"base_only": "yes"},
        {"base_only": False},
    ):
        answer = wire.post("create_model", {**body, **change})
        assert answer.status_code == 400
        assert "and not both" in answer.text


# --- top-k --------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 5, 259])
def test_top_k_lists_the_most_probable_tokens(
    policy: Any, table: np.ndarray, k: int
) -> None:
    short = datum(TOKENS[:2], target_tokens=TARGETS[:2])
    first, second = outputs(policy, short, datum(), top_k=k)
    for output, length in ((first, 2), (second, 6)):
        values = output["top_k_logprobs"].to_numpy()
        tokens = output["top_k_indices"].to_numpy()
        assert values.shape == tokens.shape == (length, k)
        assert tokens.dtype == np.int64
        expected = -np.sort(-table[:length], axis=1)[:, :k]
        np.testing.assert_allclose(values, expected, atol=1e-5)
        listed = np.take_along_axis(table[:length], tokens, axis=1)
        np.testing.assert_allclose(values, listed, atol=1e-5)
    np.testing.assert_allclose(
        second["logprobs"].data, table[range(6), TARGETS], atol=1e-5
    )


def test_a_reference_lists_them_too(client: Any, table: np.ndarray) -> None:
    (output,) = outputs(client.create_reference_client(TINY), datum(), top_k=2)
    assert output["top_k_indices"].to_numpy()[0].tolist() == list(
        np.argsort(-table[0])[:2]
    )


@pytest.mark.parametrize("k", [0, -1, 260, 1.5, True, "5"])
def test_unusable_top_k_is_refused(policy: Any, k: Any) -> None:
    with pytest.raises(Exception, match="top_k must be an integer from 1 to 259"):
        outputs(policy, datum(), top_k=k)


def test_top_k_belongs_to_forward(policy: Any) -> None:
    with pytest.raises(Exception, match="'top_k' is not supported for cross_entropy"):
        policy.forward_backward([datum()], "cross_entropy", {"top_k": 3}).result()
    assert "top_k_indices" not in outputs(policy, datum())[0]


# --- several targets for a position -------------------------------------------------


def candidates(k: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(k)
    tokens = random.integers(0, 259, (6, k))
    return tokens.astype(np.int64), random.normal(size=(6, k)).astype(np.float32)


@pytest.mark.parametrize("k", [1, 3])
def test_many_targets_sum_over_the_candidates(
    policy: Any, table: np.ndarray, k: int
) -> None:
    tokens, weights = candidates(k)
    weights[2] = 0.0
    data = [datum(), datum(target_tokens=tokens, weights=weights)]
    result = policy.forward_backward(data, "cross_entropy").result()
    values = result.loss_fn_outputs[1]["logprobs"].to_numpy()
    expected = np.take_along_axis(table, tokens, axis=1)
    assert values.shape == (6, k)
    np.testing.assert_allclose(values, expected, atol=1e-5)
    loss = -(weights * expected).sum() - table[range(6), TARGETS].sum()
    assert result.metrics["loss:sum"] == pytest.approx(loss, rel=1e-4)
    # Position 2 of the second datum has no weight, and a position counts once.
    assert result.metrics["num_loss_tokens:sum"] == 6 + 5


def test_many_targets_have_the_gradient_of_as_many_datums(
    connect: Callable[..., Any], policy: Any
) -> None:
    """K candidates for each position are K datums with one target each."""
    tokens, weights = candidates(3)
    other = connect().create_lora_training_client(base_model=TINY, rank=4, seed=1)
    together = [datum(target_tokens=tokens, weights=weights)]
    apart = [datum(target_tokens=tokens[:, i], weights=weights[:, i]) for i in range(3)]
    norms = []
    for model, data in ((policy, together), (other, apart)):
        model.forward_backward(data, "cross_entropy").result()
        norms.append(model.optim_step(ADAM).result().metrics["grad_norm:last"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    np.testing.assert_allclose(logprobs(policy), logprobs(other), atol=1e-3)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_sparse_targets_are_the_dense_ones(policy: Any, table: np.ndarray) -> None:
    """The SDK sends a two-dimensional torch tensor as CSR where that is shorter."""
    tokens, weights = torch.zeros(6, 9, dtype=torch.int64), torch.zeros(6, 9)
    for row, column, token, weight in ((0, 3, 65, 2.0), (4, 8, 66, -1.0)):
        tokens[row, column], weights[row, column] = token, weight
    sparse = datum(target_tokens=tokens, weights=weights)
    assert sparse.loss_fn_inputs["target_tokens"].sparse_crow_indices is not None
    result = policy.forward_backward([sparse], "cross_entropy").result()
    expected = -2.0 * table[0, 65] + table[4, 66]
    assert result.metrics["loss:sum"] == pytest.approx(expected, rel=1e-4)
    assert result.metrics["num_loss_tokens:sum"] == 2
    assert result.loss_fn_outputs[0]["logprobs"].to_numpy().shape == (6, 9)


CSR = {"sparse_crow_indices": [0, 1, 1], "sparse_col_indices": [1], "shape": [2, 3]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sparse_crow_indices": [0, 1]}, "no valid sparse"),
        ({"sparse_crow_indices": [0, 2, 1]}, "no valid sparse"),
        ({"sparse_crow_indices": [1, 1, 1]}, "no valid sparse"),
        ({"sparse_crow_indices": [0, 1, 2]}, "no valid sparse"),
        ({"sparse_crow_indices": "x"}, "no valid sparse"),
        ({"sparse_crow_indices": [0, True, 1]}, "no valid sparse"),
        ({"sparse_col_indices": [3]}, "no valid sparse"),
        ({"sparse_col_indices": [-1]}, "no valid sparse"),
        ({"sparse_col_indices": [0, 1]}, "no valid sparse"),
        ({"sparse_col_indices": None}, "no valid sparse"),
        ({"shape": None}, "has shape None"),
        ({"shape": [2]}, "no valid sparse"),
        ({"shape": [2, 0]}, r"has shape \[2, 0\]"),
        ({"shape": [3, 3]}, "3 values for 2 input tokens"),
        ({"shape": [2, 10**7]}, "more than 8000000 target tokens"),
        ({"shape": [2, 10**400]}, "has shape"),
        ({"shape": [2, 3, 1]}, "has shape"),
        ({"shape": {"a": 1}}, "has shape"),
        (
            {"sparse_crow_indices": [0, 2, 2], "sparse_col_indices": [1, 1]}
            | {"data": [5, 6]},
            "no valid sparse",
        ),
    ],
)
def test_broken_sparse_tensors_are_refused(
    change: dict[str, Any], message: str
) -> None:
    tensor = {"data": [5], "dtype": "int64", **CSR}
    good = {"model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}}
    whole = [{**good, "loss_fn_inputs": {"target_tokens": tensor}}]
    (parsed,) = parse_data(whole, "cross_entropy", LIMITS)
    assert parsed.targets.tolist() == [[0, 5, 0], [0, 0, 0]]
    broken = [{**good, "loss_fn_inputs": {"target_tokens": {**tensor, **change}}}]
    with pytest.raises(BatchError, match=message):
        parse_data(broken, "cross_entropy", LIMITS)


def test_the_targets_of_one_request_are_limited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batches_module, "MAX_TARGETS", 5)
    chunks = [{"type": "encoded_text", "tokens": [1, 2]}]
    one = {
        "model_input": {"chunks": chunks},
        "loss_fn_inputs": {"target_tokens": {"data": [1, 2]}},
    }
    assert len(parse_data([one, one], "cross_entropy", LIMITS)) == 2
    with pytest.raises(BatchError, match="more than 5 target tokens: split"):
        parse_data([one, one, one], "cross_entropy", LIMITS)


def test_shapes_have_to_agree(policy: Any) -> None:
    tokens, weights = candidates(3)
    cases: list[tuple[str, dict[str, Any], str]] = [
        (
            "cross_entropy",
            {"target_tokens": tokens, "weights": weights[:, 0]},
            "shapes",
        ),
        (
            "cross_entropy",
            {"target_tokens": tokens[:5], "weights": weights},
            "5 values",
        ),
        (
            "ppo",
            {"target_tokens": tokens, "logprobs": weights, "advantages": weights},
            "only cross_entropy takes, not ppo",
        ),
    ]
    for loss, inputs, message in cases:
        with pytest.raises(Exception, match=message):
            policy.forward_backward([datum(**inputs)], loss).result()
    train(policy)


# --- custom losses ------------------------------------------------------------------


def test_a_custom_loss_trains_like_the_loss_it_writes_out(
    connect: Callable[..., Any], policy: Any
) -> None:
    """Importance sampling, by hand on the client and by name in the service."""
    lp = np.array(logprobs(policy))
    q = lp + np.array([0.3, -0.2, 0.1, 0.0, 0.4, -0.5])
    a = np.array([1.0, -1.0, 0.0, 2.0, 0.5, -0.5])

    def custom(data: Any, current: list[torch.Tensor]) -> Any:
        ratio = torch.exp(current[0] - torch.tensor(q, dtype=torch.float32))
        loss = -(ratio * torch.tensor(a, dtype=torch.float32)).sum()
        return loss, {"custom:mean": float(loss.detach())}

    result = policy.forward_backward_custom(
        [datum(target_tokens=TARGETS)], custom
    ).result()
    assert result.metrics["custom:mean"] == pytest.approx(
        -(np.exp(lp - q) * a).sum(), rel=1e-4
    )
    named = connect().create_lora_training_client(base_model=TINY, rank=4, seed=1)
    named.forward_backward(
        [datum(target_tokens=TARGETS, logprobs=q.tolist(), advantages=a.tolist())],
        "importance_sampling",
    ).result()
    norms = [
        model.optim_step(ADAM).result().metrics["grad_norm:last"]
        for model in (policy, named)
    ]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    np.testing.assert_allclose(logprobs(policy), logprobs(named), atol=1e-3)
    assert np.abs(np.subtract(logprobs(policy), lp)).max() > 0.01


def test_a_custom_loss_from_a_finished_forward_over_candidates(
    policy: Any, table: np.ndarray
) -> None:
    """A distillation loss on [position, candidate] targets, without a second pass."""
    tokens, weights = candidates(3)
    data = [datum(target_tokens=tokens)]
    done = policy.forward(data, "cross_entropy").result()

    def custom(data: Any, current: list[torch.Tensor]) -> Any:
        assert current[0].shape == (6, 3)
        return (torch.tensor(weights) * current[0].square()).sum(), {}

    result = policy.forward_backward_custom(
        data, custom, precomputed_forward=done
    ).result()
    lp = np.take_along_axis(table, tokens, axis=1)
    # The service sees the loss linearised: weights -2 w lp, so its sum is 2 w lp^2.
    expected = (2 * weights * lp**2).sum()
    assert result.metrics["loss:sum"] == pytest.approx(expected, rel=1e-4)
    policy.optim_step(ADAM).result()
