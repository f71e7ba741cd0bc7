"""What a client makes of a stream, independently of how the stream was written."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kvws.http.dialect import SseEvent

_DELTA_TYPES = {
    "thinking": ("thinking_delta", "signature_delta"),
    "text": ("text_delta",),
    "tool_use": ("input_json_delta",),
}
_DELTA_MEMBERS = {
    "thinking_delta": "thinking",
    "signature_delta": "signature",
    "text_delta": "text",
    "input_json_delta": "partial_json",
}


@dataclass
class Received:
    """A message as far as it was received.

    Attributes:
        blocks: closed or not, without keep-alive's empty thoughts.
        complete: message_stop came.
        error: of an error event.
    """

    message: dict[str, Any] = field(default_factory=dict)
    blocks: list[dict[str, Any]] = field(default_factory=list)
    complete: bool = False
    error: dict[str, Any] | None = None


def received(events: Iterable[SseEvent]) -> Received:
    """Read a stream from its beginning to its end. AssertionError: it is not well formed."""
    all_events = list(events)
    result = Received()
    open_block: dict[str, Any] | None = None
    blocks = 0
    for position, event in enumerate(all_events):
        assert isinstance(event.data, dict)
        data: dict[str, Any] = json.loads(json.dumps(event.data))
        assert event.event == data["type"]
        assert not result.complete, "nothing follows message_stop"
        assert result.error is None, "nothing follows an error"
        assert (data["type"] == "message_start") == (position == 0)
        match data["type"]:
            case "message_start":
                result.message = data["message"]
                assert result.message["content"] == []
                assert result.message["role"] == "assistant"
            case "content_block_start":
                assert open_block is None, "one block at a time"
                assert data["index"] == blocks
                blocks += 1
                open_block = data["content_block"]
                result.blocks.append(open_block)
                if open_block["type"] == "tool_use":
                    assert open_block["input"] == {}
                    open_block["json"] = ""
            case "content_block_delta":
                assert open_block is not None
                assert data["index"] == blocks - 1
                _grow(open_block, data["delta"])
            case "content_block_stop":
                assert open_block is not None
                assert data["index"] == blocks - 1
                open_block = None
            case "message_delta":
                assert open_block is None
                assert result.message["stop_reason"] is None
                result.message.update(data["delta"])
                result.message["usage"] = data["usage"]
            case "message_stop":
                assert result.message["stop_reason"] is not None
                result.complete = True
            case "error":
                result.error = data["error"]
            case kind:
                assert kind == "ping"
    result.blocks = [b for b in result.blocks if b["type"] != "thinking" or b["thinking"]]
    return result


def _grow(block: dict[str, Any], delta: dict[str, Any]) -> None:
    kind = delta["type"]
    assert kind in _DELTA_TYPES[block["type"]]
    more = delta[_DELTA_MEMBERS[kind]]
    member = "json" if kind == "input_json_delta" else _DELTA_MEMBERS[kind]
    assert not block.get("signature"), "a signature ends its block"
    block[member] += more
