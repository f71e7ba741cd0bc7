"""Damage to the files of a closed store: every bit, every length, and many random ones.

Each is either without effect or detected: `CorruptBlock`, a damaged row, `StoreFormatError`, or a
block that is missing (or an older version of it, or one that was dropped) while `recovery` says
that something was lost. Wrong bytes are never returned and no other error is raised.
"""

from __future__ import annotations

import mmap
import random
from dataclasses import dataclass
from pathlib import Path

from kvws.errors import CorruptBlock, OtherModel, StoreFormatError
from kvws.store.block import StoredBlock
from kvws.store.block_store import BlockStore
from kvws.store.segment import SegmentLayout, segment_name
from kvws.store.storage import SECTOR_BYTES
from tests.store.campaigns.oracle import (
    FOLDER,
    SHAPE,
    Oracle,
    Violation,
    open_store,
    read_undamaged,
)
from tests.store.campaigns.report import Report, arguments, end_when_stuck, finish
from tests.store.simulated_disk import SimulatedDisk

REOPEN_EVERY = 40
"""One in so many random flips is seen by a restart instead of by a running store."""
MAX_VIOLATIONS = 20
BUFFER = memoryview(mmap.mmap(-1, SHAPE.payload_bytes))


@dataclass(frozen=True)
class Victim:
    """A store that was closed, and what it held."""

    disk: SimulatedDisk
    oracle: Oracle

    def files(self) -> list[Path]:
        return [FOLDER / name for name in self.disk.list_directory(FOLDER)]

    def small_files(self) -> list[Path]:
        """Manifest, log and rows: what an open reads."""
        return [path for path in self.files() if path.suffix != ".kv"]


def small_victim(seed: int, blocks: int = 5, *, reindexed: bool) -> Victim:
    """A store with some blocks, of which one was replaced and one dropped.

    Args:
        reindexed: rows were made anew when all but the replacement had been put.
    """
    disk, oracle = SimulatedDisk(seed), Oracle()
    disk.make_directory(FOLDER.parent)
    store = open_store(disk)
    for numbers in (range(blocks - 2), range(blocks - 2, blocks), [1]):
        if reindexed and numbers == [1]:
            store.close()
            store = open_store(disk, other_rows=True)
        batch = [oracle.offer(number) for number in numbers]
        oracle.begin({offered.number: offered for offered in batch})
        store.put([offered.new_block(store.shape) for offered in batch])
        oracle.acknowledge()
    store.drop([0])
    del oracle.settled[0]
    store.close()
    return Victim(disk, oracle)


def check_damaged(victim: Victim) -> str:
    """Open the victim and compare; what came of the damage.

    Raises:
        Violation: it did some harm in silence.
    """
    try:
        store = open_store(victim.disk)
    except (StoreFormatError, OtherModel):
        return "refused"
    held, damaged = read_undamaged(store, victim.oracle.ever)
    recovery = store.recovery
    reported = bool(recovery.cut_bytes or recovery.skipped_bytes or recovery.dropped_blocks)
    settled = {n: c for n, c in victim.oracle.settled.items() if n not in damaged}
    store.close()
    if held == settled:
        return "detected" if damaged else "reported" if reported else "harmless"
    if not reported:
        raise Violation(f"blocks {sorted(held)} instead of {sorted(settled)}, unreported")
    return "reported"


class BitFlips:
    """The campaign: counts what the damage led to."""

    def __init__(self, seed: int) -> None:
        self.report = Report("flips", seed, "flips")

    def flip_every_bit(self, stride: int = 1) -> None:
        """Flip each bit (or every `stride`-th) of the files that an open reads, and reopen."""
        for victim in self._victims():
            for path in victim.small_files():
                for bit in range(0, 8 * len(victim.disk.content(path)), stride):
                    self._flip_and_reopen(victim, path, bit)

    def truncate_everywhere(self, stride: int = 1) -> None:
        """Cut each file at every length (or every `stride`-th, and beside sector bounds)."""
        for victim in self._victims():
            for path in victim.files():
                for length in range(len(victim.disk.content(path))):
                    if length % stride and (length + 1) % SECTOR_BYTES > 2:
                        continue
                    damaged = victim.disk.kill()
                    del damaged.content(path)[length:]
                    self.report.count("cuts")
                    self._reopen(Victim(damaged, victim.oracle), f"{path.name} cut to {length}")

    def flip_random_bits(self, flips: int) -> None:
        """Flip random bits of every file, mostly under a store that is open."""
        chance = random.Random(self.report.seed)
        for victim in self._victims(blocks=12):
            self._flip_random_bits(victim, flips // 2, chance)

    def _victims(self, blocks: int = 5) -> list[Victim]:
        return [small_victim(self.report.seed, blocks, reindexed=r) for r in (False, True)]

    def _flip_random_bits(self, victim: Victim, flips: int, chance: random.Random) -> None:
        running = victim.disk.kill()
        store = open_store(running)
        sites = [site for block in store.blocks() for site in _sites(block, store._layout)]
        for index in range(flips):
            if len(self.report.violations) > MAX_VIOLATIONS:
                break
            if index % REOPEN_EVERY:
                number, path, first_byte, size_bytes = chance.choice(sites)
                bit = 8 * first_byte + chance.randrange(8 * size_bytes)
                self._flip_under(store, running, victim.oracle, number, path, bit)
            else:
                path = chance.choice(victim.small_files())
                bit = chance.randrange(8 * len(victim.disk.content(path)))
                self._flip_and_reopen(victim, path, bit)

    def _flip_and_reopen(self, victim: Victim, path: Path, bit: int) -> None:
        damaged = victim.disk.kill()
        damaged.content(path)[bit // 8] ^= 1 << bit % 8
        self.report.count("flips")
        self._reopen(Victim(damaged, victim.oracle), f"{path.name} bit {bit}")

    def _reopen(self, victim: Victim, damage: str) -> None:
        end_when_stuck()
        try:
            self.report.count(check_damaged(victim))
        except Exception as error:
            self._violation(damage, error)

    def _flip_under(
        self,
        store: BlockStore,
        disk: SimulatedDisk,
        oracle: Oracle,
        number: int,
        path: Path,
        bit: int,
    ) -> None:
        """Damage one block's slot or row, ask the open store for it, and undo the damage."""
        data = disk.content(path)
        data[bit // 8] ^= 1 << bit % 8
        self.report.count("flips")
        try:
            if path.suffix == ".mk":
                found = dict(store.read_rows()).get(number)
                detected = number in store.damaged_rows
                if detected == (found is not None) or not detected:
                    raise Violation(f"the damaged row of block {number} passed")
            else:
                detected = _read_is_refused(store, number)
                if not detected and oracle.settled[number].payload != bytes(BUFFER):
                    raise Violation(f"block {number} reads back wrong")
            self.report.count("detected" if detected else "harmless")
        except Exception as error:
            self._violation(f"{path.name} bit {bit}, running", error)
        finally:
            data[bit // 8] ^= 1 << bit % 8

    def _violation(self, damage: str, error: Exception) -> None:
        self.report.violations.append(f"{damage}: {type(error).__name__}: {error}")


def _sites(block: StoredBlock, layout: SegmentLayout) -> list[tuple[int, Path, int, int]]:
    """Where a block lies: (number, file, first byte, bytes) of its slot and of its row."""
    segment = layout.segment(block.slot)
    slot = FOLDER / segment_name(segment)
    rows = FOLDER / layout.rows_name(segment)
    return [
        (block.number, slot, layout.payload_offset(block.slot), layout.slot_bytes),
        (block.number, rows, layout.row_offset(block.slot), layout.shape.row_bytes),
    ]


def _read_is_refused(store: BlockStore, number: int) -> bool:
    try:
        store.read((number,), [BUFFER])
    except CorruptBlock as error:
        return error.numbers == (number,)
    return False


def main() -> None:
    options = arguments("flips", count=1_000_000, cut_stride=7)
    campaign = BitFlips(options.seed)
    campaign.flip_every_bit()
    campaign.truncate_everywhere(options.cut_stride)
    campaign.flip_random_bits(options.count - campaign.report.counts["flips"])
    finish(campaign.report)


if __name__ == "__main__":
    main()
