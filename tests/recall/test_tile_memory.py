"""Tiles of index rows: zeros in one piece, whatever the pages they lie in."""

from __future__ import annotations

import gc

import pytest
import torch

from kvws.recall.signals.signal import Part
from kvws.recall.tile_memory import new_tile

PARTS = (
    Part(torch.float16, (3, 2), (5,)),
    Part(torch.int8, (), (7,)),
    Part(torch.float32, (0,), (4,)),  # a rank without such heads
    Part(torch.float32, (1,), ()),
)

either_page_size = pytest.mark.parametrize("huge_pages", [False, True])


@either_page_size
def test_a_tile_is_zeros_of_each_parts_shape(huge_pages: bool) -> None:
    tile = new_tile(PARTS, 2048, huge_pages=huge_pages)
    assert [tuple(part.shape) for part in tile] == [
        (3, 2, 2048, 5),
        (2048, 7),
        (0, 2048, 4),
        (1, 2048),
    ]
    assert [part.dtype for part in tile] == [part.dtype for part in PARTS]
    assert all(not part.any() for part in tile)


@either_page_size
def test_parts_do_not_overlap_and_begin_at_cache_lines(huge_pages: bool) -> None:
    tile = new_tile(PARTS, 9, huge_pages=huge_pages)
    for number, part in enumerate(tile):
        part.fill_(number + 1)
    for number, part in enumerate(tile):
        assert bool((part == number + 1).all())
        assert part.numel() == 0 or part.data_ptr() % 64 == 0


def test_a_part_keeps_its_memory_when_the_others_are_gone() -> None:
    first = new_tile(PARTS, 2048, huge_pages=False)[0].fill_(1)
    gc.collect()
    others = [new_tile(PARTS, 2048, huge_pages=False) for _ in range(8)]
    assert bool((first == 1).all()) and not any(tile[0].any() for tile in others)


@either_page_size
def test_a_tile_may_have_no_bytes(huge_pages: bool) -> None:
    (only,) = new_tile([Part(torch.float16, (0,), (8,))], 2048, huge_pages=huge_pages)
    assert only.shape == (0, 2048, 8)
    assert new_tile([], 2048, huge_pages=huge_pages) == []
