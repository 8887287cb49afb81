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
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .answers import (
    checkpoint_row,
    completion_event,
    error_response,
    model_row,
    pass_outputs,
)
from .batches import parse_data
from .engine import Engine, LoadedModel, ServiceClosed
from .futures import (
    Futures,
    Operation,
    QueueFull,
    Result,
    UnknownFuture,
    outcome,
)
from .loading import UnknownModel
from .losses import resolve_config
from .parsing import (
    Refused,
    adam_settings,
    lora_settings,
    query_integer,
    read_integer,
    read_object,
    read_top_k,
    refuse_surplus,
    sampling_params,
)
from .promotion import find_promoted, load_promoted, parse_row_id, promote
from .sessions import (
    PRESSED_SECONDS,
    SILENT_SECONDS,
    ClientModel,
    Registry,
    UnknownName,
)
from .store import ACCOUNT, CheckpointRef, CheckpointStore

PREFIX = "/training/v1/serverless"
TRAINING = f"{PREFIX}/api/v1"
MAX_BODY_BYTES = 256 * 1024 * 1024

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]


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
        post: dict[str, Callable[[dict[str, Any]], Awaitable[Result | bytes]]] = {
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
            Route(
                "/v1/accounts/{account}/models/{model_id}",
                _refusals(self.model_entry),
                methods=["GET"],
            ),
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
        self.registry.sessions.clear()

    # --- sessions and models ---------------------------------------------------

    async def create_session(self, body: dict[str, Any]) -> Result:
        """Open a session; tags and metadata are the client's own business."""
        refuse_surplus(body, "tags", "user_metadata", "sdk_version")
        await self._make_room(new_session=True)
        session = self.registry.open_session()
        await asyncio.to_thread(self.store.open_session, session.session_id)
        return {"type": "create_session", "session_id": session.session_id}

    async def session_heartbeat(self, body: dict[str, Any]) -> Result:
        """The client lives, and with it its session."""
        session = self.registry.session(body.get("session_id"))
        self.store.mark_session(session.session_id)
        return {"type": "session_heartbeat"}

    async def telemetry(self, body: dict[str, Any]) -> Result:
        """Accepted and dropped: nothing about the client leaves the machine."""
        return {"status": "accepted"}

    async def create_model(self, body: dict[str, Any]) -> Result:
        """Load the base model and attach a new LoRA adapter, or none (reference)."""
        refuse_surplus(
            body,
            "session_id",
            "model_seq_id",
            "base_model",
            "lora_config",
            "base_only",
            "user_metadata",
        )
        session = self.registry.session(body.get("session_id"))
        number = read_integer(body, "model_seq_id")
        if number in session.created:
            return {"request_id": session.created[number]}
        base_model = body.get("base_model")
        if not isinstance(base_model, str):
            raise Refused(f"base_model must be a name, got {base_model!r}")
        settings = lora_settings(body)

        async def create() -> Result:
            await self._compute(lambda: self.engine.model(base_model))
            if settings is not None:
                await self._make_room(new_session=False)
            if session.session_id not in self.registry.sessions:
                raise Refused("the session has ended: connect again")
            model = self.registry.add_model(session, base_model, settings, number)
            if settings is None:
                return {"type": "create_model", "model_id": model.model_id}
            try:
                await self._compute(
                    lambda: self._loaded(model).trainer.create(model.model_id, settings)
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
        ref = CheckpointRef.parse(body.get("tinker_path"))
        manifest = await asyncio.to_thread(self.store.describe, ref)
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
            refuse_surplus(body, "model_id", "seq_id", key)
            request = body.get(key)
            if not isinstance(request, dict):
                raise Refused(f"{key} must be an object")
            refuse_surplus(request, "data", "loss_fn", "loss_fn_config")
            loaded = self._loaded(model)
            # `forward` ignores the loss; its name still says which tensors to expect.
            loss_fn = str(request.get("loss_fn"))
            wanted = request.get("loss_fn_config")
            # Taken out, so that its lists of numbers need not outlive their tensors.
            data = parse_data(request.pop("data", None), loss_fn, loaded.limits)
            top_k = 0
            if not backward and isinstance(wanted, Mapping) and "top_k" in wanted:
                top_k = read_top_k(wanted["top_k"], data, loaded.base.vocab_size)
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
                "loss_fn_outputs": pass_outputs(data, result, top_k),
                "metrics": result.metrics,
            }

        return self._submit(model, body, compute, reference_too=not backward)

    async def optim_step(self, body: dict[str, Any]) -> Result:
        """One AdamW step."""
        model = self.registry.model(body.get("model_id"))

        def compute() -> Result:
            refuse_surplus(
                body,
                "model_id",
                "seq_id",
                "adam_params",
                "grad_accumulation_normalization",
            )
            adam = adam_settings(body.get("adam_params"))
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
            refuse_surplus(body, "model_id", "seq_id", "path", "overwrite")
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
            refuse_surplus(
                body, "model_id", "seq_id", "path", "checkpoint_type", "metadata"
            )
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
            refuse_surplus(body, "model_id", "seq_id", "path", "optimizer")
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
            refuse_surplus(body, "model_id", "seq_id", "adapter_path")
            path = body.get("adapter_path")
            weights = load_promoted(self.store, path, model.base_model)
            self._loaded(model).trainer.load(model.model_id, weights, None)
            return {
                "type": "load_adapter",
                "model_id": model.model_id,
                "adapter_path": path,
            }

        return self._submit(model, body, compute)

    async def retrieve_future(self, body: dict[str, Any]) -> bytes:
        """The result of an operation; waits for it a while."""
        ticket = body.get("request_id")
        try:
            return await self.futures.wait(str(ticket))
        except UnknownFuture:
            raise UnknownName(
                f"no operation with request_id {ticket!r}, or its result was dropped "
                "after many later ones"
            ) from None

    # --- sampling --------------------------------------------------------------

    async def create_sampling_route(self, body: dict[str, Any]) -> Result:
        """Nothing to set up: every sampler of this process can be reached."""
        refuse_surplus(body, "training_run", "base_model")
        return {}

    async def completions(self, request: Request) -> Response:
        """Sample one completion; the whole answer comes as one event."""
        try:
            body = await read_object(request)
            weights = self.registry.weights(body.get("model"))
            params = sampling_params(body)
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
            return error_response(str(error), getattr(error, "status", 400))
        except ServiceClosed as error:
            return error_response(str(error), 503, "closed")
        event = json.dumps(completion_event(completion, body["prompt"]))
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

    async def model_entry(self, request: Request) -> Response:
        """Whether there is a base or promoted model of that name."""
        name = "accounts/{account}/models/{model_id}".format(**request.path_params)
        known = name in self.engine.models or find_promoted(self.store, name)
        if not known:
            raise UnknownName(f"model {name!r} is not known to the local service")
        return JSONResponse({"name": name, "state": "READY"})

    async def delete_session(self, request: Request) -> Response:
        """End a session: its models and sampler checkpoints go."""
        session = self.registry.session(request.path_params["session_id"])
        await self._end(session.session_id)
        return JSONResponse({})

    async def training_checkpoints(self, request: Request) -> Response:
        """Training checkpoints of every run, oldest first, as loadable references."""
        found = await asyncio.to_thread(self.store.listing)
        paths = [info.ref.path for info in found if info.kind == "training"]
        return JSONResponse({"checkpoints": paths})

    async def checkpoints(self, request: Request) -> Response:
        """Both kinds of checkpoint of a session, oldest first, in pages."""
        session_id = request.path_params["session_id"]
        size = query_integer(request, "pageSize", default=200, least=1)
        start = query_integer(request, "pageToken", default=0)
        found = await asyncio.to_thread(self.store.listing, session_id=session_id)
        if not found:
            self.registry.session(session_id)
        page = found[start : start + size]
        rows = [checkpoint_row(info) for info in page]
        answer: Result = {"trainingSessionCheckpoints": rows}
        if start + size < len(found):
            answer["nextPageToken"] = str(start + size)
        return JSONResponse(answer)

    async def promote(self, request: Request) -> Response:
        """Make a sampler checkpoint a model of its own: a PEFT adapter folder."""
        body = await read_object(request)
        refuse_surplus(body, "output_model", "base_model")
        ref = parse_row_id(request.path_params["checkpoint_id"])
        promoted = await asyncio.to_thread(
            promote,
            self.store,
            request.path_params["session_id"],
            ref,
            body.get("output_model"),
            body.get("base_model"),
        )
        return JSONResponse({"model": model_row(promoted)})

    # --- helpers ---------------------------------------------------------------

    async def _make_room(self, *, new_session: bool) -> None:
        """End sessions whose clients are gone, as far as one more thing needs it."""
        for session in self.registry.silent(SILENT_SECONDS):
            await self._end(session.session_id)
        for session in self.registry.silent(PRESSED_SECONDS):
            helps = new_session or self.registry.of(session)
            if helps and self.registry.full(new_session=new_session):
                await self._end(session.session_id)
        if obstacle := self.registry.full(new_session=new_session):
            raise Refused(f"the local service is full: {obstacle}", 429, "full")

    async def _end(self, session_id: str) -> None:
        """End a session, unless somebody else just has."""
        if session_id not in self.registry.sessions:
            return
        for model in self.registry.close_session(session_id):
            await model.operations.abort("the session has ended: connect again")
            await self._unload(model)
        await asyncio.to_thread(self.store.close_session, session_id)

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
        seq_id = read_integer(body, "seq_id", least=1)
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
            refusal = error_response(
                "the API key is missing or wrong", 401, "unauthorized"
            )
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


def _json_handler(
    handler: Callable[[dict[str, Any]], Awaitable[Result | bytes]],
) -> Handler:
    """A route from a function of the body; bytes are JSON already."""

    async def handle(request: Request) -> Response:
        answer = await handler(await read_object(request))
        if isinstance(answer, bytes):
            return Response(answer, media_type="application/json")
        return JSONResponse(answer)

    return _refusals(handle)


def _refusals(handler: Handler) -> Handler:
    """``handler`` with its errors as HTTP errors."""

    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except (UnknownName, UnknownModel) as error:
            return error_response(str(error), 404, "not_found")
        except ServiceClosed as error:
            return error_response(str(error), 503, "closed")
        except QueueFull as error:
            # The SDK submits it again, after a while.
            return error_response(str(error), 429, "queue_full")
        except Refused as error:
            return error_response(str(error), error.status, error.code)
        except ValueError as error:
            return error_response(str(error), 400)

    return handle


def _refuse_on_reference() -> Result:
    raise Refused(
        "a reference model is the bare base model and answers forward only: create a "
        "LoRA training client to train, save or load"
    )


_TOO_LARGE = f"the body is larger than {MAX_BODY_BYTES} bytes"


def _too_large() -> JSONResponse:
    return error_response(_TOO_LARGE, 413, "too_large")


async def _not_supported(request: Request, error: Exception) -> Response:
    return error_response(
        f"{request.method} {request.url.path} is not supported by the local service",
        404,
        "not_supported",
    )


async def _wrong_method(request: Request, error: Exception) -> Response:
    allowed = (getattr(error, "headers", None) or {}).get("Allow", "another method")
    answer = error_response(
        f"{request.url.path} takes {allowed}, not {request.method}",
        405,
        "method_not_allowed",
    )
    answer.headers["Allow"] = allowed
    return answer


async def _internal_error(request: Request, error: Exception) -> Response:
    return error_response(f"{type(error).__name__}: {error}", 500, "internal")
