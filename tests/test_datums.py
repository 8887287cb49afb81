"""Datums and training batches, with values worked by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from fireworks.training.sdk import Datum

from rlhelpers import RolloutFailed, make_datum, make_training_batch
from rlhelpers.datums import (
    Episode,
    check_run,
    make_episode_datum,
    make_scoring_datum,
    whole_text,
)


def row(datum: Datum, name: str) -> list[Any]:
    return datum.loss_fn_inputs[name].tolist()


def test_a10_shift_and_mask_by_hand() -> None:
    datum = make_datum([1, 2], [3, 4], [-0.2, -0.1], 1.0)
    assert datum.model_input.to_ints() == [1, 2, 3]
    assert row(datum, "target_tokens") == [2, 3, 4]
    assert row(datum, "logprobs") == pytest.approx([0, -0.2, -0.1])
    assert row(datum, "advantages") == [0, 1, 1]
    # The service refuses an extra mask; zero advantages mask the prompt.
    assert set(datum.loss_fn_inputs) == {"target_tokens", "logprobs", "advantages"}


def test_a_scoring_datum_is_laid_out_alike_and_trains_nothing() -> None:
    datum = make_scoring_datum([1, 2], [3, 4])
    assert datum.model_input.to_ints() == [1, 2, 3]
    assert row(datum, "target_tokens") == [2, 3, 4]
    assert set(datum.loss_fn_inputs) == {"target_tokens"}
    with pytest.raises(ValueError, match="output_token_ids is empty"):
        make_scoring_datum([1], [])


def test_wire_types_are_those_the_service_expects() -> None:
    datum = make_datum([1], [2], [-1], 2)  # ints where floats are meant
    types = {name: t.dtype for name, t in datum.loss_fn_inputs.items()}
    assert types == {
        "target_tokens": "int64",
        "logprobs": "float32",
        "advantages": "float32",
    }


def test_shortest_datum_has_one_position() -> None:
    datum = make_datum([5], [6], [-0.3], -0.5)
    assert datum.model_input.to_ints() == [5]
    assert row(datum, "target_tokens") == [6]
    assert row(datum, "advantages") == [-0.5]


def test_a11_sampled_end_token_is_trained_and_none_is_invented() -> None:
    end = 0
    ended = make_datum([1, 2], [3, end], [-0.2, -0.1], 1.0)
    assert row(ended, "target_tokens")[-1] == end
    assert row(ended, "advantages")[-1] == 1.0
    cut_off = make_datum([1, 2], [3, 4], [-0.2, -0.1], 1.0)
    assert row(cut_off, "target_tokens") == [2, 3, 4]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], [3], [-0.1], 1.0), "prompt_token_ids is empty"),
        (([1], [], [], 1.0), "output_token_ids is empty"),
        (([1], [3, 4], [-0.1], 1.0), "2 output tokens but 1 log-prob"),
        (([1], [3], [-0.1, -0.2], 1.0), "1 output tokens but 2 log-prob"),
        (([1], [3], [None], 1.0), r"output_logprobs\[0\] is None"),
        (([1], [3], [math.nan], 1.0), r"output_logprobs\[0\] is nan"),
        (([1], [3], [-math.inf], 1.0), r"output_logprobs\[0\] is -inf"),
        (([1], [3], [-0.1], math.nan), "advantage is nan"),
        (([1], [3], [-0.1], None), "advantage is None"),
        (([1], [3], [-0.1], 1e39), "advantage is 1e\\+39"),
        (([1, -2], [3], [-0.1], 1.0), r"prompt_token_ids\[1\] is -2"),
        (([1], [3.5], [-0.1], 1.0), r"output_token_ids\[0\] is 3.5"),
        (([True], [3], [-0.1], 1.0), r"prompt_token_ids\[0\] is True"),
    ],
)
def test_bad_input_is_refused_before_any_request(
    arguments: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_datum(*arguments)


def test_a08_batch_groups_by_id_and_keeps_arrival_order(
    graded_run: Callable[..., Any],
) -> None:
    runs = [
        graded_run("a", 1.0, output=(10,)),
        graded_run("b", 1.0, output=(20,)),
        graded_run("c", 0.0, output=(30,)),
        graded_run("a", 0.0, output=(11,)),
        graded_run("b", 1.0, output=(21,)),
        graded_run("c", 1.0, output=(31,)),
    ]
    datums, kept_groups = make_training_batch(runs)
    assert kept_groups == 2  # b is flat
    assert [row(datum, "target_tokens")[-1] for datum in datums] == [10, 11, 30, 31]
    last = [row(datum, "advantages")[-1] for datum in datums]
    half = math.sqrt(0.5)
    assert last == pytest.approx([half, -half, -half, half])


def test_a01_flat_groups_leave_nothing_to_train_on(
    graded_run: Callable[..., Any],
) -> None:
    runs = [graded_run("a", 1.0) for _ in range(8)]
    runs += [graded_run("b", 0.0) for _ in range(8)]
    assert make_training_batch(runs) == ([], 0)
    assert make_training_batch([]) == ([], 0)


def test_a13_sampled_ids_are_used_whatever_the_text(
    graded_run: Callable[..., Any],
) -> None:
    # The step's text is "1692"; only the recorded ids may reach the datum.
    odd = (7, 7, 900)
    datums, _ = make_training_batch(
        [graded_run("a", 1.0, output=odd), graded_run("a", 0.0, output=odd)]
    )
    assert row(datums[0], "target_tokens")[-3:] == list(odd)


def test_centred_only_option(graded_run: Callable[..., Any]) -> None:
    runs = [graded_run("a", reward) for reward in (1.0, 0.0, 0.0, 0.0)]
    datums, _ = make_training_batch(runs, scale="none")
    assert [row(d, "advantages")[-1] for d in datums] == [0.75, -0.25, -0.25, -0.25]


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"status": "error", "error": "timed out"}, "timed out"),
        ({"status": "error"}, "'error'"),
        ({"status": "cancelled"}, "cancelled"),
        ({"status": None}, "None"),
        ({"is_error": True}, "graded text"),
        ({"samples": 0}, "no recorded tokens"),
        ({"samples": 2}, "the prompt of turn 2 differs at token 2 from the 4 tokens"),
    ],
)
@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_a09_failed_run_stops_the_batch_at_whatever_reward(
    graded_run: Callable[..., Any], changes: dict[str, Any], cause: str, reward: float
) -> None:
    failed = graded_run("a", reward, slug="multiply-7x8", **changes)
    group = [graded_run("a", 1.0) for _ in range(3)]
    with pytest.raises(RolloutFailed, match="multiply-7x8") as caught:
        make_training_batch([*group, failed])
    assert cause in str(caught.value)


def test_failed_run_in_a_flat_group_still_stops_the_batch(
    graded_run: Callable[..., Any],
) -> None:
    with pytest.raises(RolloutFailed):
        make_training_batch(
            [graded_run("a", 0.0), graded_run("a", 0.0, status="error")]
        )


def test_misaligned_sample_and_bad_reward_name_the_task(
    graded_run: Callable[..., Any],
) -> None:
    good = graded_run("a", 1.0)
    with pytest.raises(ValueError, match=r"multiply-36x47.*log-prob"):
        make_training_batch([good, graded_run("a", 0.0, logprobs=(-0.1,))])
    with pytest.raises(ValueError, match=r"multiply-36x47.*nan"):
        make_training_batch([good, graded_run("a", math.nan)])


def test_check_run_returns_the_sample(graded_run: Callable[..., Any]) -> None:
    assert check_run(graded_run("a", 1.0)).output_token_ids == [3, 4]


# -- several turns ----------------------------------------------------------------


def turn(prompt: list[int], output: list[int], logprobs: list[float]) -> Any:
    from hud.agents.types import Sample

    return Sample(
        prompt_token_ids=prompt, output_token_ids=output, output_logprobs=logprobs
    )


#: Prompt 1 2, reply 3 4, the user's 5 6, reply 7, the user's 8, reply 9 0.
THREE_TURNS = (
    ([1, 2], [3, 4], [-0.1, -0.2]),
    ([1, 2, 3, 4, 5, 6], [7], [-0.3]),
    ([1, 2, 3, 4, 5, 6, 7, 8], [9, 0], [-0.4, -0.5]),
)


def test_an_episode_is_one_datum_with_its_replies_trained() -> None:
    episode = Episode.of([turn(*parts) for parts in THREE_TURNS])
    datum = make_episode_datum(episode, 2.0)
    assert datum.model_input.to_ints() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert row(datum, "target_tokens") == [2, 3, 4, 5, 6, 7, 8, 9, 0]
    assert row(datum, "advantages") == [0, 2, 2, 0, 0, 2, 0, 2, 2]
    assert row(datum, "logprobs") == pytest.approx(
        [0, -0.1, -0.2, 0, 0, -0.3, 0, -0.4, -0.5]
    )
    types = {name: t.dtype for name, t in datum.loss_fn_inputs.items()}
    assert types == {
        "target_tokens": "int64",
        "logprobs": "float32",
        "advantages": "float32",
    }
    assert (episode.prompt_token_ids, episode.turns) == ([1, 2], 3)
    assert episode.output_token_ids == [3, 4, 7, 9, 0]
    assert whole_text(episode)[0] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]


def test_an_episode_of_one_turn_is_the_datum_of_one_reply() -> None:
    parts = ([1, 2], [3, 4], [-0.1, -0.2])
    joined = make_episode_datum(Episode.of([turn(*parts)]), 0.7)
    alone = make_datum(*parts, 0.7)
    assert joined.model_input.to_ints() == alone.model_input.to_ints()
    for name in alone.loss_fn_inputs:
        assert row(joined, name) == row(alone, name)


@pytest.mark.parametrize(
    ("second", "place"),
    [
        ([1, 2, 3, 9, 5], "turn 2 differs at token 3 from the 4 tokens"),
        ([1, 2, 3], "turn 2 differs at token 3 from the 4 tokens"),  # history cut
        ([0, 1, 2, 3, 4, 5], "turn 2 differs at token 0"),  # a system turn came in
    ],
)
def test_a_turn_that_does_not_extend_the_last_is_refused(
    second: list[int], place: str
) -> None:
    samples = [turn([1, 2], [3, 4], [-0.1, -0.2]), turn(second, [7], [-0.3])]
    with pytest.raises(ValueError, match=place):
        Episode.of(samples)


def test_a_misaligned_episode_is_refused() -> None:
    episode = Episode.of([turn([1], [2], []), turn([1, 2, 3], [4], [-0.3])])
    with pytest.raises(ValueError, match="2 sampled tokens but 1 log-prob"):
        make_episode_datum(episode, 1.0)
    with pytest.raises(ValueError, match="prompt_token_ids is empty"):
        make_episode_datum(Episode.of([turn([], [2], [-0.1])]), 1.0)
    good = Episode.of([turn([1], [2], [math.inf]), turn([1, 2], [4], [-0.3])])
    with pytest.raises(ValueError, match="output_logprobs"):
        make_episode_datum(good, 1.0)


def test_a_batch_takes_episodes_and_single_replies(
    graded_run: Callable[..., Any],
) -> None:
    from hud.agents.types import AgentStep

    long = graded_run("a", 1.0, samples=0)
    for parts in THREE_TURNS:
        long.trace.record(AgentStep(content="x", sample=turn(*parts)))
    short = graded_run("a", 0.0)
    datums, kept = make_training_batch([long, short])
    assert kept == 1
    weight = 1 / math.sqrt(2)  # two rewards, 1 and 0: ±0.5 / √0.5
    expected = [weight * own for own in (0, 1, 1, 0, 0, 1, 0, 1, 1)]
    assert row(datums[0], "advantages") == pytest.approx(expected)
    assert row(datums[1], "advantages") == pytest.approx([0, -weight, -weight])
