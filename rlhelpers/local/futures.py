"""Results that are asked for later, and operations kept in their order.

The SDK submits an operation, gets a ticket at once, and polls for the result. Its
operations may arrive out of order and more than once; each is numbered, and runs once,
in the order of its number.
"""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

from .bodies import form_json
from .engine import ServiceClosed

Result = dict[str, Any]
Operation = Callable[[], Awaitable[Result]]

LONG_POLL_SECONDS = 30.0  # the SDK gives up on a silent poll at 45
KEPT_RESULTS = 512  # finished results stay readable: a poll may have to be repeated
KEPT_BYTES = 128 * 1024 * 1024  # and so much of their text
KEPT_NUMBERS = 4096  # how far back a repeated submission is recognised
MAX_QUEUED = 1024  # operations of one model that run or wait for others to run
MAX_EARLY = 1024  # and that wait for a number which has not come yet

logger = logging.getLogger(__name__)


class UnknownFuture(KeyError):
    """No operation with that ticket, or its result was dropped long ago."""


class QueueFull(RuntimeError):
    """Too many operations of one model wait; the client should try again later."""


class Futures:
    """Tickets and their results, as JSON text, for one event loop.

    Finished results stay readable until newer ones need their place: first those go
    that have been read, then the others, each the oldest first. Whoever waits for a
    result gets it in any case.
    """

    def __init__(self) -> None:
        self._open: dict[str, asyncio.Future[bytes]] = {}
        self._unread: OrderedDict[str, bytes] = OrderedDict()
        self._read: OrderedDict[str, bytes] = OrderedDict()
        self._bytes = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self) -> str:
        """A new ticket."""
        ticket = uuid.uuid4().hex
        self._loop = asyncio.get_running_loop()
        self._open[ticket] = self._loop.create_future()
        return ticket

    def fail_open(self, reason: str) -> None:
        """Fail what has no result yet; to be called from another thread."""

        def fail() -> None:
            for ticket in list(self._open):
                self.settle(ticket, failure(reason, "server"))

        if self._loop is not None:
            self._loop.call_soon_threadsafe(fail)

    def settle(self, ticket: str, result: bytes) -> None:
        """Store the result of ``ticket``; whoever waits gets it."""
        future = self._open.pop(ticket, None)
        if future is not None:
            future.set_result(result)
            self._unread[ticket] = result
            self._bytes += len(result)
            self._trim()

    async def wait(self, ticket: str) -> bytes:
        """The result, or a ``try_again`` when it takes longer than one poll."""
        if ticket in self._open:
            future = self._open[ticket]
            done, _ = await asyncio.wait({future}, timeout=LONG_POLL_SECONDS)
            if not done:
                again = {"type": "try_again", "request_id": ticket}
                return await form_json({**again, "queue_state": "active"})
            self._mark_read(ticket)
            return future.result()
        self._mark_read(ticket)
        if ticket not in self._read:
            raise UnknownFuture(ticket)
        return self._read[ticket]

    def _mark_read(self, ticket: str) -> None:
        if ticket in self._unread:
            self._read[ticket] = self._unread.pop(ticket)

    def _trim(self) -> None:
        """Keep to the bounds; the newest result stays whatever its size."""
        while (kept := len(self._read) + len(self._unread)) > 1:
            if kept <= KEPT_RESULTS and self._bytes <= KEPT_BYTES:
                break
            _, dropped = (self._read or self._unread).popitem(last=False)
            self._bytes -= len(dropped)


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

    @property
    def running(self) -> bool:
        """Whether any operation runs, or waits for another to end."""
        return bool(self._tasks)

    def submit(self, seq_id: int, operation: Operation) -> str:
        """Queue ``operation`` under its number; a repeated number gets its ticket.

        Raises :class:`QueueFull` if too many wait. The number that all others wait for
        is refused only while others still run, so that waiting always ends.
        """
        if seq_id in self._tickets:
            return self._tickets[seq_id]
        self._check_room(seq_id)
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

    def _check_room(self, seq_id: int) -> None:
        early = seq_id > self._next and len(self._waiting) >= MAX_EARLY
        if early or len(self._tasks) >= MAX_QUEUED:
            raise QueueFull(
                f"{len(self._tasks)} operations of this model wait to run and "
                f"{len(self._waiting)} for number {self._next}, which has not come: "
                "await results before submitting more"
            )

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


async def outcome(operation: Operation) -> bytes:
    """The operation's result, or its error in the form that the SDK raises."""
    try:
        return await form_json(await operation())
    except ValueError as error:
        return failure(str(error), "user")
    except ServiceClosed as error:
        return failure(str(error), "server")
    except Exception as error:
        logger.exception("operation failed")
        return failure(f"{type(error).__name__}: {error}", "server")


def failure(message: str, category: str) -> bytes:
    """An error as a future's result."""
    return json.dumps({"error": message, "category": category}).encode()
