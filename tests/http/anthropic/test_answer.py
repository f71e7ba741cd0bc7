"""Answers as the Messages API writes them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvws.chat.answer import (
    AnswerEvent,
    Finished,
    FinishReason,
    Reasoning,
    Text,
    ToolArguments,
    ToolCallBegun,
    Usage,
)
from kvws.chat.call import ModelCall
from kvws.chat.message import Message
from kvws.errors import EngineDied
from kvws.http.anthropic import ANTHROPIC
from kvws.http.dialect import AnswerWriter, SseEvent
from tests.http.anthropic.stream_checker import Received, received

PROMPT = Usage(prompt_tokens=100, reused_tokens=60)
FINAL = Usage(prompt_tokens=100, reused_tokens=60, stored_tokens=30, answer_tokens=7)
STOP = Finished("stop", FINAL)


def writer() -> AnswerWriter:
    return ANTHROPIC.writer(ModelCall(model="kvws[1m]", messages=(Message("user", "hi"),)))


def streamed(*events: AnswerEvent) -> list[SseEvent]:
    answer = writer()
    frames = list(answer.begin(PROMPT))
    for event in events:
        frames += answer.event(event)
    return frames


def whole(*events: AnswerEvent) -> dict[str, Any]:
    return json.loads(json.dumps(writer().whole(events)))


def kinds(frames: list[SseEvent]) -> list[str | None]:
    return [frame.event for frame in frames]


def test_the_first_frame_comes_before_the_model_says_anything() -> None:
    (frame,) = streamed()
    assert frame.event == "message_start"
    message = received([frame]).message
    assert message["id"].startswith("msg_")
    assert (message["type"], message["model"]) == ("message", "kvws[1m]")
    assert message["usage"] == {
        "input_tokens": 40,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 60,
        "output_tokens": 0,
    }


def test_no_two_messages_share_an_id() -> None:
    ids = {received(streamed()).message["id"] for _ in range(100)}
    assert len(ids | {whole(Text("a"), STOP)["id"]}) == 101


def test_a_turn_with_thoughts_text_and_two_calls_is_written_block_by_block() -> None:
    frames = streamed(
        Reasoning("I "),
        Reasoning("think"),
        Text("Look"),
        Text("ing."),
        ToolCallBegun(0, "toolu_a", "Bash"),
        ToolArguments(0, '{"command":'),
        ToolArguments(0, '"ls"}'),
        ToolCallBegun(1, "toolu_b", "Read"),
        Finished("tool_calls", FINAL),
    )
    assert kinds(frames) == [
        "message_start",
        *["content_block_start", *["content_block_delta"] * 3, "content_block_stop"],
        *["content_block_start", *["content_block_delta"] * 2, "content_block_stop"],
        *["content_block_start", *["content_block_delta"] * 2, "content_block_stop"],
        *["content_block_start", "content_block_stop"],
        "message_delta",
        "message_stop",
    ]
    result = received(frames)
    assert result.complete
    assert result.blocks == [
        {"type": "thinking", "thinking": "I think", "signature": "kvws"},
        {"type": "text", "text": "Looking."},
        {
            "type": "tool_use",
            "id": "toolu_a",
            "name": "Bash",
            "input": {},
            "json": '{"command":"ls"}',
        },
        {"type": "tool_use", "id": "toolu_b", "name": "Read", "input": {}, "json": ""},
    ]


def test_the_last_usage_splits_the_whole_prompt() -> None:
    usage = received(streamed(Text("hi"), STOP)).message["usage"]
    assert usage == {
        "input_tokens": 10,
        "cache_creation_input_tokens": 30,
        "cache_read_input_tokens": 60,
        "output_tokens": 7,
    }
    assert whole(Text("hi"), STOP)["usage"] == usage


@pytest.mark.parametrize(
    ("finished", "reason", "sequence"),
    [
        (Finished("stop", FINAL), "end_turn", None),
        (Finished("length", FINAL), "max_tokens", None),
        (Finished("tool_calls", FINAL), "tool_use", None),
        (Finished("stop_text", FINAL, stop_text="END"), "stop_sequence", "END"),
    ],
)
def test_why_the_answer_ended_is_told(finished: Finished, reason: str, sequence: object) -> None:
    for message in (received(streamed(Text("a"), finished)).message, whole(Text("a"), finished)):
        assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)


@pytest.mark.parametrize(
    "events", [[], [Text("\n"), Text(" ")], [Reasoning("hm")], [Reasoning("hm"), Text("\n")]]
)
def test_an_answer_that_shows_nothing_gets_a_text_that_does_not_come_back(
    events: list[AnswerEvent],
) -> None:
    result = received(streamed(*events, STOP))
    assert result.blocks[-1] == {"type": "text", "text": "(no content)"}
    assert [b["type"] for b in result.blocks].count("text") == 1
    hi = {"role": "user", "content": "hi"}
    turn = {"role": "assistant", "content": result.blocks}
    assert ANTHROPIC.read({"messages": [hi, turn]}).messages[1].content == ""


def test_blanks_before_a_call_are_not_written_and_those_before_a_text_are() -> None:
    call = ToolCallBegun(0, "t", "Bash")
    result = received(streamed(Reasoning("r"), Text("\n\n"), call, Finished("tool_calls", FINAL)))
    assert [block["type"] for block in result.blocks] == ["thinking", "tool_use"]
    result = received(streamed(Reasoning("r"), Text("\n\n"), Text("a"), Text(" \n"), STOP))
    assert result.blocks[-1]["text"] == "\n\na \n"
    result = received(streamed(Text("\n\n"), Reasoning("r"), Text("a"), STOP))
    assert result.blocks[-1]["text"] == "a"


def test_a_ping_is_a_ping() -> None:
    assert list(writer().ping()) == [SseEvent({"type": "ping"}, event="ping")]


def test_keep_alive_before_the_first_block_opens_an_empty_thought() -> None:
    answer = writer()
    frames = [*answer.begin(PROMPT), *answer.stay_alive(), *answer.stay_alive()]
    assert kinds(frames)[1:] == ["content_block_start", *["content_block_delta"] * 2]
    assert frames[-1].data == {
        "type": "content_block_delta",
        "index": 0,
        "delta": {"type": "thinking_delta", "thinking": ""},
    }
    frames += [*answer.event(Reasoning("hm")), *answer.event(Text("hi")), *answer.event(STOP)]
    assert [block["type"] for block in received(frames).blocks] == ["thinking", "text"]


@pytest.mark.parametrize(
    ("event", "delta"),
    [
        (Reasoning("r"), {"type": "thinking_delta", "thinking": ""}),
        (Text("a"), {"type": "text_delta", "text": ""}),
        (ToolCallBegun(0, "t", "Bash"), {"type": "input_json_delta", "partial_json": ""}),
    ],
)
def test_keep_alive_within_a_block_is_an_empty_delta_of_its_kind(
    event: AnswerEvent, delta: dict[str, str]
) -> None:
    answer = writer()
    opened = [*answer.begin(PROMPT), *answer.event(event)]
    (frame,) = answer.stay_alive()
    assert frame.data == {"type": "content_block_delta", "index": 0, "delta": delta}
    received([*opened, frame, *answer.event(STOP)])


def test_a_failed_answer_ends_in_an_error_and_closes_no_half_call() -> None:
    answer = writer()
    frames = [
        *answer.begin(PROMPT),
        *answer.event(ToolCallBegun(0, "t", "Bash")),
        *answer.event(ToolArguments(0, '{"command":"rm')),
        *answer.error(EngineDied("the engine is gone", hint="restart it")),
    ]
    assert "content_block_stop" not in kinds(frames)
    assert received(frames).error == {
        "type": "overloaded_error",
        "message": "the engine is gone (restart it)",
    }


def test_a_whole_answer_holds_its_blocks_with_parsed_arguments() -> None:
    message = whole(
        Reasoning("r"),
        Text("a"),
        ToolCallBegun(0, "t0", "Bash"),
        ToolArguments(0, '{"b": 1, '),
        ToolArguments(0, '"a": "é"}'),
        ToolCallBegun(1, "t1", "Go"),
        Finished("tool_calls", FINAL),
    )
    assert (message["type"], message["role"], message["model"]) == (
        "message",
        "assistant",
        "kvws[1m]",
    )
    assert message["content"] == [
        {"type": "thinking", "thinking": "r", "signature": "kvws"},
        {"type": "text", "text": "a"},
        {"type": "tool_use", "id": "t0", "name": "Bash", "input": {"b": 1, "a": "é"}},
        {"type": "tool_use", "id": "t1", "name": "Go", "input": {}},
    ]
    assert list(message["content"][2]["input"]) == ["b", "a"]


@pytest.mark.parametrize("broken", ['{"command": "ls', "[1]", '{"a": NaN}', "[" * 100_000])
def test_arguments_that_are_no_object_survive_a_whole_answer_and_its_return(broken: str) -> None:
    events = [ToolCallBegun(0, "t", "Bash"), ToolArguments(0, broken)]
    message = whole(*events, Finished("tool_calls", FINAL))
    unparsed = {"raw": broken, "len": len(broken)}
    assert message["content"][0]["input"] == {"__unparsedToolInput": unparsed}
    turn = {"role": "assistant", "content": message["content"]}
    (replayed,) = ANTHROPIC.read({"messages": [turn]}).messages
    assert replayed.tool_calls[0].arguments == broken


REASONS: list[FinishReason] = ["stop", "length", "tool_calls", "stop_text"]
WORDS = st.sampled_from(["a", " ", "\n\n", "é", "two words", "(no content)"])
JSON_PIECES = st.sampled_from(["{}", '{"a":', '"x"}', "[1]", '{"a":1}', " "])
SPOKEN = st.builds(Text, WORDS) | st.builds(Reasoning, WORDS)


@st.composite
def answers(draw: st.DrawFn) -> list[AnswerEvent]:
    events: list[AnswerEvent] = []
    calls = 0
    for part in draw(st.lists(SPOKEN | st.lists(JSON_PIECES, max_size=3), max_size=12)):
        if isinstance(part, list):
            events.append(ToolCallBegun(calls, f"toolu_{calls}", "Bash"))
            events += [ToolArguments(calls, piece) for piece in part]
            calls += 1
        else:
            events.append(part)
    return [*events, Finished(draw(st.sampled_from(REASONS)), FINAL, stop_text="END")]


def as_body(stream: Received) -> dict[str, Any]:
    """The message as a client holds it: tool arguments parsed."""
    content: list[dict[str, Any]] = []
    for block in stream.blocks:
        kept = {key: value for key, value in block.items() if key != "json"}
        if block["type"] == "tool_use":
            kept["input"] = parsed(block["json"])
        content.append(kept)
    return {**stream.message, "content": content}


def parsed(arguments: str) -> dict[str, Any]:
    try:
        value = json.loads(arguments or "{}")
    except ValueError:
        value = None
    if isinstance(value, dict):
        return value
    return {"__unparsedToolInput": {"raw": arguments, "len": len(arguments)}}


@settings(max_examples=400, deadline=None, derandomize=True)
@given(answers(), st.data())
def test_a_stream_is_well_formed_and_says_what_the_whole_says(
    events: list[AnswerEvent], data: st.DataObject
) -> None:
    answer = writer()
    frames = list(answer.begin(PROMPT))
    for event in events:
        for beat in data.draw(st.lists(st.sampled_from(["ping", "stay_alive"]), max_size=2)):
            frames += answer.ping() if beat == "ping" else answer.stay_alive()
        frames += answer.event(event)
    stream = received(frames)
    assert stream.complete
    body = as_body(stream)
    expected = whole(*events)
    assert {**body, "id": ""} == {**expected, "id": ""}
    assert any(block["type"] != "thinking" for block in body["content"])


@settings(max_examples=200, deadline=None, derandomize=True)
@given(answers(), st.data())
def test_a_stream_is_well_formed_wherever_it_fails(
    events: list[AnswerEvent], data: st.DataObject
) -> None:
    answer = writer()
    frames = list(answer.begin(PROMPT))
    for event in events[: data.draw(st.integers(0, len(events) - 1))]:
        if data.draw(st.booleans()):
            frames += answer.stay_alive()
        frames += answer.event(event)
    stream = received([*frames, *answer.error(EngineDied("gone"))])
    assert stream.error is not None
    assert not stream.complete
