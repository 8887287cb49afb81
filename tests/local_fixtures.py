"""Fixtures of the local service's tests: tiny models, and a running service."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from local_helpers import OTHER, TINY, Wire, write_tiny_model

from rlhelpers.local import LocalService
from rlhelpers.local.loading import BaseModel, load_base_model


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with tied embeddings that most tests use."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def untied_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same shape with an output layer of its own."""
    folder = tmp_path_factory.mktemp("models") / "untied"
    return write_tiny_model(folder, seed=1, tied=False)


@pytest.fixture
def tiny_base(tiny_folder: Path) -> BaseModel:
    """A freshly loaded tiny model; tests may change its weights."""
    return load_base_model(TINY, {TINY: tiny_folder}, "cpu")


@pytest.fixture(scope="module")
def service(
    tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalService]:
    """A running service that knows the tiny model under two names."""
    folders = {TINY: tiny_folder, OTHER: tiny_folder}
    with (
        pytest.MonkeyPatch.context() as patch,
        LocalService(tmp_path_factory.mktemp("state"), models=folders) as running,
    ):
        patch.setenv("NO_PROXY", "127.0.0.1,localhost")
        yield running


@pytest.fixture
def wire(service: LocalService) -> Iterator[Wire]:
    """Raw HTTP to the module's service."""
    client = Wire(service)
    with client.http:
        yield client
        for session in client.sessions:  # or their models would fill the service
            client.end_session(session)


@pytest.fixture
def connect(service: LocalService) -> Iterator[Callable[..., Any]]:
    """Open SDK connections, to the module's service or another, closed at the end."""
    from fireworks.training.sdk import FiretitanServiceClient

    opened: list[FiretitanServiceClient] = []

    def open_client(to: LocalService = service) -> FiretitanServiceClient:
        client = FiretitanServiceClient(base_url=to.base_url, api_key=to.api_key)
        opened.append(client)
        return client

    yield open_client
    for client in opened:
        client.close()


@pytest.fixture
def client(connect: Callable[..., Any]) -> Any:
    """One SDK connection."""
    return connect()
