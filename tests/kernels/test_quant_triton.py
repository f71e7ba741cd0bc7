"""Triton's quantisation: its numbers in the interpreter, its code ahead of time. No GPU needed."""

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


def test_kernels_agree_with_their_references_in_the_interpreter() -> None:
    file = HERE / "interpreted_quant.py"
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


def kernels() -> dict[str, tuple[Any, dict[str, Any]]]:
    """Each kernel with its constants, at a head size of 128 (keys, fp8) or runs of 32."""
    from kvws.kernels.quant.triton import (
        dequantise_fp8_kernel,
        dequantise_kernel,
        quantise_fp8_kernel,
        quantise_kernel,
    )

    keys = {"TOKENS": 32, "RUN": 128, "RUNS": 1, "KEYS": True, "BLOCK_RUN": 128}
    values = {"TOKENS": 32, "RUN": 32, "RUNS": 4, "KEYS": False, "BLOCK_RUN": 32}
    int8 = {"PARTS": 1, "BLOCK_PART": 32}
    int4 = {"PARTS": 2, "BLOCK_PART": 16}
    to_int8 = {**int8, "LEVELS": 255, "BLOCK_TOKENS": 32}
    to_int4 = {**int4, "LEVELS": 15, "BLOCK_TOKENS": 32}
    fp8 = {"TOKENS": 32, "HEAD_DIM": 128, "BLOCK_TOKENS": 32, "BLOCK_DIM": 128}
    return {
        "int8 keys": (quantise_kernel, {**keys, **to_int8}),
        "int4 keys": (quantise_kernel, {**keys, **to_int4}),
        "int4 values": (quantise_kernel, {**values, **to_int4}),
        "fp8": (quantise_fp8_kernel, fp8),
        "from int8 keys": (dequantise_kernel, {**keys, **int8}),
        "from int4 values": (dequantise_kernel, {**values, **int4}),
        "from fp8": (dequantise_fp8_kernel, fp8),
    }


@pytest.mark.skipif(INTERPRETED, reason="the interpreter does not compile")
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(
    "name",
    [
        "int8 keys",
        "int4 keys",
        "int4 values",
        "fp8",
        "from int8 keys",
        "from int4 values",
        "from fp8",
    ],
)
def test_kernels_compile_ahead_of_time(
    name: str, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel, constants = kernels()[name]
    types = {"x": "*bf16", "out": "*bf16", "codes": "*u8", "scales": "*i16"}
    signature = {
        argument: "constexpr" if argument in constants else types.get(argument, "i32")
        for argument in kernel.arg_names
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert f"sm_{capability}" in compiled.asm["ptx"]
    assert len(compiled.asm["cubin"]) > 0
