"""Pre-train the tiny policy: ``python -m rlhelpers.local.pretrain``.

Seven phases, all on freshly drawn multiplications (`PHASES`):

1. *form*: clean replies at a high learning rate, until the model copies operands
   and lays out its work;
2. *work*: clean replies at a lower rate, which learns the products (at the high
   rate they stay stuck);
3. *settle*: clean replies while the rate decays, and sums alone;
4. *carry*: more sums alone, because carrying is learnt last;
5. *habits*: the bad habits of `rlhelpers.local.corpus` join in;
6. *polish*: the same while the rate decays to zero, mostly on two-digit operands,
   the course's default range;
7. *finish*: a little more of that, in which answering at once is likelier: a guess
   is learnt slowly, because its digits are uncertain.

Three of four clean replies come without their prompt. The work restates its
operands, so nothing is lost, and a step takes half the time. The habits come late
because looping replies are long and teach no arithmetic.

``--evaluate FOLDER`` prints the numbers of the model card instead of training.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)

from rlhelpers.local.corpus import (
    POLISH_MIX,
    HabitRates,
    SizeMix,
    build_tokenizer,
    draw_examples,
    draw_sums,
    draw_works,
    render_prompt,
    write_work,
)
from rlhelpers.local.muon import StackedMuon

DEFAULT_OUT = Path("data/tiny-policy")
TOKEN_LIMIT = 160
IGNORED = -100
MICRO_BATCH_TOKENS = 1_024
REWARD_RANGES = ((1, 9), (1, 99), (10, 99), (10, 300), (100, 999), (1_000, 9_999))


@dataclass(frozen=True)
class Phase:
    """One stretch of pre-training.

    Attributes:
        steps: optimizer steps.
        start, end: shares of the peak learning rates, joined by a straight line.
        mix: how often each size of operands is drawn.
        rates: how often each habit is drawn; None for clean replies only.
        replies: prompts with replies per step.
        works: replies without their prompt per step.
        sums: sums alone per step.
        restart: begin with new optimizer moments and draws of its own, so that the
            phase can also be run alone, on a saved folder (``--only NAME``).
    """

    name: str
    steps: int
    start: float
    end: float
    mix: SizeMix = field(default_factory=SizeMix)
    rates: HabitRates | None = None
    replies: int = 8
    works: int = 24
    sums: int = 0
    restart: bool = False


HABITS = HabitRates(no_work=0.85)

PHASES = (
    Phase("form", 500, 1.0, 1.0),
    Phase("work", 1_700, 0.3, 0.3),
    Phase("settle", 1_650, 0.3, 0.19, sums=16),
    Phase("carry", 1_550, 0.19, 0.14, sums=32),
    Phase("habits", 1_100, 0.14, 0.07, rates=HABITS, replies=24, works=16, sums=16),
    Phase(
        "polish", 1_000, 0.07, 0.0, POLISH_MIX, HABITS, replies=24, works=24, sums=16
    ),
    Phase(
        "finish",
        400,
        0.1,
        0.0,
        POLISH_MIX,
        HabitRates(no_work=0.95),
        replies=24,
        works=8,
        restart=True,
    ),
)


@dataclass(frozen=True)
class PretrainConfig:
    """Knobs of one pre-training run.

    Attributes:
        seed: of the initial weights and of everything drawn.
        phases: trained in this order.
        warmup_steps: steps over which the learning rate first rises.
        muon_lr: peak rate of Muon, which updates the hidden matrices.
        adam_lr: peak rate of AdamW, which updates embeddings and norm gains.
        weight_decay: of Muon.
        checkpoint_every: steps between two saves of the model folder.
    """

    seed: int = 0
    phases: tuple[Phase, ...] = PHASES
    warmup_steps: int = 100
    muon_lr: float = 0.03
    adam_lr: float = 0.01
    weight_decay: float = 0.01
    checkpoint_every: int = 500


# --- Model -------------------------------------------------------------------


def build_model(
    tokenizer: PreTrainedTokenizerBase, width: int = 144
) -> LlamaForCausalLM:
    """Return an untrained Llama; at the default width, of 1.1 million parameters."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return model


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters, tied ones counted once."""
    return sum(p.numel() for p in model.parameters())


# --- Batches -----------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """Right-padded sequences. Shapes: (sequences, positions).

    Attributes:
        input_ids: prompt, reply and padding.
        labels: the next token at each position that predicts part of a reply,
            else `IGNORED`.
    """

    input_ids: Tensor
    labels: Tensor


def collate(pairs: Sequence[tuple[list[int], list[int]]], pad_id: int) -> Batch:
    """Pad (prompt ids, reply ids) to one length; only replies are predicted."""
    longest = max(len(prompt) + len(reply) for prompt, reply in pairs)
    input_ids = torch.full((len(pairs), longest), pad_id)
    labels = torch.full((len(pairs), longest), IGNORED)
    for row, (prompt, reply) in enumerate(pairs):
        end = len(prompt) + len(reply)
        input_ids[row, :end] = torch.tensor(prompt + reply)
        labels[row, len(prompt) - 1 : end - 1] = torch.tensor(reply)
    return Batch(input_ids, labels)


def micro_batches(
    tokenizer: PreTrainedTokenizerBase, examples: Sequence[tuple[str, str]]
) -> list[Batch]:
    """Split the examples of one step into batches of similar length.

    Every step sees all operand sizes (steps of one size each learn several
    times slower), and yet little is spent on padding.
    """
    prompts, replies = zip(*examples, strict=True)
    prompt_ids = tokenizer(prompts)["input_ids"]
    reply_ids = tokenizer(replies)["input_ids"]
    pairs = list(zip(prompt_ids, reply_ids, strict=True))
    pairs.sort(key=lambda pair: len(pair[0]) + len(pair[1]))
    cuts = []
    while pairs:
        longest = len(pairs[-1][0]) + len(pairs[-1][1])
        rows = max(1, MICRO_BATCH_TOKENS // longest)
        cuts.append(collate(pairs[-rows:], tokenizer.pad_token_id))
        del pairs[-rows:]
    return cuts


def summed_reply_loss(model: LlamaForCausalLM, batch: Batch) -> Tensor:
    """Return the summed cross-entropy over the tokens of the replies.

    Padding is on the right and attention is causal, so no attention mask is
    needed; logits are computed only where something is predicted.
    """
    hidden = model.model(input_ids=batch.input_ids, use_cache=False).last_hidden_state
    predicts = batch.labels != IGNORED
    logits = model.lm_head(hidden[predicts])
    return nn.functional.cross_entropy(logits, batch.labels[predicts], reduction="sum")


def accumulate_gradient(model: LlamaForCausalLM, batches: Sequence[Batch]) -> float:
    """Add the gradient of the mean loss per predicted token; return that loss."""
    predicted = sum(int((batch.labels != IGNORED).sum()) for batch in batches)
    total = 0.0
    for batch in batches:
        loss = summed_reply_loss(model, batch) / predicted
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    return total


# --- Optimization ------------------------------------------------------------


def build_optimizers(
    model: LlamaForCausalLM, config: PretrainConfig
) -> list[torch.optim.Optimizer]:
    """Return Muon for the hidden matrices and AdamW for everything else.

    Muon orthogonalizes each matrix's update; on this task it learns in a
    fraction of the steps that AdamW alone takes.
    """
    hidden: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim == 2 and "embed" not in name
        (hidden if is_matrix else rest).append(parameter)
    return [
        StackedMuon(hidden, lr=config.muon_lr, weight_decay=config.weight_decay),
        torch.optim.AdamW(rest, lr=config.adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def schedule(config: PretrainConfig) -> Iterator[tuple[Phase, float]]:
    """Yield each step's phase and share of the peak learning rates.

    >>> config = PretrainConfig(phases=(Phase("a", 2, 0.4, 0.2),), warmup_steps=1)
    >>> [round(share, 2) for _, share in schedule(config)]
    [0.4, 0.3]
    """
    step = 0
    for phase in config.phases:
        for position in range(phase.steps):
            share = phase.start + (phase.end - phase.start) * position / phase.steps
            warm_up = 1.0 if phase.restart else (step + 1) / config.warmup_steps
            yield phase, min(share, warm_up)
            step += 1


def draw_step(phase: Phase, rng: random.Random) -> list[tuple[str, str]]:
    """Draw the (context, continuation) pairs of one optimizer step."""
    return [
        *draw_examples(phase.replies, phase.mix, phase.rates, rng),
        *draw_works(phase.works, phase.mix, rng),
        *draw_sums(phase.sums, rng),
    ]


def pretrain(config: PretrainConfig, out: Path, *, start: Path | None = None) -> None:
    """Train and save the model folder, also as it goes.

    Args:
        config: What to train, and how.
        out: The model folder to write.
        start: A model folder to begin with; default: new weights.
    """
    torch.manual_seed(config.seed)
    rng = random.Random(config.seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    if start is not None:
        model = LlamaForCausalLM.from_pretrained(start)
    optimizers = build_optimizers(model, config)
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]

    total = sum(phase.steps for phase in config.phases)
    progress = tqdm(schedule(config), total=total, unit="step", smoothing=0.02)
    current = config.phases[0]
    for step, (phase, share) in enumerate(progress, start=1):
        if phase.restart and (phase is not current or step == 1):
            optimizers = build_optimizers(model, config)
            rng = random.Random(f"{config.seed} {phase.name}")
        current = phase
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * share
        batches = micro_batches(tokenizer, draw_step(phase, rng))
        loss = accumulate_gradient(model, batches)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step % 20 == 0:
            progress.set_postfix(phase=phase.name, loss=f"{loss:.4f}")
        if step % config.checkpoint_every == 0 or step == total:
            save(model, tokenizer, out)


def save(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, out: Path
) -> None:
    """Write the model folder that transformers' ``from_pretrained`` reads."""
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


# --- Evaluation --------------------------------------------------------------


@dataclass(frozen=True)
class Reply:
    """One sampled reply: its text without the end marker, and how it ended."""

    text: str
    tokens: int
    hit_limit: bool


@torch.no_grad()
def generate_replies(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    pairs: Sequence[tuple[int, int]],
    temperature: float = 0.0,
    batch_size: int = 250,
) -> list[Reply]:
    """Answer each operand pair; temperature 0 is greedy decoding."""
    sampling = (
        {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        if temperature > 0
        else {"do_sample": False}
    )
    replies = []
    for start in range(0, len(pairs), batch_size):
        prompts = [render_prompt(a, b) for a, b in pairs[start : start + batch_size]]
        inputs = tokenizer(prompts, padding=True, return_tensors="pt")
        output = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=TOKEN_LIMIT,
            **sampling,
        )
        for row in output[:, inputs["input_ids"].shape[1] :].tolist():
            ended = tokenizer.eos_token_id in row
            ids = row[: row.index(tokenizer.eos_token_id)] if ended else row
            text = str(tokenizer.decode(ids))
            replies.append(Reply(text, len(ids) + ended, not ended))
    return replies


def final_line_class(text: str, expected: int) -> str:
    """Classify a reply as correct, wrong integer or invalid final line.

    A strict stand-in for the course's grader, which this package may not
    import: the tiny policy writes no commas, boxes or signs that the grader
    would forgive.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    final = lines[-1] if lines else ""
    if not (final.isascii() and final.isdigit()):
        return "invalid final line"
    return "correct" if int(final) == expected else "wrong integer"


def wilson_interval(successes: int, total: int) -> tuple[float, float]:
    """Return the 95 % Wilson score interval of a share."""
    z = 1.96
    share = successes / total
    centre = share + z * z / (2 * total)
    spread = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    low, high = (centre - spread) / scale, (centre + spread) / scale
    return max(0.0, low), min(1.0, high)  # rounding may step just outside


def draw_pairs(low: int, high: int, count: int, seed: int) -> list[tuple[int, int]]:
    """Draw operand pairs from a range, without replacement while it lasts."""
    rng = random.Random(seed)
    width = high - low + 1
    count = min(count, width * width)
    cells = rng.sample(range(width * width), count)
    return [(low + cell // width, low + cell % width) for cell in cells]


def share_line(label: str, successes: int, total: int) -> str:
    """Format one row of the model card's table."""
    low, high = wilson_interval(successes, total)
    return (
        f"| {label} | {successes} / {total} | {successes / total:.1%} "
        f"| {low:.1%} to {high:.1%} |"
    )


def greedy_table(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, count: int, seed: int
) -> str:
    """What greedy replies are worth at the default range, 10 to 99."""
    pairs = draw_pairs(10, 99, count, seed)
    replies = generate_replies(model, tokenizer, pairs)
    graded = list(zip(replies, pairs, strict=True))
    classes = [final_line_class(reply.text, a * b) for reply, (a, b) in graded]
    # The first line is the first pass of the work, whatever bad habit follows.
    right = [
        reply.text.split("\n")[0] == write_work(a, b)
        for reply, (a, b) in graded
        if " = " in reply.text
    ]
    lines = ["| | count | share | 95 % interval |", "|---|---|---|---|"]
    for name in ("correct", "wrong integer", "invalid final line"):
        lines.append(share_line(name, classes.count(name), len(pairs)))
    cut_off = sum(reply.hit_limit for reply in replies)
    lines.append(share_line("token limit", cut_off, len(pairs)))
    lines.append(share_line("work right, if shown", sum(right), len(right)))
    mean_tokens = sum(reply.tokens for reply in replies) / len(replies)
    return "\n".join([*lines, "", f"Mean tokens of a reply: {mean_tokens:.1f}."])


def reward_by_range_table(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, count: int, seed: int
) -> str:
    """The mean reward at temperature 1, from easy to far too hard."""
    lines = ["| range | correct | mean reward | 95 % interval |", "|---|---|---|---|"]
    for low, high in REWARD_RANGES:
        pairs = draw_pairs(low, high, count, seed)
        pairs = (pairs * count)[:count]  # 1 to 9 has only 81 pairs: answer some again
        replies = generate_replies(model, tokenizer, pairs, temperature=1.0)
        correct = sum(
            final_line_class(reply.text, a * b) == "correct"
            for reply, (a, b) in zip(replies, pairs, strict=True)
        )
        lines.append(share_line(f"{low} to {high}", correct, len(pairs)))
    return "\n".join(lines)


def evaluate_folder(
    folder: Path, record: Path | None = None, count: int = 1_000, seed: int = 0
) -> None:
    """Print the model card's numbers for the model in a folder.

    Args:
        folder: A model folder that :func:`pretrain` wrote.
        record: Also write the tables to this file, for the model card to quote.
        count: Greedy replies; half as many are sampled in each range.
        seed: Of the operands, and of what is sampled.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(folder)
    torch.manual_seed(seed)
    greedy = greedy_table(model, tokenizer, count, seed)
    print(f"Greedy, operands 10 to 99, limit {TOKEN_LIMIT} tokens:\n\n{greedy}\n")
    ranges = reward_by_range_table(model, tokenizer, count // 2, seed)
    print(f"Temperature 1, mean reward by operand range:\n\n{ranges}")
    if record is not None:
        tables = {"greedy": greedy, "ranges": ranges}
        write_record(record, "python -m rlhelpers.local.pretrain", tables)


def write_record(target: Path, command: str, tables: dict[str, str]) -> None:
    """Write the tables that a model card quotes, each between marks of its name."""
    parts = [f"Written by `{command} --evaluate --record`."]
    parts += [f"<!-- {n} -->\n\n{t}\n\n<!-- /{n} -->" for n, t in tables.items()]
    target.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


# --- Command line ------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and write the model folder, or evaluate one."""
    defaults = PretrainConfig()
    parser = argparse.ArgumentParser(
        prog="python -m rlhelpers.local.pretrain",
        description="Pre-train the tiny policy, or print its model card's numbers.",
    )
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="model folder")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument(
        "--scale",
        type=float,
        default=1.0,
        help="multiply the steps of every phase, for a shorter or longer run",
    )
    parser.add_argument("--threads", type=int, default=2, help="torch CPU threads")
    parser.add_argument(
        "--only",
        metavar="PHASE",
        choices=[phase.name for phase in PHASES if phase.restart],
        help="run this phase alone, on the weights in the model folder",
    )
    parser.add_argument(
        "--evaluate", type=Path, metavar="FOLDER", help="evaluate, do not train"
    )
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="write the evaluation's tables"
    )
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    if args.evaluate is not None:
        evaluate_folder(args.evaluate, args.record)
        return
    phases = tuple(
        replace(phase, steps=round(args.scale * phase.steps))
        for phase in PHASES
        if args.only in (None, phase.name)
    )
    config = PretrainConfig(seed=args.seed, phases=phases)
    started = time.monotonic()
    pretrain(config, args.out, start=args.out if args.only else None)
    minutes = (time.monotonic() - started) / 60
    print(f"Wrote {args.out} after {minutes:.1f} minutes.")


if __name__ == "__main__":
    main()
