"""The MANIFEST of a rank's directory: the sizes that every file in it follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvws.errors import OtherModel, StoreFormatError
from kvws.store.block import FIRST_ROW_FORMAT, MAX_ROW_FORMAT_BYTES, StoreShape
from kvws.store.manifest import (
    MANIFEST_NAME,
    TEMPORARY_SUFFIX,
    read_manifest,
    write_manifest,
)
from kvws.store.segment import SegmentLayout
from kvws.store.storage import SECTOR_BYTES, Storage

RANK_KIND = "kvws-rank"
RANK_FORMAT_VERSION = 2
"""Of a rank's directory. Version 1, which is read as well, has rows of FIRST_ROW_FORMAT."""
_FIRST_VERSION = 1
_MAX_BYTES = 1 << 40
_MAX_SEGMENT_BLOCKS = 1 << 16
_MAX_ROW_SET = 1 << 31


def read_layout(storage: Storage, directory: Path) -> SegmentLayout:
    """The layout that a rank's directory has. Nothing is changed.

    Raises:
        StoreFormatError: the manifest is not ours, damaged or newer.
        OSError: FileNotFoundError, or the disk's error.
    """
    return _layout(_read(storage, directory))


def settle_layout(
    storage: Storage,
    directory: Path,
    shape: StoreShape,
    rank: int,
    segment_blocks: int,
    *,
    rows_may_differ: bool = False,
) -> SegmentLayout:
    """Read the layout of a rank's directory, or decide it for an empty one, durably.

    Args:
        shape, rank: what the caller expects.
        segment_blocks: for a new directory; an existing one keeps its own.
        rows_may_differ: rows of another format or size are no error.

    Raises:
        OtherModel: it was made for another shape or rank.
        StoreFormatError: its manifest is missing, not ours, damaged or newer.
        OSError: the disk's error.
    """
    if not storage.exists(directory / MANIFEST_NAME):
        _check_empty(storage, directory)
        wanted = SegmentLayout(shape, segment_blocks)
        write_layout(storage, directory, wanted, rank)
        return wanted
    content = _read(storage, directory)
    found = _layout(content)
    payloads = _differences(
        ("rank", content.get("rank"), rank),
        ("payload_bytes", found.shape.payload_bytes, shape.payload_bytes),
        ("payload_format", found.shape.payload_format, shape.payload_format),
    )
    rows = _differences(
        ("row_bytes", found.shape.row_bytes, shape.row_bytes),
        ("row_format", found.shape.row_format, shape.row_format),
    )
    if payloads:
        raise OtherModel(
            f"{directory} was written with {', '.join(payloads + rows)}",
            hint="use the model and formats it was written with, or another workspace",
        )
    if rows and not rows_may_differ:
        raise OtherModel(
            f"{directory} was written with {', '.join(rows)}",
            hint="open its session with the model, which makes the retrieval rows anew, or use "
            "the signals it was written with",
        )
    return found


def write_layout(storage: Storage, directory: Path, layout: SegmentLayout, rank: int) -> None:
    """Say durably which layout the files of a rank's directory follow: it counts from here on.

    Raises:
        OSError: the disk's error; the old manifest may or may not be replaced.
    """
    content = {
        "kind": RANK_KIND,
        "version": RANK_FORMAT_VERSION,
        "rank": rank,
        "payload_bytes": layout.shape.payload_bytes,
        "row_bytes": layout.shape.row_bytes,
        "payload_format": layout.shape.payload_format,
        "row_format": layout.shape.row_format,
        "row_set": layout.row_set,
        "segment_blocks": layout.segment_blocks,
    }
    write_manifest(storage, directory / MANIFEST_NAME, content)


def with_new_rows(layout: SegmentLayout, shape: StoreShape) -> SegmentLayout:
    """The layout of the same payloads with rows of another shape."""
    return replace(layout, shape=shape, row_set=layout.row_set + 1)


def _read(storage: Storage, directory: Path) -> dict[str, Any]:
    versions = (_FIRST_VERSION, RANK_FORMAT_VERSION)
    return read_manifest(storage, directory / MANIFEST_NAME, kind=RANK_KIND, versions=versions)


def _check_empty(storage: Storage, directory: Path) -> None:
    """A directory with files but without a manifest is not ours to write into."""
    unfinished = MANIFEST_NAME + TEMPORARY_SUFFIX
    names = [name for name in storage.list_directory(directory) if name != unfinished]
    if names:
        raise StoreFormatError(
            f"{directory} holds {names[0]} and no manifest",
            hint="restore it, or remove the directory to give the data up; it was left as it is",
        )


def _differences(*fields: tuple[str, object, object]) -> list[str]:
    """Of (name, what was found, what is wanted), those that differ, in words."""
    return [
        f"{name} {found!r}, not {wanted!r}" for name, found, wanted in fields if found != wanted
    ]


def _layout(content: Mapping[str, Any]) -> SegmentLayout:
    def number(name: str, limit: int, *, least: int = 1) -> int:
        value = content.get(name)
        if type(value) is not int or not least <= value <= limit:
            raise StoreFormatError(f"a manifest says {name} = {value!r}")
        return value

    def text(name: str, max_bytes: int) -> str:
        value = content.get(name)
        if not isinstance(value, str) or not 0 < len(value.encode()) <= max_bytes:
            raise StoreFormatError(f"a manifest says {name} = {value!r}")
        return value

    payload_bytes = number("payload_bytes", _MAX_BYTES)
    if payload_bytes % SECTOR_BYTES:
        raise StoreFormatError(f"a manifest says payload_bytes = {payload_bytes}")
    row_bytes = number("row_bytes", _MAX_BYTES)
    payload_format = text("payload_format", 16)
    segment_blocks = number("segment_blocks", _MAX_SEGMENT_BLOCKS)
    row_format, row_set = FIRST_ROW_FORMAT, 0
    if content["version"] != _FIRST_VERSION:
        row_format = text("row_format", MAX_ROW_FORMAT_BYTES)
        row_set = number("row_set", _MAX_ROW_SET, least=0)
    shape = StoreShape(payload_bytes, row_bytes, payload_format, row_format)
    return SegmentLayout(shape, segment_blocks, row_set)
