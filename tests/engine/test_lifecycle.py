"""Starting, enduring and dying, each with an engine of its own in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.engine.tiny import tiny_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tiny(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(smollm2, tmp_path_factory.mktemp("tiny"))


def test_two_hundred_steps_leak_nothing_and_stay_within_the_device_pool(tiny: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.engine.endurance", str(tiny)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["longest"] > 4 * 1024, "the session outgrew its budget"
    assert found["exact_host_bytes"], "host bytes are not blocks × block bytes"
    assert found["most_device_bytes"] <= found["device_pool_bytes"]
    assert found["device_bytes_after_flush"] == 0
    assert found["host_blocks_after_drop"] == 0


def trace_of(steps: int, folder: Path) -> Path:
    """A recorded session long enough to be interrupted."""
    messages = [{"role": "system", "content": "You are an agent."}]
    for number in range(steps):
        messages.append({"role": "user", "content": f"Observation {number}. " + "word " * 150})
        messages.append({"role": "assistant", "content": f"I will run command {number}."})
    path = folder / "session.json"
    path.write_text(json.dumps({"messages": messages}))
    return path


def test_a_dead_engine_ends_a_replay_with_one_line_a_hint_and_no_half_written_report(
    tiny: Path, tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    replay = subprocess.Popen(
        [
            sys.executable, "-m", "kvws", "replay", str(trace_of(2000, tmp_path)),
            "--model", str(tiny), "--budget", "512", "--json", str(report),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    try:
        scheduler = _wait_for_scheduler(replay.pid)
        time.sleep(5)  # into the replay
        scheduler.kill()
        output, errors = replay.communicate(timeout=60)
    finally:
        replay.kill()
    assert replay.returncode == 1, errors[-2000:]
    assert "engine process" in errors and "is gone" in errors
    assert "hint:" in errors
    assert "Traceback" not in errors + output
    assert list(tmp_path.glob("*report*")) == []
    assert not scheduler.is_running()


def _wait_for_scheduler(pid: int) -> psutil.Process:
    """The engine's scheduler process, once it has opened its control socket."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for child in psutil.Process(pid).children():
            if "scheduler" in " ".join(child.cmdline()) and any(
                connection.laddr and str(connection.laddr).endswith("rank-0.sock")
                for connection in child.net_connections("unix")
            ):
                return child
        time.sleep(0.2)
    raise AssertionError("the engine's scheduler did not come up")
