"""Facts planted in recorded sessions, to be asked for later."""

from __future__ import annotations

import random
from dataclasses import dataclass

from kvws.blocks.key import BLOCK_TOKENS
from kvws.chat.render import ChatRenderer
from kvws.eval.arms import SINK_BLOCKS, blocks_of_budget, recent_blocks_of
from kvws.eval.episodes import Episode, episodes, opening_of
from kvws.eval.facts import Fact, FactSet, Planted, Question, plant
from kvws.eval.probing import mark_tokens
from kvws.replay.trace import Trace

LEAST_TOKENS = 2400
MOST_TOKENS = 4000
"""Of an episode, before anything is planted."""

_NEEDLES_PER_EPISODE = 8
_CLOSING = "I have seen enough of it for now."
_FIRST_DEPTH = 0.04
_UPDATE_DEPTH = 0.3  # and deeper: an older value finds room before it
_OLDER_SHARE = 0.6
_END_MARGIN = 0.08
_MOST_RIVALS = 2


@dataclass(frozen=True)
class Needle:
    """A fact to ask about, and where it stands.

    Attributes:
        number: in its history.
        planted: what is right.
        older: what was right before it, further up; None if it is the first of its kind.
        rivals: what facts of the same form say of other subjects, at most two.
    """

    number: int
    planted: Planted
    older: Planted | None
    rivals: tuple[str, ...]


@dataclass(frozen=True)
class Haystack:
    """A history with needles in it.

    Attributes:
        episode: that they are planted in.
        tokens: of the history; it ends with an assistant's words, still open.
        needles: those that can be asked for.
        left_out: needles that were to be planted, but not where they would have to be found.
    """

    episode: Episode
    tokens: tuple[int, ...]
    needles: tuple[Needle, ...]
    left_out: int


def haystacks_of(
    trace: Trace,
    renderer: ChatRenderer,
    facts: FactSet,
    *,
    per_trace: int,
    largest_percent: int,
    seed: int,
) -> list[Haystack]:
    """Episodes of a trace, each with its share of the facts; none if it is too short.

    Args:
        per_trace: facts in all, as far as the episodes hold them.
        largest_percent: as for `hide`.
    """
    chance = random.Random(f"window {seed} {trace.name}")  # noqa: S311 (not for secrets)
    found = episodes(
        renderer,
        trace,
        window_tokens=chance.randrange(LEAST_TOKENS + LEAST_TOKENS // 4, MOST_TOKENS + 1),
        least_tokens=LEAST_TOKENS,
        at_most=-(-per_trace // _NEEDLES_PER_EPISODE),
    )
    shares = [per_trace // len(found) + (n < per_trace % len(found)) for n in range(len(found))]
    return [
        hide(
            episode,
            renderer,
            facts,
            min(share, _NEEDLES_PER_EPISODE),
            f"{seed} {trace.name} {episode.number}",
            largest_percent,
        )
        for episode, share in zip(found, shares, strict=True)
    ]


def hide(
    episode: Episode,
    renderer: ChatRenderer,
    facts: FactSet,
    count: int,
    seed: str,
    largest_percent: int,
) -> Haystack:
    """Plant facts, a distractor for each, and older values for about half of them.

    Args:
        count: needles.
        largest_percent: of the budgets: no needle stands where it is in view in any case.
    """
    chance = random.Random(f"needles {seed}")  # noqa: S311 (not for secrets)
    last_depth = 1 - largest_percent / 400 - _END_MARGIN
    asked, others = facts.draw(seed, count, distractors=1)
    depths = [
        _FIRST_DEPTH + (last_depth - _FIRST_DEPTH) * (place + 0.5) / count
        for place in range(count)
    ]
    chance.shuffle(depths)
    deep = [number for number in range(count) if depths[number] >= _UPDATE_DEPTH]
    values = {fact.value for fact in (*asked, *others)}
    older: dict[int, Fact] = {}
    for number in deep[::2]:
        older[number] = asked[number]
        value = _other_value(facts, asked[number], f"{seed} {number}", values)
        asked[number] = asked[number].changed_to(value)
    to_plant = list(zip(depths, asked, strict=True))
    to_plant += [
        (chance.uniform(_FIRST_DEPTH, _OLDER_SHARE * depths[number]), fact)
        for number, fact in older.items()
    ]
    to_plant += [(chance.uniform(_FIRST_DEPTH, last_depth), fact) for fact in others]
    closing = renderer.pieces(opening_of(renderer) + _CLOSING)
    tokens, planted = plant(
        [*episode.tokens, *closing],
        to_plant,
        encode=renderer.pieces,
        decode=renderer.decode,
        avoid=mark_tokens(renderer),
    )
    found = planted[count : count + len(older)]
    older_of = dict(zip(older, found, strict=True))
    needles = [
        Needle(n, planted[n], older_of.get(n), _rivals(asked[n], [*asked, *others]))
        for n in range(count)
    ]
    kept = tuple(n for n in needles if _can_be_asked(n, len(tokens), largest_percent))
    return Haystack(episode, tuple(tokens), kept, count - len(kept))


def _rivals(fact: Fact, others: list[Fact]) -> tuple[str, ...]:
    alike = [other for other in others if other.template == fact.template]
    return tuple(other.value for other in alike if other.subject != fact.subject)[:_MOST_RIVALS]


def _other_value(facts: FactSet, fact: Fact, seed: str, taken: set[str]) -> str:
    attempt = 0
    while (value := facts.value(fact.template.kind, f"{seed} {attempt}")) in taken:
        attempt += 1
    taken.add(value)
    return value


def _can_be_asked(needle: Needle, tokens: int, largest_percent: int) -> bool:
    """Whether it competes for a place in the view, and its older value stands before it."""
    blocks = tokens // BLOCK_TOKENS
    recent = recent_blocks_of(blocks_of_budget(blocks, largest_percent))
    own = needle.planted.blocks
    in_order = needle.older is None or needle.older.end_token <= needle.planted.first_token
    return in_order and own.start >= SINK_BLOCKS and own.stop <= blocks - recent


def questions_of(needle: Needle) -> tuple[Question, Question]:
    """The verbatim question, and one of the paraphrased ones, by turns."""
    verbatim, *others = needle.planted.fact.questions
    return verbatim, others[needle.number % len(others)]
