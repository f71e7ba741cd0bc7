"""What real clients sent: every request reads, and a conversation only grows."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvws.chat.answer import AnswerEvent, Finished, Text, ToolArguments, ToolCallBegun, Usage
from kvws.chat.call import ModelCall
from kvws.chat.message import Message
from kvws.http.chat_completions import CHAT_COMPLETIONS, is_aside
from kvws.http.recollection import Recollection
from kvws.http.recorder import Recorder, file_name
from kvws.replay.loaders import load_trace
from kvws.session.caller import Caller

SESSIONS = ("oh_basic", "oh_stream", "oh_cond", "oh_over", "opencode")
CONDENSED = ("oh_cond", "oh_over")
Asked = tuple[ModelCall, dict[str, str], dict[str, Any]]


def recorded(name: str) -> list[Asked]:
    beside_repository = Path(__file__).resolve().parents[4] / "shared" / "harness"
    path = Path(os.environ.get("KVWS_HARNESS") or beside_repository) / f"{name}.json"
    if not path.is_file():
        pytest.skip("no recorded traffic: set KVWS_HARNESS to its folder")
    session = json.loads(path.read_text(encoding="utf-8"))

    def resolved(value: Any) -> Any:
        if isinstance(value, list):
            return [resolved(each) for each in value]
        if not isinstance(value, dict):
            return value
        if "$ref" in value:
            return resolved(session["shared"][value["$ref"]])
        return {key: resolved(each) for key, each in value.items()}

    posts = [request for request in session["requests"] if request["method"] == "POST"]
    bodies = [(resolved(post["body"]), post["headers"]) for post in posts]
    return [
        (CHAT_COMPLETIONS.read(body), {key.lower(): value for key, value in headers}, body)
        for body, headers in bodies
    ]


@pytest.mark.parametrize("name", SESSIONS)
def test_every_request_reads_the_same_whatever_was_read_before_it(name: str) -> None:
    recollection = Recollection()
    for call, _, body in recorded(name):
        assert repr(CHAT_COMPLETIONS.read(body, recollection)) == repr(call)


@pytest.mark.parametrize("name", SESSIONS)
def test_every_request_reads_without_loss(name: str) -> None:
    for call, _, body in recorded(name):
        assert len(call.messages) == len(body["messages"])
        assert len(call.tools) == len(body.get("tools", ()))
        assert call.dropped == ()


@pytest.mark.parametrize("name", SESSIONS)
def test_a_conversation_only_grows_until_the_client_condenses_it(name: str) -> None:
    turns = [call for call, headers, _ in recorded(name) if not is_aside(call, headers)]
    rewritten = sum(
        after.messages[: len(before.messages)] != before.messages
        for before, after in pairwise(turns)
    )
    assert len(turns) > 1
    assert rewritten == (1 if name in CONDENSED else 0)


@pytest.mark.parametrize(
    ("name", "asides"), [("opencode", [0]), ("oh_cond", [4]), ("oh_over", [4]), ("oh_basic", [])]
)
def test_titles_and_summaries_are_asides(name: str, asides: list[int]) -> None:
    calls = recorded(name)
    found = [n for n, (call, headers, _) in enumerate(calls) if is_aside(call, headers)]
    assert found == asides


def test_opencode_sends_reasoning_back() -> None:
    *_, (last, _, _) = recorded("opencode")
    assert [m.reasoning for m in last.messages if m.role == "assistant"] == [
        "reasoning 1",
        "reasoning 2",
    ]


@pytest.mark.parametrize("name", SESSIONS)
def test_a_recording_of_the_traffic_replays_it(name: str, tmp_path: Path) -> None:
    calls = [
        replace(call, side_call=is_aside(call, headers)) for call, headers, _ in recorded(name)
    ]
    caller = Caller("s", "main", "x-session-id")

    async def record() -> None:
        recorder = Recorder(tmp_path)
        for call, following in zip(calls, [*calls[1:], None], strict=True):
            answer = answer_in(following, len(call.messages))
            await recorder.record(
                caller, call, answer, dialect="chat", started_at_s=0.0, duration_ms=1.0
            )

    asyncio.run(record())
    trace = load_trace(tmp_path / file_name(caller))
    assert [trace.context(step) for step in trace.steps] == [call.messages for call in calls]
    turns = next(call for call in calls if not call.side_call)
    assert trace.tools == turns.tools
    asides = [thread for thread in trace.threads if thread.startswith("aside-")]
    assert len(asides) == sum(call.side_call for call in calls)
    assert ("main#2" in trace.threads) == (name in CONDENSED)


def answer_in(following: ModelCall | None, position: int) -> list[AnswerEvent]:
    """What the model had answered, as far as the next prompt tells."""
    known = following.messages[position : position + 1] if following else ()
    events: list[AnswerEvent] = [
        event
        for message in known
        for event in (Text(message.content or "Well."), *calls_of(message))
    ]
    return [*events, Finished("stop", Usage(1))]


def calls_of(message: Message) -> list[AnswerEvent]:
    return [
        event
        for index, call in enumerate(message.tool_calls)
        for event in (
            ToolCallBegun(index, call.id, call.name),
            ToolArguments(index, call.arguments),
        )
    ]
