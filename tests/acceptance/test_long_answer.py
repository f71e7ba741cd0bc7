"""An answer that is longer than the room beside its view goes on."""

from __future__ import annotations

from tests.acceptance.agent import Agent, calling, results
from tests.acceptance.front import LIMITS, Front

LONG = " ".join(f"{number} is followed by {number + 1}." for number in range(260))


def test_an_answer_of_many_times_the_reserve_is_heard_to_its_end(front: Front) -> None:
    for stream in (False, True):
        agent = Agent(front)
        heard = agent.ask("Count.", LONG, stream=stream, max_tokens=8000)
        assert heard.answer.text == LONG
        assert heard.answered.usage.answer_tokens > 4 * LIMITS.reserve_tokens
        agent.ask("Once more.", "No.").assert_only_new_was_computed()


def test_a_tool_call_of_many_times_the_reserve_arrives_whole(front: Front) -> None:
    agent = Agent(front)
    written = "I write it.\n" + calling("Write", file_path="/repo/long.txt", content=LONG)
    heard = agent.ask("Write it.", written, stream=True)
    (use,) = [block for block in heard.answer.turn[0]["content"] if block["type"] == "tool_use"]
    assert use["input"] == {"file_path": "/repo/long.txt", "content": LONG}
    heard = agent.ask(results(heard.answer, "Written."), "Done.")
    heard.assert_only_new_was_computed()


def test_an_answer_stops_at_the_length_that_the_client_asked_for(front: Front) -> None:
    agent = Agent(front)
    limit_tokens = 3 * LIMITS.reserve_tokens
    heard = agent.ask("Count.", LONG, max_tokens=limit_tokens)
    assert heard.answered.usage.answer_tokens == limit_tokens
    assert LONG.startswith(heard.answer.text) and heard.answer.text != LONG
    agent.ask("Go on.", "No.").assert_only_new_was_computed()
