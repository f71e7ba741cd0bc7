# pyright: basic
"""Finding each attention layer's rotary encoding in a loaded model, and refusing models whose
keys cannot be moved to other positions."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.layers.rotary_embedding.base import LinearScalingRotaryEmbedding, RotaryEmbedding
from sglang.srt.layers.rotary_embedding.rope_variant import Llama3RotaryEmbedding
from sglang.srt.layers.rotary_embedding.yarn import YaRNScalingRotaryEmbedding

from kvws.errors import UnsupportedModel
from kvws.kernels.rotary import RotaryTable

_RELOCATABLE = (
    RotaryEmbedding,
    LinearScalingRotaryEmbedding,
    Llama3RotaryEmbedding,
    YaRNScalingRotaryEmbedding,
)
"""Encodings whose rotation depends on the position alone, through one cos/sin table."""


def rotary_tables(model: torch.nn.Module) -> list[RotaryTable]:
    """The rotary table of every attention layer, by layer number.

    Raises:
        UnsupportedModel: a layer's keys cannot be relocated with a cos/sin table.
    """
    tables: dict[int, RotaryTable] = {}
    by_module: dict[int, RotaryTable] = {}  # layers usually share one rotary module
    for name, layer in model.named_modules():
        if not isinstance(layer, RadixAttention):
            continue
        _require_plain_attention(layer, name)
        parent = model.get_submodule(name.rpartition(".")[0])
        rotary: Any = getattr(parent, "rotary_emb", None)
        if type(rotary) not in _RELOCATABLE:
            found = type(rotary).__name__ if rotary is not None else "no rotary encoding"
            raise UnsupportedModel(
                f"layer {name} has {found}",
                hint="kvws relocates keys of plain, linear, Llama-3 and YaRN rotary encodings",
            )
        if id(rotary) not in by_module:
            cos, sin = rotary.cos_sin_cache.detach().float().cpu().chunk(2, dim=-1)
            by_module[id(rotary)] = RotaryTable(
                cos.contiguous(), sin.contiguous(), interleaved=not rotary.is_neox_style
            )
        tables[layer.layer_id] = by_module[id(rotary)]
    if sorted(tables) != list(range(len(tables))) or not tables:
        raise UnsupportedModel(
            f"attention layers are numbered {sorted(tables)}, not 0, 1, 2, …",
            hint="hybrid models with layers that keep no keys are not supported",
        )
    return [tables[layer] for layer in range(len(tables))]


def query_heads_of(model: torch.nn.Module) -> int:
    """Query heads of an attention layer on this rank, of a model that has rotary tables."""
    layers = (layer for layer in model.modules() if isinstance(layer, RadixAttention))
    return next(layers).tp_q_head_num


def _require_plain_attention(layer: RadixAttention, name: str) -> None:
    if layer.sliding_window_size is not None and layer.sliding_window_size > -1:
        raise UnsupportedModel(
            f"layer {name} attends to a sliding window",
            hint="choose a model with full attention in every layer",
        )
    if layer.is_cross_attention or layer.attn_type != AttentionType.DECODER:
        raise UnsupportedModel(f"layer {name} is not causal self-attention")
    if layer.qk_head_dim != layer.v_head_dim:
        raise UnsupportedModel(
            f"layer {name} has keys of {layer.qk_head_dim} and values of {layer.v_head_dim} "
            "elements",
            hint="latent-attention (MLA) models are not supported",
        )
