"""The linker inside the scheduler's loop: nothing may raise there, and no promise is refused."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
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
from kvws.errors import LoadFailed  # noqa: E402
from kvws.tiers.pool_stream import PoolStream  # noqa: E402


class QueueingStream:
    """A stream of a device that queues: notes what is waited for, and when."""

    queues = True

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def mark(self) -> str:
        self._log.append("marked")
        return "mark"

    @contextlib.contextmanager
    def behind(self, marks: Sequence[str]) -> Iterator[None]:
        self._log.append(f"behind {', '.join(marks)}")
        try:
            yield
        finally:
            self._log.append("all done")

    def finish(self) -> None:
        self._log.append("finished")


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
    linker._stream = PoolStream(torch.device("cpu"))
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


class TestOnADeviceThatQueues:
    """A layer's copy is queued long before it is done, and so is the forward pass's work."""

    def linker(self, log: list[str], fail_at: int | None = None) -> WorkspaceLinker:
        class Plane:
            def queue_load(self, *_: Any) -> str:
                return "load"

            def fill(self, loads: list[str], layer_done: Callable[[int], None]) -> None:
                for layer in range(2):
                    log.append(f"layer {layer}")
                    if layer == fail_at:
                        raise LoadFailed("bytes are gone")
                    layer_done(layer)

            def release_load(self, load: str, *, failed: bool) -> None:
                log.append("released")

            def stage_out(self, *_: Any) -> bool:
                log.append("read")
                return True

        linker = linker_on(Plane())
        linker._stream = QueueingStream(log)  # pyright: ignore[reportAttributeAccessIssue]
        complete = linker._layers.complete

        def noting(index: int, layer: int) -> None:
            log.append(f"told {layer}")
            complete(index, layer)

        linker._layers.complete = noting
        return linker

    def test_a_layer_is_told_when_its_copy_is_done(self) -> None:
        log: list[str] = []
        linker = self.linker(log)
        linker.load("step.answer", pages(1))
        assert linker.finish_layer_wise_loading(linker.start_layer_wise_loading()) is True
        linker._loader.shutdown()
        assert log == [
            *("marked", "behind mark"),
            *("layer 0", "finished", "told 0"),
            *("layer 1", "finished", "told 1"),
            *("all done", "released"),
        ]

    def test_nothing_is_written_any_more_when_a_failure_is_told(self) -> None:
        log: list[str] = []
        linker = self.linker(log, fail_at=1)
        linker.load("step.answer", pages(1))
        assert linker.finish_layer_wise_loading(linker.start_layer_wise_loading()) is False
        linker._loader.shutdown()
        assert log[-3:] == ["layer 1", "all done", "released"]

    def test_pages_are_read_behind_the_forward_pass_that_writes_them(self) -> None:
        log: list[str] = []

        class Event:
            def wait(self) -> None:
                log.append("waited")

        linker = self.linker(log)
        linker.record_offload_ready = lambda: [Event(), Event()]
        assert linker.offload(pages(1), session_id="step") is True
        assert log == ["waited", "waited", "read"]


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
