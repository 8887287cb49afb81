"""A tiny random language model, and raw HTTP, for the local service's tests.

Its tokenizer has one token per byte, so any text can be written in tokens by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rlhelpers.local import LocalService
from rlhelpers.local.adapters import AdapterWeights
from rlhelpers.local.batches import TrainingDatum

torch.set_num_threads(1)

TINY = "test/tiny"
OTHER = "test/other"  # the same folder under another name: another base model
CONTEXT = 512
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|pad|>")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """256 byte tokens and three special ones; ``<|im_end|>`` ends a reply."""
    vocabulary = {
        c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    vocabulary.update({text: 256 + i for i, text in enumerate(SPECIAL)})
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|pad|>"
    )


def write_tiny_model(folder: Path, *, seed: int = 0, tied: bool = True) -> Path:
    """A random two-layer Llama with its tokenizer, as a Hugging Face folder."""
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=259,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=tied,
        eos_token_id=257,
        pad_token_id=258,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    torch.random.set_rng_state(state)
    return folder


@dataclass(frozen=True)
class Endpoint:
    """Where a service listens, and its key."""

    base_url: str
    api_key: str


class Wire:
    """Raw HTTP to a service, for what the SDK would never send."""

    def __init__(self, service: LocalService | Endpoint) -> None:
        self.root = service.base_url.removesuffix("/training/v1/serverless")
        self.training = f"{service.base_url}/api/v1"
        self.completions = f"{service.base_url}/inference/v1/completions"
        self.http = httpx.Client(
            headers={"X-API-Key": service.api_key}, trust_env=False, timeout=60
        )
        self.sessions: list[str] = []  # those that were opened

    def post(self, endpoint: str, body: object) -> httpx.Response:
        """POST ``body`` to an endpoint of the training tree."""
        return self.http.post(f"{self.training}/{endpoint}", json=body)

    def submit(self, endpoint: str, body: object) -> str:
        """Submit an operation; its ``request_id``."""
        answer = self.post(endpoint, body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["request_id"])

    def result(self, request_id: str) -> dict[str, object]:
        """The result of an operation, polled until it is there."""
        while True:
            answer = self.post("retrieve_future", {"request_id": request_id})
            assert answer.status_code == 200, answer.text
            result: dict[str, object] = answer.json()
            if result.get("type") != "try_again":
                return result

    def session(self) -> str:
        """A new session."""
        answer = self.post("create_session", {"tags": []})
        self.sessions.append(str(answer.json()["session_id"]))
        return self.sessions[-1]

    def end_session(self, session_id: str) -> httpx.Response:
        """Delete a session, with all that belongs to it."""
        return self.http.delete(
            f"{self.root}/v1/accounts/local/trainingSessions/{session_id}"
        )

    def model(self, session_id: str, number: int = 0, base_model: str = TINY) -> str:
        """A new LoRA model of rank 4 in ``session_id``."""
        body = {
            "session_id": session_id,
            "model_seq_id": number,
            "base_model": base_model,
            "lora_config": {"rank": 4, "seed": 1},
        }
        return str(self.result(self.submit("create_model", body))["model_id"])


def make_training_datum(
    tokens: Sequence[int], targets: Sequence[int], **inputs: Sequence[float]
) -> TrainingDatum:
    """A datum as the trainer takes it, from plain lists."""
    tensors = {name: torch.tensor(list(v)).float() for name, v in inputs.items()}
    return TrainingDatum(
        list(tokens), {"target_tokens": torch.tensor(list(targets)), **tensors}
    )


def random_adapter(weights: AdapterWeights, seed: int, scale: float) -> AdapterWeights:
    """``weights`` with every A and B drawn anew, so that no gradient vanishes."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(tensor.shape, generator=generator) * scale
        for name, tensor in weights.tensors.items()
    }
    return AdapterWeights(weights.settings, tensors)
