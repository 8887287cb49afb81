"""The wire routes: what the Fireworks training SDK sends, and what it gets back.

Three trees on one origin: training operations, completions, and the few calls of the
control plane that the serverless path uses. A field or an endpoint that the service
does not support is refused by name, never ignored. Bad training data are reported
through the operation's future: a rejected submission would disable the SDK's client.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .adapters import LoraSettings
from .batches import MAX_TARGETS, TrainingDatum, parse_data
from .decoding import Completion
from .engine import Engine, LoadedModel, ServiceClosed
from .futures import Futures, Operation, Result, UnknownFuture, outcome
from .loading import UnknownModel
from .losses import resolve_config
from .promotion import PromotedModel, load_promoted, parse_row_id, promote, row_id
from .sampling import SamplingParams
from .sessions import ClientModel, Registry, UnknownName
from .store import ACCOUNT, CheckpointInfo, CheckpointRef, CheckpointStore
from .trainer import AdamSettings, PassResult

PREFIX = "/training/v1/serverless"
TRAINING = f"{PREFIX}/api/v1"
MAX_BODY_BYTES = 256 * 1024 * 1024

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]
logger = logging.getLogger(__name__)


class Refused(ValueError):
    """A request that is answered with an HTTP error."""

    def __init__(self, message: str, status: int = 400, code: str = "bad_request"):
        super().__init__(message)
        self.status = status
        self.code = code


class TrainingApi:
    """The handlers, over one engine and one registry of names."""

    def __init__(self, engine: Engine, store: CheckpointStore) -> None:
        self.engine = engine
        self.store = store
        self.futures = Futures()
        self.registry = Registry(self.futures)
        self._tasks: set[asyncio.Task[None]] = set()

    def routes(self) -> list[Route]:
        """Every route that the service answers."""
        post: dict[str, Callable[[dict[str, Any]], Awaitable[Result]]] = {
            "create_session": self.create_session,
            "session_heartbeat": self.session_heartbeat,
            "telemetry": self.telemetry,
            "create_model": self.create_model,
            "get_info": self.get_info,
            "unload_model": self.unload_model,
            "weights_info": self.weights_info,
            "forward": self.forward,
            "forward_backward": self.forward_backward,
            "optim_step": self.optim_step,
            "save_weights": self.save_weights,
            "save_weights_for_sampler": self.save_weights_for_sampler,
            "load_weights": self.load_weights,
            "load_adapter": self.load_adapter,
            "retrieve_future": self.retrieve_future,
            "create_sampling_route": self.create_sampling_route,
        }
        session = f"/v1/accounts/{ACCOUNT}/trainingSessions/{{session_id}}"
        return [
            *(
                Route(f"{TRAINING}/{name}", _json_handler(handler), methods=["POST"])
                for name, handler in post.items()
            ),
            Route(
                f"{PREFIX}/inference/v1/completions",
                self.completions,
                methods=["POST"],
            ),
            Route(
                f"{TRAINING}/list_checkpoints",
                self.training_checkpoints,
                methods=["GET"],
            ),
            Route("/v1/accounts", self.accounts, methods=["GET"]),
            Route(session, _refusals(self.delete_session), methods=["DELETE"]),
            Route(
                f"{session}/checkpoints", _refusals(self.checkpoints), methods=["GET"]
            ),
            Route(
                f"{session}/checkpoints/{{checkpoint_id}}:promote",
                _refusals(self.promote),
                methods=["POST"],
            ),
        ]

    def close(self) -> None:
        """End every session, and with it its sampler checkpoints."""
        for session_id in self.registry.sessions:
            self.store.close_session(session_id)

    # --- sessions and models ---------------------------------------------------

    async def create_session(self, body: dict[str, Any]) -> Result:
        """Open a session; tags and metadata are the client's own business."""
        session = self.registry.open_session()
        self.store.open_session(session.session_id)
        return {"type": "create_session", "session_id": session.session_id}

    async def session_heartbeat(self, body: dict[str, Any]) -> Result:
        """Nothing expires here, so a heartbeat changes nothing."""
        self.registry.session(body.get("session_id"))
        return {"type": "session_heartbeat"}

    async def telemetry(self, body: dict[str, Any]) -> Result:
        """Accepted and dropped: nothing about the client leaves the machine."""
        return {"status": "accepted"}

    async def create_model(self, body: dict[str, Any]) -> Result:
        """Load the base model and attach a new LoRA adapter, or none (reference)."""
        _only(
            body,
            "session_id",
            "model_seq_id",
            "base_model",
            "lora_config",
            "base_only",
            "user_metadata",
        )
        session = self.registry.session(body.get("session_id"))
        number = _integer(body, "model_seq_id")
        if number in session.created:
            return {"request_id": session.created[number]}
        base_model = body.get("base_model")
        if not isinstance(base_model, str):
            raise Refused(f"base_model must be a name, got {base_model!r}")
        settings = _lora_settings(body)

        async def create() -> Result:
            loading = self.engine.call(lambda: self.engine.model(base_model))
            loaded = await asyncio.wrap_future(loading)
            if session.session_id not in self.registry.sessions:
                raise Refused("the session has ended: connect again")
            model = self.registry.add_model(session, base_model, settings, number)
            if settings is None:
                return {"type": "create_model", "model_id": model.model_id}
            try:
                await self._compute(
                    lambda: loaded.trainer.create(model.model_id, settings)
                )
            except BaseException:
                self.registry.models.pop(model.model_id, None)
                raise
            return {"type": "create_model", "model_id": model.model_id}

        session.created[number] = self._start(create)
        return {"request_id": session.created[number]}

    async def get_info(self, body: dict[str, Any]) -> Result:
        """What the client may want to know of a model."""
        model = self.registry.model(body.get("model_id"))
        return {
            "type": "get_info",
            "model_id": model.model_id,
            "is_lora": model.settings is not None,
            "lora_rank": model.settings.rank if model.settings else None,
            "model_data": {
                "model_name": model.base_model,
                "tokenizer_id": model.base_model,
            },
        }

    async def unload_model(self, body: dict[str, Any]) -> Result:
        """Free a model after its last operation; its checkpoints stay."""
        model = self.registry.model(body.get("model_id"))

        async def unload() -> Result:
            await self._unload(model)
            self.registry.models.pop(model.model_id, None)
            return {"type": "unload_model", "model_id": model.model_id}

        ticket = model.operations.finish(unload)
        return {"request_id": ticket, "model_id": model.model_id}

    async def weights_info(self, body: dict[str, Any]) -> Result:
        """What a client must know to create a model that fits a checkpoint."""
        manifest = self.store.describe(CheckpointRef.parse(body.get("tinker_path")))
        lora = manifest["lora"]
        return {
            "base_model": manifest["base_model"],
            "is_lora": True,
            "lora_rank": lora["rank"],
            "train_attn": lora["train_attn"],
            "train_mlp": lora["train_mlp"],
            "train_unembed": lora["train_unembed"],
        }

    # --- operations, in the order of their seq_id ------------------------------

    async def forward(self, body: dict[str, Any]) -> Result:
        """Log-probabilities without gradients."""
        return self._pass(body, "forward_input", backward=False)

    async def forward_backward(self, body: dict[str, Any]) -> Result:
        """Log-probabilities, and gradients added to those not yet applied."""
        return self._pass(body, "forward_backward_input", backward=True)

    def _pass(self, body: dict[str, Any], key: str, *, backward: bool) -> Result:
        model = self.registry.model(body.get("model_id"))

        def compute() -> Result:
            _only(body, "model_id", "seq_id", key)
            request = body.get(key)
            if not isinstance(request, Mapping):
                raise Refused(f"{key} must be an object")
            _only(request, "data", "loss_fn", "loss_fn_config")
            loaded = self._loaded(model)
            # `forward` ignores the loss; its name still says which tensors to expect.
            loss_fn = str(request.get("loss_fn"))
            wanted = request.get("loss_fn_config")
            data = parse_data(request.get("data"), loss_fn, loaded.limits)
            top_k = 0
            if not backward and isinstance(wanted, Mapping) and "top_k" in wanted:
                top_k = _top_k(wanted["top_k"], data, loaded.base.vocab_size)
                wanted = {k: v for k, v in wanted.items() if k != "top_k"}
            config = resolve_config(loss_fn, wanted)
            trainer = loaded.trainer
            if model.settings is None:
                result = trainer.run_base(data, loss_fn, config, top_k=top_k)
            else:
                result = trainer.run(
                    model.model_id,
                    data,
                    loss_fn,
                    config,
                    backward=backward,
                    top_k=top_k,
                )
            return {
                "loss_fn_output_type": f"{loss_fn}_output",
                "loss_fn_outputs": _pass_outputs(data, result, top_k),
                "metrics": result.metrics,
            }

        return self._submit(model, body, compute, reference_too=not backward)

    async def optim_step(self, body: dict[str, Any]) -> Result:
        """One AdamW step."""
        model = self.registry.model(body.get("model_id"))

        def compute() -> Result:
            _only(
                body,
                "model_id",
                "seq_id",
                "adam_params",
                "grad_accumulation_normalization",
            )
            adam = _adam_settings(body.get("adam_params"))
            normalization = body.get("grad_accumulation_normalization") or "none"
            if normalization not in ("none", "num_sequences", "num_loss_tokens"):
                raise Refused(
                    f"grad_accumulation_normalization {normalization!r} is unknown: "
                    "use none, num_sequences or num_loss_tokens"
                )
            trainer = self._loaded(model).trainer
            metrics = trainer.optim_step(model.model_id, adam, normalization)
            return {"metrics": metrics}

        return self._submit(model, body, compute)

    async def save_weights(self, body: dict[str, Any]) -> Result:
        """A training checkpoint: weights and optimizer, to resume from."""
        model = self.registry.model(body.get("model_id"))

        def compute() -> Result:
            _only(body, "model_id", "seq_id", "path", "overwrite")
            if body.get("overwrite"):
                raise Refused("overwrite is not supported: choose another name")
            ref = CheckpointRef.parse(body.get("path"), own_run=model.run_id)
            trainer = self._loaded(model).trainer
            self.store.save(
                "training",
                model.session_id,
                ref,
                model.base_model,
                trainer.weights(model.model_id),
                trainer.optimizer_state(model.model_id),
            )
            return {"type": "save_weights", "path": ref.path}

        return self._submit(model, body, compute)

    async def save_weights_for_sampler(self, body: dict[str, Any]) -> Result:
        """A sampler checkpoint: the weights as they are now, for this session."""
        model = self.registry.model(body.get("model_id"))

        def compute() -> Result:
            _only(body, "model_id", "seq_id", "path", "checkpoint_type", "metadata")
            if body.get("checkpoint_type") not in (None, "base"):
                raise Refused(
                    f"checkpoint_type {body['checkpoint_type']!r} is not supported: "
                    "the local service saves LoRA adapters ('base')"
                )
            ref = CheckpointRef.parse(body.get("path"), own_run=model.run_id)
            weights = self._loaded(model).trainer.weights(model.model_id)
            self.store.save("sampler", model.session_id, ref, model.base_model, weights)
            return {"type": "save_weights_for_sampler", "path": ref.path}

        return self._submit(model, body, compute)

    async def load_weights(self, body: dict[str, Any]) -> Result:
        """Continue from a training checkpoint, with or without its optimizer."""
        model = self.registry.model(body.get("model_id"))

        def compute() -> Result:
            _only(body, "model_id", "seq_id", "path", "optimizer")
            ref = CheckpointRef.parse(body.get("path"), own_run=model.run_id)
            checkpoint = self.store.load("training", ref)
            if checkpoint.base_model != model.base_model:
                raise Refused(
                    f"checkpoint {ref.path} belongs to base model "
                    f"{checkpoint.base_model!r}, this model to {model.base_model!r}: "
                    "another base model means a new run"
                )
            state = checkpoint.optimizer_state if body.get("optimizer") else None
            trainer = self._loaded(model).trainer
            trainer.load(model.model_id, checkpoint.weights, state)
            return {"type": "load_weights", "path": ref.path}

        return self._submit(model, body, compute)

    async def load_adapter(self, body: dict[str, Any]) -> Result:
        """Continue from a promoted model: its weights, with a fresh optimizer."""
        model = self.registry.model(body.get("model_id"))

        def compute() -> Result:
            _only(body, "model_id", "seq_id", "adapter_path")
            path = body.get("adapter_path")
            weights = load_promoted(self.store, path, model.base_model)
            self._loaded(model).trainer.load(model.model_id, weights, None)
            return {
                "type": "load_adapter",
                "model_id": model.model_id,
                "adapter_path": path,
            }

        return self._submit(model, body, compute)

    async def retrieve_future(self, body: dict[str, Any]) -> Result:
        """The result of an operation; waits for it a while."""
        ticket = body.get("request_id")
        try:
            return await self.futures.wait(str(ticket))
        except UnknownFuture:
            raise UnknownName(f"no operation with request_id {ticket!r}") from None

    # --- sampling --------------------------------------------------------------

    async def create_sampling_route(self, body: dict[str, Any]) -> Result:
        """Nothing to set up: every sampler of this process can be reached."""
        _only(body, "training_run", "base_model")
        return {}

    async def completions(self, request: Request) -> Response:
        """Sample one completion; the whole answer comes as one event."""
        try:
            body = await _read_object(request)
            weights = self.registry.weights(body.get("model"))
            params = _sampling_params(body)
            sampled = self.engine.sample(weights, body.get("prompt"), params)
            completion = await asyncio.wrap_future(sampled)
            known = completion.prompt_logprobs + completion.logprobs
            if not all(map(math.isfinite, known)):
                raise Refused(
                    "the model's probabilities are not finite: its training has "
                    "diverged; go back to a checkpoint and lower the learning rate"
                )
        except (ValueError, UnknownName) as error:
            # 404 would make the SDK wait 50 s for the model to appear.
            return _error(str(error), getattr(error, "status", 400))
        except ServiceClosed as error:
            return _error(str(error), 503, "closed")
        event = json.dumps(_completion_event(completion, body["prompt"]))
        return Response(
            f"data: {event}\n\ndata: [DONE]\n\n",
            media_type="text/event-stream",
            # The SDK's pool slows down badly with many idle connections.
            headers={"Connection": "close"},
        )

    # --- control plane ---------------------------------------------------------

    async def accounts(self, request: Request) -> Response:
        """The single account that the key belongs to."""
        return JSONResponse({"accounts": [{"name": f"accounts/{ACCOUNT}"}]})

    async def delete_session(self, request: Request) -> Response:
        """End a session: its models and sampler checkpoints go."""
        session_id = request.path_params["session_id"]
        self.registry.session(session_id)
        for model in self.registry.close_session(session_id):
            await model.operations.abort("the session has ended: connect again")
            await self._unload(model)
        self.store.close_session(session_id)
        return JSONResponse({})

    async def training_checkpoints(self, request: Request) -> Response:
        """Training checkpoints of every run, oldest first, as loadable references."""
        found = await asyncio.to_thread(self.store.listing)
        paths = [info.ref.path for info in found if info.kind == "training"]
        return JSONResponse({"checkpoints": paths})

    async def checkpoints(self, request: Request) -> Response:
        """Both kinds of checkpoint of a session, oldest first, in pages."""
        session_id = request.path_params["session_id"]
        size = _query_integer(request, "pageSize", default=200, least=1)
        start = _query_integer(request, "pageToken", default=0)
        found = await asyncio.to_thread(self.store.listing, session_id=session_id)
        if not found:
            self.registry.session(session_id)
        page = found[start : start + size]
        rows = [_checkpoint_row(info) for info in page]
        answer: Result = {"trainingSessionCheckpoints": rows}
        if start + size < len(found):
            answer["nextPageToken"] = str(start + size)
        return JSONResponse(answer)

    async def promote(self, request: Request) -> Response:
        """Make a sampler checkpoint a model of its own: a PEFT adapter folder."""
        body = await _read_object(request)
        _only(body, "output_model", "base_model")
        ref = parse_row_id(request.path_params["checkpoint_id"])
        promoted = await asyncio.to_thread(
            promote,
            self.store,
            request.path_params["session_id"],
            ref,
            body.get("output_model"),
            body.get("base_model"),
        )
        return JSONResponse({"model": _model_row(promoted)})

    # --- helpers ---------------------------------------------------------------

    def _loaded(self, model: ClientModel) -> LoadedModel:
        return self.engine.model(model.base_model)

    async def _unload(self, model: ClientModel) -> None:
        if model.settings is None:
            return
        await self._compute(lambda: self._loaded(model).trainer.unload(model.model_id))

    async def _compute(self, operation: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self.engine.call(operation))

    def _submit(
        self,
        model: ClientModel,
        body: dict[str, Any],
        compute: Callable[[], Result],
        *,
        reference_too: bool = False,
    ) -> Result:
        """Queue an operation of ``model`` and answer with its ticket."""
        seq_id = _integer(body, "seq_id", least=1)
        runs = model.settings is not None or reference_too
        operation = compute if runs else _refuse_on_reference
        ticket = model.operations.submit(seq_id, lambda: self._compute(operation))
        return {"request_id": ticket, "model_id": model.model_id}

    def _start(self, operation: Operation) -> str:
        """Run an operation that has no number, and return its ticket."""
        ticket = self.futures.open()

        async def run() -> None:
            self.futures.settle(ticket, await outcome(operation))

        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return ticket


class Guard:
    """In front of every route: the key, and a limit on the size of a body."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._key = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if not self._admits(headers):
            refusal = _error("the API key is missing or wrong", 401, "unauthorized")
            await refusal(scope, receive, send)
            return
        try:
            declared = int(headers.get(b"content-length", b"0"))
        except ValueError:
            declared = MAX_BODY_BYTES + 1
        if declared > MAX_BODY_BYTES:
            await _too_large()(scope, receive, send)
            return
        received = 0

        async def limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > MAX_BODY_BYTES:
                raise Refused(_TOO_LARGE, 413, "too_large")
            return message

        await self._app(scope, limited, send)

    def _admits(self, headers: Mapping[bytes, bytes]) -> bool:
        offered = [
            headers.get(b"x-api-key", b""),
            headers.get(b"authorization", b"").removeprefix(b"Bearer "),
        ]
        return any(hmac.compare_digest(key, self._key) for key in offered)


def build_app(api: TrainingApi, api_key: str) -> ASGIApp:
    """The service as an ASGI application."""
    app = Starlette(
        routes=api.routes(),
        exception_handlers={
            404: _not_supported,
            405: _wrong_method,
            Exception: _internal_error,
        },
    )
    return Guard(app, api_key)


def _json_handler(handler: Callable[[dict[str, Any]], Awaitable[Result]]) -> Handler:
    """A route from a function of the body."""

    async def handle(request: Request) -> Response:
        return JSONResponse(await handler(await _read_object(request)))

    return _refusals(handle)


def _refusals(handler: Handler) -> Handler:
    """``handler`` with its errors as HTTP errors."""

    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except (UnknownName, UnknownModel) as error:
            return _error(str(error), 404, "not_found")
        except ServiceClosed as error:
            return _error(str(error), 503, "closed")
        except Refused as error:
            return _error(str(error), error.status, error.code)
        except ValueError as error:
            return _error(str(error), 400)

    return handle


async def _read_object(request: Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.body())
    except RecursionError:
        raise Refused("the body is nested too deeply") from None
    except ClientDisconnect:
        raise Refused("the client hung up before the body's end") from None
    except UnicodeDecodeError as error:
        raise Refused(f"the body is not UTF-8: {error}") from None
    if not isinstance(body, dict):
        raise Refused("the body must be a JSON object")
    return body


def _only(body: Mapping[str, Any], *known: str) -> None:
    """Refuse fields that the service would otherwise silently drop."""
    surplus = sorted(
        key
        for key, value in body.items()
        if key not in (*known, "type") and value is not None
    )
    if surplus:
        raise Refused(f"fields {surplus} are not supported by the local service")


def _integer(body: Mapping[str, Any], name: str, least: int = 0) -> int:
    value = body.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise Refused(f"{name} must be an integer from {least} up, got {value!r}")
    return value


def _query_integer(request: Request, name: str, default: int, least: int = 0) -> int:
    text = request.query_params.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 10) or int(text) < least:
        raise Refused(f"{name} must be an integer from {least} up, got {text!r}")
    return int(text)


def _number(body: Mapping[str, Any], name: str, default: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Refused(f"{name} must be a number, got {value!r}")
    try:
        number = float(value)
    except OverflowError:  # an integer beyond the range of floats
        number = math.inf
    if not math.isfinite(number):
        raise Refused(f"{name} must be finite, got {number}")
    return number


def _lora_settings(body: Mapping[str, Any]) -> LoraSettings | None:
    """The adapter that ``create_model`` asks for; ``None`` for a reference model."""
    lora = body.get("lora_config")
    if body.get("base_only") is True and lora is None:
        return None
    if not isinstance(lora, Mapping) or body.get("base_only"):
        raise Refused(
            "create_model needs either a lora_config (the local service trains LoRA "
            "adapters only) or base_only true (a reference model), and not both"
        )
    return LoraSettings.from_wire(lora)


def _refuse_on_reference() -> Result:
    raise Refused(
        "a reference model is the bare base model and answers forward only: create a "
        "LoRA training client to train, save or load"
    )


def _top_k(raw: Any, data: Sequence[TrainingDatum], vocab_size: int) -> int:
    """How many tokens of each position ``forward`` shall list."""
    number = not isinstance(raw, bool) and isinstance(raw, int | float)
    if not number or not 1 <= raw <= vocab_size or raw != int(raw):
        raise Refused(f"top_k must be an integer from 1 to {vocab_size}, got {raw!r}")
    values = sum(len(datum) for datum in data) * int(raw)
    if values > MAX_TARGETS:
        raise Refused(
            f"top_k {int(raw)} gives {values} values, more than {MAX_TARGETS}: lower "
            "it or send fewer datums"
        )
    return int(raw)


def _adam_settings(raw: Any) -> AdamSettings:
    if not isinstance(raw, Mapping):
        raise Refused("adam_params must be an object")
    names = AdamSettings.__dataclass_fields__
    _only(raw, *names, "emit_grad_norm_metrics")
    defaults = AdamSettings()
    adam = AdamSettings(
        **{name: _number(raw, name, getattr(defaults, name)) for name in names}
    )
    if adam.learning_rate < 0 or adam.eps < 0 or adam.weight_decay < 0:
        raise Refused("learning_rate, eps and weight_decay must not be negative")
    if not (0 <= adam.beta1 < 1 and 0 <= adam.beta2 < 1):
        raise Refused(f"beta1 and beta2 must be in [0, 1), got {adam}")
    return adam


def _sampling_params(body: Mapping[str, Any]) -> SamplingParams:
    _only(
        body,
        "model",
        "prompt",
        "n",
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "seed",
        "stop",
        "stream",
        "raw_output",
        "logprobs",
        "perf_metrics_in_response",
        "echo",
    )
    if body.get("n") not in (None, 1):
        raise Refused(f"n must be 1, got {body['n']!r}: send one request per sample")
    if not isinstance(body.get("prompt"), list):
        raise Refused("prompt must be a list of token ids")
    stop = body.get("stop") or []
    if not isinstance(stop, list) or not all(isinstance(s, str) and s for s in stop):
        raise Refused(f"stop must be a list of non-empty strings, got {stop!r}")
    if body.get("echo") not in (None, True, False):
        raise Refused(f"echo must be true or false, got {body['echo']!r}")
    seed = body.get("seed")
    return SamplingParams(
        max_tokens=_integer(body, "max_tokens", least=1),
        temperature=_number(body, "temperature", 1.0),
        top_p=_number(body, "top_p", 1.0),
        top_k=_integer({"top_k": body.get("top_k") or 0}, "top_k"),
        seed=None if seed is None else _integer(body, "seed"),
        stop=tuple(stop),
        echo=bool(body.get("echo")),
    )


def _completion_event(completion: Completion, prompt: list[int]) -> Result:
    # With `echo` tokens and log-probabilities start with the prompt's.
    echoed = prompt if completion.prompt_logprobs else []
    content = [
        {"token_id": token, "logprob": raw, "sampling_logprob": None}
        for token, raw in zip(echoed, completion.prompt_logprobs, strict=True)
    ] + [
        {"token_id": token, "logprob": raw, "sampling_logprob": sampled}
        for token, raw, sampled in zip(
            completion.tokens,
            completion.logprobs,
            completion.sampling_logprobs,
            strict=True,
        )
    ]
    return {
        "choices": [
            {
                "index": 0,
                "text": "",
                "finish_reason": completion.finish_reason,
                "raw_output": {"completion_token_ids": echoed + completion.tokens},
                "logprobs": {"content": content},
            }
        ],
        "usage": {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(completion.tokens),
            "total_tokens": len(prompt) + len(completion.tokens),
        },
        # Without it the SDK warns and keeps its window of parallel requests small.
        "perf_metrics": {"prefill-queue-duration": 0},
    }


def _checkpoint_row(info: CheckpointInfo) -> Result:
    session = f"accounts/{ACCOUNT}/trainingSessions/{info.session_id}"
    purpose = "INFERENCE" if info.kind == "sampler" else "TRAINING"
    created = datetime.fromtimestamp(info.created, UTC)
    return {
        "name": f"{session}/checkpoints/{row_id(info.ref)}",
        "checkpointType": f"CHECKPOINT_TYPE_{purpose}_LORA",
        "promotable": info.kind == "sampler",
        "createTime": created.isoformat().replace("+00:00", "Z"),
        "baseModel": info.base_model,
        "sizeBytes": info.size,
        "path": info.ref.path,
    }


def _model_row(promoted: PromotedModel) -> Result:
    return {
        "name": promoted.name,
        "state": "READY",
        "kind": "HF_PEFT_ADDON",
        "peftDetails": {
            "baseModel": promoted.base_model,
            "r": promoted.rank,
            "targetModules": promoted.target_modules,
        },
        "localFolder": str(promoted.folder.resolve()),
    }


def _pass_outputs(
    data: Sequence[TrainingDatum], result: PassResult, top_k: int
) -> list[Result]:
    outputs = [
        {"logprobs": _tensor(values, list(datum.targets.shape))}
        for datum, values in zip(data, result.logprobs, strict=True)
    ]
    for output, datum, best in zip(outputs, data, result.top_k, strict=False):
        shape = [len(datum), top_k]
        output["top_k_logprobs"] = _tensor(best.logprobs, shape)
        output["top_k_indices"] = {**_tensor(best.tokens, shape), "dtype": "int64"}
    return outputs


def _tensor(values: Sequence[float], shape: list[int]) -> Result:
    return {"data": values, "dtype": "float32", "shape": shape}


def _error(message: str, status: int, code: str = "bad_request") -> JSONResponse:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse(
        {"error": {"message": message, "code": code, "type": kind}}, status
    )


_TOO_LARGE = f"the body is larger than {MAX_BODY_BYTES} bytes"


def _too_large() -> JSONResponse:
    return _error(_TOO_LARGE, 413, "too_large")


async def _not_supported(request: Request, error: Exception) -> Response:
    return _error(
        f"{request.method} {request.url.path} is not supported by the local service",
        404,
        "not_supported",
    )


async def _wrong_method(request: Request, error: Exception) -> Response:
    allowed = (getattr(error, "headers", None) or {}).get("Allow", "another method")
    answer = _error(
        f"{request.url.path} takes {allowed}, not {request.method}",
        405,
        "method_not_allowed",
    )
    answer.headers["Allow"] = allowed
    return answer


async def _internal_error(request: Request, error: Exception) -> Response:
    return _error(f"{type(error).__name__}: {error}", 500, "internal")
