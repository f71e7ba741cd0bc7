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
