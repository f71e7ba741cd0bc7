"""A history that a model has read, as blocks: what views are chosen from, and made of.

The choosing is the product's own: its index, its signals, its selector. Only the keys come from
the reader instead of the engine.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvws.blocks.key import BLOCK_TOKENS
from kvws.eval.reader import KeyValues, Reader
from kvws.recall.choice import Chosen
from kvws.recall.index import BlockIndex
from kvws.recall.profile import Profile
from kvws.recall.recipe import FUSED, Recipe, SignalName
from kvws.recall.regions import Regions
from kvws.recall.selector import Asked, Selector
from kvws.recall.signals.build import KeyGeometry, enabled_signals
from kvws.recall.signals.enabled import raw_keys
from kvws.recall.text.spelling import Spelling
from kvws.session.workspace import Workspace

Array = npt.NDArray[Any]

RANK_SIGNALS = (SignalName.MEAN_K, SignalName.ROTATED_MEAN, SignalName.CONTENT)


class History:
    """The first whole blocks of some tokens.

    Attributes:
        tokens: of the blocks.
        blocks: how many.
        key_values: of those tokens.
    """

    def __init__(
        self,
        reader: Reader,
        tokens: Sequence[int],
        key_values: KeyValues,
        spelling: Spelling,
        profile: Profile | None,
        rank_signals: Sequence[SignalName] = RANK_SIGNALS,
    ) -> None:
        """
        Args:
            key_values: of `tokens`, as read one behind the other from position 0.
            profile: of the model; without one there is no `content`.
            rank_signals: those that are scored by keys.
        """
        self.blocks = len(tokens) // BLOCK_TOKENS
        self.tokens = tuple(tokens[: self.blocks * BLOCK_TOKENS])
        self.key_values = key_values.before(len(self.tokens))
        self._workspace = Workspace("eval")
        self._line = tuple(self._workspace.allocate((), self.tokens))
        self._index = _index_of(reader, self.key_values, profile, rank_signals)
        self._selector = Selector(FUSED, spelling)
        self._selector.catch_up(self._workspace, self.blocks)

    def regions(self, sink_blocks: int, recent_blocks: int) -> Regions:
        """What every view holds."""
        return Regions.of_line(self._line, sink_blocks, recent_blocks)

    def scores(
        self,
        queries: torch.Tensor,
        question: Sequence[int],
        candidates: Array,
        begins_at: int | None = None,
    ) -> dict[SignalName, Array]:
        """What the ranks would score, by signal and block.

        Args:
            queries: raw Q [layers, tokens, query_heads, head_dim] of the question.
            candidates: [blocks] uint8.
            begins_at: position of the question's first token; behind the history when None.
        """
        own = self._selector.content_rows(question)
        found = self._index.score(
            queries,
            torch.tensor(self._workspace.first_positions, dtype=torch.int64),
            len(self.tokens) if begins_at is None else begins_at,
            torch.tensor(candidates.astype(bool)),
            torch.tensor(own.astype(bool)),
        )
        return {SignalName(name): scores.numpy() for name, scores in found.items()}

    def choose(
        self,
        recipe: Recipe,
        question: Sequence[int],
        scores: dict[SignalName, Array],
        regions: Regions,
        budget_blocks: int,
        in_view: Set[int] = frozenset(),
    ) -> list[Chosen]:
        """The blocks that deserve a place, the most deserving first.

        Args:
            in_view: blocks of the view before.
        """
        asked = Asked(
            line=self._line,
            question=question,
            own=self._selector.content_rows(question),
            regions=regions,
            candidates=self.candidates(regions),
            in_view=frozenset(in_view),
            budget_blocks=budget_blocks,
        )
        selector = self._selector.by(recipe)
        wanted = {name: of_blocks for name, of_blocks in scores.items() if name in recipe.weights}
        return list(selector.choose(asked, {**selector.first_look(asked), **wanted}).chosen)

    def candidates(self, regions: Regions) -> Array:
        return np.frombuffer(regions.competes(self.blocks), dtype=np.uint8)

    def key_values_of(self, view: Sequence[int]) -> KeyValues:
        """Keys and values of blocks, in the order given."""
        first = torch.tensor(list(view), dtype=torch.int64).unsqueeze(1) * BLOCK_TOKENS
        return self.key_values.of((first + torch.arange(BLOCK_TOKENS)).flatten())


def _index_of(
    reader: Reader,
    key_values: KeyValues,
    profile: Profile | None,
    rank_signals: Sequence[SignalName],
) -> BlockIndex:
    """The rows that the ranks would keep of a history."""
    names = [name for name in rank_signals if name != SignalName.CONTENT or profile is not None]
    geometry = KeyGeometry(reader.layers, reader.kv_heads, reader.head_dim)
    signals = enabled_signals(names, geometry, [reader.rotary] * reader.layers, profile)
    blocks = key_values.tokens // BLOCK_TOKENS
    keys = key_values.keys.transpose(1, 2)  # [layers, tokens, kv_heads, head_dim]
    rows = signals.rows(raw_keys(keys), torch.full((blocks,), -1))
    index = BlockIndex(signals)
    index.write(range(blocks), rows)
    return index
