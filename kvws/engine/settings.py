"""What the launcher needs to know to start an engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil


def default_host_bytes() -> int:
    """Half of the memory that is available now."""
    return psutil.virtual_memory().available // 2


@dataclass(frozen=True)
class EngineSettings:
    """How the engine is started.

    Attributes:
        model: Hugging Face folder or hub name.
        context_tokens: longest prompt + generation of one request.
        device_tokens: slots of the engine's KV pool; two full contexts when None.
        host_bytes: capacity of the host tier per rank; half of the free memory when None.
        dtype: of weights and KV, as torch names it.
        threads: compute threads of the engine on a CPU; what OMP_NUM_THREADS says, else all
            cores, when None.
        max_running_requests: requests batched together.
        cache_dir: for compiled extensions, kept between starts.
    """

    model: str | Path
    context_tokens: int
    device_tokens: int | None = None
    host_bytes: int | None = None
    dtype: str = "float32"
    threads: int | None = None
    max_running_requests: int = 4
    cache_dir: Path = Path.home() / ".cache" / "kvws"
