"""What the launcher needs to know to start an engine."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil


def default_host_bytes() -> int:
    """Half of the memory that is available now."""
    return psutil.virtual_memory().available // 2


def default_disk_bytes(directory: Path) -> int:
    """What the stores in a directory take already, and 80 % of what is free beside them."""
    used = sum(512 * path.stat().st_blocks for path in directory.glob("*/rank-*/*"))
    return used + shutil.disk_usage(directory).free * 4 // 5


@dataclass(frozen=True)
class EngineSettings:
    """How the engine is started.

    Attributes:
        model: Hugging Face folder or hub name.
        context_tokens: longest prompt + generation of one request.
        device_tokens: slots of the engine's KV pool; when None, what SGLang finds room for on a
            GPU, and a full context for each running request on a CPU.
        name: how the user calls the model; the last part of `model` when "".
        host_bytes: capacity of the host tier per rank; half of the free memory when None.
        host_format: how blocks lie there, one of `kvws.tiers.codec.PAYLOAD_FORMATS`.
        disk_dir: the store directory; None keeps blocks in memory only.
        disk_bytes: capacity of the disk tier; what it holds and most of what is free when None.
        disk_format: how blocks lie on disk.
        disk_backend: what moves them: "auto", "posix" or "kvikio".
        signals: names of what blocks are found by, of `kvws.recall.signals.build.SIGNAL_NAMES`.
        index_bytes: memory of a GPU for index rows that are scored there, per rank; 0 scores on
            the CPU; part of what is free when None.
        profile: file with the model's retrieval profile; None where it was not calibrated.
        dtype: of weights and KV, as torch names it; "auto" is the checkpoint's own on a GPU, and
            float32 on a CPU.
        threads: compute threads of the engine on a CPU; what OMP_NUM_THREADS says, else all
            cores, when None.
        max_running_requests: requests batched together.
        tool_call_parser: SGLang's name of the format of tool calls; "auto" tells it from the
            model's chat template.
        reasoning_parser: SGLang's name of the format of reasoning, or "auto".
        cache_dir: for compiled extensions, kept between starts.
    """

    model: str | Path
    context_tokens: int
    device_tokens: int | None = None
    name: str = ""
    host_bytes: int | None = None
    host_format: str = "exact"
    disk_dir: Path | None = None
    disk_bytes: int | None = None
    disk_format: str = "exact"
    disk_backend: str = "auto"
    signals: tuple[str, ...] = ("mean-k",)
    index_bytes: int | None = None
    profile: Path | None = None
    dtype: str = "auto"
    threads: int | None = None
    max_running_requests: int = 4
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    cache_dir: Path = Path.home() / ".cache" / "kvws"
