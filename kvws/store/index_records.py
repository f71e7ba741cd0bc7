"""The messages of index.log, and what a log of them says is stored. No I/O."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

from kvws.errors import StoreFormatError
from kvws.store.block import StoredBlock
from kvws.store.record import pack, unpack


class _Kind(IntEnum):
    BASE = 0
    PUT = 1
    DROP = 2


# number, generation, slot, first_position, page_hash, payload_digest, row_digest
_RECORD = struct.Struct("<QQQq32s16s16s")
_NUMBER = struct.Struct("<Q")
_RECORDS_PER_FRAME = 4096
_Fields: TypeAlias = tuple[int, int, int, int, bytes, bytes, bytes]


@dataclass(frozen=True)
class IndexState:
    """What the frames of an index say.

    Attributes:
        blocks: by number.
        next_generation: larger than any that was given out.
        unknown_records: frames of kinds that this program does not know; they were skipped.
    """

    blocks: dict[int, StoredBlock]
    next_generation: int
    unknown_records: int


def encode_base(next_generation: int) -> bytes:
    """The body of the frame that every index begins with."""
    return pack([_Kind.BASE, next_generation])


def encode_put(blocks: Iterable[StoredBlock]) -> bytes:
    """The body of one frame that makes all of these blocks visible, or none."""
    records = [
        _RECORD.pack(
            block.number,
            block.generation,
            block.slot,
            block.first_position,
            block.page_hash,
            block.payload_digest,
            block.row_digest,
        )
        for block in blocks
    ]
    return pack([_Kind.PUT, b"".join(records)])


def encode_drop(numbers: Iterable[int]) -> bytes:
    """The body of one frame that takes all of these blocks away."""
    return pack([_Kind.DROP, b"".join(map(_NUMBER.pack, numbers))])


def encode_whole(blocks: Sequence[StoredBlock], next_generation: int) -> Iterator[bytes]:
    """Bodies of the frames of an index that says just this."""
    yield encode_base(next_generation)
    ordered = sorted(blocks, key=lambda block: block.generation)
    for first in range(0, len(ordered), _RECORDS_PER_FRAME):
        yield encode_put(ordered[first : first + _RECORDS_PER_FRAME])


def whole_bytes(blocks: int, frame_bytes: int) -> int:
    """About how large the log of `encode_whole` is.

    Args:
        frame_bytes: what a frame adds to its body.
    """
    frames = 2 + blocks // _RECORDS_PER_FRAME
    return blocks * _RECORD.size + frames * (frame_bytes + 16)


def replay(bodies: Iterable[bytes]) -> IndexState:
    """Read an index from its first frame to its last.

    Of several puts of a number the newest wins, and a slot belongs to its newest put: an older
    block that was there is gone, whatever became of the frame that said so.
    """
    live: dict[int, _Fields] = {}
    holder: dict[int, int] = {}
    next_generation = 0
    unknown_records = 0
    for body in bodies:
        match _decode(body):
            case (_Kind.PUT, bytes() as records):
                next_generation = max(next_generation, _apply_put(records, live, holder))
            case (_Kind.DROP, bytes() as numbers):
                for (number,) in _NUMBER.iter_unpack(numbers):
                    live.pop(number, None)
            case (_Kind.BASE, int() as generation):
                next_generation = max(next_generation, generation)
            case _:
                unknown_records += 1
    blocks = {number: StoredBlock(*fields) for number, fields in live.items()}
    return IndexState(blocks, next_generation, unknown_records)


def _decode(body: bytes) -> tuple[_Kind, bytes | int] | None:
    """Kind and content of a message; None if this program does not know it."""
    try:
        message = unpack(body)
    except StoreFormatError:
        return None
    match message:
        case [_Kind.PUT, bytes() as records] if len(records) % _RECORD.size == 0:
            return _Kind.PUT, records
        case [_Kind.DROP, bytes() as numbers] if len(numbers) % _NUMBER.size == 0:
            return _Kind.DROP, numbers
        case [_Kind.BASE, int() as generation] if generation >= 0:
            return _Kind.BASE, generation
        case _:
            return None


def _apply_put(records: bytes, live: dict[int, _Fields], holder: dict[int, int]) -> int:
    """Mutates `live` and `holder` (slot → number). Returns the next generation."""
    next_generation = 0
    fields: _Fields
    for fields in _RECORD.iter_unpack(records):
        number, generation, slot = fields[:3]
        previous = live.get(number)
        if previous is not None and previous[1] > generation:
            continue
        older = holder.get(slot)
        if older is not None and older != number and older in live and live[older][2] == slot:
            del live[older]
        live[number] = fields
        holder[slot] = number
        if generation >= next_generation:
            next_generation = generation + 1
    return next_generation
