"""Rotation in torch: the specification of the operation, and its CPU implementation."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvws.kernels.rotary import Rotation, pairs

SCRATCH_BYTES = 2 << 20
"""fp32 keys of one chunk of tokens: small enough to stay in cache between two passes."""


@torch.no_grad()
def rotate(out: torch.Tensor, x: torch.Tensor, rotation: Rotation) -> None:
    """Mutates: all of `out`, [n, heads, head_dim] like x, any payload dtype."""
    if rotation.identity:
        out.copy_(x)
        return
    for chunk, rows in rotated_chunks(x, rotation.wide_cos, rotation.sin, rotation.interleaved):
        out[chunk].copy_(rows)
    if rotation.unmoved.numel():
        out[rotation.unmoved] = x[rotation.unmoved].to(out.dtype)


@torch.no_grad()
def scatter_rotated(
    pool: torch.Tensor, slots: torch.Tensor, x: torch.Tensor, rotation: Rotation
) -> None:
    """Mutates: pool[slots], rows [heads, head_dim] of any payload dtype."""
    if rotation.identity:
        _write_rows(pool, slots, x)
        return
    wide_cos, sin = rotation.wide_cos, rotation.sin
    if rotation.unmoved.numel():
        kept, moved = rotation.unmoved, rotation.moved
        _write_rows(pool, slots[kept], x.index_select(0, kept))
        slots, x = slots[moved], x.index_select(0, moved)
        wide_cos, sin = wide_cos.index_select(0, moved), sin.index_select(0, moved)
    for chunk, rows in rotated_chunks(x, wide_cos, sin, rotation.interleaved):
        _write_rows(pool, slots[chunk], rows)


def rotated_chunks(
    x: torch.Tensor, wide_cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Runs of tokens with their rotated keys, [run, heads, head_dim] float32 and contiguous.

    The keys lie in one scratch buffer: they are good until the next run is asked for.

    Args:
        x: [n, heads, head_dim], any payload dtype.
        wide_cos: [n, rotary_dim] float32.
        sin: [n, rotary_dim / 2] float32.
        interleaved: the pairing.
    """
    tokens, heads, head_dim = x.shape
    step = min(tokens, max(1, SCRATCH_BYTES // max(1, 4 * heads * head_dim)))
    scratch = torch.empty((step, heads, head_dim), dtype=torch.float32, device=x.device)
    upcast = scratch if x.dtype == torch.float32 else torch.empty_like(scratch)
    for start in range(0, tokens, max(1, step)):
        chunk = slice(start, min(start + step, tokens))
        keys, rows = x[chunk], scratch[: chunk.stop - start]
        if x.dtype != torch.float32:
            keys = upcast[: chunk.stop - start].copy_(keys)
        _rotate_into(rows, keys, wide_cos[chunk], sin[chunk], interleaved)
        yield chunk, rows


def _rotate_into(
    out: torch.Tensor,
    x: torch.Tensor,
    wide_cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
) -> None:
    """Mutates: all of `out`. x and out are [n, heads, head_dim] float32 and do not overlap.

    The product with the cosine reads x in memory order, so the strided passes after it find x in
    cache. They go head by head: without a broadcast over heads torch walks plain matrices
    [n, rotary_dim / 2], in half the time.
    """
    rotary_dim = wide_cos.shape[1]
    if rotary_dim < x.shape[2]:
        out.copy_(x)
    torch.mul(x[..., :rotary_dim], wide_cos.unsqueeze(1), out=out[..., :rotary_dim])
    members = (*pairs(x, rotary_dim, interleaved), *pairs(out, rotary_dim, interleaved))
    for a, b, out_a, out_b in zip(*(member.unbind(1) for member in members), strict=True):
        out_a.addcmul_(b, sin, value=-1)
        out_b.addcmul_(a, sin)


def _write_rows(pool: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """pool[slots] = rows, bit for bit where the dtypes agree. Mutates: pool[slots]."""
    rows = rows.to(pool.dtype)
    wide_pool, wide_rows = _wide(pool), _wide(rows)
    if wide_pool is None or wide_rows is None:
        pool.index_copy_(0, slots, rows)
    else:
        wide_pool.index_copy_(0, slots, wide_rows)


def _wide(x: torch.Tensor) -> torch.Tensor | None:
    """x's rows as 16-byte elements, or None where alignment forbids it.

    An indexed write costs the same per element whatever its width, so the widest type wins.
    Bits are only moved, never read as numbers.
    """
    width = 16 // x.element_size()
    row = x.shape[1] * x.shape[2]
    rows_are_dense = x.stride(2) == 1 and x.stride(1) == x.shape[2]
    if not rows_are_dense or any(n % width for n in (row, x.stride(0), x.storage_offset())):
        return None
    return x.flatten(1).view(torch.complex128)
