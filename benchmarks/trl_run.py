"""The default full run, against the same run with TRL's GRPOTrainer.

    pip install -r requirements.lock -r benchmarks/requirements-trl.txt   # another venv
    python benchmarks/trl_run.py --trl-python THAT_VENV/bin/python
    python benchmarks/trl_run.py --quick --trl-python ...

Each side is a process of its own and trains the same policy for 30 steps of 8 tasks × 8
rollouts: the same tasks in the same steps, the same prompts, token limit, reward
function, LoRA adapter (rank 8 on every linear layer, alpha 32) and learning rate. One
layer differs: ours also trains the output layer, where TRL refuses an adapter.
Afterwards each answers the same held-out tasks greedily. TRL gets the settings nearest
to ours: advantages divided by the group's spread, the token-summed loss up to a
constant (``dr_grpo``), one update a batch, all 64 rollouts in one batch, Adam with our
betas, a constant rate, no clipping of the gradient. Neither side computes a KL, which
our default run measures at every fifth step. TRL also gets what makes it fast here:
float32 without autocast, no gradient checkpointing, no saving, no log but one line a
step. It samples with ``generate`` in this process: its faster samplers need a GPU.

What is timed is the training call alone, without loading, attaching the adapter and
evaluation. Ours then includes SDK, HTTP, HUD, metrics, rollouts on disk and six
checkpoints. It runs twice: with the service in the same process, as in a notebook, and
with the service apart (``own_process=True``), where HUD, agents and SDK do not take
turns with it.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hud.eval.task import Task
from peft import LoraConfig
from side_by_side import (
    Timing,
    print_table,
    ratio,
    verdict,
    where,
)
from torch import nn
from transformers import AutoModelForCausalLM

from rlhelpers import (
    TaskPool,
    TrainConfig,
    connect,
    evaluate,
    grade_final_integer,
    make_taskset,
    split_taskset,
    train,
)
from rlhelpers.arithmetic import PROMPT_TEMPLATE
from rlhelpers.models import ModelPreset, resolve_preset
from rlhelpers.preflight import load_tokenizer
from rlhelpers.sampling import end_token_ids, reply_text

GOAL = 2.0
OURS, APART = "ours", "ours, service apart"
ALPHA = 32  # what the Fireworks SDK asks for


@dataclass(frozen=True)
class SideResult:
    """What one side's process reports."""

    side: str
    threads: int
    seconds: float
    sampled_tokens: int
    correct: int
    held_out: int
    versions: str


@dataclass(frozen=True)
class Work:
    """The run that both sides do."""

    preset: ModelPreset
    config: TrainConfig
    pool: TaskPool
    held_out: list[Task]

    @classmethod
    def of(cls, options: argparse.Namespace) -> Work:
        """The same for the same options, in every process."""
        preset = resolve_preset(options.model)
        config = TrainConfig.from_preset(
            preset,
            seed=options.seed,
            steps=options.steps,
            tasks_per_step=options.tasks,
            group_size=options.group,
            max_tokens=options.max_tokens,
            kl_every=0,
        )
        low, high = preset.operands
        count = config.steps * config.tasks_per_step
        taskset = make_taskset(
            count + options.held_out,
            min_a=low,
            max_a=high,
            min_b=low,
            max_b=high,
            seed=0,
        )
        training, held_out = split_taskset(
            taskset, train=count, held_out=options.held_out, seed=0
        )
        pool = TaskPool(
            tuple(training), tasks_per_step=config.tasks_per_step, seed=config.seed
        )
        return cls(preset, config, pool, list(held_out))


def message(task: Task) -> list[dict[str, str]]:
    """A task's prompt as one chat turn."""
    return [{"role": "user", "content": PROMPT_TEMPLATE.format(**task.args)}]


# -- our side ---------------------------------------------------------------------


async def run_ours(work: Work, seed: int, *, apart: bool) -> SideResult:
    """Train and evaluate through SDK, HTTP and HUD."""
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        connect(
            model=work.preset.name,
            runs_dir=folder,
            seed=seed,
            own_process=apart,
            quiet=True,
        ) as session,
    ):
        # Both sides start with the model in memory and an adapter on it.
        await evaluate(session, work.held_out[:1], phase="warm-up")
        await asyncio.to_thread(session.new_sampler, "warm-up")
        started = time.perf_counter()
        result = await train(session, work.pool, config=work.config, progress=False)
        seconds = time.perf_counter() - started
        after = await evaluate(session, work.held_out, sampler=result.sampler)
    return SideResult(
        APART if apart else OURS,
        1,
        seconds,
        sum(row.sampled_tokens for row in result.metrics),
        after.outcomes.correct,
        after.outcomes.n,
        f"torch {torch.__version__}",
    )


# -- TRL's side -------------------------------------------------------------------


def run_trl(work: Work, seed: int, threads: int) -> SideResult:
    """Train with GRPOTrainer and evaluate with ``generate``."""
    import trl  # not among the course's packages

    torch.set_num_threads(threads)
    tokens = [0]

    def reward(
        completions: list[Any], completion_ids: list[Any], product: list[int], **_: Any
    ) -> list[float]:
        tokens[0] += sum(map(len, completion_ids))
        texts = [turns[0]["content"] for turns in completions]
        return [
            float(grade_final_integer(text, expected).reward)
            for text, expected in zip(texts, product, strict=True)
        ]

    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(work, seed, reward, folder)
        started = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - started
    correct = count_correct(trainer.model, work)
    return SideResult(
        "TRL",
        torch.get_num_threads(),
        seconds,
        tokens[0],
        correct,
        len(work.held_out),
        f"torch {torch.__version__}, trl {trl.__version__}",
    )


def make_trainer(work: Work, seed: int, reward: Any, folder: str) -> Any:
    """A GRPOTrainer for the run, with the settings named at the top."""
    from datasets import Dataset
    from trl import GRPOTrainer

    place, options = work.preset.files
    model = AutoModelForCausalLM.from_pretrained(
        place, dtype=torch.float32, attn_implementation="sdpa", **options
    )
    layers = [
        name
        for name, module in model.named_modules()
        # TRL refuses an adapter on the output layer.
        if isinstance(module, nn.Linear) and module is not model.get_output_embeddings()
    ]
    served = [work.pool.tasks_for_step(step).tasks for step in range(work.config.steps)]
    rows = [
        {"prompt": message(task), "product": task.args["a"] * task.args["b"]}
        for tasks in served
        for task in tasks
    ]
    return GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=trainer_settings(work.config, seed, folder),
        train_dataset=Dataset.from_list(rows),
        processing_class=load_tokenizer(work.preset),
        peft_config=LoraConfig(
            r=work.preset.lora_rank,
            lora_alpha=ALPHA,
            lora_dropout=0.0,
            target_modules=layers,
            task_type="CAUSAL_LM",
        ),
    )


def trainer_settings(config: TrainConfig, seed: int, folder: str) -> Any:
    """GRPOConfig nearest to ``config``."""
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=folder,
        seed=seed,
        max_steps=config.steps,
        per_device_train_batch_size=config.rollouts_per_step,
        gradient_accumulation_steps=1,
        num_generations=config.group_size,
        shuffle_dataset=False,  # the tasks come in the order of our steps
        max_completion_length=config.max_tokens,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        num_iterations=1,
        loss_type="dr_grpo",
        scale_rewards="group",
        learning_rate=config.learning_rate,
        lr_scheduler_type="constant",
        adam_beta1=config.beta1,
        adam_beta2=config.beta2,
        adam_epsilon=config.eps,
        weight_decay=0.0,
        max_grad_norm=config.grad_clip_norm,
        # What makes it fast on a CPU.
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
    )


def count_correct(model: Any, work: Work) -> int:
    """Held-out tasks that greedy decoding answers rightly."""
    tokenizer = load_tokenizer(work.preset)
    ends = end_token_ids(tokenizer)
    prompts = [
        tokenizer.apply_chat_template(
            message(task), add_generation_prompt=True, return_dict=False
        )
        for task in work.held_out
    ]
    longest = max(map(len, prompts))
    padded = [[ends[0]] * (longest - len(p)) + p for p in prompts]
    real = [[0] * (longest - len(p)) + [1] * len(p) for p in prompts]
    model.eval()
    with torch.inference_mode():
        output = model.generate(
            input_ids=torch.tensor(padded),
            attention_mask=torch.tensor(real),
            do_sample=False,
            max_new_tokens=work.config.max_tokens,
            eos_token_id=list(ends),
            pad_token_id=ends[0],
        )
    replies = [reply_text(tokenizer, ids) for ids in output[:, longest:].tolist()]
    return sum(
        grade_final_integer(text, task.args["a"] * task.args["b"]).reward == 1.0
        for text, task in zip(replies, work.held_out, strict=True)
    )


# -- both -------------------------------------------------------------------------


def run_side(options: argparse.Namespace) -> None:
    """What a side's process does."""
    work = Work.of(options)
    if options.side in (OURS, APART):
        apart = options.side == APART
        result = asyncio.run(run_ours(work, options.seed, apart=apart))
    else:
        result = run_trl(work, options.seed, options.threads[0])
    options.result.write_text(json.dumps(dataclasses.asdict(result)))


def start_side(
    side: str, threads: int, options: argparse.Namespace
) -> tuple[SideResult, float]:
    """Run a side in a process; its result, and the process's whole wall time."""
    python = options.trl_python if side == "TRL" else sys.executable
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        names = ("steps", "tasks", "group", "max_tokens", "held_out", "seed", "model")
        passed = [
            part
            for name in names
            if getattr(options, name) is not None
            for part in (f"--{name.replace('_', '-')}", str(getattr(options, name)))
        ]
        command = [python, __file__, "--side", side, "--result", str(result)]
        started = time.perf_counter()
        done = subprocess.run(
            [*command, "--threads", str(threads), *passed],
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        seconds = time.perf_counter() - started
        if done.returncode:
            hint = " (see benchmarks/requirements-trl.txt)" if side == "TRL" else ""
            raise SystemExit(f"{done.stdout}\nthe side {side!r} failed{hint}")
        return SideResult(**json.loads(result.read_text())), seconds


def compare(options: argparse.Namespace) -> None:
    """Run the sides in turn and print the report."""
    sides = {OURS: (OURS, 1), APART: (APART, 1)}
    if not options.only_ours:
        sides |= {f"TRL, {count} threads": ("TRL", count) for count in options.threads}
    results: dict[str, list[tuple[SideResult, float]]] = {name: [] for name in sides}
    for number in range(options.rounds):
        for name in list(sides) if number % 2 == 0 else list(reversed(sides)):
            results[name].append(start_side(*sides[name], options))
            result, whole = results[name][-1]
            print(
                f"round {number + 1}, {name}: {result.seconds:.1f} s, {whole:.1f} s "
                f"with start and evaluation, {result.sampled_tokens:,} tokens, "
                f"{result.correct} of {result.held_out} right",
                flush=True,
            )
    report(results)


def report(results: dict[str, list[tuple[SideResult, float]]]) -> None:
    """Print medians and ratios."""
    print(where())
    for name, runs in results.items():
        print(f"{name}: {runs[0][0].versions}")
    print_table(
        ("median", "training s", "tokens sampled", "held-out accuracy"),
        [
            (
                name,
                f"{statistics.median(r.seconds for r, _ in runs):.1f}",
                f"{statistics.median(r.sampled_tokens for r, _ in runs):,.0f}",
                f"{statistics.median(r.correct / r.held_out for r, _ in runs):.1%}",
            )
            for name, runs in results.items()
        ],
    )
    times = {
        name: [Timing(r.seconds, 1) for r, _ in runs] for name, runs in results.items()
    }
    rivals = [name for name in times if name not in (OURS, APART)]
    for ours in (OURS, APART):
        ratios = {name: ratio(times[ours], times[name]) for name in rivals}
        for name, value in ratios.items():
            print(f"time of {name} over {ours}: {value}")
        if ratios:
            print(verdict(GOAL, min(value.median for value in ratios.values())))


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the options; be a side, or compare them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trl-python", default=sys.executable)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--threads", type=int, nargs="+", default=sorted({1, os.cpu_count() or 1})
    )
    parser.add_argument("--model", default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--tasks", type=int, default=None)
    parser.add_argument("--group", type=int, default=None)
    parser.add_argument("--max-tokens", type=int, default=None)
    parser.add_argument("--held-out", type=int, default=128)
    parser.add_argument("--only-ours", action="store_true", help="without TRL")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--side", choices=(OURS, APART, "TRL"), help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.quick:
        options.steps, options.tasks, options.group = 2, 2, 4
        options.max_tokens, options.held_out, options.threads = 32, 8, [1]
    if options.side:
        run_side(options)
    else:
        compare(options)


if __name__ == "__main__":
    main()
