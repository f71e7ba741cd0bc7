"""A model, and whether a folder is still what it was: for the tests of the store directory."""

from __future__ import annotations

import os
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from kvws.errors import KvwsError
from kvws.store.identity import ModelIdentity

IDENTITY = ModelIdentity(
    model="smollm2",
    weights="aa" * 16,
    rotary="bb" * 16,
    dtype="float32",
    layers=2,
    kv_heads=3,
    head_dim=64,
    ranks=1,
    block_tokens=32,
)


def tree_hash(root: Path) -> str:
    """Names, kinds, modes, link targets and bytes of all that is in a folder."""
    digest = sha256()
    for path in sorted([root, *root.rglob("*")]):
        status = path.lstat()
        digest.update(f"{path.relative_to(root)} {status.st_mode:o}\n".encode())
        if path.is_symlink():
            digest.update(os.readlink(path).encode())
        elif path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()


def assert_refused(
    error: type[KvwsError], untouched: Path, action: Callable[[], object], *words: str
) -> None:
    """The action fails with an error that says what to do, and changes nothing."""
    before = tree_hash(untouched)
    with pytest.raises(error) as raised:
        action()
    assert tree_hash(untouched) == before
    assert raised.value.hint
    for word in words:
        assert word in str(raised.value)
