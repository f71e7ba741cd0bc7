"""Cutting a recorded session into stretches that a model can read whole.

    thread:   | head: system, task | turn … | turn … | turn … | turn … |
    stretch:  | head, shortened    |                  | turn … | turn … |   fits the window
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from kvws.chat.message import Message
from kvws.replay.trace import Trace, TraceStep

LEAST_HISTORY_TOKENS = 1024

TOO_EARLY = f"with less than {LEAST_HISTORY_TOKENS:,} tokens before them"
_OTHER_THREAD = "in a thread that carries on a longer one, or is carried on by it"
_MARKUP_TOKENS = 8  # that a template may write around a message
_LEAST_SUMMARY_TOKENS = 128  # fewer is a request, and not what is left of a session


class Renders(Protocol):
    """A model's chat template and tokenizer: `ChatRenderer`, or a stand-in."""

    def tokens(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
    ) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    @property
    def pieces(self) -> Encodes: ...


class Encodes(Protocol):
    def __call__(self, text: str, /) -> list[int]: ...


@dataclass(frozen=True)
class Stretch:
    """Messages of a thread that are read together: the head, and those of [first, stop).

    Attributes:
        summary: token ids that the agent replaced the thread by where it ends here; () for none.
    """

    thread: str
    head: tuple[Message, ...]
    first: int
    stop: int
    summary: tuple[int, ...]


def stretches_of(
    trace: Trace, renderer: Renders, window_tokens: int, left_out: Counter[str]
) -> Iterator[Stretch]:
    """Every piece of the session that is long enough to have a step.

    Mutates:
        left_out: counts steps that are in none, by reason.
    """
    steps = Counter(step.thread for step in trace.steps)
    sizes = {
        name: [_size(message, renderer) for message in messages]
        for name, messages in trace.threads.items()
    }
    cut = _threads_to_cut({name: sum(of_thread) for name, of_thread in sizes.items()})
    for name, messages in trace.threads.items():
        summary = _summary_behind(trace, name, renderer)
        if name not in cut and not summary:
            left_out[_OTHER_THREAD] += steps[name]
            continue
        head_length = _head_length(messages)
        head = _shortened(messages[:head_length], window_tokens // 4, renderer)
        taken = sum(_size(message, renderer) for message in head)
        room = window_tokens - taken
        pieces = list(_pieces(messages, sizes[name], head_length, room))
        if summary:
            pieces = _with_long_end(pieces, messages, sizes[name], room)
        for number, (first, stop) in enumerate(pieces):
            is_last = number == len(pieces) - 1
            stretch = Stretch(name, head, first, stop, summary if is_last else ())
            size = taken + sum(sizes[name][first:stop])
            if name not in cut and not is_last:
                left_out[_OTHER_THREAD] += len(steps_of(trace, stretch))
            elif size < LEAST_HISTORY_TOKENS:
                left_out[TOO_EARLY] += len(steps_of(trace, stretch))
            else:
                yield stretch
        covered = sum(len(steps_of(trace, Stretch(name, head, *p, ()))) for p in pieces)
        is_step = TraceStep(name, head_length) in trace.steps
        left_out[TOO_EARLY] += is_step
        left_out["beside messages longer than the window"] += steps[name] - covered - is_step


def _head_length(messages: Sequence[Message]) -> int:
    """Messages before the first assistant's turn: the system prompt and the task."""
    turns = (i for i, message in enumerate(messages) if message.role == "assistant")
    return next(turns, len(messages))


def _threads_to_cut(size_of: Mapping[str, int]) -> set[str]:
    """Of a thread and those that carry it on, such as "main" and "main#2", the longest."""
    longest: dict[str, str] = {}
    for name, size in size_of.items():
        base = name.partition("#")[0]
        if base not in longest or size > size_of[longest[base]]:
            longest[base] = name
    return set(longest.values())


def _size(message: Message, renderer: Renders) -> int:
    """About how many tokens a message takes."""
    texts = [message.content, message.reasoning, *(call.arguments for call in message.tool_calls)]
    return _MARKUP_TOKENS + sum(len(renderer.pieces(text)) for text in texts if text)


def _summary_behind(trace: Trace, thread: str, renderer: Renders) -> tuple[int, ...]:
    """What the thread's successor begins with in its place; () where it has none, or where that
    begins alike, as a resumed or rewound thread does."""
    base, _, number = thread.partition("#")
    if number and not number.isdecimal():
        return ()
    successor = trace.threads.get(f"{base}#{int(number or 1) + 1}", ())
    before = trace.threads[thread]
    fresh = [m for m in successor[:2] if m not in before and m.role == "user"]
    if not fresh:
        return ()
    tokens = renderer.pieces(fresh[0].content)
    return tuple(tokens) if len(tokens) >= _LEAST_SUMMARY_TOKENS else ()


def _shortened(
    head: Sequence[Message], most_tokens: int, renderer: Renders
) -> tuple[Message, ...]:
    """The beginnings of messages; what a short one leaves goes to the longer ones."""
    encoded = [renderer.pieces(message.content) for message in head]
    kept = list(head)
    room = most_tokens
    shortest_first = sorted(range(len(head)), key=lambda place: len(encoded[place]))
    for done, place in enumerate(shortest_first):
        share = room // (len(head) - done)
        if len(encoded[place]) > share:
            text = renderer.decode(encoded[place][:share])
            kept[place] = replace(head[place], content=text)
        room -= min(share, len(encoded[place]))
    return tuple(kept)


def _pieces(
    messages: Sequence[Message], sizes: Sequence[int], begin: int, room_tokens: int
) -> Iterator[tuple[int, int]]:
    """[first, stop) from one assistant's turn to another, as long as they fit."""
    turns = [i for i in range(begin, len(messages)) if messages[i].role == "assistant"]
    first = begin
    while first < len(messages):
        stop, size = first, 0
        while stop < len(messages) and size + sizes[stop] <= room_tokens:
            size += sizes[stop]
            stop += 1
        if stop > first:
            yield first, stop
        if stop == len(messages):
            return
        back = max((turn for turn in turns if first < turn < stop), default=None)
        ahead = next((turn for turn in turns if turn >= max(stop, first + 1)), len(messages))
        fits = back is not None and sum(sizes[back : stop + 1]) <= room_tokens
        first = back if back is not None and fits else ahead


def _with_long_end(
    pieces: list[tuple[int, int]],
    messages: Sequence[Message],
    sizes: Sequence[int],
    room_tokens: int,
) -> list[tuple[int, int]]:
    """The same, the last piece as long as fits, and the one before it the shorter for it."""
    if len(pieces) < 2:
        return pieces
    *others, (begin, _), (first, stop) = pieces
    fits = (
        turn
        for turn in range(begin + 1, first)
        if messages[turn].role == "assistant" and sum(sizes[turn:stop]) <= room_tokens
    )
    longer = next(fits, first)
    if longer == first:
        return pieces
    return [*others, (begin, longer + 1), (longer, stop)]


def steps_of(trace: Trace, stretch: Stretch) -> list[int]:
    """Steps whose turn is in the stretch, as numbers of messages before it. The first turn has no
    messages before it but the head."""
    return [
        step.context_messages
        for step in trace.steps
        if step.thread == stretch.thread and stretch.first < step.context_messages < stretch.stop
    ]
