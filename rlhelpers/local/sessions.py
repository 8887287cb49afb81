"""Sessions and the models that clients created in them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from .adapters import LoraSettings
from .engine import Weights
from .futures import Futures, OrderedOperations
from .store import CheckpointRef

# A client beats every 10 seconds. One that was stopped, in a debugger or on a sleeping
# machine, comes back; one that was killed does not, and its models fill the memory.
SILENT_SECONDS = 24 * 3600.0  # after so long a session ends when another one begins
PRESSED_SECONDS = 600.0  # and after so long if a model or session would find no place
MAX_MODELS = 64  # adapters with their optimizers, of all sessions together
MAX_SESSIONS = 256


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
    heard: float = 0.0  # when its client last asked for anything, by the clock


@dataclass(frozen=True)
class Run:
    """What a sampler needs to know of the model whose checkpoint it is."""

    base_model: str
    session_id: str


@dataclass
class Registry:
    """Everything that has a name on the wire.

    ``clock`` gives seconds; the default one stands still while the machine sleeps
    (except on Windows).
    """

    futures: Futures
    clock: Callable[[], float] = time.monotonic
    sessions: dict[str, Session] = field(default_factory=dict)
    models: dict[str, ClientModel] = field(default_factory=dict)
    runs: dict[str, Run] = field(default_factory=dict)  # by run_id

    def open_session(self) -> Session:
        """A new session."""
        session = Session(f"ts-{uuid.uuid4().hex}", heard=self.clock())
        self.sessions[session.session_id] = session
        return session

    def session(self, session_id: object) -> Session:
        """The session of that id, whose client has just given a sign of life."""
        if not isinstance(session_id, str) or session_id not in self.sessions:
            raise UnknownName(
                f"session {session_id!r} is not open (it ended, or was silent for too "
                "long): connect again; its training checkpoints are still there"
            )
        session = self.sessions[session_id]
        session.heard = self.clock()
        return session

    def silent(self, seconds: float) -> list[Session]:
        """Sessions not heard of for so long and without work, most silent first."""
        earliest = self.clock() - seconds
        found = [s for s in self.sessions.values() if s.heard <= earliest]
        idle = [s for s in found if not any(m.operations.running for m in self.of(s))]
        return sorted(idle, key=lambda session: session.heard)

    def full(self, *, new_session: bool) -> str | None:
        """What stands in the way of one more model, or session, if anything does."""
        models = sum(model.settings is not None for model in self.models.values())
        if new_session and len(self.sessions) >= MAX_SESSIONS:
            return f"{MAX_SESSIONS} sessions are open: end one"
        if not new_session and models >= MAX_MODELS:
            return f"{MAX_MODELS} models are loaded: unload one, or end a session"
        return None

    def of(self, session: Session) -> list[ClientModel]:
        """The session's models that are still loaded."""
        found = [self.models.get(model_id) for model_id in session.model_ids]
        return [model for model in found if model is not None]

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
        self.runs[model.run_id] = Run(base_model, session.session_id)
        session.model_ids.append(model_id)
        session.base_model = session.base_model or base_model
        return model

    def close_session(self, session_id: str) -> list[ClientModel]:
        """Forget a session with its runs; returns its models that are still loaded."""
        session = self.sessions.pop(session_id)
        loaded = self.of(session)
        for model_id in session.model_ids:
            self.runs.pop(model_id.split(":", 1)[0], None)
            self.models.pop(model_id, None)
        return loaded

    def model(self, model_id: object) -> ClientModel:
        """The model of that id, whose client has just given a sign of life."""
        if not isinstance(model_id, str) or model_id not in self.models:
            raise UnknownName(
                f"model {model_id!r} is not loaded (it was unloaded, or its session "
                "ended or was silent for too long): create it again, or resume from a "
                "training checkpoint"
            )
        model = self.models[model_id]
        self.session(model.session_id)
        return model

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
            run = self.runs[ref.run_id]
            self.session(run.session_id)
            return Weights(run.base_model, ref, session_id)
        raise UnknownName(
            f"sampler {path!r} belongs to no run of this service: sampler checkpoints "
            "go when their session ends"
        )
