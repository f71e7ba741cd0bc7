"""How long a data plane takes to serve a large workspace again, and in how much memory.

The workspace has the geometry of SmolLM2 in 32 bits and rows of `mean-k`; its payloads are sparse,
its rows are not: loading them is what takes the time, and the index is what takes the memory.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.store.campaigns.recovery_scale import build, peak_bytes, start_of_peak

LAYERS, KV_HEADS, HEAD_DIM = 30, 3, 64
ROW_BYTES = LAYERS * KV_HEADS * HEAD_DIM * 2
PAYLOAD_BYTES = 2 * 32 * LAYERS * KV_HEADS * HEAD_DIM * 4


def attach(folder: Path) -> None:
    """Attach the workspace in this process and print what it took."""
    import torch

    from kvws.engine.data_plane import DataPlane
    from kvws.kernels.rotary import RotaryTable
    from kvws.recall.signals.enabled import EnabledSignals
    from kvws.recall.signals.mean_k import MeanK
    from kvws.store.posix import PosixStorage
    from kvws.tiers.budget import DiskBudget
    from kvws.tiers.codec import make_codec
    from kvws.tiers.disk import DiskTier
    from kvws.tiers.geometry import PayloadGeometry
    from kvws.tiers.host import HostTier

    geometry = PayloadGeometry(LAYERS, KV_HEADS, HEAD_DIM, torch.float32)
    empty = torch.empty(0, KV_HEADS, HEAD_DIM)
    table = RotaryTable(torch.ones(1, HEAD_DIM // 2), torch.zeros(1, HEAD_DIM // 2), False)
    tables = [table] * LAYERS

    class Pool:
        k_buffer = v_buffer = (empty,) * LAYERS

    host = HostTier(geometry, 8 * geometry.slot_bytes)
    codec = make_codec("exact", geometry, tables)
    budget = DiskBudget(1 << 40, folder, rank=0)
    signals = EnabledSignals([MeanK(LAYERS, KV_HEADS, HEAD_DIM)], tables)
    disk = DiskTier(host, codec, budget, PosixStorage(folder), signals, rank=0)
    plane = DataPlane(Pool(), tables, host, signals, disk)
    before = start_of_peak()
    begin_s = time.perf_counter()
    held = plane.attach("workspace", str(folder))
    attach_s = time.perf_counter() - begin_s
    index_bytes = plane.stats()["index_bytes"]
    extra_bytes = peak_bytes() - before - index_bytes
    print(
        f"restart: {len(held):,} blocks ({32 * len(held):,} tokens) attached in {attach_s:.2f} s; "
        f"index of {index_bytes / 1e6:,.0f} MB, {extra_bytes / 1e6:,.0f} MB beside it at the peak"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/crash restart")
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="on the disk to use")
    parser.add_argument("--opener", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.opener:
        attach(options.opener)
        return
    with tempfile.TemporaryDirectory(prefix="kvws-restart-", dir=options.folder) as folder:
        build(Path(folder), options.blocks, ROW_BYTES, PAYLOAD_BYTES)
        for _ in range(options.rounds):
            module = [sys.executable, "-m", "tests.store.campaigns.restart_scale"]
            subprocess.run([*module, "--opener", folder], check=True)


if __name__ == "__main__":
    main()
