"""Rows are made anew from the payloads when others are wanted, and nothing else changes."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvws.errors import OtherModel
from kvws.store import reindexing
from kvws.store.block import StoredBlock
from kvws.store.block_store import BlockStore
from kvws.store.directory import StoreDirectory
from kvws.store.maintenance import UnlimitedSpace, check_workspace, compact_workspace, count_blocks
from kvws.store.posix import PosixStorage
from kvws.store.rank_manifest import read_layout
from kvws.store.record import encode_frame, pack
from kvws.store.segment import FOOTER_BYTES, aligned_buffer
from tests.store.folders import IDENTITY, tree_hash
from tests.store.rows import no_reindex, reindex_to, row_of
from tests.store.store_place import (
    OTHER_ROWS,
    SEGMENT_BLOCKS,
    SHAPE,
    Place,
    assert_holds,
    block,
    files,
    fill,
    reopened,
)

Blocks = Iterator[tuple[StoredBlock, memoryview]]


def test_every_block_gets_the_row_of_its_payload(place: Place, held: dict[int, int]) -> None:
    store = place.open()
    before = {block.number: block for block in store.blocks()}
    store.close()
    seen: list[StoredBlock] = []
    store = place.open(OTHER_ROWS, reindex=reindex_to(OTHER_ROWS, seen.append))
    assert seen == sorted(before.values(), key=lambda block: block.slot)
    assert_holds(store, held)
    for now in store.blocks():
        digest = before[now.number].row_digest
        assert now.row_digest != digest and replace(now, row_digest=digest) == before[now.number]
    assert store.reindexing is not None
    assert (store.reindexing.blocks, store.reindexing.unreadable_blocks) == (9, ())
    assert not any("rows-00000" in name and ".1." not in name for name in files(place))
    assert "index.1.log" in files(place) and "index.log" not in files(place)
    store.close()
    assert place.budget.taken_bytes == 0


def test_a_store_with_new_rows_goes_on_like_any_other(place: Place, held: dict[int, int]) -> None:
    store = reopened(place)
    generation = max(block.generation for block in store.blocks())
    fill(store, [0, 20, 21], version=2)
    assert min(block.generation for block in store.blocks() if block.number in (0, 20, 21)) > (
        generation
    )
    store.drop([5])
    held = {**held, 0: 2, 20: 2, 21: 2}
    del held[5]
    store.compact()
    assert_holds(store, held)
    store.close()
    store = place.open(OTHER_ROWS, reindex=no_reindex)
    assert (store.reindexing, store.recovery.cut_bytes, store.recovery.dropped_blocks) == (
        None, 0, 0,
    )  # fmt: skip
    assert_holds(store, held)
    store.close()


def test_generations_of_dropped_blocks_are_not_given_out_again(
    place: Place, held: dict[int, int]
) -> None:
    store = place.open()
    fill(store, [50])
    newest = store.find(50)
    store.drop([50])
    store.close()
    store = reopened(place)
    fill(store, [51])
    found = store.find(51)
    assert newest is not None and found is not None
    assert found.generation > newest.generation
    store.close()


def test_rows_can_be_made_anew_again_and_again(place: Place, held: dict[int, int]) -> None:
    for row_set in range(1, 4):
        shape = OTHER_ROWS if row_set % 2 else SHAPE
        store = reopened(place, shape)
        assert_holds(store, held)
        fill(store, [30 + row_set])
        held[30 + row_set] = 0
        store.close()
        assert f"index.{row_set}.log" in files(place)
        rows = [name for name in files(place) if name.startswith("rows-")]
        assert all(name.endswith(f".{row_set}.mk") for name in rows)
        assert read_layout(place.storage, place.path).row_set == row_set


@pytest.mark.parametrize("change", [{"row_bytes": 44}, {"row_format": "b/v1"}])
def test_another_size_or_another_format_is_enough(
    place: Place, held: dict[int, int], change: dict[str, object]
) -> None:
    shape = replace(SHAPE, **change)  # type: ignore[arg-type]
    store = reopened(place, shape)
    assert store.reindexing is not None
    assert_holds(store, held)
    store.close()


def test_without_a_way_to_make_rows_other_ones_are_refused(
    place: Place, held: dict[int, int]
) -> None:
    before = tree_hash(place.path)
    different = "row_bytes 40, not 56, row_format 'mean-k/float32/v1', not 'other/v1'"
    with pytest.raises(OtherModel, match=different) as caught:
        place.open(OTHER_ROWS)
    assert "signals" in caught.value.hint
    assert tree_hash(place.path) == before


@pytest.mark.parametrize("change", [{"payload_bytes": 4096}, {"payload_format": "int8"}])
def test_payloads_of_another_shape_are_refused_all_the_same(
    place: Place, held: dict[int, int], change: dict[str, object]
) -> None:
    before = tree_hash(place.path)
    with pytest.raises(OtherModel, match="payload_"):
        place.open(replace(OTHER_ROWS, **change), reindex=no_reindex)  # type: ignore[arg-type]
    assert tree_hash(place.path) == before


def test_a_new_store_and_an_empty_one_have_no_rows_to_make(place: Place) -> None:
    store = place.open(OTHER_ROWS, reindex=no_reindex)
    assert store.reindexing is None
    store.close()
    store = reopened(place, SHAPE)
    fill(store, [1])
    assert_holds(store, {1: 0})
    store.close()


def test_segments_without_blocks_are_given_up(place: Place, held: dict[int, int]) -> None:
    store = place.open()
    store.drop([5, 6, 7])
    store.close()
    store = reopened(place)
    assert_holds(store, {n: v for n, v in held.items() if n not in (5, 6, 7)})
    assert "segment-000001.kv" not in files(place) and "rows-000001.1.mk" not in files(place)
    assert place.budget.taken_bytes == store.allocated_bytes
    store.close()


def test_payloads_may_be_kept_and_rows_come_late(place: Place, held: dict[int, int]) -> None:
    def all_at_once(blocks: Blocks) -> Iterator[bytes]:
        kept = list(blocks)
        for _, payload in kept:
            yield row_of(payload, OTHER_ROWS)

    store = place.open(OTHER_ROWS, reindex=all_at_once)
    assert_holds(store, held)
    store.close()


def test_no_more_than_one_request_is_in_memory_beside_what_is_kept(
    place: Place, store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, range(40))
    store.close()
    living: weakref.WeakSet[object] = weakref.WeakSet()
    most = 0

    def recorded(size_bytes: int) -> memoryview:
        nonlocal most
        memory = aligned_buffer(size_bytes)
        living.add(memory.obj)
        most = max(most, len(living))
        return memory

    monkeypatch.setattr(reindexing, "blocks_at_once", lambda payload_bytes: 4)
    monkeypatch.setattr(reindexing, "aligned_buffer", recorded)
    reopened(place).close()
    assert 1 <= most <= 3


def make_version_1(place: Place) -> None:
    """What that version wrote of a store whose rows were never made anew."""
    content = {
        "kind": "kvws-rank",
        "version": 1,
        "rank": 0,
        "payload_bytes": SHAPE.payload_bytes,
        "row_bytes": SHAPE.row_bytes,
        "payload_format": "exact",
        "segment_blocks": SEGMENT_BLOCKS,
    }
    (place.path / "MANIFEST").write_bytes(encode_frame(pack(content), 0))


def test_a_store_of_version_1_is_used_as_it_is(place: Place, held: dict[int, int]) -> None:
    make_version_1(place)
    before = (place.path / "MANIFEST").read_bytes()
    store = place.open(reindex=no_reindex)
    fill(store, [40])
    assert_holds(store, held | {40: 0})
    store.close()
    assert (place.path / "MANIFEST").read_bytes() == before
    with pytest.raises(OtherModel, match="row_format 'mean-k/float32/v1', not 'other/v1'"):
        place.open(OTHER_ROWS)


def test_rows_of_a_store_of_version_1_are_made_anew(place: Place, held: dict[int, int]) -> None:
    make_version_1(place)
    store = reopened(place)
    assert_holds(store, held)
    store.close()
    assert read_layout(place.storage, place.path).shape == OTHER_ROWS


def test_what_looks_after_a_workspace_works_with_new_rows(tmp_path: Path) -> None:
    storage = PosixStorage(tmp_path)
    with StoreDirectory.open(tmp_path / "store", storage) as directory:
        path = directory.open_workspace("w", IDENTITY)
        rank = path / "rank-0"
        for shape in (SHAPE, OTHER_ROWS):
            store = BlockStore.open(
                storage, rank, shape, UnlimitedSpace(), reindex=reindex_to(shape)
            )
            fill(store, range(70) if shape == SHAPE else [3, 70])
            store.close()
        (rank / "rows-000000.2.mk").write_bytes(b"of making rows anew that was cut off")
        (rank / "index.2.log").write_bytes(b"half")
        (rank / "index.log").write_bytes(b"of old")
        assert count_blocks(path, storage) == 71
        (entry,) = directory.list_workspaces()
        check = check_workspace(entry, storage)
        assert (check.blocks, check.is_damaged) == (71, False)
        (rank / "rows-000000.2.mk").write_bytes(b"again")
        store = BlockStore.open(storage, rank, OTHER_ROWS, UnlimitedSpace())
        store.drop(range(60))
        store.close()
        compact_workspace(path, storage)
        assert not directory.collect_garbage().problems
        names = {name.name for name in rank.iterdir()}
        assert names == {
            "MANIFEST", "index.1.log", "rows-000000.1.mk", "segment-000000.kv",
            "rows-000001.1.mk", "segment-000001.kv",
        }  # fmt: skip
        (rank / "rows-000001.1.mk").write_bytes(bytes(1 << 10))
        assert check_workspace(entry, storage).damaged_rows
        directory.remove("w")
        assert directory.list_workspaces() == []


def test_a_payload_s_footer_tells_of_the_row_that_it_was_put_with(
    place: Place, held: dict[int, int]
) -> None:
    store = reopened(place)
    store.close()
    assert block(0).row.nbytes == SHAPE.row_bytes
    footer = (place.path / "segment-000000.kv").read_bytes()[SHAPE.payload_bytes :][:FOOTER_BYTES]
    assert int.from_bytes(footer[44:52], "little") == SHAPE.row_bytes
    for offset in (44, 100):
        place.damage("segment-000000.kv", SHAPE.payload_bytes + offset)
        store = place.open(OTHER_ROWS)
        assert store.verify().corrupt_blocks == (0,)
        store.close()
        place.damage("segment-000000.kv", SHAPE.payload_bytes + offset)
