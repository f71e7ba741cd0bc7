"""scripts/bench_gpu on a machine without a GPU: its checks run, and so does what it times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

MAY_BE_MISSING = ("sglang", "transformers", "fastapi", "click", "rich", "orjson")


def run_python(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_the_script_checks_every_kernel_and_a_step(tmp_path: Path) -> None:
    done = run_python(ROOT / "scripts" / "bench_gpu", "--device", "cpu", "--out", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads((tmp_path / "bench_gpu.json").read_text(encoding="utf-8"))
    assert written["passed"] and written["skipped"] == ["all measurements: not timed on a CPU"]
    assert all(row["passed"] and row["ms"] is None for row in written["rows"])
    folders = {path.parent.name for path in (ROOT / "kernels").glob("*/api.py")}
    assert {row["name"] for row in written["rows"]} == {*folders, "step"}
    for kernel in ("rerope", "mean_k"):
        variants = " ".join(row["variant"] for row in written["rows"] if row["name"] == kernel)
        for table in ("NeoX", "interleaved", "partial", "Llama-3", "YaRN"):
            assert table in variants, kernel
    assert done.stdout.rstrip().endswith(f"{len(written['rows'])} checks passed")


def test_its_parts_in_the_interpreter() -> None:
    file = HERE / "interpreted_bench_gpu.py"
    run = run_python("-m", "pytest", "-q", "-o", "addopts=", file, TRITON_INTERPRET="1")
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout, "nothing was run"


def test_without_a_gpu_it_says_so() -> None:
    done = run_python(ROOT / "scripts" / "bench_gpu", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert "--device cpu" in done.stderr


def test_it_needs_nothing_but_torch_and_triton() -> None:
    code = """
import sys
import kvws.bench.gpu.command, kvws.bench.gpu.kernels, kvws.bench.gpu.step
print(*sorted(name for name in sys.modules if name.split(".")[0] in {missing!r}))
print(*sorted(name for name in sys.modules if name.startswith("kvws.")))
""".replace("{missing!r}", repr(MAY_BE_MISSING))
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
    third_party, own = done.stdout.split("\n")[:2]
    assert third_party == ""
    rooms = ("kvws.bench", "kvws.errors", "kvws.kernels")
    assert [name for name in own.split() if not name.startswith(rooms)] == []


def test_a_kernel_that_never_returns_ends_with_the_time() -> None:
    code = """
import time
from kvws.bench.gpu.budget import Budget
Budget(2.6).end_process_when_spent(lambda: print("last words", flush=True))
time.sleep(60)
"""
    done = run_python("-c", code)
    assert (done.returncode, done.stdout) == (3, "last words\n")
