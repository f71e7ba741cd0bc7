"""A GGUF file of Llama architecture as a transformers checkpoint in float32.

Reads the file and computes; writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from numpy.typing import NDArray

from kvws.errors import ModelError
from kvws.models.checkpoint import Checkpoint
from kvws.models.gguf_tokenizer import tokenizer_documents

Progress = Callable[[int, int], None]
"""Called with the units of work done and their number."""

_HINT = "only complete GGUF files of Llama architecture can be converted"
_TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_PER_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_gguf(path: Path, progress: Progress) -> Checkpoint:
    """The checkpoint that `path` holds.

    Raises:
        ModelError: not a GGUF file, of another architecture, or incomplete.
    """
    try:
        reader = GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        if fields["general.architecture"] != "llama":
            raise ModelError(
                f"{path.name} holds a {fields['general.architecture']!r} model", hint=_HINT
            )
        tensors = _tensors(reader, fields, progress)
        config = _config(fields, tied="lm_head.weight" not in tensors)
        documents, texts = tokenizer_documents(fields)
    except (KeyError, ValueError, IndexError, TypeError, OSError) as error:
        raise ModelError(
            f"{path.name} cannot be converted: {error!r}",
            hint=_HINT,
        ) from error
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    documents |= {"config.json": config, "generation_config.json": generation}
    return Checkpoint(tensors, documents, texts)


def _tensors(
    reader: GGUFReader, fields: dict[str, Any], progress: Progress
) -> dict[str, torch.Tensor]:
    heads = {
        "attn_q": int(fields["llama.attention.head_count"]),
        "attn_k": int(fields["llama.attention.head_count_kv"]),
    }
    tensors: dict[str, torch.Tensor] = {}
    for done, stored in enumerate(reader.tensors, 1):
        values = dequantize(stored.data, stored.tensor_type).astype(np.float32)
        name = _TOP_LEVEL.get(stored.name)
        if name is None:
            _, layer, kind = stored.name.removesuffix(".weight").split(".")
            name = f"model.layers.{layer}.{_PER_LAYER[kind]}.weight"
            if kind in heads:
                values = _halves_together(values, heads[kind])
        tensors[name] = torch.tensor(values)
        progress(done, len(reader.tensors))
    return tensors


def _halves_together(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Reorder a projection's rows from pairs (0, 1), (2, 3), … to (0, d/2), (1, d/2 + 1), ….

    GGUF interleaves the two halves that transformers rotates against each other.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _config(fields: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    heads = int(fields["llama.attention.head_count"])
    width = int(fields["llama.embedding_length"])
    epsilon = np.float32(fields["llama.attention.layer_norm_rms_epsilon"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": width,
        "intermediate_size": int(fields["llama.feed_forward_length"]),
        "num_hidden_layers": int(fields["llama.block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(fields["llama.attention.head_count_kv"]),
        "head_dim": int(fields.get("llama.rope.dimension_count", width // heads)),
        "max_position_embeddings": int(fields["llama.context_length"]),
        "rope_theta": float(fields.get("llama.rope.freq_base", 10000.0)),
        "rms_norm_eps": float(str(epsilon)),  # the shortest decimal: 1e-05, not 9.99…e-06
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "use_cache": True,
        "bos_token_id": int(fields["tokenizer.ggml.bos_token_id"]),
        "eos_token_id": int(fields["tokenizer.ggml.eos_token_id"]),
        "pad_token_id": int(fields["tokenizer.ggml.padding_token_id"]),
    }
