"""Broken, huge, repeated and reordered requests on every route, by seeded chance.

No answer may be a server error, every operation gets a result that blames the request,
nothing is written outside the state folder, and afterwards the service computes what
it computed before.
"""

from __future__ import annotations

import copy
import json
import math
import random
import socket
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from local_helpers import TINY, Wire
from starlette.routing import Match

from rlhelpers.local import LocalService
from rlhelpers.local.app import TrainingApi
from rlhelpers.local.engine import Engine
from rlhelpers.local.store import CheckpointStore

pytest_plugins = ("local_fixtures",)

REQUESTS = 300
JUNK: list[Any] = [
    *(None, True, False, -1, 0, 1, 7, 2**31, 2**63, -(2**70), 10**400),
    *(0.5, -1e308, math.nan, math.inf, "", "x", "7", "x" * 70_000, "\0", "é\ud800"),
    *(
        "../../escaped",
        "/etc/passwd",
        "local/run-x/../../y",
        "accounts/local/models/..",
    ),
    *([], {}, [[]], [None], [{}], {"data": []}, {"": ""}, [[[[[[[]]]]]]], [1] * 3000),
]


@pytest.fixture
def fresh(tiny_folder: Path, tmp_path: Path) -> Iterator[Wire]:
    """A service of the test's own, whose state folder is alone in its parent."""
    with LocalService(tmp_path / "alone" / "state", models={TINY: tiny_folder}) as own:
        wire = Wire(own)
        with wire.http:
            yield wire


class Templates:
    """A request that works for every route, before it is broken."""

    def __init__(self, wire: Wire) -> None:
        self.session = wire.session()
        self.model = wire.model(self.session)
        self.number = 0
        inputs = {
            "target_tokens": {"data": [66, 67], "dtype": "int64", "shape": [2]},
            "weights": {"data": [1.0, -0.5], "dtype": "float32"},
        }
        chunk = {"type": "encoded_text", "tokens": [65, 66]}
        datum = {"model_input": {"chunks": [chunk]}, "loss_fn_inputs": inputs}
        batch = {"data": [datum, datum], "loss_fn": "cross_entropy"}
        forward = {**batch, "loss_fn_config": {"top_k": 2}}
        run = self.model.split(":")[0]
        model = {"model_id": self.model}
        self.operations: dict[str, dict[str, Any]] = {
            "forward": {**model, "forward_input": forward},
            "forward_backward": {**model, "forward_backward_input": batch},
            "optim_step": {**model, "adam_params": {"learning_rate": 1e-3}},
            "save_weights": {**model, "path": "state-1", "overwrite": False},
            "save_weights_for_sampler": {**model, "path": "policy-1"},
            "load_weights": {**model, "path": "state-1", "optimizer": True},
            "load_adapter": {**model, "adapter_path": "accounts/local/models/a"},
        }
        lora = {"rank": 4, "alpha": 32, "seed": 1, "train_mlp": True}
        session = {"session_id": self.session}
        self.others: dict[str, dict[str, Any]] = {
            "create_session": {"tags": ["a"], "user_metadata": {}, "type": "x"},
            "session_heartbeat": session,
            "telemetry": {**session, "events": [{}], "platform": "x"},
            "create_model": {
                **session,
                "model_seq_id": 1,
                "base_model": TINY,
                "lora_config": lora,
            },
            "get_info": model,
            "weights_info": {"tinker_path": f"local/{run}/state-1"},
            "create_sampling_route": {"base_model": TINY},
            "retrieve_future": {"request_id": "none"},
        }
        self.completion: dict[str, Any] = {
            "model": f"accounts/local/trainingSamplers/{TINY}",
            "prompt": [65, 66, 67],
            "max_tokens": 3,
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 5,
            "seed": 1,
            "stop": ["END"],
            "echo": True,
        }
        self.promotion = {"output_model": "accounts/local/models/a", "base_model": TINY}
        sessions = f"/v1/accounts/local/trainingSessions/{self.session}"
        self.promote_path = f"{sessions}/checkpoints/{run}-policy-1:promote"
        self.paths = [
            sessions,
            f"{sessions}/checkpoints?pageSize=2&pageToken=0",
            self.promote_path,
            "/v1/accounts?pageSize=2",
            "/v1/accounts/local/models/none",
            "/training/v1/serverless/api/v1/list_checkpoints",
        ]

    def all(self, wire: Wire) -> list[tuple[str, dict[str, Any]]]:
        """Every address that takes a body, with one that fits it."""
        training = {**self.operations, **self.others, "unload_model": {}}
        return [
            *((f"{wire.training}/{name}", body) for name, body in training.items()),
            (wire.completions, self.completion),
            (wire.root + self.promote_path, self.promotion),
        ]

    def draw(self, dice: random.Random, wire: Wire) -> tuple[str, dict[str, Any]]:
        """An address and a body that fit each other."""
        kind = dice.random()
        if kind < 0.5:
            name = dice.choice(list(self.operations))
            self.number += 1
            body = {**self.operations[name], "seq_id": self.number}
            return f"{wire.training}/{name}", copy.deepcopy(body)
        if kind < 0.75:
            name = dice.choice(list(self.others))
            return f"{wire.training}/{name}", copy.deepcopy(self.others[name])
        if kind < 0.9:
            return wire.completions, copy.deepcopy(self.completion)
        return wire.root + self.promote_path, copy.deepcopy(self.promotion)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container below ``value`` with each of its keys."""
    keys = value if isinstance(value, dict) else range(len(value))
    for key in list(keys):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from places(value[key])


def broken(body: dict[str, Any], dice: random.Random) -> dict[str, Any]:
    """``body`` with one to three things wrong."""
    for _ in range(dice.randint(1, 3)):
        if not (spots := list(places(body))):
            break
        container, key = dice.choice(spots)
        change = dice.random()
        if change < 0.6:
            container[key] = copy.deepcopy(dice.choice(JUNK))
        elif change < 0.8:
            del container[key]
        elif isinstance(container, list):
            container.extend(copy.deepcopy(container))
        else:
            container[dice.choice(["extra", "", "é", "x" * 5000])] = container[key]
    return body


def post(wire: Wire, url: str, body: Any) -> httpx.Response:
    # Plain JSON escapes, so that lone surrogates and NaN reach the service.
    text = json.dumps(body, ensure_ascii=True)
    return wire.http.post(url, content=text.encode())


def checked(answer: httpx.Response) -> dict[str, Any]:
    """The answer's JSON; it has to blame the request for any error."""
    assert answer.status_code < 500, answer.text
    if answer.headers["content-type"].startswith("text/event-stream"):
        assert answer.status_code == 200
        return {}
    found: dict[str, Any] = answer.json()
    if answer.status_code != 200:
        assert found["error"]["message"]
    return found


def fingerprint(wire: Wire) -> tuple[Any, str]:
    """What a new model and the base model compute for fixed inputs."""
    model = wire.model(wire.session())
    data = {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": [65, 66, 67]}]},
        "loss_fn_inputs": {"target_tokens": {"data": [66, 67, 68], "dtype": "int64"}},
    }
    batch = {"data": [data], "loss_fn": "cross_entropy"}
    for number, (name, body) in enumerate(
        [
            ("forward_backward", {"forward_backward_input": batch}),
            ("optim_step", {"adam_params": {"learning_rate": 1e-2}}),
            ("forward", {"forward_input": batch}),
        ]
    ):
        body = {**body, "model_id": model, "seq_id": number + 1}
        result = wire.result(wire.submit(name, body))
    body = {
        "model": f"accounts/local/trainingSamplers/{TINY}",
        "prompt": [65, 66, 67],
        "max_tokens": 20,
        "seed": 5,
    }
    return result, wire.http.post(wire.completions, json=body).text


@pytest.mark.parametrize("seed", range(3))
def test_broken_requests_are_refused_and_change_nothing(
    fresh: Wire, tmp_path: Path, seed: int
) -> None:
    dice = random.Random(seed)
    before = fingerprint(fresh)
    templates = Templates(fresh)
    tickets: set[str] = set()
    for _ in range(REQUESTS):
        url, body = templates.draw(dice, fresh)
        body = broken(body, dice) if dice.random() < 0.8 else body
        for _ in range(dice.choice([1, 1, 1, 2])):  # some are sent twice
            found = checked(post(fresh, url, body))
            tickets |= {str(t) for t in [found.get("request_id")] if t}
    # What waits for a number that was broken away ends with its model.
    for model in (templates.model,):
        tickets.add(fresh.submit("unload_model", {"model_id": model}))
    for ticket in tickets - {"none"}:
        result = fresh.result(ticket)
        assert result.get("category", "user") == "user", result
    assert fingerprint(fresh) == before
    assert [path.name for path in (tmp_path / "alone").iterdir()] == ["state"]
    assert {path.name for path in (tmp_path / "alone" / "state").iterdir()} <= {
        "sessions",
        "checkpoints",
        "promoted",
    }


def test_every_route_has_a_template(fresh: Wire, tmp_path: Path) -> None:
    """Held against the service's own list, so that a new route is fuzzed too."""
    templates = Templates(fresh)
    store = CheckpointStore(tmp_path / "other")
    served = TrainingApi(Engine(store, {}), store).routes()
    posted = {httpx.URL(url).raw_path.decode() for url, _ in templates.all(fresh)}
    asked = {path.partition("?")[0] for path in templates.paths} | posted
    for route in served:
        match = Match.NONE
        for path in posted if "POST" in (route.methods or ()) else asked:
            method = next(iter(route.methods or ()))
            scope = {"type": "http", "path": path, "method": method}
            match = max(match, route.matches(scope)[0], key=lambda m: m.value)
        assert match is Match.FULL, route.path


@pytest.mark.parametrize("kind", ["long list", "long text", "many fields", "deep"])
def test_huge_bodies_are_answered_on_every_route(fresh: Wire, kind: str) -> None:
    """A field of two megabytes beside the others: read in a thread, then refused."""
    before = fingerprint(fresh)
    templates = Templates(fresh)
    huge: Any = {
        "long list": [0.5, -1, None, True] * 100_000,
        "long text": "é" * 1_000_000,
        "many fields": {f"field {n}": {"n": n} for n in range(60_000)},
        "deep": "DEEP",
    }[kind]
    tickets = []
    for number, (url, body) in enumerate(templates.all(fresh)):
        if url.endswith("unload_model"):
            body = {"model_id": fresh.model(fresh.session())}
        text = json.dumps({**body, "seq_id": number + 1, "huge": huge})
        if kind == "deep":
            text = text.replace('"DEEP"', "[" * 400_000 + "]" * 400_000)
        found = checked(fresh.http.post(url, content=text.encode()))
        tickets += [str(t) for t in [found.get("request_id")] if t]
    for ticket in tickets:
        result = fresh.result(ticket)
        assert result.get("category", "user") == "user", result
    assert fingerprint(fresh) == before


@pytest.mark.parametrize("seed", range(2))
def test_every_operation_in_any_order_and_repeated(fresh: Wire, seed: int) -> None:
    """All seven kinds of numbered operation, valid and not, against one at a time."""
    dice = random.Random(seed)
    templates = Templates(fresh)
    model, waited = (fresh.model(fresh.session()) for _ in range(2))
    bodies = []
    for number in range(1, 41):
        name = dice.choice(list(templates.operations))
        body = copy.deepcopy(templates.operations[name])
        if name.startswith("save"):  # a name twice in a run is refused, both times
            body["path"] = dice.choice(["state-1", f"state-{number}", "State_1"])
        if dice.random() < 0.3:
            body = broken(body, dice)
        bodies.append((name, {**body, "seq_id": number}))

    def send(to: str, name: str, body: dict[str, Any]) -> str:
        text = json.dumps({**body, "model_id": to})
        answer = fresh.http.post(f"{fresh.training}/{name}", content=text)
        return str(checked(answer)["request_id"])

    def told(to: str, ticket: str) -> str:
        return json.dumps(fresh.result(ticket)).replace(to.split(":")[0], "run")

    expected = [told(waited, send(waited, name, body)) for name, body in bodies]
    shuffled = [pair for pair in bodies for _ in range(dice.randint(1, 3))]
    dice.shuffle(shuffled)
    tickets: dict[int, set[str]] = {}
    for name, body in shuffled:
        tickets.setdefault(body["seq_id"], set()).add(send(model, name, body))
    assert all(len(found) == 1 for found in tickets.values())
    found = [told(model, next(iter(tickets[n]))) for n in range(1, 41)]
    assert found == expected
    assert any("loss:sum" in text for text in found)


def test_operations_in_any_order_and_repeated_give_one_result(fresh: Wire) -> None:
    """Sixty passes and steps, shuffled and sent up to three times each."""
    model, waited = (fresh.model(fresh.session()) for _ in range(2))
    chunks = [{"type": "encoded_text", "tokens": [65, 66]}]
    bodies = []
    for number in range(1, 61):
        if number % 3 == 0:
            body: dict[str, Any] = {"adam_params": {"learning_rate": 1e-2}}
        else:
            inputs = {"target_tokens": {"data": [number, 67], "dtype": "int64"}}
            datum = {"model_input": {"chunks": chunks}, "loss_fn_inputs": inputs}
            batch = {"data": [datum], "loss_fn": "cross_entropy"}
            body = {"forward_backward_input": batch}
        bodies.append({**body, "seq_id": number})

    def send(to: str, body: dict[str, Any]) -> str:
        name = "optim_step" if "adam_params" in body else "forward_backward"
        return fresh.submit(name, {**body, "model_id": to})

    expected = [fresh.result(send(waited, body)) for body in bodies]
    shuffled = bodies * 3
    random.Random(4).shuffle(shuffled)
    tickets: dict[int, set[str]] = {}
    for body in shuffled:
        tickets.setdefault(body["seq_id"], set()).add(send(model, body))
    assert all(len(found) == 1 for found in tickets.values())
    results = [fresh.result(next(iter(tickets[n]))) for n in range(1, 61)]
    assert results == expected


@pytest.mark.parametrize("seed", range(2))
def test_broken_addresses_are_refused(fresh: Wire, tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    before = fingerprint(fresh)
    paths = Templates(fresh).paths
    escapes = [
        "..",
        "%2e%2e%2f",
        "%00",
        "%ff",
        "ts-x",
        "a" * 5000,
        "{}",
        "run-x-..",
        "",
    ]
    for _ in range(REQUESTS):
        path, _, query = dice.choice(paths).partition("?")
        parts = path.split("/")
        parts[dice.randrange(1, len(parts))] = dice.choice(escapes)
        if dice.random() < 0.5:
            junk = str(dice.choice(JUNK)).encode("utf-8", "replace")[:3000]
            query = f"pageSize={urllib.parse.quote(junk)}"
        method = dice.choice(["GET", "POST", "DELETE", "PUT", "PATCH", "HEAD"])
        url = httpx.URL(f"{fresh.root}{'/'.join(parts)}?{query}")
        answer = fresh.http.request(method, url, content=b"{}")
        assert answer.status_code < 500, (method, url, answer.text)
    assert fingerprint(fresh) == before
    assert [path.name for path in (tmp_path / "alone").iterdir()] == ["state"]


def test_broken_http_and_clients_that_hang_up(
    fresh: Wire, caplog: pytest.LogCaptureFixture
) -> None:
    before = fingerprint(fresh)
    url = httpx.URL(f"{fresh.training}/create_session")
    key = fresh.http.headers["X-API-Key"]
    head = f"POST {url.path} HTTP/1.1\r\nHost: x\r\nX-API-Key: {key}\r\n"
    for text in (
        "nonsense\r\n\r\n",
        "GET / HTTP/9.9\r\n\r\n",
        f"{head}Content-Length: nine\r\n\r\n{{}}",
        f"{head}Content-Length: -1\r\n\r\n{{}}",
        f"{head}Content-Length: 9{'0' * 20}\r\n\r\n{{}}",
        f"{head}Content-Length: 500\r\n\r\n{{",  # and no more
        f"{head}Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        f"{head}Transfer-Encoding: chunked\r\n\r\n5\r\n{{",
        f"{head}X-Long: {'x' * 100_000}\r\n\r\n",
        "\0" * 1000,
    ):
        with socket.create_connection((url.host, url.port), timeout=10) as connection:
            connection.sendall(text.encode())
            connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(2000)
        assert not answer.startswith((b"HTTP/1.1 5", b"HTTP/1.1 2")), text[:80]
    assert fingerprint(fresh) == before
    assert not [r for r in caplog.records if r.exc_info], "a traceback was logged"


def test_a_client_that_leaves_does_not_stop_its_neighbours(fresh: Wire) -> None:
    body = {
        "model": f"accounts/local/trainingSamplers/{TINY}",
        "prompt": [65],
        "max_tokens": 300,
        "stop": ["no such text"],
    }
    expected = fingerprint(fresh)
    for seed in range(4):
        with pytest.raises(httpx.ReadTimeout):
            fresh.http.post(
                fresh.completions, json={**body, "seed": seed}, timeout=0.001
            )
    assert fingerprint(fresh) == expected
