"""What a client reads out of an answer, streamed or whole, in each dialect."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"


@dataclass(frozen=True)
class Answer:
    """An answer as a client keeps it.

    Attributes:
        turn: what the client puts into its history: messages, or items.
        text: what was said.
        call_ids: of its tool calls, in order.
        thoughts: likewise.
    """

    turn: list[Any]
    text: str
    call_ids: tuple[str, ...] = ()
    thoughts: tuple[str, ...] = ()


def read_answer(path: str, reply: httpx.Response) -> Answer:
    """Raises AssertionError where the reply is no answer."""
    assert reply.status_code == 200, f"{reply.status_code} {reply.text[:500]}"
    body = reply.json() if "json" in reply.headers["content-type"] else None
    if path == MESSAGES:
        return _of_blocks(body["content"] if body else _streamed_blocks(reply.text))
    if path == CHAT:
        message = body["choices"][0]["message"] if body else _streamed_message(reply.text)
        calls = tuple(call["id"] for call in message.get("tool_calls") or ())
        thought = message.get("reasoning_content")
        return Answer(
            [message], message.get("content") or "", calls, (thought,) if thought else ()
        )
    return _of_items(body["output"] if body else _streamed_items(reply.text))


def frames(stream: str) -> Iterator[dict[str, Any]]:
    """The JSON objects of an event stream."""
    for line in stream.split("\n"):
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def _of_blocks(blocks: list[dict[str, Any]]) -> Answer:
    return Answer(
        [{"role": "assistant", "content": blocks}],
        "".join(block["text"] for block in blocks if block["type"] == "text"),
        tuple(block["id"] for block in blocks if block["type"] == "tool_use"),
        tuple(block["thinking"] for block in blocks if block["type"] == "thinking"),
    )


def _of_items(items: list[dict[str, Any]]) -> Answer:
    said = (part for item in items if item["type"] == "message" for part in item["content"])
    calls = (item for item in items if item["type"].endswith("_call"))
    return Answer(
        items,
        "".join(part.get("text", "") for part in said),
        tuple(call["call_id"] for call in calls),
    )


def _streamed_blocks(stream: str) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    frame: dict[str, Any] = {}
    for frame in frames(stream):
        match frame:
            case {"type": "content_block_start", "content_block": block}:
                blocks.append({**block, "json": ""} if block["type"] == "tool_use" else block)
            case {"type": "content_block_delta", "delta": delta}:
                _extend(blocks[-1], delta)
            case {"type": "error"}:
                raise AssertionError(frame)
            case _:
                pass
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = _input(block.pop("json") or "{}")
    assert frame["type"] == "message_stop", frame
    return blocks


def _extend(block: dict[str, Any], delta: Mapping[str, str]) -> None:
    member = {
        "text_delta": ("text", "text"),
        "thinking_delta": ("thinking", "thinking"),
        "signature_delta": ("signature", "signature"),
        "input_json_delta": ("json", "partial_json"),
    }
    of_block, of_delta = member[delta["type"]]
    block[of_block] += delta[of_delta]


def _input(text: str) -> Any:
    """Arguments of a call; Claude Code keeps those that it cannot parse like this."""
    try:
        return json.loads(text)
    except ValueError:
        return {"__unparsedToolInput": {"raw": text, "len": len(text)}}


def _streamed_message(stream: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls: dict[int, dict[str, Any]] = {}
    for frame in frames(stream):
        assert "error" not in frame, frame
        for choice in frame["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            if thought := delta.get("reasoning_content"):
                message["reasoning_content"] = message.get("reasoning_content", "") + thought
            for part in delta.get("tool_calls") or ():
                call = calls.setdefault(part["index"], {"type": "function", "function": {}})
                if part.get("id"):
                    call["id"] = part["id"]
                for key, text in part.get("function", {}).items():
                    call["function"][key] = call["function"].get(key, "") + (text or "")
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    assert stream.rstrip().endswith("data: [DONE]"), "the stream was cut"
    return message


def _streamed_items(stream: str) -> list[dict[str, Any]]:
    *_, last = frames(stream)
    assert last["type"] == "response.completed", last
    return last["response"]["output"]
