"""A disk that fails at any operation costs an error, never a block."""

from __future__ import annotations

import pytest

from kvws.store.log import AppendLog
from tests.store.campaigns.io_errors import sweep


def test_every_operation_fails_once() -> None:
    report = sweep(seed=1, workloads=1, stride=3)
    print(report)
    assert not report.violations, str(report)
    assert report.counts["errors raised"] > report.counts["faults"] // 2


def test_control_a_log_that_does_not_cut_back_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(log: AppendLog) -> None:
        pass

    monkeypatch.setattr(AppendLog, "heal", forget)
    report = sweep(seed=1, workloads=1, max_violations=1)
    print(report)
    assert report.violations, "the planted fault was not found"
