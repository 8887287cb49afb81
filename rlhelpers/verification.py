"""The contract with the real service, tried on it for a few thousand tokens.

``make verify-fireworks`` asks the service itself what the course relies on: what a
sample holds, that trainer and sampler agree, what the losses are, that an update moves
the weights, that checkpoints outlive their session. Nothing is sent before the bound on
tokens and cost was printed and confirmed, and that bound is the session's token limit,
checked before each request.

Exit codes: 0 all is as the course expects; 1 something is not; 2 refused, and nothing
was sent.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from fireworks.training.sdk import AdamParams, Datum, FireworksClient

from rlhelpers.arithmetic import PROMPT_TEMPLATE
from rlhelpers.checkpoints import checkpoint_name, parse_checkpoint
from rlhelpers.datums import make_datum
from rlhelpers.models import DEFAULT_MODEL, ModelPreset, resolve_preset
from rlhelpers.preflight import (
    MissingKey,
    TokenizerUnavailable,
    api_root,
    check_prices,
    find_key,
    fireworks_url,
    host_of,
    load_tokenizer,
    planned_work,
)
from rlhelpers.refusals import ServiceRefused, require_known_model
from rlhelpers.sampling import (
    PolicySampler,
    SamplingSettings,
    end_token_ids,
    render_prompt,
)
from rlhelpers.service import connect

if TYPE_CHECKING:
    from fireworks.training.sdk.types import SampledSequence

    from rlhelpers.service import TrainingSession
    from rlhelpers.usage import PlannedWork

A, B = 47, 36
REPLY_TOKENS = 64
GROUP = 4
#: Completions, and datums that are trained on or read by a forward pass.
COMPLETIONS, TRAINED, FORWARDED = 10, 3 * GROUP, 3 * GROUP
SESSIONS = 2
LEARNING_RATE = 1e-3
CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}

#: Mean distance of two log-probabilities of one token that should be the same. The
#: real service may compute sampler and trainer in different precisions.
AGREES = 0.05


class Otherwise(AssertionError):
    """The service does otherwise than the course relies on."""


Verdict = Literal["as expected", "otherwise", "failed", "left out"]


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        name: The check.
        verdict: Whether the service does what the course relies on.
        said: What was measured, or what went wrong.
    """

    name: str
    verdict: Verdict
    said: str

    def __str__(self) -> str:
        return f"{self.verdict:12} {self.name}: {self.said}"


@dataclass
class Bench:
    """What the checks hand on to each other."""

    session: TrainingSession
    prompt: list[int]
    sampler: PolicySampler | None = None
    greedy: SampledSequence | None = None
    replies: list[SampledSequence] = field(default_factory=list)
    datums: list[Datum] = field(default_factory=list)
    trained: np.ndarray | None = None  # log-probabilities after the update
    snapshot: str = ""
    state: str = ""

    async def sample(
        self, *, seed: int = 0, greedy: bool = False, most: int = REPLY_TOKENS
    ) -> SampledSequence:
        """One reply of the open sampler."""
        assert self.sampler is not None
        settings = SamplingSettings(most, temperature=0.0 if greedy else 1.0)
        return await self.sampler.sample(self.prompt, settings, seed)

    async def forward(self) -> np.ndarray:
        """The trainer's log-probabilities of the group's sampled tokens."""
        client = self.session.training_client
        future = await client.forward_async(self.datums, "importance_sampling")
        output = await future.result_async()
        return self.sampled([o["logprobs"].to_numpy() for o in output.loss_fn_outputs])

    def sampled(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        """The positions of sampled tokens, of all datums in one array."""
        skip = len(self.prompt) - 1
        return np.concatenate([np.asarray(row)[skip:] for row in rows])

    def known(self, name: str) -> np.ndarray:
        """A loss input at the positions of sampled tokens."""
        return self.sampled([d.loss_fn_inputs[name].to_numpy() for d in self.datums])


Step = Callable[[Bench], Awaitable[str]]


def expect(holds: bool, said: str) -> str:
    """``said`` if it holds.

    Raises:
        Otherwise: It does not.
    """
    if not holds:
        raise Otherwise(said)
    return said


# -- the checks -------------------------------------------------------------------


async def refusals(bench: Bench) -> str:
    """Costs nothing: a model and a key that do not exist."""
    preset, url = bench.session.preset, fireworks_url(None)
    absent = dataclasses.replace(preset, base_model=f"{preset.base_model}-absent")
    told = []
    for wrong, key in ((absent, find_key(None)), (preset, "fw_no_such_key")):

        def client(key: str = key) -> FireworksClient:
            return FireworksClient(api_key=key, base_url=api_root(url))

        try:
            await asyncio.to_thread(require_known_model, wrong, client)
        except ServiceRefused:
            told.append("absent" if wrong is absent else "key")
    return expect(
        told == ["absent", "key"],
        f"an absent model and a wrong key: refused {', '.join(told) or 'neither'}",
    )


async def samples(bench: Bench) -> str:
    """A sample has one log-probability for each token, and is cut where it is told."""
    bench.sampler = bench.session.base_sampler()
    bench.greedy = await bench.sample(greedy=True)
    cut = await bench.sample(most=2)
    logprobs = list(bench.greedy.logprobs or [])
    expect(
        len(logprobs) == len(bench.greedy.tokens) > 0,
        f"{len(bench.greedy.tokens)} tokens, {len(logprobs)} log-probabilities",
    )
    expect(all(np.isfinite(logprobs)) and max(logprobs) <= 1e-6, "odd log-probability")
    return expect(
        (cut.stop_reason, len(cut.tokens)) == ("length", 2),
        f"a reply of 2 tokens at most: {len(cut.tokens)}, ended by {cut.stop_reason}",
    )


async def seeds(bench: Bench) -> str:
    """Different seeds make a group; one seed twice is only reported."""
    bench.replies = [await bench.sample(seed=seed) for seed in range(GROUP)]
    again, greedy = await bench.sample(seed=0), await bench.sample(greedy=True)
    assert bench.greedy is not None
    kinds = len({tuple(reply.tokens) for reply in bench.replies})
    ended = [reply for reply in bench.replies if reply.stop_reason == "stop"]
    marked = sum(
        reply.tokens[-1] in end_token_ids(bench.session.tokenizer) for reply in ended
    )
    same = list(again.tokens) == list(bench.replies[0].tokens)
    repeated = list(greedy.tokens) == list(bench.greedy.tokens)
    return expect(
        marked == len(ended),
        f"{kinds} different replies for {GROUP} seeds; {len(ended)} ended by "
        f"themselves, {marked} with the end token; one seed twice gives "
        f"{'the same' if same else 'another'} reply, greedy twice "
        f"{'the same' if repeated else 'another'}",
    )


async def a_run(bench: Bench) -> str:
    """The adapter's run, and what the service says of its model."""
    client = await asyncio.to_thread(lambda: bench.session.training_client)
    first = list(bench.replies[0].tokens)
    bench.datums = [
        make_datum(
            bench.prompt,
            list(reply.tokens),
            list(reply.logprobs or []),
            1.0 if list(reply.tokens) == first else -1.0,
        )
        for reply in bench.replies
    ]
    info = await asyncio.to_thread(lambda: client.get_info())
    data = info.model_data
    return f"model {data.model_name}, tokenizer {data.tokenizer_id}"


async def agreement(bench: Bench) -> str:
    """Before any update trainer and sampler give a token the same probability."""
    gap = np.abs(await bench.forward() - bench.known("logprobs"))
    return expect(
        float(gap.mean()) < AGREES,
        f"{len(gap)} sampled tokens, log-probabilities differ by {gap.mean():.1e} in "
        f"the mean and {gap.max():.1e} at most",
    )


async def losses(bench: Bench) -> str:
    """Every loss of the course is the sum that its formula says."""
    advantage, before = bench.known("advantages"), bench.known("logprobs")
    told = []
    for name, config in (
        ("ppo", CLIP),
        ("cispo", CLIP),
        ("importance_sampling", None),
    ):
        client = bench.session.training_client
        future = await client.forward_backward_async(bench.datums, name, config)
        output = await future.result_async()
        now = bench.sampled([o["logprobs"].to_numpy() for o in output.loss_fn_outputs])
        mine = _loss(name, np.exp(now - before), now, advantage)
        if "loss:sum" not in output.metrics:
            known = ", ".join(sorted(output.metrics))
            raise Otherwise(f"{name}: no loss:sum among {known}")
        theirs = float(output.metrics["loss:sum"])
        told.append(f"{name} {theirs:.3f} for {mine:.3f}")
        close = abs(theirs - mine) <= 0.02 * float(np.abs(advantage).sum())
        expect(close, f"{told[-1]}: not the formula's sum over tokens")
    return "loss:sum, the service's for ours: " + ", ".join(told)


def _loss(
    name: str, ratio: np.ndarray, logprob: np.ndarray, advantage: np.ndarray
) -> float:
    """The sum over tokens, written out once more."""
    clipped = np.clip(ratio, CLIP["clip_low_threshold"], CLIP["clip_high_threshold"])
    if name == "ppo":
        return float(-np.minimum(ratio * advantage, clipped * advantage).sum())
    if name == "cispo":
        return float(-(clipped * logprob * advantage).sum())
    return float(-(ratio * advantage).sum())


async def an_update(bench: Bench) -> str:
    """After a step good replies are more probable and bad ones less."""
    client = bench.session.training_client
    future = await client.optim_step_async(AdamParams(learning_rate=LEARNING_RATE))
    await future.result_async()
    bench.session.updates += 1
    bench.trained = await bench.forward()
    moved = float(
        ((bench.trained - bench.known("logprobs")) * bench.known("advantages")).sum()
    )
    return expect(
        moved > 0, f"sum of advantage × change of log-probability {moved:.3f}"
    )


async def snapshots(bench: Bench) -> str:
    """A snapshot is sampled beside the base model, which stays as it was."""
    base, session = bench.sampler, bench.session
    name = checkpoint_name("policy", step=1, tag="verify")
    bench.sampler = await asyncio.to_thread(
        lambda: session.new_sampler(name, keep_earlier=True)
    )
    bench.snapshot = bench.sampler.snapshot
    reference = parse_checkpoint(bench.snapshot)
    adapted = await bench.sample(greedy=True)
    bench.sampler = base
    again = await bench.sample(greedy=True)
    assert bench.greedy is not None
    stayed = list(again.tokens) == list(bench.greedy.tokens)
    return expect(
        reference.kind == "sampler" and bool(adapted.tokens),
        f"{reference.name} of {reference.run_id}; the base model's greedy reply "
        f"{'is as before' if stayed else 'differs from before'}",
    )


async def checkpoints(bench: Bench) -> str:
    """Both kinds are listed as what they are."""
    session = bench.session
    name = checkpoint_name("state", step=1, tag="verify")
    bench.state = await asyncio.to_thread(session.save_state, name)
    listed = await asyncio.to_thread(session.list_checkpoints)
    names = {parse_checkpoint(path).name for path in (bench.snapshot, bench.state)}
    found = {row.name: (row.kind, row.promotable) for row in listed}
    said = "; ".join(
        f"{name} {kind}{', promotable' if can else ''}"
        for name, (kind, can) in found.items()
    )
    kinds = {found.get(name, ("missing", False)) for name in names}
    return expect(kinds == {("sampler", True), ("training", False)}, said or "none")


async def resuming(bench: Bench) -> str:
    """A training checkpoint outlives its session, and is what was saved."""
    await asyncio.to_thread(bench.session.resume, bench.state)
    assert bench.trained is not None
    gap = np.abs(await bench.forward() - bench.trained)
    return expect(
        float(gap.mean()) < AGREES,
        f"in a new session log-probabilities differ by {gap.mean():.1e} in the mean",
    )


CHECKS: tuple[tuple[str, Step], ...] = (
    ("refusals", refusals),
    ("samples", samples),
    ("seeds and end token", seeds),
    ("a run", a_run),
    ("trainer and sampler", agreement),
    ("losses", losses),
    ("an update", an_update),
    ("snapshots", snapshots),
    ("checkpoints", checkpoints),
    ("resuming", resuming),
)


async def verify(session: TrainingSession) -> list[Finding]:
    """Run every check in an open session.

    Args:
        session: A session that nothing was trained in yet.

    Returns:
        One finding for each check. After one that failed, as against one that found
        something otherwise, the rest is left out: it builds on what came before.
    """
    prompt = render_prompt(
        session.tokenizer,
        session.preset,
        [{"role": "user", "content": PROMPT_TEMPLATE.format(a=A, b=B)}],
    )
    bench = Bench(session, prompt)
    findings: list[Finding] = []
    broken = False
    for name, check in CHECKS:
        if broken:
            findings.append(Finding(name, "left out", "an earlier check failed"))
            continue
        try:
            findings.append(Finding(name, "as expected", await check(bench)))
        except Otherwise as error:
            findings.append(Finding(name, "otherwise", str(error)))
        except Exception as error:
            broken = True
            said = f"{type(error).__name__}: {error}"
            findings.append(Finding(name, "failed", said))
    return findings


# -- asking, and the command ------------------------------------------------------


def plan(preset: ModelPreset) -> PlannedWork:
    """The most that the checks can use."""
    return planned_work(
        preset,
        load_tokenizer(preset),
        rollouts=COMPLETIONS,
        datums=TRAINED,
        forwards=FORWARDED,
        max_tokens=REPLY_TOKENS,
        max_operand=max(A, B),
        own_tasks=False,
    )


def announcement(
    preset: ModelPreset, work: PlannedWork, prices: tuple[float, float, float] | None
) -> str:
    """What the checks will use, in words."""
    bound = work.bound
    cost = "unknown (give --prices; the course knows none)"
    if prices is not None:
        cost = f"at most ${bound.cost(prices):,.4f} at the prices given"
    return (
        f"This checks {preset.base_model} at {host_of(fireworks_url(None))}.\n"
        f"tokens     at most {bound.total:,}: {bound.prefill:,} prefill, "
        f"{bound.sampled:,} sampled, {bound.trained:,} trained; checked before each "
        "request\n"
        f"sessions   {SESSIONS}, one after the other, with one run each\n"
        "left there a training checkpoint; nothing is promoted\n"
        f"cost       {cost}"
    )


def _confirmed() -> bool:
    """Whether somebody said yes: in the environment, or at a terminal."""
    if os.environ.get("CONFIRM") == "yes":
        return True
    if not sys.stdin.isatty():
        return False
    return input("Send this? Type yes: ").strip() == "yes"


def main(argv: Sequence[str] | None = None) -> int:
    """Check the service; returns the exit code."""
    options = _parser().parse_args(argv)
    try:
        preset = resolve_preset(options.model, "fireworks")
        prices = None if options.prices is None else check_prices(options.prices)
        find_key(None)
        work = plan(preset)
        print(announcement(preset, work, prices), flush=True)
    except (ValueError, OSError, MissingKey, TokenizerUnavailable) as error:
        print(f"refused: {error}", file=sys.stderr)
        return 2
    if not _confirmed():
        print(
            "refused: not confirmed; set CONFIRM=yes. Nothing was sent.",
            file=sys.stderr,
        )
        return 2
    try:
        with connect(
            "fireworks",
            preset,
            runs_dir=options.runs_dir,
            token_limit=work.bound.total,
            planned_rollouts=COMPLETIONS,
            planned_datums=TRAINED,
            planned_forwards=FORWARDED,
            max_tokens=REPLY_TOKENS,
            max_operand=max(A, B),
            prices=prices,
            quiet=True,
        ) as session:
            findings = asyncio.run(verify(session))
            used = session.usage_report
            folder = session.new_run_dir("verify")
    except (ServiceRefused, ValueError) as error:
        print(f"stopped: {error}", file=sys.stderr)
        return 1
    _write(folder / "findings.json", preset, findings)
    print("\n" + "\n".join(map(str, findings)))
    print(f"\n{used}\n\nfindings   {folder / 'findings.json'}")
    return int(any(finding.verdict != "as expected" for finding in findings))


def _write(path: Path, preset: ModelPreset, findings: Sequence[Finding]) -> None:
    rows = [dataclasses.asdict(finding) for finding in findings]
    kept = {"base_model": preset.base_model, "findings": rows}
    path.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="make verify-fireworks",
        description="Check the real service for what the course relies on.",
    )
    parser.add_argument(
        "--model",
        default=DEFAULT_MODEL["fireworks"],
        metavar="NAME",
        help="a Fireworks preset (default: %(default)s)",
    )
    parser.add_argument(
        "--prices",
        type=float,
        nargs=3,
        metavar=("PREFILL", "SAMPLED", "TRAINED"),
        help="dollars per million tokens of each kind",
    )
    parser.add_argument("--runs-dir", default="runs", metavar="DIR")
    return parser


if __name__ == "__main__":
    sys.exit(main())
