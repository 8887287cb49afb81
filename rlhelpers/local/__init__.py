"""The local training service: the Fireworks training protocol over a real small model.

Self-contained: nothing here imports from the rest of ``rlhelpers``, and the rest
reaches it through HTTP and :class:`LocalService` alone.
"""

from .server import LocalService

__all__ = ["LocalService"]
