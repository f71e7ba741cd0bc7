"""Memory for one tile of index rows."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch

from kvws.recall.signals.signal import Part

_ALIGNMENT_BYTES = 64
"""A cache line."""


def new_tile(parts: Sequence[Part], blocks: int, *, huge_pages: bool) -> list[torch.Tensor]:
    """Zeros, whose memory is taken as they are written.

    Args:
        huge_pages: in pieces of some megabytes, where the system has them. Scattered rows are read
            a quarter faster out of these, but even a tile of one block takes all of its memory.

    Returns:
        by part: [*before, blocks, *after], beginning at a cache line.
    """
    sizes = [part.row_bytes * blocks for part in parts]
    begins = [0]
    for size in sizes:
        begins.append(begins[-1] + -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES)
    memory = mmap.mmap(-1, max(begins[-1], 1))  # lives as long as a tensor in it
    if huge_pages and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return [
        whole[begin : begin + size]
        .view(part.dtype)
        .view(*part.before, blocks, *part.after)
        for part, begin, size in zip(parts, begins, sizes, strict=False)
    ]
