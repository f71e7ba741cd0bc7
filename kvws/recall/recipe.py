"""Recipes: which signals speak for a block, and how loud each is. A pure decision."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from kvws.errors import ConfigError


class SignalName(StrEnum):
    """What can speak for a block, as `--signals` spells it.

    The first three are scored by the ranks, from queries and keys; the others from text.
    """

    MEAN_K = "mean-k"
    ROTATED_MEAN = "rotated-mean"
    CONTENT = "content"
    LEXICAL = "lexical"
    SUCCESSION = "succession"
    RECENCY = "recency"

    @property
    def is_scored_by_ranks(self) -> bool:
        return self in (SignalName.MEAN_K, SignalName.ROTATED_MEAN, SignalName.CONTENT)


Weights = Mapping[SignalName, float]


@dataclass(frozen=True)
class Recipe:
    """How a view is chosen among the blocks that compete.

    Attributes:
        weights: of the signals, in the fusion of their ranks; each above zero.
        rank_offset: the k of reciprocal rank fusion: the smaller, the more the first ranks count.
        least_shares: a signal has nothing to say for a block that it scores below so large a part
            of its best. Ranks alone would make much of little.
        question_least_shares: instead of `least_shares`, for a short question in which a person
            asks for something.
        anchor_weights: the blocks that these put first are *anchors* of a short question: chosen
            ahead of the fused order. None without.
        anchor_share: so large a part of the places is the anchors' own; a few in any case.
        anchor_neighbours: an anchor brings the block behind and the one before it; of a short
            question of a person's, those of them that may go on with what is asked for.
        short_words: a question of at most so many tokens of its own is short. A longer one is no
            question but an observation, and says itself what the answer needs.
        told_words: what is at most so long has anchors though it asks for nothing: a short
            result of a tool.
        newest_copies: a block that newer ones repeat gives its place to them.
        stay_bonus: a score counts for so much more of a block that is in the view already.
    """

    weights: Weights
    rank_offset: float
    least_shares: Weights = field(default_factory=dict[SignalName, float])
    question_least_shares: Weights = field(default_factory=dict[SignalName, float])
    anchor_weights: Weights = field(default_factory=dict[SignalName, float])
    anchor_share: float = 0.0
    anchor_neighbours: bool = True
    short_words: int = 0
    told_words: int = 0
    newest_copies: bool = False
    stay_bonus: float = 0.0

    @property
    def rank_signals(self) -> tuple[SignalName, ...]:
        """Those that the ranks keep an index for."""
        return tuple(s for s in SignalName if s in self.weights and s.is_scored_by_ranks)

    @property
    def needs_text(self) -> bool:
        """Whether it is of use to know what the blocks say."""
        of_text = {SignalName.LEXICAL, SignalName.SUCCESSION}
        return self.newest_copies or not of_text.isdisjoint(self.weights)

    def for_question(self, question: Question) -> Recipe:
        """The recipe whose least shares are those for a question."""
        if not self.is_asked(question):
            return self
        return replace(self, least_shares=self.question_least_shares)

    def is_asked(self, question: Question) -> bool:
        """Whether it is short and a person asks for something."""
        return question.asks and question.own_words <= self.short_words

    def for_anchors(self) -> Recipe:
        """The recipe whose weights are those for anchors, wherever they stand now."""
        return replace(self, weights=self.anchor_weights, stay_bonus=0.0)

    def anchors(self, places: int, question: Question) -> int:
        """Anchors of a question, in a view with so many places for blocks that compete."""
        asks = question.asks
        longest = self.short_words if asks else self.told_words
        if not self.anchor_weights or not 0 < question.own_words <= longest:
            return 0
        wanted = max(_LEAST_ASKED if asks else _LEAST_TOLD, int(self.anchor_share * places))
        # With their neighbours: some two a block where something is asked, else three.
        return min(wanted, max(1, places // (2 if asks else 3)))

    def only(self, names: Container[SignalName]) -> Recipe:
        """The same with these signals alone."""
        parts = (self.weights, self.anchor_weights)
        kept = [{s: w for s, w in part.items() if s in names} for part in parts]
        return replace(self, weights=kept[0], anchor_weights=kept[1])

    def without(self, missing: Iterable[SignalName]) -> Recipe:
        """The same, some signals left out."""
        return self.only(set(SignalName) - set(missing))


@dataclass(frozen=True)
class Question:
    """How a question reads.

    Attributes:
        own_words: tokens that are not the chat template's.
        asks: a person asks for something, as a question or as an order.
    """

    own_words: int
    asks: bool


AUTO = "auto"

_LEAST_ASKED, _LEAST_TOLD = 4, 2
"""Anchors of what asks for something, and of what does not."""

FUSED = Recipe(
    weights={
        SignalName.ROTATED_MEAN: 1.5,
        SignalName.CONTENT: 1.0,
        SignalName.LEXICAL: 1.0,
        SignalName.SUCCESSION: 2.0,
        SignalName.RECENCY: 0.5,
    },
    rank_offset=5.0,
    question_least_shares={SignalName.LEXICAL: 0.5},
    anchor_weights={SignalName.CONTENT: 1.0, SignalName.LEXICAL: 1.0},
    anchor_share=1 / 6,
    short_words=64,
    told_words=64,
    newest_copies=True,
    stay_bonus=0.1,
)
"""What won on the development traces: docs/recall.md has the figures and what lost."""


def recipe_named(text: str) -> Recipe:
    """The recipe of a `--signals` value: "auto", or signals with commas between them.

    A single signal is that signal as it was published, and nothing else; several of one's own
    choice are fused as the default fuses its own, with the default's weights.

    Raises:
        ConfigError: there is no such signal.
    """
    if text == AUTO:
        return FUSED
    names: list[SignalName] = []
    for word in text.split(","):
        try:
            names.append(SignalName(word.strip()))
        except ValueError:
            known = ", ".join(SignalName)
            raise ConfigError(
                f"there is no signal {word.strip()!r}",
                hint=f"--signals takes {AUTO}, or some of {known} with commas between them",
            ) from None
    if len(set(names)) == 1:
        return Recipe({names[0]: 1.0}, FUSED.rank_offset)
    weights = {name: FUSED.weights.get(name, 1.0) for name in names}
    return replace(FUSED.only(names), weights=weights)
