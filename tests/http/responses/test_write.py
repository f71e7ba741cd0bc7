"""How answers are written in the Responses dialect."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
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
from kvws.errors import EngineDied, KvwsError, Overloaded, PromptError, PromptTooLong
from kvws.http.dialect import SseEvent
from kvws.http.responses import RESPONSES
from kvws.http.responses.tools import ResponsesCall
from kvws.http.responses.write import ResponsesWriter
from tests.http.responses.stream_checker import Checked, check

USAGE = Usage(
    prompt_tokens=100, reused_tokens=64, stored_tokens=32, answer_tokens=20, reasoning_tokens=8
)
BODY = {
    "model": "kvws",
    "stream": True,
    "input": "Fix the bug",
    "tools": [
        {"type": "function", "name": "run", "parameters": {"type": "object"}},
        {"type": "custom", "name": "apply_patch", "description": "Edit files"},
        {
            "type": "namespace",
            "name": "agents",
            "tools": [{"type": "function", "name": "spawn", "parameters": {"type": "object"}}],
        },
    ],
}


def read(**more: Any) -> ResponsesCall:
    call = RESPONSES.read({**BODY, **more})
    assert isinstance(call, ResponsesCall)
    return call


def writer() -> ResponsesWriter:
    call = read()
    return ResponsesWriter(call, call.origins, "0a1b", 1_700_000_000)


def frames(*events: AnswerEvent) -> list[SseEvent]:
    written = writer()
    begun = list(written.begin(USAGE))
    return begun + [frame for event in events for frame in written.event(event)]


def checked(*events: AnswerEvent) -> Checked:
    return check(frames(*events))


def finished(reason: FinishReason = "stop") -> Finished:
    return Finished(reason, USAGE)


def kinds(events: Sequence[SseEvent]) -> list[str | None]:
    return [event.event for event in events]


def test_a_stream_begins_before_the_model_says_anything() -> None:
    assert kinds(list(writer().begin(USAGE))) == ["response.created", "response.in_progress"]


def test_a_text_is_an_item_with_one_part() -> None:
    assert kinds(frames(Text("Hel"), Text("lo"), finished()))[2:] == [
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]


def test_reasoning_is_a_summary_which_codex_shows_and_sends_back() -> None:
    said = checked(Reasoning("Look "), Reasoning("first"), Text("Done"), finished())
    reasoning, message = said.done
    assert reasoning["summary"] == [{"type": "summary_text", "text": "Look first"}]
    assert message["content"][0]["text"] == "Done"


def test_a_function_call_names_the_call_that_the_client_answers() -> None:
    said = checked(
        ToolCallBegun(0, "call_7", "run"),
        ToolArguments(0, '{"cmd":'),
        ToolArguments(0, '"ls"}'),
        finished("tool_calls"),
    )
    (call,) = said.done
    assert (call["call_id"], call["name"]) == ("call_7", "run")
    assert call["arguments"] == '{"cmd":"ls"}' and "namespace" not in call


def test_a_call_whose_arguments_never_came_has_empty_ones() -> None:
    (call,) = checked(ToolCallBegun(0, "call_7", "run"), finished("tool_calls")).done
    assert call["arguments"] == "{}"


def test_a_tool_in_a_namespace_is_called_as_the_client_named_it() -> None:
    (call,) = checked(ToolCallBegun(0, "call_7", "agents__spawn"), finished("tool_calls")).done
    assert (call["namespace"], call["name"]) == ("agents", "spawn")


def test_a_custom_tool_gets_its_input_as_plain_text() -> None:
    patch = '*** Begin Patch\n+print("hé")\n*** End Patch'
    text = json.dumps({"input": patch})
    said = checked(
        ToolCallBegun(0, "call_7", "apply_patch"),
        ToolArguments(0, text[:9]),
        ToolArguments(0, text[9:]),
        finished("tool_calls"),
    )
    (call,) = said.done
    assert call["type"] == "custom_tool_call" and call["input"] == patch


@pytest.mark.parametrize("written", ["*** Begin", '"text"', '{"patch": "x"}', '{"input": 1}'])
def test_a_custom_call_in_another_shape_passes_on_what_the_model_wrote(written: str) -> None:
    begun = ToolCallBegun(0, "call_7", "apply_patch")
    (call,) = checked(begun, ToolArguments(0, written), finished("tool_calls")).done
    assert call["input"] == written


def test_usage_counts_the_whole_prompt_and_what_was_reused_of_it() -> None:
    assert checked(Text("Hi"), finished()).response["usage"] == {
        "input_tokens": 100,
        "input_tokens_details": {"cached_tokens": 64},
        "output_tokens": 20,
        "output_tokens_details": {"reasoning_tokens": 8},
        "total_tokens": 120,
    }


def test_a_text_that_became_too_long_is_closed_and_incomplete() -> None:
    said = checked(Text("On and"), finished("length"))
    assert said.response["status"] == "incomplete"
    assert said.response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in said.done] == ["incomplete"]
    assert said.response["output"] == said.done


@pytest.mark.parametrize("name", ["run", "apply_patch"])
def test_a_call_that_was_cut_off_is_never_done_so_that_no_client_runs_half_of_it(
    name: str,
) -> None:
    whole = ToolCallBegun(0, "call_1", "run")
    cut = ToolCallBegun(1, "call_2", name)
    said = checked(whole, cut, ToolArguments(1, '{"input": "rm -rf /tm'), finished("length"))
    assert [item["call_id"] for item in said.done] == ["call_1"]
    assert said.unfinished is not None and said.unfinished.added["call_id"] == "call_2"
    assert [item["status"] for item in said.response["output"]] == ["completed", "incomplete"]


def test_a_call_that_was_whole_when_the_answer_became_too_long_is_done() -> None:
    begun = ToolCallBegun(0, "call_1", "run")
    said = checked(begun, ToolArguments(0, '{"cmd": "ls"}'), finished("length"))
    assert said.done[0]["status"] == "completed" and said.unfinished is None


def test_a_failure_leaves_the_open_item_undone() -> None:
    written = writer()
    events = [*written.begin(USAGE), *written.event(Text("Half"))]
    said = check([*events, *written.error(EngineDied("the engine is gone"))])
    assert said.done == [] and said.response["output"] == []
    assert said.response["error"] == {"code": "server_error", "message": "the engine is gone"}


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PromptTooLong(12, 10), "context_length_exceeded"),
        (PromptError("the template refuses it"), "invalid_prompt"),
        (Overloaded("no room"), "rate_limit_exceeded"),
        (KvwsError("broken"), "server_error"),
    ],
)
def test_the_code_of_a_failure_tells_codex_what_to_do(error: KvwsError, code: str) -> None:
    said = check(writer().error(error))
    assert said.response["error"]["code"] == code


def test_a_failure_that_passes_says_when_to_try_again() -> None:
    said = check(writer().error(Overloaded("no room", retry_after_s=3)))
    assert "try again in 3 s" in said.response["error"]["message"]


def test_an_answer_without_words_is_complete() -> None:
    assert checked(finished()).response["output"] == []


def test_a_writer_gives_every_answer_ids_of_its_own() -> None:
    call = read()
    first, second = (next(iter(RESPONSES.writer(call).begin(USAGE))).data for _ in range(2))
    assert isinstance(first, dict) and isinstance(second, dict)
    assert first["response"]["id"] != second["response"]["id"]


words = st.text(min_size=1, max_size=8)
spoken = st.one_of(words.map(Reasoning), words.map(Text))
json_arguments = st.dictionaries(words, words, max_size=2).map(json.dumps)
custom_input = words.map(lambda text: json.dumps({"input": text}))


@st.composite
def called(draw: st.DrawFn) -> tuple[str, list[str]]:
    name = draw(st.sampled_from(["run", "apply_patch", "agents__spawn", "unheard_of"]))
    text = draw(st.one_of(json_arguments, custom_input, words, st.just("")))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=2)))
    edges = [0, *cuts, len(text)]
    return name, [text[a:b] for a, b in itertools.pairwise(edges) if a < b]


@st.composite
def answers(draw: st.DrawFn) -> list[AnswerEvent]:
    events: list[AnswerEvent] = []
    calls = 0
    for step in draw(st.lists(st.one_of(spoken, called()), max_size=8)):
        if isinstance(step, tuple):
            events.append(ToolCallBegun(calls, f"call_{calls}", step[0]))
            events += [ToolArguments(calls, chunk) for chunk in step[1]]
            calls += 1
        else:
            events.append(step)
    reason: FinishReason = draw(st.sampled_from(["stop", "length", "tool_calls", "stop_text"]))
    return [*events, Finished(reason, USAGE)]


@settings(max_examples=200, deadline=None)
@given(answers(), st.lists(st.integers(0, 30)))
def test_any_answer_is_a_well_formed_stream_that_says_what_the_whole_body_says(
    events: list[AnswerEvent], pings_before: list[int]
) -> None:
    written = writer()
    sent = list(written.begin(USAGE))
    for position, event in enumerate(events):
        if position in pings_before:
            sent += [*written.ping(), *written.stay_alive()]
        sent += written.event(event)
    said = check(sent)
    assert said.response == writer().whole(events)
    output = said.response["output"]
    assert output[: len(said.done)] == said.done
    assert len(output) - len(said.done) == (said.unfinished is not None)
    assert (said.unfinished is None) or said.response["status"] == "incomplete"


@settings(max_examples=200, deadline=None)
@given(answers(), st.integers(0, 12))
def test_an_answer_may_fail_after_any_event(events: list[AnswerEvent], count: int) -> None:
    written = writer()
    sent = list(written.begin(USAGE))
    for event in events[:-1][:count]:
        sent += written.event(event)
    said = check([*sent, *written.error(KvwsError("broken"))])
    assert said.response["status"] == "failed" and said.response["output"] == said.done


@settings(max_examples=200, deadline=None)
@given(answers())
def test_what_was_answered_is_read_again_as_one_turn(events: list[AnswerEvent]) -> None:
    """Unless it was cut off; such answers are not sent back."""
    body = writer().whole(events)
    if body["status"] == "incomplete" or not body["output"]:
        return
    question = {"role": "user", "content": "Fix the bug"}
    messages = read(input=[question, *body["output"]]).messages
    assert len(messages) == 2
    turn = messages[1]
    assert turn.reasoning == "".join(e.text for e in events if isinstance(e, Reasoning))
    assert turn.content == "".join(e.text for e in events if isinstance(e, Text))
    begun = [e for e in events if isinstance(e, ToolCallBegun)]
    assert [(c.id, c.name) for c in turn.tool_calls] == [(e.id, e.name) for e in begun]
    for call in turn.tool_calls:
        if call.name != "apply_patch":
            index = int(call.id.removeprefix("call_"))
            assert call.arguments == (_arguments(events, index) or "{}")


def _arguments(events: list[AnswerEvent], index: int) -> str:
    mine = (e for e in events if isinstance(e, ToolArguments) and e.index == index)
    return "".join(e.json_text for e in mine)


def test_a_custom_call_is_read_again_with_the_arguments_that_were_generated() -> None:
    arguments = json.dumps({"input": "*** Begin Patch\n+é\n"}, ensure_ascii=False)
    events = [
        ToolCallBegun(0, "call_7", "apply_patch"),
        ToolArguments(0, arguments),
        Finished("tool_calls", USAGE),
    ]
    (turn,) = read(input=writer().whole(events)["output"]).messages
    assert [call.arguments for call in turn.tool_calls] == [arguments]


@pytest.fixture(scope="module")
def types() -> Any:
    return pytest.importorskip("openai.types.responses")


@pytest.fixture(scope="module")
def stream_event(types: Any) -> Any:
    return pytest.importorskip("pydantic").TypeAdapter(types.ResponseStreamEvent)


class TestWithTheOpenAiPackage:
    """Its types are the protocol as its own clients see it."""

    def full_answer(self, reason: FinishReason) -> list[AnswerEvent]:
        return [
            Reasoning("Hm"),
            Text("I look"),
            ToolCallBegun(0, "call_0", "run"),
            ToolArguments(0, "{}"),
            ToolCallBegun(1, "call_1", "agents__spawn"),
            ToolCallBegun(2, "call_2", "apply_patch"),
            ToolArguments(2, '{"input": "x"}'),
            Text("and"),
            Finished(reason, USAGE),
        ]

    @pytest.mark.parametrize("reason", ["stop", "length"])
    def test_every_event_is_of_its_types(self, stream_event: Any, reason: FinishReason) -> None:
        written = writer()
        sent = [*written.begin(USAGE), *written.ping(), *written.stay_alive()]
        sent += [f for event in self.full_answer(reason) for f in written.event(event)]
        for frame in sent:
            parsed = stream_event.validate_python(frame.data)
            assert parsed.type == frame.event
            assert parsed.to_dict() == frame.data

    def test_a_failure_is_of_its_types(self, stream_event: Any) -> None:
        for frame in writer().error(KvwsError("broken")):
            assert stream_event.validate_python(frame.data).type == frame.event

    @pytest.mark.parametrize("reason", ["stop", "length"])
    def test_a_whole_answer_is_its_response(self, types: Any, reason: FinishReason) -> None:
        body = RESPONSES.writer(read()).whole(self.full_answer(reason))
        parsed = types.Response.model_validate(body)
        assert parsed.output_text == "I lookand"
        assert [item.type for item in parsed.output] == [
            "reasoning",
            "message",
            "function_call",
            "function_call",
            "custom_tool_call",
            "message",
        ]

    @pytest.mark.parametrize(
        "choice",
        [
            "auto",
            "none",
            "required",
            {"type": "function", "name": "run"},
            {"type": "custom", "name": "apply_patch"},
        ],
    )
    def test_what_the_request_set_is_shown_in_its_types(self, types: Any, choice: Any) -> None:
        call = read(tool_choice=choice, temperature=0.5, top_p=0.9, max_output_tokens=9)
        body = RESPONSES.writer(call).whole([Finished("stop", USAGE)])
        parsed = types.Response.model_validate(body)
        shown = parsed.tool_choice
        assert (shown if isinstance(shown, str) else shown.to_dict()) == choice
        assert (parsed.temperature, parsed.top_p, parsed.max_output_tokens) == (0.5, 0.9, 9)
