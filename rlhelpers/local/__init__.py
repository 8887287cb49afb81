"""The local training service: the Fireworks training protocol over a real small model.

Self-contained: nothing here imports from the rest of ``rlhelpers``, and the rest
reaches it through HTTP and the two objects that start it, :class:`LocalService` and
:class:`LocalServiceProcess`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .process import LocalServiceProcess
    from .server import LocalService

# Imported at the first use: whoever starts a process does not load the service too.
_HOMES = {"LocalService": "server", "LocalServiceProcess": "process"}

__all__ = ["LocalService", "LocalServiceProcess"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value  # the next use does not come here
    return value
