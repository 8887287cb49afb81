"""What a refusal of the training service means, and what to do about it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rlhelpers.models import ModelPreset


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
    "sessions, or wait a few minutes",
    503: "the service is unavailable; nothing is wrong with the parameters, try later",
}
_REMEDIES |= {404: _REMEDIES[400], 409: _REMEDIES[429]}


@contextlib.contextmanager
def explained(preset: ModelPreset) -> Iterator[None]:
    """Say what a refusal of the service means, and what to do about it."""
    try:
        yield
    except Exception as error:
        status = _status(error)
        remedy = _REMEDIES.get(503 if status >= 500 else status)
        if remedy is None:
            raise
        named = remedy.format(model=repr(preset.base_model))
        said = getattr(getattr(error, "response", None), "text", "") or str(error)
        raise ServiceRefused(f"{named} (status {status}: {said[:300]})") from error


def _status(error: Exception) -> int:
    """The HTTP status behind an SDK error, or 0 if there is none."""
    for source in (error, getattr(error, "response", None)):
        status = getattr(source, "status_code", None)
        if isinstance(status, int):
            return status
    # A failed operation carries no status, only whose fault it was.
    return 400 if str(getattr(error, "category", "")).lower().endswith("user") else 0
