"""Staging in out of large tiers, at sizes that take no time."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from kvws.bench import stage_in
from kvws.bench.stage_in import (
    filled_host,
    measure_disk,
    measure_host,
    payload_geometry,
    stage_in_table,
)
from kvws.bench.store import Disk, StageIn
from kvws.errors import ConfigError
from kvws.models.geometry import ModelGeometry
from kvws.store.backend import open_storage
from kvws.tiers.geometry import PayloadGeometry

GEOMETRY = PayloadGeometry(layers=2, kv_heads=2, head_dim=16, dtype=torch.float32)
BLOCK_BYTES = 2 * 2 * 32 * 2 * 16 * 4


def test_payloads_have_the_models_sizes_in_so_many_bits() -> None:
    model = ModelGeometry("Tiny", 2, 4, 2, 16, 2048, 100, rope=None)
    assert payload_geometry(model, 32) == GEOMETRY
    assert payload_geometry(model, 16).block_bytes == BLOCK_BYTES // 2


def test_every_size_of_host_tier_is_measured_against_a_copy() -> None:
    costs = measure_host(GEOMETRY, (16, 40), view_blocks=8, rounds=3)
    assert [(c.source, c.held_blocks, c.view_blocks) for c in costs] == [
        ("host", 16, 8),
        ("host", 40, 8),
    ]
    for cost in costs:
        assert cost.bare == "memcpy" and cost.block_bytes == BLOCK_BYTES
        assert cost.ratio > 0 and cost.bare_bytes_per_s > 0
        assert cost.ms == pytest.approx(1e3 * 8 * BLOCK_BYTES / cost.bytes_per_s)
    assert stage_in_table(costs).row_count == 2


def test_a_host_tier_that_memory_does_not_allow_is_left_out_with_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stage_in, "free_bytes", lambda: 50 * GEOMETRY.slot_bytes)
    said: list[str] = []
    costs = measure_host(GEOMETRY, (16, 31), view_blocks=8, rounds=1, progress=said.append)
    assert [cost.held_blocks for cost in costs] == [16]
    assert said[-1] == "left out: 31 blocks in host memory, which has room for 30"


def test_a_tier_too_small_to_draw_from_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="too few"):
        measure_host(GEOMETRY, (15,), view_blocks=8)
    with pytest.raises(ConfigError, match="too few"):
        measure_disk(GEOMETRY, tmp_path, 15, view_blocks=8)


def test_the_disk_is_measured_against_raw_reads_and_left_empty(tmp_path: Path) -> None:
    cost = measure_disk(GEOMETRY, tmp_path, 24, view_blocks=8, rounds=2)
    assert (cost.source, cost.bare, cost.held_blocks) == ("disk", "raw reads", 24)
    assert cost.ratio > 0 and cost.bytes_per_s > 0
    assert list(tmp_path.iterdir()) == []


def test_a_store_larger_than_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_in, "free_bytes", lambda: 30 * GEOMETRY.slot_bytes)
    with pytest.raises(ConfigError, match="room for 18"):
        measure_disk(GEOMETRY, tmp_path, 19, view_blocks=8)


@pytest.mark.parametrize("blocks", [1, 63, 64, 65, 130])
def test_all_slots_of_a_filled_tier_hold_numbers(blocks: int) -> None:
    host, slots = filled_host(GEOMETRY, blocks)
    assert len(slots) == host.used_blocks == blocks
    assert all(host.payload(slot).abs().sum() > 0 for slot in slots)


def test_a_view_is_filled_from_the_blocks_that_were_drawn() -> None:
    host, slots = filled_host(GEOMETRY, 12)
    view = StageIn(host, 3)
    values = {slot: host.payload(slot)[1, 1].sum() for slot in slots}
    for drawn in (slots[:3], slots[7:10]):
        view.draw(drawn, random.Random(1))
        view.fill()
        of_pages = view.pool.v_buffer[1].view(3, -1).sum(dim=1)
        expected = torch.stack([values[slot] for slot in drawn])
        torch.testing.assert_close(of_pages.sort().values, expected.sort().values)


def test_blocks_of_a_store_are_read_in_any_order(tmp_path: Path) -> None:
    host, slots = filled_host(GEOMETRY, 12)
    before = {slot: host.payload(slot) for slot in slots}
    disk = Disk(tmp_path, open_storage(tmp_path, "posix"), host, slots, 2, 4)
    disk.put()
    disk.raw_write()
    for read in (disk.read, disk.raw_read):
        host.write(torch.tensor(slots), torch.zeros(12, *GEOMETRY.shape))
        read([9, 2, 3, 1, 7])
        for number, slot in enumerate(slots):
            wanted = before[slot] if number in (1, 2, 3, 7, 9) else torch.zeros(GEOMETRY.shape)
            assert torch.equal(host.payload(slot), wanted)
    disk.close()
