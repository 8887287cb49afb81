"""Results that are asked for later, and operations kept in their order.

The SDK submits an operation, gets a ticket at once, and polls for the result. Its
operations may arrive out of order and more than once; each is numbered, and runs once,
in the order of its number.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

from .engine import ServiceClosed

Result = dict[str, Any]
Operation = Callable[[], Awaitable[Result]]

LONG_POLL_SECONDS = 30.0  # the SDK gives up on a silent poll at 45
KEPT_RESULTS = 512  # finished results stay readable: a poll may have to be repeated
KEPT_NUMBERS = 4096  # how far back a repeated submission is recognised

logger = logging.getLogger(__name__)


class UnknownFuture(KeyError):
    """No operation with that ticket, or its result was dropped long ago."""


class Futures:
    """Tickets and their results, for one event loop."""

    def __init__(self) -> None:
        self._results: OrderedDict[str, asyncio.Future[Result]] = OrderedDict()

    def open(self) -> str:
        """A new ticket."""
        self._trim()
        ticket = uuid.uuid4().hex
        self._results[ticket] = asyncio.get_running_loop().create_future()
        return ticket

    def settle(self, ticket: str, result: Result) -> None:
        """Store the result of ``ticket``; whoever waits gets it."""
        future = self._results.get(ticket)
        if future is not None and not future.done():
            future.set_result(result)

    async def wait(self, ticket: str) -> Result:
        """The result, or a ``try_again`` when it takes longer than one poll."""
        if ticket not in self._results:
            raise UnknownFuture(ticket)
        future = self._results[ticket]
        done, _ = await asyncio.wait({future}, timeout=LONG_POLL_SECONDS)
        if done:
            return future.result()
        return {"type": "try_again", "request_id": ticket, "queue_state": "active"}

    def _trim(self) -> None:
        finished = [t for t, future in self._results.items() if future.done()]
        for ticket in finished[: max(len(finished) - KEPT_RESULTS, 0)]:
            del self._results[ticket]


class OrderedOperations:
    """The operations of one model: each ``seq_id`` once, in ascending order from 1."""

    def __init__(self, futures: Futures) -> None:
        self._futures = futures
        self._tickets: OrderedDict[int, str] = OrderedDict()
        self._waiting: dict[int, tuple[str, Operation]] = {}
        self._next = 1
        self._tasks: set[asyncio.Task[None]] = set()
        self._previous: asyncio.Task[None] | None = None
        self._closed: str | None = None  # why no further operation is taken
        self._aborted = False
        self._last: str | None = None

    def submit(self, seq_id: int, operation: Operation) -> str:
        """Queue ``operation`` under its number; a repeated number gets its ticket."""
        if seq_id in self._tickets:
            return self._tickets[seq_id]
        ticket = self._futures.open()
        refusal = self._closed
        if seq_id < self._next:
            refusal = f"seq_id {seq_id} was carried out long ago"
        if refusal is not None:
            self._futures.settle(ticket, failure(refusal, "user"))
            return ticket
        self._tickets[seq_id] = ticket
        if len(self._tickets) > KEPT_NUMBERS:
            self._tickets.popitem(last=False)
        self._waiting[seq_id] = (ticket, operation)
        while self._next in self._waiting:
            self._start(*self._waiting.pop(self._next))
            self._next += 1
        return ticket

    def finish(self, operation: Operation) -> str:
        """Run ``operation`` after all that was submitted, and take no more.

        What still waits for a number that never came fails. Called again, it returns
        the first call's ticket.
        """
        if self._last is None:
            self._last = self._futures.open()
            self._close("the model is being unloaded: create it again")
            self._start(self._last, operation)
        return self._last

    async def abort(self, reason: str) -> None:
        """Fail everything but the operation that runs now, and wait for that one."""
        self._aborted = True
        self._close(reason)
        if self._previous is not None:
            await asyncio.wait({self._previous})

    def _close(self, reason: str) -> None:
        self._closed = reason
        for ticket, _ in self._waiting.values():
            self._futures.settle(ticket, failure(reason, "user"))
        self._waiting.clear()

    def _start(self, ticket: str, operation: Operation) -> None:
        task = asyncio.create_task(self._run(ticket, operation, self._previous))
        self._previous = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(
        self, ticket: str, operation: Operation, previous: asyncio.Task[None] | None
    ) -> None:
        if previous is not None:
            await asyncio.wait({previous})
        if self._aborted:
            result = failure(self._closed or "aborted", "user")
        else:
            result = await outcome(operation)
        self._futures.settle(ticket, result)


async def outcome(operation: Operation) -> Result:
    """The operation's result, or its error in the form that the SDK raises."""
    try:
        return await operation()
    except ValueError as error:
        return failure(str(error), "user")
    except ServiceClosed as error:
        return failure(str(error), "server")
    except Exception as error:
        logger.exception("operation failed")
        return failure(f"{type(error).__name__}: {error}", "server")


def failure(message: str, category: str) -> Result:
    """An error as a future's result."""
    return {"error": message, "category": category}
