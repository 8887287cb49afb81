"""The coverage table of the local service's README, held against the code."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

import rlhelpers.local
from rlhelpers.local import LocalService
from rlhelpers.local.app import TRAINING, TrainingApi
from rlhelpers.local.engine import Engine
from rlhelpers.local.losses import LOSSES
from rlhelpers.local.store import CheckpointStore

README = Path(rlhelpers.local.__file__).with_name("README.md").read_text("utf-8")
ENDPOINTS = dict(re.findall(r"^\| `((?:GET|POST|DELETE) \w+)` \| (\w+)", README, re.M))
REFUSED = (
    {
        f"POST {name}": ("POST", f"{TRAINING}/{name}")
        for name in ("asample", "create_sampling_session", "weight_sync")
    }
    | {
        "GET get_server_capabilities": ("GET", f"{TRAINING}/get_server_capabilities"),
        "POST config": ("POST", f"{TRAINING}/client/config"),
    }
    | {
        f"GET {name}": ("GET", f"{TRAINING}/{name}")
        for name in ("training_runs", "sessions", "samplers", "audit")
    }
)


def test_every_route_is_in_the_table_and_every_supported_row_is_a_route(
    tmp_path: Path,
) -> None:
    store = CheckpointStore(tmp_path)
    routes = TrainingApi(Engine(store, {}), store).routes()
    served = set()
    for route in routes:
        method = next(iter((route.methods or set()) - {"HEAD"}))
        # ".../checkpoints/{checkpoint_id}:promote" is the action promote.
        parts = re.split(r"[/:]", route.path)
        served.add(f"{method} {[part for part in parts if '{' not in part][-1]}")
    supported = {name for name, state in ENDPOINTS.items() if state == "supported"}
    assert served == supported


def test_every_refused_row_is_answered_with_a_message(tmp_path: Path) -> None:
    refused = {name for name, state in ENDPOINTS.items() if state == "refused"}
    assert refused == REFUSED.keys()
    with LocalService(tmp_path) as service:
        origin = service.base_url.removesuffix("/training/v1/serverless")
        for method, path in REFUSED.values():
            answer = httpx.request(
                method, origin + path, headers={"X-API-Key": service.api_key}
            )
            assert answer.status_code == 404
            assert "not supported by the local service" in answer.text


def test_the_losses_and_their_settings_are_the_documented_ones() -> None:
    rows = dict(
        re.findall(r"^\| `(\w+)` \| (none|`[a-z_]+` [\d.]+.*) \|$", README, re.M)
    )
    documented = {
        name: {key: float(value) for key, value in re.findall(r"`(\w+)` ([\d.]+)", row)}
        for name, row in rows.items()
    }
    assert documented == {
        name: dict(loss.defaults or {}) for name, loss in LOSSES.items()
    }


@pytest.mark.parametrize("name", ["dapo", "gspo", "dppo", "reinforce"])
def test_other_losses_are_refused_by_name(name: str) -> None:
    from rlhelpers.local.losses import LossError, get_loss

    with pytest.raises(LossError, match=name):
        get_loss(name)
