"""Which rows lie in which slots of a bounded memory. Decides; holds no rows."""

from __future__ import annotations

import threading
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Numbers: TypeAlias = npt.NDArray[np.int64]

_NOWHERE = -1


class RowSlots:
    """Rows that were asked for lately keep their slots; the others give theirs up.

    A row is one of an *owner's*, by its block number. Rows are placed by one thread at a time, and
    may be forgotten by any.
    """

    def __init__(self, slots: int) -> None:
        self._lock = threading.Lock()
        self._slots_of: dict[int, Numbers] = {}  # of an owner, by block number
        self._owner = np.full(slots, _NOWHERE, dtype=np.int64)
        self._block = np.zeros(slots, dtype=np.int64)
        self._asked_at = np.zeros(slots, dtype=np.int64)  # 0 where nothing lies
        self._clock = 0

    @property
    def capacity(self) -> int:
        return len(self._owner)

    def place(self, owner: int, blocks: Numbers) -> tuple[Numbers, npt.NDArray[np.bool_]]:
        """Give each of some rows a slot, all at once.

        A row that is forgotten before the next call keeps what was written to its slot until then.

        Args:
            blocks: distinct, at least one and at most `capacity`.

        Returns:
            ([blocks] their slots, [blocks] True where the row is new there and has to be written).
        """
        assert 0 < len(blocks) <= self.capacity, f"{len(blocks)} rows for {self.capacity} slots"
        with self._lock:
            self._clock += 1
            slots_of = self._slots_of_owner(owner, int(blocks.max()) + 1)
            slots = slots_of[blocks]
            fresh = slots == _NOWHERE
            self._asked_at[slots[~fresh]] = self._clock
            missing = int(fresh.sum())
            if missing:
                taken = np.sort(np.argpartition(self._asked_at, missing - 1)[:missing])
                self._clear(taken)
                slots[fresh] = taken
                slots_of[blocks[fresh]] = taken
                self._owner[taken] = owner
                self._block[taken] = blocks[fresh]
                self._asked_at[taken] = self._clock
            return slots, fresh

    def forget(self, owner: int, blocks: Numbers) -> None:
        """Rows that are no longer what they were."""
        with self._lock:
            slots_of = self._slots_of.get(owner)
            if slots_of is not None:
                slots = slots_of[blocks[blocks < len(slots_of)]]
                self._clear(slots[slots != _NOWHERE])

    def forget_owner(self, owner: int) -> None:
        """All rows of an owner."""
        with self._lock:
            slots_of = self._slots_of.pop(owner, None)
            if slots_of is not None:
                slots = slots_of[slots_of != _NOWHERE]
                self._owner[slots] = _NOWHERE
                self._asked_at[slots] = 0

    def _slots_of_owner(self, owner: int, blocks: int) -> Numbers:
        """The owner's slots by block number, for at least so many blocks."""
        slots_of = self._slots_of.get(owner, np.empty(0, dtype=np.int64))
        if len(slots_of) < blocks:
            more = max(blocks, 2 * len(slots_of)) - len(slots_of)
            slots_of = np.concatenate([slots_of, np.full(more, _NOWHERE, dtype=np.int64)])
            self._slots_of[owner] = slots_of
        return slots_of

    def _clear(self, slots: Numbers) -> None:
        """Let nothing lie in some slots."""
        owners = self._owner[slots]
        for owner in np.unique(owners[owners != _NOWHERE]):
            self._slots_of[int(owner)][self._block[slots[owners == owner]]] = _NOWHERE
        self._owner[slots] = _NOWHERE
        self._asked_at[slots] = 0
