"""Which block the host tier gives up: the one whose retrievals are fewest and longest ago.

A block's value is its *combined recency and frequency*: every retrieval counts one, and what it
counts halves every `half_life` steps,

    CRF(t) = Σ 2^(−(t − tᵢ) / half_life)   over its retrievals at steps tᵢ ≤ t.

With a short half-life only the last retrieval counts (LRU), with a long one only their number
(LFU). Both ends are the LRFU family of Lee et al., "LRFU: A Spectrum of Policies that Subsumes
the Least Recently Used and Least Frequently Used Policies", IEEE Transactions on Computers 50(12),
2001, with λ = 1 / half_life.

Time multiplies every value by the same factor, so the order of two blocks changes only when one
of them is retrieved. The policy therefore keeps one number per block that does not depend on the
present, the logarithm of its value seen from step 0,

    W = log₂ Σ 2^(tᵢ / half_life),   CRF(t) = 2^(W − t / half_life),

which grows by one a half-life and cannot overflow.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Generator, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

Block = TypeVar("Block", bound=Hashable)


class History(NamedTuple):
    """What a block that was taken out brings along when it is put back.

    Attributes:
        weight_log2: W, the logarithm of its value seen from step 0.
        serial: its rank by age, the smaller the older.
    """

    weight_log2: float
    serial: int


class _Entry(NamedTuple, Generic[Block]):
    """A block in the heap, ordered by its fields; `serial` is one block's alone."""

    weight_log2: float
    importance: float
    serial: int
    block: Block


@dataclass(slots=True)
class _Resident(Generic[Block]):
    """A block that the policy holds: its present weight and its one entry in the heap."""

    weight_log2: float
    entry: _Entry[Block]


Rank = tuple[float, float, int]
"""What orders the blocks of policies that share their serials, the smaller first: W, importance,
serial."""


class Picking(NamedTuple, Generic[Block]):
    """Blocks of a policy, one at a time, the least valuable first.

    Attributes:
        next_rank: of the next block; None when no more may go. Asked once before each `take`.
        take: takes that block out; its history is forgotten.
    """

    next_rank: Callable[[], Rank | None]
    take: Callable[[], Block]


class EvictionPolicy(Generic[Block]):
    """Blocks in the order in which they are given up. Not thread-safe: the owner holds a lock.

    A retrieval only raises a block's weight, so its entry in the heap may lag behind, but never
    promises too much. An entry that lags is brought up to date when it reaches the top: by the
    next touch, one each, or by a pick, which needs them all. Entries of blocks that were taken
    out leave at the top too, or all in one pass when they become the majority. Every operation
    is O(log n), amortised over those before it.
    """

    def __init__(self, half_life_steps: float, serials: Iterator[int] | None = None) -> None:
        """
        Args:
            half_life_steps: after so many steps a retrieval counts half.
            serials: shared by policies whose blocks are compared; its own if None.
        """
        assert half_life_steps > 0
        self._half_life_steps = half_life_steps
        self._residents: dict[Block, _Resident[Block]] = {}
        self._heap: list[_Entry[Block]] = []
        self._garbage = 0
        self._serials = serials if serials is not None else itertools.count()

    def __contains__(self, block: Block) -> bool:
        return block in self._residents

    def __len__(self) -> int:
        return len(self._residents)

    def admit(
        self, block: Block, *, importance: float, now: float, history: History | None = None
    ) -> None:
        """Take a block in that the policy does not hold; that counts as its first retrieval.

        Args:
            block: its name.
            importance: norm of its keys; of equally valued blocks the smaller goes first, of
                those the older.
            now: the present step.
            history: from `remove`: the block goes on as if it had never been taken out, and
                `now` does not count as a retrieval.
        """
        assert block not in self._residents, f"block {block} is admitted twice"
        if history is None:
            history = History(now / self._half_life_steps, next(self._serials))
        entry = _Entry(history.weight_log2, importance, history.serial, block)
        self._residents[block] = _Resident(history.weight_log2, entry)
        heapq.heappush(self._heap, entry)

    def touch(self, block: Block, now: float) -> None:
        """Count a retrieval of a held block at step `now`."""
        resident = self._residents[block]
        resident.weight_log2 = _log2_of_sum(resident.weight_log2, now / self._half_life_steps)
        self._settle_top()

    def remove(self, block: Block) -> History:
        """Take a held block out, because it is dropped or must not be given up for now."""
        resident = self._residents.pop(block)
        self._garbage += 1
        if 2 * self._garbage > len(self._heap):
            self._heap = [held.entry for held in self._residents.values()]
            heapq.heapify(self._heap)
            self._garbage = 0
        return History(resident.weight_log2, resident.entry.serial)

    def pick(
        self, count: int, may_go: Callable[[Block], bool] = lambda _: True
    ) -> list[Block]:
        """Take out the `count` blocks to give up, the least valuable first. Their history is
        forgotten.

        Args:
            count: how many; fewer are taken when fewer may go.
            may_go: asked of each candidate once; a block that may not go stays as it is.
        """
        picked: list[Block] = []
        with self.picking(may_go) as picking:
            while len(picked) < count and picking.next_rank() is not None:
                picked.append(picking.take())
        return picked

    @contextmanager
    def picking(self, may_go: Callable[[Block], bool]) -> Generator[Picking[Block]]:
        """Pick one block at a time. Nothing else is done with the policy meanwhile.

        Args:
            may_go: as for `pick`.
        """
        spared: list[_Entry[Block]] = []

        def next_rank() -> Rank | None:
            while self._heap:
                if self._settle_top():
                    continue
                if may_go(self._heap[0].block):
                    return self._heap[0][:3]
                spared.append(heapq.heappop(self._heap))
            return None

        def take() -> Block:
            block = heapq.heappop(self._heap).block
            del self._residents[block]
            return block

        try:
            yield Picking(next_rank, take)
        finally:
            for entry in spared:
                heapq.heappush(self._heap, entry)

    def score(self, block: Block, now: float) -> float:
        """CRF of a held block at step `now`, not before its last retrieval."""
        return math.exp2(self._residents[block].weight_log2 - now / self._half_life_steps)

    def check_integrity(self) -> None:
        """Entries = residents + garbage, and no entry promises too much."""
        assert len(self._heap) == len(self._residents) + self._garbage, "garbage is miscounted"
        standing = {id(entry) for entry in self._heap}
        for block, resident in self._residents.items():
            assert resident.entry.block == block and id(resident.entry) in standing
            assert resident.entry.weight_log2 <= resident.weight_log2, "an entry promises too much"

    def _settle_top(self) -> bool:
        """Bring the top entry up to date or throw it away; False if there was no need."""
        entry = self._heap[0]
        resident = self._residents.get(entry.block)
        if resident is None or resident.entry is not entry:
            heapq.heappop(self._heap)
            self._garbage -= 1
            return True
        if entry.weight_log2 < resident.weight_log2:
            resident.entry = entry._replace(weight_log2=resident.weight_log2)
            heapq.heapreplace(self._heap, resident.entry)
            return True
        return False


def _log2_of_sum(a: float, b: float) -> float:
    """log₂(2^a + 2^b) without leaving the range of a float."""
    low, high = (a, b) if a < b else (b, a)
    return high + math.log1p(math.exp2(low - high)) / math.log(2.0)
