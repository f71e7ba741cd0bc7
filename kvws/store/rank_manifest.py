"""The MANIFEST of a rank's directory: the sizes that every file in it follows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvws.errors import OtherModel, StoreFormatError
from kvws.store.block import StoreShape
from kvws.store.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    TEMPORARY_SUFFIX,
    read_manifest,
    write_manifest,
)
from kvws.store.segment import SegmentLayout
from kvws.store.storage import SECTOR_BYTES, Storage

RANK_KIND = "kvws-rank"
_MAX_BYTES = 1 << 40
_MAX_SEGMENT_BLOCKS = 1 << 16


def read_shape(storage: Storage, directory: Path) -> StoreShape:
    """The shape that a rank's directory was made with. Nothing is changed.

    Raises:
        StoreFormatError: the manifest is not ours, damaged or newer.
        OSError: FileNotFoundError, or the disk's error.
    """
    return _layout(read_manifest(storage, directory / MANIFEST_NAME, kind=RANK_KIND)).shape


def settle_layout(
    storage: Storage, directory: Path, shape: StoreShape, rank: int, segment_blocks: int
) -> SegmentLayout:
    """Read the layout of a rank's directory, or decide it for an empty one, durably.

    Args:
        shape, rank: what the caller expects.
        segment_blocks: for a new directory; an existing one keeps its own.

    Raises:
        OtherModel: it was made for another shape or rank.
        StoreFormatError: its manifest is missing, not ours, damaged or newer.
        OSError: the disk's error.
    """
    path = directory / MANIFEST_NAME
    wanted = SegmentLayout(shape, segment_blocks)
    if not storage.exists(path):
        _check_empty(storage, directory)
        write_manifest(storage, path, _content(wanted, rank))
        return wanted
    content = read_manifest(storage, path, kind=RANK_KIND)
    layout = _layout(content)
    differences = [
        f"{name} {content[name]!r}, not {value!r}"
        for name, value in _content(wanted, rank).items()
        if name != "segment_blocks" and content.get(name) != value
    ]
    if differences:
        raise OtherModel(
            f"{directory} was written with {', '.join(differences)}",
            hint="use the model and formats it was written with, or another workspace",
        )
    return layout


def _check_empty(storage: Storage, directory: Path) -> None:
    """A directory with files but without a manifest is not ours to write into."""
    unfinished = MANIFEST_NAME + TEMPORARY_SUFFIX
    names = [name for name in storage.list_directory(directory) if name != unfinished]
    if names:
        raise StoreFormatError(
            f"{directory} holds {names[0]} and no manifest",
            hint="restore it, or remove the directory to give the data up; it was left as it is",
        )


def _content(layout: SegmentLayout, rank: int) -> dict[str, Any]:
    return {
        "kind": RANK_KIND,
        "version": FORMAT_VERSION,
        "rank": rank,
        "payload_bytes": layout.shape.payload_bytes,
        "row_bytes": layout.shape.row_bytes,
        "payload_format": layout.shape.payload_format,
        "segment_blocks": layout.segment_blocks,
    }


def _layout(content: Mapping[str, Any]) -> SegmentLayout:
    def number(name: str, limit: int) -> int:
        value = content.get(name)
        if type(value) is not int or not 0 < value <= limit:
            raise StoreFormatError(f"a manifest says {name} = {value!r}")
        return value

    payload_format = content.get("payload_format")
    if not isinstance(payload_format, str) or len(payload_format.encode()) > 16:
        raise StoreFormatError(f"a manifest says payload_format = {payload_format!r}")
    payload_bytes = number("payload_bytes", _MAX_BYTES)
    if payload_bytes % SECTOR_BYTES:
        raise StoreFormatError(f"a manifest says payload_bytes = {payload_bytes}")
    shape = StoreShape(payload_bytes, number("row_bytes", _MAX_BYTES), payload_format)
    return SegmentLayout(shape, number("segment_blocks", _MAX_SEGMENT_BLOCKS))
