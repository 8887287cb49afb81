"""A program of the previous SDK generation: it trains, saves, resumes and promotes.

    python program.py TOKENIZER_JSON

Run by the interpreter that has that SDK. It names no service: the SDK finds one through
``TINKER_BASE_URL``, ``FIREWORKS_BASE_URL`` and ``FIREWORKS_API_KEY``.

It prints one JSON object with what it did and what came back, and judges nothing:
``tests/test_previous_sdk.py`` holds the values against figures worked out on its own.
It imports nothing of this repository.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from statistics import fmean, stdev
from typing import Any

import tinker
from fireworks.training.sdk import FiretitanServiceClient, FixedConcurrencyController
from fireworks.training.sdk.fireworks_client import FireworksClient
from tinker import types
from tokenizers import Tokenizer

Service = FiretitanServiceClient
Record = dict[str, Any]

BASE_MODEL = "accounts/fireworks/models/qwen3p8-27b"
PROMPT = (
    "<|im_start|>user\nCompute {a} * {b}. "
    "Work step by step, then write only the final integer on the last line."
    "<|im_end|>\n<|im_start|>assistant\n"
)
#: The untrained policy ends most of these in a sentence, which earns nothing.
TASKS = [(14, 23), (36, 43), (58, 33), (65, 53)]
GROUP_SIZE = 8
STEPS = 6
ADAM = types.AdamParams(learning_rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-8)
MAX_TOKENS = 96


def control_plane() -> FireworksClient:
    """The control plane of the service that the environment names."""
    base_url = os.environ["FIREWORKS_BASE_URL"]
    return FireworksClient(
        api_key=os.environ["FIREWORKS_API_KEY"],
        base_url=base_url.removesuffix("/training/v1/serverless"),
    )


class Task:
    """The model's tokenizer, and what is asked and graded with it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def prompt(self, a: int, b: int) -> list[int]:
        """The task's token ids, up to where the reply begins."""
        return list(self.tokenizer.encode(PROMPT.format(a=a, b=b)).ids)

    def reward(self, tokens: Sequence[int], expected: int) -> float:
        """1.0 if the reply's last line is the product and nothing else."""
        text = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        return float(text.rstrip().rsplit("\n", 1)[-1] == str(expected))


def open_sampler(service: Service, **source: Any) -> Any:
    """A sampler that sends up to 32 requests at once."""
    limit = FixedConcurrencyController(32)
    return service.create_sampling_client(concurrency_controller=limit, **source)


def ask(sampler: Any, prompt: list[int], seed: int, temperature: float = 1.0) -> Any:
    """The future of one completion."""
    return sampler.sample(
        prompt=types.ModelInput.from_ints(prompt),
        num_samples=1,
        sampling_params=types.SamplingParams(
            max_tokens=MAX_TOKENS, seed=seed, temperature=temperature
        ),
    )


def read(future: Any) -> Record:
    """What a completion gave."""
    (sequence,) = future.result(timeout=120).sequences
    return {
        "tokens": list(sequence.tokens),
        "logprobs": list(sequence.logprobs),
        "stop_reason": sequence.stop_reason,
    }


def datum(tokens: list[int], **inputs: list[float] | list[int]) -> types.Datum:
    """``tokens`` as training data: each position predicts the next token."""
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], **inputs},
    )


def rollout_datum(rollout: Record) -> types.Datum:
    """A rollout as training data; positions of the prompt carry zeros."""
    output = rollout["tokens"]
    masked = [0.0] * (len(rollout["prompt"]) - 1)
    return datum(
        rollout["prompt"] + output,
        logprobs=masked + rollout["logprobs"],
        advantages=masked + [rollout["advantage"]] * len(output),
    )


def logprobs(policy: Any, data: list[types.Datum], loss: str) -> list[list[float]]:
    """The policy's log-probabilities of each datum's targets."""
    outputs = policy.forward(data, loss).result().loss_fn_outputs
    return [list(output["logprobs"].data) for output in outputs]


def collect(task: Task, sampler: Any, step: int) -> list[Record]:
    """``GROUP_SIZE`` rollouts of every task, with rewards and group advantages."""
    rollouts = []
    for index, (a, b) in enumerate(TASKS):
        prompt = task.prompt(a, b)
        seeds = [1000 * step + 100 * index + n for n in range(GROUP_SIZE)]
        group = [read(one) for one in [ask(sampler, prompt, seed) for seed in seeds]]
        rewards = [task.reward(rollout["tokens"], a * b) for rollout in group]
        spread = stdev(rewards) or 1.0
        for rollout, reward in zip(group, rewards, strict=True):
            advantage = (reward - fmean(rewards)) / spread
            rollout |= {"prompt": prompt, "reward": reward, "advantage": advantage}
        rollouts += group
    return rollouts


def train(task: Task, service: Service) -> Record:
    """GRPO: sample, compare within each group, update; all of the first step kept."""
    policy = service.create_lora_training_client(base_model=BASE_MODEL, rank=8, seed=1)
    rewards: list[float] = []
    first: Record = {}
    for step in range(STEPS):
        path = policy.save_weights_for_sampler(f"policy-{step}").result().path
        sampler = open_sampler(service, model_path=path)
        rollouts = collect(task, sampler, step)
        sampler.close()
        data = [rollout_datum(rollout) for rollout in rollouts]
        update = policy.forward_backward(data, "importance_sampling")
        applied = policy.optim_step(ADAM).result()
        rewards.append(fmean(rollout["reward"] for rollout in rollouts))
        if step == 0:
            outputs = update.result().loss_fn_outputs
            first = {
                "rollouts": rollouts,
                "before": [list(output["logprobs"].data) for output in outputs],
                "after": logprobs(policy, data, "importance_sampling"),
                "metrics": update.result().metrics,
                "optimizer": applied.metrics,
            }
    info = policy.get_info()
    return {
        "rewards": rewards,
        "first": first,
        "lora_rank": info.lora_rank,
        "base_model": info.model_data.model_name,
        "run": policy.run_id,
        "resume": resume(task, policy),
        "listed": policy.list_checkpoints(),
        "promotion": promote(service, policy),
        "sampling": sample_snapshots(task, service, policy),
        "refusals": refusals(task, service, policy),
    }


def fixed_tokens(task: Task) -> list[int]:
    """A task with a short answer, as training data."""
    return task.prompt(12, 34) + task.tokenizer.encode("408<|im_end|>").ids


def imitate(task: Task, policy: Any, steps: int) -> list[float]:
    """Updates towards one answer; returns its log-probabilities afterwards."""
    data = [datum(fixed_tokens(task))]
    for _ in range(steps):
        policy.forward_backward(data, "cross_entropy")
        policy.optim_step(ADAM).result()
    return logprobs(policy, data, "cross_entropy")[0]


def resume(task: Task, policy: Any) -> Record:
    """The same two updates: without a stop, and from a checkpoint in new sessions."""
    saved = imitate(task, policy, 1)
    path = policy.save_state("state-1").result().path
    record: Record = {"path": path, "saved": saved, "on": imitate(task, policy, 2)}
    for name in ("with_optimizer", "without"):
        service = FiretitanServiceClient()
        suffix = "_with_optimizer" if name == "with_optimizer" else ""
        load = getattr(service, f"create_training_client_from_state{suffix}")
        resumed = load(path)
        record[f"{name}_loaded"] = imitate(task, resumed, 0)
        record[name] = imitate(task, resumed, 2)
        service.close()
    policy.load_state_with_optimizer(path).result()
    record["in_place"] = imitate(task, policy, 2)
    return record


def promote(service: Service, policy: Any) -> Record:
    """A sampler checkpoint, listed by the control plane and made a model."""
    policy.save_weights_for_sampler("final").result()
    with control_plane() as control:
        rows = control.list_training_session_checkpoints(service.training_session_name)
        row = next(row for row in rows if "-final" in row["name"])
        promoted = control.promote_session_checkpoint(
            row["name"], "previous-sdk", BASE_MODEL
        )
    return {"rows": rows, "model": promoted}


def sample_snapshots(task: Task, service: Service, policy: Any) -> Record:
    """The base model, a fresh adapter and the trained policy on one prompt."""
    fresh = service.create_lora_training_client(base_model=BASE_MODEL, rank=4, seed=2)
    path = fresh.save_weights_for_sampler("fresh").result().path
    trained = policy.save_weights_for_sampler("trained").result().path
    prompt = task.prompt(47, 36)
    samplers = {
        "base": open_sampler(service, base_model=BASE_MODEL),
        "fresh": open_sampler(service, model_path=path),
        "trained": open_sampler(service, model_path=trained),
    }
    record: Record = {name: read(ask(s, prompt, 7)) for name, s in samplers.items()}
    record["again"] = read(ask(samplers["trained"], prompt, 7))
    record["greedy"] = read(ask(samplers["trained"], prompt, 8, temperature=0.0))
    asked = types.ModelInput.from_ints(prompt)
    record["prompt_logprobs"] = samplers["trained"].compute_logprobs(asked).result()
    record["trainer_logprobs"] = logprobs(policy, [datum(prompt)], "cross_entropy")[0]
    for sampler in samplers.values():
        sampler.close()
    return record


def losses(task: Task) -> Record:
    """Every loss on one datum, at known distances from the sampling policy."""
    service = FiretitanServiceClient()
    policy = service.create_lora_training_client(base_model=BASE_MODEL, rank=4, seed=3)
    tokens = fixed_tokens(task)[-7:]
    lp = logprobs(policy, [datum(tokens)], "cross_entropy")[0]
    offsets = [0.5, -0.5, 0.1, -0.1, 0.6, 0.0]
    q = [value + offset for value, offset in zip(lp, offsets, strict=True)]
    advantages = [1.0, 1.0, -2.0, 0.0, -1.0, 0.5]
    record: Record = {"logprobs": lp, "sampling": q, "advantages": advantages}
    for loss in ("importance_sampling", "ppo", "cispo", "dro"):
        data = [datum(tokens, logprobs=q, advantages=advantages)]
        record[loss] = policy.forward_backward(data, loss).result().metrics
    data = [datum(tokens, weights=advantages)]
    record["cross_entropy"] = (
        policy.forward_backward(data, "cross_entropy").result().metrics
    )
    service.close()
    return record


def own_loss(task: Task) -> Record:
    """The same update twice: by a loss of the service, and by one computed here."""
    data = [datum(fixed_tokens(task))]
    record: Record = {}

    def negative_sum(data: Any, logprobs: Any) -> tuple[Any, dict[str, float]]:
        total = sum(values.sum() for values in logprobs)
        return -total, {"summed": total.item()}

    for name in ("service", "own"):
        service = FiretitanServiceClient()
        policy = service.create_lora_training_client(BASE_MODEL, rank=4, seed=4)
        if name == "service":
            policy.forward_backward(data, "cross_entropy").result()
        else:
            passed = policy.forward_backward_custom(data, negative_sum).result()
            record["metrics"] = passed.metrics
        policy.optim_step(ADAM).result()
        record[name] = logprobs(policy, data, "cross_entropy")[0]
        service.close()
    return record


def message_of(action: Callable[[], Any]) -> str:
    """What an action that must fail is told, the service's own words included."""
    try:
        action()
    except Exception as error:
        response = getattr(error, "response", None)
        return f"{type(error).__name__}: {error} {getattr(response, 'text', '')}"
    return "no error"


def refusals(task: Task, service: Service, policy: Any) -> dict[str, str]:
    """Things that cannot be done, each with the message that says so."""
    tokens = fixed_tokens(task)
    sampler_path = policy.save_weights_for_sampler("refused").result().path
    data = [datum(tokens)]
    rest = service.create_rest_client()
    empty = open_sampler(FiretitanServiceClient(), base_model=BASE_MODEL)
    # A client of tinker's own takes no Fireworks key; this is how it gets one anyway.
    os.environ["TINKER_CREDENTIAL_CMD"] = "echo " + os.environ["FIREWORKS_API_KEY"]
    return {
        "loss": message_of(lambda: policy.forward_backward(data, "gspo").result()),
        "kind": message_of(lambda: policy.load_state(sampler_path).result()),
        "name": message_of(lambda: policy.save_state("State_1").result()),
        "taken": message_of(lambda: policy.save_state("state-1").result()),
        "model": message_of(
            lambda: FiretitanServiceClient().create_lora_training_client(
                "no/such", rank=4
            )
        ),
        "key": message_of(lambda: FiretitanServiceClient(api_key="wrong")),
        "project": message_of(lambda: FiretitanServiceClient(project_id="mine")),
        "ttl": message_of(lambda: policy.save_state("brief", ttl_seconds=60).result()),
        "sampler": message_of(lambda: read(ask(empty, tokens, 1))),
        "capabilities": message_of(service.get_server_capabilities),
        "runs": message_of(lambda: rest.list_training_runs().result()),
        "tinker": message_of(tinker.ServiceClient),
    }


def main(tokenizer_file: str) -> None:
    """Do everything once and print the record."""
    task = Task(Tokenizer.from_file(tokenizer_file))
    service = FiretitanServiceClient()
    record = {
        "versions": {
            "fireworks-ai": version("fireworks-ai"),
            "tinker": version("tinker"),
        },
        "training": train(task, service),
        "losses": losses(task),
        "own_loss": own_loss(task),
    }
    service.close()
    print(json.dumps(record))


if __name__ == "__main__":
    main(*sys.argv[1:])
