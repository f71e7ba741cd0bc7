"""A list most of which was read before reads as if it were seen for the first time."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvws.chat.call import ModelCall
from kvws.errors import BadRequest
from kvws.http.dialect import Dialect
from kvws.http.recollection import Recollection, reads_alike
from tests.http.message_lists import DIALECTS, ENTRIES, TWINS, body_of, edits

NAMES = sorted(DIALECTS)


def outcome(dialect: Dialect, entries: list[Any], recollection: Recollection | None = None) -> str:
    """All that a caller sees of a reading, with the type of every value."""
    try:
        return repr(dialect.read(body_of(dialect.name, entries), recollection))
    except BadRequest as refused:
        return f"{refused} ({refused.hint})"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_any_request_reads_the_same_with_the_memory_of_any_before_it(
    name: str, data: st.DataObject
) -> None:
    dialect = DIALECTS[name]
    entries: list[Any] = data.draw(st.lists(ENTRIES[name], max_size=6))
    recollections = [Recollection()]
    for edit in data.draw(st.lists(edits(name), max_size=6)):
        known = data.draw(st.sampled_from(recollections))
        recollection = Recollection(known.entries)
        assert outcome(dialect, entries, recollection) == outcome(dialect, entries)
        recollections.append(recollection)
        entries = edit(entries)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_what_comes_again_becomes_the_same_messages(name: str, data: st.DataObject) -> None:
    entries: list[Any] = data.draw(st.lists(ENTRIES[name], max_size=6))
    recollection = Recollection()
    first = _read(DIALECTS[name], [user("go"), *entries, user("and")], recollection)
    again = _read(DIALECTS[name], [user("go"), *entries, user("and"), user("on")], recollection)
    if first is None or again is None or not all(reads_alike(each, each) for each in entries):
        return
    assert len(again.messages) == len(first.messages) + 1
    assert all(_same(first, again))


def _read(dialect: Dialect, entries: list[Any], recollection: Recollection) -> ModelCall | None:
    try:
        return dialect.read(body_of(dialect.name, entries), recollection)
    except BadRequest:
        return None


@pytest.mark.parametrize("name", NAMES)
def test_only_what_differs_and_what_follows_it_is_read_again(name: str) -> None:
    recollection = Recollection()
    texts = ["a", "b", "c", "d"]
    first = _read(DIALECTS[name], [user(text) for text in texts], recollection)
    texts[2] = "x"
    again = _read(DIALECTS[name], [user(text) for text in texts], recollection)
    last = _read(DIALECTS[name], [user(text) for text in texts], recollection)
    assert first is not None and again is not None and last is not None
    assert _same(first, again) == [True, True, False, False]
    assert _same(again, last) == [True, True, True, True]


def _same(call: ModelCall, other: ModelCall) -> list[bool]:
    """Of each message of two calls: whether it is one object."""
    pairs = zip(call.messages, other.messages, strict=False)
    return [one is another for one, another in pairs]


@pytest.mark.parametrize("name", NAMES)
def test_after_a_refused_request_the_list_before_it_is_still_known(name: str) -> None:
    broken = {"role": "assistant", "tool_calls": 7, "content": 7}
    recollection = Recollection()
    DIALECTS[name].read(body_of(name, [user("a"), user("b")]), recollection)
    known = recollection.entries
    body = {**body_of(name, [user("a"), broken]), "tools": 7, "tool_choice": 7}
    if name == "responses":  # refuses no item
        body["model"] = 7
    with pytest.raises(BadRequest):
        DIALECTS[name].read(body, recollection)
    assert recollection.entries is known and len(known) == 2


def test_a_turn_of_several_items_goes_on_as_if_it_were_read_at_once() -> None:
    items: list[Any] = [
        user("go"),
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c1", "name": "Bash", "arguments": "{}"},
    ]
    recollection = Recollection()
    dialect = DIALECTS["responses"]
    dialect.read(body_of("responses", items), recollection)
    items += [
        {"type": "function_call", "call_id": "c2", "name": "Read", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "ok"},
    ]
    call = dialect.read(body_of("responses", items), recollection)
    assert [message.role for message in call.messages] == ["user", "assistant", "tool"]
    assert [each.name for each in call.messages[1].tool_calls] == ["Bash", "Read"]
    assert call.messages[2].name == "Bash"


@pytest.mark.parametrize("instructions", [None, "Be brief.", [user("first")]])
def test_input_reads_the_same_behind_other_instructions(instructions: Any) -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "Bash", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c1", "output": "ok"}
    dialect = DIALECTS["responses"]
    behind_a_call = {"model": "m", "instructions": [user("go"), call], "input": [output]}
    recollection = Recollection()
    dialect.read(behind_a_call, recollection)
    other = {"model": "m", "instructions": instructions, "input": [output]}
    assert repr(dialect.read(other, recollection)) == repr(dialect.read(other))
    assert repr(dialect.read(behind_a_call, recollection)) == repr(dialect.read(behind_a_call))


@pytest.mark.parametrize("twins", TWINS)
def test_values_that_only_look_alike_are_told_apart(twins: tuple[Any, ...]) -> None:
    for one in twins:
        for other in twins:
            assert reads_alike({"x": [one]}, {"x": [other]}) is (repr(one) == repr(other))


def test_objects_whose_keys_come_in_another_order_are_told_apart() -> None:
    assert reads_alike({"a": "1", "b": "2"}, {"a": "1", "b": "2"})
    assert not reads_alike({"a": "1", "b": "2"}, {"b": "2", "a": "1"})


@pytest.mark.parametrize("value", ["a\ud800", 1 << 64])
def test_what_json_cannot_spell_is_read_again(value: object) -> None:
    assert not reads_alike([value], [value])


def test_deep_values_are_read_again_rather_than_refused() -> None:
    deep: Any = "x"
    for _ in range(500):
        deep = [deep]
    assert not reads_alike(deep, deep)
