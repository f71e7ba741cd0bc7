"""Candidates of a tiled index, without a copy of it."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvws.kernels import candidates as module
from kvws.kernels.candidates import chunks, pieces, places, spread, stretches, together

masks = st.lists(st.lists(st.booleans(), max_size=20), min_size=1, max_size=6)


def of_bools(tiles: list[list[bool]]) -> list[torch.Tensor]:
    return [torch.tensor(tile, dtype=torch.bool) for tile in tiles]


@given(tiles=masks)
def test_places_are_those_of_each_mask(tiles: list[list[bool]]) -> None:
    found = places(of_bools(tiles))
    assert [blocks.tolist() for blocks in found] == [
        [place for place, wanted in enumerate(tile) if wanted] for tile in tiles
    ]


@given(tiles=masks, most=st.integers(1, 30))
def test_pieces_and_their_chunks_are_all_candidates_in_order(
    tiles: list[list[bool]], most: int
) -> None:
    parts = [torch.arange(len(tile)) + 100 * number for number, tile in enumerate(tiles)]
    expected = torch.cat(parts)[torch.cat(of_bools(tiles))].tolist()
    runs = chunks(pieces(of_bools(tiles)), most)
    got = [int(x) for run in runs for piece in run for x in piece.of(parts[piece.tile], 0)]
    assert got == expected
    assert all(sum(p.count for p in run) <= most or len(run) == 1 for run in runs)


@given(tiles=masks)
def test_one_value_per_candidate_is_spread_over_the_blocks(tiles: list[list[bool]]) -> None:
    wanted = torch.cat(of_bools(tiles))
    values = 1.0 + torch.arange(int(wanted.sum()))
    everywhere = spread(of_bools(tiles), values)
    assert torch.equal(everywhere[wanted], values) and not everywhere[~wanted].any()


def test_candidates_without_a_gap_are_not_copied() -> None:
    mask = torch.tensor([False, True, True, True, False])
    part = torch.arange(10.0).view(2, 5)
    (piece,) = pieces([mask])
    assert piece.of(part, 1).data_ptr() == part[:, 1:].data_ptr()
    ((given,),) = stretches([(part,)], [piece], 1)
    assert given.data_ptr() == part[:, 1:].data_ptr()


def test_a_large_tile_with_gaps_is_copied_in_pieces() -> None:
    mask = torch.ones(3 * module.PIECE_BLOCKS, dtype=torch.bool)
    mask[5::100] = False
    found = pieces([mask])
    assert len(found) == 3 and all(piece.count <= module.PIECE_BLOCKS for piece in found)


def test_what_is_scattered_over_many_tiles_is_put_together() -> None:
    """Seven of each of 100 tiles: a step for each of them would be paid 100 times."""
    mask = torch.zeros(50, dtype=torch.bool)
    mask[3::7] = True
    tiles = [(torch.full((2, 50), float(number)),) for number in range(100)]
    given = list(stretches(tiles, pieces([mask] * 100), 1))
    assert sum(part.shape[1] for (part,) in given) == 700
    assert len(given) == 2
    assert given[0][0][0].tolist() == sorted(given[0][0][0].tolist())


def test_no_masks_have_no_places() -> None:
    assert places([]) == [] and pieces([]) == []


def test_scattered_candidates_are_copied_once_if_the_copy_fits() -> None:
    mask = torch.zeros(50, dtype=torch.bool)
    mask[3::7] = True
    tiles = [(torch.full((2, 50), float(number)),) for number in range(100)]
    found = pieces([mask] * 100)
    fits = 700 * 2 * 4
    copied, whole = together(tiles, found, 1, fits)
    assert len(copied) == len(whole) == 2
    before, after = (
        torch.cat([piece.of(given[piece.tile][0], 1) for piece in some], dim=1)
        for given, some in ((tiles, found), (copied, whole))
    )
    assert torch.equal(before, after)
    assert together(tiles, found, 1, fits - 1) == (tiles, found)


def test_candidates_that_fill_their_tiles_are_never_copied() -> None:
    tiles = [(torch.zeros(2, module.PIECE_BLOCKS),)] * 3
    found = pieces([torch.ones(module.PIECE_BLOCKS, dtype=torch.bool)] * 3)
    assert together(tiles, found, 1, 1 << 40) == (tiles, found)
