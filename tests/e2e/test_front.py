"""The scripted server itself, without any client: what the other tests here rest on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvws.chat.answer import Usage
from kvws.chat.call import ModelCall
from kvws.chat.message import Message
from tests.e2e import scripts
from tests.e2e.front import Answered, Front, ScriptedTongue, running_front
from tests.e2e.scripts import Turn
from tests.e2e.test_clients import assert_each_step_computes_only_what_is_new

TOOLS = [
    {"name": name, "input_schema": {"type": "object", "properties": {}}}
    for name in ("Bash", "Read", "Edit")
]


def ask(front: Front, messages: list[dict[str, Any]]) -> dict[str, Any]:
    system = " ".join(f"Rule {number} is like the others." for number in range(300))
    body = {"system": system, "messages": messages, "tools": TOOLS, "max_tokens": 1000}
    headers = {"authorization": f"Bearer {front.address.token}", "x-session-id": "one"}
    reply = httpx.post(f"{front.address.base_url}/v1/messages", json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_the_scripted_server_says_its_script_and_computes_only_what_is_new(
    tmp_path: Path, smollm2: Path
) -> None:
    script = scripts.claude_code(tmp_path)
    with running_front(script, smollm2) as front:
        messages: list[dict[str, Any]] = [{"role": "user", "content": scripts.TASK}]
        for turn in script.turns:
            content = ask(front, messages)["content"]
            said = "".join(block["text"] for block in content if block["type"] == "text")
            uses = [block for block in content if block["type"] == "tool_use"]
            assert said.rstrip() == turn.text
            assert [(use["name"], use["input"]) for use in uses] == list(turn.calls)
            results = [
                {"type": "tool_result", "tool_use_id": use["id"], "content": "as expected"}
                for use in uses
            ]
            messages += [{"role": "assistant", "content": content}]
            messages += [{"role": "user", "content": results}]
        assert front.replies == [("POST", "/v1/messages", 200)] * len(script.turns)
        assert_each_step_computes_only_what_is_new(front.turns)


def answered(prompt_tokens: int, reused_tokens: int) -> Answered:
    usage = Usage(prompt_tokens, reused_tokens)
    return Answered("s", "main", is_aside=False, is_streamed=False, usage=usage)


def test_the_check_of_reuse_notices_a_prompt_that_is_computed_again() -> None:
    first = answered(20_000, 0)
    assert_each_step_computes_only_what_is_new([first, answered(20_300, 19_950)])
    with pytest.raises(AssertionError):
        assert_each_step_computes_only_what_is_new([first, answered(20_300, 19_000)])


def test_a_script_goes_on_where_the_prompt_ends() -> None:
    """An answer may take several requests, and a request may be made twice."""
    tongue, script = ScriptedTongue(end=0), (11, 12, 11, 13)

    def said(rid: str, prompt: list[int], count: int) -> list[int]:
        request: Any = Request(rid, prompt, {"script": script})
        return [tongue(request) for _ in range(count)]

    assert said("1.probe", [7, 8, 9], 2) == [11, 12]
    assert said("1.answer", [7, 8, 9], 2) == [11, 12]
    assert said("2.answer", [7, 8, 9, 11, 12], 3) == [11, 13, 0]


class Request:
    def __init__(self, rid: str, token_ids: list[int], sampling: dict[str, Any]) -> None:
        self.rid, self.token_ids, self.sampling = rid, token_ids, sampling


def call_of(results: int, *tools: str) -> ModelCall:
    history = [Message("user", "Do it"), *(Message("tool", "ok") for _ in range(results))]
    return ModelCall("any", tuple(history), tuple({"function": {"name": name}} for name in tools))


def test_a_script_answers_by_tool_results_and_refuses_what_it_does_not_know() -> None:
    script = scripts.claude_code(Path("/repo"))
    names = ("Bash", "Read", "Edit")
    assert script.next_turn(call_of(0, *names)) == script.turns[0]
    assert script.next_turn(call_of(3, *names)) == script.turns[2]
    assert script.next_turn(call_of(0)).text == scripts.TITLE
    for call in (call_of(2, *names), call_of(9, *names), call_of(1, "Bash")):
        with pytest.raises(AssertionError):
            script.next_turn(call)


def test_a_turn_is_written_as_the_model_writes_it() -> None:
    turn = Turn("Look.", (("Bash", {"command": "ls"}),))
    text, _, block = turn.generated.partition("\n")
    assert text == "Look."
    inside = block.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
    assert json.loads(inside) == {"name": "Bash", "arguments": {"command": "ls"}}
