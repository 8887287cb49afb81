"""Rollouts of several turns: real HUD, real SDK, a policy that writes noise."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hud.environment import Environment
from hud.eval import LocalRuntime
from hud.eval.run import rollout

from rlhelpers import EpisodeAgent, PolicyAgent, RolloutFailed, TrainConfig, connect
from rlhelpers.calibration import calibrate
from rlhelpers.datums import Episode, check_run, make_training_batch
from rlhelpers.episodes import turn_seed, user_turn_ids
from rlhelpers.metrics import read_rollouts
from rlhelpers.sampling import SamplingSettings, end_token_ids, sampled_steps
from rlhelpers.service import TrainingSession
from rlhelpers.training import train_step
from rlhelpers.turns import Turns

env = Environment("talk")
turns = Turns(env)
SETTINGS = SamplingSettings(max_tokens=8)


@env.template(id="talk")
async def talk(n: int, replies: int = 3) -> AsyncGenerator[Any, Any]:
    """Asks for more until it has heard enough; pays for ASCII in the replies."""
    heard: list[str] = []

    def answer(reply: str) -> str | None:
        heard.append(reply)
        if n == 13 and len(heard) == 2:
            raise RuntimeError("unlucky")
        return None if len(heard) == replies else f"More {len(heard)}."

    with turns.episode(answer) as bindings:
        yield {"prompt": f"Talk {n}.", "bindings": bindings}
        text = "".join(heard)
        yield sum(map(str.isascii, text)) / max(len(text), 1)


@env.template(id="once")
async def once(n: int) -> AsyncGenerator[Any, Any]:
    """A task of one reply."""
    yield f"Once {n}."
    yield 1.0


@pytest.fixture
def session(preset: Any, tmp_path: Path) -> Iterator[TrainingSession]:
    with connect(
        model=preset,
        runs_dir=tmp_path / "runs",
        task_runtime=LocalRuntime(env),
        agent=EpisodeAgent,
        quiet=True,
    ) as opened:
        yield opened


async def play(session: TrainingSession, task: Any, **how: Any) -> tuple[Any, Any]:
    kind = how.pop("kind", EpisodeAgent)
    agent = kind(session.base_sampler(), SETTINGS, **how)
    run = await rollout(task, agent, runtime=await session.runtime(), job_id="test")
    return run, agent


async def test_every_turn_is_recorded_and_extends_the_last(
    session: TrainingSession,
) -> None:
    run, _ = await play(session, talk(1), seed=5)
    steps = sampled_steps(run)
    assert len(steps) == 3
    episode = check_run(run)
    assert isinstance(episode, Episode)
    tokenizer = session.tokenizer
    first, second, third = [step.sample for step in steps]
    assert first is not None
    assert second is not None
    assert third is not None
    assert tokenizer.decode(first.prompt_token_ids) == (
        "<|im_start|>user\nTalk 1.<|im_end|>\n<|im_start|>assistant\n"
    )
    read = first.prompt_token_ids + first.output_token_ids
    assert second.prompt_token_ids[: len(read)] == read
    between = tokenizer.decode(second.prompt_token_ids[len(read) :])
    # The noise hardly ever ends a reply; the marker is then added, and not trained.
    ended = first.output_token_ids[-1] in end_token_ids(tokenizer)
    assert between == ("" if ended else "<|im_end|>") + (
        "\n<|im_start|>user\nMore 1.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert episode.token_ids[-len(third.output_token_ids) :] == tuple(
        third.output_token_ids
    )
    assert sum(episode.sampled) == len(episode.output_logprobs)
    replies = [step.content for step in steps]
    assert run.trace.content == "\n> More 1.\n".join(replies[:2]) + (
        f"\n> More 2.\n{replies[2]}"
    )
    used = session.usage.counts
    assert used.prefill == sum(len(s.sample.prompt_token_ids) for s in steps)
    assert used.sampled == len(episode.output_token_ids)


async def test_a_seed_repeats_a_whole_episode(session: TrainingSession) -> None:
    tokens = []
    for seed in (5, 5, 6):
        run, _ = await play(session, talk(1), seed=seed)
        tokens.append(check_run(run).token_ids)
    assert tokens[0] == tokens[1] != tokens[2]


def test_turns_have_seeds_of_their_own() -> None:
    seeds = [turn_seed(seed, turn) for seed in range(20) for turn in range(20)]
    assert len(set(seeds)) == 400
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_the_users_turn_is_as_the_chat_template_has_it(
    session: TrainingSession,
) -> None:
    tokenizer, preset = session.tokenizer, session.preset
    (end, *_) = end_token_ids(tokenizer)
    whole = tokenizer.apply_chat_template(
        [
            {"role": "user", "content": "Talk 1."},
            {"role": "assistant", "content": "Yes"},
            {"role": "user", "content": "More 1."},
        ],
        add_generation_prompt=True,
        return_dict=False,
    )
    start = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Talk 1."}],
        add_generation_prompt=True,
        return_dict=False,
    )
    reply = [*tokenizer.encode("Yes", add_special_tokens=False), end]
    follows = user_turn_ids(tokenizer, preset, "More 1.", after=reply)
    assert [*start, *reply, *follows] == whole
    cut = user_turn_ids(tokenizer, preset, "More 1.", after=reply[:-1])
    assert cut == [end, *follows]


def test_a_template_that_ends_no_reply_is_refused(session: TrainingSession) -> None:
    import copy

    other = copy.deepcopy(session.tokenizer)
    other.chat_template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    with pytest.raises(ValueError, match="does not end a reply"):
        user_turn_ids(other, session.preset, "More.", after=[1])


# -- the wrong agent, and failures ------------------------------------------------


async def test_the_one_turn_agent_refuses_several_turns(
    session: TrainingSession,
) -> None:
    run, agent = await play(session, talk(1), kind=PolicyAgent)
    assert run.trace.status == "error"
    assert "connect with agent=EpisodeAgent" in str(agent.failure)
    with pytest.raises(RolloutFailed, match=r"talk.*PolicyAgent answers one"):
        check_run(run)
    assert session.usage.counts.total == 0


async def test_the_agent_of_several_turns_refuses_one(session: TrainingSession) -> None:
    run, agent = await play(session, once(1))
    assert run.trace.status == "error"
    assert "PolicyAgent answers it" in str(agent.failure)
    assert session.usage.counts.total == 0


async def test_one_failed_turn_fails_the_rollout(session: TrainingSession) -> None:
    with pytest.raises(RolloutFailed, match="RuntimeError: unlucky"):
        await calibrate(session, [talk(1), talk(13)], group_size=2)


async def test_an_episode_that_outgrows_the_context_fails(
    session: TrainingSession,
) -> None:
    run, agent = await play(session, talk(1, replies=1000))
    assert run.trace.status == "error"
    assert "over the context of 256" in str(agent.failure)


# -- through the loop -------------------------------------------------------------


async def test_a_step_trains_on_every_reply_and_no_user_token(
    session: TrainingSession, tmp_path: Path
) -> None:
    tasks = [talk(1), talk(2, replies=2)]
    config = TrainConfig.from_preset(session.preset, kl_every=1, max_tokens=8)
    result = await train_step(session, tasks, config=config, run_dir=tmp_path / "run")
    assert result.updated
    assert result.max_ratio_error is not None
    assert result.max_ratio_error < 1e-3
    datums, _ = make_training_batch(result.runs)
    assert len(datums) == len(result.datums)
    assert sorted(check_run(run).turns for run in result.runs) == [2] * 4 + [3] * 4
    trained = sum(
        int((datum.loss_fn_inputs["advantages"].to_numpy() != 0).sum())
        for datum in result.datums
    )
    assert result.metrics.trained_tokens == trained
    rows = read_rollouts(tmp_path / "run" / "rollouts.jsonl")
    assert trained == sum(r.output_tokens for r in rows if r.advantage is not None)
    assert all(row.text.count("\n> More ") in (1, 2) for row in rows)
    # Before the first update policy and base are one, in every turn.
    assert result.metrics.kl == pytest.approx(0.0, abs=1e-4)


async def test_the_update_moves_replies_only_as_told(session: TrainingSession) -> None:
    config = TrainConfig.from_preset(session.preset, max_tokens=8, learning_rate=1e-3)
    result = await train_step(session, [talk(1), talk(2)], config=config)
    client = session.training_client
    future = await client.forward_async(list(result.datums), config.loss_fn)
    output = await future.result_async()
    gain = 0.0
    for datum, row in zip(result.datums, output.loss_fn_outputs, strict=True):
        weights = datum.loss_fn_inputs["advantages"].to_numpy()
        sampled = datum.loss_fn_inputs["logprobs"].to_numpy()
        moved = row["logprobs"].to_numpy() - sampled
        gain += float(np.sum(weights * moved))
    assert gain > 0
