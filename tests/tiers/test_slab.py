"""Host memory: aligned slots, all or none, safe to close; pinned where there is CUDA."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvws.errors import ConfigError, HostTierFull
from kvws.store.storage import SECTOR_BYTES
from kvws.tiers.slab import PinnedSlab

ODD_BYTES = 2 * 3 * 32 * 1 * 10 * 4
"""7,680: a payload of [2, 3, 32, 1, 10] float32 that is no multiple of a sector."""


def slab(blocks: int, slot_bytes: int = ODD_BYTES) -> PinnedSlab:
    sectors = -(-slot_bytes // SECTOR_BYTES)
    return PinnedSlab(slot_bytes, blocks * sectors * SECTOR_BYTES)


@pytest.mark.parametrize(("slot_bytes", "stride"), [(1, 4096), (4096, 4096), (4097, 8192)])
def test_slots_are_rounded_up_to_whole_sectors(slot_bytes: int, stride: int) -> None:
    made = PinnedSlab(slot_bytes, 3 * stride + stride - 1)
    assert (made.stride_bytes, made.capacity_blocks) == (stride, 3)
    assert made.tensor.shape == (3, stride) and made.tensor.dtype == torch.uint8


@pytest.mark.parametrize("capacity", [0, 8191])
def test_a_slab_of_less_than_a_slot_is_a_configuration_error(capacity: int) -> None:
    with pytest.raises(ConfigError, match=f"{capacity} bytes holds no block of 8192") as refused:
        PinnedSlab(ODD_BYTES, capacity)
    assert "--host-gb" in refused.value.hint


def test_more_than_the_address_space_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="the machine refuses") as refused:
        PinnedSlab(4096, 1 << 60)
    assert "lower --host-gb" in refused.value.hint


def test_a_view_is_the_payload_writable_and_aligned() -> None:
    made = slab(4)
    for slot in made.allocate(4):
        view = made.view(slot)
        assert len(view) == ODD_BYTES and not view.readonly
        assert torch.frombuffer(view, dtype=torch.uint8).data_ptr() % SECTOR_BYTES == 0
        view[:] = bytes([slot + 1]) * ODD_BYTES
    for slot in range(4):
        assert made.tensor[slot, :ODD_BYTES].unique().tolist() == [slot + 1]
        assert not made.tensor[slot, ODD_BYTES:].any(), "a view reached into the padding"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_payloads_are_tensors_over_the_same_memory(dtype: torch.dtype) -> None:
    """[2, layers, tokens, heads, dim] in a slot with padding behind it, gathered by layer."""
    shape = (2, 3, 32, 1, 10)
    made = slab(5, 2 * 3 * 32 * 10 * dtype.itemsize)
    assert made.slot_bytes % SECTOR_BYTES != 0
    payloads = made.payloads(dtype, shape)
    assert payloads.shape == (5, *shape) and payloads[3].is_contiguous()
    expected = torch.randn(5, *shape).to(dtype)
    for layer in range(3):
        for side in range(2):
            source = expected[[4, 1], side, layer]
            payloads[:, side, layer].index_copy_(0, torch.tensor([4, 1]), source)
    for slot in (4, 1):
        assert bytes(made.view(slot)) == bytes(expected[slot].view(torch.uint8).flatten().numpy())
    keys = payloads[:, 0, 2].index_select(0, torch.tensor([1, 4]))
    assert torch.equal(keys, expected[[1, 4], 0, 2])
    assert not made.tensor[:, made.slot_bytes :].any()


def test_a_shape_that_does_not_fill_the_slot_is_refused() -> None:
    with pytest.raises(AssertionError, match="is not 7680 bytes"):
        slab(1).payloads(torch.float16, (2, 3, 32, 1, 10))


def test_memory_is_committed_as_it_is_written() -> None:
    gigabyte = 1 << 30
    before = resident_bytes()
    made = PinnedSlab(1 << 20, gigabyte)
    assert resident_bytes() - before < gigabyte // 16
    for slot in made.allocate(64):
        made.view(slot)[::4096] = bytes(256)
    assert 60 << 20 < resident_bytes() - before < gigabyte // 8


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_allocation_is_all_or_none() -> None:
    made = slab(4)
    taken = made.allocate(3)
    with pytest.raises(HostTierFull, match="has 1 free, 2 are needed") as full:
        made.allocate(2)
    assert "--host-gb" in full.value.hint
    assert made.used_blocks == 3
    assert {*taken, *made.allocate(1)} == {0, 1, 2, 3}
    assert made.allocate(0) == []


def test_slots_are_reused_last_in_first_out_before_untouched_ones() -> None:
    made = slab(8)
    slots = made.allocate(4)
    made.free([slots[1], slots[3]])
    assert made.free_slots() == {slots[1], slots[3]}
    assert made.allocate(1) == [slots[3]]
    assert made.allocate(2) == [slots[1], 4]


def test_a_slot_freed_twice_is_caught() -> None:
    made = slab(2)
    [slot] = made.allocate(1)
    with pytest.raises(AssertionError, match="freed but not in use"):
        made.free([slot, slot])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=40))
def test_no_slot_is_given_out_twice(moves: list[tuple[bool, int]]) -> None:
    made = slab(8)
    held: list[int] = []
    for allocate, count in moves:
        if not allocate:
            made.free(held[:count])
            del held[:count]
        elif count <= 8 - len(held):
            held += made.allocate(count)
        else:
            with pytest.raises(HostTierFull):
                made.allocate(count)
        assert len(set(held)) == len(held) == made.used_blocks
        assert set(held) <= set(range(8)) and not set(held) & made.free_slots()


def test_closing_returns_the_memory_and_leaves_stragglers_harmless() -> None:
    made = slab(1, 64 << 20)
    tensor, view = made.tensor, made.view(made.allocate(1)[0])
    tensor.fill_(7)
    before = resident_bytes()
    made.close()
    assert before - resident_bytes() > 60 << 20
    del made
    gc.collect()
    assert view[123] == 0 and not tensor.any()
    view[5] = 9  # still mapped: no fault
    assert tensor[0, 5] == 9


def test_closing_twice_is_closing() -> None:
    made = slab(1)
    made.close()
    made.close()
    assert not made.tensor.any()


class StandInRuntime:
    """Answers like `torch.cuda.cudart()`; a result of 0 is success."""

    def __init__(self) -> None:
        self.result = 0
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:
        if self.result == 0:
            self.registered[address] = size_bytes
        return self.result

    def cudaHostUnregister(self, address: int) -> int:
        return 0 if self.registered.pop(address, None) else 1

    def cudaGetErrorString(self, result: int) -> str:
        return f"error {result}"


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInRuntime]:
    runtime = StandInRuntime()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    yield runtime
    assert runtime.registered == {}, "memory stays pinned after its slab"


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA would pin it")
def test_without_cuda_nothing_is_pinned() -> None:
    assert not slab(1).pinned


@pytest.mark.parametrize("closed", [True, False])
def test_with_cuda_the_whole_slab_is_pinned_until_it_ends(
    cuda: StandInRuntime, closed: bool
) -> None:
    made = slab(3)
    assert made.pinned
    assert cuda.registered == {made.tensor.data_ptr(): 3 * 8192}
    if closed:
        made.close()
        made.close()
        assert not made.pinned and cuda.registered == {}
    del made
    gc.collect()


def test_a_driver_that_refuses_is_not_passed_over(cuda: Any) -> None:
    cuda.result = 2
    with pytest.raises(ConfigError, match="cannot pin a host tier of 24576 bytes: error 2") as no:
        slab(3)
    assert "ulimit -l" in no.value.hint


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_takes_the_slab_for_pinned_memory() -> None:
    made = slab(3)
    assert made.tensor.is_pinned()
    made.tensor[1].fill_(5)
    assert made.tensor[1].to("cuda", non_blocking=True).cpu().unique().tolist() == [5]
    made.close()
