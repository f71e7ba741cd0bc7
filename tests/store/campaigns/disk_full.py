"""A file system of 8 MiB that is really full, at every step of the store's work.

A store that meets it raises, keeps what it has, and goes on as soon as there is space; no file is
left half grown.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kvws.errors import DiskTierFull
from kvws.store.block_store import BlockStore
from kvws.store.posix import PosixStorage
from kvws.store.storage import SECTOR_BYTES
from tests.store.campaigns.oracle import (
    SEGMENT_BLOCKS,
    SHAPE,
    Budget,
    Oracle,
    Violation,
    open_store,
)
from tests.store.campaigns.report import Report, arguments, end_when_stuck, finish

SIZE_MIB = 8
SEGMENT_BYTES = SEGMENT_BLOCKS * (SHAPE.payload_bytes + SECTOR_BYTES)


class NotPermitted(Exception):
    """This process may not mount a file system."""


@contextlib.contextmanager
def small_file_system() -> Iterator[Path]:
    """A tmpfs of `SIZE_MIB`.

    Raises:
        NotPermitted: mounting needs a privilege that is missing.
    """
    with tempfile.TemporaryDirectory(prefix="kvws-full-") as folder:
        command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_MIB}m", "tmpfs", folder]
        mounted = subprocess.run(command, capture_output=True, text=True)
        if mounted.returncode:
            raise NotPermitted(mounted.stderr.strip())
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "--lazy", folder], check=True)  # a store may be open


class DiskFull:
    """The campaign on a mounted file system."""

    def __init__(self, seed: int, mount: Path) -> None:
        self.report = Report("disk-full", seed, "rounds")
        self._chance = random.Random(seed)
        self._filler = mount / "filler"
        self._folder = mount / "rank-0"
        self._storage = PosixStorage(mount)
        self._budget = Budget()
        self._oracle = Oracle()

    def run(self, rounds: int) -> Report:
        store = open_store(self._storage, self._folder, self._budget)
        for _ in range(rounds):
            end_when_stuck()
            store = self._fill_up(store)
            store = self._make_room(store)
            self.report.count("rounds")
        store.close()
        return self.report

    def _fill_up(self, store: BlockStore) -> BlockStore:
        """Put until it fails, with less and less space left beside."""
        self._fill(leave_bytes=self._chance.randrange(0, 40) * SECTOR_BYTES)
        for _ in range(10_000):
            if not self._put(store):
                break
        else:
            raise Violation("a full disk took 10,000 puts")
        if self._chance.random() < 0.5:
            self._fill(leave_bytes=0)
            self._put(store)
        if self._chance.random() < 0.5:
            store.close()
            self._budget = Budget()
            store = self._reopen()
        return store

    def _reopen(self) -> BlockStore:
        """A full disk may refuse to open a store for writing; it must not harm it."""
        other_rows = self._chance.random() < 0.5
        for wanted in (other_rows, other_rows, False):
            try:
                store = open_store(self._storage, self._folder, self._budget, other_rows=wanted)
                break
            except (OSError, DiskTierFull):
                self.report.count("opens refused")
                self._filler.unlink(missing_ok=True)
        else:
            raise Violation("the store cannot be opened although there is space")
        self.report.count("rows made anew", wanted)
        self._oracle.check_restart(store)
        return store

    def _make_room(self, store: BlockStore) -> BlockStore:
        """Drop blocks, or let other programs free space: both make puts work again."""
        live = sorted(self._oracle.settled)
        if live and self._chance.random() < 0.6:
            numbers = self._chance.sample(live, self._chance.randint(1, len(live)))
            if not self._drop(store, numbers):
                self._filler.unlink(missing_ok=True)
                if not self._drop(store, numbers):
                    raise Violation("a drop fails although there is space")
            with contextlib.suppress(OSError):
                store.compact()
            self._check(store)
        else:
            self._filler.unlink(missing_ok=True)
        for _ in range(2):
            if self._put(store):
                return store
            self._filler.unlink(missing_ok=True)
            live = sorted(self._oracle.settled)
            if not self._drop(store, live[: len(live) // 2]):
                raise Violation("a drop fails although there is space")
            store.compact()
        raise Violation("puts still fail although there is space")

    def _put(self, store: BlockStore) -> bool:
        first = self._oracle.next_number
        numbers = range(first, first + self._chance.randint(1, 2 * SEGMENT_BLOCKS))
        batch = [self._oracle.offer(number) for number in numbers]
        self._oracle.begin({offered.number: offered for offered in batch})
        try:
            store.put([offered.new_block(store.shape) for offered in batch])
        except (OSError, DiskTierFull) as error:
            self._refused(store, error)
            return False
        self._oracle.acknowledge()
        return True

    def _drop(self, store: BlockStore, numbers: list[int]) -> bool:
        self._oracle.begin(dict.fromkeys(numbers))
        try:
            store.drop(numbers)
        except OSError as error:
            self._refused(store, error)
            return False
        self._oracle.acknowledge()
        return True

    def _refused(self, store: BlockStore, error: Exception) -> None:
        self.report.count("refusals")
        if isinstance(error, OSError) and error.errno != errno.ENOSPC:
            raise Violation(f"a full disk raised {error!r}") from error
        self._oracle.fail()
        self._check(store)

    def _check(self, store: BlockStore) -> None:
        self._oracle.check_running(store)
        for path in self._folder.iterdir():
            if path.suffix == ".kv" and path.stat().st_size != SEGMENT_BYTES:
                raise Violation(f"{path.name} is left with {path.stat().st_size} bytes")

    def _fill(self, leave_bytes: int) -> None:
        """Leave so many bytes free (or fewer)."""
        with self._filler.open("ab") as filler:
            free = os.statvfs(self._folder.parent)
            size_bytes = free.f_bavail * free.f_frsize - leave_bytes
            if size_bytes > 0:
                os.posix_fallocate(filler.fileno(), filler.tell(), size_bytes)


def attack(seed: int, rounds: int) -> Report:
    """Run the campaign.

    Raises:
        NotPermitted: see `small_file_system`.
    """
    with small_file_system() as mount:
        campaign = DiskFull(seed, mount)
        try:
            return campaign.run(rounds)
        except Exception as error:
            campaign.report.violations.append(f"{type(error).__name__}: {error}")
            return campaign.report


def main() -> None:
    options = arguments("disk-full", rounds=300, in_namespace=0)
    try:
        report = attack(options.seed, options.rounds)
    except NotPermitted as error:
        if options.in_namespace:
            sys.exit(f"disk-full: cannot mount: {error}")
        own = [sys.executable, "-m", "tests.store.campaigns.disk_full", *sys.argv[1:]]
        os.execvp("unshare", ["unshare", "-rm", *own, "--in-namespace", "1"])
    finish(report)


if __name__ == "__main__":
    main()
