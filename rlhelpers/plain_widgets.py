"""Stand-ins for ipywidgets where it is not installed.

A widget of this course is a shell over a plain function that the next cell calls too.
Without ipywidgets the shell becomes one line of text, and the lesson stays whole.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Self


class Plain:
    """Takes what any widget takes, keeps its value, and does nothing with it."""

    def __init__(self, *positional: Any, **settings: Any) -> None:
        first = positional[0] if positional else None
        self.value = first
        self.children = tuple(first) if isinstance(first, list | tuple) else ()
        self.outputs: tuple[Any, ...] = ()
        vars(self).update(settings)
        self.style, self.layout = SimpleNamespace(), SimpleNamespace()

    def __repr__(self) -> str:
        return (
            "(this control needs the package ipywidgets; the next cell does the same "
            "without it)"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def on_click(self, *_: Any, **__: Any) -> None:
        """Nobody clicks."""

    def observe(self, *_: Any, **__: Any) -> None:
        """Nothing changes."""


def __getattr__(name: str) -> type[Plain]:
    """Every widget of ipywidgets; all are the same here."""
    if name.startswith("_"):
        raise AttributeError(name)
    return Plain
