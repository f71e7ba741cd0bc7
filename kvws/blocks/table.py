"""Residency of finished blocks on one rank: which host slot holds which block, and where its K
was baked."""

from __future__ import annotations

from dataclasses import dataclass

BlockId = tuple[str, int]
"""(workspace, number of the block in the workspace's chronological log)."""


@dataclass
class Residency:
    """Where one block's only host copy is.

    Attributes:
        slot: host slot of the payload.
        first_position: rotary position baked into the K of the block's first token.
        page_hash: the page the block was computed as.
        pins: loads that are reading the slot right now.
        dropped: out of the table; the slot is freed when the last pin goes.
    """

    slot: int
    first_position: int
    page_hash: str
    pins: int = 0
    dropped: bool = False


class BlockTable:
    """Blocks by id and by the page hash they were computed under.

    Not thread-safe: the owner holds a lock. Slots are owned by the caller: whatever a method
    returns as no longer needed, the caller frees.
    """

    def __init__(self) -> None:
        self._by_id: dict[BlockId, Residency] = {}
        self._by_hash: dict[str, BlockId] = {}
        self._dropped_but_pinned: list[Residency] = []

    def __len__(self) -> int:
        return len(self._by_id)

    def find(self, block: BlockId) -> Residency | None:
        return self._by_id.get(block)

    def computed_as(self, page_hash: str) -> BlockId | None:
        """The block that was computed as this page, if it is still here."""
        return self._by_hash.get(page_hash)

    def blocks_of(self, workspace: str) -> list[int]:
        """Block numbers present for a workspace, ascending."""
        return sorted(number for name, number in self._by_id if name == workspace)

    def workspaces(self) -> set[str]:
        """Workspaces that have a block here."""
        return {name for name, _ in self._by_id}

    def add(self, block: BlockId, residency: Residency) -> None:
        """Enter a new block. Blocks are immutable: entering one twice is our own fault."""
        assert block not in self._by_id, f"block {block} is already resident"
        self._by_id[block] = residency
        self._by_hash.setdefault(residency.page_hash, block)

    def drop(self, block: BlockId) -> int | None:
        """Forget a block. Returns its slot if it can be freed now, None if absent or pinned."""
        residency = self._by_id.pop(block, None)
        if residency is None:
            return None
        if self._by_hash.get(residency.page_hash) == block:
            del self._by_hash[residency.page_hash]
        residency.dropped = True
        if residency.pins:
            self._dropped_but_pinned.append(residency)
            return None
        return residency.slot

    def pin(self, residency: Residency) -> None:
        """Keep a slot readable until `unpin`."""
        residency.pins += 1

    def unpin(self, residency: Residency) -> int | None:
        """Release a pin. Returns the slot if the block was dropped meanwhile and can be freed."""
        residency.pins -= 1
        if residency.pins == 0 and residency.dropped:
            self._dropped_but_pinned.remove(residency)
            return residency.slot
        return None

    def slots(self) -> list[int]:
        """Every slot the table answers for, dropped but pinned ones included."""
        held = [entry.slot for entry in self._by_id.values()]
        return held + [entry.slot for entry in self._dropped_but_pinned]

    def check_integrity(self) -> None:
        """hash index ⊆ id index, and no slot is held twice."""
        slots = self.slots()
        assert len(slots) == len(set(slots)), "a host slot is held by two blocks"
        for page_hash, block in self._by_hash.items():
            entry = self._by_id.get(block)
            assert entry is not None, f"hash index names the absent block {block}"
            assert entry.page_hash == page_hash, f"block {block} is indexed under a foreign hash"
        assert all(not entry.dropped for entry in self._by_id.values())
