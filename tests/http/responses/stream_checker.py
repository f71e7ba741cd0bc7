"""A reader of response streams that knows the protocol and nothing of our writer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kvws.http.dialect import SseEvent

TERMINAL = {
    "response.completed": "completed",
    "response.incomplete": "incomplete",
    "response.failed": "failed",
}
DELTAS = {
    "reasoning": ("response.reasoning_summary_text.delta", "response.reasoning_summary_text.done"),
    "message": ("response.output_text.delta", "response.output_text.done"),
    "function_call": (
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
    ),
    "custom_tool_call": (
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
    ),
}
PARTS = {
    "reasoning": (
        "response.reasoning_summary_part.added",
        "response.reasoning_summary_part.done",
        "summary_index",
    ),
    "message": ("response.content_part.added", "response.content_part.done", "content_index"),
}
DONE_TEXT = {
    "reasoning": "text",
    "message": "text",
    "function_call": "arguments",
    "custom_tool_call": "input",
}


@dataclass
class Item:
    """An item as its events tell it."""

    id: str
    kind: str
    index: int
    added: dict[str, Any]
    text: str = ""
    text_is_done: bool = False
    part: str = "none"  # "none", "open", "done"


@dataclass
class Checked:
    """What a well-formed stream said.

    Attributes:
        done: items whose end came, in order.
        unfinished: the item that was open when the stream ended.
        response: of the last event.
    """

    response: dict[str, Any]
    done: list[dict[str, Any]]
    unfinished: Item | None
    texts: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])


def check(frames: Iterable[SseEvent]) -> Checked:
    """Raises AssertionError where the stream breaks the protocol."""
    payloads: list[dict[str, Any]] = []
    for number, frame in enumerate(frames):
        assert isinstance(frame.data, dict)
        assert frame.event == frame.data["type"]
        assert frame.data["sequence_number"] == number
        payloads.append(frame.data)
    assert payloads[0]["type"] == "response.created"
    identity = payloads[0]["response"]["id"]
    open_item: Item | None = None
    done: list[dict[str, Any]] = []
    texts: list[tuple[str, str]] = []
    for payload in payloads[1:-1]:
        kind = payload["type"]
        if kind == "response.in_progress":
            assert payload["response"]["id"] == identity
            assert payload["response"]["status"] == "in_progress"
        elif kind == "response.output_item.added":
            assert open_item is None, "two items are open at once"
            item = payload["item"]
            assert payload["output_index"] == len(done) and item["status"] == "in_progress"
            assert not _text(item), "an item begins empty"
            open_item = Item(item["id"], item["type"], len(done), item)
        else:
            assert open_item is not None, f"{kind} outside any item"
            if kind == "response.output_item.done":
                assert payload["output_index"] == open_item.index
                _check_done(open_item, payload["item"])
                done.append(payload["item"])
                texts.append((open_item.kind, open_item.text))
                open_item = None
            else:
                _follow(open_item, payload)
    last = payloads[-1]
    response = last["response"]
    assert response["id"] == identity and response["status"] == TERMINAL[last["type"]]
    return Checked(response, done, open_item, texts)


def _follow(item: Item, payload: dict[str, Any]) -> None:
    assert (payload["item_id"], payload["output_index"]) == (item.id, item.index)
    kind = payload["type"]
    delta, text_done = DELTAS[item.kind]
    if item.kind in PARTS:
        part_added, part_done, index_name = PARTS[item.kind]
        assert payload[index_name] == 0
        if kind == part_added:
            assert item.part == "none"
            item.part = "open"
            return
        assert item.part == "open", f"{kind} outside any part"
        if kind == part_done:
            assert item.text_is_done and payload["part"]["text"] == item.text
            item.part = "done"
            return
    assert not item.text_is_done, "a text goes on after its end"
    if kind == delta:
        assert payload["delta"] != ""
        item.text += payload["delta"]
    else:
        assert kind == text_done
        assert payload[DONE_TEXT[item.kind]] == item.text
        item.text_is_done = True


def _check_done(item: Item, shown: dict[str, Any]) -> None:
    assert item.text_is_done and item.part in ("done", "none")
    assert (shown["id"], shown["type"]) == (item.id, item.kind)
    assert shown["status"] in ("completed", "incomplete")
    assert _text(shown) == item.text


def _text(item: dict[str, Any]) -> str:
    if item["type"] == "reasoning":
        return "".join(part["text"] for part in item["summary"])
    if item["type"] == "message":
        return "".join(part["text"] for part in item["content"])
    return item["arguments" if item["type"] == "function_call" else "input"]
