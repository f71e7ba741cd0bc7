"""Which models' KV can be moved to other positions, block by block.

A block can be moved if its K is (raw K, rotated by its position) with a table that doesn't
depend on the sequence, if every layer attends to everything before it, and if all that the
model keeps of the past is K and V per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from kvws.errors import UnsupportedModel
from kvws.models.geometry import architecture_of, language_config, rope_settings

_STATIC_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
_RECURRENT_WORDS = ("mamba", "rwkv", "ssm", "recurrent", "jamba", "zamba", "linear_attn")
_HINT = (
    "kvws needs a decoder with rotary positions and full attention in every layer, "
    "such as Llama, Qwen2, Qwen3 or SmolLM2"
)


def require_relocatable(config: Mapping[str, Any]) -> None:
    """Pass if kvws can serve a model with this config.json.

    Raises:
        UnsupportedModel: says which property stands against it.
    """
    config = language_config(config)
    obstacle = (
        _recurrence(config)
        or _latent_attention(config)
        or _window(config)
        or _other_positions(config)
        or _variable_rope(config)
    )
    if obstacle:
        raise UnsupportedModel(f"{architecture_of(config)} {obstacle}", hint=_HINT)


def _recurrence(config: Mapping[str, Any]) -> str | None:
    named = f"{config.get('model_type')} {architecture_of(config)}".lower()
    if any(word in named for word in _RECURRENT_WORDS) or any(
        key.startswith(("mamba_", "ssm_")) for key in config
    ):
        return "keeps a recurrent state, which has no blocks"
    kinds = _layer_types(config) - {"full_attention", "sliding_attention", "attention"}
    if kinds:
        return f"has layers that are not full attention: {', '.join(sorted(kinds))}"
    return None


def _latent_attention(config: Mapping[str, Any]) -> str | None:
    model_type = str(config.get("model_type", ""))
    if config.get("kv_lora_rank") is not None or model_type in ("deepseek_v2", "deepseek_v3"):
        return "keeps compressed latents (MLA) instead of K and V"
    return None


def _window(config: Mapping[str, Any]) -> str | None:
    window = config.get("sliding_window")
    if "sliding_attention" in _layer_types(config) or (
        window is not None and config.get("use_sliding_window") is not False
    ):
        return f"attends through a sliding window of {window} tokens"
    if config.get("attention_chunk_size") is not None:
        return "attends within chunks"
    return None


def _other_positions(config: Mapping[str, Any]) -> str | None:
    encoding = config.get("position_embedding_type")
    attention = config.get("attn_config")
    nested = cast("dict[str, Any]", attention) if isinstance(attention, dict) else {}
    if config.get("alibi") is True or nested.get("alibi") is True or encoding == "alibi":
        return "encodes positions with ALiBi"
    if encoding not in (None, "rope", "rotary"):
        return f"encodes positions as {encoding!r}, not with RoPE"
    if rope_settings(config) is None:
        return "has no rotary position encoding (RoPE)"
    layers = config.get("no_rope_layers")
    if isinstance(layers, list) and 0 in layers:
        return "has layers without rotary position encoding"
    return None


def _variable_rope(config: Mapping[str, Any]) -> str | None:
    settings = rope_settings(config) or {}
    kind = settings["rope_type"]
    if kind == "mrope" or "mrope_section" in settings:
        return "uses multimodal RoPE (mrope)"
    if kind not in _STATIC_ROPE_TYPES:
        return f"uses RoPE scaling {kind!r}, whose table depends on the sequence's length"
    return None


def _layer_types(config: Mapping[str, Any]) -> set[str]:
    kinds: set[str] = set()
    for key in ("layer_types", "layers_block_type"):
        value = config.get(key)
        if isinstance(value, list):
            kinds.update(str(kind) for kind in cast("list[Any]", value))
    return kinds
