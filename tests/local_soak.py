"""Several programs that train through the SDK at once, for a long time."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
from fireworks.training.sdk import (
    FiretitanServiceClient,
    FixedConcurrencyController,
    types,
)
from local_helpers import TINY, Endpoint

GROUP, MAX_TOKENS = 8, 12
PROMPT = list(range(40, 60))
ADAM = types.AdamParams(learning_rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-8)


@dataclass(frozen=True)
class Step:
    """What one training step sampled and computed, to the last digit."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    loss: float


@dataclass(frozen=True)
class Habits:
    """Every how many steps a client saves its state, and resumes in a new session."""

    save_every: int = 10
    renew_every: int = 20


class Client:
    """One program: sample a group from a new snapshot, learn from it, again."""

    def __init__(self, endpoint: Endpoint, seed: int, habits: Habits) -> None:
        self.endpoint, self.seed, self.habits = endpoint, seed, habits
        self.service = self._connect()
        self.policy = self.service.create_lora_training_client(
            base_model=TINY, rank=4, seed=seed
        )

    def _connect(self) -> FiretitanServiceClient:
        return FiretitanServiceClient(
            base_url=self.endpoint.base_url, api_key=self.endpoint.api_key
        )

    def step(self, number: int) -> Step:
        """One step; ``number`` counts from 1."""
        saved = self.policy.save_weights_for_sampler(f"policy-{number}").result()
        group = self._sample(saved.path, number)
        data = make_data(group, advantages([reward(s.tokens) for s in group]))
        result = self.policy.forward_backward(data, "importance_sampling").result()
        self.policy.optim_step(ADAM).result()
        if number % self.habits.save_every == 0:
            state = self.policy.save_state(f"state-{number}").result().path
            if number % self.habits.renew_every == 0:
                self._renew(state)
        return Step(
            [list(s.tokens) for s in group],
            [list(s.logprobs or []) for s in group],
            result.metrics["loss:sum"],
        )

    def close(self) -> None:
        """End the session."""
        self.service.delete_training_session()
        self.service.close()

    def _renew(self, state: str) -> None:
        self.close()
        self.service = self._connect()
        self.policy = self.service.create_training_client_from_state_with_optimizer(
            state
        )

    def _sample(self, path: str, number: int) -> list[types.SampledSequence]:
        sampler = self.service.create_sampling_client(
            model_path=path, concurrency_controller=FixedConcurrencyController(GROUP)
        )
        futures = [
            sampler.sample(
                prompt=types.ModelInput.from_ints(PROMPT),
                num_samples=1,
                sampling_params=types.SamplingParams(
                    max_tokens=MAX_TOKENS, seed=(self.seed * 10_000 + number) * 10 + i
                ),
            )
            for i in range(GROUP)
        ]
        found = [future.result(timeout=300).sequences[0] for future in futures]
        sampler.close()
        return found


def reward(tokens: list[int]) -> float:
    """The share of tokens with an even id."""
    return sum(token % 2 == 0 for token in tokens) / len(tokens)


def advantages(rewards: list[float]) -> list[float]:
    """Rewards less their mean."""
    mean = math.fsum(rewards) / len(rewards)
    return [value - mean for value in rewards]


def make_data(
    group: list[types.SampledSequence], values: list[float]
) -> list[types.Datum]:
    """Rollouts as training data: prompt positions carry zeros."""
    zeros = [0.0] * (len(PROMPT) - 1)
    data = []
    for sequence, advantage in zip(group, values, strict=True):
        full = PROMPT + list(sequence.tokens)
        inputs = {
            "target_tokens": full[1:],
            "logprobs": zeros + list(sequence.logprobs or []),
            "advantages": zeros + [advantage] * len(sequence.tokens),
        }
        tokens = types.ModelInput.from_ints(full[:-1])
        data.append(types.Datum(model_input=tokens, loss_fn_inputs=inputs))
    return data


def train(
    endpoint: Endpoint,
    *,
    clients: int,
    steps: int,
    habits: Habits,
    on_step: Callable[[int], None] = lambda total: None,
) -> list[list[Step]]:
    """``clients`` programs with seeds 0, 1, … at once, ``steps`` each.

    ``on_step`` is called with the number of steps that all have done together. An
    error of any client is raised when all have ended.
    """
    lock, total = threading.Lock(), 0

    def run(seed: int) -> list[Step]:
        nonlocal total
        client = Client(endpoint, seed, habits)
        done = []
        for number in range(1, steps + 1):
            done.append(client.step(number))
            with lock:
                total += 1
                on_step(total)
        client.close()
        return done

    with ThreadPoolExecutor(clients) as pool:
        running = [pool.submit(run, seed) for seed in range(clients)]
    errors = [error for f in running if (error := f.exception()) is not None]
    if errors:
        raise ExceptionGroup(f"{len(errors)} of {clients} clients failed", errors)
    return [future.result() for future in running]


def resident_megabytes(pid: int) -> float:
    """Memory of a process that is in RAM now."""
    return float(psutil.Process(pid).memory_info().rss) / 2**20


def folder_megabytes(folder: Path) -> float:
    """What the files below ``folder`` hold."""
    sizes = (path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return sum(sizes) / 2**20
