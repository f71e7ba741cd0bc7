"""Index rows in an accelerator's memory, where they are scored in milliseconds.

The index itself lies in host memory and is the truth. Rows come here when they are first scored
and stay while there is room. Those that were given up, or written anew, are read from it again.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TypeAlias

import numpy as np
import torch

from kvws.recall.row_slots import RowSlots
from kvws.recall.signals.enabled import EnabledSignals
from kvws.recall.signals.signal import Query, Signal, Tile

_ROWS_AT_ONCE = 512
"""Rows that are copied from host memory in one piece: some tens of MB."""

RowsOf: TypeAlias = Callable[[torch.Tensor], Sequence[tuple[torch.Tensor, ...]]]
"""From [n] int64 block numbers, ascending, to each signal's parts, each [*before, n, *after]."""


class DeviceRows:
    """Rows of many indexes of one rank in one tile per signal, whose places are slots.

    Attributes:
        device: whose memory they lie in.
        capacity_blocks: how many rows there is room for; so many can be scored at once.
    """

    def __init__(
        self, signals: EnabledSignals, device: torch.device, capacity_blocks: int
    ) -> None:
        """Takes all of its memory now: row_bytes of the signals · capacity_blocks."""
        self.device = device
        self.capacity_blocks = capacity_blocks
        self._signals = signals.signals
        self._slots = RowSlots(capacity_blocks)
        self._owners = itertools.count()
        self._one_at_a_time = threading.Lock()
        # Beside the forward pass's stream, so that neither waits for what the other has queued.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._tiles = [
            tuple(
                torch.empty(
                    (*part.before, capacity_blocks, *part.after), dtype=part.dtype, device=device
                )
                for part in signal.parts
            )
            for signal in self._signals
        ]

    def new_owner(self) -> int:
        """A number for an index, under which its rows lie here."""
        return next(self._owners)

    def score(
        self,
        owner: int,
        query: Query,
        blocks: torch.Tensor,
        first_positions: torch.Tensor,
        rows_of: RowsOf,
    ) -> dict[str, torch.Tensor]:
        """Score some blocks of an index.

        Args:
            query: in any memory.
            blocks: [n] int64, ascending, n from 1 to `capacity_blocks`.
            first_positions: [n] int64: position of each one's first token in its line.
            rows_of: reads rows of the index.

        Returns:
            by signal: [n] float32 in host memory.
        """
        with self._one_at_a_time, self._computing():
            try:
                slots = self._bring(owner, blocks, rows_of)
                candidates = torch.zeros(
                    self.capacity_blocks, dtype=torch.bool, device=self.device
                )
                candidates[slots] = True
                positions = torch.zeros(
                    self.capacity_blocks, dtype=torch.int64, device=self.device
                )
                positions[slots] = first_positions.to(self.device)
                scores = {
                    signal.name: signal.score(query, [Tile(parts, candidates, positions)])[slots]
                    for signal, parts in zip(self._signals, self._tiles, strict=True)
                }
                return {name: found.cpu() for name, found in scores.items()}
            except BaseException:
                self._slots.forget_owner(owner)  # some may have a slot, but not be written
                raise

    def score_tile(self, signal: Signal, query: Query, tile: Tile) -> torch.Tensor:
        """Score a tile that lies in host memory, with a copy that is made for it.

        Returns:
            [blocks] float32 in host memory; 0 where not a candidate.
        """
        with self._one_at_a_time, self._computing():
            copy = Tile(
                tuple(part.to(self.device) for part in tile.parts),
                tile.candidates.to(self.device),
                tile.first_positions.to(self.device),
            )
            return signal.score(query, [copy]).cpu()

    def forget(self, owner: int, blocks: Iterable[int]) -> None:
        """Rows of an index that were written: called when the index has them."""
        self._slots.forget(owner, np.fromiter(blocks, dtype=np.int64))

    def forget_owner(self, owner: int) -> None:
        """All rows of an index."""
        self._slots.forget_owner(owner)

    def _bring(self, owner: int, blocks: torch.Tensor, rows_of: RowsOf) -> torch.Tensor:
        """Let the rows of blocks lie here. Returns their slots, [n] int64 on the device."""
        numbers = blocks.numpy()
        slots, fresh = self._slots.place(owner, numbers)
        # Placed before they are read: what is written to the index meanwhile is forgotten here.
        missing = torch.tensor(numbers[fresh])
        targets = torch.tensor(slots[fresh], device=self.device)
        for start in range(0, len(missing), _ROWS_AT_ONCE):
            some = missing[start : start + _ROWS_AT_ONCE]
            to = targets[start : start + _ROWS_AT_ONCE]
            for signal, tile, parts in zip(
                self._signals, self._tiles, rows_of(some), strict=True
            ):
                for shape, whole, values in zip(signal.parts, tile, parts, strict=True):
                    whole.index_copy_(len(shape.before), to, values.to(self.device))
        return torch.tensor(slots, device=self.device)

    @contextlib.contextmanager
    def _computing(self) -> Generator[None]:
        if self._stream is None:
            yield
            return
        # Behind what this thread has queued: the query.
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield
