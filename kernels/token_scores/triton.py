"""Largest logits in Triton: keys are decoded in registers, and logits of tokens never written."""

# Triton types a constexpr parameter as constexpr, and is called with plain numbers; its unrolled
# loops have no type at all.
# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kvws.kernels.candidates import places
from kvws.kernels.token_scores.formats import INT4_ZERO, TokenFormat

BLOCK_KEYS = 64
"""Keys of a program: those of two blocks, or the means of 64."""

BLOCK_ROWS = 16

_INT4_ZERO = tl.constexpr(INT4_ZERO)


@triton.jit
def largest_logits_kernel(
    rows,
    scales,
    codes,
    blocks,
    out,
    count,
    row_count,
    r_row_stride,
    r_dim_stride,
    s_block_stride,
    s_key_stride,
    c_block_stride,
    c_key_stride,
    c_dim_stride,
    out_block_stride,
    out_row_stride,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    SCALED: tl.constexpr,
    KEYS_OF_BLOCK: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Program i writes out[candidates i·BLOCK_KEYS/KEYS_OF_BLOCK …, all rows].

    A block has KEYS keys of PARTS·WIDTH dimensions; a code holds one dimension of each part.
    `blocks` [count] are the candidates' places in the tile: nothing else of it is read. Whatever
    meets a stride is int64.
    """
    BLOCKS: tl.constexpr = BLOCK_KEYS // KEYS_OF_BLOCK
    first = tl.program_id(0) * BLOCKS
    key = tl.arange(0, BLOCK_KEYS)
    candidate = first + key // KEYS_OF_BLOCK
    key = (key % KEYS_OF_BLOCK).to(tl.int64)
    is_key = (candidate < count) & (key < KEYS)
    block = tl.load(blocks + candidate, mask=is_key, other=0)
    dim = tl.arange(0, BLOCK_WIDTH).to(tl.int64)
    is_dim = dim < WIDTH
    at = (block * c_block_stride + key * c_key_stride)[:, None] + dim[None, :] * c_dim_stride
    held = tl.load(codes + at, mask=is_key[:, None] & is_dim[None, :], other=0)
    if SCALED:
        place = block * s_block_stride + key * s_key_stride
        scale = tl.load(scales + place, mask=is_key, other=0.0).to(tl.float32)
    target = out + (first + tl.arange(0, BLOCKS)).to(tl.int64)[:, None] * out_block_stride
    is_target = (first + tl.arange(0, BLOCKS) < count)[:, None]
    for start in range(0, row_count, BLOCK_ROWS):
        row = (start + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
        is_row = row < row_count
        logits = tl.zeros((BLOCK_KEYS, BLOCK_ROWS), dtype=tl.float32)
        for part in tl.static_range(PARTS):
            source = rows + row[None, :] * r_row_stride
            source += (part * WIDTH + dim)[:, None] * r_dim_stride
            q = tl.load(source, mask=is_dim[:, None] & is_row[None, :], other=0.0)
            if PARTS == 1:
                keys = held.to(tl.float32)
            else:
                keys = ((held >> (4 * part)) & 15).to(tl.float32) - _INT4_ZERO
            # Keys have 11 bits at most, as many as tf32: with q in two such pieces the products
            # are fp32's, on tensor cores.
            high = (q.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
            logits = tl.dot(keys, high, logits, input_precision="tf32")
            logits = tl.dot(keys, q - high, logits, input_precision="tf32")
        if SCALED:
            logits *= scale[:, None]
        if KEYS_OF_BLOCK > 1:
            logits = tl.where(is_key[:, None], logits, float("-inf"))
            logits = tl.max(tl.reshape(logits, (BLOCKS, KEYS_OF_BLOCK, BLOCK_ROWS)), axis=1)
        tl.store(target + row[None, :] * out_row_stride, logits, mask=is_target & is_row[None, :])


class LargestLogits:
    """Of some candidates, for one KV head after another.

    Attributes:
        count: of the candidates.
    """

    def __init__(
        self,
        format: TokenFormat,
        tiles: Sequence[tuple[torch.Tensor, ...]],
        candidates: Sequence[torch.Tensor],
    ) -> None:
        """
        Args:
            tiles: the tensors of each, [kv_heads, tile_blocks, …].
            candidates: each [tile_blocks] bool.
        """
        self._format: TokenFormat = format
        self._tiles = tiles
        self._places = places(candidates)
        self.count = sum(blocks.numel() for blocks in self._places)

    def write(self, rows: torch.Tensor, kv_head: int, out: torch.Tensor) -> None:
        """Mutates: all of `out`, [candidates, rows].

        Args:
            rows: [rows, head_dim].
        """
        begin = 0
        with torch.cuda.device_of(rows):
            for parts, blocks in zip(self._tiles, self._places, strict=True):
                end = begin + blocks.numel()
                if blocks.numel():
                    of_head = tuple(part[kv_head] for part in parts)
                    self._write_tile(rows, of_head, blocks, out[begin:end])
                begin = end

    def _write_tile(
        self,
        rows: torch.Tensor,
        parts: tuple[torch.Tensor, ...],
        blocks: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        codes = parts[-1]
        scales = parts[0] if len(parts) == 2 else codes[:, :, 0]
        keys, width = codes.shape[1:]
        keys_of_block = triton.next_power_of_2(keys)
        block_keys = max(BLOCK_KEYS, keys_of_block)
        largest_logits_kernel[(triton.cdiv(blocks.numel(), block_keys // keys_of_block),)](
            rows,
            scales,
            codes,
            blocks,
            out,
            blocks.numel(),
            len(rows),
            *rows.stride(),
            *scales.stride(),
            *codes.stride(),
            *out.stride(),
            KEYS=keys,
            WIDTH=width,
            PARTS=2 if self._format == "int4" else 1,
            SCALED=len(parts) == 2,
            KEYS_OF_BLOCK=keys_of_block,
            BLOCK_KEYS=block_keys,
            # tl.dot wants at least 16 along each side.
            BLOCK_WIDTH=max(16, triton.next_power_of_2(width)),
            BLOCK_ROWS=BLOCK_ROWS,
        )
