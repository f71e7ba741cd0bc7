"""The block store on real files: slots, runs, budget, threads. Crashes are tested elsewhere."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest

from kvws.errors import CorruptBlock, DiskTierFull
from kvws.store.block import NewBlock
from kvws.store.block_store import BlockStore
from kvws.store.posix import PosixStorage
from kvws.store.segment import aligned_buffer
from kvws.store.slots import SlotAllocator
from tests.store.simulated_disk import Fault, SimulatedDisk
from tests.store.store_place import (
    SEGMENT_BLOCKS,
    SEGMENT_BYTES,
    SHAPE,
    Budget,
    Place,
    assert_holds,
    block,
    buffers,
    fill,
    slots,
    stored,
)


def test_what_was_put_is_there_now_and_after_a_restart(place: Place, store: BlockStore) -> None:
    fill(store, range(3))
    fill(store, [9, 7, 8])
    assert_holds(store, {number: 0 for number in (0, 1, 2, 7, 8, 9)})
    store = place.reopen(store)
    assert (store.recovery.cut_bytes, store.recovery.dropped_blocks) == (0, 0)
    assert_holds(store, {number: 0 for number in (0, 1, 2, 7, 8, 9)})
    fill(store, [3])
    assert_holds(store, {number: 0 for number in (0, 1, 2, 3, 7, 8, 9)})
    store.close()


def test_a_put_replaces_and_frees_the_old_slot(place: Place, store: BlockStore) -> None:
    fill(store, range(4))
    old = slots(store)
    fill(store, [1, 2], version=1)
    assert_holds(store, {0: 0, 1: 1, 2: 1, 3: 0})
    fill(store, [8, 9])
    assert {slots(store)[8], slots(store)[9]} == {old[1], old[2]}
    store = place.reopen(store)
    assert_holds(store, {0: 0, 1: 1, 2: 1, 3: 0, 8: 0, 9: 0})
    store.close()


def test_generations_increase_across_everything(place: Place, store: BlockStore) -> None:
    seen: list[int] = []

    def put_one() -> None:
        fill(store, [0], version=len(seen))
        held = store.find(0)
        assert held is not None
        seen.append(held.generation)

    put_one()
    put_one()
    store = place.reopen(store)
    put_one()
    store.drop([0])
    store.compact()
    store = place.reopen(store)
    put_one()
    assert seen == sorted(set(seen))
    store.close()


def test_dropped_blocks_stay_away_and_their_slots_are_reused(
    place: Place, store: BlockStore
) -> None:
    fill(store, range(6))
    store.drop([1, 4, 77])
    store.drop([])
    assert_holds(store, {0: 0, 2: 0, 3: 0, 5: 0})
    fill(store, [10, 11])
    assert slots(store) == {0: 0, 10: 1, 2: 2, 3: 3, 11: 4, 5: 5}
    store = place.reopen(store)
    assert_holds(store, {0: 0, 2: 0, 3: 0, 5: 0, 10: 0, 11: 0})
    store.close()


def test_runs_are_adjacent_end_at_segments_and_cover_each_block_once(store: BlockStore) -> None:
    fill(store, range(11))
    store.drop([2])
    assert store.plan_reads([9, 0, 1, 3, 4, 5, 6, 7, 8, 10, 9], 3) == [
        (0, 1), (3,), (4, 5, 6), (7,), (8, 9, 10),
    ]  # fmt: skip
    assert store.plan_reads([], 3) == []
    assert store.plan_reads([4, 5], 0) == [(4,), (5,)]


def test_a_run_is_one_request(
    store: BlockStore, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, range(4))
    requests: list[int] = []
    opened = PosixStorage.open_segment

    def open_segment(self: PosixStorage, path: Path, **options: int):
        file = opened(self, path, **options)
        inner = file.read
        file.read = lambda views, offset: (requests.append(offset), inner(views, offset))[1]
        return file

    monkeypatch.setattr(PosixStorage, "open_segment", open_segment)
    store = place.reopen(store)
    store.read([0, 1, 2, 3], buffers(4))
    assert requests == [0]
    store.read([2, 1], buffers(2))
    assert len(requests) == 3
    store.close()


def test_blocks_that_are_not_stored_are_named_and_the_others_filled(store: BlockStore) -> None:
    fill(store, [1, 2])
    with pytest.raises(CorruptBlock) as caught:
        store.plan_reads([1, 5, 6], 8)
    assert caught.value.numbers == (5, 6)
    into = buffers(3)
    with pytest.raises(CorruptBlock) as caught:
        store.read([1, 5, 2], into)
    assert caught.value.numbers == (5,)
    assert into[0] == block(1).payload and into[2] == block(2).payload
    assert store.find(5) is None


def test_rows_stay_valid_while_others_are_read(store: BlockStore) -> None:
    fill(store, range(6))
    assert all(row == block(number).row for number, row in list(store.read_rows()))


def test_compaction_frees_unused_segments_and_shortens_the_index(
    place: Place, store: BlockStore
) -> None:
    fill(store, range(12))
    for version in range(1, 6):
        fill(store, [0, 1], version)
    size_bytes = (place.path / "index.log").stat().st_size
    assert store.allocated_bytes == place.budget.taken_bytes == 4 * SEGMENT_BYTES
    store.drop(range(2, 12))
    store.compact()
    assert store.allocated_bytes == place.budget.taken_bytes == SEGMENT_BYTES
    assert (place.path / "index.log").stat().st_size < size_bytes / 4
    assert_holds(store, {0: 5, 1: 5})
    store = place.reopen(store)
    assert_holds(store, {0: 5, 1: 5})
    fill(store, range(2, 12))
    assert store.allocated_bytes == place.budget.taken_bytes == 3 * SEGMENT_BYTES
    assert_holds(store, {0: 5, 1: 5} | {number: 0 for number in range(2, 12)})
    store.close()


def test_an_index_that_is_mostly_alive_is_not_rewritten(place: Place, store: BlockStore) -> None:
    fill(store, range(8))
    before = (place.path / "index.log").stat().st_ino
    store.compact()
    assert (place.path / "index.log").stat().st_ino == before


def test_the_budget_bounds_the_segments(place: Place, store: BlockStore) -> None:
    place.budget.limit_bytes = 2 * SEGMENT_BYTES
    fill(store, range(7))
    with pytest.raises(DiskTierFull):
        fill(store, [7, 8])
    assert_holds(store, {number: 0 for number in range(7)})
    fill(store, [7])
    store.drop([0, 1])
    fill(store, [8, 9])
    assert_holds(store, {number: 0 for number in range(2, 10)})


def test_a_store_larger_than_its_budget_opens_and_gives_back_what_it_took(
    place: Place, store: BlockStore
) -> None:
    fill(store, range(12))
    store.close()
    assert place.budget.taken_bytes == 0
    place.budget.limit_bytes = SEGMENT_BYTES
    store = place.open()
    assert_holds(store, {number: 0 for number in range(12)})
    with pytest.raises(DiskTierFull):
        fill(store, [12])
    store.drop(range(4, 8))
    store.compact()
    assert place.budget.taken_bytes == SEGMENT_BYTES
    store.drop(range(4))
    store.compact()
    assert place.budget.taken_bytes == store.allocated_bytes == SEGMENT_BYTES
    store.close()
    assert place.budget.taken_bytes == 0


@pytest.mark.parametrize("failing", range(18))
def test_a_put_that_fails_changes_nothing_and_the_next_one_works(failing: int) -> None:
    disk, path = SimulatedDisk(failing), Path("/disk")
    disk.make_directory(path)
    store = BlockStore.open(disk, path / "rank-0", SHAPE, Budget(), segment_blocks=SEGMENT_BLOCKS)
    fill(store, range(3))
    disk.fault = Fault(disk.operations + failing, errno.ENOSPC)
    failed = False
    try:
        fill(store, range(1, 6), version=1)
    except OSError:
        failed = True
    first = {0: 0, 1: 0, 2: 0}
    second = first | {number: 1 for number in range(1, 6)}
    assert_holds(store, first if failed else second)
    disk.fault = None
    fill(store, range(1, 6), version=1)
    assert_holds(store, second)
    store.compact()
    assert_holds(store, second)
    store.close()
    assert disk.open_files == 0


def test_readers_and_a_writer_run_side_by_side(store: BlockStore) -> None:
    fill(store, range(8))
    stop = threading.Event()
    failures: list[BaseException] = []

    def read() -> None:
        try:
            while not stop.is_set():
                for run in store.plan_reads(range(8), 4):
                    into = buffers(len(run))
                    store.read(run, into)
                    assert all(
                        payload == block(number).payload
                        for number, payload in zip(run, into, strict=True)
                    )
                assert len(store.blocks()) >= 8
        except BaseException as error:
            failures.append(error)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for version in range(30):
        fill(store, range(8, 14), version)
        if version % 5 == 0:
            store.drop(range(8, 14))
            store.compact()
    stop.set()
    for reader in readers:
        reader.join(timeout=30)
    assert not failures
    assert_holds(store, {number: 0 for number in range(8)} | {n: 29 for n in range(8, 14)})


def test_no_more_files_stay_open_than_the_limit(place: Place, store: BlockStore) -> None:
    store._files._max_open = 2
    fill(store, range(40))
    assert_holds(store, {number: 0 for number in range(40)})
    assert len(store._files._handles) == 2


@pytest.mark.parametrize(
    "fault", ["slot twice", "slot lost", "outside", "generation", "count", "free twice"]
)
def test_integrity_catches_a_planted_fault(store: BlockStore, fault: str) -> None:
    fill(store, range(6))
    store.drop([3])
    store.check_integrity()
    if fault == "slot twice":
        store._blocks[0] = stored(0, 0, 1)
    elif fault == "slot lost":
        store._space._slots._free.pop()
    elif fault == "outside":
        store._blocks[0] = stored(0, 0, 400)
    elif fault == "generation":
        store._next_generation = 2
    elif fault == "count":
        store._space._slots._used_of[0] += 1
    else:
        store._space._slots._free.append(store._space._slots._free[0])
    with pytest.raises(AssertionError):
        store.check_integrity()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"number": -1}, "block number"),
        ({"number": 2**63}, "block number"),
        ({"first_position": -2}, "position"),
        ({"page_hash": b"short"}, "hash"),
        ({"payload": aligned_buffer(4096)}, "4096 bytes"),
        ({"row": memoryview(b"short")}, "row"),
    ],
)
def test_a_block_of_another_shape_is_our_own_fault(
    store: BlockStore, change: dict[str, object], message: str
) -> None:
    good = block(1)
    fields = {name: getattr(good, name) for name in NewBlock.__slots__}
    with pytest.raises(AssertionError, match=message):
        store.put([NewBlock(**{**fields, **change})])  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="twice"):
        store.put([good, good])
    store.put([])
    assert_holds(store, {})


def test_slots_are_handed_out_lowest_first() -> None:
    slots = SlotAllocator(4, [0, 2], [1, 8, 9])
    assert slots.next_segment() == 1
    assert slots.take(4) == [0, 2, 3, 10]
    slots.give_back([2, 8])
    slots.add_segment(1)
    assert slots.take(3) == [2, 4, 5]
    slots.give_back([4, 5])
    assert slots.unused_segments() == [1]
    slots.remove_segments([1])
    assert slots.next_segment() == 1 and slots.free_slots == 2
    assert slots.take(2) == [8, 11]
    slots.check_integrity([0, 1, 2, 3, 8, 9, 10, 11])
