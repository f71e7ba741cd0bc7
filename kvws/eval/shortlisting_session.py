"""A session too long to be read at once: recorded ones one behind the other, and what it is asked.

    session:  | trace … fact … trace … | other trace … fact … | …        fact … | closing words |
    asked:                                 turn        turn        turn        facts, at the end
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvws.blocks.key import BLOCK_TOKENS
from kvws.chat.render import ChatRenderer
from kvws.errors import ConfigError, TraceError
from kvws.eval.episodes import opening_of, segments_of, sessions_of
from kvws.eval.facts import DEVELOPMENT, Fact, plant
from kvws.eval.points import QUESTION_TOKENS
from kvws.eval.probing import mark_tokens, question_tokens
from kvws.replay.trace import Trace
from kvws.session.ingest import ahead_of_query

AskedKind = Literal["verbatim", "paraphrased", "turn"]

_CLOSING = "I have seen enough of it for now."
_FIRST_DEPTH, _LAST_DEPTH = 0.02, 0.92  # of facts: behind the last only what is recent
_TURNS_FROM = 0.5  # of the session: turns before have less to choose from


@dataclass(frozen=True)
class LongQuestion:
    """What blocks are wanted for.

    Attributes:
        kind: a planted fact in its words or in others, or a recorded turn.
        history_blocks: of the session, before the question.
        tokens: of the question, behind those blocks.
        right: the blocks that hold the fact; none of a turn.
    """

    kind: AskedKind
    history_blocks: int
    tokens: tuple[int, ...]
    right: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Source:
    """Where the tokens from one on come from."""

    first_token: int
    trace: str


@dataclass(frozen=True)
class LongSession:
    """What is read, and what is asked of it.

    Attributes:
        tokens: with what is planted in them, whole blocks.
        sources: by their first tokens.
        questions: about facts, then turns by their places.
    """

    tokens: tuple[int, ...]
    sources: tuple[Source, ...]
    questions: tuple[LongQuestion, ...]

    def source_of(self, token: int) -> str:
        """The trace that a token is of."""
        return next(s.trace for s in reversed(self.sources) if s.first_token <= token)


@dataclass(frozen=True)
class _Turn:
    """A recorded turn in tokens of the session: where its prompt begins to be new, and where it
    ends."""

    new_begin: int
    prompt_end: int


@dataclass(frozen=True)
class _Joined:
    """Recorded sessions one behind the other."""

    tokens: list[int]
    sources: list[Source]
    turns: list[_Turn]


def long_session(
    traces: Sequence[Trace],
    renderer: ChatRenderer,
    *,
    tokens: int,
    facts: int,
    turns: int,
    seed: int,
) -> LongSession:
    """Put traces together, plant facts with a distractor each, and draw turns of the second half.

    Args:
        tokens: of the traces, to within a block.
        facts: each is asked for verbatim and in other words, behind the whole session.
        turns: at most; fewer where the second half has fewer.

    Raises:
        TraceError: the traces are shorter.
        ConfigError: there are not so many different facts.
    """
    joined = _joined(traces, renderer, tokens)
    chance = random.Random(f"long session {seed}")  # noqa: S311 (not for secrets)
    asked, to_plant = _facts_at_depths(facts, seed, chance)
    base = [*joined.tokens, *renderer.pieces(opening_of(renderer) + _CLOSING)]

    # Places of the base are planted in, so that the turns are found again: a planted token is
    # the number -1 - token.
    def token_of(number: int) -> int:
        return base[number] if number >= 0 else -1 - number

    marks = mark_tokens(renderer)
    numbers, planted = plant(
        range(len(base)),
        to_plant,
        encode=lambda text: [-1 - token for token in renderer.pieces(text)],
        decode=lambda some: renderer.decode([token_of(number) for number in some]),
        avoid={place for place, token in enumerate(base) if token in marks},
    )
    all_tokens = [token_of(number) for number in numbers]
    place_of = {number: place for place, number in enumerate(numbers) if number >= 0}
    blocks = len(all_tokens) // BLOCK_TOKENS
    tail = all_tokens[blocks * BLOCK_TOKENS :]

    questions: list[LongQuestion] = []
    for number in range(len(asked)):
        right = frozenset(planted[number].blocks)
        verbatim, *others = asked[number].questions
        for question in (verbatim, others[number % len(others)]):
            said, _ = question_tokens(renderer, question.text)
            questions.append(LongQuestion(question.kind, blocks, (*tail, *said), right))
    late = [turn for turn in joined.turns if turn.new_begin >= _TURNS_FROM * len(base)]
    for turn in sorted(chance.sample(late, min(turns, len(late))), key=lambda t: t.prompt_end):
        begin, end = place_of[turn.new_begin], place_of[turn.prompt_end]
        questions.append(_asked_at(all_tokens, begin, end))
    return LongSession(
        tuple(all_tokens[: blocks * BLOCK_TOKENS]),
        tuple(Source(place_of[source.first_token], source.trace) for source in joined.sources),
        tuple(questions),
    )


def _facts_at_depths(
    count: int, seed: int, chance: random.Random
) -> tuple[list[Fact], list[tuple[float, Fact]]]:
    """The facts to ask about, and all that are to be planted: those first."""
    try:
        asked, others = DEVELOPMENT.draw(f"long {seed}", count, distractors=1)
    except ValueError as error:
        raise ConfigError(
            f"there are not {count} different facts: {error}", hint="lower --facts"
        ) from error
    reach = _LAST_DEPTH - _FIRST_DEPTH
    to_plant = [(_FIRST_DEPTH + reach * (n + 0.5) / count, fact) for n, fact in enumerate(asked)]
    to_plant += [(chance.uniform(_FIRST_DEPTH, _LAST_DEPTH), fact) for fact in others]
    return asked, to_plant


def _joined(traces: Sequence[Trace], renderer: ChatRenderer, tokens: int) -> _Joined:
    """Every agent's messages, trace by trace, to so many tokens; the last message loses its
    middle."""
    joined = _Joined([], [], [])
    for trace in traces:
        joined.sources.append(Source(len(joined.tokens), trace.name))
        for messages in sessions_of(trace):
            new_begin = len(joined.tokens)
            for segment in segments_of(renderer, messages, trace):
                begin = len(joined.tokens)
                shown = segment.cut_to(max(BLOCK_TOKENS, tokens - begin))
                joined.tokens.extend(shown.tokens)
                if len(joined.tokens) >= tokens:
                    return joined
                if segment.message.role == "assistant":
                    joined.turns.append(_Turn(new_begin, begin + segment.opening_tokens))
                    new_begin = len(joined.tokens)
    raise TraceError(
        f"the traces have {len(joined.tokens):,} tokens together, not {tokens:,}",
        hint="give more traces, or lower --tokens",
    )


def _asked_at(tokens: Sequence[int], new_begin: int, prompt_end: int) -> LongQuestion:
    """A step as it is asked: with its new tokens, the last of them only if there are many."""
    line = new_begin // BLOCK_TOKENS * BLOCK_TOKENS
    history = line + ahead_of_query(prompt_end - line, QUESTION_TOKENS)
    return LongQuestion("turn", history // BLOCK_TOKENS, tuple(tokens[history:prompt_end]))
