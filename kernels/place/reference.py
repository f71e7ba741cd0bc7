"""Placing blocks in torch: the specification, and what serves where no library can be built."""

from __future__ import annotations

import torch

from kvws.kernels.rerope.reference import SCRATCH_BYTES, rotated_chunks
from kvws.kernels.rotary import Rotation


@torch.no_grad()
def place_blocks(
    pool: torch.Tensor,
    pages: torch.Tensor,
    source: torch.Tensor,
    blocks: torch.Tensor,
    rotation: Rotation | None,
) -> None:
    """Mutates: the rows of `pool` in `pages`. Arguments as in `kvws.kernels.place.place_blocks`.

    Runs of blocks that stay in cache between gather, rotation and scatter.
    """
    _, tokens, heads, head_dim = source.shape
    paged = pool.view(-1, tokens, heads, head_dim)
    rows = paged.flatten(1)
    carrier = _carrier(rows)
    step = max(1, SCRATCH_BYTES // max(1, 4 * tokens * heads * head_dim))
    for start in range(0, blocks.shape[0], step):
        run = slice(start, start + step)
        gathered = source.index_select(0, blocks[run])
        if rotation is not None and not rotation.identity:
            keys = gathered.view(-1, heads, head_dim)
            first = start * tokens
            turns = slice(first, first + keys.shape[0])
            wide_cos, sin = rotation.wide_cos[turns], rotation.sin[turns]
            for chunk, turned in rotated_chunks(keys, wide_cos, sin, rotation.interleaved):
                keys[chunk] = turned
        rows.view(carrier).index_copy_(0, pages[run], gathered.flatten(1).view(carrier))
    if rotation is not None and not rotation.identity and rotation.unmoved.numel():
        block, token = rotation.unmoved // tokens, rotation.unmoved % tokens
        paged[pages[block], token] = source[blocks[block], token]


def _carrier(rows: torch.Tensor) -> torch.dtype:
    """What the bits of [pages, elements] are moved as: the widest type that they can be cut into.

    An indexed write costs the same per element whatever its width.
    """
    width = torch.complex128.itemsize // rows.element_size()
    fits = rows.shape[1] % width == 0 and rows.storage_offset() % width == 0
    return torch.complex128 if fits else rows.dtype
