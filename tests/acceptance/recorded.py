"""Recorded sessions sent again: the model says what the recorded one said, in its own spelling.

The answer to each request is the assistant's turn that the thread's next longer request carries.
Ids of tool calls are ours in every run, so those in the recording are replaced by them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.acceptance.front import Front
from tests.acceptance.wire import CHAT, MESSAGES, RESPONSES, read_answer
from tests.e2e.front import Answered

_LEFT_OUT = {"content-length", "host", "connection", "accept-encoding", "authorization"}
_THREAD_HEADERS = ("x-claude-code-agent-id", "thread-id")
_DATE = re.compile(r"Today's date is [\d-]+")
_THOUGHT_KEYS = ("thinking", "reasoning_content")
_OF_ASSISTANT = ("function_call", "reasoning", "custom_tool_call")
UNPARSED = "__unparsedToolInput"
DONE = [{"role": "assistant", "content": "Done."}]


@dataclass(frozen=True)
class Recorded:
    """One request as it was recorded.

    Attributes:
        messages: of its body; Responses calls them items.
        thread: that its client says it belongs to.
    """

    number: int
    method: str
    path: str
    headers: Mapping[str, str]
    body: Mapping[str, Any] | None
    messages: tuple[Any, ...]
    thread: str

    @property
    def is_call(self) -> bool:
        return self.path in (MESSAGES, CHAT, RESPONSES)

    @property
    def has_tools(self) -> bool:
        return bool(self.body and self.body.get("tools"))


def load_session(file: Path) -> list[Recorded]:
    """The requests of a file of the harness folder."""
    session = json.loads(file.read_text())
    return [_recorded(request, session["shared"]) for request in session["requests"]]


def _recorded(request: Mapping[str, Any], shared: Mapping[str, Any]) -> Recorded:
    headers = {name.lower(): value for name, value in request["headers"]}
    body = _resolved(request["body"], shared)
    messages = (body.get("messages") or body.get("input") or ()) if body else ()
    return Recorded(
        number=request["n"],
        method=request["method"],
        path=request["path"].partition("?")[0],
        headers={name: value for name, value in headers.items() if name not in _LEFT_OUT},
        body=body,
        messages=tuple(messages),
        thread=next((headers[name] for name in _THREAD_HEADERS if name in headers), "main"),
    )


def _resolved(value: Any, shared: Mapping[str, Any]) -> Any:
    if isinstance(value, dict):
        if set(value) == {"$ref"}:
            return _resolved(shared[value["$ref"]], shared)
        return {key: _resolved(each, shared) for key, each in value.items()}
    return [_resolved(each, shared) for each in value] if isinstance(value, list) else value


def canonical(message: Mapping[str, Any]) -> str:
    """What a message says, whatever its date, its cache marks and the order of its keys."""
    plain = json.loads(json.dumps(message))
    content = plain.get("content")
    if isinstance(content, str):
        plain["content"] = [{"type": "text", "text": content}]
    for block in plain.get("content") or ():
        block.pop("cache_control", None)
    return _DATE.sub("", json.dumps(plain, sort_keys=True))


def common_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Messages that two lists begin with alike."""
    pairs = zip(map(canonical, one), map(canonical, other), strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def continued_by(request: Recorded, later: Sequence[Recorded]) -> Recorded | None:
    """The next request of the thread that goes on behind an answer to this one."""
    longest = len(request.messages)
    for each in later:
        goes_on = each.thread == request.thread and len(each.messages) > longest
        if goes_on and common_length(request.messages, each.messages) == longest:
            return each
    return None


def turn_behind(request: Recorded, later: Sequence[Recorded]) -> list[Any]:
    """The assistant's turn with which the recorded session goes on: its entries."""
    following = continued_by(request, later)
    if following is None:
        return []
    turn: list[Any] = []
    for entry in following.messages[len(request.messages) :]:
        if entry.get("role") != "assistant" and entry.get("type") not in _OF_ASSISTANT:
            break
        turn.append(entry)
    return turn


def as_written(turn: Sequence[Any]) -> str:
    """A turn as a model writes it that always thinks first. Its JSON is not spelled as any
    template would spell it: a turn that is told anew, and not in its own tokens, shows."""
    thoughts, texts, calls = list[str](), list[str](), list[str]()
    for block in _blocks(turn):
        match block:
            case {"type": "thinking", "thinking": str(thought)}:
                thoughts.append(thought)
            case {"type": "text" | "output_text", "text": str(text)}:
                texts.append(text)
            case {
                "type": "tool_use",
                "name": name,
                "input": {"__unparsedToolInput": {"raw": raw}},
            }:
                calls.append(_written_call(name, raw))
            case {"type": "tool_use", "name": name, "input": arguments}:
                calls.append(_written_call(name, json.dumps(arguments, separators=(",", ":"))))
            case {"name": name, "arguments": str(arguments)}:
                calls.append(_written_call(name, arguments))
            case _:
                raise AssertionError(f"no part of a turn: {block}")
    thought = "\n".join(thoughts)
    return f"<think>\n{thought}\n</think>\n\n{''.join(texts)}" + "".join(calls)


def _written_call(name: str, arguments: str) -> str:
    return f'\n<tool_call>{{"name":"{name}","arguments":{arguments}}}</tool_call>'


def _blocks(turn: Sequence[Any]) -> Iterator[Mapping[str, Any]]:
    """Of every dialect: thoughts, texts and calls in order."""
    for entry in turn:
        if thought := entry.get("reasoning_content"):
            yield {"type": "thinking", "thinking": thought}
        if entry.get("type") == "reasoning":
            for part in entry.get("content") or entry.get("summary") or ():
                yield {"type": "thinking", "thinking": part["text"]}
            continue
        content = entry.get("content") or ()
        yield from [{"type": "text", "text": content}] if isinstance(content, str) else content
        for call in entry.get("tool_calls") or ():
            yield call["function"]
        if entry.get("type") == "function_call":
            yield entry


def recorded_ids(turn: Sequence[Any]) -> list[str]:
    """Ids of a turn's calls, in order."""
    ids: list[str] = []
    for entry in turn:
        content = entry.get("content") or ()
        blocks = () if isinstance(content, str) else content
        ids += [block["id"] for block in blocks if block.get("type") == "tool_use"]
        ids += [call["id"] for call in entry.get("tool_calls") or ()]
        ids += [entry["call_id"]] if entry.get("type") == "function_call" else []
    return ids


def recorded_thoughts(turn: Sequence[Any]) -> list[str]:
    return [block["thinking"] for block in _blocks(turn) if block.get("type") == "thinking"]


def unparsed(turn: Sequence[Any]) -> list[str]:
    """Arguments of Claude Code's calls that are no JSON."""
    inputs = [block.get("input") or {} for block in _blocks(turn)]
    return [each[UNPARSED]["raw"] for each in inputs if UNPARSED in each]


@dataclass
class Sent:
    """One request that was sent again.

    Attributes:
        answered: how the server counted it.
        prefilled_tokens: that the engine computed for it.
    """

    recorded: Recorded
    answered: Answered
    prefilled_tokens: int


@dataclass
class Resending:
    """Sends a session's requests again, in order; each waits for its answer."""

    front: Front
    ids: dict[str, str] = field(default_factory=dict[str, str])
    thoughts: dict[str, str] = field(default_factory=dict[str, str])
    unparsed: dict[str, str] = field(default_factory=dict[str, str])

    def send(self, requests: Sequence[Recorded]) -> list[Sent]:
        """The model calls among them. Raises AssertionError where one is not answered by 200."""
        sent: list[Sent] = []
        for index, request in enumerate(requests):
            if request.is_call:
                sent.append(self.call(request, turn_behind(request, requests[index + 1 :])))
            else:
                self._other(request)
        return sent

    def call(self, request: Recorded, turn: Sequence[Any]) -> Sent:
        """One model call, to which the model answers with `turn`."""
        front = self.front
        front.script.saying = as_written(turn or DONE)
        before, count = front.engine.prefilled_tokens, len(front.answered)
        with front.client(**request.headers) as client:
            reply = client.post(request.path, json=self._as_told_by_us(request.body))
        answer = read_answer(request.path, reply)
        answered = front.told(lambda: front.answered, count + 1)[-1]
        self.ids.update(zip(recorded_ids(turn), answer.call_ids, strict=True))
        thoughts = recorded_thoughts(turn)
        ours = ["\n".join(answer.thoughts), *[""] * len(thoughts)]
        self.thoughts.update(zip(thoughts, ours, strict=False))
        self.unparsed.update(zip(unparsed(turn), unparsed(answer.turn), strict=True))
        prefilled = front.engine.prefilled_tokens - before
        return Sent(request, answered, prefilled)

    def _other(self, request: Recorded) -> None:
        with self.front.client(**request.headers) as client:
            reply = client.request(request.method, request.path, json=request.body)
        assert reply.status_code == 200, f"{request.path}: {reply.text}"
        if request.method == "POST":
            assert reply.json()["input_tokens"] > 0

    def _as_told_by_us(self, value: Any, key: str = "") -> Any:
        """A body with what this server gave its client: ids, thoughts, broken arguments."""
        if isinstance(value, dict):
            if key == UNPARSED:
                raw = self.unparsed[value["raw"]]
                return {"raw": raw, "len": len(raw)}
            return {name: self._as_told_by_us(each, name) for name, each in value.items()}
        if isinstance(value, list):
            return [self._as_told_by_us(each, key) for each in value]
        if not isinstance(value, str):
            return value
        ours = self.thoughts if key in _THOUGHT_KEYS else self.ids
        return ours.get(value, value)
