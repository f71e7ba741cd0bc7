"""What is loaded is left alone; what comes later is still collected."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from kvws.serving.garbage import freeze_what_is_loaded


class Ring:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_what_is_there_already_is_not_looked_through_again() -> None:
    loaded = Ring()
    freeze_what_is_loaded()
    assert gc.get_freeze_count() > 10_000
    assert not any(each is loaded for each in gc.get_objects())


def test_garbage_is_collected_before_and_after() -> None:
    before = weakref.ref(Ring())
    freeze_what_is_loaded()
    after = weakref.ref(Ring())
    assert before() is None and after() is not None
    gc.collect()
    assert after() is None
