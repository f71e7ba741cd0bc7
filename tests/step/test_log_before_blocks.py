"""A number is in the session log before any rank can store a block under it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvws.session import journal
from kvws.session.commit import decode_commit
from kvws.store.record import scan_frames
from tests.step.restarting import LIMITS, Life, make_directories, story
from tests.step.session import in_loop
from tests.step.simulated_engine import SimulatedEngine
from tests.store.simulated_disk import SimulatedDisk


def announced_in(log: Path) -> set[int]:
    commits = [decode_commit(body) for _, body in scan_frames(log.read_bytes()).frames]
    return {block.number for commit in commits for block in commit.announced}


@in_loop
async def test_a_rank_is_told_of_a_block_only_when_the_log_has_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slow the log's file is: else a kill would leave a stored block without a name, and
    its tokens would get another number in the next life."""
    write = journal._write_at

    async def slow_write(*arguments: Any) -> None:
        for _ in range(50):
            await asyncio.sleep(0)
        await write(*arguments)

    monkeypatch.setattr(journal, "_write_at", slow_write)
    disk = SimulatedDisk()
    make_directories(disk, tmp_path)
    engine = SimulatedEngine(context_tokens=LIMITS.context_tokens, storage=disk)
    life = await Life.begin(engine, tmp_path)
    close_step = engine.close_step
    named_blocks = 0

    async def close_and_compare(step: str, named: Sequence[tuple[str, int, int]]) -> Any:
        nonlocal named_blocks
        numbers = {number for _, number, _ in named}
        assert numbers <= announced_in(tmp_path / journal.SESSION_LOG)
        named_blocks += len(numbers)
        return await close_step(step, named)

    monkeypatch.setattr(engine, "close_step", close_and_compare)
    await life.play(story(seed=7))
    await life.end()
    assert named_blocks > 20
    engine.plane.close()
