"""What the local service keeps is bounded, and gone sessions are released.

Each bound of the README's "What it keeps" is lowered here and then reached.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from local_helpers import OTHER, TINY, Wire

from rlhelpers.local import LocalService, app, bodies, decoding, engine, futures
from rlhelpers.local import sessions as sessions_module
from rlhelpers.local.decoding import Completion, Decoder, Sequence
from rlhelpers.local.futures import Futures, OrderedOperations, QueueFull, UnknownFuture
from rlhelpers.local.loading import BaseModel
from rlhelpers.local.sampling import SamplingParams
from rlhelpers.local.store import CheckpointStore

pytest_plugins = ("local_fixtures",)

PROMPT = tuple(range(40, 60))


@pytest.fixture
def own(tiny_folder: Path, tmp_path: Path) -> Iterator[LocalService]:
    """A service of the test's own."""
    models = {TINY: tiny_folder, OTHER: tiny_folder}
    with LocalService(tmp_path / "state", models=models) as running:
        yield running


@pytest.fixture
def own_wire(own: LocalService) -> Iterator[Wire]:
    client = Wire(own)
    with client.http:
        yield client


def api(service: LocalService) -> app.TrainingApi:
    assert service._api is not None
    return service._api


def pass_body(model: str, number: int, loss_fn: str = "cross_entropy") -> Any:
    data = {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": [65, 66, 67]}]},
        "loss_fn_inputs": {"target_tokens": {"data": [66, 67, 68], "dtype": "int64"}},
    }
    batch = {"data": [data], "loss_fn": loss_fn}
    return {"model_id": model, "seq_id": number, "forward_backward_input": batch}


def completion(model: str, **changes: Any) -> dict[str, Any]:
    return {"model": model, "prompt": list(PROMPT), "max_tokens": 3, **changes}


# -- results ----------------------------------------------------------------------


async def settled(kept: Futures, *texts: bytes) -> list[str]:
    tickets = [kept.open() for _ in texts]
    for ticket, text in zip(tickets, texts, strict=True):
        kept.settle(ticket, text)
    return tickets


async def readable(kept: Futures, tickets: list[str]) -> list[bool]:
    """Which results are there, without reading them."""
    return [ticket in kept._unread or ticket in kept._read for ticket in tickets]


async def test_results_that_were_read_make_room_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(futures, "KEPT_RESULTS", 3)
    kept = Futures()
    tickets = await settled(kept, b"0", b"1", b"2")
    assert await kept.wait(tickets[1]) == b"1"
    assert await kept.wait(tickets[1]) == b"1"  # again: a poll may have been lost
    tickets += await settled(kept, b"3")
    assert await readable(kept, tickets) == [True, False, True, True]
    tickets += await settled(kept, b"4")
    assert await readable(kept, tickets) == [False, False, True, True, True]
    with pytest.raises(UnknownFuture):
        await kept.wait(tickets[0])
    assert await kept.wait(tickets[2]) == b"2"


async def test_the_text_of_results_is_bounded_and_the_newest_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(futures, "KEPT_BYTES", 10)
    kept = Futures()
    tickets = await settled(kept, b"4444", b"4444", b"22")
    assert await readable(kept, tickets) == [True, True, True]
    tickets += await settled(kept, b"1")
    assert await readable(kept, tickets) == [False, True, True, True]
    tickets += await settled(kept, b"x" * 50)
    assert await readable(kept, tickets) == [False] * 4 + [True]
    assert await kept.wait(tickets[4]) == b"x" * 50


async def test_whoever_waits_gets_a_result_that_is_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(futures, "KEPT_RESULTS", 1)
    kept = Futures()
    first, second = kept.open(), kept.open()
    polls = [asyncio.create_task(kept.wait(ticket)) for ticket in (first, second)]
    await asyncio.sleep(0)
    kept.settle(first, b"first")
    kept.settle(second, b"second")
    assert await asyncio.gather(*polls) == [b"first", b"second"]


def test_a_dropped_result_is_named_to_the_client(
    own_wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(futures, "KEPT_RESULTS", 2)
    model = own_wire.model(own_wire.session())
    tickets = [
        own_wire.submit("forward_backward", pass_body(model, n)) for n in range(1, 5)
    ]
    assert "loss:sum" in str(own_wire.result(tickets[3]))
    answer = own_wire.post("retrieve_future", {"request_id": tickets[0]})
    assert answer.status_code == 404
    assert "its result was dropped" in answer.text


# -- operations that wait ---------------------------------------------------------


async def test_a_queue_that_waits_for_a_number_is_bounded_and_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(futures, "MAX_EARLY", 2)
    kept = Futures()
    operations = OrderedOperations(kept)
    order: list[int] = []

    def operation(number: int) -> futures.Operation:
        async def run() -> futures.Result:
            order.append(number)
            return {"number": number}

        return run

    early = [operations.submit(n, operation(n)) for n in (3, 2)]
    with pytest.raises(QueueFull, match="2 for number 1, which has not come"):
        operations.submit(4, operation(4))
    assert operations.submit(3, operation(3)) == early[0]  # a repetition is welcome
    operations.submit(1, operation(1))  # the number that the others wait for
    assert json.loads(await kept.wait(early[0])) == {"number": 3}
    last = operations.submit(4, operation(4))
    assert json.loads(await kept.wait(last)) == {"number": 4}
    assert order == [1, 2, 3, 4]


async def test_a_queue_that_runs_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futures, "MAX_QUEUED", 2)
    kept = Futures()
    operations = OrderedOperations(kept)
    go = asyncio.Event()

    async def wait() -> futures.Result:
        await go.wait()
        return {}

    tickets = [operations.submit(n, wait) for n in (1, 2)]
    assert operations.running
    with pytest.raises(QueueFull, match="2 operations of this model wait to run"):
        operations.submit(3, wait)
    go.set()
    await kept.wait(tickets[1])
    await asyncio.sleep(0)
    assert not operations.running
    await kept.wait(operations.submit(3, wait))


def test_a_full_queue_asks_the_client_to_come_back(
    own_wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(futures, "MAX_EARLY", 1)
    model = own_wire.model(own_wire.session())
    early = own_wire.submit("forward_backward", pass_body(model, 2))
    answer = own_wire.post("forward_backward", pass_body(model, 3))
    assert answer.status_code == 429
    assert answer.json()["error"]["code"] == "queue_full"
    own_wire.submit("forward_backward", pass_body(model, 1))
    assert "loss:sum" in str(own_wire.result(early))
    again = own_wire.submit("forward_backward", pass_body(model, 3))
    assert "loss:sum" in str(own_wire.result(again))


@pytest.mark.parametrize("loss_fn", ["cross_entropy", "no-such-loss"])
def test_an_idle_service_keeps_no_request(own_wire: Wire, loss_fn: str) -> None:
    length = 123_457
    model = own_wire.model(own_wire.session())
    text = json.dumps(pass_body(model, 1, loss_fn))
    marked = text.replace('"seq_id"', f'"junk": [{"0," * (length - 1)}0], "seq_id"')
    answer = own_wire.http.post(f"{own_wire.training}/forward_backward", content=marked)
    assert "['junk']" in str(own_wire.result(str(answer.json()["request_id"])))
    gc.collect()
    left = [x for x in gc.get_objects() if type(x) is list and len(x) == length]
    assert not left


# -- sessions and models ----------------------------------------------------------


class Clock:
    """A clock that stands still until it is set forward."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(own: LocalService) -> Clock:
    """In place of the service's own."""
    found = Clock()
    api(own).registry.clock = found
    return found


def test_a_session_silent_for_a_day_ends_when_another_begins(
    own: LocalService, own_wire: Wire, clock: Clock
) -> None:
    gone, alive = own_wire.session(), own_wire.session()
    models = [own_wire.model(session) for session in (gone, alive)]
    saves = [
        own_wire.submit("save_weights", {"model_id": m, "seq_id": 1, "path": "state-1"})
        for m in models
    ]
    paths = [str(own_wire.result(ticket)["path"]) for ticket in saves]
    policy = {"model_id": models[0], "seq_id": 2, "path": "policy-1"}
    own_wire.result(own_wire.submit("save_weights_for_sampler", policy))
    folder = own.state_dir / "sessions"

    clock.now = app.SILENT_SECONDS - 1
    own_wire.session()
    assert {gone, alive} < {path.name for path in folder.iterdir()}
    assert own_wire.post("session_heartbeat", {"session_id": alive}).status_code == 200
    clock.now += 1
    third = own_wire.session()  # the one opened a second ago is still there
    left = {path.name for path in folder.iterdir()}
    assert gone not in left
    assert {alive, third} < left

    answer = own_wire.post("get_info", {"model_id": models[0]})
    assert answer.status_code == 404
    assert "silent for too long" in answer.text
    assert "resume from a training checkpoint" in answer.text
    answer = own_wire.post("session_heartbeat", {"session_id": gone})
    assert "silent for too long" in answer.text
    trainer = engine_of(own)._loaded[TINY].trainer
    assert list(trainer._adapters) == [models[1]]

    # What it saved for good is there, for whoever comes back.
    resumed = own_wire.model(third)
    load = {"model_id": resumed, "seq_id": 1, "path": paths[0], "optimizer": True}
    loaded = own_wire.result(own_wire.submit("load_weights", load))
    assert loaded["path"] == paths[0]


def engine_of(service: LocalService) -> engine.Engine:
    assert service._engine is not None
    return service._engine


@pytest.mark.parametrize("sign", ["heartbeat", "operation", "sampling", "by-run"])
def test_a_sign_of_life_keeps_a_session(
    own_wire: Wire, clock: Clock, sign: str
) -> None:
    session = own_wire.session()
    model = own_wire.model(session)
    policy = {"model_id": model, "seq_id": 1, "path": "policy-1"}
    path = own_wire.result(own_wire.submit("save_weights_for_sampler", policy))["path"]
    clock.now = app.SILENT_SECONDS
    if sign == "heartbeat":
        own_wire.post("session_heartbeat", {"session_id": session})
    elif sign == "operation":
        own_wire.result(own_wire.submit("forward_backward", pass_body(model, 2)))
    else:
        kind = "trainingSamplers"
        if sign == "sampling":
            kind = f"trainingSessions/{session}"
        sampler = f"accounts/local/{kind}/checkpoints/{path}"
        answer = own_wire.http.post(own_wire.completions, json=completion(sampler))
        assert answer.status_code == 200, answer.text
    own_wire.session()
    assert own_wire.post("get_info", {"model_id": model}).status_code == 200


def test_a_full_service_refuses_a_model_until_a_client_falls_silent(
    own_wire: Wire, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions_module, "MAX_MODELS", 2)
    bare, first, second = (own_wire.session() for _ in range(3))
    model, _ = own_wire.model(first), own_wire.model(second)
    lora = {"base_model": TINY, "lora_config": {"rank": 4}}

    def create(number: int) -> dict[str, object]:
        body = {"session_id": second, "model_seq_id": number, **lora}
        return own_wire.result(own_wire.submit("create_model", body))

    refused = create(1)
    assert "2 models are loaded: unload one, or end a session" in str(refused["error"])
    assert refused["category"] == "user"
    reference = {
        "session_id": second,
        "model_seq_id": 2,
        "base_model": TINY,
        "base_only": True,  # needs no memory of its own
    }
    created = own_wire.result(own_wire.submit("create_model", reference))
    assert "model_id" in created
    clock.now = app.PRESSED_SECONDS
    assert "model_id" in create(3)
    assert own_wire.post("get_info", {"model_id": model}).status_code == 404
    # To end the session without a model would have helped nobody.
    assert own_wire.post("session_heartbeat", {"session_id": bare}).status_code == 200
    # The second session was heard of just now, so nobody is left to make room.
    assert "2 models are loaded" in str(create(4)["error"])
    unload = own_wire.submit("unload_model", {"model_id": str(create(3)["model_id"])})
    own_wire.result(unload)
    assert "model_id" in create(5)


def test_a_full_service_refuses_a_session_until_a_client_falls_silent(
    own_wire: Wire, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions_module, "MAX_SESSIONS", 2)
    first, second = own_wire.session(), own_wire.session()
    answer = own_wire.post("create_session", {})
    assert answer.status_code == 429
    assert "2 sessions are open: end one" in answer.text
    clock.now = 1.0
    own_wire.post("session_heartbeat", {"session_id": first})
    clock.now = app.PRESSED_SECONDS + 1
    third = own_wire.session()  # only the most silent one has to go
    states = [
        own_wire.post("session_heartbeat", {"session_id": session}).status_code
        for session in (first, second, third)
    ]
    assert states == [200, 404, 200]


def test_a_session_at_work_is_not_silent(own: LocalService, own_wire: Wire) -> None:
    registry = api(own).registry
    session = own_wire.session()
    model = own_wire.model(session)
    assert [s.session_id for s in registry.silent(0.0)] == [session]
    go = asyncio.Event()

    async def work() -> futures.Result:
        await go.wait()
        return {}

    async def look() -> tuple[list[Any], list[Any]]:
        operations = OrderedOperations(Futures())
        registry.models[model].operations = operations
        operations.submit(1, work)
        during = registry.silent(0.0)
        go.set()
        await asyncio.wait(operations._tasks)
        await asyncio.sleep(0)  # for what is to be done when they end
        return during, registry.silent(0.0)

    during, after = asyncio.run(look())
    assert during == []
    assert [s.session_id for s in after] == [session]


def test_models_come_and_go_without_a_trace(own: LocalService, own_wire: Wire) -> None:
    """Unloaded one by one, or with their session."""

    def tensors() -> int:
        gc.collect()
        return sum(
            type(x).__name__ in ("Tensor", "Parameter") for x in gc.get_objects()
        )

    def round_trip() -> None:
        session = own_wire.session()
        for number in range(3):
            model = own_wire.model(session, number)
            own_wire.result(own_wire.submit("forward_backward", pass_body(model, 1)))
            step = {"model_id": model, "seq_id": 2, "adam_params": {}}
            own_wire.result(own_wire.submit("optim_step", step))
            if number:
                ticket = own_wire.submit("unload_model", {"model_id": model})
                own_wire.result(ticket)
        assert own_wire.end_session(session).status_code == 200

    round_trip()
    before = tensors()
    for _ in range(5):
        round_trip()
    assert tensors() == before
    registry = api(own).registry
    assert not registry.sessions
    assert not registry.models
    assert not registry.runs
    assert not engine_of(own)._loaded[TINY].trainer.has_models


def test_idle_base_models_are_forgotten_and_come_back(
    own: LocalService, own_wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "MAX_BASE_MODELS", 1)

    def sample(base: str) -> str:
        body = completion(f"accounts/local/trainingSamplers/{base}", seed=1)
        answer = own_wire.http.post(own_wire.completions, json=body)
        assert answer.status_code == 200
        return answer.text

    loaded = engine_of(own)._loaded
    first = sample(TINY)
    assert sample(OTHER) == first  # the same files under another name
    assert list(loaded) == [OTHER]
    model = own_wire.model(own_wire.session(), base_model=OTHER)
    assert sample(TINY) == first
    assert set(loaded) == {OTHER, TINY}  # one that is trained stays
    own_wire.result(own_wire.submit("unload_model", {"model_id": model}))
    assert sample(OTHER) == first
    assert set(loaded) == {OTHER, TINY}  # until another one is loaded


def test_a_snapshot_is_remembered_as_long_as_sequences_wait_for_it(
    own: LocalService, own_wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = own_wire.session()
    model = own_wire.model(session)
    samplers = []
    for number in range(1, 7):
        body = {"model_id": model, "seq_id": number, "path": f"policy-{number}"}
        ticket = own_wire.submit("save_weights_for_sampler", body)
        path = own_wire.result(ticket)["path"]
        samplers.append(f"accounts/local/trainingSessions/{session}/checkpoints/{path}")

    def sample(sampler: str) -> str:
        body = completion(sampler, seed=1, max_tokens=100, stop=["no such text"])
        answer = own_wire.http.post(own_wire.completions, json=body)
        assert answer.status_code == 200, answer.text
        return answer.text

    with ThreadPoolExecutor(6) as pool:
        expected = list(pool.map(sample, samplers))
        snapshots = engine_of(own)._loaded[TINY].snapshots
        assert len(snapshots) == 6
        monkeypatch.setattr(engine, "MAX_SNAPSHOTS", 1)
        assert list(pool.map(sample, samplers)) == expected
    assert sample(samplers[0]) == expected[0]
    assert len(snapshots) == 1


# -- decoding ---------------------------------------------------------------------


def fail(error: Exception) -> None:
    raise error


def decode(
    base: BaseModel, requests: list[tuple[str, int]]
) -> tuple[list[Completion], int]:
    """Completions of (snapshot, seed), all asked for at once; and the most tiles."""
    machine = Decoder(base, lambda key: None)
    done: dict[int, Completion] = {}
    for index, (snapshot, seed) in enumerate(requests):

        def keep(completion: Completion, index: int = index) -> None:
            done[index] = completion

        limit = 10 if index < len(requests) // 2 else 80  # rows of 64, then of 128
        params = SamplingParams(limit, seed=seed)
        machine.add(snapshot, Sequence((*PROMPT, seed % 256), params, keep, fail))
    most = 0
    while machine.has_work:
        machine.step()
        most = max(most, len(machine._tiles))
    return [done[index] for index in range(len(requests))], most


def test_rows_beyond_the_memory_wait_and_get_the_same_tokens(
    tiny_base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [("ab"[seed % 2], seed) for seed in range(300)]
    roomy, most = decode(tiny_base, requests)
    assert most == 2  # one for the short rows of a snapshot, one for the long ones
    monkeypatch.setattr(decoding, "TILE_BYTES", 1)
    assert decode(tiny_base, requests) == (roomy, 1)


def test_waiting_rows_keep_no_other_snapshot_out(tiny_base: BaseModel) -> None:
    machine = Decoder(tiny_base, lambda key: None, rows=4)
    order: list[str] = []
    for key in "aaaaaaaaaaaab":
        params = SamplingParams(3, seed=1)
        machine.add(
            key, Sequence(PROMPT, params, lambda c, k=key: order.append(k), fail)
        )
    while machine.has_work:
        machine.step()
    assert "".join(order) == "aaaabaaaaaaaa"


def test_who_waits_joins_as_soon_as_a_row_is_free(tiny_base: BaseModel) -> None:
    machine = Decoder(tiny_base, lambda key: None, rows=4)
    order: list[str] = []
    # Greedy, this model ends none of these replies before the limit.
    for name, limit in (("a", 9), ("b", 9), ("c", 9), ("d", 2), ("e", 2), ("f", 2)):
        params = SamplingParams(limit, seed=1, temperature=0.0)
        machine.add(
            "s", Sequence(PROMPT, params, lambda c, n=name: order.append(n), fail)
        )
    passes = 0
    while machine.has_work:
        machine.step()
        passes += 1
        assert len(machine._tiles) == 1
    assert "".join(order) == "defabc"
    assert passes == 8  # the first token comes with the prompt


def test_a_tile_for_longer_rows_takes_the_place_of_an_idle_one(
    tiny_base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Decoder(tiny_base, lambda key: None, rows=4)
    done: list[Completion] = []
    # Two layers, two heads of 8 numbers of 4 bytes, keys and values: 256 a position.
    monkeypatch.setattr(decoding, "TILE_BYTES", 256 * 4 * 256 + 1)
    for longest in (64, 128, 256):
        params = SamplingParams(longest - len(PROMPT), seed=1, stop=("no such text",))
        machine.add("a", Sequence(PROMPT, params, done.append, fail))
        while machine.has_work:
            machine.step()
    assert len(done) == 3
    assert [tile.size for tile in machine._tiles] == [256 * 4 * 256]


def test_prompts_kept_for_their_siblings_are_bounded(
    tiny_base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Decoder(tiny_base, lambda key: None)
    machine._load("a")
    one = 256 * len(PROMPT)  # bytes a position, see above
    monkeypatch.setattr(decoding, "PREFIX_BYTES", 3 * one)
    prompts = [(n, *PROMPT[1:]) for n in range(5)]
    for prompt in prompts:
        assert machine._prefix(prompt).size == one
    assert list(machine._prefixes) == prompts[2:]
    machine._prefix(prompts[2])  # used again, so the next to go is another
    machine._prefix(PROMPT * 2)
    assert list(machine._prefixes) == [prompts[2], PROMPT * 2]
    machine._prefix(PROMPT * 10)  # larger than all may be: it stays alone
    assert list(machine._prefixes) == [PROMPT * 10]
    monkeypatch.setattr(decoding, "PREFIX_CACHE_SIZE", 1)
    machine._prefix(prompts[0])
    assert list(machine._prefixes) == [prompts[0]]


# -- on disk ----------------------------------------------------------------------


def test_a_mark_that_nobody_renews_ends_a_session(tmp_path: Path) -> None:
    """The process number in it may by then be another process's."""
    session = f"ts-{'0' * 32}"
    store = CheckpointStore(tmp_path)
    store.open_session(session)
    owner = tmp_path / "sessions" / session / "owner.json"
    now = time.time()
    os.utime(owner, (now, now - 25 * 3600))
    CheckpointStore(tmp_path)
    assert owner.exists()  # a machine that slept, say
    store.mark_session(session)
    assert owner.stat().st_mtime > now - 60
    os.utime(owner, (now, now - 1800))
    store.mark_session(session)
    assert owner.stat().st_mtime < now - 1700  # not on every heartbeat
    os.utime(owner, (now, now - 31 * 24 * 3600))
    CheckpointStore(tmp_path)
    assert not owner.exists()
    store.mark_session(session)  # nothing to renew is no error


# -- the event loop ---------------------------------------------------------------


NUMBERS = [0.1, -7, 1e300, 2**70, 0, True, None] * 20_000


async def test_a_large_body_is_read_beside_the_loop_number_by_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only between calls of Python does the reading thread let others go on."""
    threads: list[int] = []
    read_whole = bodies._whole

    def watched(digits: str) -> int:
        threads.append(threading.get_ident())
        return read_whole(digits)

    monkeypatch.setattr(bodies, "_whole", watched)
    value = {"data": [{"tokens": NUMBERS, "name": "é"}, {}], "n": 1}
    assert await bodies.read_json(json.dumps(value).encode()) == value
    assert len(threads) == 3 * 20_000 + 1
    assert set(threads) != {threading.get_ident()}
    threads.clear()
    assert await bodies.read_json(b'{"n": 1}') == {"n": 1}  # not worth a thread
    assert threads == []


async def test_a_large_result_is_formed_beside_the_loop_in_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[int] = []
    sizes: list[int] = []
    form_pieces = bodies._pieces

    def watched(value: Any) -> Iterator[str]:
        threads.append(threading.get_ident())
        for piece in form_pieces(value):
            sizes.append(len(piece))
            yield piece

    monkeypatch.setattr(bodies, "_pieces", watched)
    outputs = [{"logprobs": {"data": NUMBERS, "dtype": "float32"}} for _ in range(3)]
    result = {"loss_fn_outputs": outputs, "metrics": {"loss:sum": 1.5}, "none": []}
    text = await bodies.form_json(result)
    assert text == json.dumps(result, separators=(",", ":")).encode()
    assert set(threads) != {threading.get_ident()}
    assert max(sizes) < 30 * bodies.PIECE  # at most 24 characters a number
    assert sum(sizes) >= len(text)
    threads.clear()
    assert await bodies.form_json({"n": 1}) == b'{"n":1}'
    assert threads == []


async def test_large_bodies_that_are_no_json_are_refused_as_small_ones_are() -> None:
    padding = " " * bodies.LARGE_BODY
    for text in ("", "{", "[1,]", "9" * 5000, '{"a": 1e}', '"\ud800'):
        with pytest.raises(ValueError):
            await bodies.read_json((padding + text).encode())
    with pytest.raises(ValueError):
        await bodies.read_json(padding.encode() + b'"\xff"')
    with pytest.raises(RecursionError):
        await bodies.read_json((padding + "[" * 100_000).encode())
    for value in (float("nan"), float("inf")):
        data = [0.0] * bodies.LARGE_RESULT + [value]
        with pytest.raises(ValueError):
            await bodies.form_json({"loss_fn_outputs": [{"a": {"data": data}}]})
