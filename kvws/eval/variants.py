"""Variants of the default: everything that was chosen about it, changed one at a time.

Each is data: another recipe, other tokens that ask, other layers, or another way to show the view.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvws.errors import ConfigError
from kvws.recall.recipe import FUSED, Recipe, SignalName, Weights

DEFAULT = "default"

_ANY_LENGTH = 1 << 20

Thirds = tuple[int, int]
"""Layers of a model, from one third to another: (0, 1) are the first third, (0, 3) all."""


@dataclass(frozen=True)
class Asking:
    """The tokens that a view is chosen for.

    ```
    | … history … <- ahead ->| question | recorded turn |
    ```

    Attributes:
        ahead_tokens: that ask too, right before the question.
        last_tokens: of all these, so many ask, the last ones; all when None.
        without_question: only those ahead of it ask.
    """

    ahead_tokens: int = 0
    last_tokens: int | None = None
    without_question: bool = False

    def of(self, begin: int, end: int) -> range:
        """Their positions, for a question that begins and ends there."""
        first = begin - self.ahead_tokens
        stop = begin if self.without_question else end
        if self.last_tokens is not None:
            first = max(first, stop - self.last_tokens)
        return range(first, stop)


QUESTION = Asking()
STEP_BEFORE = Asking(ahead_tokens=128, without_question=True)
"""What was asked last, as far as a recording tells: the end of what is history now."""


@dataclass(frozen=True)
class Variant:
    """One way to choose a view, and to show it.

    Attributes:
        name: as `--only` takes it.
        topic: what it is about; "" for the default itself.
        asking: the tokens that it is chosen for, by their queries and by what they say.
        rotated_thirds: layers that rotated-mean reads; those of the profile when None.
        follows: the view that the recipe chose for the step before is the current one, as it is
            in a session.
        anew_share: so large a part of the view, its newest, is computed anew from its text.
    """

    name: str
    topic: str
    recipe: Recipe
    asking: Asking = QUESTION
    rotated_thirds: Thirds | None = None
    follows: bool = False
    anew_share: float = 0.0


def variants_of(default: Recipe = FUSED, *, with_profile: bool = True) -> list[Variant]:
    """The default, and what differs from it in one thing.

    Args:
        with_profile: whether the model has one: without it there is no `content`, and the layers
            of rotated-mean are not chosen.
    """
    default = default if with_profile else default.without([SignalName.CONTENT])
    base = Variant(DEFAULT, "", default)
    found = [
        base,
        *_of_signals(default),
        *(
            Variant(f"rank offset {offset}", "fusion", replace(default, rank_offset=float(offset)))
            for offset in (2, 5, 20, 60)
            if offset != default.rank_offset
        ),
        *_of_questions(default),
        Variant("older copies too", "copies", replace(default, newest_copies=False)),
    ]
    found += [
        Variant(
            f"stay bonus {bonus:g}", "stay bonus", replace(default, stay_bonus=bonus), follows=True
        )
        for bonus in (default.stay_bonus, 0.5)
    ]
    asking = {
        "the last 32": Asking(last_tokens=32),
        "the 256 before as well": Asking(ahead_tokens=256),
        "the 128 before instead": STEP_BEFORE,
    }
    found += [
        replace(base, name=name, topic="which tokens ask", asking=tokens)
        for name, tokens in asking.items()
    ]
    found += [
        replace(base, name=f"the newest {part} anew", topic="computed anew", anew_share=share)
        for part, share in (("quarter", 0.25), ("half", 0.5))
    ]
    thirds = {"the first third": (0, 1), "the second": (1, 2), "the last": (2, 3), "all": (0, 3)}
    found += [
        replace(base, name=f"layers: {name}", topic="rotated-mean", rotated_thirds=of_model)
        for name, of_model in thirds.items()
        if with_profile
    ]
    return found


def some_of(variants: Sequence[Variant], names: Sequence[str]) -> list[Variant]:
    """The default, and those with these names or topics; all where none is named.

    Raises:
        ConfigError: nothing is called so.
    """
    known = {each.name for each in variants} | {each.topic for each in variants if each.topic}
    for name in names:
        if name not in known:
            raise ConfigError(
                f"there is no variant {name!r}",
                hint=f"--only takes {', '.join(sorted(known))}",
            )
    wanted = {DEFAULT, *names} if names else known
    return [each for each in variants if each.name in wanted or each.topic in wanted]


def layers_of(thirds: Thirds, layers: int) -> tuple[int, ...]:
    """The layers of a model that has so many."""
    begin, end = (third * layers // 3 for third in thirds)
    return tuple(range(begin, end))


def _of_signals(default: Recipe) -> list[Variant]:
    left_out = [
        Variant(f"without {signal}", "signals", default.without([signal]))
        for signal in default.weights
    ]
    louder = {
        times: replace(default, weights=_louder(default.weights, SignalName.SUCCESSION, times))
        for times in (1.5, 2.0)
    }
    return left_out + [
        Variant(f"succession ×{times:g}", "signals", recipe) for times, recipe in louder.items()
    ]


def _of_questions(default: Recipe) -> list[Variant]:
    changed = {
        "no anchors": replace(default, anchor_weights={}),
        "anchors without neighbours": replace(default, anchor_neighbours=False),
        "anchors only for what asks": replace(default, told_words=0),
        "anchors for all results too": replace(default, told_words=_ANY_LENGTH),
        "any share of the best": replace(default, question_least_shares={}),
    }
    return [Variant(name, "questions", recipe) for name, recipe in changed.items()]


def _louder(weights: Weights, signal: SignalName, times: float) -> Weights:
    return {name: w * times if name == signal else w for name, w in weights.items()}
