"""Manifests: replaced whole, and read only if they are ours, sound and of this version."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvws.errors import StoreFormatError
from kvws.store.manifest import FORMAT_VERSION, read_manifest, write_manifest
from kvws.store.posix import PosixStorage
from kvws.store.record import encode_frame, pack
from kvws.store.storage import File

CONTENT = {"kind": "kvws-rank", "version": FORMAT_VERSION, "payload_bytes": 4096}


@pytest.fixture
def storage(tmp_path: Path) -> PosixStorage:
    return PosixStorage(tmp_path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "MANIFEST"


def test_what_was_written_is_read(storage: PosixStorage, path: Path) -> None:
    write_manifest(storage, path, CONTENT)
    assert read_manifest(storage, path, kind="kvws-rank") == CONTENT


def test_a_second_write_replaces_the_first_and_leaves_nothing_beside_it(
    storage: PosixStorage, path: Path
) -> None:
    write_manifest(storage, path, {**CONTENT, "note": "x" * 1000})
    path.with_name("MANIFEST.tmp").write_bytes(b"left over from a crash" * 100)
    write_manifest(storage, path, CONTENT)
    assert read_manifest(storage, path, kind="kvws-rank") == CONTENT
    assert [entry.name for entry in path.parent.iterdir()] == ["MANIFEST"]


def test_the_order_of_operations_survives_power_loss(path: Path) -> None:
    """Bytes are durable before the name points at them, the name before the call returns."""
    calls: list[str] = []

    class Recorder(PosixStorage):
        def open_log(self, path: Path, *, create: bool = False) -> File:
            file = super().open_log(path, create=create)
            inner = file.sync
            file.sync = lambda: (calls.append("sync"), inner())[1]
            return file

        def rename(self, old: Path, new: Path) -> None:
            calls.append("rename")
            super().rename(old, new)

        def sync_directory(self, path: Path) -> None:
            calls.append("sync directory")
            super().sync_directory(path)

    write_manifest(Recorder(path.parent), path, CONTENT)
    assert calls == ["sync", "rename", "sync directory"]


def framed(content: object) -> bytes:
    return encode_frame(pack(content), 0)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no manifest"),
        (b"something else entirely", "no manifest"),
        (framed(CONTENT) + b"x", "damaged"),
        (b"x" + framed(CONTENT), "damaged"),
        (framed(CONTENT) + encode_frame(b"", len(framed(CONTENT))), "damaged"),
        (bytes(2 << 20), "2097152 bytes"),
        (framed([1, 2]), "no manifest"),
        (encode_frame(b"\xc1", 0), "not msgpack"),
        (framed({"kind": "kvws-rank"}), "no format version"),
        (framed({**CONTENT, "version": "1"}), "no format version"),
        (framed({**CONTENT, "version": True}), "no format version"),
        (framed({**CONTENT, "kind": "kvws-workspace"}), "kvws-workspace"),
        (framed({"version": FORMAT_VERSION}), "None"),
    ],
)
def test_anything_else_is_refused_and_left_as_it_is(
    storage: PosixStorage, path: Path, data: bytes, message: str
) -> None:
    path.write_bytes(data)
    with pytest.raises(StoreFormatError, match=message) as caught:
        read_manifest(storage, path, kind="kvws-rank")
    assert str(path) in str(caught.value)
    assert path.read_bytes() == data


def test_a_newer_version_says_which_one_is_read(storage: PosixStorage, path: Path) -> None:
    path.write_bytes(framed({**CONTENT, "version": FORMAT_VERSION + 1, "kind": "future"}))
    with pytest.raises(StoreFormatError, match=f"version {FORMAT_VERSION + 1}.*reads 1") as caught:
        read_manifest(storage, path, kind="kvws-rank")
    assert "version of kvws that wrote it" in caught.value.hint


def test_every_flipped_bit_and_every_cut_is_noticed(storage: PosixStorage, path: Path) -> None:
    whole = framed(CONTENT)
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(StoreFormatError):
            read_manifest(storage, path, kind="kvws-rank")
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(StoreFormatError):
            read_manifest(storage, path, kind="kvws-rank")


def test_a_missing_manifest_is_told_as_such(storage: PosixStorage, path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_manifest(storage, path, kind="kvws-rank")
