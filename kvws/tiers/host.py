"""The host tier: block payloads in one pinned, lazily committed slab, bit for bit or quantised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from kvws.blocks.table import RAW
from kvws.errors import ConfigError
from kvws.tiers.codec import PayloadCodec
from kvws.tiers.formats import EXACT
from kvws.tiers.geometry import PayloadGeometry
from kvws.tiers.slab import PinnedSlab


class LayerSource(Protocol):
    """K and V of chosen blocks, one layer at a time."""

    def __call__(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(K, V), each [blocks, BLOCK_TOKENS, kv_heads, head_dim]."""
        ...


class HostTier:
    """Fixed-size slots for finished blocks, and for the pages of open steps.

    A page is staged with the bits that the engine computed. When it becomes a block it stays
    where it is, or, in a quantised tier, is encoded into a slot of its own: then the staged pages
    have a slab of theirs. A block is contiguous, so that moving it to disk is one write. Not
    thread-safe: the owner holds a lock.
    """

    def __init__(
        self,
        geometry: PayloadGeometry,
        capacity_bytes: int,
        codec: PayloadCodec | None = None,
        *,
        staged_pages: int = 0,
    ) -> None:
        """Reserve the memory.

        Args:
            codec: how blocks lie here; None for bit for bit.
            staged_pages: room for pages of open steps in a quantised tier, out of its capacity.

        Raises:
            ConfigError: the capacity holds not even one block, or the machine refuses it.
        """
        self.geometry = geometry
        self._codec = codec if codec is not None and codec.format != EXACT else None
        if self._codec is None:
            self._blocks = self._pages = PinnedSlab(geometry.block_bytes, capacity_bytes)
        else:
            pages_bytes = staged_pages * geometry.slot_bytes
            if pages_bytes + self._codec.payload_bytes > capacity_bytes:
                raise ConfigError(
                    f"a host tier of {capacity_bytes} bytes holds no block beside "
                    f"{staged_pages} pages that wait to be encoded",
                    hint="raise --host-gb",
                )
            self._pages = PinnedSlab(geometry.block_bytes, pages_bytes)
            self._blocks = PinnedSlab(self._codec.payload_bytes, capacity_bytes - pages_bytes)
        self._payloads = self._pages.payloads(geometry.dtype, geometry.shape)

    @property
    def format(self) -> str:
        """How blocks lie here: one of `kvws.tiers.codec.PAYLOAD_FORMATS`."""
        return EXACT if self._codec is None else self._codec.format

    # ---- finished blocks ---------------------------------------------------------------------

    @property
    def capacity_blocks(self) -> int:
        return self._blocks.capacity_blocks

    @property
    def used_blocks(self) -> int:
        """Slots of blocks; where staged pages have no slab of their own, theirs as well."""
        return self._blocks.used_blocks

    @property
    def free_blocks(self) -> int:
        return self._blocks.capacity_blocks - self._blocks.used_blocks

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block as it lies here."""
        return self._blocks.slot_bytes

    @property
    def used_bytes(self) -> int:
        return self.used_blocks * self.bytes_per_block

    def allocate(self, count: int) -> list[int]:
        """Take `count` slots for blocks, all or none.

        Raises:
            HostTierFull: fewer are free.
        """
        return self._blocks.allocate(count)

    def free(self, slots: Sequence[int]) -> None:
        """Give slots back. The owner guarantees that nobody reads them any more."""
        self._blocks.free(slots)

    def free_slots(self) -> set[int]:
        """Slots that were used and are free again (for the integrity check)."""
        return self._blocks.free_slots()

    def gather(self, slots: torch.Tensor) -> LayerSource:
        """Read blocks layer by layer; the slots are not freed meanwhile.

        Args:
            slots: [n] int64.
        """
        if self._codec is None:
            return lambda layer: (
                self._payloads[:, 0, layer].index_select(0, slots),
                self._payloads[:, 1, layer].index_select(0, slots),
            )
        encoded, codec = self._blocks.tensor.index_select(0, slots), self._codec
        return lambda layer: codec.decode_layer(encoded, layer)

    def exact_layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of all blocks of an exact tier, each a view.

        Returns:
            (K, V), each [slots, BLOCK_TOKENS, kv_heads, head_dim], contiguous within a slot.
        """
        assert self._codec is None
        return self.page_keys(layer), self.page_values(layer)

    def exact_block(self, slot: int) -> torch.Tensor:
        """A block of an exact tier, [2, layers, BLOCK_TOKENS, kv_heads, head_dim], a view."""
        assert self._codec is None
        return self._payloads[slot]

    def payload(self, slot: int) -> torch.Tensor:
        """A copy of one block: [2, layers, BLOCK_TOKENS, kv_heads, head_dim]."""
        source = self.gather(torch.tensor([slot]))
        layers = [torch.cat(source(layer)) for layer in range(self.geometry.layers)]
        return torch.stack(layers, dim=1)

    def write(self, slots: torch.Tensor, payloads: torch.Tensor) -> None:
        """Blocks bit for bit into slots of an exact tier.

        Args:
            payloads: [n, 2, layers, BLOCK_TOKENS, kv_heads, head_dim].
        """
        assert self._codec is None
        self._payloads.index_copy_(0, slots, payloads)

    def copy(self, source: int, target: int) -> None:
        """One slot's bytes into another."""
        self._blocks.tensor[target].copy_(self._blocks.tensor[source])

    def sectors(self, slot: int) -> memoryview:
        """One slot with its padding, in whole sectors: what the disk reads and writes."""
        return self._blocks.tensor[slot].numpy().data

    # ---- pages of open steps -----------------------------------------------------------------

    @property
    def pages_become_blocks_in_place(self) -> bool:
        return self._pages is self._blocks

    @property
    def used_pages(self) -> int:
        return self._pages.used_blocks

    def allocate_pages(self, count: int) -> list[int]:
        """Take `count` slots for staged pages, all or none.

        Raises:
            HostTierFull: fewer are free.
        """
        return self._pages.allocate(count)

    def free_pages_of(self, slots: Sequence[int]) -> None:
        """Give slots of staged pages back."""
        self._pages.free(slots)

    def page_keys(self, layer: int) -> torch.Tensor:
        """K of one layer, as staged: [page slots, BLOCK_TOKENS, kv_heads, head_dim], a view."""
        return self._payloads[:, 0, layer]

    def page_values(self, layer: int) -> torch.Tensor:
        """V of one layer, as staged: [page slots, BLOCK_TOKENS, kv_heads, head_dim], a view."""
        return self._payloads[:, 1, layer]

    def page_payloads(self, slots: Sequence[int]) -> torch.Tensor:
        """A copy of staged pages: [n, 2, layers, BLOCK_TOKENS, kv_heads, head_dim]."""
        return self._payloads.index_select(0, torch.tensor(slots, dtype=torch.int64))

    def encode(
        self, pages: Sequence[int], first_positions: Sequence[int], slots: Sequence[int]
    ) -> None:
        """Staged pages into block slots of a quantised tier; their K becomes raw.

        Args:
            pages: slots of staged pages.
            first_positions: rotary position of each page's first token.
            slots: of blocks.
        """
        assert self._codec is not None
        shape = (len(slots), self._blocks.stride_bytes)
        encoded = torch.empty(shape, dtype=torch.uint8)
        self._codec.encode(self.page_payloads(pages), torch.tensor(first_positions), encoded)
        self._blocks.tensor.index_copy_(0, torch.tensor(slots), encoded)

    def position_of_blocks(self, first_position: int) -> int:
        """First position of a block whose page was staged at `first_position`."""
        return first_position if self._codec is None else RAW
