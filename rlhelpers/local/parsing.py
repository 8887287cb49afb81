"""Requests as checked values: every field is understood or refused by its name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import ClientDisconnect, Request

from .adapters import LoraSettings
from .batches import MAX_TARGETS, TrainingDatum
from .bodies import read_json
from .sampling import SamplingParams
from .trainer import AdamSettings


class Refused(ValueError):
    """A request that is answered with an HTTP error."""

    def __init__(self, message: str, status: int = 400, code: str = "bad_request"):
        super().__init__(message)
        self.status = status
        self.code = code


async def read_object(request: Request) -> dict[str, Any]:
    """The JSON object in the body."""
    try:
        body = await read_json(await request.body())
    except RecursionError:
        raise Refused("the body is nested too deeply") from None
    except ClientDisconnect:
        raise Refused("the client hung up before the body's end") from None
    except UnicodeDecodeError as error:
        raise Refused(f"the body is not UTF-8: {error}") from None
    if not isinstance(body, dict):
        raise Refused("the body must be a JSON object")
    return body


def refuse_surplus(body: Mapping[str, Any], *known: str) -> None:
    """Refuse fields that the service would otherwise silently drop."""
    surplus = sorted(
        key
        for key, value in body.items()
        if key not in (*known, "type") and value is not None
    )
    if surplus:
        raise Refused(f"fields {surplus} are not supported by the local service")


def read_integer(body: Mapping[str, Any], name: str, least: int = 0) -> int:
    """The integer under ``name``, at least ``least``."""
    value = body.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise Refused(f"{name} must be an integer from {least} up, got {value!r}")
    return value


def query_integer(request: Request, name: str, default: int, least: int = 0) -> int:
    """The same from the query."""
    text = request.query_params.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 10) or int(text) < least:
        raise Refused(f"{name} must be an integer from {least} up, got {text!r}")
    return int(text)


def read_number(body: Mapping[str, Any], name: str, default: float) -> float:
    """The finite number under ``name``."""
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


def lora_settings(body: Mapping[str, Any]) -> LoraSettings | None:
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


def read_top_k(raw: Any, data: Sequence[TrainingDatum], vocab_size: int) -> int:
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


def adam_settings(raw: Any) -> AdamSettings:
    """The optimizer settings of ``optim_step``."""
    if not isinstance(raw, Mapping):
        raise Refused("adam_params must be an object")
    names = AdamSettings.__dataclass_fields__
    refuse_surplus(raw, *names, "emit_grad_norm_metrics")
    defaults = AdamSettings()
    adam = AdamSettings(
        **{name: read_number(raw, name, getattr(defaults, name)) for name in names}
    )
    if adam.learning_rate < 0 or adam.eps < 0 or adam.weight_decay < 0:
        raise Refused("learning_rate, eps and weight_decay must not be negative")
    if not (0 <= adam.beta1 < 1 and 0 <= adam.beta2 < 1):
        raise Refused(f"beta1 and beta2 must be in [0, 1), got {adam}")
    return adam


def sampling_params(body: Mapping[str, Any]) -> SamplingParams:
    """The settings of a completion request."""
    refuse_surplus(
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
        max_tokens=read_integer(body, "max_tokens", least=1),
        temperature=read_number(body, "temperature", 1.0),
        top_p=read_number(body, "top_p", 1.0),
        top_k=read_integer({"top_k": body.get("top_k") or 0}, "top_k"),
        seed=None if seed is None else read_integer(body, "seed"),
        stop=tuple(stop),
        echo=bool(body.get("echo")),
    )
