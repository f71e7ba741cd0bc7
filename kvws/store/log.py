"""An append-only file of frames that a crash or a failing disk cannot leave half written."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from kvws.store.manifest import TEMPORARY_SUFFIX
from kvws.store.record import Scan, encode_frame, scan_frames
from kvws.store.storage import File, Storage

_WRITE_BYTES = 8 << 20
"""About how much one write of a rewrite takes."""


class AppendLog:
    """One writer appends and syncs; what was synced is found by the next `open`.

    After any error everything appended since the last successful `sync` is void: the system's
    cache may hold bytes that the disk does not. The file is cut back to that sync, durably, before
    it takes another frame, so a frame that failed never comes back later. Not thread-safe.
    """

    def __init__(self, storage: Storage, path: Path, file: File, size_bytes: int) -> None:
        self._storage = storage
        self._path = path
        self._file = file
        self._end_bytes = self._synced_bytes = size_bytes
        self._tail_is_suspect = False
        self._rename_is_unsynced = False

    @classmethod
    def open(cls, storage: Storage, path: Path) -> tuple[AppendLog, Scan]:
        """Create or continue a log. What the scan found is durable, and the torn tail is gone.

        Raises:
            OSError: the disk's error.
        """
        temporary = _temporary(path)
        if storage.exists(temporary):
            storage.unlink(temporary)
        file = storage.open_log(path, create=True)
        try:
            data = _content(file)
            scan = scan_frames(data)
            log = cls(storage, path, file, scan.valid_bytes)
            # An earlier process may have left frames, or the file's name, in the cache alone; and
            # what a sync failed to write looks clean to the system: only doing it again helps.
            _cut(file, scan.valid_bytes)
            if scan.valid_bytes:
                file.write([data[: scan.valid_bytes]], 0)
            file.sync()
            storage.sync_directory(path.parent)
        except BaseException:
            file.close()
            raise
        return log, scan

    @property
    def size_bytes(self) -> int:
        """End of the last frame appended."""
        return self._end_bytes

    def append(self, bodies: Sequence[bytes]) -> None:
        """Write frames behind the last one; they are durable after `sync`.

        Raises:
            OSError: everything since the last successful sync is void.
        """
        self.heal()
        data, end_bytes = _encode(bodies, self._end_bytes)
        self._tail_is_suspect = True
        try:
            self._file.write([memoryview(data)], self._end_bytes)
        except BaseException:
            self._cut_back()
            raise
        self._end_bytes = end_bytes
        self._tail_is_suspect = False

    def sync(self) -> None:
        """Make all frames appended so far durable.

        Raises:
            OSError: everything since the last successful sync is void.
        """
        self.heal()
        if self._end_bytes == self._synced_bytes:
            return
        self._tail_is_suspect = True
        try:
            self._file.sync()
        except BaseException:
            self._cut_back()
            raise
        self._synced_bytes = self._end_bytes
        self._tail_is_suspect = False

    def heal(self) -> None:
        """After an error, make the file end durably where it was last synced. Else do nothing.

        Raises:
            OSError: the disk still fails; the log takes no frames until this succeeds.
        """
        if self._tail_is_suspect:
            self._end_bytes = self._synced_bytes
            _cut(self._file, self._end_bytes)
            self._file.sync()
            self._tail_is_suspect = False
        if self._rename_is_unsynced:
            self._storage.sync_directory(self._path.parent)
            self._rename_is_unsynced = False

    def rewrite(self, bodies: Iterable[bytes]) -> None:
        """Replace all frames by others, durably; after a crash the log is the old or the new one.

        The frames given must mean the same as the old ones.

        Raises:
            OSError: the log holds the old frames or the new ones.
        """
        temporary = _temporary(self._path)
        file = self._storage.open_log(temporary, create=True)
        try:
            size_bytes = _write_anew(file, bodies)
            self._rename(temporary)
        except BaseException:
            file.close()
            with contextlib.suppress(OSError):  # the first error is the one to tell
                self._storage.unlink(temporary)
            raise
        replaced, self._file = self._file, file
        self._end_bytes = self._synced_bytes = size_bytes
        self._tail_is_suspect = False
        self._rename_is_unsynced = True
        with contextlib.suppress(OSError):  # nobody needs its bytes any more
            replaced.close()
        self.heal()

    def close(self) -> None:
        self._file.close()

    def _rename(self, temporary: Path) -> None:
        """Put the temporary file in place; an error means that it is not there."""
        try:
            self._storage.rename(temporary, self._path)
        except OSError:
            # An error does not say that nothing was done.
            if self._storage.exists(temporary):
                raise

    def _cut_back(self) -> None:
        with contextlib.suppress(OSError):  # tried again before the next frame
            self.heal()


def write_log(storage: Storage, path: Path, bodies: Iterable[bytes]) -> None:
    """Make a log of these frames, durable but for its name.

    Raises:
        OSError: the disk's error; the file may be there in part.
    """
    with contextlib.closing(storage.open_log(path, create=True)) as file:
        _write_anew(file, bodies)


def _write_anew(file: File, bodies: Iterable[bytes]) -> int:
    """Replace all that a file holds by frames, durably. Returns where they end."""
    file.truncate(0)
    size_bytes = _write_all(file, bodies)
    file.sync()
    return size_bytes


def _temporary(path: Path) -> Path:
    return path.with_name(path.name + TEMPORARY_SUFFIX)


def _cut(file: File, size_bytes: int) -> None:
    """End a file here, even if it does already: the sync of an earlier cut may have failed."""
    if file.size() == size_bytes:
        file.truncate(size_bytes + 1)  # a change of size is what the next sync writes
    file.truncate(size_bytes)


def _content(file: File) -> memoryview:
    data = memoryview(bytearray(file.size()))
    if data:
        file.read([data], 0)
    return data


def _encode(bodies: Iterable[bytes], offset: int) -> tuple[bytes, int]:
    """Consecutive frames from `offset` on, and where they end."""
    frames: list[bytes] = []
    for body in bodies:
        frames.append(encode_frame(body, offset))
        offset += len(frames[-1])
    return b"".join(frames), offset


def _write_all(file: File, bodies: Iterable[bytes]) -> int:
    """Write frames from offset 0 on. Returns where they end."""
    pending: list[bytes] = []
    begin = end = 0
    for body in bodies:
        pending.append(encode_frame(body, end))
        end += len(pending[-1])
        if end - begin >= _WRITE_BYTES:
            file.write([memoryview(b"".join(pending))], begin)
            pending, begin = [], end
    if pending:
        file.write([memoryview(b"".join(pending))], begin)
    return end
