"""The session log on a disk that is slow, full, failing or losing what it promised."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import random
import stat
from pathlib import Path

import pytest

from kvws.errors import StoreError
from kvws.session import journal as journal_module
from kvws.session.commit import Commit
from kvws.session.journal import SessionJournal, _decode
from tests.step.session import in_loop

SEED = int(os.environ.get("KVWS_SEED", "11"))


class FailingFile:
    """A file on a disk that fails when it is told to.

    A failed write leaves a part of its data. A failed sync loses what was not durable, and the
    next sync that succeeds covers only what was written after it.
    """

    def __init__(self, seed: int = 0) -> None:
        self.cached = bytearray()
        self.durable = bytearray()
        self.failures: dict[int, int] = {}
        self.failing: int | None = None
        self.operations = self.syncs = 0
        self.slow_turns = 0
        self._dirty: set[int] = set()
        self._position = 0
        self._chance = random.Random(seed)

    async def _operation(self) -> int | None:
        for _ in range(1 + self.slow_turns):
            await asyncio.sleep(0)
        self.operations += 1
        return self.failures.get(self.operations, self.failing)

    async def read(self) -> bytes:
        return bytes(self.cached)

    async def seek(self, offset: int) -> int:
        self._position = offset
        return offset

    async def write(self, data: memoryview) -> int:
        failure = await self._operation()
        taken = len(data) if failure is None else self._chance.randrange(len(data))
        if failure is None and taken > 3 and self._chance.random() < 0.3:
            taken //= 2  # short, and no error
        end = self._position + taken
        if len(self.cached) < end:
            self.cached += bytes(end - len(self.cached))
        self.cached[self._position : end] = data[:taken]
        self._dirty |= set(range(self._position, end))
        self._position = end
        if failure is not None:
            raise OSError(failure, os.strerror(failure))
        return taken

    async def truncate(self, size: int) -> int:
        if (failure := await self._operation()) is not None:
            raise OSError(failure, os.strerror(failure))
        del self.cached[size:]
        self._dirty = {offset for offset in self._dirty if offset < size}
        return size

    async def sync(self) -> None:
        self.syncs += 1
        dirty = set(self._dirty)
        size = len(self.cached)
        failure = await self._operation()
        if failure is not None:
            self._dirty -= dirty
            raise OSError(failure, os.strerror(failure))
        self.durable += bytes(max(0, size - len(self.durable)))
        del self.durable[size:]
        for offset in dirty:
            if offset < len(self.durable):
                self.durable[offset] = self.cached[offset]
        self._dirty -= dirty

    async def close(self) -> None: ...


def numbers_in(data: bytes | bytearray) -> list[int]:
    log, _, damaged = _decode(bytes(data))
    assert not damaged
    return [commit.note for _, commit in log]


async def commit(journal: SessionJournal, number: int) -> None:
    journal.append(Commit(note=number))
    await journal.written()


@in_loop
async def test_commits_come_back_in_order(tmp_path: Path) -> None:
    path = tmp_path / "session.log"
    for life in range(3):
        journal, log = await SessionJournal.open(path)
        assert [c.note for _, c in log] == list(range(10 * life))
        await asyncio.gather(*(commit(journal, 10 * life + n) for n in range(10)))
        assert await journal.sync() and not journal.degraded
        assert journal.synced_bytes == path.stat().st_size
        await journal.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@in_loop
async def test_a_commit_that_was_waited_for_survives_the_process(tmp_path: Path) -> None:
    path = tmp_path / "session.log"
    journal, _ = await SessionJournal.open(path)
    for number in range(5):
        await commit(journal, number)
        assert numbers_in(path.read_bytes()) == list(range(number + 1))
    await journal.close()


@in_loop
async def test_a_torn_end_is_cut_and_the_log_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "session.log"
    journal, _ = await SessionJournal.open(path)
    for number in range(4):
        await commit(journal, number)
    await journal.close()
    whole = path.read_bytes()
    for torn in range(1, len(whole) // 4 + 3):
        path.write_bytes(whole[:-torn])
        journal, log = await SessionJournal.open(path)
        kept = [c.note for _, c in log]
        assert kept == list(range(len(kept))) and len(kept) in (2, 3)
        await commit(journal, 9)
        await journal.close()
        assert numbers_in(path.read_bytes()) == [*kept, 9]


@in_loop
async def test_a_damaged_commit_is_left_out_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "session.log"
    journal, _ = await SessionJournal.open(path)
    for number in range(3):
        await commit(journal, number)
        await journal.sync()
    await journal.close()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        journal, log = await SessionJournal.open(path)
    await journal.close()
    assert [c.note for _, c in log] == [0, 2]
    assert "damaged" in caplog.text


@in_loop
async def test_an_end_that_lost_an_earlier_commit_and_kept_a_later_one_is_torn_there(
    tmp_path: Path,
) -> None:
    """As a power loss can leave it: nothing of that end was synced."""
    path = tmp_path / "session.log"
    file = FailingFile()
    journal = SessionJournal(file, 0)
    ends = [0]
    for number in range(5):
        await commit(journal, number)
        ends.append(len(file.cached))
        if number == 1:
            assert await journal.sync()
            file.sync = asyncio.Event().wait  # type: ignore[method-assign]  # it never ends
    for lost in (2, 3):
        data = bytearray(file.cached)
        data[ends[lost] : ends[lost + 1]] = bytes(ends[lost + 1] - ends[lost])
        path.write_bytes(data)
        reopened, log = await SessionJournal.open(path)
        assert [c.note for _, c in log] == list(range(lost))
        assert path.stat().st_size == ends[lost]
        await reopened.close()
    data = bytearray(file.cached)
    data[ends[0] : ends[1]] = bytes(ends[1])
    path.write_bytes(data)
    reopened, log = await SessionJournal.open(path)
    assert [c.note for _, c in log] == [1, 2, 3, 4], "what was durable is damaged, not torn"
    await reopened.close()


@pytest.mark.parametrize("kind", ["link", "folder", "no folder"])
@in_loop
async def test_a_log_that_cannot_be_opened_is_an_error_with_a_hint(
    tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "session.log"
    if kind == "link":
        (tmp_path / "other").write_bytes(b"not ours")
        path.symlink_to(tmp_path / "other")
    elif kind == "folder":
        path.mkdir()
    else:
        path = tmp_path / "nowhere" / "session.log"
    with pytest.raises(StoreError) as refused:
        await SessionJournal.open(path)
    assert str(path) in str(refused.value) and refused.value.hint
    if kind == "link":
        assert (tmp_path / "other").read_bytes() == b"not ours"


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
@in_loop
async def test_an_error_at_any_operation_loses_nothing_and_reaches_no_caller(error: int) -> None:
    failed_at = 0
    while True:
        failed_at += 1
        file = FailingFile(failed_at)
        file.failures = {failed_at: error}
        journal = SessionJournal(file, 0)
        for number in range(4):
            await commit(journal, number)
        seen = numbers_in(file.cached[: journal._end])
        assert seen == list(range(len(seen)))
        if not await journal.sync():
            assert journal.degraded
            assert await journal.sync(), "the next attempt succeeds"
        assert not journal.degraded
        assert numbers_in(file.durable) == list(range(4))
        await journal.close()
        if file.operations < failed_at:
            break
    assert failed_at > 8


@in_loop
async def test_random_trouble_ends_with_every_commit_in_order() -> None:
    print(f"seed {SEED}")
    for seed in range(SEED, SEED + 60):
        rng = random.Random(seed)
        file = FailingFile(seed)
        file.slow_turns = rng.randrange(3)
        kinds = (errno.EIO, errno.ENOSPC)
        file.failures = {n: rng.choice(kinds) for n in rng.sample(range(1, 60), 12)}
        journal = SessionJournal(file, 0)
        durable = 0
        for number in range(20):
            journal.append(Commit(note=number))
            if rng.random() < 0.5:
                await journal.written()
            if rng.random() < 0.3 and await journal.sync():
                durable = number + 1
            assert numbers_in(file.durable)[:durable] == list(range(durable))
        while not await journal.sync():
            pass
        await journal.close()
        assert numbers_in(file.durable) == list(range(20)) == numbers_in(file.cached)


@in_loop
async def test_the_checks_would_catch_a_sync_that_is_only_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Negative control: after a failed sync, only writing again makes lost pages durable."""

    def keep(self: SessionJournal) -> None: ...

    monkeypatch.setattr(SessionJournal, "_take_back_unsynced", keep)
    file = FailingFile()
    file.failures = {2: errno.EIO}
    journal = SessionJournal(file, 0)
    await commit(journal, 0)
    while not await journal.sync():
        pass
    log, _, _ = _decode(bytes(file.durable))
    assert [c.note for _, c in log] != [0]


@in_loop
async def test_what_an_earlier_life_failed_to_sync_is_written_again(tmp_path: Path) -> None:
    """The page cache still has it, looks clean, and is the only one to have it."""
    file = FailingFile()
    earlier = SessionJournal(file, 0)
    file.failures = {2: errno.EIO}  # the sync
    await commit(earlier, 0)
    assert earlier._syncing is not None and not await earlier._syncing
    assert numbers_in(file.cached) == [0] and not any(file.durable), "it died right here"
    _, log = await SessionJournal._opened(file, tmp_path / "session.log")
    assert [found.note for _, found in log] == [0] == numbers_in(file.durable)


@in_loop
async def test_trouble_is_said_once_and_its_end_once(caplog: pytest.LogCaptureFixture) -> None:
    file = FailingFile()
    journal = SessionJournal(file, 0)
    file.failing = errno.ENOSPC
    with caplog.at_level(logging.WARNING):
        for number in range(6):
            await commit(journal, number)
            assert not await journal.sync() and journal.degraded
        assert len(caplog.records) == 1
        file.failing = None
        await commit(journal, 6)
        assert await journal.sync() and not journal.degraded
    assert len(caplog.records) == 2
    assert numbers_in(file.durable) == list(range(7))


@in_loop
async def test_a_disk_that_stays_in_trouble_costs_bounded_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was dropped is never followed by commits that build on it."""
    monkeypatch.setattr(journal_module, "_WAITING_MAX_BYTES", 200)
    file = FailingFile()
    journal = SessionJournal(file, 0)
    for number in range(3):
        await commit(journal, number)
    assert await journal.sync()
    file.failing = errno.EIO
    for number in range(3, 200):
        await commit(journal, number)
    assert sum(map(len, journal._waiting)) <= 200
    file.failing = None
    for number in range(200, 210):
        await commit(journal, number)
    assert journal.degraded and not await journal.sync()
    await journal.close()
    kept = numbers_in(file.cached[: journal._end])
    assert kept == list(range(len(kept))) and 3 <= len(kept) < 100


@in_loop
async def test_a_caller_that_goes_away_does_not_tear_the_log() -> None:
    for turns in range(12):
        file = FailingFile()
        file.slow_turns = 3
        journal = SessionJournal(file, 0)
        waiting = asyncio.create_task(commit(journal, 0))
        for _ in range(turns):
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})
        started = turns > 0
        await commit(journal, 1)
        assert await journal.sync()
        assert numbers_in(file.durable) == ([0, 1] if started else [1])
        await journal.close()


@in_loop
async def test_syncs_of_many_commits_are_few() -> None:
    file = FailingFile()
    file.slow_turns = 5
    journal = SessionJournal(file, 0)

    async def durable(number: int) -> None:
        journal.append(Commit(note=number))
        assert await journal.sync()

    await asyncio.gather(*map(durable, range(100)))
    assert sorted(numbers_in(file.durable)) == list(range(100))
    assert file.syncs <= 3
    await journal.close()


@in_loop
async def test_an_acknowledgement_goes_with_the_next_commit() -> None:
    file = FailingFile()
    journal = SessionJournal(file, 0)
    await commit(journal, 0)
    assert await journal.sync()
    end = journal.synced_bytes
    journal.acknowledge(end)
    await commit(journal, 1)
    await commit(journal, 2)
    log, _, _ = _decode(bytes(file.cached))
    assert [c.acknowledged_to for _, c in log] == [0, end, 0]
    await journal.close()
