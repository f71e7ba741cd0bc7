"""Shared by the acceptance tests."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.acceptance.front import Front, running_front


@pytest.fixture(scope="session")
def harness() -> Path:
    """Recorded traffic of real clients, which doesn't belong to this repository."""
    beside_repository = Path(__file__).resolve().parents[3] / "shared" / "harness"
    folder = Path(os.environ.get("KVWS_HARNESS") or beside_repository)
    if not folder.is_dir():
        pytest.skip("no recorded traffic: set KVWS_HARNESS to its folder")
    return folder


@pytest.fixture(scope="session")
def front(smollm2: Path) -> Generator[Front, None, None]:
    """One server for all tests that change nothing about it; each has sessions of its own."""
    with running_front(smollm2) as front:
        yield front


@pytest.fixture(scope="session")
def thinking_front(smollm2: Path) -> Generator[Front, None, None]:
    """As `front`, with a model that thinks first, between <think> and </think>."""
    with running_front(smollm2, reasoning_parser="qwen3") as front:
        yield front
