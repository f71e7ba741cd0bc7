"""mini-swe-agent trajectories: one message list beside a run's `info`.

Version 1 writes observations as user messages; version 2 uses tool calls and tool messages,
and ends with an entry of role "exit", which the model never sees.
"""

from __future__ import annotations

from kvws.replay.loaders.chat_message import every_reply, read_messages
from kvws.replay.loaders.content import Skipped, is_list, mapping, string
from kvws.replay.loaders.source import Document
from kvws.replay.trace import Trace

FORMAT = "mini-swe-agent"


def recognises(document: Document) -> bool:
    fields = mapping(document.value)
    written_by_it = string(fields.get("trajectory_format")).startswith("mini-swe-agent")
    return is_list(fields.get("messages")) and (
        written_by_it or "mini_version" in mapping(fields.get("info"))
    )


def load(document: Document, name: str) -> Trace:
    skipped = Skipped()
    messages = read_messages(document.value["messages"], skipped)
    return Trace(
        name=name,
        format=FORMAT,
        threads={"main": messages},
        steps=every_reply("main", messages),
        notes=skipped.notes(),
    )
