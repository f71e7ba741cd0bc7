"""What a question is asked behind, arm by arm, at one budget.

All arms of a budget get the same number of tokens. A view holds the first block of the history,
its newest quarter of the budget, and what the arm chooses in the rest:

    view     | sink | chosen blocks, oldest first | newest quarter |

except `sliding window`, the newest blocks alone, and `summary + tail`, which is text. What the
product would pin of a prompt's parts (system prompt, task, trajectory) competes like the rest.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvws.blocks.key import BLOCK_TOKENS
from kvws.errors import ConfigError
from kvws.eval.reader import KeyValues
from kvws.recall.choice import Chosen
from kvws.recall.plan import plan_view
from kvws.recall.recipe import AUTO, Recipe, SignalName, recipe_named
from kvws.recall.regions import Reason, Regions
from kvws.session.ingest import window

Array = npt.NDArray[Any]

FULL = "full context"
SLIDING = "sliding window"
SINK_WINDOW = "sink + window"
RANDOM = "random"
TEXT = "BM25 as text"
SUMMARY = "summary + tail"
ORACLE = "attention oracle"

SINK_BLOCKS = 1
_LEAST_BUDGET_BLOCKS = 4
_RANDOM_DRAWS = 2
_RANKING_RECENT_BLOCKS = 4

SINGLE_SIGNALS = tuple(name for name in SignalName if name != SignalName.RECENCY)
"""Those that make an arm each; the newest blocks are `sink + window` already."""


class BlockHistory(Protocol):
    """A history that blocks are chosen from: `History`, or a stand-in.

    Attributes:
        blocks: how many; they are numbered from 0.
        tokens: of the blocks.
    """

    blocks: int
    tokens: tuple[int, ...]

    def regions(self, sink_blocks: int, recent_blocks: int) -> Regions: ...
    def candidates(self, regions: Regions) -> Array: ...
    def scores(
        self,
        queries: torch.Tensor,
        question: Sequence[int],
        candidates: Array,
        begins_at: int | None = None,
    ) -> dict[SignalName, Array]: ...
    def choose(
        self,
        recipe: Recipe,
        question: Sequence[int],
        scores: dict[SignalName, Array],
        regions: Regions,
        budget_blocks: int,
        in_view: Set[int] = frozenset(),
    ) -> list[Chosen]: ...
    def key_values_of(self, view: Sequence[int]) -> KeyValues: ...


@dataclass(frozen=True)
class Inquiry:
    """A question about a history, and what the full context says about it.

    Attributes:
        question: token ids.
        queries: raw Q [layers, tokens, query_heads, head_dim] of the question.
        mass: [blocks] attention that question and recorded turn gave each block; empty where
            nobody asks for it.
        summary: token ids that the agent replaced the history by; () for none.
    """

    history: BlockHistory
    question: Sequence[int]
    queries: torch.Tensor
    mass: Array = field(default_factory=lambda: np.zeros(0))
    summary: Sequence[int] = ()


@dataclass(frozen=True)
class Context:
    """Blocks whose keys and values are moved, in order, or text that is computed anew."""

    blocks: tuple[int, ...] = ()
    text: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        return len(self.blocks) * BLOCK_TOKENS + len(self.text)


@dataclass(frozen=True)
class Arm:
    """What one way of choosing gave.

    Attributes:
        contexts: several where chance has a part in it.
        choose_ms: to score and choose. Scoring is of all rank signals at once, whichever the arm
            looks at.
    """

    contexts: tuple[Context, ...]
    choose_ms: float = 0.0


def recipes_of(further: Sequence[str], *, with_profile: bool) -> dict[str, Recipe]:
    """The recipes that make an arm each, by name: every signal alone, the default, and others.

    Args:
        further: as `--signals` takes them.
        with_profile: whether the model has one: without it there is no `content`.

    Raises:
        ConfigError: there is no such signal, or it needs a profile.
    """
    names = list(dict.fromkeys([*SINGLE_SIGNALS, AUTO, *further]))
    recipes = {str(name): recipe_named(name) for name in names}
    if with_profile:
        return recipes
    for name in further:
        if name != AUTO and SignalName.CONTENT in recipes[name].weights:
            raise ConfigError(
                f"--signals {name} needs a profile of the model",
                hint="make one with kvws calibrate, or give one with --profile",
            )
    rest = {name: recipe.without([SignalName.CONTENT]) for name, recipe in recipes.items()}
    return {name: recipe for name, recipe in rest.items() if recipe.weights}


def blocks_of_budget(history_blocks: int, percent: int) -> int:
    """Size of the views that are so large a part of a history."""
    return max(_LEAST_BUDGET_BLOCKS, round(percent * history_blocks / 100))


def recent_blocks_of(budget_blocks: int) -> int:
    """A quarter of a view, in whole blocks."""
    return budget_blocks // 4


def arms_at(
    inquiry: Inquiry, budget_blocks: int, recipes: Mapping[str, Recipe], seed: int | str
) -> dict[str, Arm]:
    """Every arm's context. The summary is there only where the session has one."""
    history = inquiry.history
    everything = tuple(range(history.blocks))
    regions = history.regions(SINK_BLOCKS, recent_blocks_of(budget_blocks))
    arms = {
        FULL: Arm((Context(everything),)),
        SLIDING: Arm((Context(everything[history.blocks - budget_blocks :]),)),
        SINK_WINDOW: Arm((Context(window(everything, SINK_BLOCKS, budget_blocks)),)),
    }
    candidates = history.candidates(regions)
    open_ = np.flatnonzero(candidates)
    chance = np.random.default_rng([budget_blocks, *str(seed).encode()])
    shuffled = [chance.permutation(open_) for _ in range(_RANDOM_DRAWS)]
    arms[RANDOM] = Arm(tuple(_view(order, regions, budget_blocks) for order in shuffled))
    by_mass = open_[np.argsort(-inquiry.mass[open_], kind="stable")]
    arms[ORACLE] = Arm((_view(by_mass, regions, budget_blocks),))

    begin = time.perf_counter()
    scores = history.scores(inquiry.queries, inquiry.question, candidates)
    score_ms = _ms_since(begin)
    for name, recipe in recipes.items():
        begin = time.perf_counter()
        chosen = history.choose(recipe, inquiry.question, scores, regions, budget_blocks)
        context = planned(chosen, regions, budget_blocks)
        asked_ranks_ms = score_ms if recipe.rank_signals else 0.0
        arms[name] = Arm((context,), asked_ranks_ms + _ms_since(begin))
    lexical = arms.get(SignalName.LEXICAL)
    if lexical is not None:
        text = text_of(lexical.contexts[0].blocks, history)
        arms[TEXT] = Arm((Context(text=text),), lexical.choose_ms)
    if inquiry.summary:
        arms[SUMMARY] = Arm((_summary(inquiry, budget_blocks),))
    return arms


def view_by(recipe: Recipe, inquiry: Inquiry, budget_blocks: int) -> tuple[int, ...]:
    """The view of one recipe alone, its blocks in order."""
    history = inquiry.history
    regions = history.regions(SINK_BLOCKS, recent_blocks_of(budget_blocks))
    scores = history.scores(inquiry.queries, inquiry.question, history.candidates(regions))
    chosen = history.choose(recipe, inquiry.question, scores, regions, budget_blocks)
    return planned(chosen, regions, budget_blocks).blocks


def rankings(inquiry: Inquiry, recipes: Mapping[str, Recipe], depth: int) -> dict[str, list[int]]:
    """The first blocks of each arm's order, sink and newest 128 tokens left out."""
    history = inquiry.history
    regions = history.regions(SINK_BLOCKS, _RANKING_RECENT_BLOCKS)
    candidates = history.candidates(regions)
    open_ = np.flatnonzero(candidates)
    budget_blocks = depth + len(regions.fixed)
    scores = history.scores(inquiry.queries, inquiry.question, candidates)
    found = {
        ORACLE: open_[np.argsort(-inquiry.mass[open_], kind="stable")].tolist(),
        SINK_WINDOW: open_[::-1].tolist(),
    }
    for name, recipe in recipes.items():
        chosen = history.choose(recipe, inquiry.question, scores, regions, budget_blocks)
        found[name] = [each.block for each in chosen]
    return {name: blocks[:depth] for name, blocks in found.items()}


def competing_blocks(history: BlockHistory) -> Array:
    """Numbers of the blocks that `rankings` ranks."""
    regions = history.regions(SINK_BLOCKS, _RANKING_RECENT_BLOCKS)
    return np.flatnonzero(history.candidates(regions))


def _view(order: Array, regions: Regions, budget_blocks: int) -> Context:
    chosen = [Chosen(int(block), Reason.SCORE, 0.0, {}, None) for block in order]
    return planned(chosen, regions, budget_blocks)


def planned(chosen: Sequence[Chosen], regions: Regions, budget_blocks: int) -> Context:
    """The view of the blocks that deserve a place."""
    plan = plan_view(
        current=(),
        regions=regions,
        chosen=chosen,
        budget_blocks=budget_blocks,
        room_blocks=budget_blocks,
    )
    return Context(plan.view)


def text_of(blocks: Sequence[int], history: BlockHistory) -> tuple[int, ...]:
    """The tokens of blocks, in the order given."""
    return tuple(
        token
        for block in blocks
        for token in history.tokens[block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS]
    )


def _summary(inquiry: Inquiry, budget_blocks: int) -> Context:
    """The summary's beginning, as far as three quarters of the budget hold it, and the newest
    tokens in the rest. It was written after the step, so it may know what comes."""
    room = budget_blocks * BLOCK_TOKENS
    kept = tuple(inquiry.summary[: room - recent_blocks_of(budget_blocks) * BLOCK_TOKENS])
    tail = inquiry.history.tokens[len(inquiry.history.tokens) - (room - len(kept)) :]
    return Context(text=(*kept, *tail))


def _ms_since(begin: float) -> float:
    return 1e3 * (time.perf_counter() - begin)
