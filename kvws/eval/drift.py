"""What it costs that a history's KV was itself computed behind views.

A session that outgrows the view is never prefilled at once: each step sees the view of its day.
Here a history is read that way, and then shown whole, against the same history read at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvws.blocks.key import BLOCK_TOKENS
from kvws.eval.arms import SINK_BLOCKS, Inquiry, blocks_of_budget, view_by
from kvws.eval.fidelity import Judgement, MakeHistory, Reads, judge
from kvws.eval.points import QUESTION_TOKENS, Cut, Episode, Point
from kvws.eval.reader import KeyValues
from kvws.recall.recipe import Recipe
from kvws.session.ingest import window

BUDGET_PERCENT = 25
_PROBE_BLOCKS = 16


@dataclass(frozen=True)
class Drift:
    """Of one history.

    Attributes:
        budget_blocks: of the views that it was read behind.
        judgement: the history read step by step, seen whole, against the same read at once.
    """

    name: str
    history_blocks: int
    budget_blocks: int
    judgement: Judgement


def measure_drift(
    cuts: Sequence[Cut], reader: Reads, make_history: MakeHistory, recipe: Recipe
) -> Iterator[Drift]:
    """At the deepest point of each session. Every 128 tokens are a step."""
    for cut in cuts:
        points = [(episode, point) for episode in cut.episodes for point in episode.points]
        if not points:
            continue
        episode, point = max(points, key=lambda found: found[1].history)
        yield _drift_at(episode, point, reader, make_history, recipe)


def _drift_at(
    episode: Episode, point: Point, reader: Reads, make_history: MakeHistory, recipe: Recipe
) -> Drift:
    history = episode.tokens[: point.history]
    budget_blocks = blocks_of_budget(point.history // BLOCK_TOKENS, BUDGET_PERCENT)
    at_once = reader.read(history).key_values
    by_step = read_by_step(history, budget_blocks, reader, make_history, recipe)
    asked = episode.tokens[point.history : point.end]
    full, seen = (
        reader.log_probabilities(reader.read(asked[:-1], before).hidden)
        for before in (at_once, by_step)
    )
    return Drift(
        episode.name(point),
        point.history // BLOCK_TOKENS,
        budget_blocks,
        judge(full, seen, asked, point.question_tokens),
    )


def read_by_step(
    tokens: Sequence[int],
    budget_blocks: int,
    reader: Reads,
    make_history: MakeHistory,
    recipe: Recipe,
) -> KeyValues:
    """Keys and values of whole blocks, all but the first view's computed behind a view each."""
    first = budget_blocks * BLOCK_TOKENS
    known = reader.read(tokens[:first]).key_values
    for begin in range(first, len(tokens), QUESTION_TOKENS):
        step = tokens[begin : begin + QUESTION_TOKENS]
        history = make_history(tokens[:begin], known)
        probed = window(tuple(range(history.blocks)), SINK_BLOCKS, _PROBE_BLOCKS)
        probe = reader.read(step, history.key_values_of(probed), with_queries=True)
        assert probe.queries is not None  # asked for
        view = view_by(recipe, Inquiry(history, step, probe.queries), budget_blocks)
        known = known.and_then(reader.read(step, history.key_values_of(view)).key_values)
    return known
