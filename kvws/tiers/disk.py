"""The disk tier of one rank: the durable store of every attached workspace, behind a codec."""

from __future__ import annotations

import logging
import mmap
import threading
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import islice
from pathlib import Path

import torch

from kvws.blocks.table import RAW
from kvws.errors import ConfigError, ControlError
from kvws.recall.signals.enabled import EnabledSignals
from kvws.store.block import StoredBlock
from kvws.store.block_store import BlockStore, NewBlock, StoreShape
from kvws.store.listing import require_private
from kvws.store.storage import Storage
from kvws.tiers.budget import DiskBudget
from kvws.tiers.codec import PayloadCodec
from kvws.tiers.formats import EXACT
from kvws.tiers.host import HostTier

logger = logging.getLogger(__name__)

_REINDEX_BYTES = 16 << 20
"""Payloads that index rows are made of at a time."""


@dataclass(frozen=True)
class UnsavedBlock:
    """A block with a host copy only.

    Attributes:
        slot: its host slot, pinned.
        first_position: baked position of the host copy, or RAW.
        row: retrieval index row [row_bytes] uint8, contiguous.
    """

    number: int
    page_hash: str
    slot: int
    first_position: int
    row: torch.Tensor


class DiskTier:
    """Durable copies of blocks. Safe to call from several threads; blocks on I/O.

    Attributes:
        budget: shared by all stores.
        signals: what the rows of the retrieval index are made of.
    """

    def __init__(
        self,
        host: HostTier,
        codec: PayloadCodec,
        budget: DiskBudget,
        storage: Storage,
        signals: EnabledSignals,
        *,
        rank: int,
    ) -> None:
        """
        Raises:
            ConfigError: a quantised host tier cannot feed a disk of another format.
        """
        self._as_on_host = codec.format == host.format
        if not self._as_on_host and host.format != EXACT:
            raise ConfigError(
                f"blocks in {host.format} on the host cannot become {codec.format} on disk",
                hint=f"set --disk-format {host.format}, or --host-format {EXACT}",
            )
        self.budget = budget
        self.signals = signals
        self._host = host
        self._codec = codec
        self._storage = storage
        self._rank = rank
        self._stores: dict[str, BlockStore] = {}
        self._paths: dict[str, Path] = {}
        self._thread = threading.local()

    @property
    def shape(self) -> StoreShape:
        return StoreShape(
            payload_bytes=self._codec.payload_bytes,
            row_bytes=self.signals.row_bytes,
            payload_format=self._codec.format,
            row_format=self.signals.row_format,
        )

    @property
    def description(self) -> str:
        """How payloads move to the disk and lie there, for people."""
        return f"{self._storage.description}, {self._codec.format} blocks"

    def attach(self, workspace: str, directory: Path) -> BlockStore:
        """Open a workspace's store on this rank, or create it.

        Rows that were made for other signals are made anew from the payloads, which takes as long
        as reading all of them.

        Raises:
            StoreError: it belongs to another model or layout, or cannot be read.
            OSError: the disk's error.
        """
        if workspace in self._stores:
            raise ControlError(f"workspace {workspace} is attached already")
        path = directory / f"rank-{self._rank}"
        if path.is_symlink() or path.exists():
            require_private(path)
        self.budget.opening(path)
        try:
            store = BlockStore.open(
                self._storage,
                path,
                self.shape,
                self.budget,
                rank=self._rank,
                reindex=self._rows_of_stored,
            )
        except BaseException:
            self.budget.closed(path)
            raise
        found = store.recovery
        if any(astuple(found)):
            logger.warning(
                "kvws: workspace %s was repaired: %d bytes cut off its index, %d damaged bytes "
                "and %d unknown records in it, %d blocks dropped whose segments are gone",
                workspace,
                *astuple(found),
            )
        self._stores[workspace], self._paths[workspace] = store, path
        return store

    def _rows_of_stored(
        self, blocks: Iterator[tuple[StoredBlock, memoryview]]
    ) -> Iterator[bytes]:
        """Index rows of stored blocks from their payloads, in order, a few blocks at a time."""
        at_once = max(1, _REINDEX_BYTES // self._codec.payload_bytes)
        payloads = torch.empty((at_once, self._codec.payload_bytes), dtype=torch.uint8)
        while True:
            positions: list[int] = []
            for block, payload in islice(blocks, at_once):
                payloads.numpy()[len(positions)] = payload
                positions.append(block.first_position)
            if not positions:
                return

            def keys(layer: int, some: slice, count: int = len(positions)) -> torch.Tensor:
                return self._codec.decode_layer(payloads[:count][some], layer)[0]

            for row in self.signals.rows(keys, torch.tensor(positions)):
                yield row.numpy().tobytes()

    def detach(self, workspace: str) -> None:
        store = self._stores.pop(workspace, None)
        if store is not None:
            store.close()
            self.budget.closed(self._paths.pop(workspace))

    def close(self) -> None:
        for workspace in list(self._stores):
            self.detach(workspace)

    def store_of(self, workspace: str) -> BlockStore | None:
        return self._stores.get(workspace)

    def write(self, workspace: str, blocks: Sequence[UnsavedBlock]) -> None:
        """Make blocks durable: acknowledged when this returns.

        Raises:
            OSError, DiskTierFull: none of them is.
        """
        encoded = None if self._as_on_host else self._encode(blocks)
        self._stores[workspace].put(
            [
                NewBlock(
                    number=block.number,
                    page_hash=bytes.fromhex(block.page_hash),
                    first_position=RAW if self._codec.raw_keys else block.first_position,
                    payload=self._host.sectors(block.slot) if encoded is None else encoded[i],
                    row=block.row.numpy().data.cast("B"),
                )
                for i, block in enumerate(blocks)
            ]
        )

    def _encode(self, blocks: Sequence[UnsavedBlock]) -> list[memoryview]:
        first = torch.tensor([block.first_position for block in blocks])
        scratch, views = self._scratch(len(blocks))
        payloads = torch.stack([self._host.payload(block.slot) for block in blocks])
        self._codec.encode(payloads, first, scratch)
        return views

    def read(self, workspace: str, run: Sequence[int], slots: Sequence[int]) -> None:
        """Read adjacent blocks into host slots.

        Raises:
            CorruptBlock, OSError: some slots hold garbage.
        """
        store = self._stores[workspace]
        if self._as_on_host:
            store.read(run, [self._host.sectors(slot) for slot in slots])
            return
        scratch, views = self._scratch(len(run))
        store.read(run, views)
        shape = (len(run), *self._host.geometry.shape)
        decoded = torch.empty(shape, dtype=self._host.geometry.dtype)
        self._codec.decode(scratch, decoded)
        self._host.write(torch.tensor(slots), decoded)

    def forget(self, workspace: str, numbers: Sequence[int]) -> None:
        """Drop durable copies. A disk that refuses is not waited for: a block that nobody knows
        is dropped when its workspace is opened again."""
        store = self._stores.get(workspace)
        if store is None:
            return
        try:
            store.drop(numbers)
        except OSError as error:
            logger.warning("kvws: blocks could not be dropped from disk: %s", error)

    def _scratch(self, count: int) -> tuple[torch.Tensor, list[memoryview]]:
        """This thread's sector-aligned memory for encoded payloads.

        Returns:
            ([count, payload_bytes] uint8, the same rows as memoryviews).
        """
        size_bytes = count * self._codec.payload_bytes
        memory: mmap.mmap | None = getattr(self._thread, "scratch", None)
        if memory is None or len(memory) < size_bytes:
            memory = self._thread.scratch = mmap.mmap(-1, size_bytes)
        rows = torch.frombuffer(memory, dtype=torch.uint8, count=size_bytes).view(count, -1)
        return rows, [row.numpy().data for row in rows]
