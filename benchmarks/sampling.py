"""Sample completions through the service, against transformers' ``generate``.

    python benchmarks/sampling.py            # 64 completions a round, 7 rounds
    python benchmarks/sampling.py --quick

One side is the SDK's client, HTTP and the service; every request is one completion. The
other is ``generate`` on the same weights, in float32 with SDPA attention and a dynamic
key/value cache, with all prompts in one left-padded batch and ``num_return_sequences``
for the group: sampling 64 rows at once is the fastest that it does. The service also
returns the log-probability of every token, which ``generate`` is not asked for.

Each round takes new prompts, the same for both sides, so that nothing is in a cache.
The random texts differ and with them their lengths, so the rate is per sampled token,
the end token included.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from side_by_side import (
    Side,
    Timing,
    add_threads,
    alternate,
    base_parser,
    cpu_ratio,
    draw_tasks,
    median_cpu,
    median_rate,
    median_seconds,
    open_session,
    print_table,
    prompt_of,
    ratio,
    torch_threads,
    verdict,
    where,
)
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from rlhelpers.models import ModelPreset
from rlhelpers.sampling import (
    PolicySampler,
    SamplingSettings,
    end_token_ids,
    rollout_seed,
)

GOAL = 1.5


@dataclass(frozen=True)
class Requests:
    """One round's work: prompts of token ids, replies to each, and how to sample."""

    prompts: list[list[int]]
    group: int
    settings: SamplingSettings
    seed: int


def load_plain_model(preset: ModelPreset) -> PreTrainedModel:
    """The base model as anyone would load it for sampling."""
    logging.disable_progress_bar()
    place, options = preset.files
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        place, dtype=torch.float32, attn_implementation="sdpa", **options
    )
    model.eval()
    # Sampling settings that a model's own files bring along are not ours.
    model.generation_config.do_sample = False
    return model


async def sample_through_service(sampler: PolicySampler, work: Requests) -> Timing:
    """All requests at once, each with a seed of its own."""
    started = time.perf_counter()
    replies = await asyncio.gather(
        *(
            sampler.sample(prompt, work.settings, rollout_seed(work.seed, 0, i, j))
            for i, prompt in enumerate(work.prompts)
            for j in range(work.group)
        )
    )
    seconds = time.perf_counter() - started
    return Timing(seconds, sum(len(reply.tokens) for reply in replies))


def sample_with_generate(
    model: PreTrainedModel, ends: Sequence[int], work: Requests
) -> Timing:
    """One left-padded batch."""
    longest = max(map(len, work.prompts))
    torch.manual_seed(work.seed)
    started = time.perf_counter()
    ids = torch.tensor(
        [[ends[0]] * (longest - len(p)) + p for p in work.prompts], device=model.device
    )
    mask = torch.tensor(
        [[0] * (longest - len(p)) + [1] * len(p) for p in work.prompts],
        device=model.device,
    )
    with torch.inference_mode():
        output = model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=True,
            temperature=work.settings.temperature,
            top_p=work.settings.top_p,
            top_k=0,
            max_new_tokens=work.settings.max_tokens,
            num_return_sequences=work.group,
            eos_token_id=list(ends),
            pad_token_id=ends[0],
        )
    replies = output[:, longest:].tolist()
    seconds = time.perf_counter() - started
    return Timing(seconds, sum(reply_length(reply, ends) for reply in replies))


def reply_length(reply: Sequence[int], ends: Sequence[int]) -> int:
    """Tokens of a reply up to its first end token, which is counted.

    >>> reply_length([5, 6, 2, 2], [2]), reply_length([5, 6], [2])
    (3, 2)
    """
    for position, token in enumerate(reply):
        if token in ends:
            return position + 1
    return len(reply)


async def measure(options: argparse.Namespace) -> None:
    """Run the rounds and print the report."""
    with open_session(options) as session:
        sampler = session.base_sampler()
        ends = end_token_ids(session.tokenizer)
        plain = load_plain_model(session.preset)
        limit = options.max_tokens or session.preset.max_tokens
        tasks = draw_tasks(
            session, options.prompts * (options.rounds + 1), options.seed
        )

        def work(number: int) -> Requests:
            first = number * options.prompts
            chosen = tasks[first : first + options.prompts]
            prompts = [prompt_of(sampler, task) for task in chosen]
            settings = SamplingSettings(limit)
            return Requests(prompts, options.group, settings, options.seed + number)

        async def service(number: int) -> Timing:
            return await sample_through_service(sampler, work(number))

        def generate(threads: int) -> Side:
            async def side(number: int) -> Timing:
                with torch_threads(threads):
                    return sample_with_generate(plain, ends, work(number))

            return side

        rivals = {f"generate, {n} threads": generate(n) for n in options.threads}
        timings = await alternate({"service": service, **rivals}, options.rounds)
    count = options.prompts * options.group
    print(
        f"{count} completions a round ({options.prompts} prompts × {options.group}), "
        f"limit {limit}, temperature 1, {session.preset.name}; {options.rounds} rounds"
    )
    report(timings, count)


def report(timings: dict[str, list[Timing]], count: int) -> None:
    """Print the table and the ratios; the service comes first."""
    print(where())
    print_table(
        ("", "seconds", "CPU s", "tokens/s", "tokens/reply"),
        [
            (
                name,
                f"{median_seconds(side):.3f}",
                f"{median_cpu(side):.3f}",
                f"{median_rate(side):,.0f}",
                f"{sum(t.work for t in side) / (count * len(side)):.1f}",
            )
            for name, side in timings.items()
        ],
    )
    ours, *rivals = timings
    ratios = {name: ratio(timings[ours], timings[name]) for name in rivals}
    for name, value in ratios.items():
        cpu = cpu_ratio(timings[ours], timings[name])
        print(f"tokens per second, {ours} against {name}: {value}")
        print(f"  per CPU second: {cpu}")
    print(verdict(GOAL, min(value.median for value in ratios.values())))


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the options and measure."""
    parser = base_parser(__doc__, rounds=7)
    add_threads(parser)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=None)
    options = parser.parse_args(arguments)
    if options.quick:
        options.prompts, options.group, options.rounds = 2, 2, 1
        options.max_tokens, options.threads = 16, [1]
    asyncio.run(measure(options))


if __name__ == "__main__":
    main()
