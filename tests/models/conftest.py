"""Shared by the model tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter


class TinyLlama:
    """A Llama of a few hundred weights, for tests of the conversion."""

    HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, CONTEXT = 16, 4, 2, 4, 24, 64
    WORDS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "Ġ", "ab")
    TEMPLATE = (
        "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
    )

    def weights(self, seed: int) -> dict[str, np.ndarray]:
        """Random weights by their names in transformers."""
        random = np.random.default_rng(seed)
        shapes = {
            "model.embed_tokens.weight": (len(self.WORDS), self.HIDDEN),
            "model.norm.weight": (self.HIDDEN,),
            "model.layers.0.input_layernorm.weight": (self.HIDDEN,),
            "model.layers.0.self_attn.q_proj.weight": (self.HEADS * self.HEAD_DIM, self.HIDDEN),
            "model.layers.0.self_attn.k_proj.weight": (self.KV_HEADS * self.HEAD_DIM, self.HIDDEN),
            "model.layers.0.self_attn.v_proj.weight": (self.KV_HEADS * self.HEAD_DIM, self.HIDDEN),
            "model.layers.0.self_attn.o_proj.weight": (self.HIDDEN, self.HEADS * self.HEAD_DIM),
            "model.layers.0.post_attention_layernorm.weight": (self.HIDDEN,),
            "model.layers.0.mlp.gate_proj.weight": (self.INNER, self.HIDDEN),
            "model.layers.0.mlp.up_proj.weight": (self.INNER, self.HIDDEN),
            "model.layers.0.mlp.down_proj.weight": (self.HIDDEN, self.INNER),
        }
        return {
            name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()
        }

    def write(self, path: Path, seed: int = 0, architecture: str = "llama") -> None:
        """Write `weights(seed)` as llama.cpp's own converter stores them: q and k interleaved."""
        names = {
            "model.embed_tokens.weight": "token_embd.weight",
            "model.norm.weight": "output_norm.weight",
            "input_layernorm": "attn_norm",
            "self_attn.q_proj": "attn_q",
            "self_attn.k_proj": "attn_k",
            "self_attn.v_proj": "attn_v",
            "self_attn.o_proj": "attn_output",
            "post_attention_layernorm": "ffn_norm",
            "mlp.gate_proj": "ffn_gate",
            "mlp.up_proj": "ffn_up",
            "mlp.down_proj": "ffn_down",
        }
        writer = GGUFWriter(path, architecture)
        writer.add_block_count(1)
        writer.add_context_length(self.CONTEXT)
        writer.add_embedding_length(self.HIDDEN)
        writer.add_feed_forward_length(self.INNER)
        writer.add_head_count(self.HEADS)
        writer.add_head_count_kv(self.KV_HEADS)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(5000.0)
        writer.add_rope_dimension_count(self.HEAD_DIM)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(list(self.WORDS))
        writer.add_token_types([3, 3, 3, 1, 1, 1, 1])
        writer.add_token_merges(["a b"])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        writer.add_pad_token_id(2)
        writer.add_chat_template(self.TEMPLATE)
        for name, values in self.weights(seed).items():
            if name in names:
                writer.add_tensor(names[name], values)
                continue
            part = name.removeprefix("model.layers.0.").removesuffix(".weight")
            heads = {"self_attn.q_proj": self.HEADS, "self_attn.k_proj": self.KV_HEADS}.get(part)
            if heads:
                halves = values.reshape(heads, 2, self.HEAD_DIM // 2, self.HIDDEN)
                values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
            writer.add_tensor(f"blk.0.{names[part]}.weight", values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


@pytest.fixture
def tiny_llama() -> TinyLlama:
    return TinyLlama()
