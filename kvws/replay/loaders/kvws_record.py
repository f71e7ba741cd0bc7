"""Recordings of `kvws serve --record`; `kvws.replay.recording` says what is in them.

Each thread of the session is a thread of the trace. Where the client rewrote its history a new one
begins: "main#2", …; each aside has one of its own: "aside-1", …. A client may send an answer back
in other words than it was generated in (normalised arguments, without reasoning): the trace then
has the client's words, because its next prompts go on with those.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

from kvws.chat.message import Message, Role, ToolCall
from kvws.errors import TraceError
from kvws.replay.loaders.content import Skipped, clean, is_list, is_mapping, mapping, string
from kvws.replay.loaders.source import Document
from kvws.replay.recording import VERSION, VERSION_KEY
from kvws.replay.trace import Trace, TraceStep
from kvws.session.caller import MAIN_THREAD

FORMAT = "kvws-record"

_ROLES: dict[str, Role] = {
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_MAX_MESSAGES = 4_000_000
"""Over all threads. A short line can repeat a long history: memory needs a limit of its own."""


def recognises(document: Document) -> bool:
    return bool(document.rows) and VERSION_KEY in mapping(document.rows[0])


def load(document: Document, name: str) -> Trace:
    """Raises: TraceError: a newer version, or histories beyond all measure."""
    version = document.rows[0][VERSION_KEY]
    if version != VERSION:
        raise TraceError(
            f"the recording has format version {str(version)[:20]}, not {VERSION}",
            hint="replay it with the version of kvws that recorded it",
        )
    reader = _Reader()
    for row in document.rows[1:]:
        reader.read(mapping(row))
    if document.cut_lines:
        reader.skipped.note("unfinished last lines skipped", document.cut_lines)
    return Trace(
        name=name,
        format=FORMAT,
        threads={thread.name: tuple(thread.messages) for thread in reader.threads},
        steps=tuple(reader.steps),
        tools=reader.tools,
        notes=reader.skipped.notes(),
    )


@dataclass
class _Thread:
    """A thread of the trace under construction; its last message is an answer."""

    name: str
    messages: list[Message]

    def leads_to(self, context: tuple[Message, ...]) -> bool:
        """Whether a prompt continues this thread, whatever words it has for the last answer."""
        *before, answer = self.messages
        position = len(before)
        return (
            len(context) > position
            and context[:position] == tuple(before)
            and context[position].role == "assistant"
            and _call_ids(context[position]) == _call_ids(answer)
        )


class _Reader:
    """Lines in, threads out, in file order, which is chronological.

    Attributes:
        threads: in order of appearance.
        steps: in chronological order.
        tools: the first that were offered.
        skipped: what is missing.
    """

    def __init__(self) -> None:
        self.threads: list[_Thread] = []
        self.steps: list[TraceStep] = []
        self.tools: tuple[dict[str, Any], ...] = ()
        self.skipped = Skipped()
        self._tools_digest = ""
        self._schemas: dict[str, tuple[dict[str, Any], ...]] = {}
        self._prompts: dict[str, tuple[Message, ...]] = {}
        self._current: dict[str, _Thread] = {}
        self._names: set[str] = set()
        self._numbers: Counter[str] = Counter()
        self._messages = 0

    def read(self, row: dict[str, Any]) -> None:
        """Take one line. Mutates self."""
        if is_mapping(row.get("tools")):
            self._read_tools(row["tools"])
        elif is_mapping(row.get("call")):
            self._read_call(row["call"])
        else:
            self.skipped.note("unknown lines skipped")

    def _read_tools(self, fields: dict[str, Any]) -> None:
        schemas = fields.get("schemas")
        offered = [each for each in schemas if is_mapping(each)] if is_list(schemas) else []
        encodable = json.loads(clean(json.dumps(offered, ensure_ascii=False)))
        self._schemas[string(fields.get("digest"))] = tuple(encodable)

    def _read_call(self, fields: dict[str, Any]) -> None:
        source = string(fields.get("thread")) or MAIN_THREAD
        is_aside = fields.get("aside") is True
        context = self._context(fields, source)
        if not is_aside:
            self._prompts[source] = context  # nothing, where it is lost, for the next to keep
        answer = _read_message(fields.get("answer"))
        if not context or answer is None or answer.role != "assistant":
            self.skipped.note("damaged calls skipped")
            return
        thread = self._thread(source, is_aside, context)
        self._messages += len(context) + 1 - len(thread.messages)
        if self._messages > _MAX_MESSAGES:
            raise TraceError(
                f"the recording's threads hold more than {_MAX_MESSAGES} messages",
                hint="split the recording",
            )
        thread.messages = [*context, answer]
        self.steps.append(TraceStep(thread.name, len(context)))
        if not is_aside:
            self._offer(string(fields.get("tools")))

    def _context(self, fields: dict[str, Any], source: str) -> tuple[Message, ...]:
        """The prompt of a call; () where a part of it is missing or no message."""
        keep, entries = fields.get("keep"), fields.get("add")
        previous = self._prompts.get(source, ())
        if not isinstance(keep, int) or not 0 <= keep <= len(previous) or not is_list(entries):
            return ()
        added = [_read_message(entry) for entry in entries]
        known = [message for message in added if message is not None]
        return (*previous[:keep], *known) if len(known) == len(added) else ()

    def _thread(self, source: str, is_aside: bool, context: tuple[Message, ...]) -> _Thread:
        """The thread that a prompt continues, or a new one. Mutates self."""
        if is_aside:
            return self._new_thread("aside-")
        current = self._current.get(source)
        if current is None or not current.leads_to(context):
            current = self._new_thread(f"{source}#", first=source)
            self._current[source] = current
        elif context[len(current.messages) - 1] != current.messages[-1]:
            self.skipped.note("answers taken as the client sent them back")
        return current

    def _new_thread(self, prefix: str, first: str | None = None) -> _Thread:
        """An empty thread under a free name: `first`, else the next number. Mutates self."""
        while True:
            self._numbers[prefix] += 1
            number = self._numbers[prefix]
            name = first if first is not None and number == 1 else f"{prefix}{number}"
            if name not in self._names:
                break
        self._names.add(name)
        self.threads.append(_Thread(name, []))
        return self.threads[-1]

    def _offer(self, digest: str) -> None:
        """Take note of the tools of a call. Mutates self."""
        if not digest or digest == self._tools_digest:
            return
        if self._tools_digest:
            self.skipped.note("changes of the tool schemas ignored")
            return
        self._tools_digest = digest
        self.tools = self._schemas.get(digest, ())


def _call_ids(message: Message) -> set[str]:
    return {call.id for call in message.tool_calls}


def _read_message(value: object) -> Message | None:
    fields = mapping(value)
    role = _ROLES.get(string(fields.get("role")))
    if role is None:
        return None
    calls = fields.get("tool_calls")
    return Message(
        role,
        string(fields.get("content")),
        tool_calls=tuple(
            ToolCall(
                string(call.get("id")), string(call.get("name")), string(call.get("arguments"))
            )
            for call in map(mapping, calls if is_list(calls) else ())
        ),
        name=string(fields.get("name")) or None,
        tool_call_id=string(fields.get("tool_call_id")) or None,
        reasoning=string(fields.get("reasoning")),
    )
