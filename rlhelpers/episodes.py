"""Rollouts of several turns: the agent that plays an episode to its end.

Each reply is sampled after everything that was said before it. The tokens of a reply
stay what was sampled, never text encoded again, so that the prompt of every turn
*extends* the prompt, the reply and the user turn before it. That prefix property is
what lets one datum hold the whole episode (:class:`rlhelpers.datums.Episode`).
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import mcp.types as mcp_types
from hud.types import Step

from rlhelpers.sampling import PolicyAgent, end_token_ids, prompt_message
from rlhelpers.turns import open_turns, takes_turns

if TYPE_CHECKING:
    from hud.eval.run import Run
    from transformers import PreTrainedTokenizerBase

    from rlhelpers.models import ModelPreset

#: Stands for a reply while the chat template is asked what follows one.
_REPLY = "REPLY-GOES-HERE"
#: Before each user turn in a recorded episode's text.
USER_MARK = "> "


def turn_seed(seed: int, turn: int) -> int:
    """Seed of one turn's request; the first turn has the rollout's own.

    >>> turn_seed(7, 0), turn_seed(7, 1) != turn_seed(7, 2)
    (7, True)
    """
    if turn == 0:
        return seed
    digest = hashlib.sha256(f"{seed}:turn {turn}".encode()).digest()
    return int.from_bytes(digest[:4], "big") & 0x7FFF_FFFF


def user_turn_ids(
    tokenizer: PreTrainedTokenizerBase,
    preset: ModelPreset,
    text: str,
    *,
    after: Sequence[int],
) -> list[int]:
    """Token ids between a sampled reply and the next one: the user's turn.

    The chat template writes them: what it puts after a reply, which is the rest of
    that turn, the user's turn, and the start of the next reply. The marker that ends
    a reply is left out where it was sampled; a reply that was cut off gets it here,
    untrained.

    Args:
        tokenizer: The model's tokenizer.
        preset: Its preset, for the chat template's options.
        text: What the user says.
        after: The sampled ids of the reply before.

    Raises:
        ValueError: The template does not end a reply with one of the model's markers.
    """
    rendered = tokenizer.apply_chat_template(
        [
            {"role": "user", "content": "-"},
            {"role": "assistant", "content": _REPLY},
            {"role": "user", "content": text},
        ],
        tokenize=False,
        add_generation_prompt=True,
        **preset.chat_template_kwargs,
    )
    follows = str(rendered).rpartition(_REPLY)[2]
    ids = [int(i) for i in tokenizer.encode(follows, add_special_tokens=False)]
    ends = set(end_token_ids(tokenizer))
    closing = next((at for at, token in enumerate(ids) if token in ends), None)
    if closing is None:
        raise ValueError(
            f"the chat template of {str(preset.tokenizer)!r} does not end a reply with "
            "a token that the model stops at: several turns need one that does"
        )
    return ids[closing + 1 :] if after and after[-1] in ends else ids


class EpisodeAgent(PolicyAgent):
    """A HUD agent that plays a task of several turns from a policy snapshot.

    Samples a reply, says it to the environment, adds what is answered, and goes on
    until the environment ends the episode. Every reply is recorded as an ``AgentStep``
    with its ``Sample``, every answer as a user step; the whole conversation is left in
    ``run.trace.content``, the user's lines after ``"> "``. A turn that fails raises,
    and with it the rollout fails.

    Connect with ``connect(agent=EpisodeAgent, task_runtime=…)``; its arguments are
    those of :class:`~rlhelpers.sampling.PolicyAgent`.
    """

    async def _answer(self, run: Run) -> None:
        if not takes_turns(run):
            raise ValueError(
                f"task {run.task_id!r} takes one reply and EpisodeAgent plays several "
                "turns: connect without agent=, so that PolicyAgent answers it"
            )
        said: list[str] = []
        prompt_ids = self.render([prompt_message(turn) for turn in run.prompt_messages])
        async with open_turns(run) as say:
            for turn in itertools.count():
                reply, output = await self.take_turn(
                    run, prompt_ids, seed=turn_seed(self.seed, turn), done=False
                )
                said.append(reply)
                run.trace.content = "\n".join(said)
                answer = await say(reply)
                if answer is None:
                    return
                said.append(USER_MARK + answer)
                run.record(Step(source="user", messages=[_user_message(answer)]))
                sampler = self.sampler
                follows = user_turn_ids(
                    sampler.tokenizer, sampler.preset, answer, after=output
                )
                prompt_ids = [*prompt_ids, *output, *follows]


def _user_message(text: str) -> mcp_types.PromptMessage:
    content = mcp_types.TextContent(type="text", text=text)
    return mcp_types.PromptMessage(role="user", content=content)
