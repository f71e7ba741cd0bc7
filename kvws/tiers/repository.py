"""The repository view of one rank: every block's valid copies, and which host copy to give up.

A block enters with a host copy. With a disk tier it becomes *stored* a little later; from then on
its host copy may be given up at no cost, and comes back from disk when a view needs it. Without
one, or while the disk is in trouble, a full host tier gives up the only copy of the least wanted
block: its tokens and its index row remain, and it is computed again if it is selected. Whose
block that is, `shares.py` says.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product

from kvws.blocks.table import BlockId, BlockTable, Residency
from kvws.tiers.host import HostTier
from kvws.tiers.shares import SharedOrder, Shares

HALF_LIFE_SELECTIONS = 64.0
"""After so many selections a retrieval counts half when the host tier chooses what to give up."""

YOUNG_SELECTIONS = 8.0
"""For so many selections a new host copy is spared: its thread's next view has every new block,
and a block that was just brought up has had no chance yet to be wanted."""


class Repository:
    """Block table, host slots and eviction order. Every method needs `lock` (re-entrant)."""

    def __init__(
        self, host: HostTier, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
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
        self._stored = SharedOrder(half_life_steps=HALF_LIFE_SELECTIONS)
        self._unsaved = SharedOrder(half_life_steps=HALF_LIFE_SELECTIONS)
        self._shares = Shares(host.capacity_blocks, clock_s)
        self._selection = 0.0

    # ---- host slots --------------------------------------------------------------------------

    def allocate(self, count: int, workspace: str) -> list[int]:
        """Take host slots, all or none, giving up host copies where needed.

        Args:
            workspace: whose blocks will have them.

        Raises:
            HostTierFull: too many blocks are in use, or on their way to the disk.
        """
        orders = [self._stored]
        if self.only_copies_may_go():
            orders.append(self._unsaved)
        for spare_young, order, of_all in product((True, False), orders, (False, True)):
            short = count - self.host.free_blocks
            if short > 0:
                at_most = self._shares.held if of_all else self._shares.excess(workspace, count)
                self._give_up(order, short, at_most, spare_young=spare_young)
        return self.host.allocate(count)

    def allocate_pages(self, count: int, workspace: str) -> list[int]:
        """Take slots for staged pages, all or none, as `allocate` where blocks lie beside them.

        Raises:
            HostTierFull: too many are in use.
        """
        if self.host.pages_become_blocks_in_place:
            return self.allocate(count, workspace)
        return self.host.allocate_pages(count)

    def _give_up(
        self, order: SharedOrder, count: int, at_most: Mapping[str, int], *, spare_young: bool
    ) -> None:
        """Free slots of the least wanted blocks that nobody is reading, at most so many of each
        workspace."""

        def may_go(block: BlockId) -> bool:
            entry = self._entry(block)
            if entry.pins or self.is_wanted(block):
                return False
            return not spare_young or entry.young_until <= self._selection

        for block in order.pick(count, may_go, at_most):
            entry = self._entry(block)
            assert entry.slot is not None
            self.host.free([entry.slot])
            self._shares.leave(block[0])
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
            self._shares.ask(block[0])
            order = self._stored if entry.stored else self._unsaved
            self._admit(block, entry, order)

    def _admit(self, block: BlockId, entry: Residency, order: SharedOrder) -> None:
        """A block has a host copy from now on."""
        entry.young_until = self._selection + YOUNG_SELECTIONS
        order.admit(block, importance=entry.importance, now=self._selection)
        self._shares.enter(block[0])

    def retrieve(self, workspace: str, numbers: Iterable[int]) -> None:
        """A step selected these blocks: they are worth keeping."""
        self._selection += 1.0
        self._shares.ask(workspace)
        for number in numbers:
            for order in (self._stored, self._unsaved):
                if (workspace, number) in order:
                    order.touch((workspace, number), now=self._selection)

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
        self._admit(block, entry, self._stored)

    def drop(self, block: BlockId) -> None:
        """Forget a block; its slot is freed when the last reader is done."""
        for order in (self._stored, self._unsaved):
            if block in order:
                order.remove(block)
                self._shares.leave(block[0])
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
        the eviction order has exactly the blocks with a host copy, by whether they are stored, and
        so many are counted of each workspace."""
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
        on_host = Counter(block[0] for block, entry in self.table if entry.slot is not None)
        assert on_host == self._shares.held, "a workspace's host copies are miscounted"
