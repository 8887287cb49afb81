"""Misbehaving on request: refusals and pauses of a service under load.

A client can then be tried on what the real service does seldom: an account without
credit, too many requests, an outage, a queue without capacity.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import Self

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from .answers import error_response

#: What a result that is asked for can be, beside there or not yet.
PAUSES = ("paused_capacity", "paused_rate_limit")
# The SDK asks for a result again at once, so that each refusal takes this long.
PAUSE_SECONDS = 0.2

_FORM = re.compile(r"(\w+)=(\d{3}|paused_\w+)(?:\*(\d+))?")
_MESSAGES = {
    402: "the account has no credit left",
    409: "8 of 8 concurrent runs of the account are open",
    429: "too many requests",
    503: "the service is overloaded",
}


@dataclass
class Fault:
    """What the next requests for one endpoint get instead of their answer.

    Attributes:
        endpoint: The last part of the endpoint's path, such as ``completions``.
        answer: An HTTP status, or for ``retrieve_future`` one of :data:`PAUSES`.
        times: How many requests are still to be answered so.

    Raises:
        ValueError: A status that is no error, or a pause of another endpoint.

    >>> Fault.parse("completions=503*3").times
    3
    """

    endpoint: str
    answer: int | str
    times: int = 1

    def __post_init__(self) -> None:
        is_pause = self.answer in PAUSES and self.endpoint == "retrieve_future"
        is_status = isinstance(self.answer, int) and 400 <= self.answer < 600
        if not (is_pause or is_status) or self.times < 1:
            raise ValueError(
                f"no fault {self.endpoint}={self.answer}*{self.times}: give a status "
                "from 400 to 599, or for retrieve_future one of "
                f"{' and '.join(PAUSES)}, at least once"
            )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``ENDPOINT=ANSWER`` or ``ENDPOINT=ANSWER*TIMES``."""
        match = _FORM.fullmatch(text)
        if match is None:
            raise ValueError(
                f"no fault {text!r}: write ENDPOINT=STATUS*TIMES, such as "
                "completions=503*3"
            )
        endpoint, answer, times = match.groups()
        known = int(answer) if answer.isdigit() else answer
        return cls(endpoint, known, int(times or 1))


class Faults:
    """In front of the service: answers in its place while a fault lasts.

    ``pending`` may be added to while the service runs.
    """

    def __init__(self, app: ASGIApp, pending: list[Fault]) -> None:
        self._app = app
        self._pending = pending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        fault = self._take(scope)
        if fault is None:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        await (await _answer(fault, request))(scope, receive, send)

    def _take(self, scope: Scope) -> Fault | None:
        if scope["type"] != "http" or not self._pending:
            return None
        endpoint = scope["path"].rsplit("/", 1)[-1]
        for fault in self._pending:
            if fault.endpoint == endpoint:
                fault.times -= 1
                if fault.times == 0:
                    self._pending.remove(fault)
                return fault
        return None


async def _answer(fault: Fault, request: Request) -> Response:
    if fault.endpoint == "retrieve_future":
        await asyncio.sleep(PAUSE_SECONDS)
    if isinstance(fault.answer, int):
        message = _MESSAGES.get(fault.answer, "refused, as it was told to")
        return error_response(message, fault.answer, "fault")
    body = await request.json()
    return JSONResponse(
        {
            "type": "try_again",
            "request_id": body.get("request_id"),
            "queue_state": fault.answer,
        }
    )
