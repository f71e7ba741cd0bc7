"""The data plane of one rank, from staged pages to a filled view."""

from __future__ import annotations

import threading

import pytest
import torch

from kvws.blocks.page import PageSource, Slice, whole_block
from kvws.errors import ControlError
from kvws.recall.index import TILE_BLOCKS
from tests.plane.rig import (
    DEVICE_PAGES,
    DIM,
    HOST_BLOCKS,
    LAYERS,
    QUERY_HEADS,
    Rig,
    rotated,
    signals_of,
)

POSITIONS = torch.arange(32)


def assert_filled(rig: Rig, page: int, view_index: int, original: torch.Tensor, at: int) -> None:
    """Device page `page` holds `original`, computed at page index `at`, moved to `view_index`."""
    now = rig.pool.page(page)
    assert torch.equal(now[1], original[1]), "V is not bit-exact"
    tolerance = 4e-6 if now.dtype == torch.float32 else 2**-6
    for layer, table in enumerate(rig.tables):
        expected = rotated(
            original[0, layer], table, POSITIONS + 32 * at, POSITIONS + 32 * view_index
        )
        torch.testing.assert_close(
            now[0, layer].double(), expected, atol=tolerance, rtol=tolerance
        )


def scores(rig: Rig, workspace: str, blocks: int) -> dict[str, torch.Tensor]:
    """Of a query that is the same every time, right behind the blocks."""
    queries = torch.randn(
        LAYERS, 5, QUERY_HEADS, DIM, generator=torch.Generator().manual_seed(4)
    )
    return rig.plane.scored_index(workspace).score(
        queries, 32 * torch.arange(blocks), 32 * blocks, torch.ones(blocks, dtype=torch.bool)
    )


# ---- a view, from computed pages to filled slots ---------------------------------------------


def test_blocks_come_back_rotated_to_their_place_in_the_view(rig: Rig) -> None:
    originals = [rig.pool.page(page) for page in range(4)]
    rig.write(0, [0, 1, 2, 3], at=2)
    step = rig.open()
    names = rig.promise(step, [whole_block(3), whole_block(0), whole_block(2)])
    rig.load(step, names, [10, 11, 12])
    for view_index, block in enumerate((3, 0, 2)):
        assert_filled(rig, 10 + view_index, view_index, originals[block], 2 + block)
    assert rig.layers_done == list(range(LAYERS))
    outcome = rig.close(step, [])
    assert outcome.loaded_pages == 3 and outcome.stage_in_ms > 0
    assert rig.plane.stats()["loaded_pages"] == 3


def test_a_block_at_the_place_it_was_computed_at_keeps_its_bits(rig: Rig) -> None:
    original = rig.pool.page(5)
    rig.write(0, [5], at=1)
    rig.write(1, [6], at=7)
    step = rig.open()
    names = rig.promise(step, [whole_block(1), whole_block(0)])
    rig.load(step, names, [20, 21])
    assert torch.equal(rig.pool.page(21), original)


def test_only_the_missing_tail_of_a_view_is_loaded(rig: Rig) -> None:
    """The engine asks for the pages it lacks; they go to their own index."""
    originals = [rig.pool.page(page) for page in range(3)]
    rig.write(0, [0, 1, 2])
    step = rig.open()
    names = rig.promise(step, [whole_block(0), whole_block(2), whole_block(1)])
    untouched = rig.pool.page(9)
    rig.load(step, names[1:], [10, 11])
    assert_filled(rig, 10, 1, originals[2], 2)
    assert_filled(rig, 11, 2, originals[1], 1)
    assert torch.equal(rig.pool.page(9), untouched)


def test_a_page_is_packed_from_slices_of_several_blocks(rig: Rig) -> None:
    originals = [rig.pool.page(page) for page in range(3)]
    rig.write(0, [0, 1, 2], at=3)
    source: PageSource = (Slice(2, 5, 9), Slice(0, 31, 1), Slice(1, 0, 22))
    step = rig.open()
    names = rig.promise(step, [whole_block(1), source])
    rig.load(step, names, [8, 9])
    now, row = rig.pool.page(9), 0
    tolerance = 4e-6 if now.dtype == torch.float32 else 2**-6
    for block, offset, length in source:
        tokens = slice(offset, offset + length)
        rows = slice(row, row + length)
        assert torch.equal(now[1][:, rows], originals[block][1][:, tokens])
        for layer, table in enumerate(rig.tables):
            baked = torch.arange(length) + 32 * (3 + block) + offset
            target = torch.arange(length) + 32 + row
            expected = rotated(originals[block][0, layer, tokens], table, baked, target)
            torch.testing.assert_close(
                now[0, layer, rows].double(), expected, atol=tolerance, rtol=tolerance
            )
        row += length


def test_several_loads_are_filled_together_and_accounted_to_their_steps(rig: Rig) -> None:
    originals = [rig.pool.page(page) for page in range(2)]
    rig.write(0, [0, 1])
    first, second = rig.open(), rig.open()
    loads = []
    for step, block, page in ((first, 0, 10), (second, 1, 11)):
        (name,) = rig.promise(step, [whole_block(block)])
        loads.append(rig.plane.queue_load(step, [name], [page]))
    rig.plane.fill(loads, rig.layers_done.append)
    assert rig.layers_done == list(range(LAYERS))
    for load in loads:
        rig.plane.release_load(load)
    assert_filled(rig, 10, 0, originals[0], 0)
    assert_filled(rig, 11, 0, originals[1], 1)
    assert [rig.close(step, []).loaded_pages for step in (first, second)] == [1, 1]


def test_a_row_of_the_index_is_made_of_the_unrotated_keys_of_the_page(rig: Rig) -> None:
    original = rig.pool.page(4)
    rig.write(0, [3, 4], at=5)
    row = rig.plane.index_row("w", 1)
    assert row is not None
    names = ("mean-k", "rotated-mean", "content")
    (means,), _, (scales, codes) = signals_of(rig.tables, *names).parts(row.unsqueeze(0))
    for layer, table in enumerate(rig.tables):
        raw = rotated(original[0, layer], table, POSITIONS + 32 * 6, None)
        torch.testing.assert_close(
            means[0, layer].double(), raw.mean(dim=0), atol=1e-4, rtol=1e-3
        )
        for place, (of_layer, kv_head) in enumerate(((1, 0), (2, 1))):
            if layer == of_layer:
                keys = codes[0, place].double() * scales[0, place].double().unsqueeze(1)
                torch.testing.assert_close(keys, raw[:, kv_head], atol=0.02, rtol=0)


def test_the_index_does_not_depend_on_how_tokens_were_split_into_steps(rig: Rig) -> None:
    rig.write(0, [0, 1, 2], workspace="cold")
    rig.write(0, [0], workspace="steps")
    rig.write(1, [1, 2], at=1, workspace="steps")
    for block in range(3):
        cold, steps = rig.plane.index_row("cold", block), rig.plane.index_row("steps", block)
        assert cold is not None and steps is not None and torch.equal(cold, steps)


# ---- promises --------------------------------------------------------------------------------


def test_a_view_with_a_missing_block_promises_nothing_and_names_it(rig: Rig) -> None:
    rig.write(0, [0, 1])
    step = rig.open()
    names = rig.names(4, "n")
    view = list(zip(names, map(whole_block, (0, 7, 1, 5)), strict=True))
    assert rig.plane.promise(step, view) == [5, 7]
    assert rig.plane.granted_pages(names) == 0


def test_promised_pages_are_granted_until_their_step_closes(rig: Rig) -> None:
    rig.write(0, [0, 1])
    step = rig.open()
    names = rig.promise(step, [whole_block(0), whole_block(1)])
    assert rig.plane.granted_pages([*names, "other"]) == 2
    assert rig.plane.granted_pages(["other", *names]) == 0
    assert rig.plane.granted_pages(names[1:]) == 1
    rig.close(step, [])
    assert rig.plane.granted_pages(names) == 0


def test_blocks_of_another_workspace_are_not_promised(rig: Rig) -> None:
    rig.write(0, [0], workspace="other")
    assert rig.plane.promise(rig.open("w"), [("n", whole_block(0))]) == [0]


def test_a_source_that_does_not_fill_its_page_is_refused(rig: Rig) -> None:
    rig.write(0, [0])
    with pytest.raises(ValueError, match="fills 31"):
        rig.plane.promise(rig.open(), [("n", (Slice(0, 0, 31),))])


def test_an_unknown_step_is_refused(rig: Rig) -> None:
    with pytest.raises(ControlError, match="not open"):
        rig.plane.promise("unknown", [])
    with pytest.raises(ControlError, match="not open"):
        rig.plane.close_step("unknown", [])
    assert not rig.plane.stage_out("unknown", ["n"], [0])
    assert not rig.plane.stage_out(None, ["n"], [0])
    assert rig.plane.stats()["host_used_blocks"] == 0


# ---- staging ---------------------------------------------------------------------------------


def test_pages_are_offered_again_until_they_are_named(rig: Rig) -> None:
    step = rig.open()
    assert not rig.plane.stage_out(step, ["a"], [0])
    rig.close(step, [("a", 0, 0)])
    assert rig.plane.stage_out(rig.open(), ["a"], [0])


def test_unnamed_pages_are_freed_when_the_step_closes(rig: Rig) -> None:
    step = rig.open()
    rig.plane.stage_out(step, ["a", "b", "c"], [0, 1, 2])
    assert rig.plane.stats()["staged_pages_now"] == 3
    outcome = rig.close(step, [("a", 0, 0)])
    assert outcome.resident == [0]
    stats = rig.plane.stats()
    assert (stats["host_used_blocks"], stats["staged_pages_now"], stats["blocks"]) == (1, 0, 1)


def test_a_page_offered_twice_is_copied_once(rig: Rig) -> None:
    original = rig.pool.page(0)
    step = rig.open()
    rig.plane.stage_out(step, ["a", "b"], [0, 1])
    rig.pool.k_buffer[0].zero_()
    rig.plane.stage_out(step, ["a", "b", "c"], [0, 1, 2])
    assert rig.plane.stats()["staged_pages"] == 3
    rig.close(step, [("a", 0, 0), ("b", 1, 1)])
    found = rig.plane.block_payload("w", 0)
    assert found is not None and torch.equal(found[0], original)


def test_view_pages_offered_for_stage_out_are_never_stored(rig: Rig) -> None:
    """Bytes that the engine computed for a promised page are not the truth of a block."""
    rig.write(0, [0, 1])
    step = rig.open()
    names = rig.promise(step, [whole_block(0), whole_block(1)])
    assert rig.plane.stage_out(step, names, [10, 11])
    assert rig.plane.stats()["staged_pages_now"] == 0
    assert not rig.plane.stage_out(step, [*names, "new"], [10, 11, 12])
    assert rig.plane.stats()["staged_pages_now"] == 1
    assert rig.close(step, [(names[1], 7, 1)]).resident == []
    assert rig.plane.stats()["host_used_blocks"] == 2


def test_a_page_that_was_moved_to_its_place_is_never_the_truth_of_a_block(rig: Rig) -> None:
    """The tree may offer it again under a step that did not promise it: its prompt spells it."""
    rig.write(0, [0, 1])
    step = rig.open()
    (name,) = rig.promise(step, [whole_block(1)])
    rig.load(step, [name], [10])
    rig.close(step, [])
    later = rig.open()
    assert rig.plane.stage_out(later, [name], [10])
    assert rig.close(later, [(name, 2, 0)]).resident == []


def test_a_page_that_an_earlier_block_already_was_is_adopted_as_a_copy(rig: Rig) -> None:
    (name,) = rig.write(0, [0], at=3)
    step = rig.open()
    assert rig.plane.stage_out(step, [name], [0])
    assert rig.close(step, [(name, 1, 3)]).resident == [1]
    first, copy = rig.plane.block_payload("w", 0), rig.plane.block_payload("w", 1)
    assert first is not None and copy is not None
    assert torch.equal(first[0], copy[0]) and first[1] == copy[1] == 96
    assert rig.plane.stats()["host_used_blocks"] == 2
    rig.plane.forget("w", [0])
    rig.plane.check_integrity()
    assert rig.plane.block_payload("w", 1) is not None


def test_a_copy_that_the_host_tier_has_no_room_for_is_reported(rig: Rig) -> None:
    (name,) = rig.write(0, [0])
    pinned = rig.fill_host_with_staged_pages(HOST_BLOCKS - 1)
    outcome = rig.close(rig.open(), [(name, HOST_BLOCKS, 0)])
    assert outcome.resident == [] and outcome.refused_pages == 1
    rig.close(pinned, [])


def test_blocks_are_a_run_without_gaps(rig: Rig) -> None:
    """What lies behind a page that was not computed would be a block that nobody asks for."""
    step = rig.open()
    rig.plane.stage_out(step, ["a", "c"], [0, 2])
    assert rig.close(step, [("a", 0, 0), ("b", 1, 1), ("c", 2, 2)]).resident == [0]
    assert rig.plane.stats()["host_used_blocks"] == 1


def test_a_resident_block_is_not_replaced(rig: Rig) -> None:
    original = rig.pool.page(0)
    rig.write(0, [0])
    step = rig.open()
    rig.plane.stage_out(step, ["again"], [5])
    assert rig.close(step, [("again", 0, 4)]).resident == [0]
    found = rig.plane.block_payload("w", 0)
    assert found is not None and torch.equal(found[0], original) and found[1] == 0
    assert rig.plane.stats()["host_used_blocks"] == 1


def test_a_host_tier_full_of_pages_in_use_refuses_and_leaks_nothing(rig: Rig) -> None:
    pinned = rig.fill_host_with_staged_pages(HOST_BLOCKS - 2)
    step = rig.open()
    assert not rig.plane.stage_out(step, ["x", "y", "z"], [0, 1, 2])
    assert rig.plane.stats()["host_used_blocks"] == HOST_BLOCKS - 2
    assert not rig.plane.stage_out(step, ["x", "y"], [0, 1])
    outcome = rig.close(step, [("x", 20, 0), ("y", 21, 1), ("z", 22, 2)])
    assert outcome.refused_pages == 3 and outcome.resident == [20, 21]
    assert rig.plane.stats()["refused_pages"] == 3
    assert rig.plane.stats()["host_used_blocks"] == HOST_BLOCKS
    rig.close(pinned, [])
    rig.plane.forget("w", range(100))
    assert rig.plane.stats()["host_used_blocks"] == 0


def test_a_full_host_tier_without_a_disk_gives_up_the_least_wanted_block(rig: Rig) -> None:
    """Its tokens can be computed again, and its index row says when that is worth it."""
    rig.write(0, list(range(HOST_BLOCKS)))
    step = rig.open()
    rig.promise(step, [whole_block(n) for n in range(HOST_BLOCKS) if n != 5])
    rig.close(step, [])
    rig.write(HOST_BLOCKS, [0])
    assert rig.plane.block_payload("w", 5) is None and rig.plane.index_row("w", 5) is not None
    assert rig.plane.block_payload("w", HOST_BLOCKS) is not None
    assert rig.plane.stats()["lost_only_copies"] == 1
    assert rig.plane.promise(rig.open(), [("p", whole_block(5))]) == [5], "it is missing, not lost"


def test_a_block_that_is_being_loaded_is_not_given_up(rig: Rig) -> None:
    rig.write(0, list(range(HOST_BLOCKS)))
    step = rig.open()
    names = rig.promise(step, [whole_block(0)])
    load = rig.plane.queue_load(step, names, [20])
    assert load is not None
    for block in range(HOST_BLOCKS, 2 * HOST_BLOCKS - 1):
        rig.write(block, [1])
    assert rig.plane.block_payload("w", 0) is not None
    rig.plane.release_load(load)


# ---- losing and forgetting -------------------------------------------------------------------


def test_a_load_of_bytes_that_are_gone_is_not_queued(rig: Rig) -> None:
    rig.write(0, [0, 1])
    step = rig.open()
    names = rig.promise(step, [whole_block(0), whole_block(1)])
    rig.plane.forget("w", [1])
    assert rig.plane.granted_pages(names) == 2, "a promised page must be granted, then fail"
    assert rig.plane.queue_load(step, names, [0, 1]) is None
    assert rig.plane.queue_load(step, ["other"], [0]) is None
    rig.plane.forget("w", [0])
    assert rig.plane.stats()["host_used_blocks"] == 0, "a refused load keeps a pin"


def test_forgetting_during_a_load_keeps_the_bytes_until_it_is_released(rig: Rig) -> None:
    original = rig.pool.page(0)
    rig.write(0, [0])
    step = rig.open()
    names = rig.promise(step, [whole_block(0), whole_block(0)])
    load = rig.plane.queue_load(step, names, [10, 11])
    assert load is not None
    assert rig.plane.forget("w", [0]) == 1
    assert rig.plane.stats()["blocks"] == 0 and rig.plane.stats()["host_used_blocks"] == 1
    rig.plane.check_integrity()
    rig.write(1, [2, 3])
    rig.plane.fill([load], rig.layers_done.append)
    assert_filled(rig, 10, 0, original, 0)
    assert_filled(rig, 11, 1, original, 0)
    rig.plane.release_load(load)
    assert rig.plane.stats()["host_used_blocks"] == 2
    rig.plane.check_integrity()


def test_a_failed_load_is_counted_and_unpinned(rig: Rig) -> None:
    rig.write(0, [0])
    step = rig.open()
    load = rig.plane.queue_load(step, rig.promise(step, [whole_block(0)]), [0])
    assert load is not None
    rig.plane.release_load(load, failed=True)
    assert rig.plane.stats()["failed_loads"] == 1
    rig.plane.forget("w", [0])
    assert rig.plane.stats()["host_used_blocks"] == 0


def test_forgotten_blocks_can_still_be_selected(rig: Rig) -> None:
    rig.write(0, [0, 1, 2])
    before = scores(rig, "w", 3)
    rig.plane.forget("w", [1])
    rig.plane.check_integrity()
    after = scores(rig, "w", 3)
    assert before.keys() == {"mean-k", "rotated-mean", "content"}
    for name, of_blocks in before.items():
        assert of_blocks.count_nonzero() == 3 and torch.equal(after[name], of_blocks)
    assert rig.plane.index_row("w", 1) is not None and rig.plane.block_payload("w", 1) is None


def test_unknown_workspaces_score_nothing(rig: Rig) -> None:
    found = scores(rig, "unknown", 3)
    assert len(found) == 3 and not any(of_blocks.any() for of_blocks in found.values())


def test_a_forgotten_block_can_be_computed_again(rig: Rig) -> None:
    rig.write(0, [0, 1])
    rig.plane.forget("w", [0])
    again = rig.pool.page(9)
    rig.write(0, [9], at=4)
    found = rig.plane.block_payload("w", 0)
    assert found is not None and torch.equal(found[0], again) and found[1] == 128


def test_dropping_a_workspace_leaves_the_others(rig: Rig) -> None:
    rig.write(0, [0, 1], workspace="a")
    rig.write(0, [2], workspace="b")
    assert rig.plane.drop_workspace("a") == 2 and rig.plane.drop_workspace("a") == 0
    stats = rig.plane.stats()
    assert stats["blocks"] == stats["host_used_blocks"] == 1
    assert rig.plane.block_payload("b", 0) is not None
    rig.plane.check_integrity()


def test_forgetting_what_is_not_there_does_nothing(rig: Rig) -> None:
    assert rig.plane.forget("unknown", [0, 1]) == 0
    rig.write(0, [0])
    assert rig.plane.forget("w", [5]) == 0


# ---- several threads -------------------------------------------------------------------------


def test_two_steps_that_name_the_same_block_at_once_keep_one(rig: Rig) -> None:
    """Both find the block absent; the arithmetic between the two locks lets them overlap."""
    steps = [rig.open(), rig.open()]
    for step in steps:
        rig.plane.stage_out(step, [f"of {step}"], [0])
    both_inside = threading.Barrier(2, timeout=5)
    rows_of = rig.plane._adoption._rows

    def wait_for_the_other(blocks: list[object]) -> torch.Tensor:
        both_inside.wait()
        return rows_of(blocks)  # type: ignore[arg-type]

    rig.plane._adoption._rows = wait_for_the_other  # type: ignore[method-assign]
    results: list[object] = []

    def close(step: str) -> None:
        try:
            results.append(rig.plane.close_step(step, [(f"of {step}", 0, 0)]).resident)
        except BaseException as error:
            results.append(error)

    threads = [threading.Thread(target=close, args=(step,)) for step in steps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[0], [0]]
    rig.plane.check_integrity()
    assert rig.plane.stats()["host_used_blocks"] == 1


def test_integrity_is_checked_before_or_after_a_step_ends_and_never_in_between(rig: Rig) -> None:
    """While its rows are computed, a step's pages are neither staged nor blocks."""
    step = rig.open()
    rig.plane.stage_out(step, ["page"], [0])
    inside, go = threading.Event(), threading.Event()
    rows_of = rig.plane._adoption._rows

    def slow(blocks: list[object]) -> torch.Tensor:
        inside.set()
        assert go.wait(5)
        return rows_of(blocks)  # type: ignore[arg-type]

    rig.plane._adoption._rows = slow  # type: ignore[method-assign]
    done: list[str] = []

    def close() -> None:
        rig.plane.close_step(step, [("page", 0, 0)])
        done.append("closed")

    def check() -> None:
        rig.plane.check_integrity()
        done.append("checked")

    closing, checking = threading.Thread(target=close), threading.Thread(target=check)
    closing.start()
    assert inside.wait(5)
    checking.start()
    checking.join(0.05)
    other = rig.open()  # steps go on meanwhile
    assert done == []
    go.set()
    closing.join()
    checking.join()
    assert sorted(done) == ["checked", "closed"], "the check failed"
    rig.close(other, [])


def test_scores_can_be_asked_while_the_index_grows(rig: Rig) -> None:
    """A tile is made in two steps; whoever scores in between sees it only when it is whole."""
    rig.write(0, [0, 1])
    index = rig.plane.scored_index("w")
    index._tiles.append(index._new_tile())
    blocks = TILE_BLOCKS + 3
    scores = index.score(
        torch.ones(LAYERS, 2, QUERY_HEADS, DIM),
        torch.zeros(blocks, dtype=torch.int64),
        0,
        torch.ones(blocks, dtype=torch.bool),
    )
    for of_blocks in scores.values():
        assert of_blocks.shape == (blocks,) and not of_blocks[2:].any()


# ---- negative controls -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("leaked slot", "accounted for"),
        ("slot freed twice", "free list|accounted for"),
        ("slot held twice", "held twice|held by two"),
        ("row lost", r"blocks \[0\] of w have no index row"),
        ("index lost", "no index"),
        ("promise left", "outlived its step"),
    ],
)
def test_integrity_catches_a_planted_fault(rig: Rig, fault: str, message: str) -> None:
    rig.write(0, [0, 1])
    step = rig.open()
    rig.promise(step, [whole_block(0)])
    rig.plane.stage_out(step, ["new"], [DEVICE_PAGES - 1])
    rig.plane.check_integrity()
    staged = rig.plane._ledger.find(step)
    assert staged is not None
    if fault == "leaked slot":
        rig.plane.host.allocate(1)
    elif fault == "slot freed twice":
        rig.plane.host.free([0])
    elif fault == "slot held twice":
        staged.staged["new"] = 0
    elif fault == "row lost":
        rig.plane._indexes.of("w")._present[0][0] = False
    elif fault == "index lost":
        rig.plane._indexes.drop("w")
    else:
        staged.promised.clear()
    with pytest.raises(AssertionError, match=message):
        rig.plane.check_integrity()
