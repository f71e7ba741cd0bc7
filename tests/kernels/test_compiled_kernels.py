"""Triton's kernels are compiled for every GPU we serve, and stay in its registers. No GPU needed.

What a kernel spills it writes to memory and reads again at every turn of its loop: a change that
makes one spill thousands of bytes would pass every other test, and be many times slower.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

pytest.importorskip("triton")

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter does not compile", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.kernels.compiled import LAUNCHES, Launch

CAPABILITIES = (80, 90, 100)


def spilled_bytes(
    launch: Launch, capability: int, cache: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> int:  # fmt: skip
    """Compiles to machine code. What a thread stores for want of registers, says the assembler."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    monkeypatch.setenv("TRITON_DUMP_PTXAS_LOG", "1")
    source = ASTSource(fn=launch.kernel, signature=launch.signature, constexprs=launch.constants)
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": launch.num_warps},
    )
    assert f"sm_{capability}" in compiled.asm["ptx"]
    assert len(compiled.asm["cubin"]) > 0
    told = re.findall(r"(\d+) bytes spill stores", capfd.readouterr().out)
    assert len(told) == 1, f"the assembler told of {len(told)} kernels"
    return int(told[0])


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("name", LAUNCHES)
def test_a_kernel_compiles_and_spills_no_more_than_it_may(
    name: str, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    launch = LAUNCHES[name]
    spilled = spilled_bytes(launch, capability, tmp_path, monkeypatch, capfd)
    assert spilled <= launch.spilled_bytes_max, f"{spilled} bytes on sm_{capability}"


def test_control_a_kernel_that_wants_more_registers_than_there_are_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    good = LAUNCHES["rerope scatter"]
    greedy = Launch(good.kernel, good.types, {**good.constants, "BLOCK_TOKENS": 64}, num_warps=1)
    assert spilled_bytes(greedy, 90, tmp_path, monkeypatch, capfd) > 0


def test_every_kernel_is_compiled() -> None:
    """A kernel that nobody lists here is compiled by nobody before a GPU meets it."""
    folder = Path(__file__).parents[2] / "kernels"
    defined = {
        (file.parent.name, name)
        for file in folder.glob("*/triton.py")
        for name in re.findall(r"def (\w+_kernel)\(", file.read_text())
    }
    listed = {
        (launch.kernel.__module__.split(".")[-2], launch.kernel.__name__)
        for launch in LAUNCHES.values()
    }
    assert defined and listed == defined
