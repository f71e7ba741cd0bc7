"""The endpoint over a real engine: what a client hears, and what was computed for it."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvws.blocks.key import BLOCK_TOKENS
from kvws.engine.launch import RunningEngine
from kvws.limits import Limits
from tests.engine.asking import ask_plainly
from tests.engine.serving import (
    SYSTEM,
    Front,
    Heard,
    asking,
    heard_whole,
    logbook,
    serving,
    stream,
)

LIMITS = Limits(
    budget_tokens=1024, reserve_tokens=512, sink_tokens=32, recent_tokens=256, query_tokens=128
)
TINY = Limits(
    budget_tokens=128,
    reserve_tokens=64,
    sink_tokens=32,
    recent_tokens=64,
    query_tokens=32,
    probe_tokens=64,
)
ABORT_WITHIN_MS = 100
ENGINE_STEP_MS = 1000
"""Longer than one decoding step of a busy CPU: the scheduler hears of an abort between two."""

SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 30},
        "priority": {"type": "integer", "minimum": 1, "maximum": 5},
    },
    "required": ["title", "priority"],
    "additionalProperties": False,
}
TOOL = {
    "name": "read_file",
    "description": "Read a file.",
    "parameters": {
        "type": "object",
        "properties": {"path": {"type": "string", "maxLength": 20}},
        "required": ["path"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(smollm2))


def test_a_conversation_that_outgrows_the_budget_computes_only_what_is_new(
    running: RunningEngine, smollm2: Path
) -> None:
    async def talk() -> tuple[list[Heard], list[dict[str, Any]]]:
        async with serving(running, smollm2, LIMITS) as front:
            conversation = front.conversation("growing")
            heard = [
                await conversation.say(f"{logbook(number, 14)}\nWhat did you read?", 12)
                for number in range(4)
            ]
            return heard, await conversation.steps()

    heard, steps = running.run(talk())
    assert heard[-1].prompt_tokens > 1.5 * LIMITS.budget_tokens
    assert heard[0].computed_tokens == heard[0].prompt_tokens
    for before, turn in pairwise(heard):
        known_tokens = before.prompt_tokens + before.answer_tokens - 1
        assert turn.computed_tokens == turn.prompt_tokens - known_tokens // 32 * 32
    assert [step["recalled"] for step in steps] == [False, False, False, True]
    probe_tokens = LIMITS.query_tokens + 2 * BLOCK_TOKENS  # the task's end is asked with it
    for turn, step in zip(heard, steps, strict=True):
        again = probe_tokens if step["recalled"] else 0
        assert turn.computed_tokens <= step["computed_tokens"] <= turn.computed_tokens + again


def test_while_all_of_it_fits_a_conversation_is_that_with_the_stock_engine(
    running: RunningEngine, smollm2: Path, tokenizer: Any
) -> None:
    """Also where the model's spelling is not the tokenizer's: the history that the client sends
    keeps the tokens that were generated."""
    questions = (
        f"{logbook(5, 6)}\nWhat do you know about hall 5?",
        "Why does a pump lose pressure?",
        "Give me three reasons why a pump would leak.",
    )

    async def talk() -> tuple[list[Heard], list[dict[str, Any]]]:
        async with serving(running, smollm2, LIMITS) as front:
            conversation = front.conversation("fitting")
            heard = [await conversation.say(question, 24) for question in questions]
            return heard, conversation.messages[:-1]

    async def talk_plainly() -> tuple[list[str], int]:
        """Each prompt as a whole, in one request: the answers, and the last prompt's length."""
        prompt: list[int] = []
        answers: list[str] = []
        for question in questions:
            opening = f"<|im_start|>system\n{SYSTEM}" if not prompt else ""
            asked = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
            prompt += tokenizer.encode(f"{opening}<|im_end|>\n{asked}")
            said = (await ask_plainly(running.engine, prompt, 24, [0])).tokens
            assert tokenizer.eos_token_id not in said
            answers.append(tokenizer.decode(said))
            prompt += said
        return answers, len(prompt) - len(said)

    heard, history = running.run(talk())
    answers, prompt_tokens = running.run(talk_plainly())
    assert [each.text for each in heard] == answers
    assert heard[-1].prompt_tokens == prompt_tokens
    retold = tokenizer.apply_chat_template(
        [{"role": "system", "content": SYSTEM}, *history],
        add_generation_prompt=True,
        return_dict=False,
    )
    assert len(retold) != prompt_tokens, "the model spelled as the tokenizer does; ask otherwise"
    assert heard[-1].computed_tokens < 64


def test_hanging_up_aborts_the_engines_request_and_asking_again_goes_on_from_there(
    running: RunningEngine, smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = asking([{"role": "user", "content": f"{logbook(1, 8)}\nGo on."}], 40)
    aborted_s: list[float] = []
    abort = running.engine.abort
    under_way = running.engine._manager.rid_to_state  # what the scheduler has not ended yet

    def noted(rid: str) -> None:
        aborted_s.append(time.perf_counter())
        abort(rid)

    async def hang_up(front: Front) -> tuple[str, float]:
        """What was heard until then, and when that was."""
        text = ""
        async with aclosing(stream(front.client, body, leaving.headers)) as events:
            async for event in events:
                if event["type"] == "content_block_delta":
                    text += event["delta"]["text"]
                if len(text) > 12:
                    break
            assert len(under_way) == 1
            hung_up_s = time.perf_counter()
        return text, hung_up_s

    async def ask() -> None:
        nonlocal leaving
        async with serving(running, smollm2, LIMITS) as front:
            staying, leaving = front.conversation("staying"), front.conversation("leaving")
            whole = await heard_whole(front.client, body, staying.headers)
            monkeypatch.setattr(running.engine, "abort", noted)
            begun, hung_up_s = await hang_up(front)
            for _ in range(ENGINE_STEP_MS):
                if not under_way:
                    break
                await asyncio.sleep(0.001)
            assert not under_way
            ended_ms = 1000 * (time.perf_counter() - hung_up_s)
            (abort_s,) = aborted_s
            abort_ms = 1000 * (abort_s - hung_up_s)
            print(f"measured: abort after {abort_ms:.1f} ms, scheduler idle {ended_ms:.0f} ms")
            assert abort_ms < ABORT_WITHIN_MS
            again = await heard_whole(front.client, body, leaving.headers)
            assert again.text.startswith(begun) and again.text == whole.text
            assert again.computed_tokens <= BLOCK_TOKENS < whole.computed_tokens
            assert again.answer_tokens == whole.answer_tokens
            (step,) = await leaving.steps()
            assert step["generated_tokens"] < whole.answer_tokens, "it was said from the start"

    leaving: Any = None
    running.run(ask())


def test_an_answer_longer_than_the_whole_context_goes_on_over_several_steps(
    running: RunningEngine, smollm2: Path, tokenizer: Any
) -> None:
    async def talk() -> None:
        async with serving(running, smollm2, TINY) as front:
            conversation = front.conversation("rambling")
            heard = await conversation.say("Write a very long story about a lighthouse.", 200)
            assert heard.stop_reason == "max_tokens"
            assert heard.answer_tokens == 200 > TINY.context_tokens
            steps = await conversation.steps()
            assert len(steps) >= 2 and steps[-1]["recalled"]
            assert sum(step["generated_tokens"] for step in steps) == 200
            (session,) = front.service.open_sessions.values()
            line = session.workspace.thread("main").line
            logged = tokenizer.decode(session.workspace.tokens_of(line))
            _, _, said = logged.partition("<|im_start|>assistant\n")
            assert len(said) > 400 and heard.text.startswith(said), "the log says something else"
            after = await conversation.say("Go on.", 4)
            assert after.computed_tokens < 64

    running.run(talk())


def test_sessions_and_threads_at_once_are_answered_as_each_alone(
    running: RunningEngine, smollm2: Path
) -> None:
    questions = ("What is a pump?", "What is a ship?", "Name a city.", "What is a pump?")
    asked = f"{logbook(2, 4)}\n"

    async def talk(front: Front, session: str, thread: str, question: str) -> list[str]:
        conversation = front.conversation(session, thread)
        first = await conversation.say(asked + question, 10)
        return [first.text, (await conversation.say("And why?", 10)).text]

    async def ask() -> None:
        async with serving(running, smollm2, LIMITS) as front:
            alone = [
                await talk(front, f"alone-{number}", "main", question)
                for number, question in enumerate(questions)
            ]
            places = (("one", "main"), ("one", "agent-1"), ("two", "main"), ("two", "agent-1"))
            together = await asyncio.gather(
                *(talk(front, *place, q) for place, q in zip(places, questions, strict=True))
            )
            assert together == alone
            assert len({tuple(answers) for answers in alone}) == 3  # the first and the last agree

    running.run(ask())


def test_an_answer_follows_the_schema_that_the_client_asks_for(
    running: RunningEngine, smollm2: Path
) -> None:
    answer = running.run(
        _complete(
            running,
            smollm2,
            "File a ticket: the pump of hall 3 leaks.",
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "ticket", "schema": SCHEMA, "strict": True},
            },
        )
    )
    assert answer["finish_reason"] == "stop"
    ticket = json.loads(answer["message"]["content"])
    assert set(ticket) == {"title", "priority"} and 1 <= ticket["priority"] <= 5
    assert len(ticket["title"]) <= 30


def test_a_tool_is_called_where_the_client_insists(running: RunningEngine, smollm2: Path) -> None:
    answer = running.run(
        _complete(
            running,
            smollm2,
            "Read the file pump.txt.",
            tools=[{"type": "function", "function": TOOL}],
            tool_choice="required",
        )
    )
    assert answer["finish_reason"] == "tool_calls"
    called = answer["message"]["tool_calls"][0]["function"]
    assert called["name"] == "read_file"
    assert list(json.loads(called["arguments"])) == ["path"]


async def _complete(running: RunningEngine, model: Path, text: str, **more: Any) -> dict[str, Any]:
    """The one choice of a chat completion."""
    body = {"model": "any", "temperature": 0, "max_tokens": 80, **more}
    body["messages"] = [{"role": "user", "content": text}]
    async with serving(running, model, LIMITS) as front:
        reply = await front.client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    (choice,) = reply.json()["choices"]
    return choice
