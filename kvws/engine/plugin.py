# pyright: basic
"""SGLang general plugin: two hooks and the CPU attention, in every engine process.

State here is per process because SGLang's hooks are plain functions: one engine process has one
model, hence one tap and one list of rotary tables.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from pathlib import Path
from typing import Any

from kvws.engine.startup_report import report_startup_error
from kvws.engine.tap import QueryTap
from kvws.errors import KvwsError
from kvws.kernels.rotary import RotaryTable

CONTROL_DIR_VARIABLE = "KVWS_CONTROL_DIR"
"""Set by the launcher; without it the plugin leaves foreign SGLang processes alone."""

LOG_NAME = "engine.log"
"""In the control directory: what the engine processes print."""

tap = QueryTap()
rotary: list[RotaryTable] = []
weights: list[str] = []
"""The digest of the loaded model's weights."""
query_heads: list[int] = []
"""How many of them a layer has on this rank."""


def install() -> None:
    """Register the hooks. Runs in the front process and in each engine process."""
    control_dir = os.environ.get(CONTROL_DIR_VARIABLE)
    if not control_dir:
        return
    if multiprocessing.parent_process() is not None:
        _log_to_file(Path(control_dir) / LOG_NAME)
        _leave_interrupts_to_the_front_process()
        threading.Thread(target=_end_with_the_front_process, daemon=True).start()

    import torch
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.layers.attention.base_attn_backend.AttentionBackend.forward",
        _catch_queries,
        HookType.AROUND,
    )
    HookRegistry.register(
        "sglang.srt.model_executor.model_runner.ModelRunner.load_model",
        _examine_model,
        HookType.AFTER,
    )
    if not torch.cuda.is_available():
        from kvws.engine.attention_cpu import create_new_rows_attention

        # The name stays: SGLang decides by name which helpers a backend may use.
        register_attention_backend("torch_native")(create_new_rows_attention)


def _catch_queries(
    original: Any,
    self: Any,
    q: Any,
    k: Any,
    v: Any,
    layer: Any,
    forward_batch: Any,
    *args: Any,
    **kw: Any,
) -> Any:
    """With the names of what it stands around: some backends hand on to others by name."""
    tap.catch(q, layer, forward_batch)
    return original(self, q, k, v, layer, forward_batch, *args, **kw)


def _examine_model(result: Any, runner: Any, *args: Any, **kw: Any) -> Any:
    from kvws.engine.fingerprint import weights_digest
    from kvws.engine.rotary import query_heads_of, rotary_tables

    try:
        rotary[:] = rotary_tables(runner.model)
        query_heads[:] = [query_heads_of(runner.model)]
        weights[:] = [weights_digest(runner.model)]
    except KvwsError as error:
        report_startup_error(Path(os.environ[CONTROL_DIR_VARIABLE]), error)
        raise
    return result


def _leave_interrupts_to_the_front_process() -> None:
    """Ctrl-C in a terminal, and a service manager's polite kill, reach every process of a group.
    The front process needs the engine to save sessions, and then ends it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _end_with_the_front_process() -> None:
    """SGLang asks the kernel to be killed with its parent, but a parent that died before it asked
    leaves an orphan behind."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _log_to_file(path: Path) -> None:
    """Send this process's output to a file: the terminal belongs to the front process."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
