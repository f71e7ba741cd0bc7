"""Triton kernels: their numbers in the interpreter, their code ahead of time. No GPU needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

PAYLOAD = "*bf16"


def test_kernels_agree_with_their_references_in_the_interpreter() -> None:
    file = HERE / "interpreted_triton.py"
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


def kernels() -> dict[str, tuple[Any, dict[str, str], dict[str, Any]]]:
    """Each kernel with the types of its arguments (i32 where absent) and its constants."""
    from kvws.kernels.mean_k.triton import mean_rotated_kernel
    from kvws.kernels.rerope.triton import rotate_kernel
    from kvws.kernels.score.triton import accumulate_kernel, normalise_kernel

    tables = {"cos": "*fp32", "sin": "*fp32"}
    rotary = {"HEAD_DIM": 128, "INTERLEAVED": False, "BLOCK_PAIRS": 64}
    full = {**rotary, "HALF": 64, "BLOCK_REST": 0}
    partial = {**rotary, "HALF": 48, "INTERLEAVED": True, "BLOCK_REST": 32}
    keys = {"x": PAYLOAD, "out": PAYLOAD, "slots": "*i64", **tables}
    blocks = {"k": PAYLOAD, "out": "*fp32", **tables}
    scores = {
        "queries": "*fp32",
        "tile": "*fp16",
        "candidates": "*u8",
        "normaliser": "*fp32",
        "partial": "*fp32",
        "scale": "fp32",
    }
    sizes = {"HEAD_DIM": 128, "BLOCK_DIM": 128, "BLOCK_ROWS": 32, "BLOCK_BLOCKS": 64}
    return {
        "scatter": (rotate_kernel, keys, {**full, "SCATTER": True, "BLOCK_TOKENS": 16}),
        "rotate": (rotate_kernel, keys, {**partial, "SCATTER": False, "BLOCK_TOKENS": 16}),
        "mean": (mean_rotated_kernel, blocks, {**full, "TOKENS": 32, "BLOCK_TOKENS": 32}),
        "mean partial": (
            mean_rotated_kernel,
            blocks,
            {**partial, "TOKENS": 32, "BLOCK_TOKENS": 32},
        ),
        "normalise": (normalise_kernel, scores, sizes),
        "accumulate": (accumulate_kernel, scores, sizes),
    }


@pytest.mark.skipif(INTERPRETED, reason="the interpreter does not compile")
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(
    "name", ["scatter", "rotate", "mean", "mean partial", "normalise", "accumulate"]
)
def test_kernels_compile_ahead_of_time(
    name: str, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel, types, constants = kernels()[name]
    signature = {
        argument: "constexpr" if argument in constants else types.get(argument, "i32")
        for argument in kernel.arg_names
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert f"sm_{capability}" in compiled.asm["ptx"]
    assert len(compiled.asm["cubin"]) > 0
