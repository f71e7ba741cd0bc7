"""A loop of two hundred steps that outgrows the budget ten times over.

With the `openai` package's client, and one to three tool calls in a step.
"""

from __future__ import annotations

import random
from typing import Any

import openai

from kvws.blocks.key import BLOCK_TOKENS
from tests.acceptance.agent import OPEN_TOKENS, TOOLS, calling
from tests.acceptance.front import LIMITS, Front
from tests.acceptance.topics import (
    DETAIL,
    QUESTION,
    assert_topics_are_apart,
    detail_words_in,
    filler,
)
from tests.e2e.front import KEY

STEPS = 200
SYSTEM = "You are a careful engineer. Read before you write."
FUNCTIONS = [
    {
        "type": "function",
        "function": {"name": each["name"], "parameters": each["input_schema"]},
    }
    for each in TOOLS
]


class Loop:
    """The client's side: its history, as it would keep it."""

    def __init__(self, front: Front, session: str) -> None:
        self.front = front
        self.session = session
        self.client = openai.OpenAI(
            base_url=f"{front.base_url}/v1",
            api_key=KEY,
            max_retries=0,
            default_headers={"x-session-id": session},
        )
        self.messages: list[Any] = [{"role": "system", "content": SYSTEM}]
        self.before: Any = None

    def ask(self, saying: str) -> tuple[Any, int, int]:
        """The answer, the tokens that were new, and those that were computed."""
        self.front.script.saying = saying
        reply = self.client.chat.completions.create(
            model="kvws", messages=self.messages, tools=FUNCTIONS, max_tokens=400
        )
        usage = reply.usage
        assert usage is not None and usage.prompt_tokens_details is not None
        computed = usage.prompt_tokens - (usage.prompt_tokens_details.cached_tokens or 0)
        new = usage.prompt_tokens
        if self.before is not None:
            new -= self.before.prompt_tokens + self.before.completion_tokens
        self.before = usage
        message = reply.choices[0].message
        self.messages.append(message.model_dump(exclude_none=True))
        return message, new, computed


def test_two_hundred_steps_at_ten_times_the_budget(front: Front) -> None:
    assert_topics_are_apart(front)
    rng = random.Random(7)
    loop = Loop(front, "long-loop")
    loop.messages.append({"role": "user", "content": "Find what fails in the tree, and why."})
    newest = ""
    for step in range(STEPS):
        count = 3 if step % 16 == 1 else 2 if step % 8 == 2 else 1
        calls = [calling("Read", file_path=f"{step}.{n}") for n in range(count)]
        saying = "\n".join([f"Step {step}."] * (step % 2) + calls)
        message, new, computed = loop.ask(saying)
        assert len(message.tool_calls) == len(calls)
        if step:
            assert computed <= new + OPEN_TOKENS, f"step {step}"
            assert newest in front.text(front.engine.requests[-1].token_ids), f"step {step}"
            view = front.workspace(loop.session).thread("main").view
            assert len(view) * BLOCK_TOKENS <= LIMITS.context_tokens
        for number, call in enumerate(message.tool_calls):
            newest = f"end of {step}, {number}"
            text = DETAIL if step == 0 else filler(rng.randrange(2, 24), step)
            loop.messages.append(
                {"role": "tool", "tool_call_id": call.id, "content": f"{text} {newest}"}
            )
    loop.messages.append({"role": "user", "content": filler(2 * LIMITS.query_tokens)})
    loop.ask("So far nothing.")
    workspace = front.workspace(loop.session)
    assert BLOCK_TOKENS * len(workspace.thread("main").line) >= 10 * LIMITS.budget_tokens
    assert not detail_words_in(front.view_text(loop.session)), "not asked for yet"

    loop.messages.append({"role": "user", "content": QUESTION})
    _, new, computed = loop.ask("The oldest of them.")
    assert computed <= new + OPEN_TOKENS
    # Two blocks of it at least: its first and last lie across the ends of blocks.
    assert detail_words_in(front.view_text(loop.session)) >= 2 * BLOCK_TOKENS
