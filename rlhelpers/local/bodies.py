"""JSON bodies, read and formed without holding up the event loop.

A thread alone does not help: Python's JSON code is C that keeps the interpreter's lock
from the first byte to the last. So large bodies are read with functions of Python for
their numbers, and large results formed in pieces. In between, other threads get their
turn, and the loop is one of them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from functools import partial
from typing import Any

LARGE_BODY = 256 * 1024  # bytes; up to here reading takes the loop a few milliseconds
LARGE_RESULT = 20_000  # numbers, likewise
PIECE = 2_000  # numbers formed at a time

_dumps = partial(json.dumps, allow_nan=False, separators=(",", ":"))


async def read_json(text: bytes) -> Any:
    """The value of ``text``; ``ValueError`` or ``RecursionError`` if there is none."""
    if len(text) <= LARGE_BODY:
        return json.loads(text)
    return await asyncio.to_thread(_read_large, text)


async def form_json(result: dict[str, Any]) -> bytes:
    """``result`` as JSON text; ``ValueError`` for NaN and infinities.

    The SDK's parser takes none of these.
    """
    if _count_numbers(result) <= LARGE_RESULT:
        return _dumps(result).encode()
    return await asyncio.to_thread(_form_large, result)


def _read_large(text: bytes) -> Any:
    return json.loads(text, parse_int=_whole, parse_float=_real)


def _whole(digits: str) -> int:
    return int(digits)


def _real(digits: str) -> float:
    return float(digits)


def _count_numbers(result: dict[str, Any]) -> int:
    """How many numbers a pass's result holds; other results are small."""
    outputs = result.get("loss_fn_outputs", [])
    return sum(len(tensor["data"]) for output in outputs for tensor in output.values())


def _form_large(result: dict[str, Any]) -> bytes:
    return "".join(_pieces(result)).encode()


def _pieces(value: Any) -> Iterator[str]:
    """The text of ``value``; no piece takes long to form."""
    if isinstance(value, dict) and value:
        mark = "{"
        for key, item in value.items():
            yield f"{mark}{_dumps(key)}:"
            yield from _pieces(item)
            mark = ","
        yield "}"
    elif isinstance(value, list) and value and isinstance(value[0], dict | list):
        mark = "["
        for item in value:
            yield mark
            yield from _pieces(item)
            mark = ","
        yield "]"
    elif isinstance(value, list):
        yield "["
        for start in range(0, len(value), PIECE):
            part = _dumps(value[start : start + PIECE])[1:-1]
            yield f",{part}" if start else part
        yield "]"
    else:
        yield _dumps(value)
