"""OpenHands v0 runs: events become messages, turns and steps."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvws.chat.message import Message, ToolCall
from kvws.errors import TraceError
from kvws.replay.loaders import openhands, parse_trace
from kvws.replay.trace import Trace, TraceStep

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "execute_bash", "parameters": {}}}
SYSTEM: dict[str, Any] = {
    "id": 0,
    "source": "agent",
    "action": "system",
    "args": {"content": "You have a shell.", "tools": [TOOL]},
}
ASKED: dict[str, Any] = {
    "id": 1,
    "source": "user",
    "action": "message",
    "args": {"content": "Fix it."},
}
EARLY: list[Any] = [
    {"action": "message", "content": "Fix it.", "wait_for_response": False},
    {"action": "run", "command": "ls", "thought": "Look.", "is_confirmed": "confirmed"},
    {"observation": "run", "content": "a.py", "command": "ls", "exit_code": 0},
    {"action": "run_ipython", "code": "print(1)", "thought": "", "kernel_init_code": "import x"},
    {"observation": "run_ipython", "content": "1", "code": "print(1)"},
    {"action": "finish", "thought": "All done.", "outputs": {}},
]


def parse(events: list[Any], **fields: Any) -> Trace:
    return parse_trace(json.dumps({"history": events, **fields}).encode())


def contents(trace: Trace, thread: str = "main") -> list[str]:
    return [message.content for message in trace.threads[thread]]


def called(call_id: str, *all_ids: str) -> dict[str, Any]:
    """The metadata of one call among those of its response."""
    calls = [
        {"id": each, "function": {"name": "execute_bash", "arguments": f'{{"command": "{each}"}}'}}
        for each in all_ids or (call_id,)
    ]
    answer = {"content": "Look.", "tool_calls": calls}
    response = {"id": f"r-{calls[0]['id']}", "choices": [{"message": answer}]}
    return {
        "function_name": "execute_bash",
        "tool_call_id": call_id,
        "model_response": response,
        "total_calls_in_response": len(calls),
    }


def ran(event_id: int, call_id: str, *all_ids: str) -> list[dict[str, Any]]:
    """An action and its observation."""
    metadata = called(call_id, *all_ids)
    return [
        {
            "id": event_id,
            "source": "agent",
            "action": "run",
            "args": {"command": call_id, "thought": "Look."},
            "tool_call_metadata": metadata,
        },
        {
            "id": event_id + 1,
            "source": "agent",
            "cause": event_id,
            "observation": "run",
            "content": f"out {call_id}",
            "tool_call_metadata": metadata,
        },
    ]


def test_a_recorded_response_is_the_turn_and_its_observation_the_result() -> None:
    trace = parse([SYSTEM, ASKED, *ran(2, "c1"), *ran(4, "c2")])
    assert trace.format == "openhands-v0"
    assert trace.threads["main"][:4] == (
        Message("system", "You have a shell."),
        Message("user", "Fix it."),
        Message("assistant", "Look.", (ToolCall("c1", "execute_bash", '{"command": "c1"}'),)),
        Message("tool", "out c1", name="execute_bash", tool_call_id="c1"),
    )
    assert trace.steps == (TraceStep("main", 2), TraceStep("main", 4))
    assert trace.tools == (TOOL,)
    assert trace.notes == ()


def test_several_calls_of_one_response_are_one_turn() -> None:
    first, second = ran(2, "c1", "c1", "c2"), ran(4, "c2", "c1", "c2")
    trace = parse([ASKED, *first, *second])
    roles = [message.role for message in trace.threads["main"]]
    assert roles == ["user", "assistant", "tool", "tool"]
    assert [call.id for call in trace.threads["main"][1].tool_calls] == ["c1", "c2"]
    assert trace.steps == (TraceStep("main", 1),)


def test_a_placeholder_id_that_comes_again_is_another_turn() -> None:
    again = ran(4, "c1")
    for event in again:
        event["tool_call_metadata"]["model_response"]["id"] = "other"
    trace = parse([ASKED, *ran(2, "c1"), *again])
    assert len(trace.steps) == 2


def test_results_stand_directly_behind_their_turn() -> None:
    action, result = ran(2, "c1")
    hurry = {"source": "user", "action": "message", "args": {"content": "Hurry."}}
    trace = parse([ASKED, action, hurry, result])
    assert contents(trace) == ["Fix it.", "Look.", "out c1", "Hurry."]


def test_an_observation_finds_its_call_by_its_cause() -> None:
    action, result = ran(2, "c1")
    del result["tool_call_metadata"]
    trace = parse([ASKED, action, result])
    assert trace.threads["main"][2] == Message(
        "tool", "out c1", name="execute_bash", tool_call_id="c1"
    )


def test_what_a_command_printed_is_framed_as_recorded() -> None:
    action, result = ran(2, "c1")
    result["extras"] = {"metadata": {"prefix": "[below]", "suffix": "[exit code 0]"}}
    trace = parse([ASKED, action, result])
    assert contents(trace)[2] == "[below]out c1[exit code 0]"


def test_without_a_recorded_response_the_call_is_made_of_the_event() -> None:
    action, result = ran(2, "c1")
    del action["tool_call_metadata"]["model_response"]
    action["args"] |= {"thought": {"text": "Hm."}, "blocking": False, "is_input": True}
    trace = parse([ASKED, action, result])
    arguments = '{"command": "c1", "is_input": true}'
    assert trace.threads["main"][1] == Message(
        "assistant", "Hm.", (ToolCall("c1", "execute_bash", arguments),)
    )
    assert trace.threads["main"][2].role == "tool"


def test_actions_before_tool_calls_are_text() -> None:
    trace = parse(EARLY, instruction="Fix it.")
    assert contents(trace) == [
        "Fix it.",
        "Look.\n<execute_bash>\nls\n</execute_bash>",
        "a.py",
        "<execute_ipython>\nprint(1)\n</execute_ipython>",
        "1",
        "All done.",
    ]
    assert [message.role for message in trace.threads["main"]] == ["user", "assistant"] * 3
    assert [step.context_messages for step in trace.steps] == [1, 3, 5]


def test_an_action_without_a_notation_is_spelled_as_json() -> None:
    action = {"action": "read", "path": "a.py", "thought": "Read.", "start": 0}
    trace = parse([*EARLY[:1], action, {"action": "finish"}])
    assert contents(trace)[1] == 'Read.\n{"action": "read", "path": "a.py", "start": 0}'
    assert contents(trace)[2] == '{"action": "finish"}'


def test_pairs_of_action_and_observation_are_taken_apart() -> None:
    null = {"observation": "null", "content": ""}
    pairs: list[Any] = [[EARLY[0], null], EARLY[1:3], EARLY[3:5], [EARLY[5], null]]
    trace = parse(pairs)
    assert contents(trace) == contents(parse(EARLY))
    assert trace.notes == ("null events skipped: 2",)


def test_a_list_of_events_alone_is_a_trajectory() -> None:
    trace = parse_trace(json.dumps([SYSTEM, ASKED, *ran(2, "c1")]).encode())
    assert trace.format == "openhands-v0"
    assert len(trace.steps) == 1


def test_the_instruction_is_asked_where_no_event_asks() -> None:
    trace = parse([SYSTEM, *ran(2, "c1")], instruction="Fix all of it.")
    assert contents(trace)[:3] == ["You have a shell.", "Fix all of it.", "Look."]
    trace = parse([SYSTEM, ASKED, *ran(2, "c1")], instruction="Fix all of it.")
    assert contents(trace)[:3] == ["You have a shell.", "Fix it.", "Look."]


def test_what_the_agent_says_is_a_turn() -> None:
    said = {"source": "agent", "action": "message", "args": {"content": "Which one?"}}
    early = {"action": "message", "content": "Which?", "wait_for_response": True}
    trace = parse([ASKED, said, ASKED, early])
    assert [message.role for message in trace.threads["main"]] == ["user", "assistant"] * 2
    assert [step.context_messages for step in trace.steps] == [1, 3]


def test_what_no_prompt_shows_is_skipped_and_counted() -> None:
    hidden = {"source": "agent", "action": "run", "args": {"command": "set", "hidden": True}}
    trace = parse(
        [
            {"action": "change_agent_state", "args": {"agent_state": "running"}},
            ASKED,
            {"source": "user", "action": "recall", "args": {"query": "Fix it."}},
            {"observation": "recall", "content": "Added", "extras": {"repo_instructions": ""}},
            {"observation": "agent_state_changed", "content": ""},
            {"action": "null", "args": {}},
            hidden,
            {"role": "user"},
            7,
            *ran(2, "c1"),
        ]
    )
    assert contents(trace) == ["Fix it.", "Look.", "out c1"]
    assert dict(note.split(": ") for note in trace.notes) == {
        "entries that are no events skipped": "2",
        "change_agent_state events skipped": "1",
        "recall events skipped": "2",
        "agent_state_changed events skipped": "1",
        "null events skipped": "1",
        "run events skipped": "1",
    }


def test_recalled_instructions_and_knowledge_are_shown() -> None:
    extras = {"repo_instructions": "Use tabs.", "microagent_knowledge": [{"content": "Git."}, 1]}
    recalled = {"observation": "recall", "content": "Added", "extras": extras}
    trace = parse([ASKED, recalled, *ran(2, "c1")])
    assert trace.threads["main"][1] == Message("user", "Use tabs.\n\nGit.")


def test_an_observation_that_answers_nothing_is_a_user_message() -> None:
    error = {"source": "agent", "observation": "error", "content": "No such tool."}
    trace = parse([ASKED, *ran(2, "c1"), error, *ran(4, "c2")])
    assert trace.threads["main"][3] == Message("user", "No such tool.")


def test_a_result_without_its_call_is_left_out() -> None:
    lost, kept = ran(2, "c1"), ran(4, "c2")
    trace = parse([ASKED, lost[1], *kept])
    assert contents(trace) == ["Fix it.", "Look.", "out c2"]
    assert trace.notes == ("tool results without their call skipped: 1",)


def condensed(**args: Any) -> dict[str, Any]:
    return {"id": 90, "source": "agent", "action": "condensation", "args": args}


def test_a_condensation_goes_on_without_what_it_forgets() -> None:
    events = [SYSTEM, ASKED, *ran(2, "c1"), *ran(4, "c2")]
    forgotten = condensed(forgotten_event_ids=[2, 3], summary="c1 ran.", summary_offset=2)
    trace = parse([*events, forgotten, *ran(6, "c3")])
    assert contents(trace, "main")[-1] == "out c2"
    assert contents(trace, "main#2") == [
        *("You have a shell.", "Fix it.", "c1 ran."),
        *("Look.", "out c2", "Look.", "out c3"),
    ]
    assert trace.steps == (
        *(TraceStep("main", 2), TraceStep("main", 4)),
        TraceStep("main#2", 5),
    )
    assert trace.notes == ("condensations, each begins a new thread: 1",)


def test_the_newest_summary_replaces_the_one_before() -> None:
    trace = parse(
        [
            *(ASKED, *ran(2, "c1")),
            condensed(forgotten_events_start_id=2, forgotten_events_end_id=3, summary="One."),
            *ran(4, "c2"),
            condensed(forgotten_event_ids=[4, 5], summary="Two.", summary_offset=1),
            *ran(6, "c3"),
            condensed(forgotten_event_ids=[]),
            *ran(8, "c4"),
        ]
    )
    assert contents(trace, "main#2")[:2] == ["Fix it.", "One."]
    assert contents(trace, "main#3")[:3] == ["Fix it.", "Two.", "Look."]
    assert contents(trace, "main#4")[:4] == ["Fix it.", "Two.", "Look.", "out c3"]
    assert [step.thread for step in trace.steps] == ["main", "main#2", "main#3", "main#4"]


@pytest.mark.parametrize("forgotten", [2, 3])
def test_a_call_and_its_result_are_forgotten_together(forgotten: int) -> None:
    events = [ASKED, *ran(2, "c1"), condensed(forgotten_event_ids=[forgotten]), *ran(4, "c2")]
    assert contents(parse(events), "main#2") == ["Fix it.", "Look.", "out c2"]


def test_condensations_cannot_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openhands, "_MAX_MESSAGES", 1000)
    events = [ASKED] * 100
    with pytest.raises(TraceError, match="more than 1000 messages"):
        parse([*events, *[condensed()] * 20, *ran(2, "c1")])
    assert len(parse([*events, *[condensed()] * 5, *ran(2, "c1")]).steps) == 1
