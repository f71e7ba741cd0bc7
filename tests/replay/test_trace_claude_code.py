"""Claude Code transcripts: what the model was shown is put together again from lines."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from kvws.chat.message import Message, ToolCall
from kvws.errors import TraceError
from kvws.replay.loaders import parse_trace
from kvws.replay.trace import Trace

Line = dict[str, Any]


class Transcript:
    """Writes lines as Claude Code does: each names the one before as its parent."""

    def __init__(self) -> None:
        self.lines: list[Line] = []

    def add(self, kind: str, **fields: Any) -> str:
        """Append a line; returns its uuid."""
        uuid = f"u{len(self.lines)}"
        parent = self.lines[-1]["uuid"] if self.lines else None
        line = {"type": kind, "uuid": uuid, "parentUuid": parent, "isSidechain": False}
        self.lines.append({**line, **fields})
        return uuid

    def user(self, content: Any, **fields: Any) -> str:
        return self.add("user", message={"role": "user", "content": content}, **fields)

    def assistant(self, message_id: str, *blocks: Line | str, **fields: Any) -> str:
        content = [text(b) if isinstance(b, str) else b for b in blocks]
        message = {"role": "assistant", "id": message_id, "content": content}
        return self.add("assistant", message=message | fields.pop("message", {}), **fields)

    def trace(self) -> Trace:
        return parse_trace("\n".join(map(json.dumps, self.lines)).encode())


def text(value: str) -> Line:
    return {"type": "text", "text": value}


def tool_use(call_id: str, name: str = "Read", **arguments: Any) -> Line:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def tool_result(call_id: str, content: Any) -> Line:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content}


@pytest.fixture
def transcript() -> Transcript:
    return Transcript()


def roles(trace: Trace, thread: str = "main") -> list[str]:
    return [message.role for message in trace.threads[thread]]


def steps(trace: Trace) -> list[tuple[str, int]]:
    return [(step.thread, step.context_messages) for step in trace.steps]


def test_a_turn_and_its_tool_result(transcript: Transcript) -> None:
    transcript.user("Fix the test.")
    transcript.assistant("m1", "Let me look.", tool_use("t1", path="a.py"))
    transcript.user([tool_result("t1", "def f(): ...")])
    transcript.assistant("m2", "Done.")
    trace = transcript.trace()
    assert trace.format == "claude-code"
    assert trace.threads["main"] == (
        Message("user", "Fix the test."),
        Message("assistant", "Let me look.", (ToolCall("t1", "Read", '{"path": "a.py"}'),)),
        Message("tool", "def f(): ...", name="Read", tool_call_id="t1"),
        Message("assistant", "Done."),
    )
    assert steps(trace) == [("main", 1), ("main", 3)]
    assert trace.context(trace.steps[1]) == trace.threads["main"][:3]
    assert trace.reply(trace.steps[1]).content == "Done."


def test_lines_of_one_message_are_one_turn_even_with_results_between(
    transcript: Transcript,
) -> None:
    transcript.user("Go.")
    transcript.assistant("m1", {"type": "thinking", "thinking": "hm"})
    transcript.assistant("m1", "Both at once.")
    transcript.assistant("m1", tool_use("t1"))
    transcript.user([tool_result("t1", "one")])
    transcript.assistant("m1", tool_use("t2"))
    transcript.user([tool_result("t2", "two")])
    trace = transcript.trace()
    assert roles(trace) == ["user", "assistant", "tool", "tool"]
    turn = trace.threads["main"][1]
    assert turn.content == "Both at once."
    assert [call.id for call in turn.tool_calls] == ["t1", "t2"]
    assert steps(trace) == [("main", 1)]
    assert trace.notes == ("thinking blocks dropped: 1",)


def test_results_and_text_in_one_line_are_several_messages(transcript: Transcript) -> None:
    transcript.user("Go.")
    transcript.assistant("m1", tool_use("t1"), tool_use("t2"))
    transcript.user([tool_result("t1", "one"), tool_result("t2", [text("t"), text("wo")])])
    transcript.user([tool_result("t3", None), text("Stop."), text("Now.")])
    messages = transcript.trace().threads["main"][2:]
    assert [(m.role, m.content, m.tool_call_id) for m in messages] == [
        ("tool", "one", "t1"),
        ("tool", "t\nwo", "t2"),
        ("tool", "", "t3"),
        ("user", "Stop.\nNow.", None),
    ]


def test_what_is_not_text_leaves_a_placeholder(transcript: Transcript) -> None:
    transcript.user([text("See:"), {"type": "image", "source": {"data": "…"}}])
    transcript.assistant("m1", tool_use("t1"))
    transcript.user([tool_result("t1", [{"type": "hologram"}, {"type": "image"}])])
    trace = transcript.trace()
    assert trace.threads["main"][0].content == "See:\n[image]"
    assert trace.threads["main"][2].content == "[hologram]\n[image]"
    assert set(trace.notes) == {
        "image blocks replaced by placeholders: 2",
        "hologram blocks replaced by placeholders: 1",
    }


def test_lines_that_the_model_never_saw_are_counted(transcript: Transcript) -> None:
    transcript.add("file-history-snapshot")
    transcript.user("Go.")
    transcript.add("progress", data={"type": "hook_progress"})
    transcript.add("progress", data={"type": "bash_progress"})
    transcript.add("system", subtype="turn_duration")
    transcript.assistant("m1", "Done.")
    assert set(transcript.trace().notes) == {
        "file-history-snapshot lines skipped: 1",
        "progress lines skipped: 2",
        "system lines skipped: 1",
    }


def test_text_that_only_the_interface_hides_is_kept(transcript: Transcript) -> None:
    transcript.user("Caveat: local commands follow.", isMeta=True)
    transcript.assistant("m1", "Fine.")
    assert roles(transcript.trace()) == ["user", "assistant"]


def test_a_compaction_begins_a_new_thread(transcript: Transcript) -> None:
    transcript.user("Go.")
    transcript.assistant("m1", "Half done.")
    transcript.add("system", subtype="compact_boundary", parentUuid=None)
    transcript.user("Summary: half done.", isCompactSummary=True)
    transcript.assistant("m2", "All done.")
    trace = transcript.trace()
    assert roles(trace, "main#2") == ["user", "assistant"]
    assert steps(trace) == [("main", 1), ("main#2", 1)]
    assert trace.notes == ("compactions, each begins a new thread: 1",)


def test_a_resumed_copy_of_the_history_is_context_not_steps(transcript: Transcript) -> None:
    transcript.user("Go.")
    transcript.assistant("m1", "Half done.")
    transcript.user("Go.", parentUuid=None)
    transcript.assistant("m1", "Half done.")
    transcript.user("And the rest?")
    transcript.assistant("m2", "Done.")
    trace = transcript.trace()
    assert len(trace.threads["main#2"]) == 4
    assert steps(trace) == [("main", 1), ("main#2", 3)]


def test_going_back_begins_a_thread_with_the_history_up_to_there(
    transcript: Transcript,
) -> None:
    transcript.user("Go.")
    transcript.assistant("m1", tool_use("t1"), tool_use("t2"))
    first = transcript.user([tool_result("t1", "one")])
    transcript.user([tool_result("t2", "two")])
    transcript.assistant("m2", "The wrong way.")
    transcript.user("The other way, please.", parentUuid=first)
    transcript.assistant("m3", "The other way.")
    trace = transcript.trace()
    assert [m.content for m in trace.threads["main#2"]] == [
        "Go.",
        "",
        "one",
        "two",
        "The other way, please.",
        "The other way.",
    ]
    assert steps(trace) == [("main", 1), ("main", 4), ("main#2", 5)]


def test_parallel_results_in_any_order_are_not_going_back(transcript: Transcript) -> None:
    transcript.user("Go.")
    first = transcript.assistant("m1", tool_use("t1"))
    second = transcript.assistant("m1", tool_use("t2"))
    transcript.user([tool_result("t2", "two")], parentUuid=second)
    transcript.user([tool_result("t1", "one")], parentUuid=first)
    transcript.user("Wait.", parentUuid=first)
    trace = transcript.trace()
    assert list(trace.threads) == ["main"]
    assert roles(trace) == ["user", "assistant", "tool", "tool", "user"]


@pytest.mark.parametrize("by", ["agentId", "parent", "progress"])
def test_each_sub_agent_is_a_thread(transcript: Transcript, by: str) -> None:
    transcript.user("Go.")
    transcript.assistant("m1", tool_use("t1", "Task"), tool_use("t2", "Task"))
    writers: dict[str, Callable[..., None]] = {
        "agentId": _write_by_agent_id,
        "parent": _write_by_parent,
        "progress": _write_as_progress,
    }
    writers[by](transcript)
    transcript.user([tool_result("t1", "A"), tool_result("t2", "B")], parentUuid="u1")
    transcript.assistant("m2", "Done.")
    trace = transcript.trace()
    assert roles(trace) == ["user", "assistant", "tool", "tool", "assistant"]
    assert [m.content for m in trace.threads["agent-1"]] == ["task A", "answer A"]
    assert [m.content for m in trace.threads["agent-2"]] == ["task B", "answer B"]
    assert steps(trace) == [("main", 1), ("agent-1", 1), ("agent-2", 1), ("main", 4)]


def _write_by_agent_id(transcript: Transcript) -> None:
    for name in "AB":
        transcript.user(f"task {name}", isSidechain=True, agentId=name, parentUuid=None)
    for name in "AB":
        transcript.assistant(f"m{name}", f"answer {name}", isSidechain=True, agentId=name)


def _write_by_parent(transcript: Transcript) -> None:
    first = {
        name: transcript.user(f"task {name}", isSidechain=True, parentUuid=None) for name in "AB"
    }
    for name in "AB":
        parent = first[name]
        transcript.assistant(f"m{name}", f"answer {name}", isSidechain=True, parentUuid=parent)


def _write_as_progress(transcript: Transcript) -> None:
    inner = Transcript()
    for name in "AB":
        inner.user(f"task {name}")
    for name in "AB":
        inner.assistant(f"m{name}", f"answer {name}")
    for line, name in zip(inner.lines, "ABAB", strict=True):
        line["uuid"] = f"inner-{line['uuid']}"
        data = {"type": "agent_progress", "agentId": name, "message": line}
        transcript.add("progress", data=data)


def test_a_sub_agents_own_file_loads(transcript: Transcript) -> None:
    transcript.user("task", isSidechain=True, agentId="a1")
    transcript.assistant("m1", "answer", isSidechain=True, agentId="a1")
    assert list(transcript.trace().threads) == ["agent-1"]


def test_turns_that_no_model_wrote_are_no_steps(transcript: Transcript) -> None:
    transcript.user("Go.")
    transcript.assistant("s1", "No response requested.", message={"model": "<synthetic>"})
    transcript.assistant("s2", "API error", isApiErrorMessage=True)
    transcript.user("Go on.")
    transcript.assistant("m1", "Done.")
    trace = transcript.trace()
    assert roles(trace) == ["user", "assistant", "user", "assistant"]
    assert steps(trace) == [("main", 3)]


def test_repeated_lines_count_once(transcript: Transcript) -> None:
    transcript.user("Go.")
    transcript.assistant("m1", "Done.")
    transcript.lines *= 2
    trace = transcript.trace()
    assert len(trace.threads["main"]) == 2
    assert trace.notes == ("repeated lines skipped: 2",)


def test_an_unfinished_turn_is_fine(transcript: Transcript) -> None:
    transcript.user("Go.")
    transcript.assistant("m1", tool_use("t1"))
    assert steps(transcript.trace()) == [("main", 1)]


def test_a_transcript_without_a_turn_is_refused(transcript: Transcript) -> None:
    transcript.user("Anyone?")
    with pytest.raises(TraceError, match="no assistant turn"):
        transcript.trace()
