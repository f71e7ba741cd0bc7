"""Recipes: which signals speak for a block, and how loud each is. A pure decision."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
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


@dataclass(frozen=True)
class Recipe:
    """How a view is chosen among the blocks that compete.

    Attributes:
        weights: of the signals, in the fusion of their ranks; each above zero.
        rank_offset: the k of reciprocal rank fusion: the smaller, the more the first ranks count.
        anchor_share: the best content hits are chosen ahead of the fused order, each with the
            blocks behind and before it: so large a share of the places is the hits', at least one
            place. 0 for none.
        anchored_words: longest question, in tokens of its own, that is given anchors. A longer
            one is no question but an observation, and says itself what the answer needs.
        newest_copies: a block that newer ones repeat gives its place to them.
        stay_bonus: a score counts for so much more of a block that is in the view already.
    """

    weights: Mapping[SignalName, float]
    rank_offset: float
    anchor_share: float = 0.0
    anchored_words: int = 0
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

    def anchors(self, places: int, own_words: int) -> int:
        """Content hits to choose ahead of the fused order, for a question of so many tokens."""
        if not self.anchor_share or own_words > self.anchored_words:
            return 0
        return max(1, int(self.anchor_share * places))

    def without(self, missing: Iterable[SignalName]) -> Recipe:
        """The same, some signals left out."""
        gone = set(missing)
        return replace(self, weights={s: w for s, w in self.weights.items() if s not in gone})


AUTO = "auto"

FUSED = Recipe(
    weights={
        SignalName.ROTATED_MEAN: 2.0,
        SignalName.CONTENT: 1.0,
        SignalName.LEXICAL: 1.0,
        SignalName.SUCCESSION: 1.5,
        SignalName.RECENCY: 0.5,
    },
    rank_offset=5.0,
    anchor_share=1 / 16,
    anchored_words=64,
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
    return replace(FUSED, weights={name: FUSED.weights.get(name, 1.0) for name in names})
