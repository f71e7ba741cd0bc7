"""The linker inside the scheduler's loop: nothing may raise there, and no promise is refused."""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from kvws.engine import platform_entry

platform_entry.declare_torchvision_ops()

from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer  # noqa: E402
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import (  # noqa: E402
    LayerWiseLoadCounter,
)

from kvws.engine.linker import WorkspaceLinker  # noqa: E402


class BrokenPlane:
    """A data plane whose every operation fails."""

    def __getattr__(self, name: str) -> Any:
        def fail(*_: Any, **__: Any) -> None:
            raise RuntimeError(f"{name} failed")

        return fail


def linker_on(plane: Any) -> WorkspaceLinker:
    """A linker without an engine around it."""
    linker = object.__new__(WorkspaceLinker)
    linker._plane = plane
    linker._queued = {}
    linker._finished_offloads = deque()
    linker._loader = ThreadPoolExecutor(1)
    linker.layer_done_counter = linker._layers = LayerWiseLoadCounter(2)
    return linker


def pages(count: int) -> list[PoolTransfer]:
    return [
        PoolTransfer(
            name=PoolName.KV,
            keys=[f"page-{i}" for i in range(count)],
            device_indices=torch.arange(32 * count),
        )
    ]


def test_a_failing_stage_out_refuses_the_pages() -> None:
    linker = linker_on(BrokenPlane())
    assert linker.offload(pages(2), session_id="step") is False
    assert linker.num_completed_offloads() == 0


def test_a_failing_lookup_grants_nothing() -> None:
    assert linker_on(BrokenPlane()).lookup("step.answer", pages(2)) == []


def test_a_load_is_never_refused_and_one_without_bytes_fails_its_batch() -> None:
    linker = linker_on(BrokenPlane())
    assert linker.load("step.answer", pages(1)) is True
    index = linker.start_layer_wise_loading()
    assert linker.finish_layer_wise_loading(index) is False


def test_a_batch_without_loads_starts_nothing() -> None:
    linker = linker_on(BrokenPlane())
    assert linker.start_layer_wise_loading() == -1
    assert linker.finish_layer_wise_loading(-1) is True


def test_a_cancelled_load_does_not_start() -> None:
    linker = linker_on(BrokenPlane())
    linker.load("step.answer", pages(1))
    assert linker.cancel_queued_load("step.answer") is True
    assert linker.cancel_queued_load("step.answer") is False
    assert linker.start_layer_wise_loading() == -1


def test_stored_pages_are_acknowledged_once() -> None:
    class StoredPlane:
        def stage_out(self, step: str, hashes: list[str], numbers: list[int]) -> bool:
            assert (step, hashes, numbers) == ("step", ["page-0", "page-1"], [0, 1])
            return True

    linker = linker_on(StoredPlane())
    assert linker.offload(pages(2), session_id="step") is True
    assert linker.num_completed_offloads() == 1
    assert linker.pop_completed_offload() is True
    assert linker.num_completed_offloads() == 0


def test_a_flush_drops_what_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    linker = linker_on(BrokenPlane())
    linker.load("step.answer", pages(1))
    linker._finished_offloads.append(True)
    linker.reset()
    assert linker.num_completed_offloads() == 0
    assert linker.start_layer_wise_loading() == -1
