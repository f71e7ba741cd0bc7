"""A campaign that hangs is ended where it is a command, and nowhere else."""

from __future__ import annotations

import faulthandler
import subprocess
import sys
from pathlib import Path

import pytest

from tests.store.campaigns.bit_flips import BitFlips
from tests.store.campaigns.io_errors import sweep
from tests.store.campaigns.power_loss import PowerLoss

ROOT = Path(__file__).parents[2]
HANGING = """
import time
from tests.store.campaigns import report
report.MAX_SILENCE_S = 0.2
report.arguments("hanging")
report.end_when_stuck()
time.sleep(60)
"""


def test_a_test_that_runs_a_campaign_leaves_nothing_behind_that_ends_its_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def end_later(*_: object, **__: object) -> None:
        raise AssertionError("another test would be ended")

    monkeypatch.setattr(faulthandler, "dump_traceback_later", end_later)
    PowerLoss(seed=1).run(points=1)
    sweep(seed=1, workloads=1, stride=1000)
    BitFlips(seed=1).flip_random_bits(1)


def test_a_command_that_makes_no_step_is_ended_and_says_where_it_hangs() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", HANGING],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1
    assert "Timeout" in ended.stderr and "line 7 in <module>" in ended.stderr
