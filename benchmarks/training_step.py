"""One update through the service, against plain torch and peft on the same data.

    python benchmarks/training_step.py            # 64 datums, 7 rounds
    python benchmarks/training_step.py --quick

An update is one ``forward_backward`` and one ``optim_step``: importance sampling, a sum
over tokens, LoRA of rank 8 on every linear layer, Adam. One side is the SDK's client,
HTTP and the service. The other holds the same adapter (same seed, so the same initial
weights) and takes the same steps in its own process, with all datums in one batch,
padded on the right: attention is causal, so it needs no mask, and the fastest attention
kernel applies.

The datums are replies that the base model really sampled. Their rewards are made up,
half of each group 1 and half 0, so that no group is dropped. Every round is the next
step on the same datums; after every one the two losses must agree.
"""

from __future__ import annotations

import argparse
import asyncio
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from fireworks.training.sdk import AdamParams, Datum
from peft import LoraConfig, get_peft_model
from sampling import load_plain_model
from side_by_side import (
    Side,
    Timing,
    add_threads,
    alternate,
    base_parser,
    cpu_ratio,
    draw_tasks,
    median_cpu,
    median_seconds,
    open_session,
    print_table,
    prompt_of,
    ratio,
    torch_threads,
    where,
)
from torch import Tensor, nn

from rlhelpers import TrainConfig, group_relative_advantages, make_datum
from rlhelpers.sampling import SamplingSettings, rollout_seed
from rlhelpers.service import TrainingSession

ALPHA = 32  # what the SDK asks for
TOLERANCE = 1e-3  # of the loss per trained token


@dataclass(frozen=True)
class Row:
    """A datum as plain lists, which is what a loop without a service would hold."""

    tokens: list[int]
    targets: list[int]
    logprobs: list[float]
    advantages: list[float]

    @classmethod
    def of(cls, datum: Datum) -> Row:
        """The same numbers as ``datum``."""
        inputs = datum.loss_fn_inputs
        return cls(
            datum.model_input.to_ints(),
            inputs["target_tokens"].tolist(),
            inputs["logprobs"].tolist(),
            inputs["advantages"].tolist(),
        )


class PlainTrainer:
    """A LoRA adapter, its optimizer, and one step at a time."""

    def __init__(self, session: TrainingSession, seed: int, adam: AdamParams) -> None:
        model = load_plain_model(session.preset)
        model.requires_grad_(False)
        layers = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
        config = LoraConfig(
            r=session.preset.lora_rank, lora_alpha=ALPHA, target_modules=layers
        )
        torch.manual_seed(seed)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
            self.model = get_peft_model(model, config)
        self.model.eval()
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            trained,
            lr=adam.learning_rate,
            betas=(adam.beta1, adam.beta2),
            eps=adam.eps,
            weight_decay=0.0,
        )

    def step(self, rows: Sequence[Row]) -> float:
        """One update on one padded batch; returns the loss, a sum over tokens."""
        longest = max(len(row.tokens) for row in rows)
        tokens = padded([row.tokens for row in rows], longest, torch.long)
        targets = padded([row.targets for row in rows], longest, torch.long)
        logprobs = padded([row.logprobs for row in rows], longest, torch.float32)
        weights = padded([row.advantages for row in rows], longest, torch.float32)
        logits = self.model(input_ids=tokens, use_cache=False).logits
        lp = -nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), reduction="none"
        )
        ratios = torch.exp(lp - logprobs.flatten())
        loss = -(ratios * weights.flatten()).sum()  # padding has advantage 0
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())


def padded(rows: Sequence[Sequence[float]], longest: int, dtype: torch.dtype) -> Tensor:
    """Rows of different lengths as one tensor, filled up with 0 on the right.

    >>> padded([[1, 2], [3]], 2, torch.long).tolist()
    [[1, 2], [3, 0]]
    """
    tensor = torch.zeros(len(rows), longest, dtype=dtype)
    for index, row in enumerate(rows):
        tensor[index, : len(row)] = torch.tensor(row, dtype=dtype)
    return tensor


async def sample_datums(
    session: TrainingSession, options: argparse.Namespace
) -> list[Datum]:
    """Replies of the base model, each group with as many good as bad ones."""
    sampler = session.base_sampler()
    settings = SamplingSettings(options.max_tokens or session.preset.max_tokens)
    rewards = [float(j % 2) for j in range(options.group)]
    advantages = group_relative_advantages(rewards)

    async def one(index: int, prompt: list[int], j: int) -> Datum:
        seed = rollout_seed(options.seed, 0, index, j)
        reply = await sampler.sample(prompt, settings, seed)
        return make_datum(prompt, reply.tokens, reply.logprobs or [], advantages[j])

    tasks = draw_tasks(session, options.prompts, options.seed)
    work = [
        one(index, prompt_of(sampler, task), j)
        for index, task in enumerate(tasks)
        for j in range(options.group)
    ]
    return list(await asyncio.gather(*work))


async def update_through_service(
    session: TrainingSession, datums: list[Datum], adam: AdamParams
) -> float:
    """Both operations, sent back to back as ``train_step`` does; returns the loss."""
    client = session.training_client
    backward = await client.forward_backward_async(datums, "importance_sampling", None)
    optimizer = await client.optim_step_async(adam)
    output = await backward.result_async()
    await optimizer.result_async()
    return float(output.metrics["loss:sum"])


async def measure(options: argparse.Namespace) -> None:
    """Run the rounds, compare the losses, print the report."""
    losses: dict[str, list[float]] = {}

    def note(name: str, loss: float, seconds: float) -> Timing:
        losses.setdefault(name, []).append(loss)
        return Timing(seconds, 1)

    with open_session(options) as session:
        adam = TrainConfig.from_preset(session.preset).adam
        datums = await sample_datums(session, options)
        rows = [Row.of(datum) for datum in datums]

        async def service(number: int) -> Timing:
            started = time.perf_counter()
            loss = await update_through_service(session, datums, adam)
            return note("service", loss, time.perf_counter() - started)

        def plain(name: str, threads: int) -> Side:
            trainer = PlainTrainer(session, options.seed, adam)

            async def side(number: int) -> Timing:
                with torch_threads(threads):
                    started = time.perf_counter()
                    loss = trainer.step(rows)
                    return note(name, loss, time.perf_counter() - started)

            return side

        rivals = {
            name: plain(name, n)
            for n in options.threads
            for name in [f"torch and peft, {n} threads"]
        }
        timings = await alternate({"service": service, **rivals}, options.rounds)
    lengths = [len(row.tokens) for row in rows]
    trained = sum(sum(a != 0 for a in row.advantages) for row in rows)
    print(
        f"{len(rows)} datums of {min(lengths)} to {max(lengths)} tokens, "
        f"{sum(lengths)} in all, {trained} trained; {options.rounds} updates after a "
        "first"
    )
    report(timings, losses, trained)


def report(
    timings: dict[str, list[Timing]], losses: dict[str, list[float]], trained: int
) -> None:
    """Print table, ratios and agreement; SystemExit if the losses disagree."""
    print(where())
    print_table(
        ("", "seconds", "CPU s", "first loss", "last loss"),
        [
            (
                name,
                f"{median_seconds(side):.3f}",
                f"{median_cpu(side):.3f}",
                f"{losses[name][0]:.4f}",
                f"{losses[name][-1]:.4f}",
            )
            for name, side in timings.items()
        ],
    )
    ours, *rivals = timings
    for name in rivals:
        print(
            f"updates per second, {ours} against {name}: "
            f"{ratio(timings[ours], timings[name])}"
        )
        print(f"  per CPU second: {cpu_ratio(timings[ours], timings[name])}")
    gap = max(
        abs(a - b) / trained
        for name in rivals
        for a, b in zip(losses[ours], losses[name], strict=True)
    )
    print(f"largest difference of a loss, per trained token: {gap:.1e}")
    if not gap <= TOLERANCE:  # also true for NaN
        raise SystemExit(
            f"the losses differ by {gap:.1e} per trained token, more than {TOLERANCE}: "
            "the two sides do not compute the same update"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the options and measure."""
    parser = base_parser(__doc__, rounds=7)
    add_threads(parser)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=None)
    options = parser.parse_args(arguments)
    if options.quick:
        options.prompts, options.group, options.rounds = 2, 4, 1
        options.max_tokens, options.threads = 16, [1]
    asyncio.run(measure(options))


if __name__ == "__main__":
    main()
