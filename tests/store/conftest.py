"""A block store on real files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvws.store.block_store import BlockStore
from tests.store.store_place import Place, fill


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture
def store(place: Place) -> Iterator[BlockStore]:
    store = place.open()
    yield store
    store.close()


@pytest.fixture
def held(place: Place, store: BlockStore) -> dict[int, int]:
    """What a closed store of four segments, with gaps, holds: versions by number."""
    fill(store, range(11))
    fill(store, [1, 2], version=1)
    store.drop([4, 9])
    store.close()
    return {0: 0, 1: 1, 2: 1, 3: 0, 5: 0, 6: 0, 7: 0, 8: 0, 10: 0}
