"""Stand-ins keep a list's structure and none of its words."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvws.chat.message import Message, ToolCall
from kvws.chat.skeleton import Skeleton

SYSTEM = Message("system", "Be brief.")
ASK = Message("user", "A long question. " * 50)


def step(number: int, calls: int = 1) -> list[Message]:
    made = tuple(ToolCall(f"c{number}.{n}", "Read", '{"path": "secret"}') for n in range(calls))
    answers = [Message("tool", "secret " * 99, (), "Read", call.id) for call in made]
    return [Message("assistant", "", made, reasoning="secret"), *answers]


def session(steps: int) -> list[Message]:
    return [SYSTEM, ASK, *(message for number in range(steps) for message in step(number))]


def test_messages_in_between_are_kept_as_they_are() -> None:
    messages = session(100)
    shown, first = Skeleton(messages).around(101, 104)
    assert shown[first : first + 3] == messages[101:104]
    others = [*shown[1:first], *shown[first + 3 :]]
    assert not any("secret" in str(message) or "question" in str(message) for message in others)
    assert shown[0] == SYSTEM


def test_long_lists_have_short_skeletons() -> None:
    lengths = {len(Skeleton(session(n)).around(2 * n - 1, 2 * n + 2)[0]) for n in (50, 500, 2000)}
    assert len(lengths) == 1 and max(lengths) < 40


def test_a_lone_question_far_back_is_kept() -> None:
    messages = [*session(50), Message("assistant", "Done."), ASK, *session(50)[2:]]
    shown, first = Skeleton(messages).around(len(messages) - 1, len(messages))
    assert [message.role for message in shown].count("user") == 2
    assert shown[first - 1].role == "assistant"


def test_every_kind_of_message_is_kept() -> None:
    messages = session(40)
    messages[41] = replace(messages[41], reasoning="")
    messages[43:45] = step(99, calls=3)
    shown, _ = Skeleton(messages).around(len(messages), len(messages))
    assert len(shown) < 60
    assert [len(m.tool_calls) for m in shown].count(3) == 1
    assert {(m.role, bool(m.reasoning)) for m in shown} == {
        (m.role, bool(m.reasoning)) for m in messages
    }


@given(st.lists(st.integers(0, 3), min_size=1, max_size=5), st.integers(1, 60), st.data())
def test_what_is_left_out_leaves_no_seam(
    calls: list[int], times: int, data: st.DataObject
) -> None:
    messages = [SYSTEM, ASK]
    for number, count in enumerate(calls * times):
        messages += step(number, count) if count else [Message("assistant", "So?"), ASK]
    lo = data.draw(st.integers(0, len(messages)))
    hi = data.draw(st.integers(lo, len(messages)))
    shown, first = Skeleton(messages).around(lo, hi)
    pairs = {(a.role, b.role) for a, b in pairwise(messages)}
    assert {(a.role, b.role) for a, b in pairwise(shown)} <= pairs
    assert (first - lo) % 2 == 0
    asked: set[str] = set()
    for message in shown:
        asked |= {call.id for call in message.tool_calls}
        assert message.tool_call_id is None or message.tool_call_id in asked
