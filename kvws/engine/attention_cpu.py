# pyright: basic
"""CPU attention that computes only the new rows of a sequence.

The engine's own `torch_native` backend attends with every row at each extend, O((prefix + new)²)
for a handful of new tokens. This one attends with the new rows alone, O(new × (prefix + new)),
and reads a long prefix that lies in few pieces where it lies.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch.nn.functional import scaled_dot_product_attention

LONG_PREFIX_TOKENS = 4096
"""From here on not copying the prefix's keys is worth the further calls."""


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
        assert causal, "only decoders are served"
        begin = 0
        sequences = zip(
            req_pool_indices.tolist(),
            seq_lens.tolist(),
            extend_prefix_lens.tolist(),
            extend_seq_lens.tolist(),
            strict=True,
        )
        for row, total, prefix, new in sequences:
            rows = slice(begin, begin + new)
            attend = _attend_in_parts if prefix >= LONG_PREFIX_TOKENS else _attend_at_once
            slots = req_to_token[row, :total]
            output[rows] = attend(query[rows], k_cache, v_cache, slots, prefix, scaling)
            begin += new
        return output


def _attend_at_once(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    prefix: int,
    scaling: float | None,
) -> torch.Tensor:
    """One masked call over gathered keys. `slots`: [prefix + new]; returns [new, heads, dim]."""
    attended = scaled_dot_product_attention(
        _heads_first(query),
        _heads_first(k_cache.index_select(0, slots)).to(query.dtype),
        _heads_first(v_cache.index_select(0, slots)).to(query.dtype),
        attn_mask=_causal_mask(prefix, query.shape[0]) if prefix else None,
        is_causal=not prefix,
        enable_gqa=query.shape[1] != k_cache.shape[1],
        scale=scaling,
    )
    return attended[0].movedim(0, 1)


def _attend_in_parts(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    prefix: int,
    scaling: float | None,
) -> torch.Tensor:
    """The prefix without a mask, where it lies, and the new rows for themselves."""
    own = slots[prefix:]
    parts = [_attend_own(query, k_cache[own], v_cache[own], scaling)]
    for seen in _runs(slots[:prefix]):
        parts.append(_attend_prefix(query, k_cache[seen], v_cache[seen], scaling))
    return _merge(parts)


@functools.lru_cache(maxsize=8)
def _causal_mask(prefix: int, new: int) -> torch.Tensor:
    """[new, prefix + new] bool: row i sees the prefix and the new rows up to itself.

    Cached: every layer of a forward asks for the same one.
    """
    return torch.arange(prefix + new)[None] <= torch.arange(prefix, prefix + new)[:, None]


Part = tuple[torch.Tensor, torch.Tensor]
"""Attention over some of the keys: (output [new, heads, dim], log Σ exp [new, heads])."""

_MOST_RUNS = 16


def _runs(slots: torch.Tensor) -> list[slice | torch.Tensor]:
    """A prefix's slots as slices of the pool, which are read in place.

    A prefix in many pieces is one index tensor instead, and is gathered.
    """
    ends = (slots.diff() != 1).nonzero().flatten().tolist()
    if len(ends) >= _MOST_RUNS:
        return [slots]
    firsts = [0, *(end + 1 for end in ends)]
    lasts = [*ends, slots.numel() - 1]
    return [slice(int(slots[a]), int(slots[b]) + 1) for a, b in zip(firsts, lasts, strict=True)]


def _attend_prefix(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float | None
) -> Part:
    """Every new row sees every one of these keys.

    `query`: [new, heads, dim]; `keys`, `values`: [n, kv_heads, dim]. The query heads of a KV head
    are further rows of it, so keys are not repeated.
    """
    new, heads, dim = query.shape
    kv_heads = keys.shape[1]
    rows = query.view(new, kv_heads, -1, dim).permute(1, 2, 0, 3).reshape(1, kv_heads, -1, dim)
    output, log_sum = _flash(rows, _heads_first(keys), _heads_first(values), scaling, causal=False)
    return (
        output.reshape(heads, new, dim).movedim(0, 1),
        log_sum.reshape(heads, new).movedim(0, 1),
    )


def _attend_own(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float | None
) -> Part:
    """Each new row sees the new rows up to itself. Shapes as in `_attend_prefix`."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (
        _heads_first(x).repeat_interleave(group, dim=1) for x in (keys, values)
    )
    output, log_sum = _flash(_heads_first(query), keys, values, scaling, causal=True)
    return output[0].movedim(0, 1), log_sum[0].movedim(0, 1)


def _flash(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float | None,
    *,
    causal: bool,
) -> Part:
    """torch's CPU flash attention, with the log Σ exp that the public function keeps to itself.

    All [1, heads, rows, dim]; returns ([1, heads, rows, dim], [1, heads, rows]).
    """
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys.to(query.dtype), values.to(query.dtype), 0.0, causal, scale=scaling
    )


def _merge(parts: list[Part]) -> torch.Tensor:
    """Attention over all keys from attention over disjoint parts of them: [new, heads, dim]."""
    if len(parts) == 1:
        return parts[0][0]
    log_sums = torch.stack([log_sum for _, log_sum in parts])
    weights = log_sums.softmax(dim=0)[..., None]
    merged = parts[0][0] * weights[0].to(parts[0][0].dtype)
    for (output, _), weight in zip(parts[1:], weights[1:], strict=True):
        merged.addcmul_(output, weight.to(output.dtype))
    return merged


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, dim] → [1, heads, tokens, dim]."""
    return x.movedim(0, 1)[None]


def create_new_rows_attention(runner: Any) -> NewRowsAttention:
    """Factory for SGLang's attention registry."""
    return NewRowsAttention(runner)
