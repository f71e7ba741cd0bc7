"""A model whose distributions are known: what it has seen more often is likelier."""

from __future__ import annotations

from collections.abc import Sequence, Set

import numpy as np
import numpy.typing as npt
import torch

from kvws.blocks.key import BLOCK_TOKENS
from kvws.eval.reader import KeyValues, Reading
from kvws.recall.choice import Chosen
from kvws.recall.recipe import Recipe, SignalName
from kvws.recall.regions import Reason, Regions

VOCABULARY = 64


class Unigrams:
    """P(next) of a token is its count in everything seen, plus one, over the sum of these. A key
    is its token; every token attends to all before it alike."""

    def __init__(self) -> None:
        self.reads = 0

    def read(
        self,
        tokens: Sequence[int],
        before: KeyValues | None = None,
        *,
        with_queries: bool = False,
        with_mass: bool = False,
    ) -> Reading:
        self.reads += 1
        keys = torch.tensor(list(tokens), dtype=torch.float32).view(1, 1, -1, 1)
        old = [] if before is None else [int(token) for token in before.keys.flatten()]
        counts = np.bincount(old, minlength=VOCABULARY).astype(np.float32)
        rows: list[npt.NDArray[np.float32]] = []
        for token in tokens:
            counts[token] += 1
            rows.append(counts.copy())
        mass = torch.full((1, 1, len(old)), float(len(tokens))) if with_mass else None
        queries = torch.zeros(1, len(tokens), 1, 1) if with_queries else None
        return Reading(KeyValues(keys, keys), queries, torch.tensor(np.stack(rows)), mass)

    def log_probabilities(self, hidden: torch.Tensor) -> torch.Tensor:
        return ((hidden + 1) / (hidden + 1).sum(dim=1, keepdim=True)).log()


class WordHistory:
    """Chooses blocks by how many of the question's tokens they hold, whatever the recipe."""

    def __init__(self, tokens: Sequence[int], key_values: KeyValues) -> None:
        self.blocks = len(tokens) // BLOCK_TOKENS
        self.tokens = tuple(tokens)
        self._key_values = key_values

    def regions(self, sink_blocks: int, recent_blocks: int) -> Regions:
        return Regions.of_line(tuple(range(self.blocks)), sink_blocks, recent_blocks)

    def candidates(self, regions: Regions) -> npt.NDArray[np.uint8]:
        return np.frombuffer(regions.competes(self.blocks), dtype=np.uint8)

    def scores(
        self,
        queries: torch.Tensor,
        question: Sequence[int],
        candidates: npt.NDArray[np.uint8],
        begins_at: int | None = None,
    ) -> dict[SignalName, npt.NDArray[np.float32]]:
        return {}

    def choose(
        self,
        recipe: Recipe,
        question: Sequence[int],
        scores: dict[SignalName, npt.NDArray[np.float32]],
        regions: Regions,
        budget_blocks: int,
        in_view: Set[int] = frozenset(),
    ) -> list[Chosen]:
        def hits(block: int) -> int:
            own = self.tokens[block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS]
            return sum(token in set(question) for token in own)

        order = sorted(map(int, np.flatnonzero(self.candidates(regions))), key=hits, reverse=True)
        return [Chosen(block, Reason.SCORE, 1.0, {}, None) for block in order]

    def key_values_of(self, view: Sequence[int]) -> KeyValues:
        first = torch.tensor(list(view), dtype=torch.int64).unsqueeze(1) * BLOCK_TOKENS
        return self._key_values.of((first + torch.arange(BLOCK_TOKENS)).flatten())
