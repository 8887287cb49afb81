"""The connection to a training service, local or Fireworks.

``connect()`` is the one switch of the course. Both backends are reached through the
same Fireworks SDK; only the address differs. The local backend starts our training
service on loopback, inside this process or in one of its own, and needs no key and no
network.

Example:
    >>> with connect() as session:  # doctest: +SKIP
    ...     sampler = session.new_sampler("policy-0000")
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast
from urllib.parse import urlsplit

from fireworks.training.sdk import (
    FiretitanServiceClient,
    FiretitanTrainingClient,
    FireworksClient,
    FixedConcurrencyController,
)
from hud.eval.runtime import LocalRuntime

from rlhelpers.agreement import check_agreement
from rlhelpers.arithmetic import env, graded_environment, multiply
from rlhelpers.checkpoints import (
    CheckpointError,
    ListedCheckpoint,
    PromotedModel,
    check_label,
    checkpoint_name,
    require_sampler_checkpoint,
    require_training_checkpoint,
)
from rlhelpers.models import (
    REPOSITORY,
    Backend,
    ModelPreset,
    check_backend,
    resolve_preset,
)
from rlhelpers.open_sessions import OpenSession, SessionNotes, stale_notice
from rlhelpers.places import Places
from rlhelpers.preflight import (
    LOOPBACK,
    Banner,
    api_root,
    check_prices,
    example_turns,
    fireworks_url,
    host_of,
    load_tokenizer,
    planned_work,
    remote_key,
    warn_if_unlike,
)
from rlhelpers.refusals import explained, require_known_model
from rlhelpers.rewards import Grader, grader_name
from rlhelpers.sampling import PolicyAgent, PolicySampler
from rlhelpers.usage import TokenUsage, UsageReport
from rlhelpers.waits import Waits, deafen, listen

if TYPE_CHECKING:
    from fireworks.training.sdk import Datum
    from hud.eval.runtime import Provider, Shared
    from hud.eval.task import Task
    from transformers import PreTrainedTokenizerBase

    from rlhelpers.local import LocalService, LocalServiceProcess

# Said by the SDK on a path that is right for us, so a reader need not see it.
_HARMLESS = "base_model is ignored for serverless base-only sampling"


@dataclass(kw_only=True, eq=False, repr=False)
class TrainingSession:
    """An open connection: one base model, its adapter, samplers and counters.

    Made by :func:`connect`; use it as a context manager or call :meth:`close`. It
    also closes at interpreter exit and when another session is opened.

    Attributes:
        preset: The model's preset.
        tokenizer: The tokenizer that fits the base model.
        usage: Token counters with the session's limit.
        seed: Seed of the adapter's initial weights.
        agent_type: What answers tasks, for a rollout each.
        runs_dir: Folder that holds this and other runs.
        banner: What runs where, and its bound on cost.
        waits: Tells what the session waits for at the service.
    """

    preset: ModelPreset
    tokenizer: PreTrainedTokenizerBase
    usage: TokenUsage
    banner: Banner
    runs_dir: Path
    seed: int
    agent_type: type[PolicyAgent]
    waits: Waits
    closed: bool = field(default=False, init=False)
    #: Optimizer steps taken by the current adapter in this session.
    updates: int = field(default=0, init=False)
    _open_service: Callable[[], FiretitanServiceClient]
    _open_control_plane: Callable[[], FireworksClient]
    _local_service: LocalService | LocalServiceProcess | None
    _places: Places
    _keep_session: bool
    _notes: SessionNotes | None
    _quiet: bool
    _service: FiretitanServiceClient | None = field(default=None, init=False)
    _training_client: FiretitanTrainingClient | None = field(default=None, init=False)
    _reference: FiretitanTrainingClient | None = field(default=None, init=False)
    _samplers: list[PolicySampler] = field(default_factory=list, init=False)
    _names: set[str] = field(default_factory=set, init=False)
    _snapshots: set[str] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self._begin()

    def __repr__(self) -> str:
        state = "closed" if self.closed else "open"
        return f"<TrainingSession {self.preset.backend}:{self.preset.name} ({state})>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- the SDK's objects --------------------------------------------------------

    @property
    def service_client(self) -> FiretitanServiceClient:
        """The SDK's service client.

        Raises:
            RuntimeError: The session is closed.
        """
        if self._service is None:
            raise RuntimeError("this session is closed; call connect() again")
        return self._service

    @property
    def usage_report(self) -> UsageReport:
        """Tokens used so far, beside the most that was planned."""
        return UsageReport(
            used=self.usage.counts,
            planned=self.banner.work.bound,
            unanswered=self.usage.unanswered,
            prices=self.banner.prices,
        )

    @property
    def training_client(self) -> FiretitanTrainingClient:
        """The SDK's LoRA training client, created on first use.

        Sampling the base model needs none, and on Fireworks each one takes a slot of
        the account's run quota.
        """
        if self._training_client is None:
            waiting = self.waits.operation("a training run", polls=True)
            with waiting, explained(self.preset):
                client = self.service_client.create_lora_training_client(
                    base_model=self.preset.base_model,
                    rank=self.preset.lora_rank,
                    seed=self.seed,
                )
            self._training_client = _counted(client, self.usage)
        return self._training_client

    def reference(self) -> FiretitanTrainingClient:
        """A client of the frozen base model, which answers ``forward`` only.

        Created on first use; what it reads counts as prefill.

        Raises:
            ServiceRefused: The service offers no such client.
        """
        if self._reference is None:
            waiting = self.waits.operation("the base model", polls=True)
            with waiting, explained(self.preset):
                client = self.service_client.create_base_training_client(
                    self.preset.base_model
                )
            self._reference = _counted(client, self.usage)
        return self._reference

    def _renew_service(self) -> None:
        """Replace the SDK session, because one session refuses a second like run."""
        self._close_samplers()
        self._close_service(delete=True)
        self._training_client = self._reference = None
        self.updates = 0
        self._names.clear()
        self._snapshots.clear()
        self._begin()

    def _begin(self) -> None:
        """Open the SDK's session, and note that it is open."""
        with self.waits.operation("a session"):
            self._service = self._open_service()
        session_id = self._service.training_session_id
        if self._notes is not None and session_id is not None:
            self._notes.add(
                OpenSession.of_this_process(
                    session_id, self.banner.host, self.preset.name
                )
            )

    def new_policy(self) -> None:
        """Forget the adapter and start from fresh weights (same seed)."""
        if self._training_client is not None:
            self._renew_service()

    # -- samplers -----------------------------------------------------------------

    def _sampler(self, snapshot: str, **target: str) -> PolicySampler:
        with self.waits.operation("a sampler"), explained(self.preset):
            client = self.service_client.create_sampling_client(
                tokenizer=self.tokenizer,
                # One controller per sampler: each sampler has an event loop of its own.
                concurrency_controller=FixedConcurrencyController(
                    self.preset.max_concurrent
                ),
                **target,
            )
        sampler = PolicySampler(
            client=client,
            snapshot=snapshot,
            tokenizer=self.tokenizer,
            preset=self.preset,
            examples=example_turns(self.preset),
            usage=self.usage,
            waits=self.waits,
        )
        self._samplers.append(sampler)
        return sampler

    def new_sampler(self, name: str, *, keep_earlier: bool = False) -> PolicySampler:
        """Save the current adapter as a sampler checkpoint and open it.

        Args:
            name: The checkpoint's name, such as ``checkpoint_name("policy", step=3)``.
            keep_earlier: Leave earlier samplers of this session open.

        Raises:
            CheckpointError: The name is not allowed; nothing was sent.
        """
        check_label(name, limit=54)
        if not keep_earlier:
            self._close_samplers()
        client = self.training_client
        saving = self.waits.operation("a snapshot", polls=True)
        with saving, explained(self.preset, training=True):
            saved = client.save_weights_for_sampler(self._unused(name))
            path = saved.result().path
        self._snapshots.add(path)
        return self.open_sampler(path)

    def open_sampler(self, path: str) -> PolicySampler:
        """Open a sampler checkpoint that this session saved.

        Raises:
            CheckpointError: The path cannot exist, is a training checkpoint, or was
                saved by a session that has ended.
        """
        reference = require_sampler_checkpoint(path)
        if reference.path not in self._snapshots:
            raise CheckpointError(
                f"{reference.path!r} was not saved by the session that is open now; "
                "sampler checkpoints end with their session, and resuming or "
                "new_policy() begins another one. Resume a training checkpoint of "
                "those weights and save a new sampler from it"
            )
        return self._sampler(reference.path, model_path=reference.path)

    def base_sampler(self) -> PolicySampler:
        """A sampler of the base model, without any adapter."""
        return self._sampler(self.preset.base_model, base_model=self.preset.base_model)

    def current_sampler(self) -> PolicySampler:
        """A sampler of the policy as it is now: the base model before any update."""
        if self._training_client is None:
            return self.base_sampler()
        return self.new_sampler(checkpoint_name("policy", step=self.updates))

    def _close_samplers(self) -> None:
        for sampler in self._samplers:
            with contextlib.suppress(Exception):
                sampler.close()
        self._samplers.clear()

    def _unused(self, name: str) -> str:
        """``name``, or with a number if this session used it before."""
        chosen, number = name, 2
        while chosen in self._names:
            chosen, number = f"{name}-{number}", number + 1
        self._names.add(chosen)
        return chosen

    # -- training checkpoints -----------------------------------------------------

    def save_state(self, name: str) -> str:
        """Save weights and optimizer as a training checkpoint.

        Args:
            name: Its name, such as ``checkpoint_name("state", step=5)``.

        Returns:
            The path to resume from.

        Raises:
            CheckpointError: The name is not allowed; nothing was sent.
        """
        check_label(name)
        client = self.training_client
        saving = self.waits.operation("a checkpoint", polls=True)
        with saving, explained(self.preset, training=True):
            saved = client.save_state(self._unused(name)).result()
        return cast("str", saved.path)

    def resume(self, path: str, *, with_optimizer: bool = True) -> None:
        """Continue from a training checkpoint, as a new run.

        Args:
            path: What :meth:`save_state` returned.
            with_optimizer: Also restore Adam's moments. Without them the weights are
                the same and the following updates differ.

        Raises:
            CheckpointError: A sampler checkpoint, a path that cannot exist or is not
                there, or a checkpoint of another base model. In each case the
                session's current adapter is left as it was.
        """
        reference = require_training_checkpoint(path)
        if reference.run_id is None:
            raise CheckpointError(
                f"{reference.path!r} names no run; give the whole path that "
                "save_state returned: <account>/run-<32 hex digits>/<name>"
            )
        self._check_base_model(reference.path)
        if self._training_client is not None:
            self._renew_service()
        service = self.service_client
        create = (
            service.create_training_client_from_state_with_optimizer
            if with_optimizer
            else service.create_training_client_from_state
        )
        resumed = self.waits.operation("the checkpoint", polls=True)
        with resumed, explained(self.preset):
            client = create(reference.path)
        self._training_client = _counted(client, self.usage)

    def _check_base_model(self, path: str) -> None:
        rest = self.service_client.create_rest_client()
        try:
            with self.waits.operation("the checkpoint"):
                info = rest.get_weights_info_by_tinker_path(path).result()
        except Exception as error:
            raise CheckpointError(
                f"the service has no training checkpoint {path!r} "
                f"({_service_message(error)}); sampler "
                "checkpoints end with their session, and local training checkpoints "
                "live in the runs folder that saved them"
            ) from error
        if info.base_model != self.preset.base_model:
            raise CheckpointError(
                f"{path!r} was trained from base model {info.base_model!r}, and this "
                f"session runs {self.preset.base_model!r}; another base model is a "
                "new run, so connect with the checkpoint's model or start afresh"
            )

    # -- the session's list, and promotion ----------------------------------------

    def list_checkpoints(self) -> list[ListedCheckpoint]:
        """The checkpoints that this session saved, of both kinds, oldest first.

        Resuming and :meth:`new_policy` begin another session with an empty list. A
        training checkpoint stays where it is; a sampler checkpoint does not.

        Raises:
            RuntimeError: The session is closed, or the service refused to list.
        """
        name = self.service_client.training_session_name
        with self.waits.operation("a list"), self._open_control_plane() as client:
            rows = client.list_training_session_checkpoints(name)
        return [ListedCheckpoint.from_row(row) for row in rows]

    def promote(self, path: str, output: str) -> PromotedModel:
        """Turn a sampler checkpoint of this session into a model that stays.

        Args:
            path: A sampler checkpoint's path, such as ``sampler.snapshot``.
            output: The model's id: lower-case letters, digits and hyphens.

        Returns:
            The model's name and, on the local backend, the folder of a PEFT adapter.

        Raises:
            CheckpointError: A training checkpoint, a checkpoint that this session does
                not hold, or a name that cannot be used.
        """
        reference = require_sampler_checkpoint(path)
        check_label(output)
        held = [
            row
            for row in self.list_checkpoints()
            if row.name == reference.name and reference.run_id in (None, row.run_id)
        ]
        if not held:
            raise CheckpointError(
                f"this session holds no sampler checkpoint {reference.path!r} to "
                "promote; promote before the session ends, or resume a training "
                "checkpoint of those weights and save a new sampler"
            )
        with self.waits.operation("promotion"), self._open_control_plane() as client:
            try:
                model = client.promote_session_checkpoint(
                    held[-1].resource, output, self.preset.base_model
                )
            except (RuntimeError, ValueError) as error:
                raise CheckpointError(
                    f"{reference.path!r} was not promoted to {output!r}: {error}"
                ) from error
        account = held[-1].resource.split("/trainingSessions/")[0]
        return PromotedModel.from_row(model, f"{account}/models/{output}")

    # -- HUD ----------------------------------------------------------------------

    async def runtime(self) -> Shared:
        """Where HUD runs the tasks, served in this process until the session ends."""
        return await self._places.served()

    def graded_by(self, tasks: Iterable[Task], grader: Grader) -> list[Task]:
        """The same multiplication tasks, to be graded by a function of your own.

        Train, calibrate or evaluate with what this returns; tasks as they were keep
        the course's grader, in the same session.

        Args:
            tasks: Multiplication tasks, such as those of ``make_taskset``.
            grader: Called with the reply and the right product; returns the reward.

        Returns:
            Tasks with the same operands, prompts and slugs.

        Raises:
            ValueError: A task is no multiplication. Tasks of your own bring their
                grader along: ``connect(task_runtime=…)``.

        Example:
            >>> tasks = session.graded_by(tasks, my_grader)  # doctest: +SKIP
            >>> await train(session, tasks)  # doctest: +SKIP
        """
        # A new name each time: a cell that is run again has a new grader, and HUD
        # would go on with the environment that it serves under the old name.
        name = f"{env.name}-{grader_name(grader)}-{len(self._places)}"
        environment = graded_environment(grader, name=name)
        regraded = []
        for task in tasks:
            if task.id != multiply.id:
                raise ValueError(
                    f"task {task.slug!r} is made by the template {task.id!r}, and "
                    f"graded_by knows {multiply.id!r} only: put your grader into your "
                    "own environment, and connect with task_runtime="
                )
            copy = environment.templates[multiply.id](**task.args)
            copy.slug = task.slug
            regraded.append(copy)
        self._places.add(environment)
        return regraded

    def new_run_dir(self, label: str) -> Path:
        """Create ``runs/<run id>``; the folder's name is the run's id."""
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        folder = self.runs_dir / f"{label}-{stamp}-{uuid.uuid4().hex[:4]}"
        folder.mkdir(parents=True)
        return folder

    # -- closing ------------------------------------------------------------------

    def close(self) -> None:
        """Close samplers, the SDK session and the local service. Safe to repeat."""
        if self.closed:
            return
        self.closed = True
        self._close_samplers()
        self._places.release()
        # Our own local service ends with us. Elsewhere an open session would hold a
        # slot of the account's run quota until it expires.
        own = self._local_service is not None
        self._close_service(delete=not (own or self._keep_session))
        self._service = None
        deafen()
        if self._local_service is not None:
            self._local_service.close()
        if self.preset.backend == "fireworks" and not self._quiet:
            print(f"\n{self.usage_report}")

    def _close_service(self, *, delete: bool) -> None:
        service = self._service
        if service is None:
            return
        session_id, notes = service.training_session_id, self._notes
        if delete:
            try:
                with self.waits.operation("the end of the session"):
                    service.delete_training_session()
            except Exception as error:
                warnings.warn(f"training session not released: {error}", stacklevel=3)
            else:
                if notes is not None and session_id is not None:
                    notes.remove(session_id)
        elif notes is not None and session_id is not None:
            notes.keep(session_id)
        try:
            service.close()
        except Exception as error:
            warnings.warn(f"service client not closed cleanly: {error}", stacklevel=3)


def _counted(
    client: FiretitanTrainingClient, usage: TokenUsage
) -> FiretitanTrainingClient:
    """The client, whose passes over tokens count before they are sent.

    The SDK's other ways to train (the async ones, ``forward_backward_custom``) call
    these two, so nothing passes the limit uncounted.
    """
    forward, forward_backward = client.forward, client.forward_backward

    def counted_forward(data: list[Datum], *rest: Any, **options: Any) -> Any:
        usage.charge(prefill=_tokens(data))
        return forward(data, *rest, **options)

    def counted_forward_backward(data: list[Datum], *rest: Any, **options: Any) -> Any:
        usage.charge(trained=_tokens(data))
        return forward_backward(data, *rest, **options)

    client.forward = counted_forward
    client.forward_backward = counted_forward_backward
    return client


def _tokens(data: Sequence[Datum]) -> int:
    return sum(datum.model_input.length for datum in data)


def _worth_showing(record: logging.LogRecord) -> bool:
    """Not a log record that describes what we do on purpose."""
    return _HARMLESS not in record.getMessage()


def _quiet_sdk() -> None:
    logging.getLogger("fireworks.training.sdk.client").addFilter(_worth_showing)
    # A failed rollout is raised as RolloutFailed with its cause; HUD would also log
    # it once per rollout.
    logging.getLogger("hud.eval.run").setLevel(logging.ERROR)


_SPAN_DIRS = {str(REPOSITORY / "runs" / "hud-spans")}


def keep_spans_in(run_dir: Path) -> None:
    """Write HUD's trace spans into a run's folder.

    A folder that the user chose (``HUD_TELEMETRY_LOCAL_DIR``) is left alone.
    """
    from hud.settings import settings

    if settings.telemetry_local_dir in _SPAN_DIRS:
        settings.telemetry_local_dir = str(run_dir.resolve() / "spans")
        _SPAN_DIRS.add(settings.telemetry_local_dir)


@contextlib.contextmanager
def _without_telemetry() -> Iterator[None]:
    """Switch the SDK's telemetry off while a client is made.

    A local service has no use for it, and closing a client soon after opening it can
    wait ten seconds for the first batch.
    """
    before = os.environ.get("TINKER_TELEMETRY")
    os.environ["TINKER_TELEMETRY"] = "0"
    try:
        yield
    finally:
        del os.environ["TINKER_TELEMETRY"]
        if before is not None:
            os.environ["TINKER_TELEMETRY"] = before


def _keep_loopback_direct() -> None:
    """Keep loopback out of any HTTP proxy, where the SDK would hang."""
    for variable in ("NO_PROXY", "no_proxy"):
        hosts = [host for host in os.environ.get(variable, "").split(",") if host]
        missing = [host for host in ("127.0.0.1", "localhost") if host not in hosts]
        os.environ[variable] = ",".join(hosts + missing)


def _start_local(
    preset: ModelPreset, state_dir: Path, *, own_process: bool
) -> tuple[LocalService | LocalServiceProcess, str, str]:
    models = {preset.base_model: preset.tokenizer}
    state_dir.mkdir(parents=True, exist_ok=True)
    service: LocalService | LocalServiceProcess
    # One import or the other: this process need not load what another one runs.
    if own_process:
        from rlhelpers.local import LocalServiceProcess

        service = LocalServiceProcess(state_dir, models=models)
    else:
        from rlhelpers.local import LocalService

        service = LocalService(state_dir, models=models)
    service.start()
    return service, service.base_url, service.api_key


def _check_own_process(backend: Backend, base_url: str | None) -> None:
    """Refuse a process for a service that ``connect`` does not start."""
    given = "backend='fireworks'" if backend == "fireworks" else f"{base_url=}"
    if backend == "fireworks" or base_url is not None:
        raise ValueError(
            f"own_process=True is about the local service that connect() starts, and "
            f"{given} means another one: leave one of the two out"
        )


_current: TrainingSession | None = None


def _close_current() -> None:
    global _current
    session, _current = _current, None
    if session is not None:
        session.close()


atexit.register(_close_current)


def connect(
    backend: str = "local",
    model: str | ModelPreset | None = None,
    *,
    runs_dir: str | Path = "runs",
    api_key: str | None = None,
    base_url: str | None = None,
    token_limit: int | None = None,
    planned_rollouts: int | None = None,
    planned_datums: int | None = None,
    planned_forwards: int = 0,
    max_tokens: int | None = None,
    max_operand: int | None = None,
    prices: Sequence[float] | None = None,
    resume_from: str | None = None,
    seed: int = 0,
    task_runtime: Provider | None = None,
    agent: type[PolicyAgent] = PolicyAgent,
    keep_session: bool = False,
    own_process: bool = False,
    quiet: bool = False,
) -> TrainingSession:
    """Open a training session, local by default.

    A session that this process opened earlier is closed first. The banner is printed
    before anything is sent.

    Args:
        backend: ``"local"`` (on this machine, on loopback) or ``"fireworks"``.
        model: A preset's name, a preset of your own, or None for the default.
        runs_dir: Where runs are written; the local service keeps its checkpoints in
            ``runs_dir/service``.
        api_key: Fireworks key; else ``FIREWORKS_API_KEY`` from the environment or a
            ``.env`` file. Ignored by the local service that this call starts.
        base_url: Another address. With ``backend="local"``, that of a service started
            by ``python -m rlhelpers.local``, whose key is then ``api_key``. With
            ``backend="fireworks"``, else ``FIREWORKS_BASE_URL`` from the environment,
            else the public host; https, unless it is on loopback.
        token_limit: Most tokens (prefill, sampled and trained together) that the
            session may use; None takes the preset's, which is no limit locally.
        planned_rollouts: For the banner, like the next four; None means the preset's
            full run.
        planned_datums: How many of them may be trained on; None means all.
        planned_forwards: How many of them a forward pass reads again, such as
            ``TrainConfig.kl_rollouts``.
        max_tokens: Their longest reply; None means the preset's.
        max_operand: The largest operand; None means the preset's. Tasks of your own
            are taken to fill the context.
        prices: Dollars per million (prefill, sampled, trained) tokens; None means the
            preset's.
        resume_from: A training checkpoint to continue from.
        seed: Seed of the adapter's initial weights.
        task_runtime: Where HUD runs tasks of your own, such as ``load_tasks(…)``'s
            ``runtime``; default: the course's multiplication environment.
        agent: What answers the tasks. The default answers with one reply; for tasks
            of several turns, :class:`~rlhelpers.episodes.EpisodeAgent`.
        keep_session: On Fireworks, leave the session open at close, so that its
            sampler checkpoints can still be promoted.
        own_process: Run the local service in a process of its own and not in threads
            of this one, where service, SDK, HUD and agents take turns. The same
            results come sooner in a run of many steps; starting it takes some seconds,
            and a second interpreter takes memory.
        quiet: Do not print the banner.

    Returns:
        The open session.

    Raises:
        ValueError: Unknown backend or model, a limit that is not positive, prices
            that are none, or ``own_process`` for a service that this call does not
            start; nothing was sent.
        PromptTooLong: Prompt and longest reply do not fit the context; nothing was
            sent.
        MissingKey: No key for Fireworks; nothing was sent.
        TokenizerUnavailable: The tokenizer could not be downloaded; nothing was sent.
        Disagreement: Tokenizer, chat template and preset do not fit each other;
            nothing was sent.
        ServiceRefused: The service refused the session; the message says why.
        CheckpointError: ``resume_from`` cannot be resumed from.

    Example:
        >>> session = connect(token_limit=2_000_000)  # doctest: +SKIP
    """
    global _current
    preset = _choose_preset(model, check_backend(backend))
    if own_process:
        _check_own_process(preset.backend, base_url)
    if resume_from is not None:
        require_training_checkpoint(resume_from)
    usage = TokenUsage(preset.token_limit if token_limit is None else token_limit)
    own_service = preset.backend == "local" and base_url is None
    key = None if own_service else remote_key(preset, api_key, base_url)
    url = base_url or ""
    if preset.backend == "fireworks":
        url = fireworks_url(base_url)
        warn_if_unlike(preset)
    paid = preset.prices if prices is None else check_prices(prices)
    tokenizer = load_tokenizer(preset)
    check_agreement(preset, tokenizer)
    banner = Banner(
        backend=preset.backend,
        model=preset.name,
        base_model=preset.base_model,
        licence=preset.licence,
        work=planned_work(
            preset,
            tokenizer,
            rollouts=planned_rollouts,
            datums=planned_datums,
            forwards=planned_forwards,
            max_tokens=max_tokens,
            max_operand=max_operand,
            own_tasks=task_runtime is not None,
        ),
        token_ceiling=usage.limit,
        prices=paid,
        host=host_of(url),
    )
    if _current is not None and not _current.closed:
        if not quiet:
            print("Closing the session opened earlier in this process.")
        _close_current()
    if not quiet:
        print(banner)
    _quiet_sdk()
    folder = Path(runs_dir)
    notes = None if preset.backend == "local" else SessionNotes(folder / "sessions")
    waits = Waits()
    if notes is not None and (stale := notes.stale(banner.host)) and not quiet:
        print(stale_notice(stale))
    on_loopback = own_service or urlsplit(url).hostname in LOOPBACK
    if on_loopback:
        _keep_loopback_direct()
    service: LocalService | LocalServiceProcess | None = None
    if own_service:
        service, url, key = _start_local(
            preset, folder / "service", own_process=own_process
        )

    def open_service() -> FiretitanServiceClient:
        # The address is always explicit: a half-set environment would otherwise send
        # training traffic to the public host.
        telemetry = _without_telemetry() if on_loopback else contextlib.nullcontext()
        with telemetry, explained(preset):
            return FiretitanServiceClient(api_key=key, base_url=url)

    def open_control_plane() -> FireworksClient:
        return FireworksClient(api_key=cast("str", key), base_url=api_root(url))

    listen()
    try:
        if preset.backend == "fireworks":
            with waits.operation("the model's entry"):
                require_known_model(preset, open_control_plane)
        session = TrainingSession(
            preset=preset,
            tokenizer=tokenizer,
            usage=usage,
            banner=banner,
            runs_dir=folder,
            seed=seed,
            agent_type=agent,
            waits=waits,
            _open_service=open_service,
            _open_control_plane=open_control_plane,
            _local_service=service,
            _places=Places(task_runtime or LocalRuntime(env), preset.max_concurrent),
            _keep_session=keep_session,
            _notes=notes,
            _quiet=quiet,
        )
    except BaseException:
        deafen()
        if service is not None:
            service.close()
        raise
    _current = session
    if resume_from is not None:
        try:
            session.resume(resume_from)
        except BaseException:
            _close_current()
            raise
    return session


def _choose_preset(model: str | ModelPreset | None, backend: Backend) -> ModelPreset:
    if not isinstance(model, ModelPreset):
        return resolve_preset(model, backend)
    if model.backend != backend:
        raise ValueError(
            f"preset {model.name!r} runs under BACKEND={model.backend!r}, but BACKEND "
            f"is {backend!r}; change one of them"
        )
    return model


def _service_message(error: Exception) -> str:
    """The sentence inside an SDK error, without the envelope it came in."""
    body: object = getattr(error, "body", None)
    while isinstance(body, dict):
        body = body.get("error", body.get("message"))
    return body if isinstance(body, str) else str(error)
