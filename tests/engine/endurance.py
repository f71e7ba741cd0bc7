"""Two hundred steps of a growing, forking session on a real engine with a tiny model.

Run as `python -m tests.engine.endurance MODEL_FOLDER`; prints one JSON line.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from kvws.engine.launch import RunningEngine, running_engine
from kvws.engine.settings import EngineSettings
from kvws.limits import Limits
from kvws.session.workspace import Workspace
from kvws.step import StepRequest, finish_step, run_step

STEPS = 200
DEVICE_TOKENS = 4096
LIMITS = Limits(1024, 512, 32, 256, 64)


def run(running: RunningEngine, seed: int) -> dict[str, Any]:
    engine = running.engine
    rng = random.Random(seed)
    workspace = Workspace("endurance")
    prompts = {"main": [rng.randrange(1000, 40000) for _ in range(300)]}
    most_device_bytes = 0
    exact_host_bytes = True
    for number in range(STEPS):
        if number % 40 == 20:  # a sub-agent starts from what the main thread has so far
            prompts[f"agent-{number}"] = list(prompts["main"])
        if number % 50 == 49:  # the client rewrote the end of its history
            del prompts["main"][-rng.randrange(1, 300) :]
        name = rng.choice(list(prompts))
        prompts[name] += [rng.randrange(1000, 40000) for _ in range(rng.randrange(1, 250))]
        request = StepRequest(name, prompts[name], 2, sampling={"temperature": 0.0})
        report = running.run(finish_step(run_step(request, workspace, engine, LIMITS)))
        assert report.retries == 0 and report.repaired_blocks == 0, f"seed {seed}, step {number}"
        workspace.check_integrity()
        running.run(engine.check_integrity())
        stats = running.run(engine.stats())[0]
        assert stats["open_steps"] == stats["staged_pages_now"] == stats["watched_requests"] == 0
        assert stats["blocks"] == workspace.block_count
        exact_host_bytes &= stats["host_used_bytes"] == stats["blocks"] * engine.block_bytes
        most_device_bytes = max(most_device_bytes, stats["device_used_bytes"])
    running.run(engine.flush_device_cache())
    after_flush = running.run(engine.stats())[0]
    running.run(engine.drop_workspace(workspace.name))
    after_drop = running.run(engine.stats())[0]
    return {
        "seed": seed,
        "tokens": sum(map(len, prompts.values())),
        "longest": max(map(len, prompts.values())),
        "blocks": workspace.block_count,
        "exact_host_bytes": exact_host_bytes,
        "most_device_bytes": most_device_bytes,
        "device_bytes_after_flush": after_flush["device_used_bytes"],
        "host_blocks_after_drop": after_drop["host_used_blocks"],
        "device_pool_bytes": DEVICE_TOKENS * engine.block_bytes // 32,
    }


if __name__ == "__main__":
    settings = EngineSettings(
        model=Path(sys.argv[1]),
        context_tokens=LIMITS.context_tokens,
        device_tokens=DEVICE_TOKENS,
        host_bytes=256 << 20,
    )
    with running_engine(settings) as engine:
        print(json.dumps(run(engine, seed=int(sys.argv[2]) if len(sys.argv) > 2 else 0)))
