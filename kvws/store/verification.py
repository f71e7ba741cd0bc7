"""Reading everything that is stored, to see whether it is still what was written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvws.errors import CorruptBlock
from kvws.store.segment import aligned_buffer

_READ_BYTES = 8 << 20
_Read = Callable[[Sequence[int], Sequence[memoryview]], None]


@dataclass(frozen=True)
class VerifyReport:
    """What was found.

    Attributes:
        checked_blocks: all that the index names.
        corrupt_blocks: numbers whose payload is damaged or cannot be read.
        damaged_rows: numbers whose row is.
    """

    checked_blocks: int
    corrupt_blocks: tuple[int, ...]
    damaged_rows: tuple[int, ...]


def blocks_at_once(payload_bytes: int) -> int:
    """Blocks of one request of about 8 MiB."""
    return max(1, _READ_BYTES // payload_bytes)


def unreadable_payloads(
    runs: Iterable[Sequence[int]],
    read: _Read,
    payload_bytes: int,
    on_progress: Callable[[int], None],
) -> list[int]:
    """Numbers of the blocks that are damaged or cannot be read.

    Args:
        runs: of at most `blocks_at_once` blocks.
        read: fills one buffer a block; raises CorruptBlock or OSError.
        on_progress: called with the blocks of each run when they are checked.
    """
    at_once = blocks_at_once(payload_bytes)
    memory = aligned_buffer(at_once * payload_bytes)
    buffers = [memory[n * payload_bytes :][:payload_bytes] for n in range(at_once)]
    unreadable: list[int] = []
    for run in runs:
        unreadable += _unreadable(run, read, buffers)
        on_progress(len(run))
    return unreadable


def _unreadable(run: Sequence[int], read: _Read, buffers: Sequence[memoryview]) -> list[int]:
    try:
        read(run, buffers[: len(run)])
    except CorruptBlock as error:
        return list(error.numbers)
    except OSError:
        if len(run) == 1:
            return list(run)
        return [number for one in run for number in _unreadable([one], read, buffers)]
    return []
