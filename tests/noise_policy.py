"""A tiny random policy, and an environment whose rewards it can move.

The policy is a freshly initialised Llama that writes noise in well under a second.
The environment pays for noise that a random policy produces about half of the time,
so that groups have a spread and one step can learn.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import torch
from hud.environment import Environment
from hud.graders import EvaluationResult
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ("<|pad|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

env = Environment("noise")


@env.template(id="plain")
async def plain(n: int, least: int = 8) -> AsyncGenerator[Any, Any]:
    """Pays 1.0 for a reply with enough ASCII characters in it."""
    answer = yield f"Task {n}."
    count = sum(character.isascii() for character in answer)
    yield EvaluationResult(
        reward=float(count >= least),
        content=answer,
        info={"expected": n, "got": None},
    )


@env.template(id="flat")
async def flat(n: int) -> AsyncGenerator[Any, Any]:
    """Pays nothing, whatever the reply."""
    yield f"Task {n}."
    yield EvaluationResult(reward=0.0, info={"expected": n, "got": None})


_calls = {"broken": 0}


@env.template(id="broken")
async def broken(n: int) -> AsyncGenerator[Any, Any]:
    """Grades its first rollout of four, and raises on the others."""
    yield f"Task {n}."
    _calls["broken"] += 1
    if _calls["broken"] % 4 != 1:
        raise RuntimeError("the grader broke")
    yield EvaluationResult(reward=1.0, info={"expected": n, "got": None})


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and the ChatML markers."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def write_policy(folder: Path) -> Path:
    """Save a random two-layer Llama with its tokenizer."""
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
