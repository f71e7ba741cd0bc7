"""What clients change from request to request without meaning it: 99 % of the prompt is reused.

Billing headers, dates, cache marks. A first request is as long as Claude Code's, and what changes
stands before most of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anthropic
import pytest

from tests.acceptance.agent import HEADER, TOOLS, Agent, results
from tests.acceptance.front import Front
from tests.e2e.front import KEY

MANUAL = "\n".join(f"Section {n}: describe what you change before you do." for n in range(700))
REMINDER = (
    "<system-reminder>\nContents of /repo/CLAUDE.md (project instructions):\n\nUse tabs.\n\n"
    "Today's date is {date}.\n</system-reminder>"
)


def body(
    *,
    version: str = "a1b",
    cch: str = "00001",
    date: str = "2026-11-29",
    marks: bool = True,
    as_text: bool = False,
) -> dict[str, Any]:
    """A first request of Claude Code."""
    mark = {"cache_control": {"type": "ephemeral"}} if marks else {}
    inline: Any = f"Today's date is {date}.\nThe working folder is /repo."
    return {
        "model": "kvws",
        "max_tokens": 1000,
        "system": [
            {"type": "text", "text": HEADER.format(version, cch)},
            {"type": "text", "text": "You are a coding agent.", **mark},
            {"type": "text", "text": MANUAL, **mark},
        ],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": REMINDER.format(date=date)},
                    {"type": "text", "text": MANUAL.replace("Section", "Chapter")},
                    {"type": "text", "text": "Find the fault.", **mark},
                ],
            },
            {
                "role": "system",
                "content": inline if as_text else [{"type": "text", "text": inline}],
            },
        ],
        "tools": [
            {**tool, **mark} if n + 1 == len(TOOLS) else tool for n, tool in enumerate(TOOLS)
        ],
    }


CHANGES: dict[str, Callable[[], dict[str, Any]]] = {
    "header": lambda: body(version="f9e", cch="5d2c7"),
    "date": lambda: body(date="2026-11-30"),
    "cache_control": lambda: body(marks=False),
    "everything": lambda: body(
        version="c0d", cch="77777", date="2026-12-01", marks=False, as_text=True
    ),
}


def call(front: Front, content: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """The usage that a client is told, and what the engine computed."""
    before = front.engine.prefilled_tokens
    reply = front.post("/v1/messages", content, session=SESSION)
    assert reply.status_code == 200, reply.text
    return reply.json()["usage"], front.engine.prefilled_tokens - before


def prompt_tokens(usage: dict[str, Any]) -> int:
    members = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    return sum(usage[member] for member in members)


SESSION = "volatile"


@pytest.fixture(scope="module")
def known(front: Front) -> dict[str, Any]:
    """The usage of the session's first request."""
    usage, _ = call(front, body())
    assert usage["cache_read_input_tokens"] == 0
    assert prompt_tokens(usage) > 19_000
    return usage


@pytest.mark.parametrize("what", CHANGES)
def test_a_request_that_differs_in_volatile_text_only_reuses_99_percent(
    front: Front, known: dict[str, Any], what: str
) -> None:
    again, prefilled = call(front, CHANGES[what]())
    assert again["cache_read_input_tokens"] >= 0.99 * prompt_tokens(again)
    assert prefilled <= 0.01 * prompt_tokens(again)
    assert prompt_tokens(again) - prompt_tokens(known) < 100


def test_a_new_date_is_told_to_the_model_where_it_does_not_cost_the_prompt(
    front: Front, known: dict[str, Any]
) -> None:
    call(front, body(date="2026-12-24"))
    assert "2026-12-24" in front.text(front.engine.requests[-1].token_ids)


def test_a_request_that_differs_in_a_word_of_its_own_does_not_reuse_what_follows_it(
    front: Front, known: dict[str, Any]
) -> None:
    other = body()
    other["system"][1]["text"] = "You are a careful agent."
    again, _ = call(front, other)
    assert again["cache_read_input_tokens"] < 0.01 * prompt_tokens(again)


def test_the_anthropic_client_is_told_what_was_reused(front: Front) -> None:
    client = anthropic.Anthropic(
        base_url=front.base_url, auth_token=KEY, default_headers={"x-session-id": SESSION}
    )
    front.script.saying = 'I look.\n<tool_call>\n{"name": "Bash", "arguments": {"command": "ls"}}'
    front.script.saying += "\n</tool_call>"
    first = client.messages.create(**body())
    assert first.stop_reason == "tool_use"
    (said, use) = first.content
    assert said.type == "text" and said.text.strip() == "I look."
    assert use.type == "tool_use" and use.input == {"command": "ls"}
    front.script.saying = "All is well."
    following = body(cch="00002", date="2026-11-30")
    following["messages"] += [
        {"role": "assistant", "content": [block.model_dump() for block in first.content]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "a.py\nb.py"}],
        },
    ]
    with client.messages.stream(**following) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == "All is well." and final.stop_reason == "end_turn"
    usage = final.usage.model_dump()
    assert usage["cache_read_input_tokens"] >= 0.99 * prompt_tokens(usage)


def test_dates_of_every_step_of_a_loop_cost_nothing_before_them(front: Front) -> None:
    """The date of a known message changes at midnight, in the middle of a session."""
    agent = Agent(front)
    call_ls = '<tool_call>\n{"name": "Bash", "arguments": {"command": "ls"}}\n</tool_call>'
    heard = agent.ask(f"{REMINDER.format(date='2026-11-29')}\nFind the fault.", call_ls)
    for day in ("2026-11-29", "2026-11-30", "2026-11-30", "2026-12-01"):
        agent.messages[0]["content"] = f"{REMINDER.format(date=day)}\nFind the fault."
        heard = agent.ask(results(heard.answer, "a.py\nb.py\nc.py"), call_ls)
        heard.assert_only_new_was_computed()
