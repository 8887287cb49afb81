"""Writes a tiny Llama as a GGUF file, tensor by tensor, for the loading tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from local_helpers import CONTEXT, SPECIAL, byte_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

HEADS, KEY_VALUE_HEADS = 4, 2
NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def random_llama() -> LlamaForCausalLM:
    """Two layers of width 64 over the byte tokenizer and one merged token."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_VALUE_HEADS,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()


def write_gguf(path: Path, model: LlamaForCausalLM) -> Path:
    """Write ``model`` and its tokenizer, unquantised."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(96)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_VALUE_HEADS)
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(260)
    _add_tokenizer(writer)
    weights = model.state_dict()
    writer.add_tensor("token_embd.weight", weights["model.embed_tokens.weight"].numpy())
    writer.add_tensor("output_norm.weight", weights["model.norm.weight"].numpy())
    for layer in range(2):
        for theirs, ours in NAMES.items():
            weight = weights[f"model.layers.{layer}.{theirs}.weight"].numpy()
            if ours in ("attn_q", "attn_k"):
                weight = _interleaved(weight, HEADS if ours[-1] == "q" else 2)
            writer.add_tensor(f"blk.{layer}.{ours}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """GGUF keeps the two halves of a rotary pair side by side, transformers apart."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))


def _add_tokenizer(writer: object) -> None:
    import gguf

    assert isinstance(writer, gguf.GGUFWriter)
    vocabulary = byte_tokenizer().get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*tokens, "ab"])
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    kinds = [control if token in SPECIAL else normal for token in [*tokens, "ab"]]
    writer.add_token_types(kinds)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_pad_token_id(258)
    writer.add_chat_template(TEMPLATE)
