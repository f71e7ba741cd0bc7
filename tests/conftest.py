"""Shared by all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvws.models import resolve_model


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The packaged model in the user's cache: converted once per machine."""
    path = resolve_model("smollm2")
    assert isinstance(path, Path)
    return path


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Number long and binary values instead of spelling them.

    Workers collect on their own and must name each test alike, so a name may not hold what
    changes from one process to the next (a compressed value holds the time of day).
    """
    if isinstance(val, bytes) and (len(val) > 64 or not val.decode("latin-1").isprintable()):
        return argname
    return None
