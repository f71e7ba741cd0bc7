"""A full disk stops puts, nothing else, and only while it is full."""

from __future__ import annotations

import pytest

from tests.store.campaigns.disk_full import NotPermitted, attack


def test_a_full_file_system() -> None:
    try:
        report = attack(seed=1, rounds=15)
    except NotPermitted as error:
        pytest.skip(f"mounting a small file system is not permitted: {error}")
    print(report)
    assert not report.violations, str(report)
    assert report.counts["refusals"] >= 15
