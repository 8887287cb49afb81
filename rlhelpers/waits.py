"""What a session waits for at its service, why, and since when.

The SDK repeats refused requests by itself, for minutes or without end, and mostly says
nothing. Here every refusal is noted as it arrives: from httpx's log record of each
answer, and from the SDK's own record of a paused queue. A wait is told when it lasts,
when its reason changes, once a minute after that, and when it is over. Nothing is
decided here: whether to ask again is the SDK's business, and what it gives up on is
explained in :mod:`rlhelpers.refusals`.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field

from tqdm import tqdm

#: A wait that is shorter is not worth a line.
GRACE_SECONDS = 2.0
REPEAT_SECONDS = 60.0
#: Another reason is told at once, but no sooner than this after the last line.
CHANGE_SECONDS = 5.0
_TICK_SECONDS = 0.25
# The SDK tells of a paused queue once a minute, and never that it is over.
_PAUSE_SECONDS = 65.0
# Results are asked for anew at least every 45 seconds; a lost connection is not told.
_SILENCE_SECONDS = 100.0

_BALANCE = (
    "the account's balance does not cover it; top it up and this goes on (the SDK "
    "asks again for up to an hour)"
)
_OPEN_RUNS = "the account's limit of open runs is reached; end another session"
_RATE = "too many requests at once; the SDK slows down and asks again"
_LOADING = "the model or snapshot is still being loaded"
_SLOW = "the service took too long to answer; the SDK asks again"
_OUTAGE = "the service is unavailable or overloaded; the SDK asks again"
_CAPACITY = "the service is short of capacity; the request is queued"
_TOO_MANY_CLIENTS = "the account trains too much at once; the request is queued"
_UNREACHABLE = "the service cannot be reached; the SDK asks again"
_BROKEN = "the answer broke off; the SDK asks again"
_SILENT = "the service does not answer any more; the SDK asks again"

# Requests that open something, which a full quota refuses.
_OPENING = ("create_session", "create_model", "create_sampling_route")
_PAUSED = re.compile(r"is paused\. Reason: (.*)\.$", re.DOTALL)
_TRANSIENT = re.compile(r"Transient (.+?) \(attempt ")


def reason_of(status: int, endpoint: str) -> str | None:
    """Why a request with this answer is waited for; None if it is not.

    Args:
        status: The HTTP status.
        endpoint: The last part of the request's path.

    Example:
        >>> reason_of(429, "completions")
        'too many requests at once; the SDK slows down and asks again (429)'
        >>> reason_of(200, "completions") is None
        True
    """
    if status == 402:
        said = _BALANCE
    elif status in (409, 429) and endpoint in _OPENING:
        said = _OPEN_RUNS
    elif status == 429:
        said = _RATE
    elif status in (404, 425) and endpoint == "completions":
        said = _LOADING
    elif status in (408, 504):
        said = _SLOW
    elif status >= 500:
        said = _OUTAGE
    else:
        return None
    return f"{said} ({status})"


@dataclass(eq=False)
class _Operation:
    """Something asked of the service that has not ended."""

    what: str
    waits: Waits
    polls: bool  # whether an answer is due every now and then
    heard: float = field(default_factory=time.monotonic)
    reason: str | None = None
    since: float = 0.0
    until: float | None = None  # when a reason ends that nobody takes back
    open: bool = True


# Threads of the SDK inherit it from whoever asks, so an answer finds its question.
_OPERATION: ContextVar[_Operation | None] = ContextVar("operation", default=None)


def _print(text: str) -> None:
    tqdm.write(text, file=sys.stdout)  # above a progress bar, if one is shown


class Waits:
    """Tells what a session waits for.

    Thread-safe. Lines go to ``say``; :meth:`shown_by` also puts the present wait where
    it is replaced in place, such as a progress bar.

    Args:
        say: Takes a line of text; default: print it.
        grace: Seconds before a wait is told; None means two.

    Example:
        >>> waits = Waits()
        >>> with waits.operation("sampling"):
        ...     pass
        >>> waits.describe() is None
        True
    """

    def __init__(
        self, say: Callable[[str], None] = _print, *, grace: float | None = None
    ) -> None:
        self.say = say
        self.grace = GRACE_SECONDS if grace is None else grace
        self._lock = threading.RLock()
        self._operations: set[_Operation] = set()
        self._shows: list[Callable[[str | None], None]] = []
        self._ticker: threading.Thread | None = None
        self._began: float | None = None  # of the present wait
        self._told: float | None = None  # when it was last told
        self._told_of: tuple[str, str | None] | None = None  # what was told then
        self._gave_up = False

    @contextlib.contextmanager
    def operation(self, what: str, *, polls: bool = False) -> Iterator[None]:
        """Everything sent inside belongs to ``what``, until its results are there.

        Args:
            what: What is waited for, as the lines name it.
            polls: Whether the SDK asks for the result again and again, so that
                silence means a lost connection.
        """
        operation = _Operation(what, self, polls)
        token = _OPERATION.set(operation)
        with self._lock:
            self._operations.add(operation)
            if polls:
                self._start_ticker()
        failed = True
        try:
            yield
            failed = False
        finally:
            _OPERATION.reset(token)
            with self._lock:
                operation.open = False
                self._operations.discard(operation)
                if operation.reason:
                    self._gave_up = failed

    @contextlib.contextmanager
    def shown_by(self, show: Callable[[str | None], None]) -> Iterator[None]:
        """Call ``show`` while waiting, several times a second; None when it is over."""
        with self._lock:
            self._shows.append(show)
        try:
            yield
        finally:
            with self._lock:
                self._shows.remove(show)

    def note(self, operation: _Operation, reason: str | None, lasts: float = 0) -> None:
        """An operation waits for a reason, or no longer for any."""
        with self._lock:
            if not operation.open:
                return
            now = operation.heard = time.monotonic()
            if reason is not None:
                self._wait(operation, reason, now)
                operation.until = now + lasts if lasts else None
                self._start_ticker()
            elif operation.until is None:
                operation.reason = None

    def _wait(self, operation: _Operation, reason: str, now: float) -> None:
        if operation.reason is None:
            operation.since = now
        operation.reason = reason
        if self._began is None:
            self._began, self._told, self._gave_up = now, None, False

    def _waiting(self) -> list[_Operation]:
        now = time.monotonic()
        for operation in self._operations:
            if operation.until is not None and operation.until <= now:
                operation.reason = operation.until = None
            if operation.polls and now - operation.heard > _SILENCE_SECONDS:
                self._wait(operation, _SILENT, now)
        found = [operation for operation in self._operations if operation.reason]
        return sorted(found, key=lambda operation: operation.since)

    def describe(self) -> str | None:
        """What is waited for now, for how long, and why; None if nothing is.

        One line; of several waits the one that has lasted longest, and how many
        operations wait for the same reason.
        """
        with self._lock:
            waiting = self._waiting()
        if not waiting:
            return None
        first = waiting[0]
        same = sum(
            (other.what, other.reason) == (first.what, first.reason)
            for other in waiting
        )
        seconds = time.monotonic() - first.since
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - seconds))
        number = f" ({same} requests)" if same > 1 else ""
        return (
            f"waiting {seconds:.0f} s (since {since}) for {first.what}{number}: "
            f"{first.reason}"
        )

    def _start_ticker(self) -> None:
        if self._ticker is None:
            self._ticker = threading.Thread(
                target=self._tick, name="rlhelpers-waits", daemon=True
            )
            self._ticker.start()

    def _tick(self) -> None:
        """Tell of waits while there can be one; runs in a thread of its own."""
        going = True
        while going:
            time.sleep(_TICK_SECONDS)
            with self._lock:
                text = self.describe()
                line, show = self._news(text)
                shows = list(self._shows) if show else []
                going = text is not None or any(o.polls for o in self._operations)
                if not going:
                    self._ticker = None
            if line:
                self.say(line)
            for put in shows:
                put(text)

    def _news(self, text: str | None) -> tuple[str | None, bool]:
        """The line to tell now, if any, and whether to show the present state."""
        now = time.monotonic()
        if self._began is None:
            return None, False
        if text is None:
            told, lasted = self._told, now - self._began
            self._began = self._told = self._told_of = None
            goes_on = told is not None and not self._gave_up
            return (f"going on after {lasted:.0f} s" if goes_on else None), True
        first = self._waiting()[0]
        of = (first.what, first.reason)
        pause = REPEAT_SECONDS if of == self._told_of else CHANGE_SECONDS
        due = self._told is None or now - self._told >= pause
        if due and now - first.since >= self.grace:
            self._told, self._told_of = now, of
            return text, True
        return None, self._told is not None


# -- listening --------------------------------------------------------------------


@dataclass(eq=False)
class _Ear(logging.Filter):
    """Hears every record of one logger, and drops what nobody asked to see."""

    logger: logging.Logger
    hear: Callable[[logging.LogRecord], bool]
    level: int = 0
    shown_from: int = 0
    users: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def filter(self, record: logging.LogRecord) -> bool:
        taken = self.hear(record)
        return not taken and record.levelno >= self.shown_from

    def open(self) -> None:
        with self.lock:
            self.users += 1
            if self.users == 1:
                self.level = self.logger.level
                self.shown_from = self.logger.getEffectiveLevel()
                self.logger.setLevel(min(logging.INFO, self.shown_from))
                self.logger.addFilter(self)

    def close(self) -> None:
        with self.lock:
            self.users -= 1
            if self.users == 0:
                self.logger.removeFilter(self)
                self.logger.setLevel(self.level)


def _hear_answer(record: logging.LogRecord) -> bool:
    """httpx: ``HTTP Request: %s %s "%s %d %s"``, one record for each answer."""
    operation = _OPERATION.get()
    if operation is None or not isinstance(record.args, tuple) or len(record.args) < 4:
        return False
    url, status = record.args[1], record.args[3]
    if isinstance(status, int):
        endpoint = str(url).partition("?")[0].rsplit("/", 1)[-1]
        operation.waits.note(operation, reason_of(status, endpoint))
    return False


def _hear_pause(record: logging.LogRecord) -> bool:
    """A queue that the service paused: said with the answer's status 200."""
    operation, match = _OPERATION.get(), _PAUSED.search(record.getMessage())
    if operation is None or match is None:
        return False
    said = match[1]
    if "short on capacity" in said:
        said = _CAPACITY
    elif "training clients rate limit" in said:
        said = _TOO_MANY_CLIENTS
    operation.waits.note(operation, f"{said} (paused)", lasts=_PAUSE_SECONDS)
    return True


def _hear_retry(record: logging.LogRecord) -> bool:
    """The sampler tries again; of a lost connection nothing else tells."""
    operation, match = _OPERATION.get(), _TRANSIENT.search(record.getMessage())
    if operation is None or match is None:
        return False
    if not match[1].startswith("HTTP "):  # those were heard as answers
        said = _BROKEN if " " in match[1] else _UNREACHABLE
        operation.waits.note(operation, f"{said} ({match[1]})")
    return True


_SDK = "fireworks.training.sdk"
_EARS = (
    _Ear(logging.getLogger("httpx"), _hear_answer),
    _Ear(logging.getLogger(f"{_SDK}._core.lib.queue_state_logger"), _hear_pause),
    _Ear(logging.getLogger(f"{_SDK}.sampling"), _hear_retry),
)


def listen() -> None:
    """Begin to hear what the service answers; each call needs its :func:`deafen`."""
    for ear in _EARS:
        ear.open()


def deafen() -> None:
    """End what :func:`listen` began."""
    for ear in _EARS:
        ear.close()
