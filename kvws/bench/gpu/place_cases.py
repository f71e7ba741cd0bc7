"""Cases of the kernel that fills pages in CPU memory; a GPU has no use for it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvws.bench.gpu.case import (
    BLOCK_TOKENS,
    Case,
    Prepared,
    Sizes,
    Tensors,
    random_normal,
    within_rounding,
)
from kvws.bench.gpu.rotary_tables import POSITIONS, checked_tables
from kvws.kernels.place import place_blocks
from kvws.kernels.rerope import rotation_between


def place_cases() -> Iterator[Case]:
    yield Case("place", "NeoX, bfloat16", _place, only_on="cpu")


def _place(sizes: Sizes, device: torch.device) -> Prepared:
    shape = (sizes.blocks, BLOCK_TOKENS, sizes.kv_heads, sizes.head_dim)
    source = random_normal(shape, device, torch.bfloat16)
    pools = [torch.zeros((2 * sizes.tokens, *shape[2:]), dtype=source.dtype) for _ in range(2)]
    generator = torch.Generator().manual_seed(8)
    pages = torch.randperm(2 * sizes.blocks, generator=generator)[: sizes.blocks]
    blocks = torch.arange(sizes.blocks)
    at = torch.arange(sizes.tokens) % POSITIONS
    rotation = rotation_between(checked_tables(sizes.head_dim, device)["NeoX"], at, at.flip(0))

    def by_auto() -> Tensors:
        place_blocks(pools[0], pages, source, blocks, rotation)
        return (pools[0],)

    def by_reference() -> Tensors:
        place_blocks(pools[1], pages, source, blocks, rotation, implementation="reference")
        return (pools[1],)

    return Prepared(by_auto, by_reference, within_rounding(source.dtype), 2 * source.nbytes)
