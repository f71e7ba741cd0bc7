"""Sessions as `kvws serve --record` writes them, and `kvws replay` reads them: JSON lines.

    {"kvws_record": 1, "session": …, "source": …}      first; the version, and whose session it is
    {"tools": {"digest": …, "schemas": […]}}            before the first call that offers them
    {"call": {…}}                                       one model call, in the order they finished

A call holds

    thread, aside       the agent's thread; whether the call was no turn of its conversation
    keep, add           the messages: the first `keep` of the thread's previous call that was no
                        aside, followed by `add`
    tools               digest of the tools that were offered, or null
    asked               what else the client asked for, where it differs from asking for nothing
    answer              the assistant's message, as it was generated
    finish, stop_text, usage, dialect, model, started_at_s (since 1970), duration_ms, redacted

A process that continues a file repeats tools, and begins with a call that keeps nothing.
"""

from __future__ import annotations

from typing import Any

from kvws.chat.message import Message

VERSION = 1
VERSION_KEY = "kvws_record"


def plain_message(message: Message) -> dict[str, Any]:
    """A message as JSON takes it, without what it does not have."""
    plain: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        plain["tool_calls"] = [
            {"id": call.id, "name": call.name, "arguments": call.arguments}
            for call in message.tool_calls
        ]
    optional = {
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "reasoning": message.reasoning or None,
    }
    return {**plain, **{key: text for key, text in optional.items() if text is not None}}
