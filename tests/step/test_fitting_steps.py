"""Steps whose whole history fits the budget: ordinary requests at true positions."""

from __future__ import annotations

from kvws.engine.protocol import Chunk
from kvws.observe.step_report import StepReport
from kvws.step import StepRequest, run_step
from tests.step.session import LIMITS, Session, in_loop


@in_loop
async def test_a_prompt_that_fits_is_sent_as_it_is() -> None:
    session = Session.start()
    prompt = session.text(0, 3.5)
    reply = await session.ask_and_check(prompt)
    assert [list(request.token_ids) for request in session.engine.requests] == [prompt]
    assert reply.report.passes == 1 and not reply.report.recalled
    assert reply.report.computed_tokens == len(prompt) == reply.report.new_tokens
    assert len(reply.tokens) == reply.report.generated_tokens == 3


@in_loop
async def test_a_grown_prompt_computes_its_new_tokens_only() -> None:
    session = Session.start()
    prompt = session.text(0, 3.5)
    reply = await session.ask_and_check(prompt)
    prompt += [*reply.tokens, *session.text(1, 1)]
    reply = await session.ask_and_check(prompt)
    assert list(session.engine.requests[-1].token_ids) == prompt
    assert reply.report.computed_tokens == reply.report.new_tokens == len(prompt) - 96
    assert reply.report.loaded_pages == 0 and reply.report.view_blocks == 3


@in_loop
async def test_after_a_flush_the_history_comes_from_the_host_tier() -> None:
    session = Session.start()
    prompt = session.text(0, 5.5)
    await session.ask_and_check(prompt)
    plain = Session.start()
    expected = await plain.ask(prompt + (more := session.text(1, 1)))
    session.engine.flush_device_cache()
    reply = await session.ask_and_check(prompt + more)
    assert reply.report.loaded_pages == 5 and reply.report.computed_tokens == 48
    assert reply.tokens == expected.tokens


@in_loop
async def test_generated_tokens_become_blocks_except_the_last() -> None:
    """The last sampled token has no KV yet."""
    session = Session.start()
    prompt = session.text(0, 1.5)
    reply = await session.ask_and_check(prompt, max_new_tokens=49)
    assert session.workspace.block_count == 3
    session.engine.flush_device_cache()
    next_prompt = [*prompt, *reply.tokens, 5]
    aligned = session.workspace.align(next_prompt)
    assert len(aligned.line) == 3 and list(aligned.pending) == [reply.tokens[-1], 5]
    again = await session.ask_and_check(next_prompt)
    assert again.report.computed_tokens == 2

    short = Session.start()
    await short.ask_and_check(prompt, max_new_tokens=48)
    assert short.workspace.block_count == 2


@in_loop
async def test_generated_tokens_are_not_kept_where_another_answer_goes_on() -> None:
    session = Session.start()
    await session.ask_and_check(session.text(0, 1.5), max_new_tokens=49, keep_generated=False)
    assert session.workspace.block_count == 1


@in_loop
async def test_a_request_sent_again_finds_its_work_done() -> None:
    session = Session.start()
    for blocks in (3.5, 4):
        prompt = session.text(0, blocks)
        first = await session.ask_and_check(prompt)
        count = session.workspace.block_count
        again = await session.ask_and_check(prompt)
        assert again.tokens == first.tokens
        assert again.report.computed_tokens <= 32
        assert session.workspace.block_count == count


@in_loop
async def test_an_edited_history_is_a_branch() -> None:
    session = Session.start()
    head, old, new = session.text(0, 2), session.text(1, 3), session.text(2, 3)
    await session.ask_and_check(head + old + [1])
    reply = await session.ask_and_check(head + new + [1])
    assert reply.report.computed_tokens == 97
    assert session.workspace.block_count == 8
    back = await session.ask_and_check(head + old + [1])
    assert back.report.new_tokens == 1


@in_loop
async def test_a_caller_that_never_resumes_still_finds_the_step_registered() -> None:
    session = Session.start()
    prompt = session.text(0, 2.5)
    outputs = run_step(
        StepRequest("main", prompt, 3), session.workspace, session.engine, session.limits
    )
    async for output in outputs:
        assert isinstance(output, Chunk)
        if output.finish_reason is not None:
            break
    assert session.workspace.align(prompt).line == (0, 1)
    assert session.engine.resident("w") == [0, 1]
    assert session.engine.plane.stats()["open_steps"] == 0
    del outputs
    reply = await session.ask_and_check(prompt)
    assert reply.report.new_tokens == 16


@in_loop
async def test_a_caller_that_closes_early_leaves_nothing_open() -> None:
    for takes in (0, 1, 2):
        for slow_abort in (0, 20):
            session = Session.start()
            session.engine.faults.slow_abort = slow_abort
            prompt = session.text(0, 2.5)
            outputs = run_step(
                StepRequest("main", prompt, 5), session.workspace, session.engine, session.limits
            )
            for _ in range(takes):
                assert isinstance(await anext(outputs), Chunk)
            await outputs.aclose()
            assert session.engine.plane.stats()["open_steps"] == 0
            assert not session.workspace.thread("main").lock.locked()
            await session.check()
            reply = await session.ask_and_check(prompt)
            assert len(reply.tokens) == 3


@in_loop
async def test_the_last_output_is_the_report() -> None:
    session = Session.start()
    request = StepRequest("main", session.text(0, 1), 2)
    outputs = [
        output async for output in run_step(request, session.workspace, session.engine, LIMITS)
    ]
    assert [type(output) for output in outputs] == [Chunk, Chunk, StepReport]


@in_loop
async def test_blocks_in_the_host_tier_are_paid_for_once() -> None:
    session = Session.start()
    prompt = session.text(0, 6.5)
    await session.ask_and_check(prompt)
    await session.ask_and_check(prompt[:-3])
    stats = session.engine.plane.stats()
    assert stats["blocks"] == 6
    assert stats["host_used_bytes"] == 6 * session.engine.block_bytes


@in_loop
async def test_what_was_computed_for_a_caller_that_left_is_not_computed_again() -> None:
    for blocks in (2.5, 20.5):  # a prompt that fits its view, and one that does not
        session = Session.start()
        prompt = session.text(0, blocks)
        request = StepRequest("main", prompt, 5)
        outputs = run_step(request, session.workspace, session.engine, session.limits)
        await anext(outputs)
        await outputs.aclose()
        await session.check()
        assert len(session.workspace.thread("main").line) == int(blocks)
        reply = await session.ask_and_check(prompt)
        assert reply.report.resumed_tokens == 32 * int(blocks)
        assert reply.report.new_tokens - reply.report.resumed_tokens == 16
