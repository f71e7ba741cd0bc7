"""Shape and size of a block's payload."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvws.blocks.key import BLOCK_TOKENS
from kvws.store.storage import SECTOR_BYTES


@dataclass(frozen=True)
class PayloadGeometry:
    """Shape of one block's payload on one tensor-parallel rank."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """[2, layers, BLOCK_TOKENS, kv_heads, head_dim]: K at 0, V at 1."""
        return (2, self.layers, BLOCK_TOKENS, self.kv_heads, self.head_dim)

    @property
    def block_bytes(self) -> int:
        """Bytes of K and V of one block."""
        elements = 2 * self.layers * BLOCK_TOKENS * self.kv_heads * self.head_dim
        return elements * self.dtype.itemsize

    @property
    def slot_bytes(self) -> int:
        """Bytes of host memory that one block takes: whole sectors."""
        return -(-self.block_bytes // SECTOR_BYTES) * SECTOR_BYTES
