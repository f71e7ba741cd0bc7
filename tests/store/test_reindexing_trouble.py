"""Damaged payloads, too little space and errors while rows are made anew."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvws.errors import DiskTierFull
from kvws.store.block import Reindex, StoredBlock
from kvws.store.posix import PosixStorage
from kvws.store.segment import FOOTER_BYTES
from kvws.store.storage import File
from tests.store.rows import row_of
from tests.store.store_place import (
    OTHER_ROWS,
    SEGMENT_BLOCKS,
    SHAPE,
    Budget,
    Place,
    assert_holds,
    files,
    fill,
    reopened,
)

SEGMENTS = 4
SLOT_BYTES = SHAPE.payload_bytes + FOOTER_BYTES
ROWS_FILE_BYTES = SEGMENT_BLOCKS * OTHER_ROWS.row_bytes
Blocks = Iterator[tuple[StoredBlock, memoryview]]


def assert_unchanged(place: Place, held: dict[int, int]) -> None:
    """The store opens with its old rows, and the budget has its share back."""
    assert place.budget.taken_bytes == 0
    place.budget.limit_bytes = Budget().limit_bytes
    store = place.open()
    assert store.reindexing is None
    assert_holds(store, held)
    store.close()


@pytest.mark.parametrize("offset", [0, SHAPE.payload_bytes - 1, SHAPE.payload_bytes + 50])
def test_a_damaged_block_is_given_up_counted_and_told(
    place: Place, held: dict[int, int], offset: int, caplog: pytest.LogCaptureFixture
) -> None:
    place.damage("segment-000001.kv", 2 * SLOT_BYTES + offset)
    with caplog.at_level(logging.WARNING, "kvws.store"):
        store = reopened(place)
    del held[6]
    assert_holds(store, held)
    assert store.reindexing is not None and store.reindexing.unreadable_blocks == (6,)
    assert "[6]" in caplog.text and str(place.path) in caplog.text
    fill(store, [6], version=3)
    store.close()
    store = place.open(OTHER_ROWS)
    assert_holds(store, held | {6: 3})
    store.close()


def test_blocks_whose_rows_were_damaged_have_rows_again(
    place: Place, held: dict[int, int]
) -> None:
    place.damage("rows-000000.mk", 0)
    (place.path / "rows-000001.mk").unlink()
    store = reopened(place)
    assert_holds(store, held)
    store.close()


def failing_reads(
    monkeypatch: pytest.MonkeyPatch, offset: int, error: int, times: int
) -> None:
    """Reads of the second segment that touch a byte fail so many times."""
    opened = PosixStorage.open_segment
    left = times

    def open_segment(self: PosixStorage, path: Path, **options: int) -> File:
        file = opened(self, path, **options)
        inner = file.read

        def read(buffers: list[memoryview], begin: int) -> None:
            nonlocal left
            end = begin + sum(buffer.nbytes for buffer in buffers)
            if path.name == "segment-000001.kv" and begin <= offset < end and left:
                left -= 1
                raise OSError(error, "the test's")
            inner(buffers, begin)

        file.read = read  # type: ignore[method-assign]
        return file

    monkeypatch.setattr(PosixStorage, "open_segment", open_segment)


def test_a_block_that_cannot_be_read_is_given_up_and_its_neighbours_are_not(
    place: Place, held: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_reads(monkeypatch, 2 * SLOT_BYTES, errno.EIO, times=1000)
    store = reopened(place)
    monkeypatch.undo()
    assert store.reindexing is not None and store.reindexing.unreadable_blocks == (6,)
    del held[6]
    assert_holds(store, held)
    store.close()


def test_a_read_that_fails_in_passing_costs_nothing(
    place: Place, held: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_reads(monkeypatch, SLOT_BYTES, errno.EIO, times=2)
    store = reopened(place)
    assert_holds(store, held)
    store.close()


def test_an_error_that_is_no_damage_gives_nothing_up(
    place: Place, held: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_reads(monkeypatch, SLOT_BYTES, errno.EMFILE, times=1000)
    with pytest.raises(OSError, match="the test's"):
        reopened(place)
    monkeypatch.undo()
    assert_unchanged(place, held)


# --- too little space, and errors of the one who makes rows


@pytest.mark.parametrize("missing_bytes", [1, 2 * ROWS_FILE_BYTES, SEGMENTS * ROWS_FILE_BYTES])
def test_a_budget_without_room_for_two_sets_of_rows_is_told(
    place: Place, held: dict[int, int], missing_bytes: int
) -> None:
    store = place.open()
    needed_bytes = store.allocated_bytes + SEGMENTS * ROWS_FILE_BYTES
    store.close()
    before = files(place)
    place.budget.limit_bytes = needed_bytes - missing_bytes
    told = f"{SEGMENTS * ROWS_FILE_BYTES} bytes of new rows"
    with pytest.raises(DiskTierFull, match=told) as caught:
        reopened(place)
    assert "--disk-gb" in caught.value.hint and "signals" in caught.value.hint
    assert files(place) == before
    assert_unchanged(place, held)
    place.budget.limit_bytes = needed_bytes
    store = reopened(place)
    assert_holds(store, held)
    assert place.budget.taken_bytes == store.allocated_bytes
    store.close()


@pytest.mark.parametrize("only", ["rows-", "index.1", "MANIFEST"])
def test_a_full_disk_is_told_and_leaves_the_old_rows(
    place: Place, held: dict[int, int], only: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = PosixStorage.open_log

    def open_log(self: PosixStorage, path: Path, *, create: bool = False) -> File:
        file = opened(self, path, create=create)

        def write(buffers: list[memoryview], offset: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        if create and path.name.startswith(only):
            file.write = write  # type: ignore[method-assign]
        return file

    def rows_are_full(self: PosixStorage, path: Path, *, create: bool = False) -> File:
        return open_log(self, path, create=create or ".1.mk" in path.name)

    before = files(place)
    monkeypatch.setattr(PosixStorage, "open_log", rows_are_full)
    with pytest.raises(DiskTierFull, match="No space left on device") as caught:
        reopened(place)
    monkeypatch.undo()
    assert "sessions rm" in caught.value.hint
    if only != "MANIFEST":
        assert files(place) == before
    assert_unchanged(place, held)
    assert [name for name in files(place) if name != "MANIFEST.tmp"] == before


class Refused(Exception):
    """What a test's reindex raises."""


def test_whatever_stops_the_making_of_rows_leaves_the_old_ones(
    place: Place, held: dict[int, int]
) -> None:
    def stops(blocks: Blocks) -> Iterator[bytes]:
        for index, (_, payload) in enumerate(blocks):
            if index == 6:
                raise Refused
            yield row_of(payload, OTHER_ROWS)

    before = files(place)
    with pytest.raises(Refused):
        place.open(OTHER_ROWS, reindex=stops)
    assert files(place) == before
    assert_unchanged(place, held)


def too_few(blocks: Blocks) -> Iterator[bytes]:
    kept = [row_of(payload, OTHER_ROWS) for _, payload in blocks]
    yield from kept[:-1]


def too_early(blocks: Blocks) -> Iterator[bytes]:
    _, payload = next(blocks)
    yield row_of(payload, OTHER_ROWS)


def too_many(blocks: Blocks) -> Iterator[bytes]:
    yield from (row_of(payload, OTHER_ROWS) for _, payload in blocks)
    yield bytes(OTHER_ROWS.row_bytes)


def too_long(blocks: Blocks) -> Iterator[bytes]:
    yield from (row_of(payload, OTHER_ROWS) + b"x" for _, payload in blocks)


@pytest.mark.parametrize("reindex", [too_few, too_early, too_many, too_long])
def test_rows_that_do_not_match_the_blocks_are_our_own_fault(
    place: Place, held: dict[int, int], reindex: Reindex
) -> None:
    with pytest.raises(AssertionError, match="row"):
        place.open(OTHER_ROWS, reindex=reindex)
    assert_unchanged(place, held)
