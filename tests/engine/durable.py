"""One life of a durable session on a real engine with the embedded model.

Run as `python -m tests.engine.durable MODEL STORE first|second`; prints one JSON line, and kills
itself without any clean-up, as a crash would.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

from kvws.engine.launch import RunningEngine, running_engine
from kvws.engine.settings import EngineSettings
from kvws.limits import Limits
from kvws.recall.plan import Action
from kvws.session.durable import Acknowledgement, open_workspace
from kvws.session.workspace import Workspace
from tests.engine.asking import ask_workspace

LIMITS = Limits(512, 512, 32, 128, 64)
SESSION_TOKENS = 1800
HOST_BLOCKS = 70  # the session has about 56 blocks, and a view and its pages need twice 32


def ask(running: RunningEngine, workspace: Workspace, tokens: list[int]) -> dict[str, Any]:
    """A greedy answer of eight tokens, and what it took."""
    answer = running.run(ask_workspace(running.engine, workspace, tokens, LIMITS, count=8))
    report = answer.report
    assert report is not None
    return {
        "tokens": answer.tokens,
        "view": [d.block for d in report.decisions if d.action is not Action.DROP],
        "computed": report.computed_tokens,
        "loaded": report.loaded_pages,
        "repaired": report.repaired_blocks,
    }


def live(running: RunningEngine, life: str) -> dict[str, Any]:
    rng = random.Random(5)
    history = [rng.randrange(1000, 40000) for _ in range(SESSION_TOKENS)]
    questions = [[rng.randrange(1000, 40000) for _ in range(40)] for _ in range(2)]
    workspace, restored = running.run(
        open_workspace("session", running.engine, running.store, running.identity)
    )
    found: dict[str, Any] = {"restored": restored.blocks, "lost": len(restored.lost)}
    if life == "first":
        ask(running, workspace, history)
        ask(running, workspace, history + questions[0])
        found["device"] = ask(running, workspace, history + questions[0])  # its blocks are known
        assert running.run(Acknowledgement(workspace, running.engine).complete())
        found["blocks"] = workspace.registered_blocks
    else:
        found["disk"] = ask(running, workspace, history + questions[0])
        found["next"] = ask(running, workspace, history + questions[0] + questions[1])
        found["stats"] = running.run(running.engine.stats())[0]
    running.run(running.engine.check_integrity())
    return found


if __name__ == "__main__":
    model, store, which = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    settings = EngineSettings(
        model=model,
        context_tokens=LIMITS.context_tokens,
        device_tokens=4096,
        host_bytes=HOST_BLOCKS * (1_474_560 + 4096),
        disk_dir=store,
        disk_bytes=1 << 30,
    )
    with running_engine(settings) as engine:
        print(json.dumps(live(engine, which)), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
