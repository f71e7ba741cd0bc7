"""Residency: a dropped block's slot lives on until the last load has read it."""

from __future__ import annotations

import pytest

from kvws.blocks.table import BlockTable, Residency


def resident(slot: int, page_hash: str = "") -> Residency:
    return Residency(page_hash or f"hash {slot}", slot, first_position=32 * slot)


@pytest.fixture
def table() -> BlockTable:
    """Blocks 0, 1 and 2 of workspace "a" in slots 10, 11 and 12."""
    table = BlockTable()
    for number in range(3):
        table.add(("a", number), resident(10 + number))
    return table


def test_blocks_are_found_by_id_and_by_the_page_they_were_computed_as(table: BlockTable) -> None:
    found = table.find(("a", 1))
    assert found is not None and found.slot == 11
    assert table.computed_as("hash 11") == ("a", 1)
    assert table.find(("b", 1)) is None
    assert table.computed_as("hash 13") is None
    assert table.blocks_of("a") == [0, 1, 2] and table.blocks_of("b") == []
    assert len(table) == 3


def test_a_block_is_entered_once(table: BlockTable) -> None:
    with pytest.raises(AssertionError, match="already resident"):
        table.add(("a", 1), resident(13))


def test_dropping_gives_the_slot_back(table: BlockTable) -> None:
    assert table.drop(("a", 1)) == 11
    assert table.find(("a", 1)) is None and table.computed_as("hash 11") is None
    assert table.drop(("a", 1)) is None
    assert table.slots() == [10, 12]
    table.check_integrity()


def test_a_pinned_slot_is_given_back_by_the_last_unpin(table: BlockTable) -> None:
    block = table.find(("a", 1))
    assert block is not None
    table.pin(block)
    table.pin(block)
    assert table.drop(("a", 1)) is None
    assert sorted(table.slots()) == [10, 11, 12]
    assert table.unpin(block) is None
    assert table.unpin(block) == 11
    assert table.slots() == [10, 12]
    table.check_integrity()


def test_unpinning_a_block_that_stays_gives_nothing_back(table: BlockTable) -> None:
    block = table.find(("a", 1))
    assert block is not None
    table.pin(block)
    assert table.unpin(block) is None
    assert sorted(table.slots()) == [10, 11, 12]


def test_a_block_can_be_entered_again_while_its_former_slot_is_still_read(
    table: BlockTable,
) -> None:
    former = table.find(("a", 1))
    assert former is not None
    table.pin(former)
    table.drop(("a", 1))
    table.add(("a", 1), resident(13))
    table.check_integrity()
    assert table.unpin(former) == 11
    assert sorted(table.slots()) == [10, 12, 13]


def test_the_first_block_of_a_page_stays_its_name(table: BlockTable) -> None:
    table.add(("a", 3), resident(13, "hash 11"))
    assert table.computed_as("hash 11") == ("a", 1)
    table.drop(("a", 3))
    assert table.computed_as("hash 11") == ("a", 1)
    table.check_integrity()


@pytest.mark.parametrize(
    "fault", ["slot twice", "hash without block", "foreign hash", "dropped", "no copy"]
)
def test_integrity_catches_a_planted_fault(table: BlockTable, fault: str) -> None:
    block = table.find(("a", 1))
    assert block is not None
    if fault == "slot twice":
        block.slot = 10
    elif fault == "hash without block":
        del table._by_workspace["a"][1]
    elif fault == "foreign hash":
        block.page_hash = "other"
    elif fault == "no copy":
        block.slot = None
    else:
        block.dropped = True
    with pytest.raises(AssertionError):
        table.check_integrity()
