"""What clients do to a turn is overlooked; what changes it is not."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvws.chat.message import Message, ToolCall
from kvws.chat.same_turn import is_replay_of


def turn(text: str = "", *inputs: object, reasoning: str = "") -> Message:
    """A turn that calls the tool "Edit" once for every input."""
    calls = tuple(
        ToolCall(f"c{n}", "Edit", given if isinstance(given, str) else json.dumps(given))
        for n, given in enumerate(inputs)
    )
    return Message("assistant", text, calls, reasoning=reasoning)


EDIT = {"old": "x", "new": "y  \nz", "path": "a.py"}

SAME: dict[str, tuple[Message, Message]] = {
    "nothing": (turn("Hm.", EDIT), turn("Hm.", EDIT)),
    "keys in another order": (
        turn("", {"b": 1, "a": {"d": 2, "c": 3}}),
        turn("", {"a": {"c": 3, "d": 2}, "b": 1}),
    ),
    "keys that say nothing are added": (
        turn("", EDIT),
        turn("", {"replace_all": False, **EDIT, "x": None, "y": "", "z": [], "w": {}}),
    ),
    "also deeper down": (
        turn("", {"edits": [{"old": "x"}]}),
        turn("", {"edits": [{"old": "x", "replace_all": False}]}),
    ),
    "blanks at the ends of lines are gone": (
        turn("", {"content": "x  \n\ty\t\r\nz \n"}),
        turn("", {"content": "x\n\ty\r\nz\n"}),
    ),
    "a number was a text": (turn("", {"limit": "10"}), turn("", {"limit": 10})),
    "a text was a number": (turn("", {"limit": 10}), turn("", {"limit": "10"})),
    "a fraction lost its zero": (turn("", {"limit": 10.0}), turn("", {"limit": 10})),
    "a truth value was a text": (turn("", {"all": "true"}), turn("", {"all": True})),
    "blank text is gone": (turn("\n", EDIT), turn("", EDIT)),
    "text is trimmed": (turn("  Hm.\n\n"), turn("Hm.")),
    "text is kept": (turn("  Hm. \n\n", EDIT), turn("  Hm. \n\n", EDIT)),
    "JSON is spaced otherwise": (
        turn("", '{"a":1,"b":"é"}'),
        turn("", '{"b": "\\u00e9", "a": 1}'),
    ),
    "no arguments": (turn("", ""), turn("", "{}")),
    "broken JSON is kept": (turn("", '{"a": '), turn("", '{"a": ')),
    "reasoning is kept": (turn("Hm.", reasoning="Well."), turn("Hm.", reasoning="Well.")),
    "a repeated id is gone": (
        Message("assistant", "", (ToolCall("c1", "Read", "{}"), ToolCall("c1", "Read", "[]"))),
        Message("assistant", "", (ToolCall("c1", "Read", "{}"),)),
    ),
    "ids are not told": (
        turn("", EDIT),
        replace(turn("", EDIT), tool_calls=(ToolCall("", "Edit", json.dumps(EDIT)),)),
    ),
    "reasoning is trimmed": (turn("Hm.", reasoning="Well.\n"), turn("Hm.", reasoning="Well.")),
    "blocks of reasoning were joined otherwise": (
        turn("Hm.", reasoning="Well.So."),
        turn("Hm.", reasoning="Well.\nSo."),
    ),
    "a blank block between two texts is gone": (turn("One.\n\nTwo."), turn("One.Two.")),
}


@pytest.mark.parametrize("what", list(SAME))
def test_is_the_same_although(what: str) -> None:
    assert is_replay_of(*SAME[what])


OTHER: dict[str, tuple[Message, Message]] = {
    "another value": (turn("", {"command": "ls"}), turn("", {"command": "ls -a"})),
    "a longer text": (turn("", {"content": "x"}), turn("", {"content": "x\n"})),
    "blanks within a line": (turn("", {"content": "x  y"}), turn("", {"content": "x y"})),
    "blanks at the beginning of a line": (
        turn("", {"content": "  x"}),
        turn("", {"content": "x"}),
    ),
    "blanks added": (turn("", {"content": "x"}), turn("", {"content": "x "})),
    "a key that says something is added": (
        turn("", EDIT),
        turn("", {**EDIT, "replace_all": True}),
    ),
    "zero is added": (turn("", EDIT), turn("", {**EDIT, "offset": 0})),
    "a key is gone": (turn("", EDIT), turn("", {"old": "x", "new": "y\nz"})),
    "even one that says nothing": (turn("", {"a": 1, "b": ""}), turn("", {"a": 1})),
    "another number": (turn("", {"limit": "10"}), turn("", {"limit": 11})),
    "one is not true": (turn("", {"all": 1}), turn("", {"all": True})),
    "nor is its text": (turn("", {"all": "1"}), turn("", {"all": True})),
    "zero is not false": (turn("", {"all": 0}), turn("", {"all": False})),
    "null is not its name": (turn("", {"all": None}), turn("", {"all": "null"})),
    "a list in another order": (turn("", {"a": [1, 2]}), turn("", {"a": [2, 1]})),
    "a shorter list": (turn("", {"a": [1, 2]}), turn("", {"a": [1]})),
    "another text": (turn("Hm."), turn("Hm!")),
    "text is gone": (turn("Hm.", EDIT), turn("", EDIT)),
    "a call is gone": (turn("Hm.", EDIT, EDIT), turn("Hm.", EDIT)),
    "a call is added": (turn("Hm."), turn("Hm.", EDIT)),
    "calls in another order": (
        turn("", {"a": 1}, {"a": 2}),
        replace(turn(), tool_calls=turn("", {"a": 1}, {"a": 2}).tool_calls[::-1]),
    ),
    "another tool": (
        turn("", EDIT),
        replace(turn(), tool_calls=(ToolCall("c0", "Write", json.dumps(EDIT)),)),
    ),
    "another id": (
        turn("", EDIT),
        replace(turn(), tool_calls=(ToolCall("c9", "Edit", json.dumps(EDIT)),)),
    ),
    "reasoning is gone": (turn("Hm.", reasoning="Well."), turn("Hm.")),
    "reasoning is added": (turn("Hm."), turn("Hm.", reasoning="Well.")),
    "reasoning is another": (turn("Hm.", reasoning="Well."), turn("Hm.", reasoning="Bad.")),
    "broken JSON was mended": (turn("", '{"a": 1'), turn("", '{"a": 1}')),
    "another role": (turn("Hm."), replace(turn("Hm."), role="user")),
    "too deep to compare": (turn("", "[" * 100_000), turn("", "[" * 100_001)),
}


@pytest.mark.parametrize("what", list(OTHER))
def test_is_another_one_if(what: str) -> None:
    assert not is_replay_of(*OTHER[what])


LEAVES = st.one_of(
    st.text(max_size=6), st.integers(-99, 99), st.booleans(), st.none(), st.floats(-9, 9)
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
INPUTS = st.dictionaries(st.text(max_size=3), VALUES, max_size=4)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict):
        return [p for key, inner in value.items() for p in leaves(inner, (*path, key))]
    if isinstance(value, list):
        return [p for n, inner in enumerate(value) for p in leaves(inner, (*path, n))]
    return [path]


def changed(value: Any, path: tuple[Any, ...], leaf: Any) -> Any:
    if not path:
        return leaf
    copied = dict(value) if isinstance(value, dict) else list(value)
    copied[path[0]] = changed(value[path[0]], path[1:], leaf)
    return copied


def shown(leaf: Any) -> str:
    """What a client may make of it is one and the same text."""
    text = leaf if isinstance(leaf, str) else json.dumps(leaf)
    if not isinstance(leaf, bool):
        with suppress(ValueError):
            text = str(float(text))
    return "\n".join(line.rstrip() for line in text.splitlines())


def shuffled(value: Any, draw: Any) -> Any:
    if isinstance(value, dict):
        return {key: shuffled(value[key], draw) for key in draw(st.permutations(list(value)))}
    return [shuffled(inner, draw) for inner in value] if isinstance(value, list) else value


@given(INPUTS, st.data())
def test_keys_may_come_in_any_order(value: dict[str, Any], data: st.DataObject) -> None:
    assert is_replay_of(turn("", value), turn("", shuffled(value, data.draw)))


@given(INPUTS, st.data())
def test_a_change_of_any_value_is_seen(value: dict[str, Any], data: st.DataObject) -> None:
    paths = leaves(value)
    assume(paths)
    path = data.draw(st.sampled_from(paths))
    leaf = value
    for step in path:
        leaf = leaf[step]
    other = data.draw(LEAVES)
    assume(shown(other) != shown(leaf))
    assert not is_replay_of(turn("", value), turn("", changed(value, path, other)))


@given(st.text(), st.text())
def test_a_change_of_text_is_seen(text: str, other: str) -> None:
    assert is_replay_of(turn(text), turn(other)) == (text.strip() == other.strip())


def read_blocks(blocks: list[dict[str, Any]]) -> Message:
    def joined(kind: str) -> str:
        return "".join(block[kind] for block in blocks if block["type"] == kind)

    calls = tuple(
        ToolCall("", block["name"], json.dumps(block["input"]))
        for block in blocks
        if block["type"] == "tool_use"
    )
    return Message("assistant", joined("text"), calls, reasoning=joined("thinking"))


def test_all_turns_that_a_client_was_seen_to_rewrite() -> None:
    beside_repository = Path(__file__).resolve().parents[3] / "shared" / "harness"
    file = Path(os.environ.get("KVWS_HARNESS") or beside_repository) / "norm_pairs.json"
    if not file.is_file():
        pytest.skip("no recorded traffic: set KVWS_HARNESS to its folder")
    pairs = json.loads(file.read_text())
    turns = [
        (read_blocks(pair["as_generated"]), read_blocks(pair["as_replayed"])) for pair in pairs
    ]
    assert len(turns) >= 7
    for number, (generated, replayed) in enumerate(turns):
        assert is_replay_of(generated, replayed), number
        assert not any(is_replay_of(generated, other) for _, other in turns[:number])
