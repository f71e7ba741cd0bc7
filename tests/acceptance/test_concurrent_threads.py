"""A main loop, two sub-agents and a title, all at the same time in one session."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import httpx
import pytest

from kvws.blocks.key import BLOCK_TOKENS
from kvws.chat.call import ModelCall
from tests.acceptance.agent import RULES, Agent, calling, results
from tests.acceptance.front import Front
from tests.acceptance.wire import MESSAGES, Answer, read_answer
from tests.e2e.front import KEY, Answered

SECRETS = {"main": "marmalade", "agent-a": "xylophone", "agent-b": "zeppelin"}
"""A word of each thread's own, which no other thread may ever be shown."""

TITLE = {
    "system": "Write a title.",
    "tools": [],
    "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
}
STEPS = 3


def by_thread(call: ModelCall) -> str:
    """Each thread says its own word and how far it is, so that a mixed up answer shows."""
    if not call.tools:
        return '{"title": "A title"}'
    task = next(message.content for message in call.messages if message.role == "user")
    secret = next(word for word in SECRETS.values() if word in task)
    done = sum(message.role == "tool" for message in call.messages)
    if secret == SECRETS["main"] and not done:
        return "\n".join(calling("Agent", prompt=f"{secret} {n}") for n in range(2))
    return f"{secret} {done}.\n" + calling("Bash", command=f"echo {secret} {done}")


class Thread:
    """One thread's client; several of them talk at the same time."""

    def __init__(self, agent: Agent, http: httpx.AsyncClient) -> None:
        self.agent = agent
        self._http = http
        self.secret = SECRETS[agent.agent_id or "main"]
        agent.messages.append({"role": "user", "content": f"Your word is {self.secret}. Begin."})

    async def step(self) -> Answer:
        body = self.agent.body(stream=True)
        reply = await self._http.post(MESSAGES, json=body, headers=self.agent.headers)
        answer = read_answer(MESSAGES, reply)
        self.agent.messages += answer.turn
        return answer

    async def work(self, steps: int) -> None:
        """Some steps, with a result of its own words after each."""
        for _ in range(steps):
            answer = await self.step()
            assert self.secret in answer.text
            self.take(answer, [f"{self.secret} is here. " * 20])

    def take(self, answer: Answer, texts: Sequence[str]) -> None:
        self.agent.messages.append({"role": "user", "content": results(answer, *texts)})


async def title(http: httpx.AsyncClient, session: str) -> None:
    metadata = {"user_id": f'{{"session_id": "{session}"}}'}
    body: dict[str, Any] = {**TITLE, "model": "kvws-small", "max_tokens": 100}
    body |= {"messages": [{"role": "user", "content": "Look around."}], "metadata": metadata}
    headers = {"x-claude-code-session-id": session}
    reply = await http.post(MESSAGES, json={**body, "stream": True}, headers=headers)
    assert read_answer(MESSAGES, reply).text == '{"title": "A title"}'


def client(front: Front) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {KEY}"}
    return httpx.AsyncClient(base_url=front.base_url, headers=headers, timeout=60, trust_env=False)


def threads(front: Front, http: httpx.AsyncClient, session: str) -> list[Thread]:
    ids = ("", "agent-a", "agent-b")
    return [Thread(Agent(front, session, agent_id), http) for agent_id in ids]


async def converse(front: Front, session: str) -> None:
    """The main loop starts two agents, which work while a title is asked for; then it goes on."""
    async with client(front) as http:
        main, *agents = threads(front, http, session)
        started = await main.step()
        assert len(started.call_ids) == 2
        await asyncio.gather(*(agent.work(STEPS) for agent in agents), title(http, session))
        main.take(started, [f"report {SECRETS['main']} {n}: all is well" for n in range(2)])
        await asyncio.gather(main.work(1), title(http, session), *(a.work(1) for a in agents))


@pytest.fixture
def talking_front(front: Front) -> Iterator[Front]:
    """A model that says to each thread what is its own."""
    front.script.by_call = by_thread
    front.engine.most_at_once = 0
    yield front
    front.script.by_call = None


def test_threads_that_talk_at_the_same_time_do_not_mix_and_share_their_prefix(
    talking_front: Front,
) -> None:
    front = talking_front
    asyncio.run(converse(front, "gathered"))
    assert front.engine.most_at_once >= 3, "they did not talk at the same time"
    calls = front.told(lambda: of_session(front, "gathered"), 1 + 2 * STEPS + 1 + 4)
    assert_nothing_was_computed_twice(calls)
    assert_only_the_prefix_is_shared(front, "gathered")


def test_threads_that_begin_at_the_same_time_store_their_prefix_once(
    talking_front: Front,
) -> None:
    async def begin(front: Front) -> None:
        async with client(front) as http:
            talking = threads(front, http, "cold")
            await asyncio.gather(*(thread.step() for thread in talking), title(http, "cold"))

    asyncio.run(begin(talking_front))
    talking_front.told(lambda: of_session(talking_front, "cold"), 4)
    assert_only_the_prefix_is_shared(talking_front, "cold")


def of_session(front: Front, session: str) -> list[Answered]:
    return [call for call in front.answered if call.caller == session]


def assert_nothing_was_computed_twice(calls: Sequence[Answered]) -> None:
    """The main thread's next step, in particular, after all that its agents did."""
    of_threads: dict[str, list[Answered]] = {}
    for call in calls:
        if not call.is_aside:
            of_threads.setdefault(call.thread, []).append(call)
    assert sorted(of_threads) == ["agent-a", "agent-b", "main"]
    for of_thread in of_threads.values():
        for before, after in pairwise(of_thread):
            known = before.usage.prompt_tokens + before.usage.answer_tokens
            new_tokens = after.usage.prompt_tokens - known
            assert after.computed_tokens <= new_tokens + BLOCK_TOKENS + 2


def assert_only_the_prefix_is_shared(front: Front, session: str) -> None:
    workspace = front.workspace(session)
    assert sorted(workspace.threads) == ["agent-a", "agent-b", "main"], "an aside left a thread"
    lines = {name: thread.line for name, thread in workspace.threads.items()}
    together = {block for line in lines.values() for block in line}
    assert workspace.registered_blocks == len(together), "an aside left blocks"
    shared = set.intersection(*(set(line) for line in lines.values()))
    prefix_tokens = len(front.tokens(RULES))
    assert BLOCK_TOKENS * len(shared) > prefix_tokens, "system prompt and tools are stored once"
    for name, line in lines.items():
        others = [word for thread, word in SECRETS.items() if thread != name]
        shown = front.text([t for block in line for t in workspace.block_tokens(block)])
        assert SECRETS[name] in shown
        assert not any(word in shown for word in others), f"{name} has another's words"
        assert not any(word in front.view_text(session, name) for word in others)
