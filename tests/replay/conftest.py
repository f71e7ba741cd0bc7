"""Shared by the replay tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_traces() -> Path:
    """Recorded sessions of real agents, which don't belong to this repository."""
    beside_repository = Path(__file__).resolve().parents[3] / "shared" / "traces"
    folder = Path(os.environ.get("KVWS_TRACES") or beside_repository)
    if not folder.is_dir():
        pytest.skip("no recorded sessions: set KVWS_TRACES to their folder")
    return folder
