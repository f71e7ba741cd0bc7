"""The data plane of one rank: moves, indexes and scores blocks. Knows no HTTP and no messages.

Three callers share it under one lock: the engine's scheduler thread (stage_out, granted_pages,
queue_load), the loading thread (fill, release_load) and the control socket's threads (the rest).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvws.blocks.key import BLOCK_TOKENS
from kvws.blocks.ledger import OpenStep, StepLedger
from kvws.blocks.page import PageSource, require_full_page
from kvws.blocks.table import BlockTable, Residency
from kvws.errors import ControlError, HostTierFull
from kvws.kernels.mean_k import mean_rotated, raw_rotation
from kvws.kernels.rotary import RotaryTable
from kvws.recall.index import MeanKIndex
from kvws.tiers.device import DevicePool
from kvws.tiers.host import HostTier
from kvws.tiers.stage_in import HostSlice, PageLoad, fill_pages
from kvws.tiers.stage_out import copy_out


@dataclass(frozen=True)
class QueuedLoad:
    """View pages of one request, pinned in the host tier, and where they go.

    Attributes:
        step: the step that the request belongs to.
        device_slots: [32 × pages] int64.
    """

    step: str
    pages: tuple[PageLoad, ...]
    pinned: tuple[Residency, ...]
    device_slots: torch.Tensor


@dataclass(frozen=True)
class StepOutcome:
    """What this rank kept of a step.

    Attributes:
        resident: numbers of those named blocks that are resident, in the order of their names.
        refused_pages: offers of computed pages that the host tier had no room for.
        loaded_pages: view pages filled from the host tier.
        stage_in_ms: time spent filling them.
    """

    resident: list[int]
    refused_pages: int
    loaded_pages: int
    stage_in_ms: float


class DataPlane:
    """Blocks of every workspace on one rank."""

    def __init__(self, pool: DevicePool, rotary: Sequence[RotaryTable], host: HostTier) -> None:
        """`rotary`: the table of each layer; layers usually share one."""
        self.host = host
        self._pool = pool
        self._rotary = list(rotary)
        self._lock = threading.RLock()
        self._table = BlockTable()
        self._ledger = StepLedger()
        self._indexes: dict[str, MeanKIndex] = {}
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
        with self._lock:
            entry = self._ledger.find(step)
            if entry is None:
                raise ControlError(f"step {step} is not open")
            wanted = {piece.block for _, source in view for piece in source}
            missing = sorted(b for b in wanted if self._table.find((entry.workspace, b)) is None)
            if not missing:
                for index, (page_hash, source) in enumerate(view):
                    self._ledger.promise(step, page_hash, index, source)
            return missing

    def score(
        self, workspace: str, queries: torch.Tensor, candidates: torch.Tensor
    ) -> torch.Tensor:
        """Mean-K scores summed over this rank's layers and heads: see `MeanKIndex.score`."""
        index = self._indexes.get(workspace)
        if index is None:
            return torch.zeros(candidates.numel())
        return index.score(queries, candidates)

    def close_step(self, step: str, named: Sequence[tuple[str, int, int]]) -> StepOutcome:
        """End a step: the named pages it computed become blocks, all others are dropped.

        The first name without a page ends the run: a block behind a gap is one that no line
        would ever reach.

        Args:
            step: an open step.
            named: (page hash, block number, index of the page in its prompt), in log order.
        """
        with self._lock:
            entry = self._ledger.close(step)
            if entry is None:
                raise ControlError(f"step {step} is not open")
            adopted: dict[int, Residency] = {}
            for page_hash, number, page_index in named:
                if self._table.find((entry.workspace, number)) is not None:
                    continue
                slot = self._adopt(entry, page_hash)
                if slot is None:
                    break
                adopted[number] = Residency(slot, page_index * BLOCK_TOKENS, page_hash)
            self.host.free(list(entry.staged.values()))
        # Nobody else knows these slots yet, so the scheduler need not wait for the arithmetic.
        means = self._block_means(list(adopted.values()))
        with self._lock:
            for (number, residency), mean in zip(adopted.items(), means, strict=True):
                if self._table.find((entry.workspace, number)) is not None:
                    self.host.free([residency.slot])  # another step has become it meanwhile
                    continue
                self._table.add((entry.workspace, number), residency)
                self._index(entry.workspace).write(number, mean)
            resident = [
                number
                for _, number, _ in named
                if self._table.find((entry.workspace, number)) is not None
            ]
        return StepOutcome(
            resident, entry.refused_pages, entry.loaded_pages, entry.stage_in_ms
        )

    def _adopt(self, entry: OpenStep, page_hash: str) -> int | None:
        """The host slot of a page the step computed. A page that is an earlier block already was
        shared by the prefix tree and not computed again: its bytes are copied."""
        slot = entry.staged.pop(page_hash, None)
        if slot is not None:
            return slot
        twin_id = self._table.computed_as(page_hash)
        twin = self._table.find(twin_id) if twin_id is not None else None
        if twin is None:
            return None
        try:
            (slot,) = self.host.allocate(1)
        except HostTierFull:
            self._counters["refused_pages"] += 1
            entry.refused_pages += 1
            return None
        self.host.payload(slot).copy_(self.host.payload(twin.slot))
        return slot

    def _block_means(self, blocks: Sequence[Residency]) -> list[torch.Tensor]:
        """Mean raw K per block: [layers, kv_heads, head_dim] float32."""
        if not blocks:
            return []
        slots = torch.tensor([block.slot for block in blocks])
        first = torch.tensor([block.first_position for block in blocks])
        to_raw = {
            id(table): raw_rotation(first, BLOCK_TOKENS, table) for table in self._rotary
        }
        per_layer = [
            mean_rotated(self.host.keys(layer).index_select(0, slots), to_raw[id(table)])
            for layer, table in enumerate(self._rotary)
        ]
        return list(torch.stack(per_layer, dim=1))

    def _index(self, workspace: str) -> MeanKIndex:
        index = self._indexes.get(workspace)
        if index is None:
            shape = self.host.geometry
            index = MeanKIndex(shape.layers, shape.kv_heads, shape.head_dim)
            self._indexes[workspace] = index
        return index

    # ---- stage-out (scheduler thread) --------------------------------------------------------

    def stage_out(self, step: str | None, hashes: Sequence[str], pages: torch.Tensor) -> bool:
        """Copy the pages that an open step computed into the host tier.

        Args:
            step: session id of the request whose insert offers the pages.
            hashes: one per page.
            pages: [pages] int64, device page numbers.

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
                    slots = self.host.allocate(len(fresh))
                except HostTierFull:
                    self._counters["refused_pages"] += len(fresh)
                    entry.refused_pages += len(fresh)
                    return False
                copy_out(self._pool, pages[fresh], self.host, torch.tensor(slots))
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
        self, step: str, hashes: Sequence[str], device_slots: torch.Tensor
    ) -> QueuedLoad | None:
        """Pin the blocks that fill promised pages.

        Returns:
            None when bytes are gone. The load must then *fail*, not be refused, or the engine
            would recompute the view as text under its hashes.
        """
        with self._lock:
            pages: list[PageLoad] = []
            pinned: list[Residency] = []
            for page_hash in hashes:
                promise = self._ledger.promise_of(page_hash)
                if promise is None:
                    return None
                slices: list[HostSlice] = []
                for block, offset, length in promise.source:
                    home = self._table.find((promise.workspace, block))
                    if home is None:
                        return None
                    first = home.first_position + offset
                    slices.append(HostSlice(home.slot, offset, length, first))
                    pinned.append(home)
                    if home.page_hash != page_hash:
                        self._relocated.setdefault(promise.workspace, set()).add(page_hash)
                pages.append(PageLoad(promise.view_index, tuple(slices)))
            for residency in pinned:
                self._table.pin(residency)
            return QueuedLoad(step, tuple(pages), tuple(pinned), device_slots)

    def fill(self, loads: Sequence[QueuedLoad], layer_done: Callable[[int], None]) -> None:
        """Fill the device slots of all loads, layer by layer: see `fill_pages`."""
        pages = [page for load in loads for page in load.pages]
        device_slots = torch.cat([load.device_slots for load in loads])
        begin = time.perf_counter()
        fill_pages(pages, device_slots, self.host, self._pool, self._rotary, layer_done)
        elapsed_ms = 1e3 * (time.perf_counter() - begin)
        with self._lock:
            self._counters["loaded_pages"] += len(pages)
            for load in loads:
                entry = self._ledger.find(load.step)
                if entry is not None:
                    entry.loaded_pages += len(load.pages)
                    entry.stage_in_ms += elapsed_ms

    def release_load(self, load: QueuedLoad, *, failed: bool = False) -> None:
        """Unpin the blocks of a load that is done, failed or cancelled."""
        with self._lock:
            self._counters["failed_loads"] += failed
            unpinned = [self._table.unpin(residency) for residency in load.pinned]
            self.host.free([slot for slot in unpinned if slot is not None])

    # ---- forgetting and observation (control socket) -----------------------------------------

    def forget(self, workspace: str, numbers: Sequence[int]) -> int:
        """Drop the bytes of blocks. Returns how many were resident.

        Their index rows stay: they can still be selected, and are then computed again.
        """
        with self._lock:
            resident = [n for n in numbers if self._table.find((workspace, n)) is not None]
            for number in resident:
                slot = self._table.drop((workspace, number))
                if slot is not None:
                    self.host.free([slot])
            return len(resident)

    def drop_workspace(self, workspace: str) -> int:
        """Drop a workspace's blocks and index. Returns how many blocks it had."""
        with self._lock:
            dropped = self.forget(workspace, self._table.blocks_of(workspace))
            self._indexes.pop(workspace, None)
            self._relocated.pop(workspace, None)
            return dropped

    def index_row(self, workspace: str, number: int) -> torch.Tensor | None:
        """Mean raw K of a block: [layers, kv_heads, head_dim] float32."""
        index = self._indexes.get(workspace)
        return index.read(number) if index is not None else None

    def block_payload(self, workspace: str, number: int) -> tuple[torch.Tensor, int] | None:
        """(payload [2, layers, 32, kv_heads, head_dim] copied, baked first position)."""
        with self._lock:
            residency = self._table.find((workspace, number))
            if residency is None:
                return None
            return self.host.payload(residency.slot).clone(), residency.first_position

    def stats(self) -> dict[str, int]:
        with self._lock:
            return {
                **self._counters,
                "blocks": len(self._table),
                "open_steps": self._ledger.open_steps,
                "staged_pages_now": len(self._ledger.staged_slots()),
                "host_used_blocks": self.host.used_blocks,
                "host_used_bytes": self.host.used_bytes,
                "index_bytes": sum(index.nbytes for index in self._indexes.values()),
            }

    def check_integrity(self) -> None:
        """Every used host slot is one finished block or one staged page; every block is indexed.

        used slots = slots of the table + slots of open steps, and none of them is free.
        To be asked when no step is closing.
        """
        with self._lock:
            self._table.check_integrity()
            self._ledger.check_integrity()
            held = self._table.slots() + self._ledger.staged_slots()
            assert len(held) == len(set(held)), "a host slot is held twice"
            assert len(held) == self.host.used_blocks, (
                f"{self.host.used_blocks} host slots in use, {len(held)} accounted for"
            )
            assert not set(held) & self.host.free_slots(), "a held host slot is on the free list"
            for workspace, index in self._indexes.items():
                resident = self._table.blocks_of(workspace)
                unindexed = [n for n in resident if index.read(n) is None]
                assert not unindexed, f"blocks {unindexed} of {workspace} have no index row"
            workspaces = self._table.workspaces()
            assert workspaces <= self._indexes.keys(), "a workspace has blocks but no index"
