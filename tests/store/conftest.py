"""A block store on real files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvws.store.block_store import BlockStore
from tests.store.store_place import Place


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture
def store(place: Place) -> Iterator[BlockStore]:
    store = place.open()
    yield store
    store.close()
