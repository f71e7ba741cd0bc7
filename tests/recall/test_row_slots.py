"""Which rows keep their places in a bounded memory."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from kvws.recall.row_slots import RowSlots


def numbers(*blocks: int) -> npt.NDArray[np.int64]:
    return np.array(blocks, dtype=np.int64)


def place(slots: RowSlots, owner: int, *blocks: int) -> tuple[dict[int, int], set[int]]:
    """By block, its slot; and the blocks that are new there."""
    found, fresh = slots.place(owner, numbers(*blocks))
    return (
        {b: int(s) for b, s in zip(blocks, found, strict=True)},
        {b for b, new in zip(blocks, fresh, strict=True) if new},
    )


def test_a_row_keeps_its_slot_while_there_is_room() -> None:
    slots = RowSlots(4)
    first, new = place(slots, 0, 5, 9)
    assert new == {5, 9} and len(set(first.values())) == 2
    second, new = place(slots, 0, 5, 7, 9)
    assert new == {7}
    assert (second[5], second[9]) == (first[5], first[9])
    assert second[7] not in first.values()


def test_rows_of_two_owners_do_not_meet() -> None:
    slots = RowSlots(4)
    mine, _ = place(slots, 0, 1, 2)
    theirs, new = place(slots, 1, 1, 2)
    assert new == {1, 2} and not set(mine.values()) & set(theirs.values())
    assert place(slots, 0, 1, 2) == (mine, set())


def test_what_was_asked_for_longest_ago_gives_way() -> None:
    slots = RowSlots(3)
    place(slots, 0, 1)
    place(slots, 1, 1)
    place(slots, 0, 2)
    place(slots, 0, 1)
    now, new = place(slots, 0, 3)
    assert new == {3}
    assert place(slots, 0, 1, 2, 3)[1] == set(), "the other owner's row was asked for before these"
    assert place(slots, 1, 1)[1] == {1}
    assert now[3] < 3


def test_a_row_that_is_asked_for_now_never_gives_way_to_another_one_of_the_same_call() -> None:
    slots = RowSlots(4)
    place(slots, 0, 0, 1, 2, 3)
    found, new = place(slots, 0, 3, 4, 5, 6)
    assert new == {4, 5, 6} and len(set(found.values())) == 4


def test_forgotten_rows_are_new_again_and_their_slots_are_taken_first() -> None:
    slots = RowSlots(3)
    before, _ = place(slots, 0, 0, 1, 2)
    slots.forget(0, numbers(1, 8))
    now, new = place(slots, 0, 7)
    assert new == {7} and now[7] == before[1]
    assert place(slots, 0, 0, 2)[1] == set()
    slots.forget(5, numbers(1))
    slots.forget_owner(0)
    slots.forget_owner(5)
    assert place(slots, 0, 0, 2, 7)[1] == {0, 2, 7}


@pytest.mark.parametrize("seed", range(5))
def test_slots_are_one_to_one_whatever_is_asked(seed: int) -> None:
    """Against a model: a dictionary of what lies where."""
    random = np.random.default_rng(seed)
    slots = RowSlots(16)
    lies: dict[int, tuple[int, int]] = {}  # by slot
    for _ in range(300):
        owner = int(random.integers(3))
        some = np.sort(random.choice(40, size=int(random.integers(1, 17)), replace=False))
        match int(random.integers(8)):
            case 0:
                slots.forget(owner, some)
                lies = {
                    s: row for s, row in lies.items() if row[0] != owner or row[1] not in some
                }
            case 1:
                slots.forget_owner(owner)
                lies = {s: row for s, row in lies.items() if row[0] != owner}
            case _:
                found, fresh = slots.place(owner, some)
                known = {row: s for s, row in lies.items()}
                for block, slot, new in zip(some, found, fresh, strict=True):
                    assert known.get((owner, int(block))) == (None if new else int(slot))
                lies |= {int(s): (owner, int(b)) for s, b in zip(found, some, strict=True)}
                assert len(set(found.tolist())) == len(some)


def test_more_rows_than_slots_are_an_error_of_the_caller() -> None:
    with pytest.raises(AssertionError, match="3 rows for 2 slots"):
        RowSlots(2).place(0, numbers(0, 1, 2))
