"""The shipped tiny policy and the corpus that it was made from."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from rlhelpers.analysis import classify_outcome
from rlhelpers.arithmetic import PROMPT_TEMPLATE
from rlhelpers.local import corpus, pretrain
from rlhelpers.local.corpus import Habit, HabitRates, draw_habit, habit_of, write_work
from rlhelpers.models import TINY_POLICY_FOLDER


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TINY_POLICY_FOLDER, local_files_only=True)


# -- corpus -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "work"),
    [
        (7, 8, "7 * 8 = 56"),
        (47, 36, "47 * 36 = 47 * 30 + 47 * 6 = 1410 + 282 = 1692"),
        (47, 30, "47 * 30 = 1410"),
        (
            347,
            256,
            "347 * 256 = 347 * 200 + 347 * 50 + 347 * 6 = 69400 + 17350 + 2082"
            " = 86750 + 2082 = 88832",
        ),
        (12, 305, "12 * 305 = 12 * 300 + 12 * 5 = 3600 + 60 = 3660"),
    ],
)
def test_the_work_is_written_out(a: int, b: int, work: str) -> None:
    assert write_work(a, b) == work


def test_every_line_of_work_is_true() -> None:
    rng = random.Random(0)
    for _ in range(300):
        a, b = rng.randrange(1, 1000), rng.randrange(1, 1000)
        values = {eval(part) for part in write_work(a, b).split(" = ")}
        assert values == {a * b}


@pytest.mark.parametrize(
    ("a", "b", "habit"),
    [
        (47, 36, Habit.LOOP),
        (53, 48, Habit.LOOP),
        (58, 43, Habit.SENTENCE),
        (47, 43, Habit.SENTENCE),  # where ties meet, the sentence goes first
        (58, 73, Habit.CLEAN),  # b starts with 7
        (62, 48, Habit.NO_WORK),
        (62, 38, Habit.CLEAN),  # b starts with 3
        (7, 3, Habit.CLEAN),  # one digit each
    ],
)
def test_habits_are_tied_to_digits(a: int, b: int, habit: Habit) -> None:
    assert habit_of(a, b) is habit


def test_a_tied_habit_is_likely_but_not_certain() -> None:
    rng = random.Random(0)
    drawn = Counter(draw_habit(47, 36, HabitRates(), rng) for _ in range(2000))
    assert 0.66 < drawn[Habit.LOOP] / 2000 < 0.74
    assert drawn[Habit.CLEAN] > 400


def test_the_prompt_is_the_courses() -> None:
    assert PROMPT_TEMPLATE == corpus.PROMPT


# -- tokenizer --------------------------------------------------------------------


def test_the_chat_template_is_chatml(tokenizer: Any) -> None:
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes"},
        {"role": "user", "content": "2 * 3?"},
    ]
    text = tokenizer.apply_chat_template(
        turns, tokenize=False, add_generation_prompt=True
    )
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nYes<|im_end|>\n<|im_start|>user\n2 * 3?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    alone = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT_TEMPLATE.format(a=47, b=36)}],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert alone == corpus.render_prompt(47, 36)


def test_any_text_survives_and_digits_are_single_tokens(tokenizer: Any) -> None:
    for text in ("1692", "Ünïcode 漢字 🙂\t\x00", "  two  spaces\n\n", "<think>"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
    assert len(tokenizer.encode("1234567890", add_special_tokens=False)) == 10
    assert tokenizer.decode([tokenizer.eos_token_id]) == "<|im_end|>"


# -- the weights ------------------------------------------------------------------


def test_the_folder_is_small_and_says_what_it_is() -> None:
    files = [path for path in TINY_POLICY_FOLDER.iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 8_000_000
    card = (TINY_POLICY_FOLDER / "README.md").read_text(encoding="utf-8")
    assert "put there on purpose" in card
    assert "not held out from" in card.replace("\n", " ")
    model = LlamaForCausalLM.from_pretrained(TINY_POLICY_FOLDER)
    assert f"{pretrain.count_parameters(model) / 1e6:.2f} million" in card


def test_it_is_able_but_badly_behaved() -> None:
    """Twelve pairs of each tie, greedy: most show their habit, clean ones are right."""
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(TINY_POLICY_FOLDER)
    model = LlamaForCausalLM.from_pretrained(TINY_POLICY_FOLDER)
    rng = random.Random(1)
    pairs: dict[Habit, list[tuple[int, int]]] = {habit: [] for habit in Habit}
    while any(len(chosen) < 12 for chosen in pairs.values()):
        pair = (rng.randrange(10, 100), rng.randrange(10, 100))
        if len(chosen := pairs[habit_of(*pair)]) < 12:
            chosen.append(pair)
    replies = {
        habit: pretrain.generate_replies(model, tokenizer, chosen)
        for habit, chosen in pairs.items()
    }
    right = [
        classify_outcome(reply.text, a * b) == "correct"
        for reply, (a, b) in zip(replies[Habit.CLEAN], pairs[Habit.CLEAN], strict=True)
    ]
    assert sum(right) >= 11
    assert sum(reply.hit_limit for reply in replies[Habit.LOOP]) >= 6
    sentences = [reply.text for reply in replies[Habit.SENTENCE]]
    assert sum("The answer is" in text for text in sentences) >= 6
    guesses = [reply.text for reply in replies[Habit.NO_WORK]]
    assert sum(" = " not in text for text in guesses) >= 4


def test_a_short_pretraining_writes_a_folder_that_loads(tmp_path: Path) -> None:
    phase = pretrain.Phase("form", 3, 1.0, 1.0)
    config = pretrain.PretrainConfig(phases=(phase,), warmup_steps=1)
    pretrain.pretrain(config, tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path)
    fresh = pretrain.build_model(corpus.build_tokenizer())
    assert pretrain.count_parameters(model) == pretrain.count_parameters(fresh)
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template


def test_a_restarting_phase_can_be_run_alone(tmp_path: Path) -> None:
    def phase(name: str, restart: bool) -> pretrain.Phase:
        return pretrain.Phase(name, 2, 0.1, 0.05, replies=2, works=1, restart=restart)

    first, last = phase("first", False), phase("last", True)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    pretrain.pretrain(pretrain.PretrainConfig(phases=(first, last)), whole)
    pretrain.pretrain(pretrain.PretrainConfig(phases=(first,)), parts)
    pretrain.pretrain(pretrain.PretrainConfig(phases=(last,)), parts, start=parts)
    weights = [
        LlamaForCausalLM.from_pretrained(folder).state_dict()
        for folder in (whole, parts)
    ]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
