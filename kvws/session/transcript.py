"""What is known of a session's messages: where in the token log each list of them ends.

A list of messages is named by a chain of digests, one a message. Its *place* is the end of its
tokens in the block tree. A prompt that begins with a known list is rendered from there on only,
and the turns that the model generated keep the very tokens that it generated, though the client's
copy of them is spelled differently.

    system | user | assistant | tool | tool |            a request …
                                            ^ place
                                             assistant |        … its answer, as generated
                                                        ^ place of the answer

Places outlive the process as notes in the journal.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from typing import Any, cast

from kvws.blocks.key import BLOCK_TOKENS
from kvws.chat.message import Message, ToolCall
from kvws.chat.same_turn import is_replay_of
from kvws.recall.spans import PromptSpans, Span
from kvws.session.commit import ROOT
from kvws.session.workspace import Thread, Workspace

_NOTE = "transcript"
_LATEST_LISTS = 4
"""Threads of a session that work at the same time, usually. The lists are as long as sessions."""


@dataclass(frozen=True)
class Landmarks:
    """Where in a list of messages the parts are that a view should keep, in tokens.

    Attributes:
        system_end: of the system prompt and tool schemas, which come first; 0 for none.
        policies: by path, the newest text of a standing instruction.
        task: the user's newest request.
    """

    system_end: int = 0
    policies: Mapping[str, Span] = field(default_factory=dict[str, Span])
    task: Span | None = None

    def spans(self, prompt_tokens: int) -> PromptSpans:
        """For a prompt of that length that begins with the list."""
        return PromptSpans(
            system=Span(0, self.system_end) if self.system_end else None,
            policies=tuple(self.policies.values()),
            task=self.task,
            trajectory=Span(self.task.end, prompt_tokens) if self.task else None,
        )


@dataclass(frozen=True)
class Place:
    """The end of a list of messages in the token log.

    Attributes:
        head: the newest block that lies before it as a whole, or ROOT.
        blocks: the line up to `head`, in blocks.
        tail: tokens between that block and the place; fewer than 32 unless blocks were lost.
        landmarks: of the list.
        told: facts that change by themselves (dates), as the tokens before the place tell them; by
            message and kind.
        tools: the tools that those tokens tell of, by name: digests of their schemas.
    """

    head: int = ROOT
    blocks: int = 0
    tail: tuple[int, ...] = ()
    landmarks: Landmarks = field(default_factory=Landmarks)
    told: Mapping[str, str] = field(default_factory=dict[str, str])
    tools: Mapping[str, bytes] = field(default_factory=dict[str, bytes])

    @property
    def tokens(self) -> int:
        return BLOCK_TOKENS * self.blocks + len(self.tail)

    def line(self, thread: Thread, workspace: Workspace) -> tuple[int, ...]:
        """The blocks up to the place; cheap when the thread already runs through it."""
        if self.blocks == 0:
            return ()
        if len(thread.line) >= self.blocks and thread.line[self.blocks - 1] == self.head:
            return thread.line[: self.blocks]
        return (*workspace.lineage(self.head), self.head)


@dataclass(frozen=True)
class Given:
    """An answer as it was generated.

    Attributes:
        message: what it says.
        place: its end, the closing of the turn included.
    """

    message: Message
    place: Place


@dataclass(frozen=True)
class Known:
    """How much of a list of messages is known.

    Attributes:
        messages: so many from its beginning.
        place: where they end.
    """

    messages: int
    place: Place


@dataclass(frozen=True)
class Named:
    """A list of messages and its digests.

    Attributes:
        digests: of the lists messages[:0], messages[:1], …: one more than messages.
    """

    messages: Sequence[Message]
    digests: Sequence[bytes]


class Transcript:
    """The lists of messages that a workspace knows."""

    def __init__(self) -> None:
        self.version = 0
        self._latest: dict[str, Named] = {}
        self._places: dict[bytes, Place] = {}
        self._tool_sets: dict[bytes, Mapping[str, bytes]] = {}
        self._answers: dict[bytes, list[Given]] = {}

    def find(self, messages: Sequence[Message], digests: Sequence[bytes]) -> Known:
        """The longest known beginning of a list; all of it, when a client asks once more.

        Args:
            digests: of the lists messages[:0], messages[:1], …: one more than messages.

        Mutates: an answer that the list repeats is known from now on by the client's spelling.
        """
        for count in range(len(messages), -1, -1):
            place = self._places.get(digests[count])
            if place is not None:
                break
        else:
            count, place = 0, Place()
        if count < len(messages):
            given = self._given(digests[count], messages[count])
            if given is not None:
                count, place = count + 1, given.place
                self._places[digests[count]] = place
        return Known(count, place)

    def _given(self, asked: bytes, message: Message) -> Given | None:
        if message.role != "assistant":
            return None
        answers = self._answers.get(asked, ())
        return next((a for a in reversed(answers) if is_replay_of(a.message, message)), None)

    def latest(self, thread: str) -> Named | None:
        """The list that a thread was asked with last, while that is remembered."""
        return self._latest.get(thread)

    def keep_latest(self, thread: str, named: Named) -> None:
        """Remember a thread's list, whole, until others were asked more recently."""
        self._latest.pop(thread, None)
        self._latest[thread] = named
        if len(self._latest) > _LATEST_LISTS:
            del self._latest[next(iter(self._latest))]

    def learn(self, asked: bytes, place: Place, given: Given | None) -> dict[str, Any]:
        """Keep where a request's list of messages ends, and its answer.

        Args:
            asked: digest of the list.

        Returns:
            a note for the journal, from which `recall` learns the same.
        """
        self.version += 1
        tools_name = _name_of(place.tools)
        first_seen = tools_name not in self._tool_sets
        tools = self._tool_sets.setdefault(tools_name, place.tools)
        place = replace(place, tools=tools)  # one mapping for all places that tell of the same
        self._places[asked] = place
        if given is not None:
            given = replace(given, place=replace(given.place, tools=tools))
            self._answers.setdefault(asked, []).append(given)
        return {
            "kind": _NOTE,
            "asked": asked,
            "tools": [tools_name, dict(place.tools) if first_seen else None],
            "place": _place_to_plain(place),
            "given": given
            and {"message": asdict(given.message), "place": _place_to_plain(given.place)},
        }

    def recall(self, notes: Iterable[Any], workspace: Workspace) -> None:
        """Learn from notes of an earlier life, as far as the blocks that they name are there."""
        for note in notes:
            if isinstance(note, dict) and cast(dict[str, Any], note).get("kind") == _NOTE:
                self._recall(cast(dict[str, Any], note), workspace)

    def _recall(self, note: dict[str, Any], workspace: Workspace) -> None:
        tools_name, tools = note["tools"]
        if tools is not None:
            self._tool_sets[tools_name] = tools
        tools = self._tool_sets.get(tools_name)
        if tools is None:  # the note that told of them is gone
            return
        place = _place_from_plain(note["place"], tools)
        if not _is_there(place, workspace):
            return
        given = None
        if note["given"] is not None:
            answer = _place_from_plain(note["given"]["place"], tools)
            if _is_there(answer, workspace):
                given = Given(_message_from_plain(note["given"]["message"]), answer)
        self.learn(note["asked"], place, given)


def place_in(
    line: Sequence[int],
    begin: int,
    tokens: Sequence[int],
    end: int,
    landmarks: Landmarks,
    told: Mapping[str, str],
    tools: Mapping[str, bytes],
) -> Place:
    """The place behind some tokens of a thread.

    Args:
        line: the thread's blocks.
        begin: blocks of the line that lie before `tokens`.
        tokens: what follows them.
        end: so many of the tokens lie before the place.
    """
    blocks = min(len(line), begin + end // BLOCK_TOKENS)
    assert blocks >= begin, "the thread's line is shorter than what it was continued from"
    tail = tuple(tokens[BLOCK_TOKENS * (blocks - begin) : end])
    head = line[blocks - 1] if blocks else ROOT
    return Place(head, blocks, tail, landmarks, told, tools)


def _name_of(tools: Mapping[str, bytes]) -> bytes:
    """A digest of a set of tools."""
    state = blake2b(digest_size=16)
    for name in sorted(tools):
        state.update(f"{len(name)}:{name}".encode() + tools[name])
    return state.digest()


def _is_there(place: Place, workspace: Workspace) -> bool:
    """A number stands for the same tokens in every life, and so does the path to it."""
    if place.blocks == 0:
        return True
    return 0 <= place.head < workspace.block_count and workspace.exists(place.head)


def _place_to_plain(place: Place) -> list[Any]:
    marks = place.landmarks
    return [
        place.head,
        place.blocks,
        struct.pack(f"<{len(place.tail)}I", *place.tail),
        marks.system_end,
        {path: [span.begin, span.end] for path, span in marks.policies.items()},
        marks.task and [marks.task.begin, marks.task.end],
        dict(place.told),
    ]


def _place_from_plain(plain: Sequence[Any], tools: Mapping[str, bytes]) -> Place:
    head, blocks, tail, system_end, policies, task, told = plain
    return Place(
        head,
        blocks,
        struct.unpack(f"<{len(tail) // 4}I", tail),
        Landmarks(
            system_end,
            {path: Span(*span) for path, span in policies.items()},
            Span(*task) if task else None,
        ),
        told,
        tools,
    )


def _message_from_plain(plain: Mapping[str, Any]) -> Message:
    fields: dict[str, Any] = {**plain}
    fields["tool_calls"] = tuple(ToolCall(**call) for call in plain["tool_calls"])
    return Message(**fields)
