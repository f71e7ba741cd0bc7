"""Digests of histories: equal for what clients rewrite, different for everything else."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvws.chat.canonical import DIGEST_BYTES, message_digest, tools_digest
from kvws.chat.message import Message, ToolCall

CALL = ToolCall("c1", "Edit", '{"path": "a.py", "old": "x", "new": "y", "times": 1}')
TURN = Message("assistant", "Changing it.", (CALL,), reasoning="It says x.")
ANSWER = Message("tool", "done", name="Edit", tool_call_id="c1")
START = tools_digest([])


def digest(*messages: Message) -> bytes:
    chain = START
    for message in messages:
        chain = message_digest(chain, message)
    return chain


def with_arguments(arguments: str) -> Message:
    return replace(TURN, tool_calls=(replace(CALL, arguments=arguments),))


class TestTools:
    TOOLS: tuple[dict[str, Any], ...] = (
        {"type": "function", "function": {"name": "a", "parameters": {"x": 1, "y": [1, 2]}}},
        {"type": "function", "function": {"name": "b", "parameters": {}}},
    )

    def test_the_order_of_keys_does_not_count(self) -> None:
        other: dict[str, Any] = {
            "function": {"parameters": {"y": [1, 2], "x": 1}, "name": "a"},
            "type": "function",
        }
        assert tools_digest(self.TOOLS) == tools_digest([other, self.TOOLS[1]])
        assert len(tools_digest(self.TOOLS)) == DIGEST_BYTES

    def test_the_order_of_tools_and_of_lists_counts(self) -> None:
        digests = {
            tools_digest(self.TOOLS),
            tools_digest(self.TOOLS[::-1]),
            tools_digest(self.TOOLS[:1]),
            tools_digest(json.loads(json.dumps(self.TOOLS).replace("[1, 2]", "[2, 1]"))),
            tools_digest([]),
        }
        assert len(digests) == 5


@pytest.mark.parametrize(
    "arguments",
    [
        '{"new":"y","old":"x","path":"a.py","times":1}',
        '{ "times": 1, "path": "\\u0061.py",\n"old": "x", "new": "y" }',
    ],
)
def test_arguments_count_by_value(arguments: str) -> None:
    assert digest(with_arguments(arguments)) == digest(TURN)


def test_dates_of_clients_do_not_count_but_those_in_tool_output_do() -> None:
    days = ["Today's date is 2026-11-30.", "Today's date is 2026-12-01."]
    for role, digests in (("system", 1), ("user", 1), ("assistant", 2), ("tool", 2)):
        assert len({digest(Message(role, day)) for day in days}) == digests  # type: ignore[arg-type]


DIFFERENT = [
    replace(TURN, content="Changing it"),
    replace(TURN, content="", reasoning="It says x.Changing it."),
    replace(TURN, reasoning=""),
    replace(TURN, tool_calls=()),
    replace(TURN, tool_calls=(CALL, CALL)),
    replace(TURN, tool_calls=(replace(CALL, id="c2"),)),
    replace(TURN, tool_calls=(replace(CALL, name="Write"),)),
    with_arguments('{"path": "a.py", "old": "x", "new": "y", "times": "1"}'),
    with_arguments('{"path": "a.py", "old": "x", "new": "y", "times": true}'),
    with_arguments('{"path": "a.py", "old": "x", "new": "y"}'),
    with_arguments('{"path": "a.py", '),
    with_arguments(""),
    with_arguments("[" * 100_000),
    ANSWER,
    replace(ANSWER, name=None),
    replace(ANSWER, name=""),
    replace(ANSWER, tool_call_id="c2"),
    replace(ANSWER, tool_call_id=None, name="c1"),
    replace(ANSWER, role="user"),
]


def test_everything_else_counts() -> None:
    digests = {digest(message) for message in [TURN, *DIFFERENT]}
    assert len(digests) == 1 + len(DIFFERENT)


def test_the_history_before_counts() -> None:
    assert digest(TURN, ANSWER) != digest(ANSWER)
    assert digest(TURN, ANSWER) != digest(ANSWER, TURN)
    assert digest(TURN, ANSWER) == digest(with_arguments(CALL.arguments + " "), ANSWER)


@given(st.lists(st.text(max_size=4), min_size=2, max_size=2), st.text(max_size=4))
def test_text_does_not_move_between_fields(texts: list[str], more: str) -> None:
    first, second = texts
    one = Message("assistant", first + more, reasoning=second)
    other = Message("assistant", first, reasoning=more + second)
    assert (digest(one) == digest(other)) == (not more)


def test_surrogates_of_broken_clients_have_a_digest() -> None:
    assert digest(Message("user", "\ud800")) != digest(Message("user", "\udfff"))
