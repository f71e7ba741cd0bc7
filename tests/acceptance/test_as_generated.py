"""The assistant's turns come back respelled; the model goes on behind what it generated.

Each pair is what a model said and what its client sends back as that turn. The next step computes
its new tokens only, and the thread holds the very tokens that were generated.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.agent import Agent, calling_raw
from tests.acceptance.front import Front
from tests.acceptance.wire import Answer

RESULT = "It went well. " * 40
"""Long enough for every token before it to lie in a full block."""


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def use(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "name": name, "input": arguments}


PAIRS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "verbatim": (
        [text("I look."), use("Read", file_path="/repo/a.py")],
        [text("I look."), use("Read", file_path="/repo/a.py")],
    ),
    "blanks around a text": (
        [text("  I look around first. \n\n"), use("Bash", command="ls  ")],
        [text("I look around first."), use("Bash", command="ls  ")],
    ),
    "a blank text is gone": (
        [text(" \n"), use("Bash", command="ls", description="List")],
        [use("Bash", command="ls", description="List")],
    ),
    "keys in the order of the schema": (
        [use("Bash", timeout=5000, description="List", command="ls -la")],
        [use("Bash", command="ls -la", description="List", timeout=5000)],
    ),
    "a key that was not there": (
        [use("Edit", old_string="beta", new_string="BETA", file_path="/repo/a.py")],
        [
            use(
                "Edit",
                replace_all=False,
                file_path="/repo/a.py",
                old_string="beta",
                new_string="BETA",
            )
        ],
    ),
    "blanks at the ends of lines": (
        [use("Write", content="def f():  \n    return 1\t\n\n", file_path="/repo/a.py")],
        [use("Write", file_path="/repo/a.py", content="def f():\n    return 1\n\n")],
    ),
    "numbers for texts": (
        [use("Read", file_path="/repo/a.py", offset="10", limit="20")],
        [use("Read", file_path="/repo/a.py", offset=10, limit=20)],
    ),
    "texts for numbers": (
        [use("Read", file_path="/repo/a.py", offset=10, limit=20)],
        [use("Read", file_path="/repo/a.py", offset="10", limit="20")],
    ),
    "truth values for texts": (
        [use("Edit", file_path="a", old_string="b", new_string="c", replace_all="true")],
        [use("Edit", file_path="a", old_string="b", new_string="c", replace_all=True)],
    ),
    "letters beyond ASCII": (
        [text("Ich schaue — 見る."), use("Bash", command='echo "café \u2028 🦀"')],
        [text("Ich schaue — 見る."), use("Bash", command='echo "café \u2028 🦀"')],
    ),
    "two calls, one of them respelled": (
        [use("Read", file_path="/repo/a.py"), use("Read", limit="5", file_path="/repo/b.py")],
        [use("Read", file_path="/repo/a.py"), use("Read", file_path="/repo/b.py", limit=5)],
    ),
    "a nested argument": (
        [use("TaskCreate", subject="s", description={"b": [1, "2 "], "a": {"d": 1, "c": None}})],
        [use("TaskCreate", subject="s", description={"a": {"c": None, "d": 1}, "b": [1, "2 "]})],
    ),
}


def generated(turn: Sequence[dict[str, Any]]) -> str:
    """As a model writes it, in a spelling that is not the template's."""
    texts = [block["text"] for block in turn if block["type"] == "text"]
    calls = [
        calling_raw(block["name"], json.dumps(block["input"], separators=(" , ", " : ")))
        for block in turn
        if block["type"] == "tool_use"
    ]
    return "".join(texts) + "\n" + "\n".join(calls)


def with_ids(turn: Sequence[dict[str, Any]], answer: Answer) -> list[dict[str, Any]]:
    ids = iter(answer.call_ids)
    return [
        {**block, "id": next(ids)} if block["type"] == "tool_use" else dict(block)
        for block in turn
    ]


def replay(front: Front, written: str, replayed: Sequence[dict[str, Any]]) -> tuple[Agent, Any]:
    """An agent that was answered, and sent the answer back in its own words."""
    agent = Agent(front)
    first = agent.ask("Do it.", written)
    agent.messages[-1] = {"role": "assistant", "content": with_ids(replayed, first.answer)}
    done = [
        {"type": "tool_result", "tool_use_id": call_id, "content": RESULT}
        for call_id in reversed(first.answer.call_ids)  # they come in the order of completion
    ]
    return agent, agent.ask(done or RESULT, "Good.")


def holds(tokens: Sequence[int], part: Sequence[int]) -> bool:
    return any(list(tokens[n : n + len(part)]) == list(part) for n in range(len(tokens)))


def assert_is_kept(front: Front, written: str, replayed: Sequence[dict[str, Any]]) -> None:
    agent, heard = replay(front, written, replayed)
    heard.assert_only_new_was_computed()
    assert holds(agent.logged_tokens(), front.tokens(written)), "told in other tokens"


@pytest.mark.parametrize("name", PAIRS)
def test_a_turn_that_comes_back_respelled_keeps_its_tokens(front: Front, name: str) -> None:
    turn, replayed = PAIRS[name]
    assert_is_kept(front, generated(turn), replayed)


def test_every_recorded_pair_keeps_its_tokens(front: Front, harness: Path) -> None:
    pairs = json.loads((harness / "norm_pairs.json").read_text())
    assert len(pairs) >= 7
    for pair in pairs:
        said = [block for block in pair["as_generated"] if block["type"] != "thinking"]
        back = [block for block in pair["as_replayed"] if block["type"] != "thinking"]
        assert_is_kept(front, generated(said), back)


def test_a_turn_that_means_something_else_is_told_as_the_client_tells_it(front: Front) -> None:
    written = generated([use("Bash", command="rm -r build", description="Clean")])
    agent, _ = replay(front, written, [use("Bash", command="ls build", description="Clean")])
    assert not holds(agent.logged_tokens(), front.tokens(written))
    assert "ls build" in front.text(agent.logged_tokens())
    assert "rm -r build" not in front.text(agent.logged_tokens())


def test_arguments_that_are_no_json_come_back_as_the_model_wrote_them(front: Front) -> None:
    agent = Agent(front)
    written = "I try.\n" + calling_raw("Bash", '{"command": "ls')
    first = agent.ask("Do it.", written)
    (use_block,) = [b for b in first.answer.turn[0]["content"] if b["type"] == "tool_use"]
    assert "__unparsedToolInput" in use_block["input"]
    refused = {"type": "tool_result", "tool_use_id": use_block["id"], "content": RESULT}
    agent.ask([{**refused, "is_error": True}], "Sorry.").assert_only_new_was_computed()
    assert holds(agent.logged_tokens(), front.tokens(written))


def test_a_repeated_id_is_dropped_and_the_turn_is_kept(front: Front) -> None:
    agent = Agent(front)
    written = generated(PAIRS["two calls, one of them respelled"][0])
    first = agent.ask("Do it.", written)
    content = agent.messages[-1]["content"]
    agent.messages[-1] = {"role": "assistant", "content": [*content, content[-1]]}
    done = [
        {"type": "tool_result", "tool_use_id": each, "content": RESULT}
        for each in first.answer.call_ids
    ]
    agent.ask(done, "Good.").assert_only_new_was_computed()
    assert holds(agent.logged_tokens(), front.tokens(written))
