"""What a refusal of the training service means, and what to do about it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from fireworks.training.sdk.fireworks_client import ModelDetailsUnavailableError

from rlhelpers.models import ModelPreset

if TYPE_CHECKING:
    from fireworks.training.sdk import FireworksClient


class ServiceRefused(RuntimeError):
    """The training service refused a session, a run, a sampler or a completion."""


# What an HTTP status means for whoever opens a session, a run or a sampler, or samples.
_REMEDIES = {
    400: "the request was refused; if the service does not know base model {model}, "
    "it is misspelt or retired: look it up in the service's list of models, and use a "
    "preset with that id and that model's tokenizer",
    401: "the API key was refused; check FIREWORKS_API_KEY, or api_key",
    402: "the account's balance does not cover it; see its billing page",
    403: "this account may not train {model}; ask for access, or use another model",
    429: "the account's limit of open runs or requests is reached; close other "
    "sessions (`python -m rlhelpers sessions` lists those of this machine), or wait a "
    "few minutes",
    410: "the session is gone from the service; connect again, and resume from the "
    "last checkpoint",
    503: "the service is unavailable; nothing is wrong with the parameters, try later",
}
_REMEDIES |= {404: _REMEDIES[400], 409: _REMEDIES[429]}
# Sampling opens nothing: there a 429 is about its pace.
_PACE = (
    "too many requests at once, also after several tries; lower the preset's "
    "max_concurrent ({concurrent} now), or wait a few minutes"
)
_UNREACHABLE = (
    "the service cannot be reached; check the network (or proxy) and the address, and "
    "resume: nothing is wrong with the parameters"
)


@contextlib.contextmanager
def explained(
    preset: ModelPreset, *, sampling: bool = False, training: bool = False
) -> Iterator[None]:
    """Say what a refusal of the service means, and what to do about it.

    Args:
        preset: The model's preset.
        sampling: Whether a completion is asked for, which opens nothing.
        training: Whether it is an operation of a model that is open. Then only that
            the session is gone is explained: the rest is said by the service itself.
    """
    try:
        yield
    except Exception as error:
        error = _answer_behind(error)
        status = _status(error)
        if training and status != 410:
            raise
        if status == 0 and _is_connection_error(error):
            raise ServiceRefused(f"{_UNREACHABLE} ({error})") from error
        remedy = _REMEDIES.get(503 if status >= 500 else status)
        if sampling and status == 429:
            remedy = _PACE
        if remedy is None:
            raise
        named = remedy.format(
            model=repr(preset.base_model), concurrent=preset.max_concurrent
        )
        said = getattr(getattr(error, "response", None), "text", "") or str(error)
        raise ServiceRefused(f"{named} (status {status}: {said[:300]})") from error


def require_known_model(
    preset: ModelPreset, open_client: Callable[[], FireworksClient]
) -> None:
    """Ask the service for the base model's entry, which costs nothing.

    Args:
        preset: The model's preset.
        open_client: Opens a control-plane client.

    Raises:
        ServiceRefused: There is no such model, or the key was refused. Any other
            answer says nothing about the model and is passed over.
    """
    # A ValueError says that the entry is there, and tells no architecture.
    with open_client() as client, explained(preset), contextlib.suppress(ValueError):
        try:
            # The one public call of the SDK that reads a model's entry.
            client.model_is_moe(preset.base_model)
        except ModelDetailsUnavailableError as error:
            if error.status_code in (400, 401, 404):
                raise


def _answer_behind(error: Exception) -> Exception:
    """The answer (410) for which the SDK calls a result expired."""
    expired = type(error).__name__ == "RetryableException"
    cause = error.__cause__
    return cause if expired and isinstance(cause, Exception) else error


def _status(error: Exception) -> int:
    """The HTTP status behind an SDK error, or 0 if there is none."""
    for source in (error, getattr(error, "response", None)):
        status = getattr(source, "status_code", None)
        if isinstance(status, int):
            return status
    tried = getattr(error, "final_status", None)  # of a sampler that gave up
    if isinstance(tried, int):
        return tried
    # A failed operation carries no status, only whose fault it was.
    return 400 if str(getattr(error, "category", "")).lower().endswith("user") else 0


def _is_connection_error(error: Exception) -> bool:
    """Whether the SDK gave up because it got no answer at all."""
    names = {kind.__name__ for kind in type(error).__mro__}
    is_sampler = getattr(error, "final_error_kind", None) in ("connection", "timeout")
    return is_sampler or bool(names & {"APIConnectionError", "ConnectError"})
