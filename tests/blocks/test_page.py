"""Page sources: slices that fill one page, no more and no less."""

from __future__ import annotations

import pytest

from kvws.blocks.page import Slice, require_full_page, whole_block


def test_one_block_fills_one_page() -> None:
    assert whole_block(7) == (Slice(7, 0, 32),)
    require_full_page(whole_block(7))


def test_slices_of_several_blocks_fill_one_page() -> None:
    require_full_page((Slice(0, 30, 2), Slice(1, 0, 1), Slice(0, 3, 29)))


@pytest.mark.parametrize(
    "source",
    [
        (),
        (Slice(0, 0, 31),),
        (Slice(0, 0, 32), Slice(1, 0, 1)),
        (Slice(0, 1, 32),),
        (Slice(0, -1, 32),),
        (Slice(0, 0, 0), Slice(1, 0, 32)),
        (Slice(0, 0, -4), Slice(1, 0, 32), Slice(2, 0, 4)),
        (Slice(0, 0, 33),),
    ],
)
def test_other_sources_are_refused(source: tuple[Slice, ...]) -> None:
    with pytest.raises(ValueError, match=r"block of 32|holds 32"):
        require_full_page(source)
