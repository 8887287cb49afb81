"""The shipped tiny guesser: what it is, and that it plays ably and badly."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from rlhelpers.guessing import GUESSES, HIGHER, LOWER, NO_NUMBER, PROMPT_TEMPLATE
from rlhelpers.local import corpus, guessing_corpus, pretrain, pretrain_guesser
from rlhelpers.models import TINY_GUESSER_FOLDER, TINY_POLICY_FOLDER


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TINY_GUESSER_FOLDER, local_files_only=True)


@pytest.fixture(scope="module")
def model() -> Any:
    return LlamaForCausalLM.from_pretrained(TINY_GUESSER_FOLDER)


def test_the_folder_is_small_and_says_what_it_is(model: Any) -> None:
    files = [
        path
        for folder in (TINY_GUESSER_FOLDER, TINY_POLICY_FOLDER)
        for path in folder.iterdir()
        if path.is_file()
    ]
    assert sum(path.stat().st_size for path in files) <= 8_000_000
    card = (TINY_GUESSER_FOLDER / "README.md").read_text(encoding="utf-8")
    assert "put there on purpose" in card
    assert "not held out from" in card.replace("\n", " ")
    assert f"{pretrain.count_parameters(model) / 1e6:.2f} million" in card


def test_the_chat_template_renders_the_corpus(tokenizer: Any) -> None:
    prompt = PROMPT_TEMPLATE.format(low=10, high=40, guesses=GUESSES)
    turns = [
        {"role": "user", "content": prompt},
        {"role": "assistant", "content": "10 to 40\n25"},
        {"role": "user", "content": HIGHER},
    ]
    text = tokenizer.apply_chat_template(
        turns, tokenize=False, add_generation_prompt=True
    )
    turn = guessing_corpus.Turn(10, 40, 25, "higher")
    written = guessing_corpus.write_turns([turn, turn])[:2]
    assert text == guessing_corpus.user_turn(prompt) + "".join(t for t, _ in written)


def test_its_words_are_single_tokens(tokenizer: Any) -> None:
    for text, most in (("26 to 40\n33", 9), (HIGHER, 2), (LOWER, 2), (NO_NUMBER, 9)):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert len(ids) <= most
        assert tokenizer.decode(ids) == text


def test_it_is_able_but_badly_behaved(tokenizer: Any, model: Any) -> None:
    """Greedy, 150 games: valid guesses throughout, and many numbers are not found."""
    torch.set_num_threads(1)
    rng = random.Random(1)
    games = [pretrain_guesser.Game.draw(rng) for _ in range(150)]
    pretrain_guesser.play(model, tokenizer, games, temperature=0.0)
    guesses = [guess for game in games for guess in game.guesses]
    assert guesses.count(None) <= 0.02 * len(guesses)
    found = sum(game.found for game in games) / len(games)
    assert 0.3 <= found <= 0.85
    assert all(game.over for game in games)


def test_an_example_predicts_replies_only() -> None:
    tokenizer = corpus.build_tokenizer(guessing_corpus.TOKENIZER_TEXT)
    pieces = [("user: 7", False), ("10 to 40", True), ("Higher.", False), ("9", True)]
    ids, targets = pretrain_guesser.encode(tokenizer, pieces)
    spans = [tokenizer(text)["input_ids"] for text, _ in pieces]
    assert ids == [token for span in spans for token in span]
    learnt = [target for target in targets if target != pretrain.IGNORED]
    assert learnt == spans[1] + spans[3]
    # Each stands one place before the token that it predicts.
    for place, target in enumerate(targets):
        assert target in (pretrain.IGNORED, *ids[place + 1 : place + 2])


def test_a_short_pretraining_writes_a_folder_that_loads(tmp_path: Path) -> None:
    config = pretrain_guesser.GuesserConfig(
        steps=2, games=1, fragments=2, warmup_steps=1, width=24
    )
    pretrain_guesser.pretrain(config, tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.hidden_size == 24
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template


def test_the_tables_of_the_model_card(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "evaluation.md"
    pretrain_guesser.evaluate_folder(TINY_GUESSER_FOLDER, target, count=4)
    text, printed = target.read_text(encoding="utf-8"), capsys.readouterr().out
    tables = re.findall(r"<!-- (\w+) -->\n\n(.+?)\n\n<!-- /\1 -->", text, re.S)
    assert [name for name, _ in tables] == ["greedy", "sampled"]
    assert all(table in printed for _, table in tables)
    assert all(re.search(r"\| found \| [0-4] / 4 \|", table) for _, table in tables)
