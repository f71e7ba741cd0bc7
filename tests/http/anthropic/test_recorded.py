"""Sessions of Claude Code as recorded on the wire."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvws.chat.call import ModelCall
from kvws.http.anthropic import ANTHROPIC
from kvws.http.recollection import Recollection

NOT_APPENDED = {"err_empty"}
"""Recordings in which the client edits its history without compacting: it got an answer that
shows nothing, and asks again inside the first message."""

Thread = tuple[str | None, str | None]


def recordings() -> dict[str, dict[str, Any]]:
    beside_repository = Path(__file__).resolve().parents[4] / "shared" / "harness"
    folder = Path(os.environ.get("KVWS_HARNESS") or beside_repository)
    files = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    sessions = {
        name: session
        for name, session in files.items()
        if isinstance(session, dict) and "claude-code" in session["client"]
    }
    if not sessions:
        pytest.skip("no recorded sessions: set KVWS_HARNESS to their folder")
    return sessions


def calls(session: dict[str, Any]) -> Iterator[tuple[Thread, str, ModelCall]]:
    for request in session["requests"]:
        if request["method"] == "POST":
            headers = {name.lower(): value for name, value in request["headers"]}
            thread = (
                headers.get("x-claude-code-session-id"),
                headers.get("x-claude-code-agent-id"),
            )
            yield thread, request["path"].split("?")[0], ANTHROPIC.read(body_of(request, session))


def body_of(request: dict[str, Any], session: dict[str, Any]) -> dict[str, Any]:
    return resolved(request["body"], session["shared"])


def resolved(value: Any, shared: dict[str, Any]) -> Any:
    if isinstance(value, dict):
        if set(value) == {"$ref"}:
            return resolved(shared[value["$ref"]], shared)
        return {key: resolved(member, shared) for key, member in value.items()}
    if isinstance(value, list):
        return [resolved(element, shared) for element in value]
    return value


def turns(session: dict[str, Any]) -> list[tuple[Thread, ModelCall]]:
    """The calls of the conversation itself."""
    return [
        (thread, call)
        for thread, path, call in calls(session)
        if path == "/v1/messages" and not call.side_call
    ]


def continues(call: ModelCall, before: ModelCall) -> bool:
    """Whether `call` only adds messages; of an assistant's turn only the place is compared."""
    known = call.messages[: len(before.messages)]
    return [m.role if m.role == "assistant" else m for m in known] == [
        m.role if m.role == "assistant" else m for m in before.messages
    ]


def is_compacted(call: ModelCall) -> bool:
    users = [message.content for message in call.messages if message.role == "user"]
    return "This session is being continued from a previous conversation" in users[0]


def test_every_recorded_request_reads() -> None:
    read = [call for session in recordings().values() for _, _, call in calls(session)]
    assert len(read) > 80
    dropped = {phrase.split(" (")[0] for call in read for phrase in call.dropped}
    assert dropped == {"image", "tool of type 'web_search_20250305'"}


def test_every_request_reads_the_same_whatever_was_read_before_it() -> None:
    recollection = Recollection()
    for session in recordings().values():
        for request in session["requests"]:
            if request["method"] == "POST":
                body = body_of(request, session)
                assert repr(ANTHROPIC.read(body, recollection)) == repr(ANTHROPIC.read(body))


def test_only_the_last_message_of_the_request_before_is_read_again() -> None:
    """The client's cache mark leaves it for a later one."""
    session = recordings()["norm"]
    recollection = Recollection()
    posts = [request for request in session["requests"] if request["method"] == "POST"]
    for request in posts[2:]:
        known = recollection.entries
        ANTHROPIC.read(body_of(request, session), recollection)
        kept = zip(known[:-1], recollection.entries, strict=False)
        assert all(one is other for one, other in kept)
        assert len(recollection.entries) > len(known)


def test_every_turn_continues_the_one_before_it_except_at_a_compaction() -> None:
    compactions = 0
    for name, session in recordings().items():
        last: dict[Thread, ModelCall] = {}
        for thread, call in turns(session):
            before = last.get(thread, call)
            if is_compacted(call) and not is_compacted(before):
                compactions += 1
                assert not continues(call, before)
                assert call.messages[0] == before.messages[0], "the system prompt outlives it"
            else:
                assert continues(call, before) or name in NOT_APPENDED, (name, thread)
            assert call.tools == before.tools
            last[thread] = call
    assert compactions == 2


def test_an_answer_that_shows_nothing_makes_the_client_edit_its_history() -> None:
    (_, first), (_, second) = turns(recordings()["err_empty"])
    assert not continues(second, first)


def test_titles_searches_and_requests_for_summaries_are_asides() -> None:
    asides = {
        name: found
        for name, session in recordings().items()
        if (found := sum(call.side_call for _, _, call in calls(session)))
    }
    assert asides == {"blkD": 1, "ptl400": 1, "tui": 1, "tui2": 2, "web": 1}


def test_no_header_line_of_a_client_reaches_the_model() -> None:
    for session in recordings().values():
        for _, _, call in calls(session):
            assert all("x-anthropic-" not in m.content for m in call.messages)


def test_every_result_of_a_tool_carries_the_name_of_its_tool() -> None:
    results = [
        message
        for session in recordings().values()
        for _, call in turns(session)
        if not is_compacted(call)
        for message in call.messages
        if message.role == "tool"
    ]
    assert len(results) > 50
    assert all(message.name and message.tool_call_id for message in results)
