"""What moving blocks costs: between the tiers, and beside the bare copies and transfers.

Both sides of every ratio move the same bytes in the same run, by turns, so that the ratios hold on
a machine whose speed varies.
"""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from rich.table import Table

from kvws.blocks.key import BLOCK_TOKENS
from kvws.blocks.table import Residency
from kvws.kernels.rotary import RotaryTable
from kvws.store.backend import open_storage
from kvws.store.block import NewBlock, StoreShape
from kvws.store.block_store import BlockStore
from kvws.store.posix import PosixStorage
from kvws.store.segment import FOOTER_BYTES, aligned_buffer
from kvws.store.storage import Backend, File, Storage
from kvws.tiers.geometry import PayloadGeometry
from kvws.tiers.host import HostTier
from kvws.tiers.lift import READ_THREADS, RUN_BLOCKS
from kvws.tiers.stage_in import HeldSlice, PageLoad, fill_pages

T = TypeVar("T")

SMOLLM2 = PayloadGeometry(layers=30, kv_heads=3, head_dim=64, dtype=torch.float32)

PUT_BLOCKS = 32
"""Blocks of one put."""

SYNCS_PER_PUT = 3
"""Payloads, rows and index are made durable one after the other."""

HOST_PASSES = 8
"""Fillings and copies in a round; they take milliseconds."""


@dataclass(frozen=True)
class StoreFigures:
    """Medians over the rounds.

    Attributes:
        storage: what moved the payloads.
        block_bytes: payload of one block.
        fill_bytes_per_s: host tier → pages of the pool, K rotated; `copy_bytes_per_s` is a plain
            copy of as many bytes.
        read_bytes_per_s: disk → host tier, cold and checked; `raw_read_bytes_per_s` are requests
            of the same sizes by as many threads, nothing checked.
        put_bytes_per_s: host tier → disk until it is durable; `raw_write_bytes_per_s` are
            sequential writes with as many syncs.
        fill_ratio, read_ratio, put_ratio: the one over the other, within a round.
    """

    storage: str
    block_bytes: int
    fill_bytes_per_s: float
    copy_bytes_per_s: float
    fill_ratio: float
    read_bytes_per_s: float
    raw_read_bytes_per_s: float
    read_ratio: float
    put_bytes_per_s: float
    raw_write_bytes_per_s: float
    put_ratio: float


@dataclass
class Pair:
    """Seconds of ours and of the bare way, one entry a round."""

    ours_s: list[float] = field(default_factory=list[float])
    bare_s: list[float] = field(default_factory=list[float])

    def run(self, ours: Callable[[], object], bare: Callable[[], object]) -> None:
        """Time both; who is first changes from round to round."""
        order = [(self.ours_s, ours), (self.bare_s, bare)]
        for seconds, work in order if len(self.ours_s) % 2 == 0 else reversed(order):
            begin = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - begin)

    def rates(self, size_bytes: int) -> tuple[float, float, float]:
        """Bytes per second of ours and of the bare way, and their ratio."""
        return (
            size_bytes / statistics.median(self.ours_s),
            size_bytes / statistics.median(self.bare_s),
            statistics.median(
                bare / ours for ours, bare in zip(self.ours_s, self.bare_s, strict=True)
            ),
        )


def measure_store(
    directory: Path,
    *,
    geometry: PayloadGeometry = SMOLLM2,
    blocks: int = 256,
    threads: int = READ_THREADS,
    run_blocks: int = RUN_BLOCKS,
    rounds: int = 5,
    backend: Backend = "auto",
    progress: Callable[[str], None] = lambda line: None,
    seed: int = 0,
) -> StoreFigures:
    """Measure stage-in from the host tier, stage-in from disk, and writing.

    Args:
        directory: where it writes 2 × `blocks` payloads at a time; empty again afterwards.
        geometry: of the blocks.
        blocks: moved in every round.
        threads: readers of the disk, on both sides.
        run_blocks: blocks of one read at most.
        seed: of the order in the view.
    """
    rng = random.Random(seed)  # noqa: S311 (not for secrets)
    host = HostTier(geometry, blocks * geometry.slot_bytes)
    slots = host.allocate(blocks)
    numbers = torch.arange(blocks * geometry.block_bytes // geometry.dtype.itemsize)
    payloads = numbers.sin().to(geometry.dtype).view(blocks, *geometry.shape)
    host.write(torch.tensor(slots), payloads)
    host_pair, read_pair, put_pair = Pair(), Pair(), Pair()

    stage_in, copied = StageIn(host, blocks), torch.zeros_like(payloads)
    stage_in.draw(slots, rng)
    stage_in.fill()  # the first writes of memory are not measured
    for _ in range(rounds * HOST_PASSES):
        host_pair.run(stage_in.fill, lambda: copied.copy_(payloads))

    storage, everything = open_storage(directory, backend), range(blocks)
    for index in range(rounds):
        progress(f"round {index + 1} of {rounds}: {blocks} blocks to {directory} and back")
        with tempfile.TemporaryDirectory(prefix="bench-", dir=directory) as scratch:
            disk = Disk(Path(scratch), storage, host, slots, threads, run_blocks)
            put_pair.run(disk.put, disk.raw_write)
            disk.forget_cached()
            read_pair.run(partial(disk.read, everything), partial(disk.raw_read, everything))
            disk.close()
    size_bytes = blocks * geometry.block_bytes
    return StoreFigures(
        storage.description,
        geometry.block_bytes,
        *host_pair.rates(size_bytes),
        *read_pair.rates(size_bytes),
        *put_pair.rates(size_bytes),
    )


def store_table(figures: Sequence[StoreFigures]) -> Table:
    """One line per measurement: three rates, each as a part of the bare one."""
    table = Table(box=None, header_style="bold")
    for name in (
        "storage", "block", "host → device", "memcpy", "", "disk → host", "raw read", "",
        "host → disk", "raw write", "",
    ):  # fmt: skip
        table.add_column(name, justify="right" if name != "storage" else "left")
    for f in figures:
        table.add_row(
            f.storage,
            f"{f.block_bytes / 1e3:,.0f} kB",
            *_cells(f.fill_bytes_per_s, f.copy_bytes_per_s, f.fill_ratio),
            *_cells(f.read_bytes_per_s, f.raw_read_bytes_per_s, f.read_ratio),
            *_cells(f.put_bytes_per_s, f.raw_write_bytes_per_s, f.put_ratio),
        )
    return table


def _cells(ours: float, bare: float, ratio: float) -> tuple[str, str, str]:
    return f"{ours / 1e6:,.0f} MB/s", f"{bare / 1e6:,.0f} MB/s", f"{ratio:.0%}"


@dataclass(frozen=True)
class _Pool:
    k_buffer: list[torch.Tensor]
    v_buffer: list[torch.Tensor]


class StageIn:
    """A view of blocks of the host tier in random order, each one moved to another position.

    Attributes:
        pool: that it is filled into.
    """

    def __init__(self, host: HostTier, blocks: int) -> None:
        """`blocks`: of the view."""
        geometry = host.geometry
        self._tokens = blocks * BLOCK_TOKENS
        self._host = host
        self._rotary = [_rotary_table(geometry.head_dim, 2 * self._tokens)] * geometry.layers
        shape = (self._tokens, geometry.kv_heads, geometry.head_dim)
        self.pool = _Pool(
            *([torch.zeros(shape, dtype=geometry.dtype) for _ in self._rotary] for _ in "kv")
        )
        self._pages: list[PageLoad] = []

    def draw(self, slots: Sequence[int], rng: random.Random) -> None:
        """Take the view's blocks from these slots of the host tier, as many as it has."""
        order, places = list(slots), list(range(len(slots)))
        rng.shuffle(order)
        rng.shuffle(places)
        self._pages = []
        for index, (slot, place) in enumerate(zip(order, places, strict=True)):
            block = Residency("", slot, first_position=self._tokens + index * BLOCK_TOKENS)
            piece = HeldSlice(block, 0, BLOCK_TOKENS)
            self._pages.append(PageLoad(index, (piece,), device_page=place))

    def fill(self) -> None:
        fill_pages(self._pages, self._host, self.pool, self._rotary, lambda layer: None)


def _rotary_table(head_dim: int, positions: int) -> RotaryTable:
    frequencies = 1e4 ** (-torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.arange(positions)[:, None] * frequencies
    return RotaryTable(angles.cos(), angles.sin(), interleaved=False)


class _Unlimited:
    def take(self, size_bytes: int) -> None: ...

    def give_back(self, size_bytes: int) -> None: ...


class Disk:
    """A block store, and one plain file of the same size beside it."""

    def __init__(
        self,
        directory: Path,
        storage: Storage,
        host: HostTier,
        slots: Sequence[int],
        threads: int,
        run_blocks: int,
    ) -> None:
        geometry = host.geometry
        self._directory = directory
        self._sectors = [host.sectors(slot) for slot in slots]
        self._threads = threads
        self._run_blocks = run_blocks
        self._slot_bytes = geometry.slot_bytes + FOOTER_BYTES
        row_bytes = geometry.layers * geometry.kv_heads * geometry.head_dim * 2
        self._row = memoryview(bytes(row_bytes))
        shape = StoreShape(geometry.slot_bytes, row_bytes, "exact", "mean-k/f16")
        self._store = BlockStore.open(storage, directory / "rank-0", shape, _Unlimited())
        self._raw: File | None = None

    def put(self) -> None:
        for numbers in _batches(len(self._sectors), PUT_BLOCKS):
            self._store.put(
                [NewBlock(n, bytes(32), 0, self._sectors[n], self._row) for n in numbers]
            )

    def read(self, numbers: Sequence[int]) -> None:
        """Blocks into their slots, adjacent ones together."""

        def one(run: Sequence[int]) -> None:
            self._store.read(run, [self._sectors[number] for number in run])

        self._in_threads(one, self._store.plan_reads(numbers, self._run_blocks))

    def raw_write(self) -> None:
        """Batches as large as those of `put`, each in as many pieces as `put` syncs."""
        size_bytes = len(self._sectors) * self._slot_bytes
        storage = PosixStorage(self._directory)
        self._raw = storage.open_segment(self._directory / "raw", create_bytes=size_bytes)
        footer = aligned_buffer(FOOTER_BYTES)
        for numbers in _batches(len(self._sectors), PUT_BLOCKS):
            pieces = -(-len(numbers) // SYNCS_PER_PUT)
            for begin in range(0, len(numbers), pieces):
                piece = numbers[begin : begin + pieces]
                buffers = [part for n in piece for part in (self._sectors[n], footer)]
                self._raw.write(buffers, piece[0] * self._slot_bytes)
                self._raw.sync()

    def raw_read(self, numbers: Sequence[int]) -> None:
        """As many requests of the same sizes as `read`, into the same memory."""
        raw = self._raw
        assert raw is not None, "nothing was written"

        def one(run: Sequence[int]) -> None:
            footers = aligned_buffer(FOOTER_BYTES)
            buffers = [part for n in run for part in (self._sectors[n], footers)]
            raw.read(buffers, run[0] * self._slot_bytes)

        self._in_threads(one, _adjacent(numbers, self._run_blocks))

    def forget_cached(self) -> None:
        """Take the files out of the page cache, where one without direct I/O has put them."""
        for path in [*self._directory.rglob("*.kv"), self._directory / "raw"]:
            descriptor = os.open(path, os.O_RDONLY)
            with contextlib.closing(os.fdopen(descriptor)):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        self._store.close()
        if self._raw is not None:
            self._raw.close()

    def _in_threads(self, work: Callable[[T], None], runs: Iterable[T]) -> None:
        with ThreadPoolExecutor(self._threads) as pool:
            list(pool.map(work, runs))


def _batches(count: int, size: int) -> list[range]:
    return [range(begin, min(begin + size, count)) for begin in range(0, count, size)]


def _adjacent(numbers: Sequence[int], most: int) -> list[list[int]]:
    """Numbers in ascending runs without gaps, of at most so many."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1 and len(runs[-1]) < most:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs
