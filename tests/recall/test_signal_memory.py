"""Scoring a workspace of ten million tokens takes little memory besides its index."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvws.kernels.rotary import RotaryTable
from kvws.kernels.rotated_scores import reference as rotated
from kvws.kernels.token_scores import api as tokens
from kvws.recall.index import TILE_BLOCKS
from kvws.recall.signals.content import Content
from kvws.recall.signals.rotated_mean import RotatedMean
from kvws.recall.signals.signal import Query, Signal, Tile

TEN_MILLION_TOKENS_BLOCKS = 312_500
EXTRA_BYTES_MAX = 512 * 10**6
SCALE = 8
"""So many times fewer blocks are scored, with limits that are so many times smaller: what grows
with either is so many times smaller as well."""

KV_HEADS, GROUP, HEAD_DIM, LAYERS, QUERY_TOKENS = 2, 3, 64, 3, 32


def signal(name: str) -> Signal:
    if name == "content":
        heads = [(0, head) for head in range(KV_HEADS * GROUP)]
        return Content(heads, group=GROUP, head_dim=HEAD_DIM, precision="int8")
    half = HEAD_DIM // 2
    angles = torch.arange(4096).unsqueeze(1) * 10_000.0 ** (-torch.arange(half) / half)
    table = RotaryTable(angles.cos(), angles.sin(), interleaved=False)
    return RotatedMean(range(LAYERS), KV_HEADS, HEAD_DIM, [table] * LAYERS)


def tile_of(scored: Signal, number: int) -> Tile:
    """Memory that is there; a few blocks in it are no candidates."""
    parts = tuple(
        torch.full((*part.before, TILE_BLOCKS, *part.after), 1 + number % 7, dtype=part.dtype)
        for part in scored.parts
    )
    candidates = torch.ones(TILE_BLOCKS, dtype=torch.bool)
    candidates[5::97] = False
    first = 32 * (number * TILE_BLOCKS + torch.arange(TILE_BLOCKS))
    return Tile(parts, candidates, first)


def peak_bytes() -> int:
    """Not from getrusage: that counts the process which started this one as well."""
    status = Path("/proc/self/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return 1024 * int(found[1])


def extra_bytes(name: str) -> int:
    """What scoring adds to the most memory that this process ever had."""
    torch.set_num_threads(1)
    tokens.LOGITS_BYTES //= SCALE
    for limit in ("KEYS_BYTES", "LOGITS_BYTES", "COPIES_BYTES"):
        setattr(rotated, limit, getattr(rotated, limit) // SCALE)
    scored, blocks = signal(name), TEN_MILLION_TOKENS_BLOCKS // SCALE
    generator = torch.Generator().manual_seed(0)
    heads = torch.randn(LAYERS, QUERY_TOKENS, KV_HEADS * GROUP, HEAD_DIM, generator=generator)
    query = Query(heads, 32 * blocks)
    scored.score(query, [tile_of(scored, 0)])  # what a first call loads is not scoring's
    tiles = [tile_of(scored, number) for number in range(-(-blocks // TILE_BLOCKS))]
    before = peak_bytes()
    scored.score(query, tiles)
    return peak_bytes() - before


@pytest.mark.parametrize("name", ["content", "rotated-mean"])
def test_scoring_ten_million_tokens_takes_less_than_half_a_gigabyte(name: str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.recall.test_signal_memory", name],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    extra = SCALE * int(run.stdout)
    assert 10**6 < extra < EXTRA_BYTES_MAX, f"{extra / 1e6:.0f} MB"


if __name__ == "__main__":
    print(extra_bytes(sys.argv[1]))
