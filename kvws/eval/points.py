"""From a recorded session to the steps that are tested.

The full context is the reference, so it must fit the model: long threads are cut into episodes
that begin with the session's first messages and go on at an assistant's turn. A step asks as the
product does: with its new tokens, the last of them only if there are many.

    episode  | system, task | … later messages …                                   |
    point    | history: whole blocks             | question | recorded turn |
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvws.blocks.key import BLOCK_TOKENS
from kvws.chat.message import Message
from kvws.errors import TraceError
from kvws.eval.stretches import (
    LEAST_HISTORY_TOKENS,
    TOO_EARLY,
    Renders,
    Stretch,
    steps_of,
    stretches_of,
)
from kvws.replay.trace import Trace
from kvws.session.ingest import ahead_of_query

QUESTION_TOKENS = 128
TURN_TOKENS = 128
LEAST_TURN_TOKENS = 16

_POINTS_PER_EPISODE = 3


@dataclass(frozen=True)
class Point:
    """A tested step of an episode, in tokens of it.

    Attributes:
        step: messages of the thread before the recorded turn.
        history: length of the history, whole blocks.
        prompt: end of the question, and beginning of the recorded turn.
        end: of the recorded turn, as far as it is looked at.
        summary: what the agent replaced the thread by behind this step, the last of the thread
            that can be tested; () for nothing.
    """

    step: int
    history: int
    prompt: int
    end: int
    summary: tuple[int, ...] = ()

    @property
    def question_tokens(self) -> int:
        return self.prompt - self.history

    @property
    def turn_tokens(self) -> int:
        return self.end - self.prompt


@dataclass(frozen=True)
class Episode:
    """A piece of a thread, as the chat template writes it.

    Attributes:
        trace, format, thread: where it comes from.
        first_message: of the thread, behind the system prompt and the task.
        tokens: to the end of its last point.
        points: at least one, by position.
    """

    trace: str
    format: str
    thread: str
    first_message: int
    tokens: tuple[int, ...]
    points: tuple[Point, ...]

    def name(self, point: Point) -> str:
        return f"{self.trace}/{self.thread}@{point.step}"


@dataclass(frozen=True)
class Cut:
    """What of a session is tested.

    Attributes:
        episodes: in the order of the session.
        left_out: steps that are not tested, by reason.
    """

    trace: str
    episodes: tuple[Episode, ...]
    left_out: Mapping[str, int]

    @property
    def points(self) -> int:
        return sum(len(episode.points) for episode in self.episodes)


@dataclass(frozen=True)
class _Written:
    """A stretch as tokens, and every step of it that could be tested."""

    stretch: Stretch
    tokens: Sequence[int]
    points: Sequence[Point]


def cut_trace(
    trace: Trace, renderer: Renders, *, window_tokens: int, points: int, seed: int
) -> Cut:
    """Choose steps of a session, spread over its episodes and over their depths.

    The longest thread is cut, and every other that does not carry it on. Where the agent compacted
    a thread, the last step before that can be tested is always among those chosen.

    Args:
        window_tokens: the longest episode.
        points: how many at most.
    """
    chance = random.Random(f"points {trace.name} {seed}")  # noqa: S311 (not for secrets)
    left_out: Counter[str] = Counter()
    stretches = list(stretches_of(trace, renderer, window_tokens, left_out))
    episodes = -(-points // _POINTS_PER_EPISODE)
    written: list[_Written] = []
    for number in _spread(stretches, episodes, chance):
        stretch = stretches[number]
        eligible = sum(len(found.points) for found in written)
        if len(written) >= episodes and eligible >= points:
            left_out["not drawn"] += len(steps_of(trace, stretch))
            continue
        found = _written(trace, stretch, renderer, window_tokens, left_out)
        if found.points:
            written.append(found)
    chosen: list[Episode] = []
    for found, share in zip(written, _shares(written, points), strict=True):
        tested = _drawn(found.points, share, chance)
        left_out["not drawn"] += len(found.points) - len(tested)
        if tested:
            chosen.append(_episode(trace, found, tested))
    order = list(trace.threads)
    chosen.sort(key=lambda episode: (order.index(episode.thread), episode.first_message))
    return Cut(trace.name, tuple(chosen), {why: count for why, count in left_out.items() if count})


def require_points(cuts: Sequence[Cut]) -> None:
    """Raises:
    TraceError: no step of any session can be tested.
    """
    if any(cut.points for cut in cuts):
        return
    reasons: Counter[str] = Counter()
    for cut in cuts:
        reasons.update(cut.left_out)
    counted = ", ".join(f"{count} {why}" for why, count in reasons.items())
    raise TraceError(
        f"no recorded step can be tested: {counted or 'there is none'}",
        hint=f"give sessions with more than {LEAST_HISTORY_TOKENS} tokens before an assistant's "
        "turn, or raise --window",
    )


def _written(
    trace: Trace,
    stretch: Stretch,
    renderer: Renders,
    window_tokens: int,
    left_out: Counter[str],
) -> _Written:
    messages = trace.threads[stretch.thread]

    def up_to(stop: int) -> tuple[Message, ...]:
        return (*stretch.head, *messages[stretch.first : stop])

    tools = trace.tools
    if tools and len(renderer.tokens(up_to(stretch.first + 1), tools, False)) > window_tokens // 2:
        tools = ()  # schemas would leave no room for a session
    tokens = renderer.tokens(up_to(stretch.stop), tools, False)
    points: list[Point] = []
    for step in steps_of(trace, stretch):
        prompt = renderer.tokens(up_to(step), tools, True)
        turn_end = len(renderer.tokens(up_to(step + 1), tools, False))
        known = _last_turn_end(messages, stretch.first, step)
        seen = len(renderer.tokens(up_to(known), tools, False))
        line = seen // BLOCK_TOKENS * BLOCK_TOKENS
        history = line + ahead_of_query(len(prompt) - line, QUESTION_TOKENS)
        end = min(turn_end, len(prompt) + TURN_TOKENS)
        if tokens[: len(prompt)] != prompt:
            left_out["whose prompt the chat template writes differently later"] += 1
        elif history < LEAST_HISTORY_TOKENS:
            left_out[TOO_EARLY] += 1
        elif end - len(prompt) < LEAST_TURN_TOKENS:
            left_out[f"with a recorded turn of less than {LEAST_TURN_TOKENS} tokens"] += 1
        elif end > window_tokens:
            left_out["beyond the window"] += 1
        else:
            points.append(Point(step, history, len(prompt), end))
    if points and stretch.summary:
        points[-1] = replace(points[-1], summary=stretch.summary)
    return _Written(stretch, tokens, points)


def _last_turn_end(messages: Sequence[Message], first: int, step: int) -> int:
    """Messages up to the last assistant's turn before a step; that turn is there at `first`."""
    return 1 + max(i for i in range(first, step) if messages[i].role == "assistant")


def _spread(
    stretches: Sequence[Stretch], wanted: int, chance: random.Random
) -> list[int]:
    """All of them, first the ones that end in a compaction, then evenly spaced ones, then the
    rest at random."""
    compacted = [i for i, stretch in enumerate(stretches) if stretch.summary]
    others = [i for i in range(len(stretches)) if i not in compacted]
    free = min(max(0, wanted - len(compacted)), len(others))
    spacing = len(others) / free if free else 0.0
    even = [others[int((place + chance.random()) * spacing)] for place in range(free)]
    rest = [i for i in others if i not in even]
    chance.shuffle(rest)
    return [*compacted, *even, *rest]


def _shares(written: Sequence[_Written], points: int) -> list[int]:
    """How many points each episode gives: alike, as far as it has them."""
    shares = [0] * len(written)
    while sum(shares) < points:
        open_ = [i for i, found in enumerate(written) if shares[i] < len(found.points)]
        if not open_:
            break
        shares[min(open_, key=lambda i: shares[i])] += 1
    return shares


def _drawn(points: Sequence[Point], count: int, chance: random.Random) -> list[Point]:
    """One point at random out of each of `count` depths; one with a summary in any case."""
    drawn: list[Point] = []
    for place in range(count):
        depth = points[place * len(points) // count : (place + 1) * len(points) // count]
        with_summary = [point for point in depth if point.summary]
        drawn.append(with_summary[0] if with_summary else chance.choice(depth))
    return drawn


def _episode(trace: Trace, found: _Written, points: Sequence[Point]) -> Episode:
    return Episode(
        trace.name,
        trace.format,
        found.stretch.thread,
        found.stretch.first,
        tuple(found.tokens[: max(point.end for point in points)]),
        tuple(points),
    )
