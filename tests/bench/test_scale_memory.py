"""What work takes of the machine's memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvws.bench import scale_memory
from kvws.bench.scale_memory import PeakMemory, free_bytes, held_bytes, megabytes

TAKEN_BYTES = 96 << 20
NOISE_BYTES = 16 << 20


def extra_of(size_bytes: int) -> int:
    with PeakMemory() as memory:
        torch.ones(size_bytes, dtype=torch.uint8)
    if memory.extra_bytes is None:
        pytest.skip("this system does not tell")
    return memory.extra_bytes


def test_memory_that_was_given_back_counts_at_its_most() -> None:
    assert abs(extra_of(TAKEN_BYTES) - TAKEN_BYTES) < NOISE_BYTES


def test_an_earlier_peak_does_not_count() -> None:
    torch.ones(2 * TAKEN_BYTES, dtype=torch.uint8)
    assert extra_of(1) < NOISE_BYTES


def test_memory_that_was_freed_before_counts_when_it_is_used_again() -> None:
    pieces = [torch.ones(64 << 10, dtype=torch.uint8) for _ in range(TAKEN_BYTES >> 16)]
    del pieces
    with PeakMemory() as memory:
        pieces = [torch.ones(64 << 10, dtype=torch.uint8) for _ in range(TAKEN_BYTES >> 16)]
    if memory.extra_bytes is None:
        pytest.skip("this system does not tell")
    assert memory.extra_bytes > TAKEN_BYTES - NOISE_BYTES
    assert len(pieces) == TAKEN_BYTES >> 16


def test_a_system_that_does_not_tell_leaves_it_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scale_memory, "_STATUS", tmp_path / "none")
    with PeakMemory() as memory:
        torch.ones(8)
    assert memory.extra_bytes is None and megabytes(memory.extra_bytes) == "–"
    assert megabytes(12_400_000) == "12"


def test_the_machine_has_more_than_nothing() -> None:
    assert held_bytes() > 0 and free_bytes() > 0
