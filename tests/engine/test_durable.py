"""Sessions that outlive their process, on the real engine and a real disk."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.engine.tiny import tiny_model

ROOT = Path(__file__).parents[2]
MEASURED = {"ms", "tier_bytes", "cold_text_ms", "restored", "passes", "loaded_pages", "retries"}
"""Fields of a step that depend on the machine, or on which life ran it."""


KILLS = int(os.environ.get("KVWS_REPLAY_KILLS", "2"))


@pytest.fixture(scope="module")
def tiny(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(smollm2, tmp_path_factory.mktemp("tiny"))


def life(model: Path, store: Path, which: str) -> dict[str, Any]:
    run = subprocess.run(
        [sys.executable, "-m", "tests.engine.durable", str(model), str(store), which],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert run.returncode == -signal.SIGKILL, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


def test_a_killed_session_answers_from_disk_as_it_answered_from_the_device(
    smollm2: Path, tmp_path: Path
) -> None:
    """Greedy tokens are equal; nothing that was acknowledged is prefilled again."""
    first = life(smollm2, tmp_path / "store", "first")
    second = life(smollm2, tmp_path / "store", "second")
    assert second["restored"] == first["blocks"] > 50 and second["lost"] == 0
    assert second["disk"]["view"] == first["device"]["view"]
    assert second["disk"]["tokens"] == first["device"]["tokens"] and first["device"]["tokens"]
    assert second["disk"]["loaded"] >= 16, "the view did not come from the disk"
    assert second["disk"]["computed"] < 200 and second["next"]["computed"] < 200
    assert second["disk"]["repaired"] == second["next"]["repaired"] == 0
    assert second["stats"]["lifted_blocks"] >= 16


def trace_of(steps: int, folder: Path) -> Path:
    """A recorded session in which no two blocks are of the same tokens: the engine's tree could
    not tell them apart, and which of them a view is given would depend on what it holds."""
    rng = random.Random(7)
    messages = [{"role": "system", "content": "You are an agent."}]
    for number in range(steps):
        words = " ".join(str(rng.randrange(10_000)) for _ in range(40))
        messages.append({"role": "user", "content": f"Observation {number}: {words}"})
        messages.append({"role": "assistant", "content": f"I will run command {number}."})
    path = folder / "session.json"
    path.write_text(json.dumps({"messages": messages}))
    return path


def replay(trace: Path, tiny: Path, store: Path, *more: str) -> list[str]:
    return [
        sys.executable, "-m", "kvws", "replay", str(trace), "--model", str(tiny),
        "--budget", "512", "--reserve", "512", "--host-gb", "0.05", "--disk-dir", str(store),
        "--disk-gb", "1", *more,
    ]  # fmt: skip


def same_report(report: Path) -> dict[str, Any]:
    """What must not depend on when a replay was killed."""
    content = json.loads(report.read_text())
    steps = [
        {name: value for name, value in step.items() if name not in MEASURED | {"resumed_tokens"}}
        for step in content["steps"]
    ]
    for step in steps:
        step["decisions"] = [decision[:3] for decision in step["decisions"]]
    return {"steps": steps, "skipped": content["skipped_steps"], "limits": content["limits"]}


def run_and_kill(command: list[str], after_s: float | None, journal: Path) -> int:
    """Run a replay; SIGKILL it some time after its first finished step. Returns its exit code."""
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        if after_s is not None:
            before = len(journal.read_text().splitlines()) if journal.exists() else 0
            deadline = time.monotonic() + 100
            while process.poll() is None and time.monotonic() < deadline:
                if journal.exists() and len(journal.read_text().splitlines()) > before:
                    break
                time.sleep(0.01)
            time.sleep(after_s)
            process.kill()
        _, errors = process.communicate(timeout=200)
        assert process.returncode in (0, -signal.SIGKILL), errors[-3000:].decode()
        return process.returncode
    finally:
        if process.poll() is None:
            process.kill()


@pytest.mark.timeout(900)
def test_a_replay_killed_at_any_moment_ends_with_the_same_report(
    tiny: Path, tmp_path: Path
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    trace = trace_of(8 + 4 * KILLS, tmp_path)
    whole, killed, journal = (tmp_path / n for n in ("whole.json", "killed.json", "lines.jsonl"))
    command = replay(trace, tiny, tmp_path / "one", "--json", str(whole))
    assert run_and_kill(command, None, journal) == 0
    command = replay(
        trace, tiny, tmp_path / "two", "--json", str(killed), "--journal", str(journal), "--resume"
    )
    kills = 0
    while kills < KILLS and run_and_kill(command, rng.random(), journal) != 0:
        kills += 1
    assert kills > 0, "it was never killed"
    acknowledged = json.loads(journal.read_text().splitlines()[-1])["acknowledged_blocks"]
    run_and_kill(command, None, journal)
    report = json.loads(killed.read_text())
    assert report["resumed"]["recomputed_blocks"] == 0
    assert report["resumed"]["steps"] > 0 and report["resumed"]["blocks"] >= acknowledged
    assert same_report(killed) == same_report(whole)


def test_a_session_lives_on_quantised_tiers(tiny: Path, tmp_path: Path) -> None:
    """The self-check passes, recall loads quantised blocks, and a second life finds them."""
    report = tmp_path / "report.json"
    command = replay(
        trace_of(8, tmp_path), tiny, tmp_path / "store", "--json", str(report), "--resume",
        "--host-format", "int8", "--disk-format", "int8",
    )  # fmt: skip
    assert run_and_kill(command, None, report) == 0
    first = json.loads(report.read_text())
    assert first["totals"]["recall_steps"] > 0
    assert sum(step["loaded_pages"] for step in first["steps"]) > 0
    exact = 2 * 3 * 2 * 16 * 4  # K and V, layers, heads, dimensions, bytes
    assert first["token_bytes"]["host"] == first["token_bytes"]["disk"] < 0.5 * exact
    assert run_and_kill(command, None, report) == 0
    resumed = json.loads(report.read_text())["resumed"]
    assert resumed["steps"] == len(first["steps"]) and resumed["blocks"] > 20
