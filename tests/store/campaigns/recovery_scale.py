"""How long a store of many blocks takes to open after a torn write, and in how much memory.

The index is written by the store itself; payloads are not (their segments are sparse files), so
that a disk of any size will do. Each opening runs in a fresh process.
"""

from __future__ import annotations

import argparse
import json
import mmap
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kvws.store.block import NewBlock, StoreShape
from kvws.store.block_store import BlockStore
from kvws.store.posix import PosixFile, PosixStorage
from kvws.store.storage import SECTOR_BYTES, File
from tests.store.campaigns.oracle import Budget

ROW_FORMAT = "mean-k/f16"
BATCH_BLOCKS = 256
TORN_BYTES = 1000


@dataclass(frozen=True)
class Recovery:
    """One opening. Memory is what it added to the process at its peak."""

    blocks: int
    cut_bytes: int
    index_bytes: int
    open_s: float
    open_rss_bytes: int
    rows_bytes: int
    rows_s: float
    rows_rss_bytes: int

    def __str__(self) -> str:
        index = (
            f"recovery: {self.blocks:,} blocks, index of {self.index_bytes / 1e6:.1f} MB: open in "
            f"{self.open_s:.2f} s ({self.blocks / self.open_s:,.0f} blocks/s), "
            f"{self.open_rss_bytes / 2**20:.1f} MiB ({self.open_rss_bytes / self.blocks:.0f} "
            f"B/block), {self.cut_bytes} torn bytes cut"
        )
        if not self.rows_bytes:
            return index
        return (
            f"{index}; rows of {self.rows_bytes / 1e6:.0f} MB: {self.rows_s:.2f} s "
            f"({self.rows_bytes / self.rows_s / 1e6:.0f} MB/s), "
            f"{self.rows_rss_bytes / 2**20:.1f} MiB more"
        )


class SparseSegment(PosixFile):
    """A segment whose writes are forgotten."""

    def write(self, buffers: Sequence[memoryview], offset: int) -> None:
        pass

    def sync(self) -> None:
        pass


class SparseStorage(PosixStorage):
    """Segments take no space."""

    def open_segment(self, path: Path, *, create_bytes: int | None = None) -> File:
        if create_bytes is not None:
            with path.open("xb") as file:
                file.truncate(create_bytes)
        descriptor = super().open_log(path)
        assert isinstance(descriptor, PosixFile)
        return SparseSegment(descriptor._descriptor, aligned=True)


def build(
    folder: Path, blocks: int, row_bytes: int, payload_bytes: int = SECTOR_BYTES
) -> None:
    """Write a store of so many blocks whose index ends in half a frame."""
    shape = StoreShape(payload_bytes, row_bytes, "exact", ROW_FORMAT)
    store = _open(SparseStorage(folder), folder, shape)
    memory = memoryview(mmap.mmap(-1, payload_bytes))
    row = memoryview(bytes(row_bytes))
    for first in range(0, blocks, BATCH_BLOCKS):
        store.put(
            [
                NewBlock(
                    number=number,
                    page_hash=number.to_bytes(32, "little"),
                    first_position=-1,
                    payload=memory,
                    row=row,
                )
                for number in range(first, min(first + BATCH_BLOCKS, blocks))
            ]
        )
    store.close()
    index = folder / "rank-0" / "index.log"
    whole = index.read_bytes()
    with index.open("ab") as file:
        file.write(whole[:TORN_BYTES])


def measure(folder: Path, row_bytes: int, *, read_rows: bool) -> Recovery:
    """Open the store in a fresh process."""
    options = ["--opener", str(folder), "--row-bytes", str(row_bytes)]
    command = [sys.executable, "-m", "tests.store.campaigns.recovery_scale", *options]
    command += ["--read-rows"] if read_rows else []
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return Recovery(**json.loads(done.stdout))


def _open(storage: PosixStorage, folder: Path, shape: StoreShape) -> BlockStore:
    return BlockStore.open(storage, folder / "rank-0", shape, Budget(), segment_blocks=1024)


def _measure_here(folder: Path, row_bytes: int, read_rows: bool) -> Recovery:
    index_bytes = (folder / "rank-0" / "index.log").stat().st_size
    storage = PosixStorage(folder)
    before = start_of_peak()
    begin_s = time.perf_counter()
    store = _open(storage, folder, StoreShape(SECTOR_BYTES, row_bytes, "exact", ROW_FORMAT))
    open_s = time.perf_counter() - begin_s
    opened = peak_bytes()
    before_rows = start_of_peak()
    begin_s = time.perf_counter()
    rows_bytes = sum(row.nbytes for _, row in store.read_rows()) if read_rows else 0
    rows_s = time.perf_counter() - begin_s
    return Recovery(
        blocks=len(store.blocks()),
        cut_bytes=store.recovery.cut_bytes,
        index_bytes=index_bytes,
        open_s=open_s,
        open_rss_bytes=opened - before,
        rows_bytes=rows_bytes,
        rows_s=rows_s,
        rows_rss_bytes=peak_bytes() - before_rows,
    )


def start_of_peak() -> int:
    """Resident bytes of this process; its peak counts from here on."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if "VmHWM" in line)


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/crash recovery")
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--row-bytes", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--read-rows", action="store_true")
    parser.add_argument("--folder", type=Path, help="on the disk to use")
    parser.add_argument("--opener", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.opener:
        found = _measure_here(options.opener, options.row_bytes, options.read_rows)
        print(json.dumps(asdict(found)))
        return
    with tempfile.TemporaryDirectory(prefix="kvws-recovery-", dir=options.folder) as folder:
        build(Path(folder), options.blocks, options.row_bytes)
        for _ in range(options.rounds):
            found = measure(Path(folder), options.row_bytes, read_rows=options.read_rows)
            print(found, flush=True)
            if found.blocks != options.blocks:
                sys.exit(f"recovery: VIOLATION {found.blocks} blocks instead of {options.blocks}")


if __name__ == "__main__":
    main()
