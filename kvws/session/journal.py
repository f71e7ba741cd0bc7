"""The session log on disk: commits appended in order, synced behind the session's back.

The event loop never waits for the disk, and a step never fails for it: while the file cannot be
written, commits are kept in memory and the file stays as it is up to its last good frame. The
next commit tries again.
"""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, cast

import aiofiles

from kvws.errors import StoreError, StoreFormatError
from kvws.session.commit import Commit, decode_commit, encode_commit
from kvws.store.record import HEADER_BYTES, encode_frame, scan_frames

SESSION_LOG = "session.log"
_WAITING_MAX_BYTES = 64 << 20
"""Commits that may wait for a disk in trouble: some ten million tokens."""

_log = logging.getLogger("kvws.session")


class Journal(Protocol):
    """Where a workspace writes down what it will need after a restart."""

    @property
    def degraded(self) -> bool:
        """Whether commits are waiting for a disk in trouble, or were given up."""
        ...

    @property
    def synced_bytes(self) -> int:
        """Commits before this offset are durable."""
        ...

    def append(self, commit: Commit) -> None:
        """Put a commit behind all others, on its way to the disk. Returns at once."""
        ...

    def acknowledge(self, offset: int) -> None:
        """Note, with the next commit, that commits before `offset` and their blocks are durable.
        """
        ...

    async def written(self) -> None:
        """Wait until what was appended survives this process, or could not be written."""
        ...

    async def sync(self) -> bool:
        """Wait until what was appended survives a power loss. False: it could not be written."""
        ...

    async def close(self) -> None: ...


class NullJournal:
    """Of a workspace that ends with its process: nothing is kept, and nobody waits."""

    degraded = False
    synced_bytes = 0

    def append(self, commit: Commit) -> None: ...

    def acknowledge(self, offset: int) -> None: ...

    async def written(self) -> None: ...

    async def sync(self) -> bool:
        return False

    async def close(self) -> None: ...


class LogFile(Protocol):
    """What the journal asks of an unbuffered aiofiles file."""

    async def read(self) -> bytes: ...
    async def write(self, data: memoryview) -> int: ...
    async def seek(self, offset: int) -> int: ...
    async def truncate(self, size: int) -> int: ...
    async def sync(self) -> None: ...
    async def close(self) -> None: ...


class SessionJournal:
    """Implements `Journal` on a file of frames.

    ```
    0          synced_bytes      _end
    | durable  | in the file     |                      a frame each
               | _unsynced       | _waiting …           in memory
    ```
    """

    def __init__(self, file: LogFile, end_bytes: int) -> None:
        self.synced_bytes = end_bytes
        self._file = file
        self._end = end_bytes
        self._unsynced: list[bytes] = []
        self._waiting: list[bytes] = []
        self._in_memory_bytes = 0
        self._appended = self._synced = 0
        self._acknowledged_to = 0
        self._file_lock = asyncio.Lock()
        self._writing: asyncio.Task[bool] | None = None
        self._syncing: asyncio.Task[bool] | None = None
        self._cut_before_writing = False
        self._in_trouble = False
        self._given_up = False

    @classmethod
    async def open(cls, path: Path) -> tuple[SessionJournal, list[tuple[int, Commit]]]:
        """Open or create a log; a torn end is cut off.

        Returns:
            (journal, commits with their file offsets, in order). Damaged commits are left out,
            and said in the log.

        Raises:
            StoreError: the file cannot be opened or read.
        """
        try:
            file = await _open_file(path)
            try:
                return await cls._opened(file, path)
            except BaseException:
                await file.close()
                raise
        except OSError as error:
            raise StoreError(
                f"{path} cannot be used: {error.strerror}", hint="check its disk and permissions"
            ) from error

    @classmethod
    async def _opened(
        cls, file: LogFile, path: Path
    ) -> tuple[SessionJournal, list[tuple[int, Commit]]]:
        data = await file.read()
        commits, valid_bytes, damaged_bytes = await asyncio.to_thread(_decode, data)
        if damaged_bytes:
            _log.warning("%s: %d damaged bytes are left out", path, damaged_bytes)
        if valid_bytes < len(data):
            await file.truncate(valid_bytes)
        # What an earlier life failed to sync looks clean to the system and is not on the disk:
        # only writing it again makes it durable.
        await _write_at(file, data[:valid_bytes], 0)
        await file.sync()
        await asyncio.to_thread(_sync_directory, path.parent)
        return cls(file, valid_bytes), commits

    @property
    def degraded(self) -> bool:
        return self._in_trouble or self._given_up

    def append(self, commit: Commit) -> None:
        if self._given_up:
            return
        body = encode_commit(
            replace(
                commit, acknowledged_to=self._acknowledged_to, synced_to=self.synced_bytes
            )
        )
        self._acknowledged_to = 0
        self._waiting.append(body)
        self._appended += 1
        self._in_memory_bytes += len(body)
        if self._in_memory_bytes > _WAITING_MAX_BYTES:
            self._give_up()
        else:
            self._start_writing()

    def acknowledge(self, offset: int) -> None:
        self._acknowledged_to = offset

    async def written(self) -> None:
        await self._write()

    async def sync(self) -> bool:
        wanted = self._appended
        while self._synced < wanted and not self._given_up:
            if not await self._write() or not await asyncio.shield(self._start_syncing()):
                return False
        return not self._given_up

    async def close(self) -> None:
        """Write and sync what can be, and close the file."""
        await self.sync()
        if self._syncing is not None:
            await self._syncing
        await self._file.close()

    # ---- the disk ----------------------------------------------------------------------------

    async def _write(self) -> bool:
        """Whether everything appended so far is in the file now. A caller that is cancelled does
        not stop it."""
        if not self._waiting:
            return True
        return await asyncio.shield(self._start_writing())

    def _start_writing(self) -> asyncio.Task[bool]:
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write_waiting())
        return self._writing

    async def _write_waiting(self) -> bool:
        async with self._file_lock:
            while self._waiting:
                bodies = list(self._waiting)
                try:
                    await self._append_frames(bodies)
                except OSError as error:
                    self._trouble(error)
                    return False
                del self._waiting[: len(bodies)]
                self._unsynced += bodies
        self._start_syncing()
        return True

    async def _append_frames(self, bodies: list[bytes]) -> None:
        if self._cut_before_writing:
            await self._file.truncate(self._end)
            self._cut_before_writing = False
        end = self._end
        data = bytearray()
        for body in bodies:
            frame = encode_frame(body, end)
            data += frame
            end += len(frame)
        self._cut_before_writing = True  # until all of it is there
        await _write_at(self._file, data, self._end)
        self._cut_before_writing = False
        self._end = end

    def _start_syncing(self) -> asyncio.Task[bool]:
        if self._syncing is None or self._syncing.done():
            self._syncing = asyncio.create_task(self._sync_file())
        return self._syncing

    async def _sync_file(self) -> bool:
        """Whether everything that the file held is durable now."""
        end, frames = self._end, len(self._unsynced)
        try:
            await self._file.sync()
        except OSError as error:
            async with self._file_lock:
                self._take_back_unsynced()
            self._trouble(error)
            return False
        self.synced_bytes = end
        self._synced += frames
        if self._in_trouble and not self._waiting:
            _log.warning("the session log is written again")
            self._in_trouble = False
        self._in_memory_bytes -= sum(map(len, self._unsynced[:frames]))
        del self._unsynced[:frames]
        return True

    def _take_back_unsynced(self) -> None:
        """After a failed sync the system may take lost pages for written ones: only writing them
        again makes them durable."""
        self._waiting[:0] = self._unsynced
        self._unsynced.clear()
        self._end = self.synced_bytes
        self._cut_before_writing = True

    def _trouble(self, error: OSError) -> None:
        if not self._in_trouble:
            _log.warning("the session log cannot be written, it waits in memory: %s", error)
        self._in_trouble = True

    def _give_up(self) -> None:
        """What follows would be worthless without what is dropped here."""
        self._given_up = True
        self._waiting.clear()
        _log.error(
            "the session log could not be written for %d MiB; what the session does from now on "
            "is gone after a restart",
            _WAITING_MAX_BYTES >> 20,
        )


class _AiofilesLog:
    """An unbuffered aiofiles file that can be synced."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.read = file.read
        self.write = file.write
        self.seek = file.seek
        self.truncate = file.truncate
        self.close = file.close

    async def sync(self) -> None:
        await asyncio.to_thread(os.fdatasync, self._file.fileno())


async def _write_at(file: LogFile, data: bytes | bytearray, offset: int) -> None:
    await file.seek(offset)
    rest = memoryview(data)
    while rest:
        rest = rest[await file.write(rest) :]


async def _open_file(path: Path) -> LogFile:
    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    file: Any = await aiofiles.open(path, "r+b", buffering=0, opener=opener)
    return cast("LogFile", _AiofilesLog(file))


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _decode(data: bytes) -> tuple[list[tuple[int, Commit]], int, int]:
    """(commits with offsets, end of the last that counts, damaged bytes before it).

    A power loss can leave a later frame of the end that was not synced, and not an earlier one:
    such an end is torn at its first gap. A gap in what was durable once is damage, and costs no
    more than the commit that was there.
    """
    scan = scan_frames(data)
    commits: list[tuple[int, Commit]] = []
    unreadable_bytes = 0
    for offset, body in scan.frames:
        try:
            commits.append((offset, decode_commit(body)))
        except StoreFormatError:
            unreadable_bytes += HEADER_BYTES + len(body)
    durable_bytes = max((commit.synced_to for _, commit in commits), default=0)
    end = damaged_bytes = 0
    for offset, body in scan.frames:
        if offset > max(end, durable_bytes):
            kept = [commit for commit in commits if commit[0] < end]
            return kept, end, damaged_bytes + unreadable_bytes
        damaged_bytes += offset - end
        end = offset + HEADER_BYTES + len(body)
    return commits, end, damaged_bytes + unreadable_bytes
