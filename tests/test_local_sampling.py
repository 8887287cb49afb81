"""Drawing tokens: hand-worked distributions, filters, and independence of rows."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rlhelpers.local.sampling import Drawn, SamplingParams, draw

P = [0.1, 0.2, 0.3, 0.4]
LOGITS = torch.tensor(P, dtype=torch.float64).log() + 5.0  # a shift changes nothing


def params(**settings: float | int | None) -> SamplingParams:
    return SamplingParams(max_tokens=1, **settings)  # type: ignore[arg-type]


def draw_one(setting: SamplingParams, uniform: float) -> tuple[int, float, float]:
    """Token, raw and sampling log-probability of one row."""
    drawn = draw(LOGITS.unsqueeze(0), [setting], torch.tensor([uniform]).double())
    return drawn.tokens[0], drawn.logprobs[0], drawn.sampling_logprobs[0]


def distribution(setting: SamplingParams) -> dict[int, float]:
    """Every token that can be drawn with its reported sampling probability."""
    found = {}
    for uniform in np.linspace(0.0, 1.0, 2001, endpoint=False):
        token, _, logprob = draw_one(setting, float(uniform))
        found[token] = math.exp(logprob)
    return found


@pytest.mark.parametrize(
    ("uniform", "token"),
    [
        (0.0, 0),
        (0.0999, 0),
        (0.1001, 1),
        (0.2999, 1),
        (0.3001, 2),
        (0.5999, 2),
        (0.6001, 3),
        (1 - 2**-53, 3),
    ],
)
def test_token_is_where_the_cumulative_probability_passes_the_number(
    uniform: float, token: int
) -> None:
    drawn, raw, sampled = draw_one(params(), uniform)
    assert drawn == token
    assert raw == pytest.approx(math.log(P[token]), abs=1e-12)
    assert sampled == raw


def test_frequencies_follow_the_probabilities() -> None:
    count = 4000
    uniforms = np.random.default_rng(3).random(count)
    drawn = draw(
        LOGITS.float().expand(count, 4), [params()] * count, torch.from_numpy(uniforms)
    )
    seen = np.bincount(drawn.tokens, minlength=4)
    expected = count * np.array(P)
    # 16.27 is exceeded once in a thousand times with three degrees of freedom.
    assert ((seen - expected) ** 2 / expected).sum() < 16.27


def test_a_seeded_stream_follows_the_probabilities() -> None:
    setting = SamplingParams(max_tokens=4000, seed=11)
    uniforms = setting.uniforms()
    drawn = draw(LOGITS.expand(4000, 4), [setting] * 4000, torch.from_numpy(uniforms))
    seen, expected = np.bincount(drawn.tokens, minlength=4), 4000 * np.array(P)
    assert ((seen - expected) ** 2 / expected).sum() < 16.27


def test_greedy_takes_the_most_probable_token_for_certain() -> None:
    for uniform in (0.0, 0.5, 0.999):
        token, raw, sampled = draw_one(params(temperature=0.0), uniform)
        assert token == 3
        assert raw == pytest.approx(math.log(0.4), abs=1e-12)
        assert sampled == 0.0


def test_a_greedy_row_is_the_same_in_any_company() -> None:
    logits = torch.stack([LOGITS, LOGITS.flip(0)])
    greedy, uniforms = params(temperature=0.0), torch.tensor([0.1, 0.9]).double()
    among_its_like = draw(logits, [greedy, greedy], uniforms)
    among_others = draw(logits, [greedy, params()], uniforms)
    assert among_its_like.tokens == [3, 0]
    assert among_its_like.sampling_logprobs == [0.0, 0.0]
    for name in ("tokens", "logprobs", "sampling_logprobs"):
        assert getattr(among_its_like, name)[0] == getattr(among_others, name)[0]


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_raises_probabilities_to_its_inverse(temperature: float) -> None:
    powers = [p ** (1 / temperature) for p in P]
    expected = {i: power / sum(powers) for i, power in enumerate(powers)}
    assert distribution(params(temperature=temperature)) == pytest.approx(expected)


def test_top_k_keeps_the_k_most_probable() -> None:
    assert distribution(params(top_k=2)) == pytest.approx({2: 3 / 7, 3: 4 / 7})
    assert distribution(params(top_k=1)) == pytest.approx({3: 1.0})
    everything = pytest.approx(dict(enumerate(P)))
    assert distribution(params(top_k=4)) == everything
    assert distribution(params(top_k=100)) == everything


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    # Sorted: 0.4, 0.3, 0.2, 0.1; the mass before each is 0, 0.4, 0.7, 0.9.
    assert distribution(params(top_p=1e-9)) == pytest.approx({3: 1.0})
    assert distribution(params(top_p=0.35)) == pytest.approx({3: 1.0})
    assert distribution(params(top_p=0.6)) == pytest.approx({2: 3 / 7, 3: 4 / 7})
    three = {1: 2 / 9, 2: 3 / 9, 3: 4 / 9}
    assert distribution(params(top_p=0.75)) == pytest.approx(three)
    assert distribution(params(top_p=0.95)) == pytest.approx(dict(enumerate(P)))


def test_temperature_comes_before_top_p() -> None:
    # At temperature 1/2 the squares 16, 9, 4, 1 of 30 remain: 0.53 alone reaches 0.5.
    kept = distribution(params(temperature=0.5, top_p=0.5))
    assert kept == pytest.approx({3: 1.0})
    kept = distribution(params(temperature=0.5, top_p=0.6))
    assert kept == pytest.approx({3: 16 / 25, 2: 9 / 25})


def test_top_p_works_on_what_top_k_left() -> None:
    # Of 4/7 and 3/7 the first alone reaches 0.5; of 0.4 and 0.3 it would not.
    assert distribution(params(top_k=2, top_p=0.5)) == pytest.approx({3: 1.0})


def test_logprob_is_the_models_and_sampling_logprob_the_drawn_distributions() -> None:
    token, raw, sampled = draw_one(params(temperature=2.0, top_k=3), 0.99)
    roots = [math.sqrt(p) for p in P[1:]]
    assert token == 3
    assert raw == pytest.approx(math.log(0.4), abs=1e-12)
    assert sampled == pytest.approx(math.log(roots[2] / sum(roots)), abs=1e-12)


MIXED = [
    params(),
    params(temperature=0.7),
    params(temperature=0.0),
    params(top_p=0.8),
    params(top_k=5),
    params(temperature=1.3, top_p=0.9, top_k=20),
    params(),
]


def _row(drawn: Drawn, row: int) -> tuple[int, float, float]:
    return drawn.tokens[row], drawn.logprobs[row], drawn.sampling_logprobs[row]


def test_a_row_is_the_same_to_the_last_bit_whatever_the_other_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    for trial in range(20):
        logits = torch.randn(len(MIXED), 300, generator=generator) * 3
        uniforms = torch.rand(len(MIXED), generator=generator, dtype=torch.float64)
        together = draw(logits, MIXED, uniforms)
        order = torch.randperm(len(MIXED), generator=generator).tolist()
        shuffled = draw(logits[order], [MIXED[i] for i in order], uniforms[order])
        for row, setting in enumerate(MIXED):
            alone = draw(logits[row : row + 1], [setting], uniforms[row : row + 1])
            assert _row(alone, 0) == _row(together, row), (trial, row)
            assert _row(shuffled, order.index(row)) == _row(together, row)


def test_seed_fixes_the_stream_and_a_longer_one_goes_on_from_it() -> None:
    short = SamplingParams(max_tokens=5, seed=9).uniforms()
    long = SamplingParams(max_tokens=12, seed=9).uniforms()
    other = SamplingParams(max_tokens=5, seed=10).uniforms()
    np.testing.assert_array_equal(short, long[:5])
    assert not np.any(short == other)
    assert ((long >= 0) & (long < 1)).all()


def test_without_a_seed_every_stream_differs() -> None:
    setting = SamplingParams(max_tokens=5)
    assert not np.any(setting.uniforms() == setting.uniforms())


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"top_k": -1}, "top_k"),
    ],
)
def test_unusable_settings_are_refused(settings: dict[str, float], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{"max_tokens": 1, **settings})  # type: ignore[arg-type]
