"""Which of many equal hashes arrived last, in about 10 bytes a distinct hash."""

from __future__ import annotations

from array import array

NONE = -1

_PARTS_BITS = 8
_HASH_BITS = 64
_FIRST_SLOTS = 8
_FULL_PERCENT = 67


class NewestArrivals:
    """The newest place of each hash in an array of hashes that grows.

    Open addressing, in 256 tables by a hash's first bits: each is doubled by itself, so that
    nobody ever waits for all. The slots hold places; the hashes are where they were.
    """

    def __init__(self, hashes: array[int]) -> None:
        """`hashes`: 64 bits each, of which the lowest eight choose no slot."""
        self._hashes = hashes
        self._tables = [array("i", [NONE]) * _FIRST_SLOTS for _ in range(1 << _PARTS_BITS)]
        self._filled = [0] * len(self._tables)

    def of(self, hashed: int) -> int:
        """The newest place of a hash, or NONE."""
        table = self._tables[hashed >> (_HASH_BITS - _PARTS_BITS)]
        return table[self._slot(table, hashed)]

    def enter(self, place: int) -> int:
        """Make a place the newest of the hash that is there. Mutates self.

        Returns:
            the one that was, or NONE.
        """
        hashed = self._hashes[place]
        part = hashed >> (_HASH_BITS - _PARTS_BITS)
        table = self._tables[part]
        slot = self._slot(table, hashed)
        before = table[slot]
        table[slot] = place
        if before == NONE:
            self._filled[part] += 1
            if 100 * self._filled[part] > _FULL_PERCENT * len(table):
                self._tables[part] = self._doubled(table)
        return before

    def _slot(self, table: array[int], hashed: int) -> int:
        """Where a hash is in a table, or would be."""
        last = len(table) - 1
        slot = (hashed >> _PARTS_BITS) & last
        while (place := table[slot]) != NONE and self._hashes[place] != hashed:
            slot = (slot + 1) & last
        return slot

    def _doubled(self, table: array[int]) -> array[int]:
        larger = array("i", [NONE]) * (2 * len(table))
        for place in table:
            if place != NONE:
                larger[self._slot(larger, self._hashes[place])] = place
        return larger
