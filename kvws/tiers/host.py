"""The host tier: block payloads in one lazily committed arena with a free list."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvws.blocks.key import BLOCK_TOKENS
from kvws.errors import ConfigError, HostTierFull


@dataclass(frozen=True)
class PayloadGeometry:
    """Shape of one block's payload on one tensor-parallel rank."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of K and V of one block."""
        elements = 2 * self.layers * BLOCK_TOKENS * self.kv_heads * self.head_dim
        return elements * self.dtype.itemsize


class HostTier:
    """Fixed-size slots for block payloads in host memory.

    The arena is one tensor [slots, 2, layers, BLOCK_TOKENS, kv_heads, head_dim] (K at 0, V at 1):
    a block is contiguous, so moving it to a lower tier is one read. The operating system commits
    its memory as slots are first written, so an empty tier costs nothing. Slots are reused last
    in, first out. Not thread-safe: the owner holds a lock.
    """

    def __init__(self, geometry: PayloadGeometry, capacity_bytes: int) -> None:
        """Reserve the arena.

        Raises:
            ConfigError: the capacity holds not even one block.
        """
        self.geometry = geometry
        self.capacity_blocks = capacity_bytes // geometry.block_bytes
        if self.capacity_blocks < 1:
            raise ConfigError(
                f"a host tier of {capacity_bytes} bytes holds no block of "
                f"{geometry.block_bytes} bytes",
                hint="raise --host-bytes",
            )
        shape = (
            self.capacity_blocks,
            2,
            geometry.layers,
            BLOCK_TOKENS,
            geometry.kv_heads,
            geometry.head_dim,
        )
        self._arena = torch.empty(shape, dtype=geometry.dtype)
        self._freed: list[int] = []
        self._never_used = 0

    @property
    def used_blocks(self) -> int:
        return self._never_used - len(self._freed)

    @property
    def used_bytes(self) -> int:
        return self.used_blocks * self.geometry.block_bytes

    def allocate(self, count: int) -> list[int]:
        """Take `count` slots, all or none.

        Raises:
            HostTierFull: fewer are free.
        """
        available = self.capacity_blocks - self.used_blocks
        if count > available:
            raise HostTierFull(
                f"the host tier of {self.capacity_blocks} blocks has {available} free, "
                f"{count} are needed",
                hint="raise --host-bytes",
            )
        from_freed = min(count, len(self._freed))
        slots = [self._freed.pop() for _ in range(from_freed)]
        fresh = count - from_freed
        slots += range(self._never_used, self._never_used + fresh)
        self._never_used += fresh
        return slots

    def free(self, slots: Sequence[int]) -> None:
        """Give slots back. The owner guarantees that nobody reads them any more."""
        self._freed.extend(slots)

    def keys(self, layer: int) -> torch.Tensor:
        """K of one layer, as stored: [slots, BLOCK_TOKENS, kv_heads, head_dim], a view."""
        return self._arena[:, 0, layer]

    def values(self, layer: int) -> torch.Tensor:
        """V of one layer: [slots, BLOCK_TOKENS, kv_heads, head_dim], a view."""
        return self._arena[:, 1, layer]

    def payload(self, slot: int) -> torch.Tensor:
        """One block: [2, layers, BLOCK_TOKENS, kv_heads, head_dim], a view."""
        return self._arena[slot]

    def free_slots(self) -> set[int]:
        """Slots that were used and are free again (for the integrity check)."""
        return set(self._freed)
