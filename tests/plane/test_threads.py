"""Threads beside the forward pass: who computes for long gives way, and nobody else does."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

import pytest

from kvws.engine.threads import give_way_to_the_forward_pass

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="niceness is a process's")


def in_a_thread(work: Callable[[], int]) -> int:
    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


def niceness() -> int:
    """Of the calling thread."""
    return os.getpriority(os.PRIO_PROCESS, 0)


def test_a_thread_that_gives_way_is_nicer_once_and_alone() -> None:
    before = niceness()

    def give_way_twice() -> int:
        give_way_to_the_forward_pass()
        give_way_to_the_forward_pass()
        return niceness()

    if before > 14:
        pytest.skip("the tests give way themselves")
    assert in_a_thread(give_way_twice) == before + 5
    assert niceness() == before
    assert in_a_thread(niceness) == before
