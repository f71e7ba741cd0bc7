"""Which copies of every finished block are valid on one rank: in a host slot, on disk, or both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

BlockId = tuple[str, int]
"""(workspace, number of the block in the workspace's chronological log)."""

RAW = -1
"""First position of a block whose K is stored without rotation."""


@dataclass(slots=True, eq=False)
class Residency:
    """One block's copies.

    Attributes:
        page_hash: the page the block was computed as in this life of the process; "" for a block
            of an earlier life, whose page names nobody will spell again.
        slot: host slot of the payload, None when there is no host copy.
        first_position: rotary position baked into the host copy's K of the block's first token;
            RAW when that K is un-rotated.
        importance: norm of the block's mean raw K; breaks ties when host copies are given up.
        young_until: the selection from which on its host copy may be given up like any other.
        stored: there is a durable copy on disk.
        pins: readers and writers of the slot right now; it stays where it is.
        dropped: out of the table; the slot is freed when the last pin goes.
    """

    page_hash: str
    slot: int | None
    first_position: int
    importance: float = 0.0
    young_until: float = 0.0
    stored: bool = False
    pins: int = 0
    dropped: bool = False


class BlockTable:
    """Blocks by id and by the page hash they were computed under.

    Not thread-safe: the owner holds a lock. Slots are owned by the caller: whatever a method
    returns as no longer needed, the caller frees.
    """

    def __init__(self) -> None:
        self._by_workspace: dict[str, dict[int, Residency]] = {}
        self._by_hash: dict[str, BlockId] = {}
        self._dropped_but_pinned: set[Residency] = set()

    def __len__(self) -> int:
        return sum(len(blocks) for blocks in self._by_workspace.values())

    def __iter__(self) -> Iterator[tuple[BlockId, Residency]]:
        for workspace, blocks in self._by_workspace.items():
            for number, residency in blocks.items():
                yield (workspace, number), residency

    def find(self, block: BlockId) -> Residency | None:
        workspace, number = block
        return self._by_workspace.get(workspace, {}).get(number)

    def computed_as(self, page_hash: str) -> BlockId | None:
        """The block that was computed as this page, if it is still here."""
        return self._by_hash.get(page_hash)

    def blocks_of(self, workspace: str) -> list[int]:
        """Block numbers present for a workspace, ascending."""
        return sorted(self._by_workspace.get(workspace, ()))

    def workspaces(self) -> set[str]:
        """Workspaces that have a block here."""
        return {name for name, blocks in self._by_workspace.items() if blocks}

    def add(self, block: BlockId, residency: Residency) -> None:
        """Enter a new block. Blocks are immutable: entering one twice is our own fault."""
        workspace, number = block
        blocks = self._by_workspace.setdefault(workspace, {})
        assert number not in blocks, f"block {block} is already resident"
        blocks[number] = residency
        if residency.page_hash:
            self._by_hash.setdefault(residency.page_hash, block)

    def drop(self, block: BlockId) -> int | None:
        """Forget a block. Returns its slot if it can be freed now; None if it has none, is
        absent or pinned."""
        workspace, number = block
        residency = self._by_workspace.get(workspace, {}).pop(number, None)
        if residency is None:
            return None
        if not self._by_workspace[workspace]:
            del self._by_workspace[workspace]
        if self._by_hash.get(residency.page_hash) == block:
            del self._by_hash[residency.page_hash]
        residency.dropped = True
        if residency.pins:
            self._dropped_but_pinned.add(residency)
            return None
        return residency.slot

    def pin(self, residency: Residency) -> None:
        """Keep a slot where it is until `unpin`."""
        residency.pins += 1

    def unpin(self, residency: Residency) -> int | None:
        """Release a pin. Returns the slot if the block was dropped meanwhile and can be freed."""
        residency.pins -= 1
        assert residency.pins >= 0, "a block was unpinned more often than pinned"
        if residency.pins == 0 and residency.dropped:
            self._dropped_but_pinned.remove(residency)
            return residency.slot
        return None

    def slots(self) -> list[int]:
        """Every slot the table answers for, dropped but pinned ones included."""
        held = [entry.slot for _, entry in self if entry.slot is not None]
        return held + [e.slot for e in self._dropped_but_pinned if e.slot is not None]

    def check_integrity(self) -> None:
        """hash index ⊆ id index, no slot is held twice, and no block is without a copy."""
        slots = self.slots()
        assert len(slots) == len(set(slots)), "a host slot is held by two blocks"
        for page_hash, block in self._by_hash.items():
            entry = self.find(block)
            assert entry is not None, f"hash index names the absent block {block}"
            assert entry.page_hash == page_hash, f"block {block} is indexed under a foreign hash"
        for block, entry in self:
            assert not entry.dropped, f"block {block} is dropped and still in the table"
            assert entry.slot is not None or entry.stored, f"block {block} has no copy"
