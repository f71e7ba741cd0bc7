"""Steps whose history exceeds the budget: ingest, probe, selection, answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from kvws.engine.protocol import Chunk, GenerateRequest
from kvws.errors import EngineError
from kvws.recall.plan import Action, Reason
from tests.step.session import LIMITS, Session, in_loop

BUDGET = LIMITS.budget_blocks


async def grown(session: Session, *topics: int, blocks: float = 8) -> list[int]:
    """A history of that many blocks about each topic, ingested and asked about the last one."""
    prompt = [token for topic in topics for token in session.text(topic, blocks)]
    await session.ask_and_check([*prompt, *session.text(topics[-1], 0.5)])
    return prompt


@in_loop
async def test_a_long_first_prompt_is_ingested_in_chunks_and_its_end_is_the_query() -> None:
    session = Session.start()
    prompt = session.text(0, 20.3)
    reply = await session.ask_and_check(prompt)
    *ingested, probe, answer = session.engine.requests
    assert all(request.max_new_tokens == 0 for request in ingested)
    assert all(len(r.token_ids) <= LIMITS.context_tokens - 8 for r in session.engine.requests)
    chunks = [r.token_ids[session.engine.answered[r.rid].cached_tokens :] for r in ingested]
    ahead = [token for chunk in chunks for token in chunk]
    assert ahead == prompt[: len(ahead)] and len(ahead) % 32 == 0
    assert all(len(chunk) == LIMITS.chunk_tokens for chunk in chunks[:-1])
    query = prompt[len(ahead) :]
    assert 1 <= len(query) <= LIMITS.query_tokens
    assert list(probe.token_ids[-len(query) :]) == list(answer.token_ids[-len(query) :]) == query
    assert session.workspace.block_count == 20  # 20.3 blocks and two generated tokens
    assert reply.report.recalled


@in_loop
async def test_the_recalled_view_holds_sink_the_topic_asked_for_and_the_newest() -> None:
    session = Session.start()
    prompt = await grown(session, 0, 1, 2, 3)
    reply = await session.ask_and_check([*prompt, *session.text(1, 1)])
    view = [d for d in reply.report.decisions if d.action is not Action.DROP]
    line = session.workspace.align([*prompt, *session.text(1, 1)]).line
    assert len(view) == BUDGET == reply.report.view_blocks
    assert [d.block for d in view if d.reason is Reason.SINK] == [line[0]]
    assert [d.block for d in view if d.reason is Reason.RECENT] == list(line[-2:])
    scored = [d.block for d in view if d.reason is Reason.SCORE]
    assert len(scored) == BUDGET - 3 and set(scored) <= set(range(8, 16))
    assert scored == sorted(scored)


@in_loop
async def test_a_changed_selection_takes_two_passes() -> None:
    session = Session.start()
    prompt = await grown(session, 0, 1, 2, 3)
    query = session.text(1, 1)
    reply = await session.ask_and_check(prompt + query)
    assert reply.report.passes == 2 and not reply.report.unchanged
    pending = reply.report.new_tokens
    assert reply.report.computed_tokens == 2 * pending


@in_loop
async def test_an_unchanged_selection_takes_one_pass_that_computes_the_query() -> None:
    session = Session.start()
    prompt = await grown(session, 0, 1, 2, 3)
    thread = session.workspace.thread("main")
    thread.kept_last_view = False
    for expected_passes, expected_unchanged in ((2, False), (2, True), (1, True), (1, True)):
        prompt += session.text(1, 0.25)
        speculative = thread.kept_last_view
        reply = await session.ask_and_check(prompt)
        prompt += reply.tokens
        report = reply.report
        assert (report.passes, report.unchanged) == (expected_passes, expected_unchanged)
        assert thread.kept_last_view == expected_unchanged
        if speculative and report.unchanged:
            assert report.computed_tokens == report.new_tokens and report.loaded_pages == 0
    assert reply.report.passes == 1


@in_loop
async def test_a_speculative_probe_that_guessed_wrong_is_aborted() -> None:
    for slow_abort in (0, 1, 50):
        session = Session.start()
        expected = Session.start()
        session.engine.faults.slow_abort = slow_abort
        answers = []
        for each in (session, expected):
            prompt = await grown(each, 0, 1, 2, 3)
            each.workspace.thread("main").kept_last_view = each is session
            reply = await each.ask_and_check([*prompt, *each.text(1, 0.5)], max_new_tokens=6)
            assert reply.report.passes == 2 and not reply.report.unchanged
            answers.append(reply.tokens)
        probe = session.engine.requests[-2]
        assert probe.max_new_tokens == 6 and probe.rid.endswith(".probe")
        assert expected.engine.requests[-2].max_new_tokens == 0
        assert answers[0] == answers[1] and len(answers[0]) == 6


@in_loop
async def test_a_view_grows_until_it_no_longer_fits_beside_query_and_answer() -> None:
    session = Session.start()
    prompt = await grown(session, 0, 1, 2, 3)
    sizes: list[int] = []
    for _ in range(30):
        prompt += session.text(1, 0.5)
        reply = await session.ask_and_check(prompt, max_new_tokens=20)
        assert len(reply.tokens) == 20, "a grown view leaves no room for the answer"
        prompt += reply.tokens
        sizes.append(reply.report.view_blocks)
    assert max(sizes) > BUDGET and min(sizes) == BUDGET
    assert max(sizes) <= LIMITS.room_blocks(0)


@in_loop
async def test_the_newest_tokens_are_always_in_view() -> None:
    """A tool loop far beyond the budget, over all topics."""
    session = Session.start()
    prompt = session.text(0, 2)
    for step in range(40):
        prompt += session.text(step % 8, 1 + step % 3 / 2)
        reply = await session.ask_and_check(prompt)
        asked = list(session.engine.requests[-1].token_ids)
        assert asked[-64:] == prompt[-64:] and asked[:32] == prompt[:32]
        prompt += reply.tokens


@in_loop
async def test_a_request_sent_again_does_not_see_itself_twice() -> None:
    for blocks in (0.5, 1, 2):
        session = Session.start()
        prompt = await grown(session, 0, 1, 2, 3)
        prompt += session.text(1, 1)
        prompt += session.text(1, blocks - len(prompt) % 32 / 32 + (blocks == 0.5))
        first = await session.ask_and_check(prompt)
        count = session.workspace.block_count
        again = await session.ask_and_check(prompt)
        assert session.workspace.block_count == count
        assert len(again.tokens) == len(first.tokens)
        third = await session.ask_and_check([*prompt, *again.tokens, *session.text(1, 0.5)])
        assert len(third.tokens) == 3


@in_loop
async def test_an_answer_to_the_same_question_is_not_recalled_when_it_is_asked_anew() -> None:
    session = Session.start()
    prompt = await grown(session, 0, 1, 2, 3)
    prompt += session.text(1, 1) + session.text(5, 20 / 32)
    first = await session.ask_and_check(prompt, max_new_tokens=40)
    answer = session.workspace.thread("main").line[-1]
    assert session.workspace.block_tokens(answer)[-8:] == tuple(first.tokens[4:12])
    answers: list[list[int]] = []
    for _ in range(2):
        again = await session.ask_and_check(prompt, max_new_tokens=40)
        answers.append(again.tokens)
        asked_behind = {d.block for d in again.report.decisions if d.action is not Action.DROP}
        assert answer not in asked_behind
    assert answers[0] == answers[1]  # the same question behind the same view


@in_loop
async def test_rows_that_the_tree_kept_from_the_tap_are_probed_again() -> None:
    """An answer failed: the query's first page is in the tree, but it is no block."""
    session = Session.start()
    prompt = await grown(session, 0, 1, 2, 3)
    prompt += session.text(1, 1.9)
    thread = session.workspace.thread("main")
    thread.kept_last_view = False  # so both times the probe asks behind the window
    generate = session.engine.generate

    async def failing(request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        async with aclosing(generate(request)) as chunks:
            async for chunk in chunks:
                if request.rid.endswith("answer"):
                    raise EngineError("the answer is gone")
                yield chunk

    session.engine.generate = failing
    with pytest.raises(EngineError, match="gone"):
        await session.ask(prompt, max_new_tokens=5)
    session.engine.generate = generate
    await session.check()
    thread.kept_last_view = False
    before = len(session.engine.requests)
    reply = await session.ask_and_check(prompt)
    asked = session.engine.requests[before:]
    assert [r.rid.partition(".")[2] for r in asked] == ["probe", "reprobe", "answer"]
    assert asked[1].compute_from == len(asked[1].token_ids) - reply.report.new_tokens
    recalled = {d.block for d in reply.report.decisions if d.reason is Reason.SCORE}
    assert recalled <= set(range(8, 16))


async def recalled_about(topic: int, *, first: str, then: str) -> tuple[set[int], set[int]]:
    """A thread explores a topic, another is asked about it after 20 blocks of its own.

    Returns (what the first had, what the second recalled).
    """
    session = Session.start()
    base = session.text(0, 1)
    await session.ask_and_check(base + session.text(topic, 8) + [1], thread=first)
    explored = set(session.workspace.thread(first).line)
    prompt = base + session.text(1, 20)
    reply = await session.ask_and_check(prompt + session.text(topic, 0.5), thread=then)
    recalled = {d.block for d in reply.report.decisions if d.reason is Reason.SCORE}
    assert len(recalled) == BUDGET - 3
    return explored, recalled


@in_loop
async def test_what_was_summarised_away_can_be_recalled() -> None:
    explored, recalled = await recalled_about(5, first="main", then="main#2")
    assert recalled <= explored


@in_loop
async def test_what_another_agent_did_is_not_recalled() -> None:
    for first, then in (("explorer", "main"), ("main", "explorer"), ("aside-1", "main")):
        explored, recalled = await recalled_about(5, first=first, then=then)
        assert not explored & recalled
