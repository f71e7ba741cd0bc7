"""Stretches of recorded sessions that a model can read whole.

    session:  | first | … | … | … | … | compaction | … | … |
    episode:  | first |       | … | … |                        begins at a message border

Messages longer than a quarter of the window lose their middle, so that none fills an episode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvws.chat.message import Message
from kvws.chat.render import ChatRenderer
from kvws.errors import TraceError
from kvws.replay.trace import Trace

_LONGEST_SHARE = 4
_TAIL_TOKENS = 16


@dataclass(frozen=True)
class Segment:
    """A message as the chat template writes it.

    Attributes:
        message: what it says.
        tokens: of it, the marks that open and close it included.
        opening_tokens: of those, how many a prompt ends with that asks for this message.
        compacted: the agent had replaced its history when it came.
    """

    message: Message
    tokens: tuple[int, ...]
    opening_tokens: int
    compacted: bool

    def cut_to(self, most_tokens: int) -> Segment:
        """Without its middle, if it is longer."""
        if len(self.tokens) <= most_tokens:
            return self
        head = self.tokens[: most_tokens - _TAIL_TOKENS]
        return replace(self, tokens=head + self.tokens[-_TAIL_TOKENS:])


@dataclass(frozen=True)
class Turn:
    """An assistant's turn of an episode, in tokens of it.

    Attributes:
        message: what the assistant said.
        new_begin: where the prompt begins to be new: behind the assistant's turn before.
        begin: of the turn, behind its opening, which ends the prompt.
        end: of the turn.
        answered_end: of what its tools answered: begins at `end`; equal to it if nothing did.
        compacted_at: where the agent's history began anew before the turn, or None.
    """

    message: Message
    new_begin: int
    begin: int
    end: int
    answered_end: int
    compacted_at: int | None


@dataclass(frozen=True)
class Episode:
    """A stretch of a session.

    Attributes:
        trace: its name; the format that it was recorded in.
        number: of the episode, from 0.
        tokens: of it.
        turns: of the assistant, in order.
    """

    trace: str
    format: str
    number: int
    tokens: tuple[int, ...]
    turns: tuple[Turn, ...]


def opening_of(renderer: ChatRenderer) -> str:
    """What the chat template opens an assistant's turn with; "" if a prompt ends otherwise."""
    spoken = [Message("user", "x")]
    closed = renderer.text(spoken, add_generation_prompt=False)
    asking = renderer.text(spoken)
    return asking[len(closed) :] if asking.startswith(closed) else ""


def sessions_of(trace: Trace) -> list[list[tuple[Message, bool]]]:
    """Message lists of a trace's agents, each message with whether a compaction came before it.

    Threads that one agent went on with after it replaced its history are one list, so that what
    it had read before is history still.
    """
    chains: dict[str, list[tuple[Message, bool]]] = {}
    before: dict[str, tuple[Message, ...]] = {}
    for name, messages in trace.threads.items():
        agent = name.partition("#")[0]
        chain = chains.setdefault(agent, [])
        shared = _shared_messages(before.get(agent, ()), messages)
        chain += [(message, bool(chain)) for message in messages[shared:]]
        before[agent] = messages
    return list(chains.values())


def _shared_messages(older: Sequence[Message], newer: Sequence[Message]) -> int:
    shared = 0
    for one, other in zip(older, newer, strict=False):
        if one != other:
            break
        shared += 1
    return shared


def segments_of(
    renderer: ChatRenderer, session: Sequence[tuple[Message, bool]], trace: Trace
) -> list[Segment]:
    """The messages of a session as the template writes them one behind the other.

    What the template writes differently once more follows is taken as it is at last, with the
    message behind it.
    """
    messages = [message for message, _ in session]
    opening = opening_of(renderer)
    whole = renderer.text(messages, trace.tools, add_generation_prompt=False)
    segments: list[Segment] = []
    done = 0
    for place, (message, compacted) in enumerate(session):
        text = renderer.text(messages[: place + 1], trace.tools, add_generation_prompt=False)
        if len(text) <= done or not whole.startswith(text):
            continue
        written = whole[done : len(text)]
        done = len(text)
        is_asked = message.role == "assistant" and opening and written.startswith(opening)
        head = renderer.pieces(opening) if is_asked else []
        rest = renderer.pieces(written[len(opening) :] if is_asked else written)
        segments.append(Segment(message, (*head, *rest), len(head), compacted))
    return segments


def episodes(
    renderer: ChatRenderer,
    trace: Trace,
    *,
    window_tokens: int,
    least_tokens: int,
    at_most: int,
) -> list[Episode]:
    """Cut a trace into episodes, and keep so many, evenly spread, rather those with a compaction.

    Args:
        window_tokens: no episode is longer.
        least_tokens: none is shorter.
        at_most: to keep.
    """
    cut: list[list[Segment]] = []
    for session in sessions_of(trace):
        whole = segments_of(renderer, session, trace)
        shown = [s.cut_to(window_tokens // _LONGEST_SHARE) for s in whole]
        cut += _cut(shown, window_tokens)
    long = [group for group in cut if sum(len(s.tokens) for s in group) >= least_tokens]
    return [_episode(trace, number, group) for number, group in enumerate(_spread(long, at_most))]


def require_episodes(found: Sequence[Episode], least_tokens: int) -> None:
    """Raises TraceError when there is none."""
    if not found:
        raise TraceError(
            f"no session is as long as {least_tokens} tokens",
            hint="give longer traces: nothing needs to be recalled from short ones",
        )


def _cut(segments: Sequence[Segment], window_tokens: int) -> list[list[Segment]]:
    """Groups of consecutive segments, as many as the window holds; behind the first group, each
    with the session's first segment in front. A compaction stands in the middle of a group."""
    groups: list[list[Segment]] = []
    begin = 0
    while begin < len(segments):
        group = [segments[0]] if begin else []
        room = window_tokens - sum(len(s.tokens) for s in group)
        end = begin
        while end < len(segments) and len(segments[end].tokens) <= room:
            room -= len(segments[end].tokens)
            end += 1
        groups.append([*group, *segments[begin:end]])
        begin = end
    for place in range(1, len(segments)):
        if segments[place].compacted and not segments[place - 1].compacted:
            groups.append(_around(segments, place, window_tokens))
    return groups


def _around(segments: Sequence[Segment], place: int, window_tokens: int) -> list[Segment]:
    """Half a window before a place, and half a window behind it."""
    begin, room = place, window_tokens // 2 - len(segments[0].tokens)
    while begin > 1 and len(segments[begin - 1].tokens) <= room:
        begin -= 1
        room -= len(segments[begin].tokens)
    end, room = place, window_tokens // 2
    while end < len(segments) and len(segments[end].tokens) <= room:
        room -= len(segments[end].tokens)
        end += 1
    return [segments[0], *segments[max(1, begin) : end]]


def _spread(groups: list[list[Segment]], at_most: int) -> list[list[Segment]]:
    with_border = [g for g in groups if len({s.compacted for s in g[1:]}) == 2]
    others = [g for g in groups if g not in with_border]
    kept = with_border[:at_most]
    left = min(at_most - len(kept), len(others))
    if left == 1:
        return [*kept, others[len(others) // 2]]
    return [*kept, *(others[round(k * (len(others) - 1) / (left - 1))] for k in range(left))]


def _episode(trace: Trace, number: int, group: Sequence[Segment]) -> Episode:
    tokens: list[int] = []
    turns: list[Turn] = []
    new_begin = 0
    compacted_at: int | None = None
    for place, segment in enumerate(group):
        begin = len(tokens)
        tokens += segment.tokens
        if segment.compacted and place and not group[place - 1].compacted:
            compacted_at = begin
        if segment.message.role == "assistant":
            first = begin + segment.opening_tokens
            turn = Turn(segment.message, new_begin, first, len(tokens), len(tokens), compacted_at)
            turns.append(turn)
            new_begin = len(tokens)
        elif turns:
            turns[-1] = replace(turns[-1], answered_end=len(tokens))
    return Episode(trace.name, trace.format, number, tuple(tokens), tuple(turns))
