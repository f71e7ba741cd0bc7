"""Steps on an engine that loses blocks, fails loads, recomputes views and runs out of room."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from kvws.engine.protocol import Chunk, GenerateRequest
from kvws.errors import HostTierFull, LoadFailed, PoisonedView
from kvws.recall.plan import Action
from kvws.step import StepRequest, run_step
from tests.step.session import LIMITS, Session, in_loop


async def grown(session: Session, topics: int = 4) -> list[int]:
    prompt = [token for topic in range(topics) for token in session.text(topic, 8)]
    await session.ask_and_check([*prompt, *session.text(topics - 1, 0.5)])
    return prompt


def once(act: Callable[[GenerateRequest], None], *, of: str = "answer") -> Callable[..., None]:
    """Act on the first request of that kind."""
    done = False

    def maybe(request: GenerateRequest) -> None:
        nonlocal done
        if not done and request.rid.endswith(f".{of}"):
            done = True
            act(request)

    return maybe


def under_report_once(of: str = "answer") -> Callable[[GenerateRequest, int], int]:
    done = False

    def lookup(request: GenerateRequest, granted: int) -> int:
        nonlocal done
        if done or not request.rid.endswith(f".{of}") or not granted:
            return granted
        done = True
        return granted - 1

    return lookup


async def expected_answer(extra_topic: int, blocks: float) -> list[int]:
    """What the same session answers on an engine without faults."""
    session = Session.start()
    prompt = await grown(session)
    return (await session.ask_and_check(prompt + session.text(extra_topic, blocks))).tokens


# ---- poisoned views --------------------------------------------------------------------------


@in_loop
async def test_a_poisoned_view_is_left_and_the_step_begins_anew() -> None:
    session = Session.start()
    prompt = await grown(session)
    namespace = session.workspace.namespace
    session.engine.faults.lookup = under_report_once()
    reply = await session.ask_and_check(prompt + session.text(1, 1))
    assert reply.report.retries == 1
    assert session.workspace.namespace != namespace
    assert reply.tokens == await expected_answer(1, 1)
    assert len(reply.chunks) == 3


@in_loop
async def test_a_poisoned_namespace_is_never_asked_again() -> None:
    session = Session.start()
    prompt = await grown(session)
    session.engine.faults.lookup = under_report_once()
    poisoned = session.workspace.namespace
    for _ in range(4):
        prompt += session.text(1, 0.7)
        prompt += (await session.ask_and_check(prompt)).tokens
    of_poisoned = [r for r in session.engine.requests if r.namespace == poisoned]
    last = session.engine.requests.index(of_poisoned[-1])
    assert of_poisoned[-1].rid.endswith(".answer") and last < len(session.engine.requests) - 4


@in_loop
async def test_the_checks_would_catch_a_page_that_is_not_its_block() -> None:
    """Negative control: with the namespace kept, the retry is served the recomputed page."""
    session = Session.start()
    prompt = await grown(session)
    session.engine.faults.lookup = under_report_once()
    session.workspace.condemn = lambda _: None  # type: ignore[method-assign]
    await session.ask(prompt + session.text(1, 1))
    assert session.engine.wrong_pages
    with pytest.raises(AssertionError, match="is not"):
        await session.check()


@pytest.mark.parametrize("of", ["probe", "ingest"])
@in_loop
async def test_a_view_poisoned_under_way_is_left_too(of: str) -> None:
    session = Session.start()
    prompt = await grown(session)
    session.engine.flush_device_cache()
    session.engine.faults.lookup = under_report_once(of)
    more = session.text(1, 5 if of == "ingest" else 1)
    reply = await session.ask_and_check(prompt + more)
    assert reply.report.retries == 1
    assert len(reply.tokens) == 3


@in_loop
async def test_views_poisoned_again_and_again_are_given_up() -> None:
    session = Session.start()
    prompt = await grown(session)
    session.engine.faults.lookup = lambda _, granted: granted - 1
    with pytest.raises(PoisonedView):
        await session.ask(prompt + session.text(1, 1))
    await session.check()
    session.engine.faults.lookup = None
    assert len((await session.ask_and_check(prompt + session.text(1, 1))).tokens) == 3


# ---- failed loads and lost blocks ------------------------------------------------------------


@in_loop
async def test_a_failed_load_is_tried_again() -> None:
    session = Session.start()
    prompt = await grown(session)
    session.engine.faults.fail_loads = 2
    reply = await session.ask_and_check(prompt + session.text(1, 1))
    assert reply.report.retries == 2
    assert reply.tokens == await expected_answer(1, 1)
    assert session.engine.plane.stats()["failed_loads"] == 2


@in_loop
async def test_loads_that_always_fail_are_given_up() -> None:
    session = Session.start()
    prompt = await grown(session)
    session.engine.faults.fail_loads = 100
    before = len(session.engine.requests)
    with pytest.raises(LoadFailed):
        await session.ask(prompt + session.text(1, 1))
    steps = {request.step for request in session.engine.requests[before:]}
    assert len(steps) == 3
    await session.check()


@in_loop
async def test_nothing_is_tried_again_once_something_was_yielded() -> None:
    session = Session.start()
    session.engine.faults.after_first_chunk = LoadFailed("too late")
    request = StepRequest("main", session.text(0, 2.5), 5)
    seen: list[object] = []
    with pytest.raises(LoadFailed):
        async for output in run_step(request, session.workspace, session.engine, LIMITS):
            seen.append(output)
    assert len(seen) == 1 and isinstance(seen[0], Chunk)
    await session.check()


@pytest.mark.parametrize("lost", [[0], [2], [0, 1, 2, 3, 4], [4]])
@in_loop
async def test_lost_blocks_of_a_fitting_history_are_computed_again(lost: list[int]) -> None:
    session = Session.start()
    prompt = session.text(0, 5.5)
    await session.ask_and_check(prompt)
    plain = Session.start()
    await plain.ask_and_check(prompt)
    more = session.text(1, 1)
    session.engine.flush_device_cache()
    session.engine.lose("w", lost)
    reply = await session.ask_and_check(prompt + more)
    assert reply.report.repaired_blocks == len(lost) and reply.report.retries == 0
    assert session.engine.resident("w") == [0, 1, 2, 3, 4, 5]
    assert reply.tokens == (await plain.ask(prompt + more)).tokens


@in_loop
async def test_lost_blocks_whose_pages_are_still_on_the_device_are_computed_again() -> None:
    """The tree takes them for stored and does not offer them: a fresh namespace does."""
    session = Session.start()
    prompt = session.text(0, 5.5)
    await session.ask_and_check(prompt)
    await session.ask_and_check(prompt + (more := session.text(1, 0.5)))
    namespace = session.workspace.namespace
    session.engine.lose("w", [1, 3])
    reply = await session.ask_and_check([*prompt, *more, 9])
    assert reply.report.repaired_blocks == 2
    assert session.workspace.namespace != namespace


@in_loop
async def test_a_block_lost_between_promise_and_load_is_repaired() -> None:
    session = Session.start()
    prompt = await grown(session)

    def lose(request: GenerateRequest) -> None:
        session.engine.lose("w", session.engine.resident("w")[8:16])

    session.engine.faults.before_load = once(lose)
    reply = await session.ask_and_check(prompt + session.text(1, 1))
    assert reply.report.retries == 1 and reply.report.repaired_blocks > 0
    assert len(reply.tokens) == 3


@in_loop
async def test_a_block_lost_while_it_is_loaded_is_loaded_all_the_same() -> None:
    session = Session.start()
    prompt = await grown(session)

    def lose(request: GenerateRequest) -> None:
        session.engine.lose("w", session.engine.resident("w"))

    session.engine.faults.during_load = once(lose)
    reply = await session.ask_and_check(prompt + session.text(1, 1))
    assert reply.report.retries == 0
    assert reply.tokens == await expected_answer(1, 1)


@in_loop
async def test_a_workspace_that_lost_everything_goes_on() -> None:
    session = Session.start()
    prompt = await grown(session)
    session.engine.lose("w", session.engine.resident("w"))
    session.engine.flush_device_cache()
    reply = await session.ask_and_check(prompt + session.text(1, 1))
    assert reply.report.repaired_blocks >= 8 and len(reply.tokens) == 3


# ---- no room ---------------------------------------------------------------------------------


def occupy(session: Session, slots: int) -> None:
    """Another step fills host slots with pages that it has not named yet."""
    plane = session.engine.plane
    plane.open_step("occupant", "other")
    pages = [f"occupied {number}" for number in range(slots)]
    assert not plane.stage_out("occupant", pages, [0] * slots)


@in_loop
async def test_a_session_outgrows_a_host_tier_that_has_no_disk() -> None:
    """The least wanted blocks lose their bytes, and are computed again when a view needs them."""
    session = Session.start(host_blocks=24)
    prompt = session.text(1, 8) + session.text(2, 30.5)
    await session.ask_and_check(prompt)
    assert session.engine.plane.stats()["lost_only_copies"] > 0
    assert len(session.engine.resident("w")) <= 24
    assert session.workspace.registered_blocks == 38, "the session knows all its blocks"
    reply = await session.ask_and_check(prompt + session.text(1, 1))
    assert reply.report.repaired_blocks > 0
    assert any(d.block < 8 and d.action is Action.LOAD for d in reply.report.decisions)


@in_loop
async def test_a_host_tier_smaller_than_a_view_is_reported_with_a_way_out() -> None:
    """The linker refuses such a tier at start; other sessions can make one of any."""
    session = Session.start(host_blocks=30)
    prompt = session.text(0, 12.5)
    await session.ask_and_check(prompt)
    occupy(session, 25)
    prompt += session.text(0, 8)
    with pytest.raises(HostTierFull) as full:
        await session.ask(prompt)
    assert "--host-gb" in full.value.hint
    session.engine.plane.close_step("occupant", [])
    await session.check()
    reply = await session.ask_and_check(prompt)
    assert len(reply.tokens) == 3, "room that came back is used"


@in_loop
async def test_an_answer_that_finds_no_room_for_its_blocks_is_an_answer_still() -> None:
    session = Session.start(host_blocks=30)
    prompt = session.text(0, 3.5)
    first = await session.ask_and_check(prompt)
    occupy(session, 27)
    prompt += [*first.tokens, *session.text(1, 2)]
    session.engine.faults.refuse_stage_out = True
    reply = await session.ask(prompt)
    session.engine.faults.refuse_stage_out = False
    assert len(reply.tokens) == 3
    session.engine.plane.close_step("occupant", [])
    await session.check()
    assert session.engine.resident("w") == [0, 1, 2]
    again = await session.ask_and_check(prompt)
    assert again.tokens == reply.tokens


# ---- pages that are on the device under another role -----------------------------------------


@in_loop
async def test_a_new_page_that_the_tree_took_for_a_view_page_is_computed_next_time() -> None:
    """A view [sink, b, …] is on the device; another thread's prompt spells sink and b."""
    session = Session.start()
    prompt = await grown(session)
    await session.ask_and_check(prompt + session.text(1, 1))
    namespace = session.workspace.namespace
    recalled = session.workspace.thread("main").view[1]
    assert recalled != 1
    sink = session.workspace.tokens_of([0])
    spelled = [*sink, *session.workspace.tokens_of([recalled]), *session.text(6, 1.5)]
    before = session.workspace.block_count
    reply = await session.ask_and_check(spelled, thread="other")
    assert reply.report.computed_tokens < reply.report.new_tokens
    assert session.workspace.thread("other").line == (0,)
    assert session.workspace.namespace != namespace
    again = await session.ask_and_check([*spelled, 1], thread="other")
    assert again.report.new_tokens == len(spelled) + 1 - 32
    assert len(session.workspace.thread("other").line) == 3
    assert session.workspace.block_count > before


# ---- callers that go away --------------------------------------------------------------------


@in_loop
async def test_a_caller_cancelled_at_any_point_leaves_nothing_open() -> None:
    session = Session.start()
    prompt = await grown(session)
    for turns in range(0, 120, 3):
        asked = prompt + session.text(1 + turns % 3, 1.5)
        task = asyncio.create_task(session.ask(asked))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        for _ in range(10):
            await asyncio.sleep(0)
        await session.check()
    assert len((await session.ask_and_check(prompt + session.text(1, 1))).tokens) == 3
