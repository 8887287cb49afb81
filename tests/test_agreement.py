"""Tokenizer, chat template and preset are held against each other before connecting."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from noise_policy import CHAT_TEMPLATE, build_tokenizer
from paid_helpers import opened

from rlhelpers.agreement import Disagreement, check_agreement
from rlhelpers.local import LocalService
from rlhelpers.models import PRESETS, ModelPreset
from rlhelpers.preflight import load_tokenizer

pytest_plugins = ("paid_fixtures",)

OPENING = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
THINKING = CHAT_TEMPLATE.replace(
    "<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}"
)


def test_what_ships_agrees(preset: ModelPreset) -> None:
    for known in (preset, PRESETS["tiny-arithmetic"]):
        check_agreement(known, load_tokenizer(known))


@pytest.mark.parametrize(
    ("template", "options", "said"),
    [
        (CHAT_TEMPLATE.replace(OPENING, ""), {}, "does not open the assistant's turn"),
        (
            CHAT_TEMPLATE.replace("<|im_end|>\n", "<|pad|>\n"),
            {},
            "ends a reply with none of <|im_end|>",
        ),
        (
            CHAT_TEMPLATE.replace("{{ message.content }}", "{{ message.content[:9] }}"),
            {},
            "does not hold the task's text",
        ),
        (
            "{{ range(100000) | random }}" + CHAT_TEMPLATE,
            {},
            "renders one prompt in two ways",
        ),
        (THINKING, {"enable_thinking": False}, "does not know enable_thinking"),
        (
            THINKING + "{# enable_thinking #}",
            {"enable_thinking": False},
            "opens a thinking block all the same",
        ),
    ],
)
def test_a_template_that_does_not_fit(
    preset: ModelPreset, template: str, options: dict[str, Any], said: str
) -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    changed = dataclasses.replace(preset, chat_template_kwargs=options)
    with pytest.raises(Disagreement, match=said) as caught:
        check_agreement(changed, tokenizer)
    assert preset.base_model in str(caught.value)
    assert "Nothing was sent" in str(caught.value)


def test_an_option_of_a_template_without_thinking_is_harmless(
    preset: ModelPreset,
) -> None:
    options = {"enable_thinking": False}
    changed = dataclasses.replace(preset, chat_template_kwargs=options)
    check_agreement(changed, build_tokenizer())


def test_an_end_marker_in_pieces(preset: ModelPreset) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer.from_str(build_tokenizer().backend_tokenizer.to_str())
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<|im_end|>", *alphabet])}
    plain = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    plain.pre_tokenizer, plain.decoder = backend.pre_tokenizer, backend.decoder
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, chat_template=CHAT_TEMPLATE
    )
    tokenizer.eos_token_id = 0  # named, and never made a special token
    with pytest.raises(Disagreement, match="its text is encoded as"):
        check_agreement(preset, tokenizer)


def test_a_disagreement_stops_before_anything_is_sent(
    endpoint: LocalService, paid: ModelPreset, tmp_path: Path, events: list[str]
) -> None:
    """S13: checked before anything is paid for, and both are named."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE.replace(OPENING, "")
    tokenizer.save_pretrained(tmp_path / "other")
    (tmp_path / "other" / "config.json").write_text('{"model_type": "llama"}')
    wrong = dataclasses.replace(paid, tokenizer=tmp_path / "other")
    with pytest.raises(Disagreement) as caught:
        opened(endpoint, wrong, tmp_path)
    assert str(tmp_path / "other") in str(caught.value)
    assert paid.base_model in str(caught.value)
    assert events == []
