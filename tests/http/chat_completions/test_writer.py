"""Answers as chat-completion chunks and bodies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from kvws.chat.answer import (
    AnswerEvent,
    Finished,
    Reasoning,
    Text,
    ToolArguments,
    ToolCallBegun,
    Usage,
)
from kvws.chat.call import ModelCall
from kvws.chat.message import Message
from kvws.errors import (
    BadRequest,
    EngineDied,
    KvwsError,
    NotAuthorised,
    Overloaded,
    PromptTooLong,
    TooManyRequests,
)
from kvws.http.chat_completions import CHAT_COMPLETIONS
from kvws.http.dialect import AnswerWriter, SseEvent

USAGE = Usage(
    prompt_tokens=100, reused_tokens=64, stored_tokens=32, answer_tokens=9, reasoning_tokens=4
)
WRITTEN_USAGE = {
    "prompt_tokens": 100,
    "completion_tokens": 9,
    "total_tokens": 109,
    "prompt_tokens_details": {"cached_tokens": 64},
    "completion_tokens_details": {"reasoning_tokens": 4},
}
ANSWER: tuple[AnswerEvent, ...] = (
    Reasoning("Hm"),
    Reasoning("."),
    Text("I "),
    Text("look."),
    ToolCallBegun(0, "call_a", "ls"),
    ToolArguments(0, '{"path"'),
    ToolArguments(0, ':"."}'),
    ToolCallBegun(1, "call_b", "pwd"),
    Finished("tool_calls", USAGE),
)


def writer(*, stream: bool = True, include_usage: bool = True) -> AnswerWriter:
    call = ModelCall(
        "any-name", (Message("user", "hi"),), stream=stream, include_usage=include_usage
    )
    return CHAT_COMPLETIONS.writer(call)


def stream(events: Iterable[AnswerEvent], *, include_usage: bool = True) -> list[Any]:
    write = writer(include_usage=include_usage)
    frames = list(write.begin(USAGE))
    for each in events:
        frames += write.event(each)
    return data_of(frames)


def data_of(frames: Iterable[SseEvent]) -> list[Any]:
    sent = list(frames)
    assert all(frame.event is None for frame in sent)
    return [frame.data for frame in sent]


def deltas(chunks: Iterable[Any]) -> list[Any]:
    return [c["choices"][0]["delta"] for c in chunks if isinstance(c, dict) and c["choices"]]


def assemble(chunks: list[Any]) -> dict[str, Any]:
    """What an accumulating client ends up with. Checks the stream's grammar on the way."""
    *chunks, done = chunks
    assert done == "[DONE]"
    whole: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "usage": None}
    finish = None
    for position, chunk in enumerate(chunks):
        assert isinstance(chunk, dict)
        ChatCompletionChunk.model_validate(chunk, strict=True)
        assert {chunk["id"], chunks[0]["id"]} == {chunk["id"]}
        if not chunk["choices"]:
            assert finish is not None and position == len(chunks) - 1
            whole["usage"] = chunk["usage"]
            continue
        assert finish is None, "nothing but usage follows the finish reason"
        (choice,) = chunk["choices"]
        delta, finish = choice["delta"], choice["finish_reason"]
        assert ("role" in delta) == (position == 0)
        whole["content"] += delta.get("content", "")
        whole["reasoning"] += delta.get("reasoning_content", "")
        for part in delta.get("tool_calls", ()):
            if "id" in part:
                assert part["index"] == len(whole["calls"])
                whole["calls"].append([part["id"], part["function"]["name"], ""])
            assert part["index"] == len(whole["calls"]) - 1, "calls do not interleave"
            whole["calls"][-1][2] += part["function"]["arguments"]
    assert finish is not None
    return {**whole, "finish": finish}


def assembled_body(body: Any) -> dict[str, Any]:
    ChatCompletion.model_validate(body, strict=True)
    (choice,) = body["choices"]
    message = choice["message"]
    return {
        "content": message["content"] or "",
        "reasoning": message.get("reasoning_content", ""),
        "calls": [
            [call["id"], call["function"]["name"], call["function"]["arguments"]]
            for call in message.get("tool_calls", ())
        ],
        "usage": body["usage"],
        "finish": choice["finish_reason"],
    }


def test_a_stream_frame_by_frame() -> None:
    *chunks, usage, done = stream(ANSWER)
    assert deltas(chunks) == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "Hm"},
        {"reasoning_content": "."},
        {"content": "I "},
        {"content": "look."},
        {"tool_calls": [call_begun(0, "call_a", "ls")]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"path"'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ':"."}'}}]},
        {"tool_calls": [call_begun(1, "call_b", "pwd")]},
        {"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]},
        {},
    ]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * 10 + ["tool_calls"]
    assert (usage["choices"], usage["usage"], done) == ([], WRITTEN_USAGE, "[DONE]")
    assert {chunk["model"] for chunk in chunks} == {"any-name"}


def call_begun(index: int, call_id: str, name: str) -> dict[str, Any]:
    function = {"name": name, "arguments": ""}
    return {"index": index, "id": call_id, "type": "function", "function": function}


def test_usage_is_not_sent_to_clients_that_did_not_ask() -> None:
    chunks = stream(ANSWER, include_usage=False)
    assert chunks[-1] == "[DONE]"
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks[:-1])


@pytest.mark.parametrize(
    ("reason", "written"),
    [("stop", "stop"), ("length", "length"), ("tool_calls", "tool_calls"), ("stop_text", "stop")],
)
def test_finish_reasons(reason: Any, written: str) -> None:
    events = [Text("a"), Finished(reason, USAGE, stop_text="x")]
    assert assemble(stream(events))["finish"] == written
    assert writer().whole(events)["choices"][0]["finish_reason"] == written


def test_a_whole_answer() -> None:
    body = writer(stream=False).whole(ANSWER)
    ChatCompletion.model_validate(body, strict=True)
    assert body["object"] == "chat.completion"
    assert body["usage"] == WRITTEN_USAGE
    message = body["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("I look.", "Hm.")
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "ls", "arguments": '{"path":"."}'},
        {"name": "pwd", "arguments": "{}"},
    ]


def test_content_is_null_only_beside_tool_calls() -> None:
    calls = [ToolCallBegun(0, "c", "ls"), Finished("tool_calls", USAGE)]
    assert writer().whole(calls)["choices"][0]["message"]["content"] is None
    assert writer().whole([Finished("stop", USAGE)])["choices"][0]["message"]["content"] == ""


def test_two_answers_never_share_an_id() -> None:
    events = [Finished("stop", USAGE)]
    assert writer().whole(events)["id"] != writer().whole(events)["id"]


def test_an_answer_can_fail_after_it_began() -> None:
    write = writer()
    list(write.begin(USAGE))
    list(write.event(Text("a")))
    failed, done = data_of(write.error(EngineDied("the engine is gone", hint="restart it")))
    assert failed["error"]["message"] == "the engine is gone (restart it)"
    assert failed["error"]["type"] == "server_error"
    assert done == "[DONE]"


TEXTS = st.text(min_size=1, max_size=8)
PIECES = st.one_of(
    st.builds(Reasoning, TEXTS),
    st.builds(Text, TEXTS),
    st.tuples(st.text(min_size=1, max_size=5), TEXTS, st.lists(TEXTS, max_size=3)),
)


@st.composite
def answers(draw: st.DrawFn) -> list[AnswerEvent]:
    events: list[AnswerEvent] = []
    calls = 0
    for piece in draw(st.lists(PIECES, max_size=8)):
        if isinstance(piece, tuple):
            call_id, name, arguments = piece
            events.append(ToolCallBegun(calls, call_id, name))
            events += [ToolArguments(calls, text) for text in arguments]
            calls += 1
        else:
            events.append(piece)
    reason = draw(st.sampled_from(["stop", "length", "tool_calls", "stop_text"]))
    return [*events, Finished(reason, USAGE)]


@settings(max_examples=300, deadline=None)
@given(answers(), st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=6))
def test_any_stream_is_well_formed_and_says_what_the_body_says(
    events: list[AnswerEvent], silences: list[tuple[int, bool]]
) -> None:
    write = writer()
    frames = list(write.begin(USAGE))
    for position, each in enumerate(events):
        for at, rare in silences:
            if at % len(events) == position:
                frames += write.stay_alive() if rare else write.ping()
        frames += write.event(each)
    assert assemble(data_of(frames)) == assembled_body(writer().whole(events))


@settings(max_examples=100, deadline=None)
@given(answers(), st.integers(0, 20))
def test_a_stream_that_fails_anywhere_ends_with_its_error(
    events: list[AnswerEvent], cut: int
) -> None:
    write = writer()
    frames = list(write.begin(USAGE))
    for each in events[: min(cut, len(events) - 1)]:
        frames += write.event(each)
    *chunks, failed, done = data_of([*frames, *write.error(EngineDied("gone"))])
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
        assert chunk["choices"][0]["finish_reason"] is None
    assert (failed["error"]["message"], done) == ("gone", "[DONE]")


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (BadRequest("x"), 400, "invalid_request_error", None),
        (NotAuthorised("x"), 401, "authentication_error", "invalid_api_key"),
        (TooManyRequests("x"), 429, "rate_limit_error", "rate_limit_exceeded"),
        (Overloaded("x"), 503, "server_error", None),
        (EngineDied("x"), 503, "server_error", None),
        (PromptTooLong(9, 8), 400, "invalid_request_error", "context_length_exceeded"),
    ],
)
def test_error_replies(error: KvwsError, status: int, kind: str, code: str | None) -> None:
    reply = CHAT_COMPLETIONS.error(error)
    assert reply.status == status
    assert set(reply.body) == {"error"}
    told = reply.body["error"]
    assert (told["type"], told["code"], told["param"]) == (kind, code, None)


def test_hints_reach_the_client() -> None:
    told = CHAT_COMPLETIONS.error(BadRequest("n: two", hint="send n = 1")).body["error"]
    assert told["message"] == "n: two (send n = 1)"


def test_every_client_can_tell_an_overflow() -> None:
    message = CHAT_COMPLETIONS.error(PromptTooLong(1_234_567, 1_000_000)).body["error"]["message"]
    assert "prompt is too long: 1234567 tokens > 1000000 maximum" in message
    assert "this model's maximum context length is 1000000 tokens" in message.lower()
