"""Opening a store costs as much as its index, and ends a torn one cleanly."""

from __future__ import annotations

from pathlib import Path

from tests.store.campaigns.recovery_scale import TORN_BYTES, build, measure

BLOCKS = 20_000
MAX_BYTES_PER_BLOCK = 2000


def test_a_torn_index_of_many_blocks(tmp_path: Path) -> None:
    build(tmp_path, BLOCKS, row_bytes=64)
    found = measure(tmp_path, row_bytes=64, read_rows=True)
    print(found)
    assert found.blocks == BLOCKS and found.rows_bytes == BLOCKS * 64
    assert found.cut_bytes == TORN_BYTES
    assert found.open_rss_bytes < BLOCKS * MAX_BYTES_PER_BLOCK
    assert measure(tmp_path, row_bytes=64, read_rows=False).cut_bytes == 0
