# pyright: basic
"""CPU attention that computes only the new rows of a sequence.

The engine's own `torch_native` backend attends with every row at each extend, O((prefix + new)²)
for a handful of new tokens. This one attends with the new rows alone, O(new × (prefix + new)).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch.nn.functional import scaled_dot_product_attention


class NewRowsAttention(TorchNativeAttnBackend):
    """`torch_native` with an extend that skips the rows whose output is already known."""

    def _run_sdpa_forward_extend(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        extend_prefix_lens: torch.Tensor,
        extend_seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        scaling: float | None = None,
        enable_gqa: bool = False,
        causal: bool = False,
        is_cross_attn: bool = False,
        sliding_window_size: int | None = None,
    ) -> torch.Tensor:
        """`query`, `output`: [new tokens of all sequences, heads, head_dim]; fills `output`."""
        assert encoder_lens is None and not is_cross_attn and sliding_window_size is None, (
            "encoder and sliding-window models are refused at start"
        )
        begin = 0
        sequences = zip(
            req_pool_indices.tolist(),
            seq_lens.tolist(),
            extend_prefix_lens.tolist(),
            extend_seq_lens.tolist(),
            strict=True,
        )
        for row, total, prefix, new in sequences:
            slots = req_to_token[row, :total]
            rows = slice(begin, begin + new)
            attended = scaled_dot_product_attention(
                _heads_first(query[rows]),
                _heads_first(k_cache.index_select(0, slots)).to(query.dtype),
                _heads_first(v_cache.index_select(0, slots)).to(query.dtype),
                attn_mask=_causal_mask(prefix, new) if causal and prefix else None,
                is_causal=causal and not prefix,
                enable_gqa=enable_gqa,
                scale=scaling,
            )
            output[rows] = attended[0].movedim(0, 1)
            begin += new
        return output


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, dim] → [1, heads, tokens, dim]."""
    return x.movedim(0, 1)[None]


@functools.lru_cache(maxsize=8)
def _causal_mask(prefix: int, new: int) -> torch.Tensor:
    """[new, prefix + new] bool: row i sees the prefix and the new rows up to itself.

    Cached: every layer of a forward asks for the same one.
    """
    return torch.arange(prefix + new)[None] <= torch.arange(prefix, prefix + new)[:, None]


def create_new_rows_attention(runner: Any) -> NewRowsAttention:
    """Factory for SGLang's attention registry."""
    return NewRowsAttention(runner)
