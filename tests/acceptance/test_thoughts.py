"""A model that thinks before it speaks, and clients that keep its thoughts, or do not."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.acceptance.agent import OPEN_TOKENS, Agent, calling, results
from tests.acceptance.front import Front
from tests.acceptance.wire import CHAT, read_answer

THOUGHT = "The fault must be in the parser, because the lexer was checked yesterday."
RESULT = "It went well. " * 40


def thinking(said: str, thought: str = THOUGHT) -> str:
    return f"<think>\n{thought}\n</think>\n\n{said}"


def test_thoughts_that_come_back_verbatim_cost_nothing(thinking_front: Front) -> None:
    agent = Agent(thinking_front)
    heard = agent.ask("Do it.", thinking(calling("Bash", command="ls")))
    kinds = [block["type"] for block in heard.answer.turn[0]["content"]]
    assert kinds == ["thinking", "tool_use"]
    assert heard.answered.usage.reasoning_tokens > 10
    for _ in range(3):
        said = thinking("I see.\n" + calling("Bash", command="ls"))
        heard = agent.ask(results(heard.answer, RESULT), said)
        heard.assert_only_new_was_computed()
    assert THOUGHT in thinking_front.text(agent.logged_tokens())


def unsigned(block: dict[str, Any]) -> dict[str, Any]:
    return {**block, "signature": ""}


def with_redacted(block: dict[str, Any]) -> list[dict[str, Any]]:
    return [block, {"type": "redacted_thinking", "data": "x" * 200}]


def test_thoughts_without_a_signature_or_beside_redacted_ones_cost_nothing(
    thinking_front: Front,
) -> None:
    for change in (lambda block: [unsigned(block)], with_redacted):
        agent = Agent(thinking_front)
        heard = agent.ask("Do it.", thinking(calling("Bash", command="ls")))
        thought, use = agent.messages[-1]["content"]
        agent.messages[-1]["content"] = [*change(thought), use]
        heard = agent.ask(results(heard.answer, RESULT), thinking("Good."))
        heard.assert_only_new_was_computed()


def test_a_blank_thought_that_the_client_drops_costs_nothing(thinking_front: Front) -> None:
    agent = Agent(thinking_front)
    heard = agent.ask("Do it.", thinking(calling("Bash", command="ls"), thought=""))
    content = agent.messages[-1]["content"]
    agent.messages[-1]["content"] = [block for block in content if block["type"] != "thinking"]
    heard = agent.ask(results(heard.answer, RESULT), thinking("Good."))
    heard.assert_only_new_was_computed()


@pytest.mark.parametrize("keeps_reasoning", [True, False])
def test_thoughts_that_a_chat_client_drops_cost_their_own_turn_only(
    thinking_front: Front, keeps_reasoning: bool
) -> None:
    """OpenHands drops `reasoning_content`; opencode sends it back."""
    front, session = thinking_front, f"reasoning-{keeps_reasoning}"
    messages: list[Any] = [
        {"role": "system", "content": "You are a careful engineer. " * 100},
        {"role": "user", "content": "Find the fault."},
    ]
    before = None
    for step in range(3):
        front.script.saying = thinking(f"I look at {step}. " * 10)
        count = len(front.answered_of(session))
        reply = front.post(CHAT, {"model": "kvws", "messages": messages}, session=session)
        usage = front.told(partial(front.answered_of, session), count + 1)[-1].usage
        (turn,) = read_answer(CHAT, reply).turn
        assert turn["reasoning_content"].strip() == THOUGHT
        if not keeps_reasoning:
            del turn["reasoning_content"]
        messages += [turn, {"role": "user", "content": "And then? " * 20}]
        if before is not None:
            new = usage.prompt_tokens - before.prompt_tokens
            new -= before.answer_tokens if keeps_reasoning else 0
            assert usage.prompt_tokens - usage.reused_tokens <= new + OPEN_TOKENS
        before = usage
