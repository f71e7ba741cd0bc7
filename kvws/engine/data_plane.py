"""The data plane of one rank: moves, indexes and scores blocks. Knows no HTTP and no messages.

Its callers share it under the repository's lock: the engine's scheduler thread (stage_out,
granted_pages, queue_load), the loading thread (fill, release_load), the control socket's threads
(the rest), and the threads of the disk tier.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kvws.blocks.ledger import StepLedger
from kvws.blocks.page import PageSource, require_full_page
from kvws.blocks.table import Residency
from kvws.engine.adoption import Adoption
from kvws.errors import ControlError, HostTierFull
from kvws.kernels.rotary import RotaryTable
from kvws.recall.device_rows import DeviceRows
from kvws.recall.index import BlockIndex
from kvws.recall.indexes import WorkspaceIndexes
from kvws.recall.signals.enabled import EnabledSignals
from kvws.tiers.device import DevicePool
from kvws.tiers.disk import DiskTier
from kvws.tiers.durable import DurableBlocks
from kvws.tiers.host import HostTier
from kvws.tiers.loading import Loader, QueuedLoad
from kvws.tiers.repository import Repository
from kvws.tiers.stage_in import HeldSlice, PageLoad
from kvws.tiers.stage_out import copy_out


@dataclass(frozen=True)
class StepOutcome:
    """What this rank kept of a step.

    Attributes:
        resident: numbers of those named blocks that are resident, in the order of their names.
        refused_pages: offers of computed pages that the host tier had no room for.
        loaded_pages: view pages filled from lower tiers.
        stage_in_ms: time spent filling them.
        backlogged: the disk lags behind; the next blocks should wait.
    """

    resident: list[int]
    refused_pages: int
    loaded_pages: int
    stage_in_ms: float
    backlogged: bool


class DataPlane:
    """Blocks of every workspace on one rank."""

    def __init__(
        self,
        pool: DevicePool,
        rotary: Sequence[RotaryTable],
        host: HostTier,
        signals: EnabledSignals,
        disk: DiskTier | None = None,
        near: DeviceRows | None = None,
        *,
        on_thread_start: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            rotary: the table of each layer; layers usually share one.
            signals: what blocks are found by; those of the disk tier.
            disk: None keeps blocks in host memory only.
            near: where index rows are scored; None for host memory.
            on_thread_start: called first on every thread of the disk tier.
        """
        self.host = host
        self._pool = pool
        self._indexes = WorkspaceIndexes(signals, near)
        self._repository = Repository(host)
        self._lock = self._repository.lock
        self._table = self._repository.table
        self._durable = (
            DurableBlocks(self._repository, disk, on_thread_start=on_thread_start)
            if disk is not None
            else None
        )
        self._loader = Loader(
            self._repository,
            self._durable.lifter if self._durable is not None else None,
            pool,
            rotary,
            room_will_come=lambda: self._durable is not None and self._durable.writing,
        )
        self._adoption = Adoption(self._repository, self._durable, signals, self._indexes.of)
        self._ledger = StepLedger()
        self._repository.is_wanted = self._ledger.wants
        self._attaching: set[str] = set()
        # By workspace: pages that were filled from a block computed as another page. What lies on
        # the device under such a name is a copy that was moved, never the truth of a block.
        self._relocated: dict[str, set[str]] = {}
        self._counters = dict.fromkeys(
            ("staged_pages", "refused_pages", "loaded_pages", "failed_loads"), 0
        )

    # ---- a step, from its opening to its end (control socket) --------------------------------

    def open_step(self, step: str, workspace: str) -> None:
        """Begin a step: requests whose session id is `step` may stage pages."""
        with self._lock:
            self._ledger.open(step, workspace)

    def promise(self, step: str, view: Sequence[tuple[str, PageSource]]) -> list[int]:
        """Commit an execution view: its pages are granted from now until the step closes.

        Args:
            step: an open step.
            view: (page hash, source) of every page of the view, in order.

        Returns:
            Block numbers whose bytes are missing, ascending. If there are any, nothing was
            promised: the caller recomputes those blocks and asks again.
        """
        for _, source in view:
            require_full_page(source)
        wanted = sorted({piece.block for _, source in view for piece in source})
        with self._lock:
            entry = self._ledger.find(step)
            if entry is None:
                raise ControlError(f"step {step} is not open")
            entry.wanted.update(wanted)
            self._repository.retrieve(entry.workspace, wanted)
        self._loader.bring_up(entry.workspace, wanted)
        with self._lock:
            missing = [b for b in wanted if self._table.find((entry.workspace, b)) is None]
            if not missing:
                for index, (page_hash, source) in enumerate(view):
                    self._ledger.promise(step, page_hash, index, source)
            return missing

    def scored_index(self, workspace: str) -> BlockIndex:
        """The workspace's index, to be asked for scores; an empty one if there is none."""
        return self._indexes.asked(workspace)

    def look_ahead(self, workspace: str, numbers: Sequence[int]) -> int:
        """Bring blocks from disk to host memory that may be selected next, the likeliest first.

        Returns how many were started.
        """
        return self._durable.lifter.look_ahead(workspace, numbers) if self._durable else 0

    def close_step(self, step: str, named: Sequence[tuple[str, int, int]]) -> StepOutcome:
        """End a step: the named pages it computed become blocks, all others are dropped.

        The first name without a page ends the run: a block behind a gap is one that no line
        would ever reach.

        Args:
            step: an open step.
            named: (page hash, block number, index of the page in its prompt), in log order.
        """
        with self._adoption.under_way():
            with self._lock:
                entry = self._ledger.close(step)
            if entry is None:
                raise ControlError(f"step {step} is not open")
            resident = self._adoption.adopt(entry, named)
        with self._lock:
            self._counters["refused_pages"] += entry.refused_pages
        return StepOutcome(
            resident,
            entry.refused_pages,
            entry.loaded_pages,
            entry.stage_in_ms,
            self.backlogged(),
        )

    # ---- stage-out (scheduler thread) --------------------------------------------------------

    def stage_out(self, step: str | None, hashes: Sequence[str], pages: Sequence[int]) -> bool:
        """Copy the pages that an open step computed into the host tier.

        Args:
            step: session id of the request whose insert offers the pages.
            hashes: one per page.
            pages: device page numbers, one per hash.

        Returns:
            True when every page is a view page (of this step, or once moved to its place) or a
            finished block: the engine need not offer them again. False otherwise: it will offer
            them again, until they are named.
        """
        with self._lock:
            entry = self._ledger.find(step)
            if entry is None:
                return False
            relocated = self._relocated.get(entry.workspace, set[str]())
            unnamed = [
                index
                for index, page_hash in enumerate(hashes)
                if page_hash not in entry.promised
                and page_hash not in relocated
                and self._table.computed_as(page_hash) is None
            ]
            fresh = [index for index in unnamed if hashes[index] not in entry.staged]
            if fresh:
                try:
                    slots = sorted(self._repository.allocate_pages(len(fresh), entry.workspace))
                except HostTierFull:
                    entry.refused_pages += len(fresh)
                    return False
                copy_out(self._pool, [pages[i] for i in fresh], self.host, slots)
                entry.staged.update(zip((hashes[i] for i in fresh), slots, strict=True))
                self._counters["staged_pages"] += len(fresh)
            return not unnamed

    # ---- stage-in (scheduler and loading threads) --------------------------------------------

    def granted_pages(self, hashes: Sequence[str]) -> int:
        """How many leading pages are promised by open steps. A dictionary walk, never I/O."""
        with self._lock:
            for count, page_hash in enumerate(hashes):
                if self._ledger.promise_of(page_hash) is None:
                    return count
            return len(hashes)

    def queue_load(
        self, step: str, hashes: Sequence[str], device_pages: Sequence[int]
    ) -> QueuedLoad | None:
        """Pin the blocks that fill promised pages.

        Returns:
            None when bytes are gone. The load must then *fail*, not be refused, or the engine
            would recompute the view as text under its hashes.
        """
        with self._lock:
            pages: list[PageLoad] = []
            pinned: dict[int, Residency] = {}
            workspace = ""
            for page_hash, device_page in zip(hashes, device_pages, strict=True):
                promise = self._ledger.promise_of(page_hash)
                if promise is None:
                    return None
                workspace = promise.workspace
                slices: list[HeldSlice] = []
                for block, offset, length in promise.source:
                    home = self._table.find((workspace, block))
                    if home is None:
                        return None
                    slices.append(HeldSlice(home, offset, length))
                    pinned[block] = home
                    if home.page_hash != page_hash:
                        self._relocated.setdefault(workspace, set()).add(page_hash)
                pages.append(PageLoad(promise.view_index, tuple(slices), device_page))
            for residency in pinned.values():
                self._table.pin(residency)
            numbers, held = tuple(pinned), tuple(pinned.values())
            return QueuedLoad(step, workspace, tuple(pages), numbers, held)

    def fill(self, loads: Sequence[QueuedLoad], layer_done: Callable[[int], None]) -> None:
        """Fill the device pages of all loads: see `Loader.fill`."""
        begin = time.perf_counter()
        self._loader.fill(loads, layer_done)
        elapsed_ms = 1e3 * (time.perf_counter() - begin)
        with self._lock:
            for load in loads:
                self._counters["loaded_pages"] += len(load.pages)
                entry = self._ledger.find(load.step)
                if entry is not None:
                    entry.loaded_pages += len(load.pages)
                    entry.stage_in_ms += elapsed_ms

    def release_load(self, load: QueuedLoad, *, failed: bool = False) -> None:
        """Unpin the blocks of a load that is done, failed or cancelled."""
        with self._lock:
            self._counters["failed_loads"] += failed
            self._repository.unpin(load.pinned)

    # ---- workspaces (control socket) ---------------------------------------------------------

    @property
    def disk_description(self) -> str:
        """How blocks are kept on disk, for people; "" without a disk tier."""
        return self._durable.disk.description if self._durable is not None else ""

    def attach(self, workspace: str, directory: str) -> list[int]:
        """Open a workspace's folder on this rank: its blocks can be promised and scored again.

        Returns:
            Numbers of the blocks that it holds, ascending.

        Raises:
            StoreError: the folder belongs to another model or layout, or cannot be read.
            ControlError: there is no disk tier, or the workspace has blocks already.
        """
        if self._durable is None:
            raise ControlError("there is no disk tier", hint="start the engine with --disk-dir")
        if self._durable.disk.store_of(workspace) is not None:
            raise ControlError(f"workspace {workspace} is attached already")
        held: list[int] = []
        self._attaching.add(workspace)
        try:
            for numbers, rows in self._durable.attach(workspace, Path(directory)):
                self._indexes.of(workspace).write(numbers, rows)
                held += numbers
        except OSError:
            self.drop_workspace(workspace)  # half of it would be taken for the whole
            raise
        finally:
            self._attaching.discard(workspace)
        return sorted(held)

    def unsaved_blocks(self, workspace: str) -> int:
        """Blocks of a workspace that are not durable yet; 0 without a disk tier."""
        with self._lock:
            return self._durable.writer.unsaved(workspace) if self._durable is not None else 0

    def backlogged(self) -> bool:
        """Whether the disk lags so far behind that new blocks should wait."""
        return self._durable is not None and self._durable.backlogged

    def forget(self, workspace: str, numbers: Sequence[int]) -> int:
        """Drop the bytes of blocks on every tier. Returns how many were there.

        Their index rows stay: they can still be selected, and are then computed again.
        """
        with self._lock:
            resident = [n for n in numbers if self._table.find((workspace, n)) is not None]
            for number in resident:
                self._repository.drop((workspace, number))
            if self._durable is not None:
                self._durable.writer.forget(workspace, numbers)
        if self._durable is not None:
            self._durable.disk.forget(workspace, numbers)
        return len(resident)

    def drop_workspace(self, workspace: str) -> int:
        """Drop a workspace's blocks and index from memory and let go of its folder.

        Returns how many blocks it had.
        """
        with self._lock:
            numbers = self._table.blocks_of(workspace)
            for number in numbers:
                self._repository.drop((workspace, number))
            self._indexes.drop(workspace)
            self._relocated.pop(workspace, None)
            if self._durable is not None:
                self._durable.writer.forget(workspace)
        if self._durable is not None:
            self._durable.detach(workspace)
        return len(numbers)

    def close(self) -> None:
        """Make what can be made durable so, and stop the disk tier."""
        if self._durable is not None:
            self._durable.close()

    # ---- observation (control socket) --------------------------------------------------------

    def index_row(self, workspace: str, number: int) -> torch.Tensor | None:
        """Index row of a block: [row_bytes] uint8."""
        index = self._indexes.find(workspace)
        return index.read(number) if index is not None else None

    def block_payload(self, workspace: str, number: int) -> tuple[torch.Tensor, int] | None:
        """(payload [2, layers, 32, kv_heads, head_dim] copied, its first position or RAW); None
        when the block has no host copy."""
        with self._lock:
            residency = self._table.find((workspace, number))
            if residency is None or residency.slot is None:
                return None
            return self.host.payload(residency.slot), residency.first_position

    def stats(self) -> dict[str, int]:
        with self._lock:
            return {
                **self._counters,
                **self._repository.stats(),
                **(self._durable.stats() if self._durable is not None else {}),
                "open_steps": self._ledger.open_steps,
                "staged_pages_now": len(self._ledger.staged_slots()),
                "index_bytes": self._indexes.nbytes,
            }

    def check_integrity(self) -> None:
        """Every used host slot is accounted for, every block of an open workspace is indexed."""
        with self._lock:
            self._adoption.wait_until_done()
            self._ledger.check_integrity()
            self._repository.check_integrity(self._ledger.staged_slots())
            for workspace in self._table.workspaces() - self._attaching:
                index = self._indexes.find(workspace)
                assert index is not None, f"{workspace} has blocks but no index"
                unindexed = [n for n in self._table.blocks_of(workspace) if n not in index]
                assert not unindexed, f"blocks {unindexed} of {workspace} have no index row"
