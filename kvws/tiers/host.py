"""The host tier: block payloads in one pinned, lazily committed slab."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvws.blocks.key import BLOCK_TOKENS
from kvws.store.storage import SECTOR_BYTES
from kvws.tiers.slab import PinnedSlab


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

    @property
    def row_bytes(self) -> int:
        """Bytes of a block's retrieval index row: [layers, kv_heads, head_dim] float32."""
        return self.layers * self.kv_heads * self.head_dim * torch.float32.itemsize


class HostTier:
    """Fixed-size slots for block payloads in host memory.

    A block is contiguous, so moving it to a lower tier is one write. Not thread-safe: the owner
    holds a lock.
    """

    def __init__(self, geometry: PayloadGeometry, capacity_bytes: int) -> None:
        """Reserve the slab.

        Raises:
            ConfigError: the capacity holds not even one block, or the machine refuses it.
        """
        self.geometry = geometry
        self._slab = PinnedSlab(geometry.block_bytes, capacity_bytes)
        self.payloads = self._slab.payloads(geometry.dtype, geometry.shape)
        """[slots, 2, layers, BLOCK_TOKENS, kv_heads, head_dim]: every slot, a view."""

    @property
    def capacity_blocks(self) -> int:
        return self._slab.capacity_blocks

    @property
    def used_blocks(self) -> int:
        return self._slab.used_blocks

    @property
    def free_blocks(self) -> int:
        return self._slab.capacity_blocks - self._slab.used_blocks

    @property
    def used_bytes(self) -> int:
        return self.used_blocks * self.geometry.block_bytes

    def allocate(self, count: int) -> list[int]:
        """Take `count` slots, all or none.

        Raises:
            HostTierFull: fewer are free.
        """
        return self._slab.allocate(count)

    def free(self, slots: Sequence[int]) -> None:
        """Give slots back. The owner guarantees that nobody reads them any more."""
        self._slab.free(slots)

    def keys(self, layer: int) -> torch.Tensor:
        """K of one layer, as stored: [slots, BLOCK_TOKENS, kv_heads, head_dim], a view."""
        return self.payloads[:, 0, layer]

    def values(self, layer: int) -> torch.Tensor:
        """V of one layer: [slots, BLOCK_TOKENS, kv_heads, head_dim], a view."""
        return self.payloads[:, 1, layer]

    def sectors(self, slot: int) -> memoryview:
        """One slot with its padding, in whole sectors: what the disk reads and writes."""
        return self._slab.tensor[slot].numpy().data

    def free_slots(self) -> set[int]:
        """Slots that were used and are free again (for the integrity check)."""
        return self._slab.free_slots()
