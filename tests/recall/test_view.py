"""Execution views: pages in order, their tokens, and the names they are promised under."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvws.blocks.key import page_hashes
from kvws.blocks.page import PageSource, Slice, whole_block
from kvws.recall.view import ExecutionView, Prompt


def tokens_of(block: int) -> list[int]:
    return [100 * block + i for i in range(32)]


def test_a_view_of_blocks_spells_their_tokens_in_view_order() -> None:
    view = ExecutionView.of_blocks([7, 2])
    assert view.tokens == 64
    assert view.token_ids(tokens_of) == [*tokens_of(7), *tokens_of(2)]


def test_slices_are_packed_into_pages() -> None:
    pages: tuple[PageSource, ...] = ((Slice(3, 30, 2), Slice(5, 0, 30)), (Slice(5, 0, 32),))
    view = ExecutionView(pages)
    assert view.token_ids(tokens_of) == [330 - 0, 331, *tokens_of(5)[:30], *tokens_of(5)]


def test_a_page_that_is_not_full_is_refused() -> None:
    with pytest.raises(ValueError, match="fills 31"):
        ExecutionView(((Slice(3, 0, 31),),))


def test_view_pages_are_promised_under_the_names_of_the_prompts_first_pages() -> None:
    prompt = Prompt.compose(ExecutionView.of_blocks([4, 9]), range(40), "n", tokens_of)
    names = page_hashes(prompt.token_ids, "n")
    assert prompt.promised_pages() == [(names[0], whole_block(4)), (names[1], whole_block(9))]
    assert prompt.new_pages() == [(names[2], 2)]


def test_generated_tokens_complete_the_pages_behind_the_view() -> None:
    prompt = Prompt.compose(ExecutionView.of_blocks([4]), range(40), "n", tokens_of)
    names = page_hashes((*prompt.token_ids, *range(24)), "n")
    assert prompt.new_pages(range(23)) == [(names[1], 1)]
    assert prompt.new_pages(range(24)) == [(names[1], 1), (names[2], 2)]


def test_without_a_view_all_pages_are_new() -> None:
    prompt = Prompt.compose(ExecutionView(()), range(64), "n", tokens_of)
    assert prompt.promised_pages() == []
    assert [index for _, index in prompt.new_pages()] == [0, 1]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 32), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_any_cut_of_a_token_sequence_into_slices_spells_it(lengths: list[int], random) -> None:  # type: ignore[no-untyped-def]
    """Slices of any length, packed page by page, leave no token out and add none."""
    pieces = [Slice(random.randrange(9), random.randrange(33 - n), n) for n in lengths]
    missing = -sum(lengths) % 32
    if missing:
        pieces.append(Slice(0, 0, missing))
    expected = [t for b, at, n in pieces for t in tokens_of(b)[at : at + n]]
    pages: list[PageSource] = []
    page: list[Slice] = []
    room = 32
    for block, offset, length in pieces:
        while length:
            taken = min(room, length)
            page.append(Slice(block, offset, taken))
            offset, length, room = offset + taken, length - taken, room - taken
            if room == 0:
                pages.append(tuple(page))
                page, room = [], 32
    view = ExecutionView(tuple(pages))
    assert view.token_ids(tokens_of) == expected and view.tokens == len(expected)
