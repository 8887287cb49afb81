"""Batched decoding, against one full forward pass per token without any cache."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from rlhelpers.local.decoding import Completion, Decoder, Sequence
from rlhelpers.local.loading import BaseModel
from rlhelpers.local.sampling import SamplingParams

pytest_plugins = ("local_fixtures",)

END = 257
NEVER_ENDS = frozenset({-1})  # an end token that no model can sample
PROMPTS = [
    tuple(range(40, 70)),
    (65,),
    tuple(range(200, 250)) * 3,
    (256, 10, 20, 30),
    tuple(range(90, 40, -1)),
]


def without_end(base: BaseModel) -> BaseModel:
    """The same model, except that no token ends a reply."""
    return replace(base, end_token_ids=NEVER_ENDS)


def decoder(base: BaseModel, rows: int | None = None) -> Decoder:
    """A decoder of the bare base weights."""
    return Decoder(base, lambda key: None, rows=rows)


def fail(error: Exception) -> None:
    """Where no sequence may fail."""
    raise error


def add(
    machine: Decoder,
    done: dict[int, Completion],
    index: int,
    request: tuple[tuple[int, ...], SamplingParams],
) -> None:
    """Queue a request whose completion goes into ``done`` under ``index``."""
    prompt, params = request
    machine.add(
        "base", Sequence(prompt, params, lambda c: done.update({index: c}), fail)
    )


def finish(machine: Decoder) -> None:
    """Step until nothing is left."""
    while machine.has_work:
        machine.step()


def complete(
    machine: Decoder, requests: list[tuple[tuple[int, ...], SamplingParams]]
) -> list[Completion]:
    """All completions, in the order of ``requests``."""
    done: dict[int, Completion] = {}
    for index, request in enumerate(requests):
        add(machine, done, index, request)
    finish(machine)
    return [done[index] for index in range(len(requests))]


@torch.no_grad()
def reference(
    base: BaseModel, prompt: tuple[int, ...], params: SamplingParams
) -> tuple[list[int], list[float]]:
    """Token by token with a full forward pass each; temperature 1 or greedy."""
    ids, logprobs = list(prompt), []
    for uniform in params.uniforms():
        logits = base.sampling(input_ids=torch.tensor([ids])).logits[0, -1]
        scores = logits.double().numpy()
        probabilities = np.exp(scores - scores.max())
        probabilities /= probabilities.sum()
        if params.temperature == 0.0:
            token = int(probabilities.argmax())
        else:
            token = int((probabilities.cumsum() <= uniform).sum())
        ids.append(token)
        logprobs.append(float(np.log(probabilities[token])))
        if token in base.end_token_ids:
            break
    return ids[len(prompt) :], logprobs


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_and_logprobs_are_those_of_a_plain_forward_pass(
    tiny_base: BaseModel, temperature: float
) -> None:
    requests = [
        (prompt, SamplingParams(40, temperature=temperature, seed=index))
        for index, prompt in enumerate(PROMPTS)
    ]
    for request, completion in zip(
        requests, complete(decoder(tiny_base, rows=8), requests), strict=True
    ):
        tokens, logprobs = reference(tiny_base, *request)
        assert completion.tokens == tokens
        np.testing.assert_allclose(completion.logprobs, logprobs, atol=1e-5)
        expected = logprobs if temperature else [0.0] * len(tokens)
        np.testing.assert_allclose(completion.sampling_logprobs, expected, atol=1e-5)


def test_the_cache_grows_over_block_boundaries(tiny_base: BaseModel) -> None:
    base = without_end(tiny_base)
    prompt, params = tuple(range(60)), SamplingParams(140, seed=2)
    (completion,) = complete(decoder(base, rows=2), [(prompt, params)])
    tokens, logprobs = reference(base, prompt, params)
    assert completion.tokens == tokens
    np.testing.assert_allclose(completion.logprobs, logprobs, atol=1e-5)


def test_an_end_token_ends_the_sequence_and_is_part_of_it(
    tiny_base: BaseModel,
) -> None:
    params = SamplingParams(30, seed=4)
    tokens, _ = reference(without_end(tiny_base), PROMPTS[0], params)
    ending = replace(tiny_base, end_token_ids=frozenset({tokens[7]}))
    cut = tokens.index(tokens[7]) + 1
    (completion,) = complete(decoder(ending), [(PROMPTS[0], params)])
    assert completion.tokens == tokens[:cut]
    assert completion.finish_reason == "stop"


def test_max_tokens_is_a_length_stop(tiny_base: BaseModel) -> None:
    base = without_end(tiny_base)
    requests = [(PROMPTS[0], SamplingParams(n, seed=1)) for n in (1, 2, 9)]
    for (_, params), completion in zip(
        requests, complete(decoder(base), requests), strict=True
    ):
        assert len(completion.tokens) == params.max_tokens
        assert len(completion.logprobs) == len(completion.sampling_logprobs)
        assert len(completion.logprobs) == params.max_tokens
        assert completion.finish_reason == "length"


def test_a_stop_in_the_last_allowed_token_is_a_stop(tiny_base: BaseModel) -> None:
    base = without_end(tiny_base)
    tokens, _ = reference(base, PROMPTS[0], SamplingParams(12, seed=4))
    last = next(i for i in range(2, 12) if tokens[i] not in tokens[:i])
    ending = replace(base, end_token_ids=frozenset({tokens[last]}))
    params = SamplingParams(last + 1, seed=4)
    (completion,) = complete(decoder(ending), [(PROMPTS[0], params)])
    assert completion.tokens == tokens[: last + 1]
    assert completion.finish_reason == "stop"


def printable_pair(base: BaseModel) -> tuple[int, list[int], int]:
    """A seed whose text has two ASCII letters in a row, first seen at a position."""
    for seed in range(50):
        tokens, _ = reference(base, PROMPTS[0], SamplingParams(25, seed=seed))
        text = [base.tokenizer.decode([token]) for token in tokens]
        for i in range(3, 24):
            pair = text[i] + text[i + 1]
            both = len(pair) == 2 and pair.isascii() and pair.isalnum()
            if both and "".join(text).index(pair) == len("".join(text[:i])):
                return seed, tokens, i
    raise AssertionError("no seed gives two letters in a row")


def test_a_stop_string_over_two_tokens_ends_the_sequence(tiny_base: BaseModel) -> None:
    base = without_end(tiny_base)
    seed, tokens, at = printable_pair(base)
    stop = base.tokenizer.decode(tokens[at : at + 2])
    params = SamplingParams(25, seed=seed, stop=("no such text", stop))
    (completion,) = complete(decoder(base), [(PROMPTS[0], params)])
    assert completion.tokens == tokens[: at + 2]
    assert completion.finish_reason == "stop"


def test_a_stop_that_ends_in_a_character_of_two_tokens(tiny_base: BaseModel) -> None:
    base = without_end(tiny_base)
    for seed in range(200):
        tokens, _ = reference(base, PROMPTS[0], SamplingParams(40, seed=seed))
        # One byte is one token here, and two bytes can make one character.
        pairs = [base.tokenizer.decode(tokens[i : i + 2]) for i in range(39)]
        found = [i for i, pair in enumerate(pairs) if len(pair) == 1 and pair > "\x7f"]
        if [i for i in found if pairs[i] != "\ufffd"]:
            break
    at = next(i for i in found if pairs[i] != "\ufffd")
    params = SamplingParams(40, seed=seed, stop=(pairs[at],))
    (completion,) = complete(decoder(base), [(PROMPTS[0], params)])
    assert completion.tokens == tokens[: at + 2]
    assert completion.finish_reason == "stop"


def test_the_text_of_a_special_token_is_a_stop_string_too(
    tiny_base: BaseModel,
) -> None:
    """S03: a marker that decoding without special tokens would hide."""
    base = without_end(tiny_base)
    for seed in range(200):
        tokens, _ = reference(base, PROMPTS[1], SamplingParams(30, seed=seed))
        if 256 in tokens[:-1]:
            break
    params = SamplingParams(30, seed=seed, stop=("<|im_start|>",))
    (completion,) = complete(decoder(base), [(PROMPTS[1], params)])
    assert completion.tokens == tokens[: tokens.index(256) + 1]
    assert completion.finish_reason == "stop"


def test_more_sequences_than_rows(tiny_base: BaseModel) -> None:
    # Seeds of which no draw is so close to a boundary that rounding decides it.
    requests = [
        (PROMPTS[i % 5], SamplingParams(3 + i % 11, seed=100 + i)) for i in range(23)
    ]
    completions = complete(decoder(tiny_base, rows=3), requests)
    for request, completion in zip(requests, completions, strict=True):
        assert completion.tokens == reference(tiny_base, *request)[0]


def test_newcomers_join_while_others_are_being_decoded(tiny_base: BaseModel) -> None:
    machine = decoder(tiny_base, rows=4)
    requests = [
        (PROMPTS[i % 5], SamplingParams(5 + 3 * (i % 4), seed=i)) for i in range(12)
    ]
    done: dict[int, Completion] = {}
    for index, request in enumerate(requests):
        add(machine, done, index, request)
        machine.step()
        machine.step()
    finish(machine)
    for index, request in enumerate(requests):
        assert done[index].tokens == reference(tiny_base, *request)[0]


def test_alone_or_among_a_hundred_in_any_order_to_the_last_bit(
    tiny_base: BaseModel,
) -> None:
    base = without_end(tiny_base)
    shuffler = random.Random(5)
    watched = [
        (PROMPTS[0], SamplingParams(24, seed=1)),
        (PROMPTS[2], SamplingParams(70, seed=2, temperature=0.7)),
        (PROMPTS[1], SamplingParams(40, seed=3, temperature=1.3, top_p=0.9)),
    ]
    crowd = [
        (
            tuple(shuffler.randrange(256) for _ in range(shuffler.randint(1, 150))),
            SamplingParams(
                shuffler.choice([1, 4, 20, 90]),
                seed=1000 + i,
                temperature=shuffler.choice([0.0, 1.0, 1.0, 0.8]),
            ),
        )
        for i in range(100)
    ]
    machine = decoder(base)
    alone = [complete(machine, [request])[0] for request in watched]
    for start_in_the_middle in (False, True, True):
        everyone = crowd + watched
        shuffler.shuffle(everyone)
        fresh = decoder(base)
        done: dict[int, Completion] = {}
        for index, request in enumerate(everyone):
            add(fresh, done, index, request)
            if start_in_the_middle and index % 9 == 0:
                fresh.step()
        finish(fresh)
        for request, expected in zip(watched, alone, strict=True):
            assert done[everyone.index(request)] == expected


def test_each_snapshot_is_loaded_for_its_own_sequences(tiny_base: BaseModel) -> None:
    base = without_end(tiny_base)
    head = base.sampling.lm_head.weight
    plain = head.detach().clone()
    factors = {"a": 1.0, "b": -0.5, "c": 0.25}
    loads: list[str] = []

    @torch.no_grad()
    def load(key: str) -> None:
        loads.append(key)
        head.copy_(plain * factors[key])

    machine = Decoder(base, load, rows=4)
    done: dict[tuple[str, int], Completion] = {}
    for index in range(9):
        key = "abc"[index % 3]
        params = SamplingParams(6, seed=index)
        machine.add(
            key,
            Sequence(
                PROMPTS[0], params, lambda c, k=(key, index): done.update({k: c}), fail
            ),
        )
    finish(machine)
    assert loads == ["a", "b", "c"]
    for (key, index), completion in done.items():
        load(key)
        expected, _ = reference(base, PROMPTS[0], SamplingParams(6, seed=index))
        assert completion.tokens == expected
    assert len(done) == 9


def test_a_snapshot_that_waits_gets_its_turn(tiny_base: BaseModel) -> None:
    """Endless arrivals for one snapshot cannot keep another one out."""
    order: list[str] = []
    machine = Decoder(without_end(tiny_base), lambda key: None, rows=4)

    def arrive(key: str) -> None:
        params = SamplingParams(3, seed=len(order))
        machine.add(
            key, Sequence(PROMPTS[1], params, lambda c: order.append(key), fail)
        )

    arrive("a")
    machine.step()
    arrive("b")
    for _ in range(12):
        arrive("a")
        machine.step()
        if "b" in order:
            break
    assert order == ["a", "b"]
    machine.fail_all()
    assert not machine.has_work


def test_weights_that_cannot_be_loaded_fail_their_own_sequences(
    tiny_base: BaseModel,
) -> None:
    """The others go on, before and after, and a later load starts from scratch."""
    base = without_end(tiny_base)
    head = base.sampling.lm_head.weight
    plain = head.detach().clone()
    loads: list[str] = []

    @torch.no_grad()
    def load(key: str) -> None:
        loads.append(key)
        head.zero_()  # what was loaded before is gone in any case
        if key == "broken":
            raise OSError("cannot read it")
        head.copy_(plain)

    machine = Decoder(base, load, rows=4)
    done: dict[tuple[str, int], Completion] = {}
    failed: list[tuple[str, int]] = []
    for index in range(12):
        key = ("good", "broken", "also-good")[index % 3]
        name = (key, index)
        params = SamplingParams(6, seed=index)
        machine.add(
            key,
            Sequence(
                PROMPTS[0],
                params,
                lambda c, n=name: done.update({n: c}),
                lambda error, n=name: failed.append(n),
            ),
        )
    finish(machine)
    assert failed == [("broken", index) for index in (1, 4, 7, 10)]
    assert loads == ["good", "broken", "also-good"]
    machine.add("broken", Sequence(PROMPTS[0], params, fail, lambda e: failed.clear()))
    finish(machine)
    assert not failed
    (again,) = complete_as(machine, "also-good", SamplingParams(6, seed=2))
    assert again == done["also-good", 2]
    for (_, index), completion in done.items():
        expected, _ = reference(base, PROMPTS[0], SamplingParams(6, seed=index))
        assert completion.tokens == expected
    assert len(done) == 8


def complete_as(
    machine: Decoder, snapshot: str, params: SamplingParams
) -> list[Completion]:
    """One completion of a given snapshot."""
    done: list[Completion] = []
    machine.add(snapshot, Sequence(PROMPTS[0], params, done.append, fail))
    finish(machine)
    return done


@pytest.mark.parametrize("length", [1, 6])
@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_weights_that_are_no_numbers_spoil_no_later_snapshot(
    broken: float, length: int, tiny_base: BaseModel
) -> None:
    """What they leave in the rows is beyond what a mask can hide."""
    base = without_end(tiny_base)
    weight = base.sampling.model.layers[0].self_attn.v_proj.weight
    plain = weight.detach().clone()

    @torch.no_grad()
    def load(key: str) -> None:
        weight.copy_(plain)
        if key == "broken":
            weight[0] = broken

    machine = Decoder(base, load, rows=4)
    done: list[Completion] = []
    for _ in range(5):  # more than there are rows, and longer than what follows
        params = SamplingParams(length, seed=0)
        machine.add("broken", Sequence(PROMPTS[2], params, done.append, fail))
    finish(machine)
    assert all(math.isnan(completion.logprobs[0]) for completion in done)
    for seed in range(5):
        params = SamplingParams(6, seed=seed)
        (found,) = complete_as(machine, "good", params)
        expected, _ = reference(base, PROMPTS[0], params)
        assert found.tokens == expected
        assert all(map(math.isfinite, found.logprobs))
