"""Rollouts: a HUD agent over an SDK sampler, and a driver for groups of them.

Who does what: HUD starts the task, hands the agent a prompt, grades the reply and
returns a ``Run``; the agent renders the prompt, samples through the Fireworks SDK and
records the sampled token ids with their log-probabilities. Those ids and
log-probabilities, never re-tokenised text, are what training uses.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import mcp.types as mcp_types
from fireworks.training.sdk import types as fireworks_types
from hud.agents.base import Agent
from hud.agents.types import AgentConfig, AgentStep, Sample, Usage
from hud.eval.run import Run, rollout
from hud.utils.time import now_iso

from rlhelpers.advantages import run_reward
from rlhelpers.analysis import classify_outcome
from rlhelpers.datums import RolloutFailed, check_run
from rlhelpers.metrics import RolloutRecord
from rlhelpers.refusals import explained
from rlhelpers.turns import takes_turns
from rlhelpers.usage import BusyClock, TokenLimitReached, TokenUsage
from rlhelpers.waits import Waits

if TYPE_CHECKING:
    from fireworks.training.sdk import FiretitanSamplingClient
    from hud.eval.runtime import Provider
    from hud.eval.task import Task
    from transformers import PreTrainedTokenizerBase

    from rlhelpers.models import ModelPreset

# Markers that end an assistant turn in common chat templates. Some models name
# another token as their end-of-sequence token, so it alone is not enough.
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>")
_THINK = re.compile(r"<think>.*?</think>", re.DOTALL)


class PromptTooLong(ValueError):
    """Prompt and reply together do not fit the model's context."""


@dataclass(frozen=True)
class SamplingSettings:
    """How a reply is sampled.

    Attributes:
        max_tokens: Most tokens of one reply; always explicit, because a silent
            default would cut answers off.
        temperature: 1 samples the model's own distribution, 0 is greedy.
        top_p: Nucleus mass kept, 1 keeps everything.
        top_k: Tokens kept, -1 (or 0) keeps everything.

    Raises:
        ValueError: A value is out of range; the message names it.

    Example:
        >>> SamplingSettings.greedy(160).temperature
        0.0
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not 0.0 <= self.temperature <= 10.0:
            raise ValueError(
                f"temperature must be between 0 (greedy) and 10, got {self.temperature}"
            )
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(
                f"top_p must be above 0 and at most 1, got {self.top_p}; 1 turns it off"
            )
        if self.top_k < -1:
            raise ValueError(f"top_k must be -1 (off) or more, got {self.top_k}")

    @classmethod
    def greedy(cls, max_tokens: int) -> SamplingSettings:
        """The evaluation settings: always the most probable token."""
        return cls(max_tokens=max_tokens, temperature=0.0)

    @property
    def is_on_policy(self) -> bool:
        """Whether samples come from the model's own, unaltered distribution."""
        unfiltered = self.top_p == 1.0 and self.top_k in (-1, 0)
        return self.temperature == 1.0 and unfiltered

    def warn_if_biased(self) -> None:
        """Warn when training on these samples would bias the importance ratios.

        The trainer computes log-probabilities of the unaltered model. Samples drawn
        at another temperature, or from a filtered vocabulary, were drawn from another
        distribution, so their ratio is not 1 before any update; rescaling the stored
        log-probabilities does not repair that.
        """
        if not self.is_on_policy:
            warnings.warn(
                f"training samples at temperature={self.temperature}, "
                f"top_p={self.top_p}, top_k={self.top_k}: importance ratios are "
                "biased, because the trainer scores the unaltered model; use "
                "temperature=1, top_p=1, top_k=-1 for training",
                UserWarning,
                stacklevel=3,
            )


def rollout_seed(run_seed: int, step: int, task_index: int, rollout_index: int) -> int:
    """Seed of one rollout: the same on every machine, different for every rollout.

    One seed for a whole group would make its rollouts identical, and so its spread
    zero.

    Returns:
        An integer in [0, 2**31).

    Example:
        >>> rollout_seed(0, 1, 0, 0) != rollout_seed(0, 1, 0, 1)
        True
    """
    text = f"{run_seed}:{step}:{task_index}:{rollout_index}"
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:4], "big") & 0x7FFF_FFFF


def end_token_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids of the tokens that end an assistant turn, without duplicates."""
    added = tokenizer.get_added_vocab()
    found = [tokenizer.eos_token_id, *(added.get(marker) for marker in _END_OF_TURN)]
    ids = dict.fromkeys(token for token in found if isinstance(token, int))
    if not ids:
        raise ValueError(
            "the tokenizer names no end-of-sequence token, so a reply could only end "
            "at the token limit; use the tokenizer of an instruct model"
        )
    return tuple(ids)


def reply_text(
    tokenizer: PreTrainedTokenizerBase,
    token_ids: Sequence[int],
    *,
    thinking_open: bool = False,
) -> str:
    """Decode the text that is graded.

    The end marker and a thinking block are dropped; a thinking block that never
    closes leaves an empty reply, because no answer was given.

    Args:
        tokenizer: The model's tokenizer.
        token_ids: Sampled ids, the end token included.
        thinking_open: Whether the prompt already opened a thinking block.

    Returns:
        The reply, possibly empty.
    """
    ends = set(end_token_ids(tokenizer))
    kept = list(token_ids)
    while kept and kept[-1] in ends:
        kept.pop()
    decoded = tokenizer.decode(kept, skip_special_tokens=False)
    text = decoded if isinstance(decoded, str) else "".join(decoded)
    if thinking_open:
        text = "<think>" + text
    text = _THINK.sub("", text)
    return "" if "<think>" in text else text.strip()


@dataclass
class PolicySampler:
    """One snapshot of the policy, ready to sample from.

    A sampler is bound to the weights it was saved with and never sees a later update,
    so every step opens a new one.

    Attributes:
        client: The SDK's sampling client.
        snapshot: What is sampled: a checkpoint path, or the base model's id.
        tokenizer: The tokenizer that fits the model.
        preset: The model's preset.
        examples: Earlier turns put before every prompt, as (user, assistant) pairs.
        usage: The session's token counters.
        clock: Wall time with at least one request in flight.
        waits: Tells what is waited for.
    """

    client: FiretitanSamplingClient
    snapshot: str
    tokenizer: PreTrainedTokenizerBase
    preset: ModelPreset
    examples: tuple[tuple[str, str], ...] = ()
    usage: TokenUsage = field(default_factory=TokenUsage)
    clock: BusyClock = field(default_factory=BusyClock)
    waits: Waits = field(default_factory=Waits)

    def close(self) -> None:
        """Refuse further requests; those in flight end in the background."""
        self.client.close()

    async def sample(
        self, prompt_ids: Sequence[int], settings: SamplingSettings, seed: int
    ) -> fireworks_types.SampledSequence:
        """Sample one reply to a rendered prompt.

        Args:
            prompt_ids: Token ids of the prompt.
            settings: Temperature, filters and the reply's token limit.
            seed: The request's seed.

        Raises:
            PromptTooLong: Prompt and ``max_tokens`` exceed the context; not sent.
            TokenLimitReached: The session's token limit would be passed; not sent.
            ServiceRefused: The service refused; the message says why.
            ValueError: The reply holds a token that the tokenizer does not know.
        """
        check_context(len(prompt_ids), settings.max_tokens, self.preset.context)
        bound = {"prefill": len(prompt_ids), "sampled": settings.max_tokens}
        with (
            self.usage.reserve(**bound) as spend,
            self.clock.busy(),
            self.waits.operation("sampling"),
            explained(self.preset, sampling=True),
        ):
            response = await self.client.sample_async(
                prompt=fireworks_types.ModelInput.from_ints(list(prompt_ids)),
                num_samples=1,
                sampling_params=fireworks_types.SamplingParams(
                    max_tokens=settings.max_tokens,
                    seed=seed,
                    temperature=settings.temperature,
                    top_p=settings.top_p,
                    top_k=settings.top_k,
                    # Ids, which the SDK turns into the marker's exact text: a marker
                    # written by hand may not be what the tokenizer calls it.
                    stop=list(end_token_ids(self.tokenizer)),
                ),
            )
            sequence: fireworks_types.SampledSequence
            (sequence,) = response.sequences
            spend(prefill=len(prompt_ids), sampled=len(sequence.tokens))
        _check_vocabulary(sequence.tokens, self.tokenizer, self.preset)
        return sequence


def _check_vocabulary(
    token_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, preset: ModelPreset
) -> None:
    """Refuse replies that only another tokenizer could have a text for."""
    if token_ids and max(token_ids) >= len(tokenizer):
        raise ValueError(
            f"base model {preset.base_model!r} answered with token {max(token_ids)}, "
            f"but tokenizer {str(preset.tokenizer)!r} knows {len(tokenizer)}: it is "
            "another model's; set the preset's tokenizer to the model's own"
        )


def check_context(prompt_tokens: int, max_tokens: int, context: int) -> None:
    """Check before sending that prompt and reply fit the context.

    Raises:
        PromptTooLong: They do not; the message gives the numbers.
    """
    if prompt_tokens + max_tokens > context:
        raise PromptTooLong(
            f"a prompt of {prompt_tokens} tokens and max_tokens={max_tokens} make "
            f"{prompt_tokens + max_tokens}, over the context of {context}; lower "
            f"max_tokens to at most {max(context - prompt_tokens, 0)}, or shorten "
            "the prompt"
        )


def prompt_message(turn: mcp_types.PromptMessage) -> dict[str, str]:
    """One HUD prompt turn as a chat-template message."""
    if not isinstance(turn.content, mcp_types.TextContent):
        raise ValueError(
            f"PolicyAgent reads text prompts only, got {turn.content.type!r} content; "
            "use an agent that handles it"
        )
    return {"role": turn.role, "content": turn.content.text}


def render_prompt(
    tokenizer: PreTrainedTokenizerBase,
    preset: ModelPreset,
    messages: Sequence[Mapping[str, str]],
    *,
    examples: Sequence[tuple[str, str]] = (),
) -> list[int]:
    """Token ids of a conversation, up to where the assistant's reply begins.

    The chat template writes every special token itself; none is added on top.

    Args:
        tokenizer: The model's tokenizer.
        preset: Its preset, for the chat template's options.
        messages: Turns with ``role`` and ``content``.
        examples: Earlier turns put before them, as (user, assistant) pairs.
    """
    turns: list[dict[str, str]] = []
    for user, assistant in examples:
        turns.append({"role": "user", "content": user})
        turns.append({"role": "assistant", "content": assistant})
    ids = tokenizer.apply_chat_template(
        [*turns, *(dict(message) for message in messages)],
        tokenize=True,
        add_generation_prompt=True,
        return_dict=False,
        **preset.chat_template_kwargs,
    )
    return [int(token) for token in cast("Sequence[int]", ids)]


class PolicyAgent(Agent[AgentConfig]):
    """A HUD agent that answers a one-turn task from a policy snapshot.

    It renders the prompt once with the tokenizer's own chat template, samples one
    reply, records it as one ``AgentStep`` with its ``Sample``, and leaves the reply in
    ``run.trace.content`` for the grader. A sampling failure raises, so that HUD marks
    the run as failed instead of grading an empty answer.

    Args:
        sampler: The snapshot to sample from.
        settings: Temperature, filters and the reply's token limit.
        seed: Seed of the request.
        refused: Shared by the agents of one phase. The first request that the token
            limit refuses is noted here, and then none of them sends anything more:
            the phase is lost, so further rollouts would only cost.

    Attributes:
        failure: The exception that ended the last call, or None.

    Example:
        >>> agent = PolicyAgent(sampler, SamplingSettings.greedy(160))  # doctest: +SKIP
        >>> run = await hud.eval.rollout(task, agent, runtime=rt)  # doctest: +SKIP
    """

    def __init__(
        self,
        sampler: PolicySampler,
        settings: SamplingSettings,
        *,
        seed: int = 0,
        refused: list[TokenLimitReached] | None = None,
    ) -> None:
        super().__init__(
            AgentConfig(model=sampler.snapshot, model_name=type(self).__name__)
        )
        self.sampler = sampler
        self.settings = settings
        self.seed = seed
        self.refused = [] if refused is None else refused
        self.failure: BaseException | None = None

    def render(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation, up to where the assistant's reply begins.

        The chat template writes every special token itself; none is added on top.
        """
        sampler = self.sampler
        return render_prompt(
            sampler.tokenizer, sampler.preset, messages, examples=sampler.examples
        )

    async def __call__(self, run: Run) -> None:
        try:
            if self.refused:
                raise self.refused[0]
            await self._answer(run)
        except Exception as error:
            self.failure = error
            if isinstance(error, TokenLimitReached) and not self.refused:
                self.refused.append(error)
            raise

    async def _answer(self, run: Run) -> None:
        if takes_turns(run):
            raise ValueError(
                f"task {run.task_id!r} takes several turns and PolicyAgent answers "
                "one: connect with agent=EpisodeAgent"
            )
        prompt_ids = self.render([prompt_message(turn) for turn in run.prompt_messages])
        reply, _ = await self.take_turn(run, prompt_ids, seed=self.seed, done=True)
        run.trace.content = reply

    async def take_turn(
        self, run: Run, prompt_ids: list[int], *, seed: int, done: bool
    ) -> tuple[str, list[int]]:
        """Sample one reply and record it as an ``AgentStep`` with its ``Sample``.

        Args:
            run: The live run.
            prompt_ids: Token ids of everything before the reply.
            seed: Seed of the request.
            done: Whether no turn can follow.

        Returns:
            The reply's text and its sampled token ids.
        """
        tokenizer = self.sampler.tokenizer
        started_at = now_iso()
        sequence = await self.sampler.sample(prompt_ids, self.settings, seed)
        tail = tokenizer.decode(prompt_ids[-8:], skip_special_tokens=False)
        reply = reply_text(
            tokenizer,
            sequence.tokens,
            thinking_open=str(tail).rstrip().endswith("<think>"),
        )
        output = list(sequence.tokens)
        run.record(
            AgentStep(
                content=reply,
                done=done,
                finish_reason=sequence.stop_reason,
                model=self.sampler.snapshot,
                started_at=started_at,
                usage=Usage(
                    prompt_tokens=len(prompt_ids),
                    completion_tokens=len(output),
                ),
                sample=Sample(
                    prompt_token_ids=prompt_ids,
                    output_token_ids=output,
                    output_logprobs=list(sequence.logprobs or []),
                ),
            )
        )
        return reply, output


def sampled_steps(run: Run) -> list[AgentStep]:
    """The run's assistant steps with a recorded sample, one for each turn."""
    return [
        step
        for step in run.trace.steps
        if isinstance(step, AgentStep) and step.sample is not None
    ]


def sampled_step(run: Run) -> AgentStep | None:
    """The last assistant step with a recorded sample, or None."""
    steps = sampled_steps(run)
    return steps[-1] if steps else None


@dataclass(frozen=True)
class RolloutPlan:
    """Which rollouts to run, and under what names they are recorded.

    Attributes:
        phase: What they are for, such as "train" or "before"; part of group ids
            and records.
        step: Optimizer step they belong to; 0 outside training.
        seed: The run's seed; each rollout derives its own.
        group_size: Rollouts per task.
        settings: How replies are sampled.
        job_id: HUD's job id, shared by all rollouts of the run.
    """

    phase: str
    step: int
    seed: int
    group_size: int
    settings: SamplingSettings
    job_id: str

    def group_id(self, task: Task, task_index: int) -> str:
        """Our own id of a task's group; HUD's are random and say nothing."""
        return f"{self.phase}-{self.step}-{task_index}-{task.slug}"


async def collect_rollouts(
    sampler: PolicySampler,
    tasks: Sequence[Task],
    *,
    plan: RolloutPlan,
    runtime: Provider,
    save: Callable[[list[Run]], None] | None = None,
    agent_type: type[PolicyAgent] = PolicyAgent,
) -> list[Run]:
    """Run ``group_size`` rollouts of every task, all at once.

    Args:
        sampler: The snapshot to sample from.
        tasks: The tasks; their order numbers the groups.
        plan: Group size, seeds, settings and names.
        runtime: Where HUD runs the tasks, such as ``await session.runtime()``.
        save: Called with all runs, failed ones included, before they are checked, so
            that what was paid for is on disk whatever happens next.
        agent_type: What answers the tasks; for several turns, ``EpisodeAgent``.

    Returns:
        ``len(tasks) * group_size`` runs, task by task.

    Raises:
        RolloutFailed: A rollout failed to sample or to be graded. All others have
            ended by then.
        ValueError: The grader paid no finite number; names the task.
        TokenLimitReached: The session's token limit stopped a rollout; no further
            one was sent.
    """
    refused: list[TokenLimitReached] = []
    agents = [
        agent_type(
            sampler,
            plan.settings,
            seed=rollout_seed(plan.seed, plan.step, task_index, rollout_index),
            refused=refused,
        )
        for task_index in range(len(tasks))
        for rollout_index in range(plan.group_size)
    ]

    async def one(number: int, agent: PolicyAgent) -> Run:
        task_index, rollout_index = divmod(number, plan.group_size)
        task = tasks[task_index]
        run = await rollout(
            task,
            agent,
            runtime=runtime,
            job_id=plan.job_id,
            group_id=plan.group_id(task, task_index),
        )
        step = sampled_step(run)
        run.trace.extra |= {
            "phase": plan.phase,
            "step": plan.step,
            "task_index": task_index,
            "rollout_index": rollout_index,
            "seed": agent.seed,
            "finish_reason": step.finish_reason if step else None,
            # The stop reason decides, never the length: a reply may end by itself
            # at the very last token, or be cut earlier by the context.
            "token_limit": any(
                step.finish_reason == "length" for step in sampled_steps(run)
            ),
        }
        return run

    with _only_new_objects_collected():
        runs = list(await asyncio.gather(*map(one, range(len(agents)), agents)))
    if save is not None:
        save(runs)
    for run, agent in zip(runs, agents, strict=True):
        if isinstance(agent.failure, TokenLimitReached):
            raise agent.failure
        try:
            check_run(run)
        except RolloutFailed as error:
            raise error from agent.failure
        run_reward(run)  # no finite number: an error, in every phase
    return runs


@contextlib.contextmanager
def _only_new_objects_collected() -> Iterator[None]:
    """Keep Python's garbage collector off the objects that are there already.

    Hundreds of thousands of them belong to the libraries, and rollouts make so many
    new ones that a full collection runs over all of them again every few hundred.
    """
    if gc.get_freeze_count():  # by a call around this one, or by the program itself
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def to_record(
    run: Run,
    task: Task,
    *,
    run_id: str,
    attempt: int = 1,
    advantage: float | None = None,
) -> RolloutRecord:
    """A valid run as a row of ``rollouts.jsonl``.

    Args:
        run: A run from :func:`collect_rollouts` that passed ``check_run``.
        task: The task it attempted.
        run_id: Id of the training run or evaluation it belongs to.
        attempt: How often its step was begun.
        advantage: What it was trained with, or None.
    """
    sample, extra = check_run(run), run.trace.extra
    expected = run.grade.info.get("expected")
    text = run.trace.content or ""
    logprobs = sample.output_logprobs
    step = sampled_step(run)
    return RolloutRecord(
        run_id=run_id,
        phase=str(extra["phase"]),
        step=cast("int", extra["step"]),
        attempt=attempt,
        task=task.slug,
        task_index=cast("int", extra["task_index"]),
        rollout_index=cast("int", extra["rollout_index"]),
        seed=cast("int", extra["seed"]),
        args=task.args,
        expected=expected,
        got=run.grade.info.get("got"),
        prompt=run.prompt_text,
        text=text,
        reward=run.grade.reward,
        outcome=classify_outcome(text, expected) if type(expected) is int else None,
        token_limit=bool(extra["token_limit"]),
        finish_reason=cast("str | None", extra["finish_reason"]),
        prompt_tokens=len(sample.prompt_token_ids),
        output_tokens=len(sample.output_token_ids),
        entropy=0.0 - sum(logprobs) / len(logprobs) if logprobs else None,
        advantage=advantage,
        snapshot=step.model if step else None,
    )
