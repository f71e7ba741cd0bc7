"""Finished calls are recorded: privately, without secrets, and so that they can be replayed."""

from __future__ import annotations

import asyncio
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvws.http.recorder as recorder_module
from kvws.chat.answer import (
    AnswerEvent,
    Finished,
    Reasoning,
    Text,
    ToolArguments,
    ToolCallBegun,
    Usage,
)
from kvws.chat.call import ModelCall, Sampling
from kvws.chat.message import Message, ToolCall
from kvws.errors import ConfigError, StoreFormatError, UnsafeStore
from kvws.http.recorder import Recorder, file_name
from kvws.replay.loaders import load_trace
from kvws.session.caller import Caller

CALLER = Caller("session-1", "main", "x-kvws-workspace")
AGENT = Caller("session-1", "agent-7", "x-kvws-workspace")
TOOL = {"type": "function", "function": {"name": "ls", "parameters": {"b": 1, "a": 2}}}
SYSTEM, TASK = Message("system", "Be brief."), Message("user", "List \u2028 «these».\n")
LISTED = Message("tool", "a b", name="ls", tool_call_id="c1")
CALLED = Message("assistant", "Look:", (ToolCall("c1", "ls", '{"path": "."}'),), reasoning="Hm.")
SAID = Message("assistant", "a and b.")


def events_of(message: Message) -> list[AnswerEvent]:
    events: list[AnswerEvent] = [Reasoning(message.reasoning)] if message.reasoning else []
    events += [Text(message.content)] if message.content else []
    for index, call in enumerate(message.tool_calls):
        events += [ToolCallBegun(index, call.id, call.name), ToolArguments(index, call.arguments)]
    reason = "tool_calls" if message.tool_calls else "stop"
    return [*events, Finished(reason, Usage(10, reused_tokens=4, answer_tokens=3))]


def call_of(*messages: Message, **fields: Any) -> ModelCall:
    return ModelCall("m", messages, tools=(TOOL,), **fields)


async def write(recorder: Recorder, call: ModelCall, answer: Message, caller: Caller) -> None:
    await recorder.record(
        caller, call, events_of(answer), dialect="chat", started_at_s=1e9, duration_ms=2.5
    )


def record(
    directory: Path,
    *calls: tuple[ModelCall, Message] | tuple[ModelCall, Message, Caller],
    redacts: bool = True,
) -> Path:
    """Record calls with one recorder; the file of the first one's session."""

    async def main() -> None:
        recorder = Recorder(directory, redacts=redacts)
        for call, answer, *caller in calls:
            await write(recorder, call, answer, *(caller or [CALLER]))
        await recorder.close()

    asyncio.run(main())
    return directory / file_name(calls[0][2] if len(calls[0]) == 3 else CALLER)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def calls_in(path: Path) -> list[dict[str, Any]]:
    return [row["call"] for row in rows(path) if "call" in row]


CONVERSATION = (
    (call_of(SYSTEM, TASK), CALLED),
    (call_of(SYSTEM, TASK, CALLED, LISTED), SAID),
    (call_of(SYSTEM, TASK, CALLED, LISTED, SAID, TASK), SAID),
)


def test_a_recorded_conversation_replays_as_it_was(tmp_path: Path) -> None:
    trace = load_trace(record(tmp_path / "r", *CONVERSATION))
    assert trace.format == "kvws-record"
    assert [trace.context(step) for step in trace.steps] == [c.messages for c, _ in CONVERSATION]
    assert [trace.reply(step) for step in trace.steps] == [answer for _, answer in CONVERSATION]
    assert {step.thread for step in trace.steps} == {"main"}
    assert json.dumps(trace.tools) == json.dumps([TOOL])
    assert trace.notes == ()


def test_a_call_adds_only_what_its_thread_does_not_have_yet(tmp_path: Path) -> None:
    path = record(tmp_path, *CONVERSATION)
    assert [(row["keep"], len(row["add"])) for row in calls_in(path)] == [(0, 2), (2, 2), (4, 2)]


def test_a_long_session_does_not_write_its_prompt_anew_each_step(tmp_path: Path) -> None:
    messages = [Message("user", "x" * 10_000)]
    steps: list[tuple[ModelCall, Message]] = []
    for _ in range(20):
        steps.append((call_of(*messages), SAID))
        messages += [SAID, Message("user", "y" * 100)]
    assert record(tmp_path, *steps).stat().st_size < 30_000


def test_tools_are_written_once(tmp_path: Path) -> None:
    path = record(tmp_path, *CONVERSATION)
    (told,) = [row["tools"] for row in rows(path) if "tools" in row]
    assert {row["tools"] for row in calls_in(path)} == {told["digest"]}


def test_the_first_line_says_the_version_and_the_session(tmp_path: Path) -> None:
    assert rows(record(tmp_path, *CONVERSATION))[0] == {
        "kvws_record": 1,
        "session": "session-1",
        "source": "x-kvws-workspace",
    }


def test_a_line_says_what_was_asked_and_what_it_cost(tmp_path: Path) -> None:
    call = call_of(TASK, max_tokens=9, sampling=Sampling(temperature=0.5), effort="high")
    (row,) = calls_in(record(tmp_path, (call, SAID)))
    assert row["asked"]["max_tokens"] == 9
    assert row["asked"]["sampling"]["temperature"] == 0.5
    assert set(row["asked"]) == {"max_tokens", "sampling", "effort"}
    assert (row["dialect"], row["model"], row["finish"]) == ("chat", "m", "stop")
    assert (row["started_at_s"], row["duration_ms"], row["redacted"]) == (1e9, 2.5, True)
    assert row["usage"] == {
        "prompt_tokens": 10,
        "reused_tokens": 4,
        "stored_tokens": 0,
        "answer_tokens": 3,
        "reasoning_tokens": 0,
    }


def test_an_aside_leaves_its_thread_as_it_was(tmp_path: Path) -> None:
    first, second, third = CONVERSATION
    title = (call_of(SYSTEM, Message("user", "Title?"), side_call=True), Message("assistant", "T"))
    path = record(tmp_path, first, title, second, title, third)
    assert [row["keep"] for row in calls_in(path)] == [0, 1, 2, 1, 4]
    trace = load_trace(path)
    assert [step.thread for step in trace.steps] == ["main", "aside-1", "main", "aside-2", "main"]
    assert trace.threads["aside-1"] == (*title[0].messages, title[1])
    assert len(trace.threads["main"]) == 7


def test_agents_of_a_session_share_a_file_but_no_thread(tmp_path: Path) -> None:
    task = Message("user", "Search.")
    agent_calls = [
        (call_of(task), CALLED, AGENT),
        (call_of(task, CALLED, LISTED), SAID, AGENT),
    ]
    mixed = [CONVERSATION[0], agent_calls[0], CONVERSATION[1], agent_calls[1]]
    trace = load_trace(record(tmp_path, *mixed))
    assert len(os.listdir(tmp_path)) == 1
    assert [step.thread for step in trace.steps] == ["main", "agent-7", "main", "agent-7"]
    assert trace.threads["agent-7"] == (task, CALLED, LISTED, SAID)


def test_a_recorder_continues_the_file_of_an_earlier_one(tmp_path: Path) -> None:
    record(tmp_path, *CONVERSATION[:2])
    path = record(tmp_path, *CONVERSATION[2:])
    assert [row["keep"] for row in calls_in(path)] == [0, 2, 0]
    trace = load_trace(path)
    assert [trace.context(step) for step in trace.steps] == [c.messages for c, _ in CONVERSATION]
    assert set(trace.threads) == {"main"}


@pytest.mark.parametrize("cut_bytes", [1, 30, 400])
def test_a_line_that_a_dead_process_left_unfinished_is_removed(
    tmp_path: Path, cut_bytes: int
) -> None:
    path = record(tmp_path, *CONVERSATION[:2])
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut_bytes])
    assert len(load_trace(path).steps) == (2 if cut_bytes == 1 else 1)
    record(tmp_path, *CONVERSATION[2:])
    trace = load_trace(path)
    assert [len(trace.context(step)) for step in trace.steps] == [2, 6]
    assert trace.notes == ()


def test_a_header_that_was_cut_off_is_written_again(tmp_path: Path) -> None:
    path = record(tmp_path, *CONVERSATION)
    path.write_bytes(path.read_bytes()[:20])
    record(tmp_path, *CONVERSATION)
    assert len(load_trace(path).steps) == 3


def test_nothing_is_added_to_a_file_of_someone_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / file_name(CALLER)
    for contents in (b"notes\n", b'{"kvws_record": 2}\n', b"[]\n"):
        path.write_bytes(contents)
        record(tmp_path, *CONVERSATION)
        assert path.read_bytes() == contents
    assert "no recording of this version" in caplog.text


def test_after_a_failed_write_its_half_line_is_removed_and_the_next_call_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real_write = recorder_module._write
    writes = 0

    async def disk_is_full_once(file: Any, data: bytes) -> None:
        nonlocal writes
        writes += 1
        if writes == 2:
            await real_write(file, data[:50])
            raise OSError(28, "No space left on device")
        await real_write(file, data)

    monkeypatch.setattr(recorder_module, "_write", disk_is_full_once)
    path = record(tmp_path, *CONVERSATION)
    assert "No space left on device" in caplog.text
    assert [row["keep"] for row in calls_in(path)] == [0, 0]
    trace = load_trace(path)
    assert [len(trace.context(step)) for step in trace.steps] == [2, 6]


def test_a_caller_that_gives_up_does_not_tear_the_file(tmp_path: Path) -> None:
    async def main() -> None:
        recorder = Recorder(tmp_path)
        writing = [asyncio.create_task(write(recorder, *each, CALLER)) for each in CONVERSATION]
        await asyncio.sleep(0)
        for task in writing:
            task.cancel()
        await asyncio.gather(*writing, return_exceptions=True)
        assert all(task.cancelled() for task in writing)
        await recorder.close()

    asyncio.run(main())
    assert len(load_trace(tmp_path / file_name(CALLER)).steps) == 3


@pytest.mark.parametrize("remembered", [256, 1])
def test_calls_that_finish_at_once_are_written_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remembered: int
) -> None:
    monkeypatch.setattr(recorder_module, "_MAX_REMEMBERED_SESSIONS", remembered)
    callers = [Caller(f"s{n % 5}", f"t{n % 3}", "prompt") for n in range(60)]

    async def main() -> None:
        recorder = Recorder(tmp_path)
        await asyncio.gather(*(write(recorder, *CONVERSATION[0], caller) for caller in callers))

    asyncio.run(main())
    assert len(os.listdir(tmp_path)) == 5
    for path in tmp_path.iterdir():
        assert len(calls_in(path)) == 12
        assert [row["keep"] for row in calls_in(path)].count(0) == 3


def test_forgetting_a_session_costs_no_more_than_a_whole_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "_MAX_REMEMBERED_SESSIONS", 2)
    others = [Caller(f"other-{n}", "main", "prompt") for n in range(3)]
    between = [(*CONVERSATION[0], other) for other in others]
    path = record(tmp_path, CONVERSATION[0], *between, CONVERSATION[1])
    assert [row["keep"] for row in calls_in(path)] == [0, 0]
    assert set(load_trace(path).threads) == {"main"}


def test_only_the_owner_can_read_a_recording(tmp_path: Path) -> None:
    directory = tmp_path / "deep" / "recordings"
    old = os.umask(0)
    try:
        path = record(directory, *CONVERSATION)
    finally:
        os.umask(old)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_symbolic_links_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(UnsafeStore, match="symbolic link"):
        Recorder(tmp_path / "link")
    target = tmp_path / "target"
    target.write_text("")
    (tmp_path / "real" / file_name(CALLER)).symlink_to(target)
    record(tmp_path / "real", *CONVERSATION)
    assert target.read_text() == ""
    assert "a call is missing" in caplog.text


def test_a_directory_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(UnsafeStore, match="others can write"):
        Recorder(tmp_path)


def test_what_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises((ConfigError, StoreFormatError)):
        Recorder(tmp_path / "file")
    with pytest.raises(ConfigError):
        Recorder(tmp_path / "file" / "below")


@settings(max_examples=200, deadline=None)
@given(st.text(min_size=1), st.text(min_size=1))
def test_a_file_is_named_by_nothing_that_a_path_could_be_made_of(one: str, other: str) -> None:
    name = file_name(Caller(one, "main", "prompt"))
    assert name.isascii()
    assert not set(name) & set("/\\\0:")
    assert name[0] != "." and name.endswith(".jsonl") and len(name) < 100
    assert (name == file_name(Caller(other, "main", "prompt"))) == (one == other)
    assert name != file_name(Caller(one, "main", "x-session-id"))


def secrets() -> dict[str, str]:
    dashes = "-" * 5
    return {
        "header": "Authorization: Bearer {}",
        "environment": "export SERVICE_TOKEN={}",
        "settings": 'password = "{}"',
        "json": '{{"client_secret": "{}"}}',
        "url": "https://me:{}@example.org/x",
        "key": f"{dashes}BEGIN PRIVATE KEY{dashes}\n{{}}\n{dashes}END PRIVATE KEY{dashes}",
        "prefix": "use sk-{} here",
    }


@pytest.mark.parametrize("kind", secrets())
def test_a_secret_is_in_no_part_of_the_file(tmp_path: Path, kind: str) -> None:
    secret = "a7Xq" * 8
    text = secrets()[kind].format(secret)
    arguments = json.dumps({"command": f'echo "{text}"'})
    answer = Message("assistant", text, (ToolCall("c1", "sh", arguments),), reasoning=text)
    call = ModelCall(
        f"m {text}",
        (
            Message("system", text),
            Message("user", f"before {text} behind"),
            answer,
            Message("tool", text, name="sh", tool_call_id="c1"),
        ),
        tools=({"type": "function", "function": {"name": "sh", "description": text}},),
        json_schema={"description": text},
        sampling=Sampling(stop=(text,)),
        dropped=(text,),
    )
    written = record(tmp_path / "redacted", (call, answer)).read_text()
    assert secret not in written
    assert written.count("[redacted:") >= 9
    plain = record(tmp_path / "plain", (call, answer), redacts=False).read_text()
    assert plain.count(secret) >= 11


TEXTS = st.text(st.characters(blacklist_categories=["Cs"]), max_size=30)
NAMES = st.sampled_from(["ls", "cat", "edit"])
CALLS = st.lists(st.builds(ToolCall, st.uuids().map(str), NAMES, st.just('{"a": 1}')), max_size=2)
ANSWERS = st.builds(
    lambda content, calls, reasoning: Message(
        "assistant", content, tuple(calls), reasoning=reasoning
    ),
    TEXTS,
    CALLS,
    TEXTS,
)
REPLIES = st.one_of(
    st.builds(lambda text: Message("user", text), TEXTS),
    st.builds(lambda text: Message("tool", text, name="ls", tool_call_id="c1"), TEXTS),
    st.builds(lambda text: Message("system", text), TEXTS),
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["main", "agent-7"]), ANSWERS, REPLIES, st.booleans()),
        min_size=1,
        max_size=8,
    )
)
def test_whatever_is_said_replays_as_it_was(
    tmp_path_factory: pytest.TempPathFactory,
    turns: list[tuple[str, Message, Message, bool]],
) -> None:
    history = {"main": [SYSTEM, TASK], "agent-7": [TASK]}
    calls: list[tuple[ModelCall, Message, Caller]] = []
    for thread, answer, reply, is_aside in turns:
        call = call_of(*history[thread], side_call=is_aside)
        calls.append((call, answer, Caller("s", thread, "prompt")))
        if not is_aside:
            history[thread] += [answer, reply]
    trace = load_trace(record(tmp_path_factory.mktemp("r"), *calls))
    assert [trace.context(step) for step in trace.steps] == [call.messages for call, *_ in calls]
    assert [trace.reply(step) for step in trace.steps] == [answer for _, answer, _ in calls]
    assert set(trace.threads) - {"main", "agent-7"} == {
        f"aside-{n + 1}" for n in range(sum(is_aside for *_, is_aside in turns))
    }
