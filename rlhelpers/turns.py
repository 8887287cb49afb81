"""Environments that answer back: the ``turns`` capability, both of its ends.

A HUD template has two beats, the prompt and the grade. What happens between them goes
through *capabilities* that the environment publishes, and HUD carries each through the
one port of the environment. Tools are one kind (``mcp``); this one is the smallest that
a conversation needs: the agent says a reply and hears the next user turn, or that the
episode is over.

Many rollouts share one environment, so each has an episode of its own, named in the
``bindings`` that the template yields beside its prompt::

    turns = Turns(env)

    @env.template(id="guess")
    async def guess(low: int, high: int, secret: int):
        game = Game(low, high, secret)
        with turns.episode(game.answer) as bindings:
            yield {"prompt": "…", "bindings": bindings}
            yield game.grade()

On the wire both ends write one JSON object a line: ``{"episode", "reply"}``, answered
by ``{"answer"}``, which is null at the end, or by ``{"error"}``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from hud.capabilities import Capability
from hud.environment import Environment

if TYPE_CHECKING:
    from hud.eval.run import Run

NAME = "turns"
PROTOCOL = "turns/1"
LONGEST_LINE = 1 << 20  # bytes

#: Takes a reply; returns the next user turn, or None at the end of the episode.
Answer = Callable[[str], str | None]
Say = Callable[[str], Awaitable[str | None]]


class TurnRefused(RuntimeError):
    """The environment could not answer a reply: the rollout has failed."""


class Turns:
    """The environment's end: answers the replies of all its episodes.

    Starts and stops with the environment, on a loopback port of its own that only HUD
    dials.

    Args:
        env: The environment that publishes the capability.
    """

    def __init__(self, env: Environment) -> None:
        self._env = env
        self._answers: dict[str, Answer] = {}
        self._server: asyncio.Server | None = None
        env.initialize(self._up)
        env.shutdown(self._down)

    @contextlib.contextmanager
    def episode(self, answer: Answer) -> Iterator[dict[str, dict[str, str]]]:
        """Open an episode; it ends with the block.

        Args:
            answer: Called with each reply in turn. What it raises fails the rollout.

        Returns:
            What the template yields as its ``bindings``.
        """
        episode = secrets.token_hex(8)
        self._answers[episode] = answer
        try:
            yield {NAME: {"episode": episode}}
        finally:
            del self._answers[episode]

    async def _up(self) -> None:
        self._server = await asyncio.start_server(
            self._serve, "127.0.0.1", 0, limit=LONGEST_LINE
        )
        port = self._server.sockets[0].getsockname()[1]
        self._env.add_capability(
            Capability(name=NAME, protocol=PROTOCOL, url=f"tcp://127.0.0.1:{port}")
        )

    async def _down(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            while line := await reader.readline():
                writer.write(_line(self._respond(line)))
                await writer.drain()
        except (ConnectionError, ValueError):
            pass  # the rollout ended meanwhile, or a line is longer than any reply
        finally:
            writer.close()

    def _respond(self, line: bytes) -> dict[str, Any]:
        try:
            message = json.loads(line)
            episode, reply = str(message["episode"]), str(message["reply"])
        except (ValueError, TypeError, KeyError):  # any program can reach a local port
            return {"error": "not a reply: one JSON object, of episode and reply"}
        answer = self._answers.get(episode)
        if answer is None:
            return {"error": "no such episode: it has ended, or was never begun"}
        try:
            return {"answer": answer(reply)}
        except Exception as error:  # whatever somebody's environment raises
            return {"error": f"{type(error).__name__}: {error}"}


def takes_turns(run: Run) -> bool:
    """Whether the run's task answers back, and so takes more than one reply."""
    return NAME in run.bindings


@contextlib.asynccontextmanager
async def open_turns(run: Run) -> AsyncIterator[Say]:
    """The agent's end: a function that says a reply and returns what is answered.

    Args:
        run: A live run of a task that :func:`takes_turns`.

    Raises:
        TurnRefused: The environment could not answer.
    """
    episode = run.bindings[NAME]["episode"]
    place = urlsplit(run.client.binding(NAME).url)
    reader, writer = await asyncio.open_connection(
        place.hostname, place.port, limit=LONGEST_LINE
    )

    async def say(reply: str) -> str | None:
        writer.write(_line({"episode": episode, "reply": reply}))
        await writer.drain()
        line = await reader.readline()
        if not line:
            raise TurnRefused("the environment closed the connection")
        message: dict[str, Any] = json.loads(line)
        if "error" in message:
            raise TurnRefused(f"the environment did not answer: {message['error']}")
        answer: str | None = message["answer"]
        return answer

    try:
        yield say
    finally:
        # Both ends close before HUD ends the tunnel between them: what it has to cut
        # off, asyncio reports as an error.
        with contextlib.suppress(ConnectionError):
            writer.write_eof()
            await reader.read()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"
