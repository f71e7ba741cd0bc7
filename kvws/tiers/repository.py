"""The repository view of one rank: every block's valid copies, and which host copy to give up.

A block enters with a host copy. With a disk tier it becomes *stored* a little later; from then on
its host copy may be given up at no cost, and comes back from disk when a view needs it. Without
one, or while the disk is in trouble, a full host tier gives up the only copy of the least wanted
block: its tokens and its index row remain, and it is computed again if it is selected.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

from kvws.blocks.table import BlockId, BlockTable, Residency
from kvws.tiers.host import HostTier
from kvws.tiers.policy import EvictionPolicy

HALF_LIFE_SELECTIONS = 64.0
"""After so many selections a retrieval counts half when the host tier chooses what to give up."""

YOUNG_SELECTIONS = 8.0
"""For so many selections a new host copy is spared: its thread's next view has every new block,
and a block that was just brought up has had no chance yet to be wanted."""


class Repository:
    """Block table, host slots and eviction order. Every method needs `lock` (re-entrant)."""

    def __init__(self, host: HostTier) -> None:
        self.lock = threading.RLock()
        self.host = host
        self.table = BlockTable()
        self.only_copies_may_go: Callable[[], bool] = lambda: True
        """Whether unsaved blocks are not, or no longer, on their way to the disk."""
        self.is_wanted: Callable[[BlockId], bool] = lambda block: False
        """Whether an open step asked for a block: its view would lose it again and again."""
        self.on_lost_copy: Callable[[BlockId], None] = lambda block: None
        """Told when the only copy of a block was given up."""
        self.in_transit: set[int] = set()
        """Host slots that blocks are being read into."""
        self.evicted_blocks = 0
        self.lost_only_copies = 0
        self._stored = EvictionPolicy[BlockId](half_life_steps=HALF_LIFE_SELECTIONS)
        self._unsaved = EvictionPolicy[BlockId](half_life_steps=HALF_LIFE_SELECTIONS)
        self._selection = 0.0

    # ---- host slots --------------------------------------------------------------------------

    def allocate(self, count: int) -> list[int]:
        """Take host slots, all or none, giving up host copies where needed.

        Raises:
            HostTierFull: too many blocks are in use, or on their way to the disk.
        """
        orders = [self._stored]
        if self.only_copies_may_go():
            orders.append(self._unsaved)
        for spare_young in (True, False):
            for order in orders:
                short = count - self.host.free_blocks
                if short > 0:
                    self._give_up(order, short, spare_young=spare_young)
        return self.host.allocate(count)

    def allocate_pages(self, count: int) -> list[int]:
        """Take slots for staged pages, all or none, as `allocate` where blocks lie beside them.

        Raises:
            HostTierFull: too many are in use.
        """
        if self.host.pages_become_blocks_in_place:
            return self.allocate(count)
        return self.host.allocate_pages(count)

    def _give_up(
        self, order: EvictionPolicy[BlockId], count: int, *, spare_young: bool
    ) -> None:
        """Free slots of the least wanted blocks that nobody is reading."""

        def may_go(block: BlockId) -> bool:
            entry = self._entry(block)
            if entry.pins or self.is_wanted(block):
                return False
            return not spare_young or entry.young_until <= self._selection

        for block in order.pick(count, may_go):
            entry = self._entry(block)
            assert entry.slot is not None
            self.host.free([entry.slot])
            if entry.stored:
                entry.slot = None
                self.evicted_blocks += 1
            else:
                self.table.drop(block)
                self.lost_only_copies += 1
                self.on_lost_copy(block)

    def _entry(self, block: BlockId) -> Residency:
        entry = self.table.find(block)
        assert entry is not None, f"block {block} is in the eviction order but not in the table"
        return entry

    # ---- blocks ------------------------------------------------------------------------------

    def add(self, block: BlockId, entry: Residency) -> None:
        """Enter a finished block."""
        self.table.add(block, entry)
        if entry.slot is not None:
            entry.young_until = self._selection + YOUNG_SELECTIONS
            policy = self._stored if entry.stored else self._unsaved
            policy.admit(block, importance=entry.importance, now=self._selection)

    def retrieve(self, blocks: Iterable[BlockId]) -> None:
        """A step selected these blocks: they are worth keeping."""
        self._selection += 1.0
        for block in blocks:
            for policy in (self._stored, self._unsaved):
                if block in policy:
                    policy.touch(block, now=self._selection)

    def mark_stored(self, block: BlockId, entry: Residency) -> None:
        """A durable copy exists: the host copy may go from now on."""
        entry.stored = True
        if block in self._unsaved:
            history = self._unsaved.remove(block)
            self._stored.admit(
                block, importance=entry.importance, now=self._selection, history=history
            )

    def place(self, block: BlockId, entry: Residency, slot: int, first_position: int) -> None:
        """A host copy of a stored block was read into `slot`, which was in transit."""
        assert entry.stored and entry.slot is None
        self.in_transit.remove(slot)
        entry.slot, entry.first_position = slot, first_position
        entry.young_until = self._selection + YOUNG_SELECTIONS
        self._stored.admit(block, importance=entry.importance, now=self._selection)

    def drop(self, block: BlockId) -> None:
        """Forget a block; its slot is freed when the last reader is done."""
        for policy in (self._stored, self._unsaved):
            if block in policy:
                policy.remove(block)
        slot = self.table.drop(block)
        if slot is not None:
            self.host.free([slot])

    def unpin(self, entries: Sequence[Residency]) -> None:
        freed = [slot for entry in entries if (slot := self.table.unpin(entry)) is not None]
        self.host.free(freed)

    # ---- observation -------------------------------------------------------------------------

    def stats(self) -> dict[str, int]:
        return {
            "blocks": len(self.table),
            "host_used_blocks": self.host.used_blocks,
            "host_used_bytes": self.host.used_bytes,
            "host_block_bytes": self.host.bytes_per_block,
            "evicted_blocks": self.evicted_blocks,
            "lost_only_copies": self.lost_only_copies,
        }

    def check_integrity(self, staged_slots: Sequence[int]) -> None:
        """used host slots = slots of the table + in transit + of open steps, none of them free;
        the eviction order has exactly the blocks with a host copy, by whether they are stored."""
        self.table.check_integrity()
        held = [*self.table.slots(), *self.in_transit]
        if self.host.pages_become_blocks_in_place:
            held += staged_slots
        else:
            assert len(staged_slots) == self.host.used_pages, "a staged page leaked"
        assert len(held) == len(set(held)), "a host slot is held twice"
        assert len(held) == self.host.used_blocks, (
            f"{self.host.used_blocks} host slots in use, {len(held)} accounted for"
        )
        assert not set(held) & self.host.free_slots(), "a held host slot is on the free list"
        for block, entry in self.table:
            held_here = entry.slot is not None
            orders = (block in self._unsaved, block in self._stored)
            expected = (held_here and not entry.stored, held_here and entry.stored)
            assert orders == expected, f"block {block} is in the wrong eviction order"
