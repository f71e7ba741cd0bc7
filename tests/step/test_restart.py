"""Killed at any moment and started again, a session ends as if nothing had happened.

Set KVWS_SEED to repeat a run.
"""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import pytest

from kvws.session import durable, restore
from kvws.session.commit import Commit, decode_commit
from kvws.session.workspace import Workspace
from kvws.store.record import HEADER_BYTES, scan_frames
from tests.step.restarting import Life, Reference, Turn, begin_after_kill, state_of, story
from tests.step.session import in_loop, text

SEED = int(os.environ.get("KVWS_SEED", "7"))


def commits_of(log: bytes) -> list[tuple[int, Commit]]:
    """(offset of its end, commit)."""
    return [
        (offset + HEADER_BYTES + len(body), decode_commit(body))
        for offset, body in scan_frames(log).frames
    ]


@in_loop
async def test_a_kill_after_any_commit_changes_nothing(tmp_path: Path) -> None:
    """Whatever part of its blocks the disk had by then."""
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    reference = await Reference.tell(story(SEED), tmp_path)
    commits = commits_of(reference.log)
    resumed = cut = ahead = named = 0
    for end, commit in [(0, Commit()), *commits]:
        named = max([named, *(block.number + 1 for block in commit.announced)])
        held_blocks = {named}
        if not commit.announced:
            held_blocks.add(rng.choice([rng.randrange(named + 1), reference.blocks]))
        for held in held_blocks:
            life = await reference.after_a_kill(tmp_path, end, held)
            restored = life.restored
            assert not restored.lost and not restored.acknowledged_lost
            await life.play(reference.turns)
            await life.end()
            reference.assert_same_end(life)
            resumed += sum(report.resumed_tokens > 0 for report in life.reports)
            cut += restored.cut_blocks > 0
            ahead += held > named
            if held <= named:  # the log has named all that the rank may have
                mine, theirs = reference.life.reports, life.reports
                assert [r.decisions for r in mine] == [r.decisions for r in theirs]
            life.session.engine.plane.close()
    assert len(commits) > 30 and resumed > 5 and cut > 2 and ahead > 2


@pytest.mark.parametrize("forgotten", ["view", "kept_last_view", "unfinished"])
@in_loop
async def test_these_comparisons_would_catch_a_thread_that_is_not_restored(
    forgotten: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control."""
    reference = await Reference.tell(story(SEED), tmp_path)
    original = restore.restore

    def forgetful(*arguments: object) -> tuple[Workspace, restore.Restored]:
        workspace, restored = original(*arguments)  # type: ignore[arg-type]
        for thread in workspace.threads.values():
            value = {"view": (), "kept_last_view": True, "unfinished": set[int]()}[forgotten]
            setattr(thread, forgotten, value)
        return workspace, restored

    monkeypatch.setattr(durable, "restore", forgetful)
    for end, _ in commits_of(reference.log)[:-1]:
        life = await reference.after_a_kill(tmp_path, end, reference.blocks)
        await life.play(reference.turns)
        try:
            reference.assert_same_end(life)
        except AssertionError:
            return
    pytest.fail("nobody noticed")


@in_loop
async def test_a_session_that_is_killed_again_and_again_ends_the_same(tmp_path: Path) -> None:
    """Each life runs a turn or two, is killed, and loses the end of its log or of its blocks."""
    print(f"seed {SEED}")
    rng = random.Random(SEED + 1)
    reference = await Reference.tell(story(SEED), tmp_path)
    life = await reference.after_a_kill(tmp_path, 0, 0)
    replies: dict[int, list[int]] = {}
    lives = cut = 0
    while len(life.reports) < len(reference.turns):
        await life.play(reference.turns[: len(life.reports) + rng.randrange(1, 3)])
        await life.end()
        replies |= life.replies
        log = (tmp_path / "session.log").read_bytes()
        held = life.session.workspace.block_count - rng.choice([0, 0, 0, 1, 4])
        engine = life.session.engine.restarted()
        log = log[: len(log) - rng.choice([0, 1, 400])]
        life = await begin_after_kill(tmp_path, log, engine, held)
        lives += 1
        cut += life.restored.void_from is not None
        assert lives < 100
    life.replies = replies
    reference.assert_same_end(life)
    assert lives > 4 and cut


@in_loop
async def test_durable_blocks_that_are_gone_all_the_same_are_counted(tmp_path: Path) -> None:
    """Of the newest commits: cut and computed again. Of older ones: computed when needed."""
    turns = story(SEED)[:3]
    reference = await Reference.tell(turns, tmp_path)
    life = await reference.after_a_kill(tmp_path, 0, 0)
    for number in range(len(turns)):
        await life.play(turns[: number + 1])
        assert await life.acknowledgement.complete()
    await life.end()
    log = (tmp_path / "session.log").read_bytes()
    count = life.session.workspace.block_count
    engine = life.session.engine.restarted()
    life = await begin_after_kill(tmp_path, log, engine, count - 3)
    assert life.restored.acknowledged_lost == 3 and life.restored.cut_blocks == 4
    await life.play(turns)
    again = sum(report.recomputed_acknowledged_blocks for report in life.reports)
    assert again == 4, "a commit is cut as a whole"
    reference.assert_same_end(life)

    await life.end()
    engine = life.session.engine.restarted()
    attach = engine.attach

    async def lose_an_old_one(workspace: str, directory: str) -> frozenset[int]:
        held = await attach(workspace, directory)
        engine.plane.forget(workspace, [1])
        return held - {1}

    engine.attach = lose_an_old_one  # type: ignore[method-assign]
    life = await Life.begin(engine, tmp_path)
    assert life.restored.lost == (1,) and life.restored.cut_blocks == 0
    assert life.restored.acknowledged_lost == 1
    prompt = turns[0].prompt[: 4 * 32 + 5]
    reply = await life.session.ask_and_check(prompt, thread="other", max_new_tokens=1)
    assert reply.report.repaired_blocks == 1 == reply.report.recomputed_acknowledged_blocks


@in_loop
async def test_what_an_unfinished_step_left_is_told_from_what_it_computes_itself(
    tmp_path: Path,
) -> None:
    turns = [Turn("main", tuple(range(1000, 1000 + 20 * 32 + 9)))]
    reference = await Reference.tell(turns, tmp_path)
    (expected,) = reference.life.reports
    assert expected.resumed_tokens == 0 and expected.new_tokens == len(turns[0].prompt)
    log = commits_of(reference.log)
    chunks = [(end, c.blocks) for end, c in log if c.blocks and c.step is None]
    resumed_tokens = 0
    for number, (end, blocks) in enumerate(chunks, start=1):
        life = await reference.after_a_kill(tmp_path, end, reference.blocks)
        asked = len(life.session.engine.requests)
        await life.play(turns)
        (report,) = life.reports
        resumed_tokens += 32 * len(blocks)
        assert report.resumed_tokens == resumed_tokens
        assert report.new_tokens == expected.new_tokens
        assert report.computed_tokens == expected.computed_tokens
        ingests = [r for r in life.session.engine.requests[asked:] if r.rid.endswith("ingest")]
        assert len(ingests) == len(chunks) - number, "chunks begin where they would have begun"


@in_loop
async def test_another_thread_s_finished_step_is_not_taken_for_an_unfinished_one(
    tmp_path: Path,
) -> None:
    """main is interrupted; sub asks the same and ends; main asks again."""
    prompt = tuple(range(1000, 1000 + 20 * 32 + 9))
    reference = await Reference.tell([Turn("main", prompt)], tmp_path)
    chunk = commits_of(reference.log)[1][0]
    life = await reference.after_a_kill(tmp_path, chunk, reference.blocks)
    sub = await life.session.ask_and_check(prompt, thread="sub", keep_generated=False)
    assert sub.report.resumed_tokens == 0
    assert sub.report.new_tokens == len(prompt) - 3 * 32
    main = await life.session.ask_and_check(prompt, thread="main", keep_generated=False)
    assert main.report.resumed_tokens == 3 * 32
    assert main.report.new_tokens == len(prompt) - 20 * 32 + 3 * 32
    again = await life.session.ask_and_check(prompt, thread="main", keep_generated=False)
    assert again.report.resumed_tokens == 0 and again.report.new_tokens == 9


@in_loop
async def test_a_caller_cancelled_at_any_point_leaves_a_log_that_can_be_gone_on_with(
    tmp_path: Path,
) -> None:
    turns = story(SEED)[:3]
    reference = await Reference.tell(turns, tmp_path)
    life = await reference.after_a_kill(tmp_path, len(reference.log), reference.blocks)
    prompt = list(turns[-1].prompt)
    rng = random.Random(SEED)
    for waits in range(0, 90, 6):
        asked = prompt + text(waits % 7, 4.5, rng)
        task = asyncio.create_task(life.session.ask(asked, thread="main"))
        for _ in range(waits):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        await life.end()
        living = state_of(life.session.workspace)
        life = await Life.begin(life.session.engine.restarted(), tmp_path)
        await life.session.check(bits=False)
        assert not life.restored.acknowledged_lost
        assert state_of(life.session.workspace)["blocks"] <= living["blocks"]
        assert state_of(life.session.workspace)["threads"] == living["threads"]
    assert len((await life.session.ask_and_check([*prompt, 1])).tokens) == 3


@in_loop
async def test_threads_that_register_at_once_are_restored_after_any_commit(
    tmp_path: Path,
) -> None:
    rng = random.Random(SEED)
    shared = text(0, 3, rng)
    prompts = {name: shared + text(topic, 14.2, rng) for topic, name in enumerate("abc", 1)}
    reference = await Reference.tell([], tmp_path)
    life = await reference.after_a_kill(tmp_path, 0, 0)
    await asyncio.gather(
        *(life.session.ask(prompt, thread=name) for name, prompt in prompts.items())
    )
    await life.session.check()
    living = state_of(life.session.workspace)
    await life.end()
    log = (tmp_path / "session.log").read_bytes()
    engine = life.session.engine
    engine.plane.close()
    disk = engine._arguments["storage"]
    for end, commit in commits_of(log):
        heir = engine.restarted(storage=disk.kill())
        life = await begin_after_kill(tmp_path, log[:end], heir, 10_000)
        assert not life.restored.lost and not life.restored.cut_blocks
        restored = state_of(life.session.workspace)
        assert restored["blocks"] <= living["blocks"]
        if commit.thread is not None:
            head = restored["threads"][commit.thread.name][0]
            assert len(head) == len(life.session.workspace.lineage(commit.thread.head)) + 1
        await life.session.check(bits=False)
        if end < len(log):
            await life.end()
    assert restored == living
    for name, prompt in prompts.items():
        reply = await life.session.ask_and_check(prompt, thread=name)
        assert reply.report.new_tokens < 64
