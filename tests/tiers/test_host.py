"""The host tier: fixed slots, all or none, last in first out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvws.errors import ConfigError, HostTierFull
from kvws.tiers.geometry import PayloadGeometry
from kvws.tiers.host import HostTier

SMALL = PayloadGeometry(layers=2, kv_heads=1, head_dim=8, dtype=torch.float32)


def tier(blocks: int) -> HostTier:
    return HostTier(SMALL, blocks * SMALL.block_bytes)


@pytest.mark.parametrize(
    ("geometry", "expected"),
    [
        (SMALL, 2 * 2 * 32 * 1 * 8 * 4),
        (PayloadGeometry(30, 3, 64, torch.float32), 1_474_560),
        (PayloadGeometry(36, 8, 128, torch.bfloat16), 4_718_592),
    ],
)
def test_a_block_is_k_and_v_of_32_tokens_in_every_layer(
    geometry: PayloadGeometry, expected: int
) -> None:
    assert geometry.block_bytes == expected


def test_capacity_is_rounded_down_to_whole_blocks() -> None:
    host = HostTier(SMALL, 3 * SMALL.block_bytes + 17)
    assert host.capacity_blocks == 3
    assert host.used_blocks == 0 and host.used_bytes == 0


@pytest.mark.parametrize("capacity", [0, SMALL.block_bytes - 1])
def test_a_tier_of_less_than_a_block_is_a_configuration_error(capacity: int) -> None:
    with pytest.raises(ConfigError, match=f"{capacity} bytes holds no block") as refused:
        HostTier(SMALL, capacity)
    assert "--host-gb" in refused.value.hint


def test_a_block_is_one_contiguous_payload_seen_by_layer() -> None:
    host = tier(4)
    payload = torch.randn(2, 2, 32, 1, 8)
    host.write(torch.tensor([2]), payload.unsqueeze(0))
    assert torch.equal(host.payload(2), payload)
    for layer in range(2):
        assert torch.equal(host.page_keys(layer)[2], payload[0, layer])
        assert torch.equal(host.page_values(layer)[2], payload[1, layer])


def test_allocation_is_all_or_none() -> None:
    host = tier(4)
    taken = host.allocate(3)
    with pytest.raises(HostTierFull, match="has 1 free, 2 are needed") as full:
        host.allocate(2)
    assert "--host-gb" in full.value.hint and full.value.http_status == 503
    assert host.used_blocks == 3
    assert {*taken, *host.allocate(1)} == {0, 1, 2, 3}
    assert host.used_bytes == 4 * SMALL.block_bytes


def test_nothing_is_always_free() -> None:
    host = tier(1)
    host.allocate(1)
    assert host.allocate(0) == []


def test_slots_are_reused_last_in_first_out_before_untouched_ones() -> None:
    host = tier(8)
    slots = host.allocate(4)
    host.free([slots[1], slots[3]])
    assert host.free_slots() == {slots[1], slots[3]}
    assert host.allocate(1) == [slots[3]]
    assert host.allocate(2) == [slots[1], 4]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=40))
def test_no_slot_is_given_out_twice(moves: list[tuple[bool, int]]) -> None:
    host = tier(8)
    held: list[int] = []
    for allocate, count in moves:
        if not allocate:
            host.free(held[:count])
            del held[:count]
        elif count <= 8 - len(held):
            held += host.allocate(count)
        else:
            with pytest.raises(HostTierFull):
                host.allocate(count)
        assert len(set(held)) == len(held) == host.used_blocks
        assert set(held) <= set(range(8)) and not set(held) & host.free_slots()
