"""The agent, the rollouts it drives, and what is recorded of them."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections import Counter
from pathlib import Path

import noise_policy
import pytest
from hud.eval.run import Run, rollout
from hud.eval.runtime import LocalRuntime
from noise_policy import broken, build_tokenizer, plain

from rlhelpers.datums import RolloutFailed, check_run
from rlhelpers.evaluation import evaluate
from rlhelpers.metrics import read_rollouts
from rlhelpers.models import WorkedExample
from rlhelpers.sampling import (
    PolicyAgent,
    PolicySampler,
    PromptTooLong,
    RolloutPlan,
    SamplingSettings,
    _check_vocabulary,
    _only_new_objects_collected,
    check_context,
    collect_rollouts,
    end_token_ids,
    reply_text,
    rollout_seed,
    sampled_step,
    to_record,
)
from rlhelpers.service import TrainingSession, connect
from rlhelpers.usage import (
    PlannedWork,
    TokenCounts,
    TokenLimitReached,
    TokenUsage,
)

TRAINING = SamplingSettings(max_tokens=16)
TOKENIZER = build_tokenizer()


def plan(**changes: object) -> RolloutPlan:
    values: dict[str, object] = {
        "phase": "train",
        "step": 1,
        "seed": 0,
        "group_size": 4,
        "settings": TRAINING,
        "job_id": "job",
    }
    return RolloutPlan(**{**values, **changes})  # type: ignore[arg-type]


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


# -- settings and seeds -----------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"temperature": -0.5}, "-0.5"),
        ({"temperature": float("nan")}, "nan"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "1.5"),
        ({"top_k": -2}, "-2"),
    ],
)
def test_settings_out_of_range(changes: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError) as caught:
        SamplingSettings(**{"max_tokens": 16, **changes})  # type: ignore[arg-type]
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "changes", [{"temperature": 0.6}, {"top_p": 0.9}, {"top_k": 20}]
)
def test_settings_that_bias_the_ratios_warn(changes: dict[str, float]) -> None:
    with pytest.warns(UserWarning, match="ratios are biased"):
        SamplingSettings(max_tokens=16, **changes).warn_if_biased()  # type: ignore[arg-type]


@pytest.mark.parametrize("top_k", [-1, 0])
def test_the_training_settings_do_not_warn(top_k: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SamplingSettings(max_tokens=16, top_k=top_k).warn_if_biased()


def test_seeds_are_stable_and_all_different() -> None:
    seeds = [
        rollout_seed(run, step, task, index)
        for run in range(3)
        for step in range(4)
        for task in range(8)
        for index in range(8)
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert rollout_seed(0, 1, 2, 3) == 1980200620


# -- the garbage collector -------------------------------------------------------


class _Loop:
    """Refers to itself, so that only the collector can free it."""

    def __init__(self) -> None:
        self.itself = self


def test_rollouts_keep_the_collector_off_what_was_there_before() -> None:
    gc.collect(0)  # no collection is due in the next lines
    earlier = weakref.ref(_Loop())
    with _only_new_objects_collected():
        new = weakref.ref(_Loop())
        gc.collect()
        assert earlier() is not None
        assert new() is None
    gc.collect()
    assert earlier() is None


def test_the_collector_sees_everything_again_after_a_failure_within() -> None:
    def fail() -> None:
        with _only_new_objects_collected():
            with _only_new_objects_collected():
                pass
            assert gc.get_freeze_count() > 0
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert gc.get_freeze_count() == 0


def test_a_program_that_froze_its_objects_itself_keeps_them_frozen() -> None:
    gc.freeze()
    try:
        with _only_new_objects_collected():
            pass
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


# -- text -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampled", "reply"),
    [
        ("1692<|im_end|>", "1692"),
        ("36*40=1440\n1692<|im_end|>", "36*40=1440\n1692"),
        ("1692", "1692"),
        ("<|im_end|>", ""),
        ("<think>36*47</think>\n\n1692<|im_end|>", "1692"),
        ("<think>a</think><think>b</think>7", "7"),
        ("<think>36*47 = 1692", ""),
        ("<think>1692<|im_end|>", ""),
        ("1692\n<think>let me see", ""),
    ],
)
def test_reply_text(sampled: str, reply: str) -> None:
    """G22: the end marker is no part of the graded text. G23: nor is a thought."""
    assert reply_text(TOKENIZER, ids(sampled)) == reply


def test_a_thinking_block_that_the_prompt_opened() -> None:
    assert reply_text(TOKENIZER, ids("hm</think>7"), thinking_open=True) == "7"
    assert reply_text(TOKENIZER, ids("hm 7"), thinking_open=True) == ""


def test_no_tokens_give_an_empty_reply() -> None:
    assert reply_text(TOKENIZER, []) == ""


def test_a_tokenizer_without_an_end_token_is_refused() -> None:
    tokenizer = build_tokenizer()
    tokenizer.eos_token = None
    assert end_token_ids(tokenizer) == (2,)  # <|im_end|> is still known
    assert end_token_ids(TOKENIZER) == (2,)


def test_prompt_and_reply_must_fit_the_context() -> None:
    """S16: both numbers and their sum."""
    check_context(240, 16, 256)
    with pytest.raises(PromptTooLong) as caught:
        check_context(8190, 1024, 8192)
    for number in ("8190", "1024", "9214", "8192", "at most 2"):
        assert number in str(caught.value)


# -- token accounting -------------------------------------------------------------


def test_requests_in_flight_cannot_pass_the_limit_together() -> None:
    usage = TokenUsage(limit=100)
    with usage.reserve(prefill=20, sampled=40) as spend:
        with pytest.raises(TokenLimitReached) as caught, usage.reserve(sampled=50):
            pass
        with pytest.raises(TokenLimitReached):
            usage.charge(trained=41)
        spend(prefill=10, sampled=5)
    assert usage.counts == TokenCounts(10, 5, 0)
    with usage.reserve(sampled=85):
        pass
    for text in ("50", "60", "token_limit=100", "session.usage.limit"):
        assert text in str(caught.value)


def test_what_is_known_beforehand_counts_before_it_is_sent() -> None:
    usage = TokenUsage(limit=100)
    usage.charge(trained=60)
    with pytest.raises(TokenLimitReached, match="60 are used"):
        usage.charge(prefill=41)
    usage.charge(prefill=40)
    assert usage.counts == TokenCounts(40, 0, 60)


def test_a_request_without_an_answer_counts_with_its_bound() -> None:
    usage = TokenUsage(limit=100)
    with pytest.raises(ConnectionError), usage.reserve(prefill=20, sampled=40):
        raise ConnectionError("gone")
    assert usage.counts == usage.unanswered == TokenCounts(20, 40, 0)

    def answered_and_then_failed() -> None:
        with usage.reserve(sampled=40) as spend:
            spend(sampled=3)
            raise KeyError("plot")

    with pytest.raises(KeyError):
        answered_and_then_failed()
    assert usage.counts == TokenCounts(20, 43, 0)
    assert usage.unanswered == TokenCounts(20, 40, 0)


def test_the_limit_can_be_raised() -> None:
    usage = TokenUsage(limit=10)
    with pytest.raises(TokenLimitReached):
        usage.charge(sampled=11)
    usage.limit = 11
    usage.charge(sampled=11)
    usage.limit = None
    usage.charge(sampled=10**9)
    with pytest.raises(ValueError, match="got -1"):
        usage.limit = -1


@pytest.mark.parametrize("limit", [0, -5, 2.5, "100", True])
def test_a_limit_is_a_positive_whole_number(limit: object) -> None:
    with pytest.raises(ValueError, match="token_limit must be at least 1"):
        TokenUsage(limit=limit)  # type: ignore[arg-type]


def test_planned_work_is_bounded_by_kind() -> None:
    # 10 prompts of 38 and 10 replies of 160; 4 datums of 38 + 160 - 1.
    work = PlannedWork(10, 4, prompt_tokens=38, max_tokens=160)
    assert work.bound == TokenCounts(prefill=380, sampled=1600, trained=788)
    # Two of them are read once more by a forward pass: 2 × 197.
    work = PlannedWork(10, 4, prompt_tokens=38, max_tokens=160, forwards=2)
    assert work.bound == TokenCounts(prefill=774, sampled=1600, trained=788)


def test_cost() -> None:
    assert TokenCounts(2_000_000, 1_000_000, 500_000).cost((1.0, 2.0, 4.0)) == 6.0


# -- one rollout ------------------------------------------------------------------


async def one_run(session: TrainingSession, sampler: PolicySampler, **how: int) -> Run:
    settings = SamplingSettings(max_tokens=how.get("max_tokens", 16))
    agent = PolicyAgent(sampler, settings, seed=how.get("seed", 0))
    return await rollout(plain(1), agent, runtime=await session.runtime())


async def test_the_agent_records_what_was_sampled(session: TrainingSession) -> None:
    sampler = session.base_sampler()
    run = await one_run(session, sampler)
    sample, step = check_run(run), sampled_step(run)
    assert step is not None
    text = session.tokenizer.decode(sample.prompt_token_ids)
    assert text == "<|im_start|>user\nTask 1.<|im_end|>\n<|im_start|>assistant\n"
    assert len(sample.output_token_ids) == len(sample.output_logprobs) > 0
    assert all(logprob <= 0 for logprob in sample.output_logprobs)
    assert run.trace.content == step.content
    assert run.trace.content == reply_text(session.tokenizer, sample.output_token_ids)
    assert step.usage is not None
    assert step.usage.completion_tokens == len(sample.output_token_ids)
    assert step.model == session.preset.base_model
    used = session.usage.counts
    assert (used.prefill, used.sampled) == (
        len(sample.prompt_token_ids),
        len(sample.output_token_ids),
    )


async def test_a_seed_repeats_and_another_differs(session: TrainingSession) -> None:
    sampler = session.base_sampler()
    first, again, other = [
        check_run(await one_run(session, sampler, seed=seed)) for seed in (5, 5, 6)
    ]
    assert first.output_token_ids == again.output_token_ids
    assert first.output_logprobs == again.output_logprobs
    assert first.output_token_ids != other.output_token_ids


async def test_worked_examples_are_earlier_turns(session: TrainingSession) -> None:
    example = WorkedExample(2, 3, "2 * 3 = 6\n6")
    sampler = session.base_sampler()
    sampler.examples = (("Compute 2 * 3.", example.reply),)
    agent = PolicyAgent(sampler, TRAINING)
    prompt = agent.render([{"role": "user", "content": "Task 1."}])
    assert session.tokenizer.decode(prompt) == (
        "<|im_start|>user\nCompute 2 * 3.<|im_end|>\n"
        "<|im_start|>assistant\n2 * 3 = 6\n6<|im_end|>\n"
        "<|im_start|>user\nTask 1.<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_a_prompt_over_the_context_is_not_sent(session: TrainingSession) -> None:
    """S16: nothing is sent."""
    sampler = session.base_sampler()
    agent = PolicyAgent(sampler, SamplingSettings(max_tokens=250))
    run = await rollout(plain(1), agent, runtime=await session.runtime())
    assert run.trace.status == "error"
    assert isinstance(agent.failure, PromptTooLong)
    assert "max_tokens=250" in str(agent.failure)
    assert "context of 256" in str(agent.failure)
    assert session.usage.counts.total == 0


async def test_a_failed_sampling_request_is_a_failed_run(
    session: TrainingSession,
) -> None:
    sampler = session.base_sampler()
    sampler.close()
    run = await one_run(session, sampler)
    assert run.trace.status == "error"
    with pytest.raises(RolloutFailed, match="plain"):
        check_run(run)


# -- groups -----------------------------------------------------------------------


async def test_groups_come_task_by_task_with_their_own_ids(
    session: TrainingSession,
) -> None:
    tasks = [plain(1), plain(2), plain(1)]
    sampler = session.base_sampler()
    runs = await collect_rollouts(
        sampler, tasks, plan=plan(), runtime=await session.runtime()
    )
    extras = [run.trace.extra for run in runs]
    assert [extra["task_index"] for extra in extras] == [0] * 4 + [1] * 4 + [2] * 4
    assert [extra["rollout_index"] for extra in extras] == [0, 1, 2, 3] * 3
    # One task twice in a step makes two groups, not one of double size.
    assert set(Counter(run.group_id for run in runs).values()) == {4}
    assert runs[0].group_id == f"train-1-0-{tasks[0].slug}"
    assert len({run.job_id for run in runs}) == 1


async def test_rollouts_of_a_group_differ(session: TrainingSession) -> None:
    """S01: one seed each, so a group is never flat because of its seeds."""
    sampler = session.base_sampler()
    runs = await collect_rollouts(
        sampler, [plain(1)], plan=plan(), runtime=await session.runtime()
    )
    assert len({run.trace.extra["seed"] for run in runs}) == 4
    assert len({run.trace.content for run in runs}) == 4


async def test_the_same_seed_gives_the_same_rewards(session: TrainingSession) -> None:
    tasks = [plain(n) for n in range(3)]
    sampler = session.base_sampler()
    runtime = await session.runtime()
    first, again, other = [
        await collect_rollouts(sampler, tasks, plan=plan(seed=seed), runtime=runtime)
        for seed in (1, 1, 2)
    ]
    assert [r.trace.content for r in first] == [r.trace.content for r in again]
    assert [r.reward for r in first] == [r.reward for r in again]
    assert [r.trace.content for r in first] != [r.trace.content for r in other]


async def test_the_finish_reason_decides_what_hit_the_limit(
    session: TrainingSession,
) -> None:
    """S04: through the agent."""
    sampler = session.base_sampler()
    settings = SamplingSettings(max_tokens=60)
    runs = await collect_rollouts(
        sampler,
        [plain(n) for n in range(8)],
        plan=plan(settings=settings, group_size=8),
        runtime=await session.runtime(),
    )
    end = session.tokenizer.eos_token_id
    kinds = Counter(bool(run.trace.extra["token_limit"]) for run in runs)
    assert kinds[True]
    assert kinds[False]
    for run in runs:
        ended = check_run(run).output_token_ids[-1] == end
        assert run.trace.extra["token_limit"] is not ended
        assert run.trace.extra["finish_reason"] == ("stop" if ended else "length")


def test_a_reply_of_another_vocabulary_is_refused(session: TrainingSession) -> None:
    """S13: the message names model and tokenizer."""
    tokenizer, known = session.tokenizer, len(session.tokenizer)
    _check_vocabulary([0, known - 1], tokenizer, session.preset)
    with pytest.raises(ValueError) as caught:
        _check_vocabulary([0, known], tokenizer, session.preset)
    assert "'local/noise'" in str(caught.value)
    assert str(session.preset.tokenizer) in str(caught.value)
    assert f"knows {known}" in str(caught.value)


async def test_an_unanswered_request_counts_with_its_bound(
    session: TrainingSession,
) -> None:
    sampler = session.base_sampler()
    sampler.close()
    run = await one_run(session, sampler)
    assert run.trace.status == "error"
    used = session.usage.counts
    assert used.sampled == TRAINING.max_tokens
    assert used == session.usage.unanswered


async def test_a_broken_grader_stops_the_phase_after_saving_the_rest(
    session: TrainingSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(noise_policy._calls, "broken", 0)
    with pytest.raises(RolloutFailed) as caught:
        await evaluate(
            session,
            [plain(1), plain(2), broken(1), broken(2)],
            run_dir=tmp_path / "run",
        )
    assert "broken" in str(caught.value)
    assert "the grader broke" in str(caught.value)
    # Three of the four were valid, and are on disk; the failed one is nowhere.
    assert len(read_rollouts(tmp_path / "run" / "rollouts.jsonl")) == 3


async def test_the_token_limit_stops_before_sending(
    preset: object, tmp_path: Path
) -> None:
    with connect(
        model=preset,  # type: ignore[arg-type]
        runs_dir=tmp_path / "runs",
        task_runtime=LocalRuntime(noise_policy.env),
        token_limit=150,
        quiet=True,
    ) as session:
        with pytest.raises(TokenLimitReached, match="token_limit=150"):
            await evaluate(session, [plain(n) for n in range(8)])
        assert session.usage.counts.total <= 150


async def test_a_record_says_all_of_a_rollout(session: TrainingSession) -> None:
    sampler = session.base_sampler()
    task = plain(3)
    (run,) = await collect_rollouts(
        sampler, [task], plan=plan(group_size=1), runtime=await session.runtime()
    )
    record = to_record(run, task, run_id="r", attempt=2, advantage=0.5)
    sample = check_run(run)
    assert record.run_id == "r"
    assert (record.phase, record.step, record.attempt) == ("train", 1, 2)
    assert record.task == task.slug
    assert record.args == {"n": 3}
    assert record.prompt == "Task 3."
    assert record.text == run.trace.content
    assert record.expected == 3
    assert record.outcome == "invalid_final_line"
    assert record.output_tokens == len(sample.output_token_ids)
    assert record.advantage == 0.5
    assert record.snapshot == session.preset.base_model
    mean = sum(sample.output_logprobs) / len(sample.output_logprobs)
    assert record.entropy == pytest.approx(-mean)
