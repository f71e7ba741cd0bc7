"""A full disk stops puts, nothing else, and only while it is full."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import pytest

from kvws.store.posix import PosixFile
from tests.store.campaigns.disk_full import NotPermitted, attack


def test_a_full_file_system() -> None:
    try:
        report = attack(seed=1, rounds=15)
    except NotPermitted as error:
        pytest.skip(f"mounting a small file system is not permitted: {error}")
    print(report)
    assert not report.violations, str(report)
    assert report.counts["refusals"] >= 15
    assert report.counts["rows made anew"]


def test_control_a_write_that_hides_a_full_disk_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write = PosixFile.write

    def hiding(self: PosixFile, buffers: Sequence[memoryview], offset: int) -> None:
        with contextlib.suppress(OSError):
            write(self, buffers, offset)

    monkeypatch.setattr(PosixFile, "write", hiding)
    try:
        report = attack(seed=1, rounds=15)
    except NotPermitted as error:
        pytest.skip(f"mounting a small file system is not permitted: {error}")
    assert report.violations
