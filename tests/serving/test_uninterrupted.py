"""Work that goes on to its end whatever becomes of who asked for it."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable

import pytest

from kvws.serving.uninterrupted import uninterrupted
from tests.step.session import in_loop


async def nothing() -> None:
    pass


async def fail() -> None:
    raise OSError(5, "no")


async def left_by_its_caller(last: Callable[[], Awaitable[None]]) -> BaseException | None:
    """What a caller hears that is cancelled again and again before the work's last part."""
    may_end, ended = asyncio.Event(), list[bool]()

    async def work() -> None:
        await may_end.wait()
        ended.append(True)
        await last()

    caller = asyncio.create_task(uninterrupted(work()))
    for _ in range(3):
        await asyncio.sleep(0)
        caller.cancel()
        await asyncio.sleep(0)
        assert not caller.done()
    may_end.set()
    await asyncio.wait({caller})
    assert ended and caller.cancelled()
    try:
        await caller
    except asyncio.CancelledError as error:
        return error.__cause__


@in_loop
async def test_its_error_is_that_of_the_work() -> None:
    await uninterrupted(nothing())
    with pytest.raises(OSError, match="no"):
        await uninterrupted(fail())


@in_loop
async def test_a_caller_that_is_cancelled_hears_of_it_when_the_work_has_ended() -> None:
    assert await left_by_its_caller(nothing) is None


@in_loop
async def test_an_error_that_nobody_waits_for_any_more_is_the_cause_and_no_noise() -> None:
    unheard: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
    assert isinstance(await left_by_its_caller(fail), OSError)
    gc.collect()
    assert not unheard


@in_loop
async def test_work_that_is_itself_cancelled_ends_so() -> None:
    async def cancel() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await uninterrupted(cancel())
    assert await left_by_its_caller(cancel) is None
