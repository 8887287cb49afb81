"""Sessions and the models that clients created in them."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field

from .adapters import LoraSettings
from .engine import Weights
from .futures import Futures, OrderedOperations
from .store import CheckpointRef


class UnknownName(LookupError):
    """A session, model or sampler that this service does not have."""


@dataclass
class ClientModel:
    """What one client trains, a LoRA adapter, or refers to, the bare base model."""

    model_id: str
    session_id: str
    base_model: str
    settings: LoraSettings | None  # None: the bare base model, as a reference
    operations: OrderedOperations

    @property
    def run_id(self) -> str:
        """The run that its checkpoints are filed under."""
        return self.model_id.split(":", 1)[0]


@dataclass
class Session:
    """One connection of the SDK."""

    session_id: str
    base_model: str | None = None
    model_ids: list[str] = field(default_factory=list)
    created: dict[int, str] = field(default_factory=dict)  # model_seq_id → ticket


@dataclass
class Registry:
    """Everything that has a name on the wire."""

    futures: Futures
    sessions: dict[str, Session] = field(default_factory=dict)
    models: dict[str, ClientModel] = field(default_factory=dict)
    runs: dict[str, str] = field(default_factory=dict)  # run_id → its base model

    def open_session(self) -> Session:
        """A new session."""
        session = Session(f"ts-{uuid.uuid4().hex}")
        self.sessions[session.session_id] = session
        return session

    def session(self, session_id: object) -> Session:
        """The session of that id."""
        if not isinstance(session_id, str) or session_id not in self.sessions:
            raise UnknownName(f"session {session_id!r} is not open: connect again")
        return self.sessions[session_id]

    def add_model(
        self,
        session: Session,
        base_model: str,
        settings: LoraSettings | None,
        number: int,
    ) -> ClientModel:
        """Register a new model under a run id of its own; a reference has no run."""
        name = uuid.uuid4().hex
        model_id = f"run-{name}:train:{number}" if settings else f"base-{name}"
        model = ClientModel(
            model_id,
            session.session_id,
            base_model,
            settings,
            OrderedOperations(self.futures),
        )
        self.models[model_id] = model
        self.runs[model.run_id] = base_model
        session.model_ids.append(model_id)
        session.base_model = session.base_model or base_model
        return model

    def close_session(self, session_id: str) -> list[ClientModel]:
        """Forget a session with its runs; returns its models that are still loaded."""
        session = self.sessions.pop(session_id)
        for model_id in session.model_ids:
            self.runs.pop(model_id.split(":", 1)[0], None)
        found = [self.models.pop(model_id, None) for model_id in session.model_ids]
        return [model for model in found if model is not None]

    def model(self, model_id: object) -> ClientModel:
        """The model of that id."""
        if not isinstance(model_id, str) or model_id not in self.models:
            raise UnknownName(f"model {model_id!r} is not loaded: create it again")
        return self.models[model_id]

    def weights(self, sampler: object) -> Weights:
        """What a completion request's ``model`` stands for.

        Four forms: a checkpoint of a session, a checkpoint of any run, a session's
        base model, and a base model by name.
        """
        parts = sampler.split("/") if isinstance(sampler, str) else []
        match parts:
            case ["accounts", _, "trainingSessions", session_id, "checkpoints", *ref]:
                session = self.session(session_id)
                return self._checkpoint("/".join(ref), session.session_id)
            case ["accounts", _, "trainingSamplers", "checkpoints", *ref]:
                return self._checkpoint("/".join(ref), None)
            case ["accounts", _, "trainingSessions", session_id]:
                base = self.session(session_id).base_model
                if base is None:
                    raise UnknownName(
                        f"session {session_id!r} has no model yet: create a training "
                        "client first, then sample from its base model"
                    )
                return Weights(base)
            case ["accounts", _, "trainingSamplers", *base_parts] if base_parts:
                return Weights("/".join(base_parts))
        raise UnknownName(f"model {sampler!r} is no sampler of this service")

    def _checkpoint(self, path: str, session_id: str | None) -> Weights:
        ref = CheckpointRef.parse(path)
        if ref.run_id in self.runs:
            return Weights(self.runs[ref.run_id], ref, session_id)
        raise UnknownName(
            f"sampler {path!r} belongs to no run of this service: sampler checkpoints "
            "go when their session ends"
        )
