"""Triton's kernels compute what their references do, in its interpreter on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent


@pytest.mark.parametrize("kernels", ["triton", "quant", "scores"])
def test_kernels_agree_with_their_references_in_the_interpreter(kernels: str) -> None:
    file = HERE / f"interpreted_{kernels}.py"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", str(file)],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout, "nothing was run"
