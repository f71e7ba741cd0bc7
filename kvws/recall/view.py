"""Composing an execution view: pages, their tokens and their hashes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvws.blocks.key import BLOCK_TOKENS, page_hashes
from kvws.blocks.page import PageSource, require_full_page, whole_block


@dataclass(frozen=True)
class ExecutionView:
    """Pages at positions 0 … 32·n - 1, in order.

    Raises:
        ValueError: a source does not fill its page.
    """

    pages: tuple[PageSource, ...]

    def __post_init__(self) -> None:
        for source in self.pages:
            require_full_page(source)

    @classmethod
    def of_blocks(cls, blocks: Sequence[int]) -> ExecutionView:
        """The usual view: one whole block a page."""
        return cls(tuple(whole_block(block) for block in blocks))

    @property
    def tokens(self) -> int:
        """Length of the view."""
        return len(self.pages) * BLOCK_TOKENS

    def token_ids(self, block_tokens: Callable[[int], Sequence[int]]) -> list[int]:
        """The view as the engine's prompt spells it. `block_tokens`: 32 ids of a block."""
        return [
            token
            for source in self.pages
            for block, offset, length in source
            for token in block_tokens(block)[offset : offset + length]
        ]


@dataclass(frozen=True)
class Prompt:
    """What one engine request is sent: a view, and the tokens to compute behind it.

    ```
    0            view.tokens                 len(token_ids)
    |  view pages (promised)  |  new tokens  |
    ```
    """

    view: ExecutionView
    token_ids: tuple[int, ...]
    namespace: str

    @classmethod
    def compose(
        cls,
        view: ExecutionView,
        new_tokens: Sequence[int],
        namespace: str,
        block_tokens: Callable[[int], Sequence[int]],
    ) -> Prompt:
        return cls(view, (*view.token_ids(block_tokens), *new_tokens), namespace)

    def promised_pages(self) -> list[tuple[str, PageSource]]:
        """(hash, source) of every view page, in order."""
        hashes = page_hashes(self.token_ids[: self.view.tokens], self.namespace)
        return list(zip(hashes, self.view.pages, strict=True))

    def new_pages(self, generated: Sequence[int] = ()) -> list[tuple[str, int]]:
        """(hash, page index) of the full pages behind the view.

        `generated`: tokens decoded after the prompt whose KV exists.
        """
        first = len(self.view.pages)
        hashes = page_hashes((*self.token_ids, *generated), self.namespace)
        return [(page_hash, first + i) for i, page_hash in enumerate(hashes[first:])]
