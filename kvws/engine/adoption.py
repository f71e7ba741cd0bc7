"""What a closed step leaves behind: the pages it computed and names become blocks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from kvws.blocks.key import BLOCK_TOKENS
from kvws.blocks.ledger import OpenStep
from kvws.blocks.table import Residency
from kvws.errors import HostTierFull
from kvws.recall.index import BlockIndex
from kvws.recall.signals.enabled import EnabledSignals
from kvws.tiers.durable import DurableBlocks
from kvws.tiers.repository import Repository

Named = Sequence[tuple[str, int, int]]
"""(page hash, block number, index of the page in its prompt), in log order."""


class _ComputedBlock(NamedTuple):
    """A staged page that becomes a block: its slot, and the position baked into its K."""

    number: int
    page_hash: str
    page: int
    first_position: int


class _CopiedBlock(NamedTuple):
    """A block that is a copy of an earlier one, index row included."""

    number: int
    residency: Residency
    row: torch.Tensor


class Adoption:
    """Enters blocks into the repository, the index and the queue of the disk."""

    def __init__(
        self,
        repository: Repository,
        durable: DurableBlocks | None,
        signals: EnabledSignals,
        index_of: Callable[[str], BlockIndex],
    ) -> None:
        """`index_of`: a workspace's index, created at first use."""
        self._repository = repository
        self._durable = durable
        self._signals = signals
        self._index_of = index_of
        self._steps_under_way = 0
        self._one_is_done = threading.Condition(repository.lock)

    @contextmanager
    def under_way(self) -> Generator[None]:
        """To be held from before a step leaves the ledger until it is adopted: meanwhile some of
        its pages are nobody's."""
        with self._one_is_done:
            self._steps_under_way += 1
        try:
            yield
        finally:
            with self._one_is_done:
                self._steps_under_way -= 1
                self._one_is_done.notify_all()

    def wait_until_done(self) -> None:
        """Wait until no step is under way; the repository's lock, held once, is let go meanwhile
        and held in the end."""
        self._one_is_done.wait_for(lambda: not self._steps_under_way)

    def adopt(self, step: OpenStep, named: Named) -> list[int]:
        """Make blocks of a closed step's staged pages, and free the others.

        The first name without a page ends the run: a block behind a gap is one that no line
        would ever reach.

        Args:
            step: no longer in the ledger. Mutates: `staged`, `refused_pages`.

        Returns:
            Numbers of those named blocks that are here, in the order of their names.
        """
        repository, workspace = self._repository, step.workspace
        with repository.lock:
            new = [
                name for name in named if repository.table.find((workspace, name[1])) is None
            ]
        self._bring_up_twins([page for page, _, _ in new if page not in step.staged])
        computed: list[_ComputedBlock] = []
        copied: list[_CopiedBlock] = []
        with repository.lock:
            for page_hash, number, page_index in new:
                page = step.staged.pop(page_hash, None)
                if page is not None:
                    first_position = page_index * BLOCK_TOKENS
                    computed.append(_ComputedBlock(number, page_hash, page, first_position))
                    continue
                copy = self._copy_of_twin(step, number, page_hash)
                if copy is None:
                    break
                copied.append(copy)
            repository.host.free_pages_of(list(step.staged.values()))
        # Nobody else knows these pages yet, so the scheduler need not wait for the arithmetic.
        rows = dict(zip((block.number for block in computed), self._rows(computed), strict=True))
        blocks = self._settle(step, computed)
        for copy in copied:
            blocks[copy.number], rows[copy.number] = copy.residency, copy.row
        with repository.lock:
            self._enter(workspace, blocks, rows)
            return [n for _, n, _ in named if repository.table.find((workspace, n)) is not None]

    def _bring_up_twins(self, pages: Sequence[str]) -> None:
        """Read those blocks from disk that were computed as these pages before."""
        if self._durable is None or not pages:
            return
        with self._repository.lock:
            twins = [t for page in pages if (t := self._repository.table.computed_as(page))]
            try:
                lifts = [
                    lift for ws, n in twins for lift in self._durable.lifter.lift(ws, [n])
                ]
            except HostTierFull:
                return
        for lift in lifts:
            lift.done.exception()  # waits; a twin that cannot be read is no twin

    def _copy_of_twin(
        self, step: OpenStep, number: int, page_hash: str
    ) -> _CopiedBlock | None:
        """A copy of the block that was computed as this page: the prefix tree shared the page, so
        that this step did not compute it again."""
        repository = self._repository
        block = repository.table.computed_as(page_hash)
        twin = repository.table.find(block) if block is not None else None
        if block is None or twin is None or twin.slot is None:
            return None
        row = self._index_of(block[0]).read(block[1])
        assert row is not None, f"block {block} has no index row"
        repository.table.pin(twin)
        try:
            (slot,) = repository.allocate(1, step.workspace)
        except HostTierFull:
            step.refused_pages += 1
            return None
        finally:
            repository.unpin([twin])
        repository.host.copy(twin.slot, slot)
        residency = Residency(page_hash, slot, twin.first_position)
        return _CopiedBlock(number, residency, row)

    def _rows(self, blocks: Sequence[_ComputedBlock]) -> torch.Tensor:
        """Index rows [blocks, row_bytes] uint8."""
        host = self._repository.host
        pages = torch.tensor([block.page for block in blocks], dtype=torch.int64)
        first = torch.tensor([block.first_position for block in blocks], dtype=torch.int64)
        return self._signals.rows(
            lambda layer, some: host.page_keys(layer).index_select(0, pages[some]), first
        )

    def _settle(self, step: OpenStep, computed: Sequence[_ComputedBlock]) -> dict[int, Residency]:
        """Give computed pages their place among the blocks, by block number.

        In a quantised tier without room for all of them none is kept.
        """
        repository, host = self._repository, self._repository.host
        pages = [block.page for block in computed]
        if host.pages_become_blocks_in_place:
            slots = pages
        else:
            with repository.lock:
                try:
                    slots = repository.allocate(len(pages), step.workspace)
                except HostTierFull:
                    step.refused_pages += len(pages)
                    slots = []
            if slots:
                host.encode(pages, [block.first_position for block in computed], slots)
            with repository.lock:
                host.free_pages_of(pages)
        return {
            block.number: Residency(
                block.page_hash, slot, host.position_of_blocks(block.first_position)
            )
            for block, slot in zip(computed[: len(slots)], slots, strict=True)
        }

    def _enter(
        self, workspace: str, blocks: dict[int, Residency], rows: dict[int, torch.Tensor]
    ) -> None:
        """Blocks and their index rows become part of the workspace. Lock held."""
        repository = self._repository
        entered: list[int] = []
        for number in sorted(blocks):
            residency, row = blocks[number], rows[number]
            if repository.table.find((workspace, number)) is not None:
                assert residency.slot is not None
                repository.host.free([residency.slot])  # another step has become it meanwhile
                continue
            (residency.importance,) = self._signals.importance(row.unsqueeze(0))
            repository.add((workspace, number), residency)
            if self._durable is not None:
                self._durable.save((workspace, number), residency, row)
            entered.append(number)
        if entered:
            kept = torch.stack([rows[number] for number in entered])
            self._index_of(workspace).write(entered, kept)
