"""Which way payloads take to the disk, decided once and said in the log."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from kvws.errors import ConfigError
from kvws.store.kvikio import KvikioStorage, unusable_reason
from kvws.store.posix import PosixStorage
from kvws.store.storage import Backend, Storage

logger = logging.getLogger("kvws.store")


def open_storage(directory: Path, backend: Backend) -> Storage:
    """The storage for a directory, which need not exist yet.

    Args:
        backend: "auto" takes KvikIO where there is CUDA and KvikIO passes its check.

    Raises:
        ConfigError: KvikIO was asked for by name and cannot be used.
    """
    if backend == "posix":
        return _announced(PosixStorage(directory), "as configured")
    if backend == "auto" and not torch.cuda.is_available():
        return _announced(PosixStorage(directory), "there is no CUDA")
    refusal = unusable_reason(directory)
    if refusal is None:
        reason = "as configured" if backend == "kvikio" else "there is CUDA, its check passed"
        return _announced(KvikioStorage(directory), reason)
    if backend == "kvikio":
        raise ConfigError(
            f"the kvikio backend cannot be used in {directory}: {refusal}",
            hint="install kvikio-cu13 (kvikio-cu12 for CUDA 12) beside a CUDA driver, "
            "or use --disk-backend posix",
        )
    return _announced(PosixStorage(directory), f"kvikio cannot be used: {refusal}", warn=True)


def _announced(storage: Storage, reason: str, *, warn: bool = False) -> Storage:
    level = logging.WARNING if warn else logging.INFO
    logger.log(level, "block store: %s (%s)", storage.description, reason)
    return storage
