"""Recordings of `kvws serve --record` as requests that a client would send.

A recording holds what a call meant; it is spelled here as its dialect spells it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.acceptance.recorded import Recorded
from tests.acceptance.wire import CHAT, MESSAGES

Plain = Mapping[str, Any]


@dataclass(frozen=True)
class RecordedCall:
    """A call, and the turn that the model answered with, as chat completions spell it."""

    request: Recorded
    answer: list[Any]
    is_aside: bool


def load_recording(file: Path) -> list[RecordedCall]:
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return list(_calls(lines))


def _calls(lines: Sequence[Plain]) -> Iterator[RecordedCall]:
    head = lines[0]
    tools = {
        line["tools"]["digest"]: line["tools"]["schemas"] for line in lines if "tools" in line
    }
    known: dict[str, list[Plain]] = {}
    for number, line in enumerate(each for each in lines if "call" in each):
        call: Plain = line["call"]
        messages = [*known.get(call["thread"], ())[: call["keep"]], *call["add"]]
        if not call["aside"]:
            known[call["thread"]] = messages
        offered = tools[call["tools"]] if call["tools"] else []
        path, body = _SPELLED[call["dialect"]](head["session"], messages, offered, call["asked"])
        headers = {head["source"]: head["session"]}
        if call["thread"] != "main":
            headers["x-claude-code-agent-id"] = call["thread"]
        request = Recorded(
            number, "POST", path, headers, body, tuple(body["messages"]), call["thread"]
        )
        yield RecordedCall(request, [_chat_message(call["answer"])], call["aside"])


def _messages_body(
    session: str, messages: Sequence[Plain], tools: Sequence[Plain], asked: Plain
) -> tuple[str, dict[str, Any]]:
    system = messages[0]["content"] if messages[0]["role"] == "system" else ""
    body: dict[str, Any] = {
        "model": "kvws",
        "max_tokens": asked["max_tokens"],
        "system": system,
        "messages": [_messages_entry(each) for each in messages[1 if system else 0 :]],
        "tools": [_messages_tool(tool["function"]) for tool in tools],
        "metadata": {"user_id": json.dumps({"session_id": session})},
        "stream": asked.get("stream", False),
    }
    if schema := asked.get("json_schema"):
        body["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
    return MESSAGES, body


def _messages_entry(message: Plain) -> dict[str, Any]:
    if message["role"] == "tool":
        result = {"type": "tool_result", "tool_use_id": message["tool_call_id"]}
        return {"role": "user", "content": [{**result, "content": message["content"]}]}
    content: list[Any] = (
        [{"type": "text", "text": message["content"]}] if message["content"] else []
    )
    for call in message.get("tool_calls", ()):
        given = json.loads(call["arguments"])
        content.append(
            {"type": "tool_use", "id": call["id"], "name": call["name"], "input": given}
        )
    return {"role": message["role"], "content": content}


def _messages_tool(function: Plain) -> dict[str, Any]:
    described = {key: function[key] for key in ("name", "description") if key in function}
    return {**described, "input_schema": function["parameters"]}


def _chat_body(
    session: str, messages: Sequence[Plain], tools: Sequence[Plain], asked: Plain
) -> tuple[str, dict[str, Any]]:
    body: dict[str, Any] = {
        "model": "kvws",
        "messages": [_chat_message(each) for each in messages],
        "prompt_cache_key": session,
        "stream": asked.get("stream", False),
    }
    return CHAT, {**body, "tools": list(tools)} if tools else body


def _chat_message(message: Plain) -> dict[str, Any]:
    calls = [
        {
            "id": call["id"],
            "type": "function",
            "function": {"name": call["name"], "arguments": call["arguments"]},
        }
        for call in message.get("tool_calls", ())
    ]
    plain = {
        key: message[key] for key in ("role", "content", "name", "tool_call_id") if key in message
    }
    if thought := message.get("reasoning"):
        plain["reasoning_content"] = thought
    return {**plain, "tool_calls": calls} if calls else plain


_SPELLED = {"anthropic": _messages_body, "chat": _chat_body}
