"""The one thread that computes, and the operations it carries out.

Everything that touches a model runs here, one thing at a time: training operations in
the order in which they were handed over, and between them one token for every
sequence that is being sampled. The HTTP side never waits for a model on its event
loop; it hands over a function and awaits the result.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from .adapters import AdapterWeights, merge_into
from .batches import BatchLimits, check_token_ids
from .decoding import Completion, Decoder, Sequence
from .loading import BaseModel, best_device, load_base_model
from .sampling import SamplingParams
from .store import CheckpointRef, CheckpointStore
from .trainer import PolicyTrainer

T = TypeVar("T")
logger = logging.getLogger(__name__)
_DEFAULT_THREADS = torch.get_num_threads()
MAX_SNAPSHOTS = 1024  # names remembered, besides those that sequences wait for
MAX_BASE_MODELS = 4  # kept in memory, and however many are being trained or sampled


class ServiceClosed(RuntimeError):
    """The service stopped before the work was done."""


@dataclass(frozen=True)
class Weights:
    """Which weights to sample from: a base model, and a sampler checkpoint of it."""

    base_model: str
    checkpoint: CheckpointRef | None = None
    session_id: str | None = None

    @property
    def key(self) -> str:
        """A name for these weights; the same name always means the same weights."""
        return self.base_model if self.checkpoint is None else self.checkpoint.path


@dataclass
class LoadedModel:
    """A base model in memory, with what trains it and what samples from it."""

    base: BaseModel
    trainer: PolicyTrainer
    decoder: Decoder
    snapshots: OrderedDict[str, Weights]
    threads: int

    @property
    def in_use(self) -> bool:
        """Whether a client trains it or is being sampled for."""
        return self.trainer.has_models or self.decoder.has_work

    @property
    def limits(self) -> BatchLimits:
        """Vocabulary and context, for checking requests."""
        return BatchLimits(self.base.vocab_size, self.base.context_length)


class Engine:
    """Owns the models and the compute thread."""

    def __init__(self, store: CheckpointStore, models: dict[str, Path]) -> None:
        self.store = store
        self.models = models
        self.device = best_device()
        self._loaded: OrderedDict[str, LoadedModel] = OrderedDict()
        self._calls: deque[tuple[Callable[[], None], Callable[[], None]]] = deque()
        self._pending: dict[int, tuple[Decoder, Future[Completion]]] = {}
        self._checked: tuple[str, AdapterWeights] | None = None  # not merged yet
        self._wake = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(
            target=self._loop, name="rlhelpers-local-compute", daemon=True
        )

    def start(self) -> None:
        """Start the compute thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop after the current operation; whatever still waits fails."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()

    def call(self, operation: Callable[[], T]) -> Future[T]:
        """Run ``operation`` on the compute thread, after all earlier ones."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(operation())
            except BaseException as error:
                future.set_exception(error)

        def drop() -> None:
            if future.set_running_or_notify_cancel():
                future.set_exception(ServiceClosed("the local service was stopped"))

        with self._wake:
            if self._closing:
                drop()
                return future
            self._calls.append((run, drop))
            self._wake.notify()
        return future

    def sample(
        self, weights: Weights, prompt: object, params: SamplingParams
    ) -> Future[Completion]:
        """Sample one completion; the future fails for an unusable request."""
        future: Future[Completion] = Future()

        def admit() -> None:
            try:
                self._admit(weights, prompt, params, future)
            except BaseException as error:
                future.set_exception(error)

        started = self.call(admit)
        started.add_done_callback(lambda done: _relay_failure(done, future))
        return future

    def model(self, name: str) -> LoadedModel:
        """The base model ``name``, loaded on first use (compute thread only).

        Do not keep it: an idle one is forgotten when others need its memory.
        """
        if name not in self._loaded:
            base = load_base_model(name, self.models, self.device)
            trainer = PolicyTrainer(base)
            snapshots: OrderedDict[str, Weights] = OrderedDict()

            def load(key: str) -> None:
                adapter = self._adapter(snapshots[key])
                self._checked = None  # its file may be another the next time
                merge_into(base.sampling, trainer.base_weights, adapter)

            decoder = Decoder(base, load)
            threads = threads_for(base)
            self._loaded[name] = LoadedModel(base, trainer, decoder, snapshots, threads)
            self._forget_idle()
        self._loaded.move_to_end(name)
        self._use(self._loaded[name])
        return self._loaded[name]

    def _forget_idle(self) -> None:
        """Drop what is loaded beyond the bound, least recently used first."""
        *earlier, _ = self._loaded
        idle = [name for name in earlier if not self._loaded[name].in_use]
        for name in idle[: max(len(self._loaded) - MAX_BASE_MODELS, 0)]:
            del self._loaded[name]
            gc.collect()  # its modules refer to each other

    def _use(self, loaded: LoadedModel) -> None:
        if torch.get_num_threads() != loaded.threads:
            torch.set_num_threads(loaded.threads)

    def _adapter(self, weights: Weights) -> AdapterWeights | None:
        """The adapter of ``weights``; read once to be checked, and then merged."""
        if weights.checkpoint is None:
            return None
        if self._checked is None or self._checked[0] != weights.key:
            found = self.store.load("sampler", weights.checkpoint, weights.session_id)
            self._checked = weights.key, found.weights
        return self._checked[1]

    def _register(self, loaded: LoadedModel, weights: Weights) -> None:
        """Know ``weights`` by their key; refuse them at once if they cannot be read."""
        if weights.key not in loaded.snapshots:
            self._adapter(weights)
        loaded.snapshots[weights.key] = weights
        loaded.snapshots.move_to_end(weights.key)
        surplus = len(loaded.snapshots) - MAX_SNAPSHOTS
        for key in list(loaded.snapshots)[: max(surplus, 0)]:
            if not loaded.decoder.needs(key):
                del loaded.snapshots[key]

    def _admit(
        self,
        weights: Weights,
        prompt: object,
        params: SamplingParams,
        future: Future[Completion],
    ) -> None:
        loaded = self.model(weights.base_model)
        tokens = check_token_ids(prompt, loaded.limits, "prompt")
        if not tokens:
            raise ValueError("prompt must hold at least one token id")
        total, context = len(tokens) + params.max_tokens, loaded.base.context_length
        if total > context:
            raise ValueError(
                f"prompt ({len(tokens)} tokens) plus max_tokens ({params.max_tokens}) "
                f"is {total}, over the model's context of {context}: lower max_tokens"
            )
        self._register(loaded, weights)
        self._pending[id(future)] = loaded.decoder, future

        def done(completion: Completion) -> None:
            del self._pending[id(future)]
            future.set_result(completion)

        def failed(error: Exception) -> None:
            del self._pending[id(future)]
            future.set_exception(error)

        sequence = Sequence(tuple(tokens), params, done, failed)
        loaded.decoder.add(weights.key, sequence)

    def _loop(self) -> None:
        while True:
            with self._wake:
                while not (self._closing or self._calls or self._decoding()):
                    self._wake.wait()
                if self._closing:
                    break
                calls, self._calls = self._calls, deque()
            # Through a function, so that this waiting frame keeps no finished request.
            _carry_out(calls)
            for loaded in list(self._loaded.values()):
                if loaded.decoder.has_work:
                    self._decode(loaded)
        self._drop_everything()

    def _decoding(self) -> bool:
        return any(loaded.decoder.has_work for loaded in self._loaded.values())

    def _decode(self, loaded: LoadedModel) -> None:
        try:
            self._use(loaded)
            loaded.decoder.step()
        except Exception as error:
            # A failure here concerns every sequence of the model, and none may hang.
            logger.exception("sampling failed")
            loaded.decoder.fail_all()
            self._fail_pending(error, loaded.decoder)

    def _fail_pending(
        self, error: BaseException, decoder: Decoder | None = None
    ) -> None:
        """Fail the completions of ``decoder``, or of all."""
        for key, (owner, future) in list(self._pending.items()):
            if decoder is None or owner is decoder:
                del self._pending[key]
                future.set_exception(error)

    def _drop_everything(self) -> None:
        with self._wake:
            calls, self._calls = self._calls, deque()
        for _, drop in calls:
            drop()
        self._fail_pending(ServiceClosed("the local service was stopped"))


def _carry_out(calls: deque[tuple[Callable[[], None], Callable[[], None]]]) -> None:
    while calls:
        run, _ = calls.popleft()
        run()


def threads_for(base: BaseModel) -> int:
    """How many threads torch may use for ``base``.

    A small model's operations take microseconds. Shared between threads they gain
    little on an idle machine, and on a busy one every operation waits for the thread
    that lost its core: a step then takes ten times as long.
    """
    return 1 if base.is_small else _DEFAULT_THREADS


def _relay_failure(done: Future[None], future: Future[Completion]) -> None:
    error = done.exception()
    if error is not None and not future.done():
        future.set_exception(error)
