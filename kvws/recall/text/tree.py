"""The tokens of the blocks of a workspace, and which continues which, as far as it was read."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kvws.blocks.key import BLOCK_TOKENS

ROOT = -1
_ABSENT = -1


class BlockTree:
    """Blocks by number; a block's parent is added before it. 136 bytes a block."""

    def __init__(self) -> None:
        self._tokens = array("I")
        self._parents = array("i")
        self._depths = array("i")  # blocks before it in its line

    def add(self, number: int, parent: int, tokens: Sequence[int]) -> None:
        """Enter a block that is not there. `parent`: ROOT or a block. Mutates self."""
        assert number not in self, f"block {number} is there"
        assert parent == ROOT or parent in self, f"block {number} comes before its parent"
        assert len(tokens) == BLOCK_TOKENS, f"block {number} has {len(tokens)} tokens"
        missing = number + 1 - len(self._depths)
        if missing > 0:
            self._tokens.extend(array("I", bytes(4 * BLOCK_TOKENS * missing)))
            self._parents.extend([ROOT] * missing)
            self._depths.extend([_ABSENT] * missing)
        self._tokens[number * BLOCK_TOKENS : (number + 1) * BLOCK_TOKENS] = array("I", tokens)
        self._parents[number] = parent
        self._depths[number] = 0 if parent == ROOT else self._depths[parent] + 1

    def __contains__(self, number: object) -> bool:
        return (
            isinstance(number, int)
            and 0 <= number < len(self._depths)
            and self._depths[number] != _ABSENT
        )

    def tokens(self, number: int) -> Sequence[int]:
        """The 32 tokens of a block; none before the first one of a line."""
        if number == ROOT:
            return ()
        return self._tokens[number * BLOCK_TOKENS : (number + 1) * BLOCK_TOKENS]

    def tokens_with_tail(self, number: int, tail_tokens: int) -> list[int]:
        """The tokens of a block behind the last few of its parent."""
        before = self.tokens(self._parents[number])
        return [*before[-tail_tokens:], *self.tokens(number)]

    def line_tokens(self, number: int) -> int:
        """Tokens of the line that ends with a block."""
        return 0 if number == ROOT else BLOCK_TOKENS * (self._depths[number] + 1)

    def stretch(self, head: int, begin: int, end: int) -> list[int]:
        """Tokens begin … end - 1 of the line that ends with block `head`, as far as it goes."""
        blocks: list[int] = []
        while head != ROOT and self.line_tokens(head) > begin:
            if self.line_tokens(head) - BLOCK_TOKENS < end:
                blocks.append(head)
            head = self._parents[head]
        if not blocks:
            return []
        first = self.line_tokens(blocks[-1]) - BLOCK_TOKENS
        tokens = [token for block in reversed(blocks) for token in self.tokens(block)]
        return tokens[max(0, begin - first) : max(0, end - first)]
