"""What fills a page of the execution view."""

from __future__ import annotations

from typing import NamedTuple

from kvws.blocks.key import BLOCK_TOKENS


class Slice(NamedTuple):
    """`length` consecutive tokens of block `block`, from its token `offset` on."""

    block: int
    offset: int
    length: int


PageSource = tuple[Slice, ...]
"""Slices in token order; their lengths add up to BLOCK_TOKENS."""


def whole_block(block: int) -> PageSource:
    """The usual source: one page is one block."""
    return (Slice(block, 0, BLOCK_TOKENS),)


def require_full_page(source: PageSource) -> None:
    """Refuse a source that would leave part of a page unfilled.

    Raises:
        ValueError: a slice leaves its block, or the lengths do not add up to one page.
    """
    for piece in source:
        if piece.length < 1 or piece.offset < 0 or piece.offset + piece.length > BLOCK_TOKENS:
            raise ValueError(f"{piece} leaves its block of {BLOCK_TOKENS} tokens")
    filled = sum(piece.length for piece in source)
    if filled != BLOCK_TOKENS:
        raise ValueError(f"a page holds {BLOCK_TOKENS} tokens, {source} fills {filled}")
