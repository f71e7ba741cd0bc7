"""Manifests: one checksummed frame that says what a directory is, replaced atomically."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from kvws.errors import StoreFormatError
from kvws.store.record import encode_frame, pack, scan_frames, unpack
from kvws.store.storage import Storage

FORMAT_VERSION = 1
"""Of all but the ranks' folders; a change that older programs cannot read raises it."""
MANIFEST_NAME = "MANIFEST"
TEMPORARY_SUFFIX = ".tmp"
_MAX_BYTES = 1 << 20
_NOT_OURS = "name a directory that kvws made; this one was left as it is"


def write_manifest(storage: Storage, path: Path, content: Mapping[str, Any]) -> None:
    """Replace a manifest; it is durable when this returns, and old or new after a crash.

    Args:
        content: plain values, with `kind` and `version`.

    Raises:
        OSError: the disk's error; the old manifest may or may not be replaced.
    """
    assert "kind" in content and "version" in content, "a manifest says what it is"
    frame = encode_frame(pack(dict(content)), 0)
    assert len(frame) <= _MAX_BYTES, f"a manifest of {len(frame)} bytes"
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    file = storage.open_log(temporary, create=True)
    try:
        file.truncate(0)
        file.write([memoryview(frame)], 0)
        file.sync()
    finally:
        file.close()
    storage.rename(temporary, path)
    storage.sync_directory(path.parent)


def read_manifest(
    storage: Storage, path: Path, *, kind: str, versions: Sequence[int] = (FORMAT_VERSION,)
) -> dict[str, Any]:
    """Content of a manifest of this kind. Nothing is changed, whatever the file holds.

    Args:
        versions: those that are read.

    Raises:
        StoreFormatError: not ours, damaged, of another version or of another kind.
        OSError: FileNotFoundError, or the disk's error.
    """
    content = _content(_read(storage, path), path)
    version = content.get("version")
    if type(version) is not int:
        raise StoreFormatError(f"{path} has no format version", hint=_NOT_OURS)
    if version not in versions:
        known = " and ".join(map(str, versions))
        raise StoreFormatError(
            f"{path} has format version {version}, this program reads {known}",
            hint="use the version of kvws that wrote it, or another directory",
        )
    if content.get("kind") != kind:
        raise StoreFormatError(
            f"{path} describes {content.get('kind')!r}, not {kind!r}", hint=_NOT_OURS
        )
    return content


def _read(storage: Storage, path: Path) -> bytes:
    file = storage.open_log(path)
    try:
        size_bytes = file.size()
        if size_bytes > _MAX_BYTES:
            raise StoreFormatError(f"{path} has {size_bytes} bytes", hint=_NOT_OURS)
        data = bytearray(size_bytes)
        if data:
            file.read([memoryview(data)], 0)
        return bytes(data)
    finally:
        file.close()


def _content(data: bytes, path: Path) -> dict[str, Any]:
    scan = scan_frames(data)
    if len(scan.frames) != 1 or scan.torn_bytes or scan.skipped_bytes:
        raise StoreFormatError(
            f"{path} is damaged or no manifest of kvws",
            hint="restore it, or remove its directory to give the data up; it was left as it is",
        )
    try:
        content = unpack(scan.frames[0][1])
    except StoreFormatError as error:
        raise StoreFormatError(f"{path}: {error}", hint=_NOT_OURS) from error
    if not isinstance(content, dict):
        raise StoreFormatError(f"{path} holds no manifest", hint=_NOT_OURS)
    return cast("dict[str, Any]", content)
