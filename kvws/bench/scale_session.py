"""One session of millions of tokens: its log, its words and its index are the product's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from kvws.bench.scale_index import VariedRows, grow_index, profile_of, random_queries, signals_of
from kvws.bench.scale_memory import held_bytes
from kvws.bench.scale_words import ZipfTurns
from kvws.blocks.key import BLOCK_TOKENS
from kvws.chat.render import ChatRenderer
from kvws.chat.spelling import spelling_of
from kvws.limits import Limits
from kvws.models.geometry import read_model_config
from kvws.recall.index import BlockIndex
from kvws.recall.recipe import FUSED
from kvws.recall.selector import Selector
from kvws.session.workspace import Workspace

_GROWN_AT_ONCE_BLOCKS = 8192
_KEPT_BYTES_PER_BLOCK = 8192
"""Of the log and of what the blocks say: more than they need."""


class LongSession:
    """A made-up session that grows: words of turns, and index rows without any model behind them.

    Attributes:
        geometry: of the model whose tokenizer and sizes it has.
        limits: of its steps.
        workspace, thread: the log, with all blocks in one line.
        index: their rows for the default signals.
        text_bytes: how much the process grew while it read what the blocks say.
    """

    def __init__(self, model: Path, limits: Limits, *, seed: int = 7) -> None:
        self.geometry = read_model_config(model)
        self.limits = limits
        renderer = ChatRenderer(model)
        spelling = spelling_of(renderer)
        self.turns = ZipfTurns(spelling, self.geometry.vocab, seed)
        self.workspace = Workspace("scale")
        self.workspace.selector = Selector(FUSED, spelling)
        self.thread = self.workspace.thread("main")
        names = [signal.value for signal in FUSED.rank_signals]
        self._signals = signals_of(names, self.geometry, profile_of(model))
        self.index = BlockIndex(self._signals)
        self.text_bytes = 0
        self._rows = VariedRows(self._signals, self.geometry, seed)
        self._seed = seed
        self._left: list[int] = []  # tokens of a turn that are no block yet

    @property
    def blocks(self) -> int:
        return len(self.thread.line)

    @property
    def bytes_per_block(self) -> int:
        """Memory that a block takes at most: its row, its words, and its place in the log."""
        return self._signals.row_bytes + _KEPT_BYTES_PER_BLOCK

    def grow(self, blocks: int, progress: Callable[[str], None]) -> None:
        """Go on until there are so many blocks."""
        while self.blocks < blocks:
            first = self.blocks
            self.register(self.new_tokens(min(_GROWN_AT_ONCE_BLOCKS, blocks - first)))
            held = held_bytes()
            self.workspace.selector.catch_up(self.workspace, _GROWN_AT_ONCE_BLOCKS)
            self.text_bytes += max(0, held_bytes() - held)
            grow_index(self.index, self._rows, first, self.blocks)
            progress(f"{BLOCK_TOKENS * self.blocks:,} tokens")

    def new_tokens(self, blocks: int) -> list[int]:
        """What the session goes on with: whole blocks of turns."""
        tokens, self._left = self._left, []
        while len(tokens) < BLOCK_TOKENS * blocks:
            tokens += self.turns.turn()
        self._left = tokens[BLOCK_TOKENS * blocks :]
        return tokens[: BLOCK_TOKENS * blocks]

    def new_rows(self, blocks: int) -> torch.Tensor:
        """Their index rows: [blocks, row_bytes] uint8."""
        return self._rows.some(blocks)

    def register(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Whole blocks continue the line, and the thread moves on. Returns their numbers."""
        workspace, thread = self.workspace, self.thread
        numbers = tuple(workspace.allocate(thread.line, tokens))
        workspace.announce(numbers)
        view = thread.view or numbers[: self.limits.budget_blocks]
        workspace.record(thread, thread.line + numbers, view, numbers)
        return numbers

    def queries(self, tokens: int) -> torch.Tensor:
        """Q of a question of so many tokens."""
        return random_queries(self.geometry, tokens, self._seed)
