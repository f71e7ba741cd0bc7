"""Blocks that scored just under the cut come up from disk while the model decodes."""

from __future__ import annotations

from pathlib import Path

from kvws.session.durable import Acknowledgement, reopen
from kvws.store.posix import PosixStorage
from tests.step.session import Session, in_loop


@in_loop
async def test_a_recall_lifts_its_near_misses(tmp_path: Path) -> None:
    session = Session.start(storage=PosixStorage(tmp_path))
    session.workspace, _ = await reopen("w", session.engine, tmp_path)
    prompt = session.text(1, 10) + session.text(2, 10) + session.text(3, 10.5)
    await session.ask_and_check(prompt)
    assert await Acknowledgement(session.workspace, session.engine).complete()
    await session.workspace.journal.close()
    session.engine = session.engine.restarted()
    session.workspace, restored = await reopen("w", session.engine, tmp_path)
    assert restored.blocks == 30 and session.engine.plane.stats()["host_used_blocks"] == 0
    reply = await session.ask_and_check(prompt + session.text(1, 1))
    selected = {d.block for d in reply.report.decisions}
    await session.engine.settle()
    session.engine.plane._durable.lifter.close()  # type: ignore[union-attr]
    lifted = {
        number
        for number in range(30)
        if session.engine.plane.block_payload("w", number) is not None
    }
    near_misses = lifted - selected
    assert 1 <= len(near_misses) <= 2, "a quarter of a budget of eight blocks"
    assert near_misses <= set(range(10)), "the question was about the first ten blocks"
    await session.workspace.journal.close()
