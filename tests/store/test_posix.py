"""Real files: whole transfers or an error, private modes, nothing left behind."""

from __future__ import annotations

import errno
import mmap
import os
import random
import stat
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kvws.store.posix import PosixFile, PosixStorage, open_nameless, prove
from kvws.store.storage import SECTOR_BYTES, File

SECTORS = 16
SEGMENT_BYTES = SECTORS * SECTOR_BYTES


@pytest.fixture
def storage(tmp_path: Path) -> PosixStorage:
    return PosixStorage(tmp_path)


@pytest.fixture(params=["as the file system allows", "buffered"])
def any_storage(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> PosixStorage:
    if request.param == "buffered":
        refuse_direct_io(monkeypatch)
    return PosixStorage(tmp_path)


def refuse_direct_io(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer of a file system without direct I/O."""
    real_open = os.open

    def refusing_open(path: str, flags: int, *arguments: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_open(path, flags, *arguments)

    monkeypatch.setattr(os, "open", refusing_open)


def aligned(sectors: int, content: bytes = b"") -> memoryview:
    memory = memoryview(mmap.mmap(-1, sectors * SECTOR_BYTES))
    memory[: len(content)] = content
    return memory


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_description_says_whether_the_page_cache_is_avoided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        os.close(open_nameless(tmp_path, os.O_DIRECT))
        assert PosixStorage(tmp_path).description == "posix, O_DIRECT"
    except OSError:
        assert PosixStorage(tmp_path).description.startswith("posix, buffered (")
    refuse_direct_io(monkeypatch)
    refused = PosixStorage(tmp_path).description
    assert refused == "posix, buffered (no file can be opened for it: Invalid argument)"


def test_a_direct_open_that_succeeds_proves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "pwritev", failing)
    monkeypatch.setattr("kvws.store.posix.open_nameless", lambda *_: os.dup(0))
    refused = PosixStorage(tmp_path).description
    assert refused == "posix, buffered (a write and read failed: Invalid argument)"


def test_a_disk_that_returns_other_bytes_is_not_proven(tmp_path: Path) -> None:
    class Forgetful(PosixFile):
        def write(self, buffers: Sequence[memoryview], offset: int) -> None:
            super().write([aligned(1)], offset)

    prove(PosixFile(open_nameless(tmp_path), aligned=True))
    with pytest.raises(OSError, match="other bytes"):
        prove(Forgetful(open_nameless(tmp_path), aligned=True))


def test_asking_leaves_nothing_behind_and_needs_no_directory(tmp_path: Path) -> None:
    before = open_descriptors()
    present = PosixStorage(tmp_path).description
    assert PosixStorage(tmp_path / "not" / "yet").description == present
    assert list(tmp_path.iterdir()) == []
    assert open_descriptors() == before


def test_a_file_system_without_nameless_files_is_asked_with_a_named_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = os.open

    def no_nameless(path: str, flags: int, *arguments: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "")
        return real_open(path, flags, *arguments)

    monkeypatch.setattr(os, "open", no_nameless)
    descriptor = open_nameless(tmp_path)
    assert os.fstat(descriptor).st_nlink == 0 and list(tmp_path.iterdir()) == []
    os.close(descriptor)


def test_segments_come_back_after_reopening(any_storage: PosixStorage, tmp_path: Path) -> None:
    path = tmp_path / "segment"
    payload = random.Random(1).randbytes(3 * SECTOR_BYTES)
    file = any_storage.open_segment(path, create_bytes=SEGMENT_BYTES)
    assert file.size() == SEGMENT_BYTES
    assert any_storage.allocated_bytes(path) >= SEGMENT_BYTES
    first, last = aligned(2, payload[: 2 * SECTOR_BYTES]), aligned(1, payload[-SECTOR_BYTES:])
    file.write([first, last], SECTOR_BYTES)
    file.sync()
    file.close()
    again = any_storage.open_segment(path)
    parts = [aligned(1), aligned(2)]
    again.read(parts, SECTOR_BYTES)
    assert b"".join(parts) == payload
    again.close()


def test_allocated_bytes_that_were_never_written_are_zeros(
    storage: PosixStorage, tmp_path: Path
) -> None:
    file = storage.open_segment(tmp_path / "segment", create_bytes=SEGMENT_BYTES)
    buffer = aligned(SECTORS, b"\xff" * SEGMENT_BYTES)
    file.read([buffer], 0)
    assert bytes(buffer) == bytes(SEGMENT_BYTES)
    file.close()


def test_a_segment_is_never_created_over_another(storage: PosixStorage, tmp_path: Path) -> None:
    (tmp_path / "segment").write_bytes(b"there")
    with pytest.raises(FileExistsError):
        storage.open_segment(tmp_path / "segment", create_bytes=SEGMENT_BYTES)
    assert (tmp_path / "segment").read_bytes() == b"there"
    with pytest.raises(FileNotFoundError):
        storage.open_segment(tmp_path / "other")


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
def test_a_segment_that_does_not_fit_leaves_no_file(
    storage: PosixStorage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
) -> None:
    def partly(descriptor: int, offset: int, size_bytes: int) -> None:
        os.ftruncate(descriptor, size_bytes // 2)
        raise error

    monkeypatch.setattr(os, "posix_fallocate", partly)
    before = open_descriptors()
    with pytest.raises(type(error)) as raised:
        storage.open_segment(tmp_path / "segment", create_bytes=SEGMENT_BYTES)
    assert raised.value is error
    assert list(tmp_path.iterdir()) == [] and open_descriptors() == before


def test_reading_past_the_end_is_an_error(any_storage: PosixStorage, tmp_path: Path) -> None:
    segment = any_storage.open_segment(tmp_path / "segment", create_bytes=2 * SECTOR_BYTES)
    log = any_storage.open_log(tmp_path / "log", create=True)
    log.write([memoryview(b"abc")], 0)
    with pytest.raises(EOFError):
        segment.read([aligned(1), aligned(2)], 0)
    segment.truncate(SECTOR_BYTES + 100)
    with pytest.raises(EOFError):
        segment.read([aligned(2)], 0)
    for offset in (1, 3, 1000):
        with pytest.raises(EOFError):
            log.read([memoryview(bytearray(3))], offset)
    segment.close()
    log.close()


@pytest.mark.parametrize("fault", ["offset", "length", "address"])
def test_unaligned_access_to_a_segment_is_our_own_fault(
    any_storage: PosixStorage, tmp_path: Path, fault: str
) -> None:
    file = any_storage.open_segment(tmp_path / "segment", create_bytes=SEGMENT_BYTES)
    memory = aligned(2)
    buffer = {
        "offset": memory[:SECTOR_BYTES],
        "length": memory[: SECTOR_BYTES - 512],
        "address": memory[512 : 512 + SECTOR_BYTES],
    }[fault]
    for access in (file.read, file.write):
        with pytest.raises(AssertionError):
            access([buffer], 512 if fault == "offset" else 0)
    file.close()


def shortened(
    call: Callable[[int, Sequence[memoryview], int], int], rng: random.Random, unit_bytes: int
) -> Callable[[int, Sequence[memoryview], int], int]:
    """A vectored call that moves at least one unit, and seldom all that was asked for."""

    def short(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        assert len(buffers) <= os.sysconf("SC_IOV_MAX")
        total = sum(buffer.nbytes for buffer in buffers)
        left = rng.randint(1, max(1, total // unit_bytes)) * unit_bytes
        cut: list[memoryview] = []
        for buffer in buffers:
            cut.append(buffer[: min(left, buffer.nbytes)])
            left -= cut[-1].nbytes
        return call(descriptor, [buffer for buffer in cut if buffer.nbytes], offset)

    return short


@pytest.mark.parametrize("kind", ["segment", "log"])
def test_short_transfers_are_continued(
    storage: PosixStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    unit_bytes = SECTOR_BYTES if kind == "segment" else 1
    if kind == "segment":
        file: File = storage.open_segment(tmp_path / "file", create_bytes=64 * SECTOR_BYTES)
    else:
        file = storage.open_log(tmp_path / "file", create=True)
    for name in ("preadv", "pwritev"):
        monkeypatch.setattr(os, name, shortened(getattr(os, name), rng, unit_bytes))
    for _ in range(20):
        units = [rng.randint(0, 6) for _ in range(rng.randint(1, 9))]
        content = [rng.randbytes(count * unit_bytes) for count in units]
        offset = rng.randint(0, 9) * unit_bytes
        sent = [aligned(8, part)[: len(part)] for part in content]
        back = [aligned(8)[: len(part)] for part in content]
        file.write(sent, offset)
        file.read(back, offset)
        assert [bytes(part) for part in back] == content
    file.close()


def test_more_buffers_than_one_call_takes(storage: PosixStorage, tmp_path: Path) -> None:
    count = 2 * os.sysconf("SC_IOV_MAX") + 3
    content = random.Random(2).randbytes(count)
    log = storage.open_log(tmp_path / "log", create=True)
    log.write([memoryview(content)[index : index + 1] for index in range(count)], 5)
    back = memoryview(bytearray(count))
    log.read([back[index : index + 1] for index in range(count)], 5)
    assert bytes(back) == content and log.size() == 5 + count
    log.close()


def test_a_call_that_moves_nothing_ends(
    storage: PosixStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = storage.open_log(tmp_path / "log", create=True)
    log.write([memoryview(b"abcd")], 0)
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(OSError, match="no byte was transferred") as raised:
        log.write([memoryview(b"x")], 0)
    assert raised.value.errno == errno.EIO
    with pytest.raises(OSError, match="no byte was transferred"):
        log.read([memoryview(bytearray(2))], 0)
    log.close()


def test_files_and_directories_are_for_their_owner_alone(
    storage: PosixStorage, tmp_path: Path
) -> None:
    storage.make_directory(tmp_path / "inner")
    storage.open_log(tmp_path / "inner" / "log", create=True).close()
    storage.open_segment(tmp_path / "inner" / "segment", create_bytes=SECTOR_BYTES).close()
    assert mode_of(tmp_path / "inner") == 0o700
    assert mode_of(tmp_path / "inner" / "log") == 0o600
    assert mode_of(tmp_path / "inner" / "segment") == 0o600
    with pytest.raises(FileExistsError):
        storage.make_directory(tmp_path / "inner")


def test_symbolic_links_are_not_followed(storage: PosixStorage, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(bytes(SECTOR_BYTES))
    (tmp_path / "link").symlink_to(target)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "directory").symlink_to(tmp_path)
    for open_link in (
        lambda: storage.open_segment(tmp_path / "link"),
        lambda: storage.open_segment(tmp_path / "dangling", create_bytes=SECTOR_BYTES),
        lambda: storage.open_log(tmp_path / "link"),
        lambda: storage.open_log(tmp_path / "dangling", create=True),
        lambda: storage.sync_directory(tmp_path / "directory"),
    ):
        with pytest.raises(OSError):
            open_link()
    assert not (tmp_path / "nowhere").exists()
    assert storage.exists(tmp_path / "dangling")


def test_a_log_is_created_once_and_kept(storage: PosixStorage, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        storage.open_log(tmp_path / "log")
    log = storage.open_log(tmp_path / "log", create=True)
    log.write([memoryview(b"kept")], 0)
    log.close()
    again = storage.open_log(tmp_path / "log", create=True)
    assert again.size() == 4
    again.truncate(2)
    assert again.size() == 2
    again.close()


def test_names_are_listed_renamed_and_removed(storage: PosixStorage, tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        storage.open_log(tmp_path / name, create=True).close()
    (tmp_path / "a").write_bytes(b"new")
    storage.rename(tmp_path / "a", tmp_path / "b")
    storage.make_directory(tmp_path / "d")
    storage.sync_directory(tmp_path)
    assert storage.list_directory(tmp_path) == ["b", "c", "d"]
    assert (tmp_path / "b").read_bytes() == b"new"
    storage.unlink(tmp_path / "c")
    with pytest.raises(OSError):
        storage.remove_directory(tmp_path)
    storage.remove_directory(tmp_path / "d")
    assert storage.list_directory(tmp_path) == ["b"]
    assert not storage.exists(tmp_path / "c")


def test_threads_share_a_file(any_storage: PosixStorage, tmp_path: Path) -> None:
    file = any_storage.open_segment(tmp_path / "segment", create_bytes=SEGMENT_BYTES)
    wrong: list[int] = []

    def rewrite(sector: int) -> None:
        for turn in range(20):
            content = bytes([turn + sector]) * SECTOR_BYTES
            back = aligned(1)
            file.write([aligned(1, content)], sector * SECTOR_BYTES)
            file.read([back], sector * SECTOR_BYTES)
            if bytes(back) != content:
                wrong.append(sector)

    threads = [threading.Thread(target=rewrite, args=[sector]) for sector in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    file.close()


def test_closing_twice_closes_no_other_file(storage: PosixStorage, tmp_path: Path) -> None:
    first = storage.open_log(tmp_path / "first", create=True)
    first.close()
    second = storage.open_log(tmp_path / "second", create=True)
    first.close()
    assert second.size() == 0
    second.close()
