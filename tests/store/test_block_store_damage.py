"""A block store finds its files damaged, foreign or incomplete, and says so."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvws.errors import CorruptBlock, OtherModel, StoreFormatError
from kvws.store.block import StoreShape
from kvws.store.block_store import BlockStore
from kvws.store.index_records import encode_drop, encode_put, replay
from kvws.store.rank_manifest import read_layout
from kvws.store.record import encode_frame, pack
from kvws.store.segment import FOOTER_BYTES
from tests.store.store_place import (
    SEGMENT_BLOCKS,
    SEGMENT_BYTES,
    SHAPE,
    Place,
    assert_holds,
    block,
    buffers,
    files,
    fill,
    stored,
)


@pytest.mark.parametrize("offset", [0, SHAPE.payload_bytes - 1, SHAPE.payload_bytes, -1])
def test_a_damaged_block_is_named_and_its_neighbours_are_filled(
    place: Place, store: BlockStore, offset: int
) -> None:
    fill(store, range(4))
    slot_bytes = SHAPE.payload_bytes + FOOTER_BYTES
    place.damage("segment-000000.kv", slot_bytes + (offset % slot_bytes))
    into = buffers(4)
    with pytest.raises(CorruptBlock) as caught:
        store.read([0, 1, 2, 3], into)
    assert caught.value.numbers == (1,)
    assert [into[n] == block(n).payload for n in (0, 2, 3)] == [True] * 3
    report = store.verify()
    assert (report.checked_blocks, report.corrupt_blocks, report.damaged_rows) == (4, (1,), ())


def test_a_damaged_row_is_left_out_and_listed(place: Place, store: BlockStore) -> None:
    fill(store, range(6))
    place.damage("rows-000000.mk", 2 * SHAPE.row_bytes)
    assert [number for number, _ in store.read_rows()] == [0, 1, 3, 4, 5]
    assert store.damaged_rows == [2]
    progress: list[int] = []
    report = store.verify(progress.append)
    assert report.damaged_rows == (2,) and report.corrupt_blocks == ()
    assert sum(progress) == 6


def test_files_cut_short_cost_the_blocks_beyond(place: Place, store: BlockStore) -> None:
    fill(store, range(6))
    slot_bytes = SHAPE.payload_bytes + FOOTER_BYTES
    with open(place.path / "segment-000000.kv", "r+b") as file:
        file.truncate(2 * slot_bytes + 100)
    into = buffers(4)
    with pytest.raises(CorruptBlock) as caught:
        store.read([0, 1, 2, 3], into)
    assert caught.value.numbers == (2, 3) and into[1] == block(1).payload
    with open(place.path / "rows-000001.mk", "r+b") as file:
        file.truncate(SHAPE.row_bytes)
    assert [number for number, _ in store.read_rows()] == [0, 1, 2, 3, 4]
    assert store.damaged_rows == [5]
    store = place.reopen(store)
    assert store.recovery.dropped_blocks == 2
    assert [held.number for held in store.blocks()] == [0, 1, 4, 5]
    fill(store, [2, 3, 5], version=1)
    assert_holds(store, {0: 0, 1: 0, 2: 1, 3: 1, 4: 0, 5: 1})
    store = place.reopen(store)
    assert store.recovery.dropped_blocks == 0
    assert_holds(store, {0: 0, 1: 0, 2: 1, 3: 1, 4: 0, 5: 1})
    store.close()


def test_blocks_of_a_lost_segment_do_not_come_back_when_it_is_made_again(
    place: Place, store: BlockStore
) -> None:
    fill(store, range(6))
    (place.path / "segment-000000.kv").unlink()
    store = place.reopen(store)
    assert store.recovery.dropped_blocks == 4
    assert_holds(store, {4: 0, 5: 0})
    fill(store, [20, 21, 22])
    store = place.reopen(store)
    assert store.recovery.dropped_blocks == 0
    assert_holds(store, {4: 0, 5: 0, 20: 0, 21: 0, 22: 0})
    store.close()


def test_missing_rows_cost_rows_only(place: Place, store: BlockStore) -> None:
    fill(store, range(2))
    (place.path / "rows-000000.mk").unlink()
    store = place.reopen(store)
    assert list(store.read_rows()) == [] and store.damaged_rows == [0, 1]
    store.read([0, 1], buffers(2))
    fill(store, [0, 1])
    assert_holds(store, {0: 0, 1: 0})
    store.close()


def test_what_a_cut_off_creation_left_is_removed(place: Place, store: BlockStore) -> None:
    fill(store, range(2))
    (place.path / "segment-000007.kv").write_bytes(b"part")
    (place.path / "rows-000008.mk").write_bytes(b"part")
    (place.path / "index.log.tmp").write_bytes(b"part")
    store = place.reopen(store)
    assert files(place) == ["MANIFEST", "index.log", "rows-000000.mk", "segment-000000.kv"]
    assert_holds(store, {0: 0, 1: 0})
    store.close()


@pytest.mark.parametrize(
    ("shape", "rank", "message"),
    [
        (replace(SHAPE, payload_bytes=4096), 0, "payload_bytes 8192, not 4096"),
        (replace(SHAPE, row_bytes=44), 0, "row_bytes 40, not 44"),
        (replace(SHAPE, payload_format="int8"), 0, "payload_format 'exact', not 'int8'"),
        (replace(SHAPE, row_format="b/v1"), 0, "row_format 'mean-k/float32/v1', not 'b/v1'"),
        (SHAPE, 1, "rank 0, not 1"),
    ],
)
def test_another_shape_is_refused(
    place: Place, store: BlockStore, shape: StoreShape, rank: int, message: str
) -> None:
    before = {name: (place.path / name).read_bytes() for name in files(place)}
    with pytest.raises(OtherModel, match=message):
        place.open(shape, rank=rank)
    assert {name: (place.path / name).read_bytes() for name in files(place)} == before


def test_the_directory_keeps_its_segment_size_and_tells_its_shape(
    place: Place, store: BlockStore
) -> None:
    fill(store, range(5))
    store.close()
    store = BlockStore.open(
        place.storage, place.path, SHAPE, place.budget, segment_blocks=SEGMENT_BLOCKS * 4
    )
    assert_holds(store, {number: 0 for number in range(5)})
    assert store.allocated_bytes == 2 * SEGMENT_BYTES
    assert read_layout(place.storage, place.path).shape == SHAPE
    store.close()


@pytest.mark.parametrize(
    "change",
    [
        {"payload_bytes": 0},
        {"payload_bytes": 8193},
        {"payload_bytes": 2**60},
        {"row_bytes": -1},
        {"row_bytes": True},
        {"segment_blocks": 2**40},
        {"segment_blocks": "4"},
        {"payload_format": 3},
        {"payload_format": "x" * 17},
        {"version": 2},
        {"row_format": "", "version": 2, "row_set": 0},
        {"row_format": "x" * 121, "version": 2, "row_set": 0},
        {"row_set": -1, "version": 2, "row_format": "b/v1"},
        {"row_set": 2**40, "version": 2, "row_format": "b/v1"},
    ],
)
def test_a_manifest_with_impossible_sizes_is_refused(
    place: Place, store: BlockStore, change: dict[str, object]
) -> None:
    content = {
        "kind": "kvws-rank",
        "version": 1,
        "rank": 0,
        "payload_bytes": 8192,
        "row_bytes": 40,
        "payload_format": "exact",
        "segment_blocks": 4,
    }
    (place.path / "MANIFEST").write_bytes(encode_frame(pack(content), 0))
    assert read_layout(place.storage, place.path).shape == SHAPE
    (place.path / "MANIFEST").write_bytes(encode_frame(pack({**content, **change}), 0))
    wrong = "row_format" if change == {"version": 2} else next(iter(change))
    with pytest.raises(StoreFormatError, match=wrong):
        place.open()


def test_files_without_a_manifest_are_left_alone(place: Place, store: BlockStore) -> None:
    fill(store, [1])
    store.close()
    (place.path / "MANIFEST").unlink()
    before = files(place)
    with pytest.raises(StoreFormatError, match="no manifest"):
        place.open()
    assert files(place) == before


def test_an_index_that_is_gone_is_reported(place: Place, store: BlockStore) -> None:
    store = place.reopen(store)
    assert store.recovery.skipped_bytes == 0
    fill(store, [1])
    store.close()
    (place.path / "index.log").write_bytes(b"")
    store = place.open()
    assert store.recovery.skipped_bytes > 0 and store.blocks() == []
    fill(store, [2])
    assert_holds(store, {2: 0})
    store = place.reopen(store)
    assert store.recovery.skipped_bytes == 0
    store.close()


@pytest.mark.parametrize(
    "body",
    [
        b"\xc1",
        pack("text"),
        pack([]),
        pack([1]),
        pack([1, b"short"]),
        pack([2, b"short"]),
        pack([2, 7]),
        pack([0, -1]),
        pack([0, b""]),
        pack([99, b""]),
        pack({"kind": 1}),
    ],
)
def test_records_of_unknown_kinds_are_counted_and_skipped(
    place: Place, store: BlockStore, body: bytes
) -> None:
    fill(store, range(2))
    store.close()
    place.append_to_index(body)
    store = place.open()
    assert store.recovery.unknown_records == 1
    assert_holds(store, {0: 0, 1: 0})
    store.close()


def test_records_that_point_outside_the_files_drop_their_blocks(
    place: Place, store: BlockStore
) -> None:
    fill(store, range(2))
    store.close()
    far = [stored(number, 50 + number, 2**number - 1) for number in range(10, 64)]
    place.append_to_index(encode_put(far))
    store = place.open()
    assert store.recovery.dropped_blocks == len(far)
    assert_holds(store, {0: 0, 1: 0})
    fill(store, range(2, 8))
    assert_holds(store, {number: 0 for number in range(8)})
    store.close()


def test_the_newest_put_wins_and_owns_its_slot() -> None:
    def live(*bodies: bytes) -> dict[int, int]:
        return {number: held.slot for number, held in replay(bodies).blocks.items()}

    one = encode_put([stored(1, 5, 0), stored(2, 6, 1)])
    assert live(one, encode_put([stored(1, 7, 2)])) == {1: 2, 2: 1}
    assert live(encode_put([stored(1, 7, 2)]), one) == {1: 2, 2: 1}, "an older put came later"
    assert live(one, encode_put([stored(3, 7, 0)])) == {2: 1, 3: 0}, "slot 0 is another's now"
    moved = encode_put([stored(1, 7, 2)])
    assert live(one, moved, encode_put([stored(3, 8, 0)])) == {1: 2, 2: 1, 3: 0}
    assert live(one, encode_drop([1, 9])) == {2: 1}
    assert live(one, encode_drop([1]), encode_put([stored(3, 8, 0)])) == {2: 1, 3: 0}
    assert replay([one, encode_drop([1, 2])]).next_generation == 7
