"""What a closed step leaves behind: the pages it computed and names become blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kvws.blocks.key import BLOCK_TOKENS
from kvws.blocks.ledger import OpenStep
from kvws.blocks.table import RAW, BlockId, Residency
from kvws.errors import HostTierFull
from kvws.kernels.mean_k import mean_rotated, raw_rotation
from kvws.kernels.rotary import RotaryTable
from kvws.recall.index import MeanKIndex
from kvws.tiers.durable import DurableBlocks
from kvws.tiers.repository import Repository, importance_of

Named = Sequence[tuple[str, int, int]]
"""(page hash, block number, index of the page in its prompt), in log order."""


class Adoption:
    """Enters blocks into the repository, the index and the queue of the disk."""

    def __init__(
        self,
        repository: Repository,
        durable: DurableBlocks | None,
        rotary: Sequence[RotaryTable],
        index_of: Callable[[str], MeanKIndex],
    ) -> None:
        """`index_of`: a workspace's index, created at first use."""
        self._repository = repository
        self._durable = durable
        self._rotary = list(rotary)
        self._index_of = index_of

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
        adopted: dict[int, Residency] = {}
        twins: dict[int, BlockId] = {}
        with repository.lock:
            for page_hash, number, page_index in new:
                slot = step.staged.pop(page_hash, None)
                first_position = page_index * BLOCK_TOKENS
                if slot is None:
                    copied = self._copy_of_twin(step, page_hash)
                    if copied is None:
                        break
                    twins[number], slot, first_position = copied
                adopted[number] = Residency(page_hash, slot, first_position)
            repository.host.free(list(step.staged.values()))
        # Nobody else knows these slots yet, so the scheduler need not wait for the arithmetic.
        rows = self._index_rows(adopted, twins)
        with repository.lock:
            self._enter(workspace, adopted, rows)
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

    def _copy_of_twin(self, step: OpenStep, page_hash: str) -> tuple[BlockId, int, int] | None:
        """(twin, slot, first position) of a copy of the block that was computed as this page: the
        prefix tree shared the page, so that this step did not compute it again."""
        repository = self._repository
        block = repository.table.computed_as(page_hash)
        twin = repository.table.find(block) if block is not None else None
        if block is None or twin is None or twin.slot is None or twin.first_position == RAW:
            return None  # RAW: what came back from a quantised tier is not what was computed
        repository.table.pin(twin)
        try:
            (slot,) = repository.allocate(1)
        except HostTierFull:
            step.refused_pages += 1
            return None
        finally:
            repository.unpin([twin])
        repository.host.payloads[slot].copy_(repository.host.payloads[twin.slot])
        return block, slot, twin.first_position

    def _index_rows(
        self, blocks: dict[int, Residency], twins: dict[int, BlockId]
    ) -> list[torch.Tensor]:
        """Index row per block, [layers, kv_heads, head_dim] float32; a copy has its twin's."""
        computed = [block for number, block in blocks.items() if number not in twins]
        means = iter(self._block_means(computed))
        rows: list[torch.Tensor] = []
        for number in blocks:
            if number in twins:
                workspace, twin = twins[number]
                row = self._index_of(workspace).read(twin)
                assert row is not None, f"block {twin} of {workspace} has no index row"
                rows.append(row.clone())
            else:
                rows.append(next(means))
        return rows

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
            mean_rotated(
                self._repository.host.keys(layer).index_select(0, slots), to_raw[id(table)]
            )
            for layer, table in enumerate(self._rotary)
        ]
        return list(torch.stack(per_layer, dim=1))

    def _enter(
        self, workspace: str, adopted: dict[int, Residency], rows: Sequence[torch.Tensor]
    ) -> None:
        """Blocks and their index rows become part of the workspace. Lock held."""
        repository = self._repository
        entered: list[int] = []
        kept: list[torch.Tensor] = []
        for (number, residency), row in zip(adopted.items(), rows, strict=True):
            if repository.table.find((workspace, number)) is not None:
                assert residency.slot is not None
                repository.host.free([residency.slot])  # another step has become it meanwhile
                continue
            (residency.importance,) = importance_of(row.unsqueeze(0))
            repository.add((workspace, number), residency)
            if self._durable is not None:
                self._durable.save((workspace, number), residency, row)
            entered.append(number)
            kept.append(row)
        if entered:
            self._index_of(workspace).write(entered, torch.stack(kept))
