"""The `turns` capability through real HUD: episodes apart, failures told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any
from urllib.parse import urlsplit

import pytest
from hud.agents.base import Agent
from hud.environment import Environment
from hud.eval import LocalRuntime
from hud.eval.run import Run, rollout
from hud.eval.runtime import Shared

from rlhelpers.turns import TurnRefused, Turns, open_turns, takes_turns

env = Environment("counting")
turns = Turns(env)


@env.template(id="count")
async def count(last: int) -> AsyncGenerator[Any, Any]:
    """Answers with the number of replies so far; ends at ``last``."""
    heard: list[str] = []

    def answer(reply: str) -> str | None:
        if reply == "break":
            raise RuntimeError("the environment broke")
        heard.append(reply)
        return None if len(heard) == last else f"{len(heard)}: {reply}"

    with turns.episode(answer) as bindings:
        yield {"prompt": "Count.", "bindings": bindings}
        yield float(len(heard))


@env.template(id="plain")
async def plain() -> AsyncGenerator[Any, Any]:
    """A task of one reply."""
    yield "Answer."
    yield 1.0


class Scripted(Agent):
    """Says its lines, whatever is answered, and keeps the answers."""

    def __init__(self, *lines: str, pause: float = 0.0) -> None:
        super().__init__()
        self.lines = lines
        self.pause = pause
        self.answers: list[str | None] = []

    async def __call__(self, run: Run) -> None:
        async with open_turns(run) as say:
            for line in self.lines:
                await asyncio.sleep(self.pause)
                self.answers.append(await say(line))
        run.trace.content = "done"


async def one(agent: Agent, last: int = 3) -> Run:
    return await rollout(count(last), agent, runtime=LocalRuntime(env), job_id="test")


async def test_replies_are_answered_until_the_episode_ends() -> None:
    agent = Scripted("a", "ü\n漢", "c")
    run = await one(agent)
    assert agent.answers == ["1: a", "2: ü\n漢", None]
    assert (run.trace.status, run.reward) == ("completed", 3.0)
    assert takes_turns(run)


async def test_episodes_that_share_an_environment_do_not_mix() -> None:
    agents = [Scripted(*name * 3, pause=0.01 * i) for i, name in enumerate("abcd")]
    async with Shared(LocalRuntime(env), width=4) as runtime:
        await asyncio.gather(
            *(rollout(count(9), agent, runtime=runtime, job_id="t") for agent in agents)
        )
    for name, agent in zip("abcd", agents, strict=True):
        assert agent.answers == [f"{n}: {name}" for n in (1, 2, 3)]


async def test_what_the_environment_raises_fails_the_rollout() -> None:
    run = await one(Scripted("a", "break"))
    assert run.trace.status == "error"
    assert "RuntimeError: the environment broke" in str(run.trace.error)


async def test_an_episode_that_has_ended_is_refused() -> None:
    said: list[str] = []

    class Late(Agent):
        async def __call__(self, run: Run) -> None:
            async with open_turns(run) as say:
                run.bindings["turns"]["episode"] = "another"
                await say("mine")
            async with open_turns(run) as say:
                with pytest.raises(TurnRefused, match="no such episode"):
                    await say("not mine")
            said.append("all")

    run = await one(Late())
    assert said == ["all"]
    assert run.trace.status == "completed"


@pytest.mark.parametrize(
    "junk",
    [
        pytest.param(b"\x10\x00\x00\x00\x01\x00\n", id="another protocol"),
        pytest.param(b"GET / HTTP/1.1\n", id="http"),
        pytest.param(b"[]\n", id="a list"),
        pytest.param(b'{"episode": "x"}\n', id="no reply"),
    ],
)
async def test_what_is_no_reply_is_refused_and_the_connection_goes_on(
    junk: bytes,
) -> None:
    heard: list[Any] = []

    class Stray(Agent):
        async def __call__(self, run: Run) -> None:
            place = urlsplit(run.client.binding("turns").url)
            reader, writer = await asyncio.open_connection(place.hostname, place.port)
            episode = run.bindings["turns"]["episode"]
            reply = json.dumps({"episode": episode, "reply": "mine"}).encode() + b"\n"
            for line in (junk, reply):
                writer.write(line)
                heard.append(json.loads(await reader.readline()))
            writer.close()

    await one(Stray())
    refused, answered = heard
    assert "not a reply" in refused["error"]
    assert answered == {"answer": "1: mine"}


async def test_the_environment_serves_again_after_it_stopped() -> None:
    for _ in range(2):
        agent = Scripted("a")
        assert (await one(agent)).trace.status == "completed"
        assert agent.answers == ["1: a"]


async def test_a_task_of_one_reply_takes_no_turns() -> None:
    class Look(Agent):
        async def __call__(self, run: Run) -> None:
            assert not takes_turns(run)
            run.trace.content = "looked"

    run = await rollout(plain(), Look(), runtime=LocalRuntime(env), job_id="test")
    assert run.trace.content == "looked"
    assert run.trace.status == "completed"
