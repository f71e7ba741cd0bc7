"""What agents say, in the dialects of two kinds of clients."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tests.e2e.scripts import Turn
from tests.endurance.model import TOOLS
from tests.endurance.wire import Reply

SYSTEM = " ".join(f"Rule {number} of this house is like all the others." for number in range(40))
_SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "what": {"type": "string"}},
}


@dataclass(frozen=True)
class Said:
    """An answer as its client heard it."""

    text: str
    calls: tuple[tuple[str, str, dict[str, Any]], ...] = ()
    """(id, tool, arguments)"""

    def is_turn(self, turn: Turn) -> bool:
        """Whether it is what the model says; blanks beside tool calls are nobody's."""
        calls = [(name, arguments) for _, name, arguments in self.calls]
        return self.text.strip() == turn.text.strip() and calls == list(turn.calls)


@dataclass(frozen=True)
class Round:
    """An answer, and what its client told next: results of its calls, or a user's text."""

    said: Said
    told: tuple[str, ...]


@dataclass(frozen=True)
class History:
    task: str
    rounds: tuple[Round, ...] = ()


class Speech(Protocol):
    path: str

    def body(
        self, history: History, *, stream: bool, aside_of: str | None = None
    ) -> dict[str, Any]:
        """A request.

        Args:
            aside_of: the session that this is a side call of, without tools.
        """
        ...

    def said(self, reply: Reply, *, stream: bool) -> Said: ...


class Anthropic:
    path = "/v1/messages?beta=true"

    def body(
        self, history: History, *, stream: bool, aside_of: str | None = None
    ) -> dict[str, Any]:
        messages: list[dict[str, Any]] = [{"role": "user", "content": history.task}]
        for one in history.rounds:
            blocks = [
                {"type": "tool_use", "id": id_, "name": name, "input": arguments}
                for id_, name, arguments in one.said.calls
            ]
            if text := one.said.text.strip():
                blocks.insert(0, {"type": "text", "text": text})
            results = [
                {"type": "tool_result", "tool_use_id": id_, "content": told}
                for (id_, _, _), told in zip(one.said.calls, one.told, strict=False)
            ]
            told = results or [{"type": "text", "text": text} for text in one.told]
            messages += [{"role": "assistant", "content": blocks}]
            messages += [{"role": "user", "content": told}]
        if messages:
            last = messages[-1]
            if isinstance(last["content"], list):
                last["content"][-1]["cache_control"] = {"type": "ephemeral"}
        schemas = [{"name": tool, "description": tool, "input_schema": _SCHEMA} for tool in TOOLS]
        return {
            "model": "kvws",
            "max_tokens": 3000,
            "system": [{"type": "text", "text": SYSTEM}],
            "messages": messages,
            "stream": stream,
            **({"metadata": _user(aside_of)} if aside_of else {"tools": schemas}),
        }

    def said(self, reply: Reply, *, stream: bool) -> Said:
        blocks = _assembled(reply.events) if stream else reply.json["content"]
        text = "".join(block["text"] for block in blocks if block["type"] == "text")
        uses = [block for block in blocks if block["type"] == "tool_use"]
        return Said(text, tuple((use["id"], use["name"], use["input"]) for use in uses))


def _user(session: str) -> dict[str, str]:
    return {"user_id": json.dumps({"session_id": session})}


def _assembled(events: Sequence[tuple[str | None, Any]]) -> list[dict[str, Any]]:
    assert events[0][0] == "message_start" and events[-1][0] == "message_stop", events[-1]
    blocks: list[dict[str, Any]] = []
    spelled = ""
    for name, data in events:
        if name == "content_block_start":
            assert data["index"] == len(blocks)
            blocks.append(dict(data["content_block"]))
            spelled = ""
        elif name == "content_block_delta" and data["delta"]["type"] == "text_delta":
            blocks[-1]["text"] += data["delta"]["text"]
        elif name == "content_block_delta" and data["delta"]["type"] == "input_json_delta":
            spelled += data["delta"]["partial_json"]
        elif name == "content_block_stop" and blocks[-1]["type"] == "tool_use":
            blocks[-1]["input"] = json.loads(spelled)
    return blocks


class ChatCompletions:
    path = "/v1/chat/completions"

    def body(
        self, history: History, *, stream: bool, aside_of: str | None = None
    ) -> dict[str, Any]:
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": history.task},
        ]
        for one in history.rounds:
            message: dict[str, Any] = {"role": "assistant", "content": one.said.text}
            if one.said.calls:
                message["tool_calls"] = [
                    {
                        "id": id_,
                        "type": "function",
                        "function": {"name": name, "arguments": json.dumps(arguments)},
                    }
                    for id_, name, arguments in one.said.calls
                ]
                messages.append(message)
                messages += [
                    {"role": "tool", "tool_call_id": id_, "content": told}
                    for (id_, _, _), told in zip(one.said.calls, one.told, strict=True)
                ]
            else:
                messages += [message, {"role": "user", "content": "\n".join(one.told)}]
        functions = [{"name": tool, "description": tool, "parameters": _SCHEMA} for tool in TOOLS]
        schemas = [{"type": "function", "function": function} for function in functions]
        return {
            "model": "kvws",
            "max_tokens": 3000,
            "messages": messages,
            "stream": stream,
            **({"prompt_cache_key": aside_of} if aside_of else {"tools": schemas}),
        }

    def said(self, reply: Reply, *, stream: bool) -> Said:
        if not stream:
            message = reply.json["choices"][0]["message"]
            calls = message.get("tool_calls") or []
            return Said(message.get("content") or "", tuple(_call(call) for call in calls))
        assert reply.events[-1] == (None, "[DONE]"), reply.events[-1]
        text, calls = "", list[dict[str, Any]]()
        for _, data in reply.events[:-1]:
            for choice in data["choices"]:
                text += choice["delta"].get("content") or ""
                for part in choice["delta"].get("tool_calls") or []:
                    if part["index"] == len(calls):
                        calls.append({"id": part["id"], "function": {"name": "", "arguments": ""}})
                    function = calls[part["index"]]["function"]
                    function["name"] += part["function"].get("name") or ""
                    function["arguments"] += part["function"].get("arguments") or ""
        return Said(text, tuple(_call(call) for call in calls))


def _call(call: dict[str, Any]) -> tuple[str, str, dict[str, Any]]:
    return call["id"], call["function"]["name"], json.loads(call["function"]["arguments"])


def any_speech(rng: random.Random) -> Speech:
    return rng.choice((Anthropic(), ChatCompletions()))
