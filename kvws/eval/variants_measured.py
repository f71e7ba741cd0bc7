"""What each variant of the default is worth, at the same steps.

    point ─▶ full context, once ─▶ scores, once per asking and layers ─▶ view of each variant
                      └───────────────── compared ◀── read question and turn ◀──┘
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

from kvws.eval.arms import (
    SINK_BLOCKS,
    Array,
    BlockHistory,
    Context,
    blocks_of_budget,
    planned,
    recent_blocks_of,
    text_of,
)
from kvws.eval.fidelity import Judgement, PointJudge, Progress, Reads
from kvws.eval.points import Cut, Episode, Point
from kvws.eval.reader import KeyValues
from kvws.eval.variants import STEP_BEFORE, Asking, Thirds, Variant
from kvws.recall.recipe import SignalName
from kvws.recall.regions import Regions
from kvws.session.ingest import window

MakeHistories = Callable[[Sequence[int], KeyValues, Thirds | None], BlockHistory]
"""Blocks of tokens, with their keys and values: scored by all of the default's signals, or by
rotated-mean alone in those layers."""


@dataclass(frozen=True)
class Shown:
    """What a variant's view is worth at one point.

    Attributes:
        loaded: share of its blocks that the view of the step before does not hold.
    """

    judgement: Judgement
    loaded: float


@dataclass(frozen=True)
class VariantResult:
    """Everything about one point.

    Attributes:
        window: by budget in percent of the history, the worth of `sink + window`.
        shown: by budget, and by variant.
    """

    name: str
    trace: str
    format: str
    history_blocks: int
    window: Mapping[int, Judgement]
    shown: Mapping[int, Mapping[str, Shown]]


def measure_variants(
    cuts: Sequence[Cut],
    reader: Reads,
    histories: MakeHistories,
    variants: Sequence[Variant],
    budgets: Sequence[int],
    progress: Progress = lambda done, what: None,
) -> list[VariantResult]:
    """Measure every point, one episode after the other."""
    results: list[VariantResult] = []
    for episode in (episode for cut in cuts for episode in cut.episodes):
        progress(len(results), f"reading {episode.trace}")
        longest = max(point.history for point in episode.points)
        key_values = reader.read(episode.tokens[:longest]).key_values
        for point in episode.points:
            progress(len(results), episode.name(point))
            tested = _Tested(episode, point, key_values, reader, histories, variants)
            results.append(tested.result(variants, budgets))
    progress(len(results), "done")
    return results


class _Tested:
    """One point: what was asked there, and what the model says with the full context."""

    def __init__(
        self,
        episode: Episode,
        point: Point,
        key_values: KeyValues,
        reader: Reads,
        histories: MakeHistories,
        variants: Sequence[Variant],
    ) -> None:
        self._episode = episode
        self._point = point
        before = key_values.before(point.history)
        tokens = episode.tokens[: point.history]
        self._histories = {
            thirds: histories(tokens, before, thirds)
            for thirds in dict.fromkeys([None, *(each.rotated_thirds for each in variants)])
        }
        self._history = self._histories[None]
        askings = [STEP_BEFORE, *(each.asking for each in variants)]
        first = min(self._positions(asking).start for asking in askings)
        asked = episode.tokens[first : point.end - 1]
        read = reader.read(asked, key_values.before(first), with_queries=True)
        assert read.queries is not None  # asked for
        self._queries = read.queries
        self._first_asked = first
        self._judge = PointJudge(
            reader,
            self._history,
            episode.tokens[point.history : point.end],
            point.question_tokens,
            reader.log_probabilities(read.hidden[point.history - first :]),
        )

    def result(self, variants: Sequence[Variant], budgets: Sequence[int]) -> VariantResult:
        blocks = self._history.blocks
        sizes = {percent: blocks_of_budget(blocks, percent) for percent in budgets}
        everything = tuple(range(blocks))
        return VariantResult(
            name=self._episode.name(self._point),
            trace=self._episode.trace,
            format=self._episode.format,
            history_blocks=blocks,
            window={
                percent: self._judgement(Context(window(everything, SINK_BLOCKS, size)))
                for percent, size in sizes.items()
            },
            shown={percent: self._shown(variants, size) for percent, size in sizes.items()},
        )

    def _shown(self, variants: Sequence[Variant], budget_blocks: int) -> dict[str, Shown]:
        regions = self._history.regions(SINK_BLOCKS, recent_blocks_of(budget_blocks))
        scores: dict[tuple[Asking, Thirds | None], dict[SignalName, Array]] = {}

        def view(variant: Variant, asking: Asking, in_view: Set[int]) -> tuple[int, ...]:
            """The blocks that a variant's recipe and layers choose for some tokens."""
            asked = self._positions(asking)
            tokens = self._episode.tokens[asked.start : asked.stop]
            by_signal: dict[SignalName, Array] = {}
            for layers in dict.fromkeys([None, variant.rotated_thirds]):
                if (asking, layers) not in scores:
                    scores[asking, layers] = self._scores(asked, layers, regions)
                by_signal |= scores[asking, layers]
            chosen = self._history.choose(
                variant.recipe, tokens, by_signal, regions, budget_blocks, in_view
            )
            return planned(chosen, regions, budget_blocks).blocks

        shown: dict[str, Shown] = {}
        for variant in variants:
            before = frozenset(view(variant, STEP_BEFORE, frozenset()))
            chosen = view(variant, variant.asking, before if variant.follows else frozenset())
            loaded = sum(block not in before for block in chosen) / len(chosen)
            context = self._partly_anew(chosen, variant.anew_share)
            shown[variant.name] = Shown(self._judgement(context), loaded)
        return shown

    def _scores(
        self, asked: range, layers: Thirds | None, regions: Regions
    ) -> dict[SignalName, Array]:
        """What keys score, with those layers of rotated-mean, for the tokens at some positions."""
        history = self._histories[layers]
        begin = asked.start - self._first_asked
        return history.scores(
            self._queries[:, begin : begin + len(asked)],
            self._episode.tokens[asked.start : asked.stop],
            history.candidates(regions),
            asked.start,
        )

    def _positions(self, asking: Asking) -> range:
        return asking.of(self._point.history, self._point.prompt)

    def _partly_anew(self, view: tuple[int, ...], share: float) -> Context:
        """A view, so large a part of it as text that is computed behind the rest."""
        moved = len(view) - round(share * len(view))
        return Context(view[:moved], text_of(view[moved:], self._history))

    def _judgement(self, context: Context) -> Judgement:
        return self._judge.judged(context)[0]
