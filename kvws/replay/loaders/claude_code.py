"""Claude Code transcripts: JSON lines, one per content block or tool result.

What a line means, and what becomes of it:

    assistant                one block of a model message; lines with one message.id are one turn
    user                     tool results and text, also text that only the interface hides
    isSidechain, agentId     a sub-agent's line: each sub-agent is a thread "agent-1", …
    progress/agent_progress  a sub-agent's line, wrapped
    system/compact_boundary  the history was replaced by a summary: thread "main#2", …
    parentUuid: null         the session was resumed with a copy of its history: likewise
    a parent before the      the user went back to an earlier point: likewise, beginning with
    last assistant turn      the history up to there
    all others               never sent to the model

The system prompt and the tool schemas aren't in a transcript.
"""

from __future__ import annotations

from typing import Any

from kvws.chat.message import ToolCall
from kvws.replay.loaders.claude_thread import Draft, ThreadDraft
from kvws.replay.loaders.content import (
    Skipped,
    flatten,
    is_list,
    is_mapping,
    json_text,
    mapping,
    part_text,
    string,
)
from kvws.replay.loaders.source import Document
from kvws.replay.trace import Trace, TraceStep

FORMAT = "claude-code"

_SYNTHETIC_MODEL = "<synthetic>"
_LINE_KEYS = ("uuid", "sessionId", "leafUuid")

Anchor = tuple[ThreadDraft, int]
"""A place in a thread: the index of its last draft so far."""


def recognises(document: Document) -> bool:
    return any(
        isinstance(row.get("type"), str) and any(key in row for key in _LINE_KEYS)
        for row in map(mapping, document.rows)
    )


def load(document: Document, name: str) -> Trace:
    reader = _Reader()
    for row in document.rows:
        reader.read(mapping(row))
    if document.cut_lines:
        reader.skipped.note("unfinished last lines skipped", document.cut_lines)
    return Trace(
        name=name,
        format=FORMAT,
        threads={thread.name: thread.messages() for thread in reader.threads if thread.drafts},
        steps=tuple(reader.steps),
        notes=reader.skipped.notes(),
    )


class _Reader:
    """Lines in, drafts of threads out, in file order, which is chronological.

    Attributes:
        threads: in order of appearance.
        steps: in chronological order.
        skipped: what never reached the model, or reached it changed.
    """

    def __init__(self) -> None:
        self._main = ThreadDraft("main")
        self._main_count = 1
        self._agents: dict[str, ThreadDraft] = {}
        self._anchors: dict[str, Anchor] = {}
        self._stepped: set[str] = set()
        self._tool_names: dict[str, str] = {}
        self.threads: list[ThreadDraft] = [self._main]
        self.steps: list[TraceStep] = []
        self.skipped = Skipped()

    def read(self, row: dict[str, Any]) -> None:
        """Take one line. Mutates the drafts."""
        uuid = string(row.get("uuid"))
        if uuid and uuid in self._anchors:
            self.skipped.note("repeated lines skipped")
            return
        anchor = self._take(row)
        if uuid:
            self._anchors[uuid] = anchor

    def _take(self, row: dict[str, Any]) -> Anchor:
        """Take one line; where a line that names it as its parent goes on."""
        kind = string(row.get("type"))
        if kind in ("user", "assistant") and is_mapping(row.get("message")):
            return self._read_message(row, self._thread_of(row))
        if kind == "system" and row.get("subtype") == "compact_boundary":
            self._read_boundary(row)
        elif kind == "progress" and _wraps_agent_line(row):
            self._read_agent_progress(row)
        else:
            self.skipped.note(f"{kind[:40] or 'unknown'} lines skipped")
        parent = self._anchors.get(string(row.get("parentUuid")))
        return parent or (self._main, len(self._main.drafts) - 1)

    def _read_agent_progress(self, row: dict[str, Any]) -> None:
        data = mapping(row.get("data"))
        wrapped = mapping(data.get("message"))
        agent = string(data.get("agentId")) or string(row.get("parentToolUseID"))
        self.read({**wrapped, "isSidechain": True, "agentId": agent})

    def _read_boundary(self, row: dict[str, Any]) -> None:
        if row.get("isSidechain") is True:
            self.skipped.note("compactions inside sub-agents ignored")
        elif self._main.drafts:
            self._begin_main("compactions, each begins a new thread", ())

    def _begin_main(self, why: str, history: tuple[Draft, ...]) -> None:
        self._main_count += 1
        self._main = ThreadDraft(f"main#{self._main_count}", history)
        self.threads.append(self._main)
        self.skipped.note(why)

    def _agent(self, key: str) -> ThreadDraft:
        thread = self._agents.get(key)
        if thread is None:
            thread = self._agents[key] = ThreadDraft(f"agent-{len(self._agents) + 1}")
            self.threads.append(thread)
        return thread

    def _thread_of(self, row: dict[str, Any]) -> ThreadDraft:
        """The thread that a user or assistant line belongs to; begins one where it must."""
        parent = self._anchors.get(string(row.get("parentUuid")))
        if row.get("isSidechain") is True:
            if agent := string(row.get("agentId")):
                return self._agent(agent)
            if parent and parent[0] in self._agents.values():
                return parent[0]
            return self._agent(string(row.get("uuid")))
        if row.get("type") == "user" and not _holds_tool_result(row):
            self._follow_user(row, parent)
        return self._main

    def _follow_user(self, row: dict[str, Any], parent: Anchor | None) -> None:
        """Begin a new main thread where a user line does not continue the present one."""
        if not self._main.drafts:
            return
        if parent is None:
            if "parentUuid" in row and row["parentUuid"] is None:
                self._begin_main("resumptions, each begins a new thread", ())
        elif parent[0] is self._main and self._main.last_assistant > parent[1]:
            history = self._main.up_to(parent[1])
            self._begin_main("rewinds, each begins a new thread", history)

    def _read_message(self, row: dict[str, Any], thread: ThreadDraft) -> Anchor:
        message = mapping(row.get("message"))
        content = message.get("content")
        blocks: list[Any] = content if is_list(content) else [content]
        if row.get("type") == "assistant":
            self._read_assistant(row, message, blocks, thread)
        else:
            self._read_user(blocks, thread)
        return thread, thread.last_written

    def _read_assistant(
        self,
        row: dict[str, Any],
        message: dict[str, Any],
        blocks: list[Any],
        thread: ThreadDraft,
    ) -> None:
        if row.get("isApiErrorMessage") is True:
            self.skipped.note("reports of a failed request skipped")
            return
        message_id = string(message.get("id")) or string(row.get("uuid"))
        draft = thread.turn(message_id)
        if draft is None:
            draft = thread.begin_turn(message_id)
            self._count_step(message, message_id, thread)
        for block in blocks:
            fields = mapping(block)
            if fields.get("type") in ("tool_use", "server_tool_use"):
                call = ToolCall(
                    id=string(fields.get("id")),
                    name=string(fields.get("name")),
                    arguments=json_text(fields.get("input", {})),
                )
                self._tool_names[call.id] = call.name
                draft.tool_calls.append(call)
            elif (text := part_text(block, self.skipped)) is not None:
                draft.texts.append(text)

    def _count_step(self, message: dict[str, Any], message_id: str, thread: ThreadDraft) -> None:
        """Record the model call that began `thread`'s last draft, if it was one."""
        context_messages = len(thread.drafts) - 1
        if message.get("model") == _SYNTHETIC_MODEL:
            self.skipped.note("turns not written by a model, context only")
        elif context_messages == 0:
            self.skipped.note("turns without anything before them, context only")
        elif message_id and message_id in self._stepped:
            self.skipped.note("turns of a copied history, context only")
        else:
            self._stepped.add(message_id)
            self.steps.append(TraceStep(thread.name, context_messages))

    def _read_user(self, blocks: list[Any], thread: ThreadDraft) -> None:
        texts: list[str] = []
        for block in blocks:
            fields = mapping(block)
            if fields.get("type") == "tool_result":
                if texts:
                    thread.append(Draft("user", texts))
                    texts = []
                call_id = string(fields.get("tool_use_id")) or None
                result = flatten(fields.get("content"), self.skipped)
                name = self._tool_names.get(call_id or "")
                thread.append(Draft("tool", [result], name=name, tool_call_id=call_id))
            elif (text := part_text(block, self.skipped)) is not None:
                texts.append(text)
        if texts:
            thread.append(Draft("user", texts))


def _wraps_agent_line(row: dict[str, Any]) -> bool:
    data = mapping(row.get("data"))
    wrapped = mapping(data.get("message"))
    return data.get("type") == "agent_progress" and wrapped.get("type") in ("user", "assistant")


def _holds_tool_result(row: dict[str, Any]) -> bool:
    content = mapping(row.get("message")).get("content")
    return is_list(content) and any(
        mapping(block).get("type") == "tool_result" for block in content
    )
