"""Main loop and sub-agents on one workspace at the same time."""

from __future__ import annotations

import asyncio

import pytest

from kvws.errors import KvwsError
from kvws.session.workspace import Workspace
from tests.step.session import LIMITS, Session, in_loop


@in_loop
async def test_the_shared_prefix_of_agents_that_start_together_is_stored_once() -> None:
    session = Session.start()
    system = session.text(0, 4)
    prompts = {name: system + session.text(i, 2.5) for i, name in enumerate(("main", "a", "b"), 1)}
    replies = await asyncio.gather(
        *(session.ask(prompt, thread=name) for name, prompt in prompts.items())
    )
    await session.check()
    assert session.workspace.block_count == 4 + 3 * 2
    lines = [session.workspace.thread(name).line for name in prompts]
    assert len({line[:4] for line in lines}) == 1
    for (name, prompt), reply in zip(prompts.items(), replies, strict=True):
        alone = Session.start()
        assert (await alone.ask(prompt, thread=name)).tokens == reply.tokens


@in_loop
async def test_equal_requests_of_two_threads_at_once_become_the_same_blocks() -> None:
    for blocks in (3.5, 20.5):
        session = Session.start()
        prompt = session.text(0, blocks)
        first, second = await asyncio.gather(
            session.ask(prompt, thread="a"), session.ask(prompt, thread="b")
        )
        await session.check()
        assert first.tokens == second.tokens
        assert session.workspace.block_count == int(blocks)
        assert session.workspace.thread("a").line == session.workspace.thread("b").line


@in_loop
async def test_agents_interleaved_beyond_the_budget_do_not_disturb_each_other() -> None:
    session = Session.start(device_pages=80)
    system = session.text(0, 2)
    prompts = {name: list(system) for name in ("main", "sub", "other")}
    topics = dict(zip(prompts, (1, 2, 3), strict=True))

    async def loop(name: str) -> None:
        for step in range(12):
            prompts[name] += session.text(topics[name] + step % 2 * 3, 1 + step % 3)
            reply = await session.ask(prompts[name], thread=name)
            asked = [r for r in session.engine.requests if r.token_ids[-1] == prompts[name][-1]]
            assert list(asked[-1].token_ids[:32]) == system[:32]
            prompts[name] += reply.tokens

    await asyncio.gather(*map(loop, prompts))
    await session.check()
    assert len({session.workspace.thread(name).line[:2] for name in prompts}) == 1
    for name, prompt in prompts.items():
        line = session.workspace.thread(name).line
        assert session.workspace.tokens_of(line) == prompt[: 32 * len(line)]


@in_loop
async def test_steps_of_one_thread_wait_for_each_other() -> None:
    session = Session.start()
    prompt = session.text(0, 3.5)
    replies = await asyncio.gather(*(session.ask([*prompt, n]) for n in range(4)))
    await session.check()
    assert [r.report.new_tokens for r in replies] == [113, 17, 17, 17]


@in_loop
async def test_two_workspaces_share_nothing() -> None:
    session = Session.start()
    other = Session(session.engine, Workspace("other"))
    prompt = session.text(0, 6.5)
    mine, theirs = await asyncio.gather(session.ask(prompt), other.ask(prompt))
    await session.check()
    await other.check()
    assert mine.tokens == theirs.tokens
    assert theirs.report.computed_tokens == mine.report.computed_tokens == len(prompt)
    assert session.engine.plane.stats()["blocks"] == 12


@pytest.mark.parametrize("host_blocks", range(4, 16))
@in_loop
async def test_a_thread_never_builds_on_blocks_that_another_took_back(host_blocks: int) -> None:
    """Both write the same history; the host tier is full somewhere on the way."""
    session = Session.start(host_blocks=host_blocks)
    prompt = session.text(0, 12.5)
    for delay in range(0, 40, 4):

        async def late(delay: int = delay) -> None:
            for _ in range(delay):
                await asyncio.sleep(0)
            await session.ask(prompt, thread=f"late {delay}")

        both = await asyncio.gather(
            session.ask(prompt, thread="early"), late(), return_exceptions=True
        )
        assert all(not isinstance(e, BaseException) or isinstance(e, KvwsError) for e in both)
        await session.check()
        session.engine.plane.forget("w", session.engine.resident("w")[3:])
        session.engine.flush_device_cache()
        session.workspace = Workspace("w")
        session.engine.plane.drop_workspace("w")
        session.engine._truth.clear()
    assert LIMITS.budget_blocks == 8
