"""Pre-train the tiny guesser: ``python -m rlhelpers.local.pretrain_guesser``.

The second tiny policy, for the notebook on several turns: it plays the guessing game
of `rlhelpers.local.guessing_corpus`, by its rules and badly. The learning rate is
steady at first and then decays to zero. A step sees a few whole games and many short
pieces out of games; every reply is predicted, prompts and answers are only read.

``--evaluate FOLDER`` prints how the model in a folder plays instead of training.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from rlhelpers.local.corpus import IM_END, build_tokenizer
from rlhelpers.local.guessing_corpus import (
    ANSWERS,
    GUESSES,
    LARGEST,
    PROMPT,
    SMALLEST,
    TOKENIZER_TEXT,
    WIDTH,
    Pieces,
    draw_fragment,
    draw_game_text,
    user_turn,
)
from rlhelpers.local.pretrain import (
    IGNORED,
    MICRO_BATCH_TOKENS,
    Batch,
    PretrainConfig,
    accumulate_gradient,
    build_model,
    build_optimizers,
    save,
    share_line,
    write_record,
)

DEFAULT_OUT = Path("data/tiny-guesser")
REPLY_LIMIT = 16  # tokens; a reply by the rules takes at most 10


@dataclass(frozen=True)
class GuesserConfig:
    """Knobs of one pre-training run.

    Attributes:
        seed: Of the initial weights and of everything drawn.
        width: Of the model.
        steps: Optimizer steps.
        settle: Share of them in which the learning rate decays.
        games, fragments: What a step draws.
        warmup_steps: Steps over which the learning rate first rises.
    """

    seed: int = 0
    width: int = 96
    steps: int = 2000
    settle: float = 0.6
    games: int = 6
    fragments: int = 24
    warmup_steps: int = 50

    def share(self, step: int) -> float:
        """Share of the peak learning rates at a step, from 1 on.

        >>> config = GuesserConfig(steps=10, settle=0.5, warmup_steps=2)
        >>> [round(config.share(step), 2) for step in (1, 2, 5, 6, 10)]
        [0.5, 1.0, 1.0, 1.0, 0.2]
        """
        decay = (self.steps - step + 1) / (self.settle * self.steps)
        return min(1.0, step / self.warmup_steps, decay)


def encode(
    tokenizer: PreTrainedTokenizerBase, pieces: Pieces
) -> tuple[list[int], list[int]]:
    """Token ids of a text, and for each the id to predict there, or `IGNORED`."""
    ids: list[int] = []
    targets: list[int] = []
    for text, learnt in pieces:
        piece = tokenizer(text)["input_ids"]
        ids += piece
        targets += piece if learnt else [IGNORED] * len(piece)
    return ids, [*targets[1:], IGNORED]


def micro_batches(
    tokenizer: PreTrainedTokenizerBase, examples: Sequence[Pieces]
) -> list[Batch]:
    """Split the examples of one step into right-padded batches of similar length."""
    rows = sorted((encode(tokenizer, pieces) for pieces in examples), key=_length)
    batches = []
    while rows:
        longest = len(rows[-1][0])
        count = max(1, MICRO_BATCH_TOKENS // longest)
        chosen, rows = rows[-count:], rows[:-count]
        shape = (len(chosen), longest)
        batch = Batch(
            torch.full(shape, tokenizer.pad_token_id), torch.full(shape, IGNORED)
        )
        for row, (ids, labels) in enumerate(chosen):
            batch.input_ids[row, : len(ids)] = torch.tensor(ids)
            batch.labels[row, : len(ids)] = torch.tensor(labels)
        batches.append(batch)
    return batches


def _length(row: tuple[list[int], list[int]]) -> int:
    return len(row[0])


def pretrain(config: GuesserConfig, out: Path) -> None:
    """Train the model and write its folder."""
    torch.manual_seed(config.seed)
    rng = random.Random(config.seed)
    tokenizer = build_tokenizer(TOKENIZER_TEXT)
    model = build_model(tokenizer, config.width)
    optimizers = build_optimizers(model, PretrainConfig())
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    progress = tqdm(range(1, config.steps + 1), unit="step", smoothing=0.02)
    for step in progress:
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * config.share(step)
        examples = [draw_game_text(rng) for _ in range(config.games)]
        examples += [draw_fragment(rng) for _ in range(config.fragments)]
        loss = accumulate_gradient(model, micro_batches(tokenizer, examples))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step % 20 == 0:
            progress.set_postfix(loss=f"{loss:.4f}")
    save(model, tokenizer, out)


# --- Evaluation --------------------------------------------------------------


@dataclass
class Game:
    """A game that is being played.

    Attributes:
        secret: The number to find.
        text: The conversation so far.
        guesses: Every guess; None for a reply without one.
    """

    secret: int
    text: str
    guesses: list[int | None] = field(default_factory=list)

    @classmethod
    def draw(cls, rng: random.Random) -> Game:
        """A game of the default width, at a place drawn at random."""
        low = rng.randint(SMALLEST, LARGEST - WIDTH + 1)
        high = low + WIDTH - 1
        prompt = PROMPT.format(low=low, high=high, guesses=GUESSES)
        return cls(rng.randint(low, high), user_turn(prompt))

    @property
    def over(self) -> bool:
        """Whether it was won, or the last guess was made."""
        return len(self.guesses) == GUESSES or self.found

    @property
    def found(self) -> bool:
        """Whether the last guess was right."""
        return bool(self.guesses) and self.guesses[-1] == self.secret

    def hear(self, reply: str) -> None:
        """Take a reply, and answer it."""
        lines = reply.split()
        guess = int(lines[-1]) if lines and lines[-1].isdigit() else None
        self.guesses.append(guess)
        answer = "higher" if guess is None or self.secret > guess else "lower"
        self.text += reply + IM_END + "\n" + user_turn(ANSWERS[answer])


@torch.no_grad()
def play(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    games: Sequence[Game],
    temperature: float,
) -> None:
    """Play games to their end; temperature 0 is greedy decoding."""
    sampling = (
        {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        if temperature > 0
        else {"do_sample": False}
    )
    while open_games := [game for game in games if not game.over]:
        texts = [game.text for game in open_games]
        inputs = tokenizer(texts, padding=True, return_tensors="pt")
        output = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=REPLY_LIMIT,
            **sampling,
        )
        width = inputs["input_ids"].shape[1]
        for game, row in zip(open_games, output[:, width:].tolist(), strict=True):
            end = tokenizer.eos_token_id
            ids = row[: row.index(end)] if end in row else row
            game.hear(str(tokenizer.decode(ids)))


def table(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    temperature: float,
    count: int,
    seed: int,
) -> str:
    """How the model plays ``count`` games."""
    rng = random.Random(seed)
    games = [Game.draw(rng) for _ in range(count)]
    play(model, tokenizer, games, temperature)
    guesses = [guess for game in games for guess in game.guesses]
    repeated = sum(len(game.guesses) - len(set(game.guesses)) for game in games)
    invalid = guesses.count(None)
    return "\n".join(
        [
            "| | count | share | 95 % interval |",
            "|---|---|---|---|",
            share_line("found", sum(game.found for game in games), count),
            share_line("guess made before", repeated, len(guesses)),
            share_line("no number", invalid, len(guesses)),
            "",
            f"Mean guesses of a game: {len(guesses) / count:.2f}.",
        ]
    )


def evaluate_folder(
    folder: Path, record: Path | None = None, count: int = 300, seed: int = 0
) -> None:
    """Print the model card's numbers for the model in a folder.

    Args:
        folder: A model folder that :func:`pretrain` wrote.
        record: Also write the tables to this file, for the model card to quote.
        count: Games of each table.
        seed: Of the games, and of what is sampled.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(folder)
    torch.manual_seed(seed)
    tables = {
        "greedy": table(model, tokenizer, 0.0, count, seed),
        "sampled": table(model, tokenizer, 1.0, count, seed),
    }
    for name, text in tables.items():
        print(f"{name.capitalize()}, {count} games:\n\n{text}\n")
    if record is not None:
        write_record(record, "python -m rlhelpers.local.pretrain_guesser", tables)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and write the model folder, or evaluate one."""
    defaults = GuesserConfig()
    parser = argparse.ArgumentParser(
        prog="python -m rlhelpers.local.pretrain_guesser",
        description="Pre-train the tiny guesser, or print its model card's numbers.",
    )
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="model folder")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--steps", type=int, default=defaults.steps)
    parser.add_argument("--threads", type=int, default=1, help="torch CPU threads")
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
    started = time.monotonic()
    pretrain(GuesserConfig(seed=args.seed, steps=args.steps), args.out)
    minutes = (time.monotonic() - started) / 60
    print(f"Wrote {args.out} after {minutes:.1f} minutes.")


if __name__ == "__main__":
    main()
