"""docs/storage-format.md as data, and a reader of stores that knows nothing else.

Offsets, sizes, keys and magic numbers come from the document's tables.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgpack
from xxhash import xxh3_128_digest

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "storage-format.md"


@cache
def section(title: str) -> str:
    """The text under a heading, up to the next one."""
    text = DOCUMENT.read_text(encoding="utf-8")
    (found,) = re.findall(rf"^#+ {re.escape(title)}\n(.*?)(?=^#|\Z)", text, re.M | re.S)
    return found


def rows(title: str, header: str) -> list[list[str]]:
    """Cells of the table under a heading whose first column is called so."""
    (table,) = re.findall(rf"^\| {header} \|.*\n\|-.*\n((?:\|.*\n)+)", section(title), re.M)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def number(cell: str) -> int:
    return int(cell.replace(",", ""))


def read_fields(title: str, data: bytes) -> dict[str, Any]:
    """Fields at the offsets that the document's table says."""
    values: dict[str, Any] = {}
    end = 0
    for offset, size, kind, name, _ in rows(title, "offset"):
        assert int(offset) == end, f"a gap before {name}"
        end += int(size)
        raw = data[int(offset) : end]
        whole = int.from_bytes(raw, "little", signed=kind == "signed")
        values[name] = raw if kind == "bytes" else whole
    values["end"] = end
    return values


def constant(name: str) -> str:
    return next(row[1].strip("`") for row in rows("Constants", "constant") if row[0] == name)


def read_frames(data: bytes) -> Iterator[Any]:
    """Messages of a file without damage."""
    offset = 0
    while offset < len(data):
        header = read_fields("Frame", data[offset:])
        body = data[offset + header["end"] :][: header["length"]]
        assert header["magic"] == bytes.fromhex(constant("frame magic"))
        place = struct.pack("<QI", offset, len(body))
        assert header["digest"] == xxh3_128_digest(place + body)
        yield msgpack.unpackb(body)
        offset += header["end"] + len(body)


def read_manifest(path: Path, title: str) -> dict[str, Any]:
    (content,) = read_frames(path.read_bytes())
    assert list(content) == [row[0] for row in rows(title, "key")]
    return content


def read_rank(folder: Path) -> dict[int, tuple[dict[str, Any], bytes, bytes]]:
    """By number: the put record, payload and row of every block, all of them checked."""
    sizes = read_manifest(folder / "MANIFEST", "Rank manifest")
    live: dict[int, dict[str, Any]] = {}
    kinds = {row[1]: int(row[0]) for row in rows("index.log", "kind")}
    frames = read_frames((folder / of_row_set("index.log", sizes)).read_bytes())
    for index, (kind, content) in enumerate(frames):
        assert (kind == kinds["base"]) == (index == 0)
        if kind == kinds["put"]:
            step = number(constant("put record, bytes"))
            for start in range(0, len(content), step):
                record = read_fields("Put record", content[start : start + step])
                for other in [n for n, r in live.items() if r["slot"] == record["slot"]]:
                    del live[other]
                live[record["number"]] = record
        elif kind == kinds["drop"]:
            for (dropped,) in struct.iter_unpack("<Q", content):
                live.pop(dropped, None)
    return {key: (record, *read_slot(folder, record, sizes)) for key, record in live.items()}


def of_row_set(name: str, sizes: dict[str, Any]) -> str:
    """What a file of row set 0 is called in the one that counts."""
    stem, _, suffix = name.rpartition(".")
    return f"{stem}.{sizes['row_set']}.{suffix}" if sizes["row_set"] else name


def read_slot(folder: Path, record: dict[str, Any], sizes: dict[str, Any]) -> tuple[bytes, bytes]:
    segment, slot = divmod(record["slot"], sizes["segment_blocks"])
    payload_bytes, row_bytes = sizes["payload_bytes"], sizes["row_bytes"]
    footer_bytes = number(constant("footer, bytes"))
    data = (folder / f"segment-{segment:06}.kv").read_bytes()
    data = data[slot * (payload_bytes + footer_bytes) :][: payload_bytes + footer_bytes]
    payload, sector = data[:payload_bytes], data[payload_bytes:]
    rows_name = of_row_set(f"rows-{segment:06}.mk", sizes)
    row = (folder / rows_name).read_bytes()[slot * row_bytes :][:row_bytes]
    footer = read_fields("Footer", sector)
    assert footer["magic"] == bytes.fromhex(constant("footer magic"))
    assert footer["payload_format"].rstrip(b"\0").decode() == sizes["payload_format"]
    assert footer["digest"] == xxh3_128_digest(sector[: footer["end"] - 16])
    assert sector[footer["end"] :].count(0) == footer_bytes - footer["end"]
    assert footer["payload_bytes"] == payload_bytes
    of_the_row_put = {"row_digest", "end"}
    assert all(footer[name] == record[name] for name in record.keys() - of_the_row_put)
    assert record["payload_digest"] == xxh3_128_digest(payload)
    assert record["row_digest"] == xxh3_128_digest(row)
    return payload, row
