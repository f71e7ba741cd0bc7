"""A client that replaces its history by a summary: what was summarised away is still recalled."""

from __future__ import annotations

from tests.acceptance.agent import Agent, calling, results
from tests.acceptance.front import LIMITS, Front
from tests.acceptance.topics import (
    DETAIL,
    QUESTION,
    assert_topics_are_apart,
    detail_words_in,
    filler,
)

ASK_FOR_SUMMARY = (
    "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools.\n\nSummarise the conversation."
)
CONTINUED = (
    "This session is being continued from a previous conversation that ran out of context.\n"
    "Summary: we read files and found nothing."
)


def working_agent(front: Front) -> Agent:
    """An agent with some steps behind it, the detail in the first of them."""
    agent = Agent(front)
    heard = agent.ask("Find the fault.", calling("Read", file_path="0.py"))
    for step in range(12):
        text = DETAIL if step == 0 else filler(100, step)
        saying = calling("Read", file_path=f"{step}.py")
        heard = agent.ask(results(heard.answer, text), saying)
        heard.assert_only_new_was_computed()
    agent.ask(results(heard.answer, filler(2 * LIMITS.query_tokens)), "Nothing so far.")
    return agent


def compact(agent: Agent, *, kept_messages: int) -> None:
    """As Claude Code does it: ask for a summary behind the history, then go on with it."""
    history = agent.messages
    agent.messages = [*history, {"role": "user", "content": ASK_FOR_SUMMARY}]
    agent.front.script.saying = "<summary>We read files.</summary>"
    summary = agent.call()
    assert summary.answered.is_aside
    prompt = summary.answered.usage.prompt_tokens
    assert summary.computed_tokens <= prompt / 20, "a summary begins with the conversation"
    kept = history[len(history) - kept_messages :] if kept_messages else []
    agent.messages = [{"role": "user", "content": CONTINUED}, *kept]
    if kept:
        assert kept[0]["role"] == "assistant"


def test_a_detail_that_was_summarised_away_is_recalled(front: Front) -> None:
    assert_topics_are_apart(front)
    for kept_messages in (0, 3):
        agent = working_agent(front)
        blocks = front.workspace(agent.session).registered_blocks
        compact(agent, kept_messages=kept_messages)
        assert not any(DETAIL in str(message) for message in agent.messages)
        first = agent.ask(filler(2 * LIMITS.query_tokens, 3), "I go on.")
        assert not detail_words_in(front.view_text(agent.session)), "not asked for yet"
        rules = front.tokens(agent.system)
        assert first.answered.usage.reused_tokens >= len(rules), "system prompt and tools stay"
        agent.ask(QUESTION, "That one.").assert_only_new_was_computed()
        assert detail_words_in(front.view_text(agent.session)) >= 64
        assert front.workspace(agent.session).registered_blocks > blocks, "nothing was deleted"


def test_a_summary_leaves_the_conversation_as_it_was(front: Front) -> None:
    """Its request forbids tools: recalled later, it would forbid them there."""
    agent = working_agent(front)
    history = list(agent.messages)
    before = agent.logged_tokens()
    compact(agent, kept_messages=0)
    assert agent.logged_tokens() == before
    agent.messages = history
    heard = agent.ask("Go on, without a summary.", "Fine.")
    assert heard.computed_tokens < 100
    assert "Do NOT call any tools" not in front.text(agent.logged_tokens())
    assert "Do NOT call any tools" not in front.text(front.engine.requests[-1].token_ids)
