"""Recordings of kvws itself, as they are on disk."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from kvws.chat.message import Message, ToolCall
from kvws.errors import TraceError
from kvws.replay.loaders import kvws_record, parse_trace
from kvws.replay.trace import Trace, TraceStep

HEADER = {"kvws_record": 1, "session": "s", "source": "prompt"}
TOOLS = {"tools": {"digest": "d1", "schemas": [{"type": "function", "function": {"name": "ls"}}]}}
GO = {"role": "user", "content": "Go."}
CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "c1", "name": "ls", "arguments": '{"b":1,"a":2}'}],
    "reasoning": "Hm.",
}
LISTED = {"role": "tool", "content": "a", "name": "ls", "tool_call_id": "c1"}
SAID = {"role": "assistant", "content": "a."}
MORE = {"role": "user", "content": "More."}


def call(keep: int, add: list[Any], answer: Any = SAID, **fields: Any) -> dict[str, Any]:
    described = {"thread": "main", "aside": False, "tools": "d1", **fields}
    return {"call": {**described, "keep": keep, "add": add, "answer": answer}}


def as_lines(*rows: Any) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def parse(*rows: Any) -> Trace:
    return parse_trace(as_lines(HEADER, *rows))


def contents(trace: Trace, thread: str = "main") -> list[str]:
    return [message.content for message in trace.threads[thread]]


def test_a_conversation() -> None:
    trace = parse(TOOLS, call(0, [GO], CALLED), call(1, [CALLED, LISTED]))
    assert trace.format == "kvws-record"
    assert trace.threads["main"] == (
        Message("user", "Go."),
        Message("assistant", "", (ToolCall("c1", "ls", '{"b":1,"a":2}'),), reasoning="Hm."),
        Message("tool", "a", name="ls", tool_call_id="c1"),
        Message("assistant", "a."),
    )
    assert trace.steps == (TraceStep("main", 1), TraceStep("main", 3))
    assert trace.tools == tuple(TOOLS["tools"]["schemas"])
    assert trace.notes == ()


def test_the_clients_words_for_an_answer_count_because_its_next_prompts_have_them() -> None:
    normalised = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c1", "name": "ls", "arguments": '{"a":2,"b":1}'}],
    }
    trace = parse(call(0, [GO], CALLED), call(1, [normalised, LISTED]), call(3, [SAID, MORE]))
    assert set(trace.threads) == {"main"}
    assert trace.threads["main"][1].tool_calls[0].arguments == '{"a":2,"b":1}'
    assert trace.notes == ("answers taken as the client sent them back: 1",)


def test_a_rewritten_history_begins_a_new_thread() -> None:
    summary = {"role": "user", "content": "Summary."}
    trace = parse(
        call(0, [GO], CALLED),
        call(1, [CALLED, LISTED]),
        call(0, [summary]),
        call(1, [SAID, MORE]),
        call(0, [GO, SAID, MORE]),
    )
    assert [step.thread for step in trace.steps] == ["main", "main", "main#2", "main#2", "main#3"]
    assert contents(trace, "main#2") == ["Summary.", "a.", "More.", "a."]


def test_a_turn_that_another_one_replaced_is_no_other_wording_of_it() -> None:
    trace = parse(call(0, [GO], CALLED), call(1, [SAID, MORE]))
    assert set(trace.threads) == {"main", "main#2"}
    assert contents(trace, "main#2") == ["Go.", "a.", "More.", "a."]


def test_a_call_that_is_asked_again_begins_a_new_thread() -> None:
    trace = parse(call(0, [GO]), call(1, []), call(1, [SAID, MORE]))
    assert [step.thread for step in trace.steps] == ["main", "main#2", "main#2"]


def test_an_aside_keeps_messages_of_its_thread_and_adds_none_to_it() -> None:
    title = {"role": "user", "content": "Title?"}
    trace = parse(
        call(0, [GO]),
        call(1, [title], aside=True),
        call(1, [SAID, MORE]),
        call(0, [title], aside=True),
    )
    assert [step.thread for step in trace.steps] == ["main", "aside-1", "main", "aside-2"]
    assert contents(trace, "aside-1") == ["Go.", "Title?", "a."]
    assert contents(trace) == ["Go.", "a.", "More.", "a."]


def test_no_agent_can_take_the_name_of_another_thread() -> None:
    trace = parse(
        call(0, [GO], thread="aside-1"),
        call(0, [GO], aside=True),
        call(0, [GO], thread="main#2"),
        call(0, [GO]),
        call(0, [MORE]),
    )
    assert list(trace.threads) == ["aside-1", "aside-2", "main#2", "main", "main#3"]


def test_a_last_line_that_is_cut_off_is_left_out() -> None:
    data = as_lines(HEADER, call(0, [GO]), call(1, [SAID, MORE]))
    trace = parse_trace(data[:-20])
    assert len(trace.steps) == 1
    assert trace.notes == ("unfinished last lines skipped: 1",)


def test_a_lost_call_takes_along_only_those_that_build_on_it() -> None:
    trace = parse(
        call(0, [GO]),
        call(1, [SAID, {"role": "nobody"}]),
        call(3, [SAID, MORE]),
        call(0, [MORE]),
        call(1, [SAID, MORE]),
        call(0, [GO], {"role": "user", "content": "no answer"}),
        {"later": 1},
    )
    assert [(step.thread, step.context_messages) for step in trace.steps] == [
        ("main", 1),
        ("main#2", 1),
        ("main#2", 3),
    ]
    assert trace.notes == ("damaged calls skipped: 3", "unknown lines skipped: 1")


def test_tools_that_change_are_noted() -> None:
    other = {"tools": {"digest": "d2", "schemas": []}}
    trace = parse(TOOLS, call(0, [GO]), other, call(1, [SAID, MORE], tools="d2"))
    assert trace.tools == tuple(TOOLS["tools"]["schemas"])
    assert trace.notes == ("changes of the tool schemas ignored: 1",)


def test_a_newer_recording_is_refused() -> None:
    with pytest.raises(TraceError, match="format version 2"):
        parse_trace(as_lines({"kvws_record": 2}, call(0, [GO])))


def test_short_lines_cannot_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvws_record, "_MAX_MESSAGES", 1000)
    long = [GO] * 100
    asides = [call(100, [], aside=True)] * 20
    with pytest.raises(TraceError, match="more than 1000 messages"):
        parse(call(0, long), *asides)
    assert len(parse(call(0, long), *asides[:5]).steps) == 6


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 5), st.text(max_size=5), st.sampled_from(["d1", ""])
)
MESSAGES = st.sampled_from([GO, CALLED, LISTED, SAID, MORE])
ROWS = st.one_of(
    st.builds(
        call,
        st.one_of(st.integers(0, 3), SCALARS),
        st.one_of(st.lists(st.one_of(MESSAGES, MESSAGES, SCALARS), max_size=3), SCALARS),
        st.one_of(st.just(SAID), st.just(CALLED), MESSAGES, SCALARS),
        thread=st.one_of(st.sampled_from(["main", "main#2", "aside-1"]), SCALARS),
        aside=st.one_of(st.booleans(), SCALARS),
        tools=SCALARS,
    ),
    st.just(TOOLS),
    st.builds(lambda value: {"tools": {"digest": value, "schemas": [value]}}, SCALARS),
    st.builds(lambda value: {"call": value}, SCALARS),
    SCALARS,
)


@settings(max_examples=400, deadline=None)
@given(st.lists(ROWS, max_size=10), st.integers(0, 40))
def test_any_lines_give_a_trace_or_a_trace_error(rows: list[Any], cut_bytes: int) -> None:
    data = as_lines(HEADER, *rows)
    try:
        trace = parse_trace(data[: len(data) - cut_bytes])
    except TraceError as error:
        assert error.hint
        event("refused")
        return
    event("read")
    for step in trace.steps:
        assert trace.context(step) and trace.reply(step).role == "assistant"
    assert sum(map(len, trace.threads.values())) >= len(trace.steps)
