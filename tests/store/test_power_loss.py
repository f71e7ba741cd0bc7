"""No power loss loses an acknowledged block or brings back a wrong one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvws.store.log import AppendLog
from tests.store.campaigns.power_loss import PowerLoss
from tests.store.simulated_disk import Fault, SimulatedDisk

CONTROL_POINTS = 6000
LOG = Path("/log")


@pytest.mark.parametrize("faults", [False, True])
def test_power_loss_at_every_operation(faults: bool) -> None:
    report = PowerLoss(seed=1, faults=faults).run(points=4000)
    print(report)
    assert not report.violations, str(report)


@pytest.mark.parametrize("planted", ["index.log", "segment", "rows", "directory"])
def test_control_a_sync_that_does_nothing_is_caught(planted: str) -> None:
    report = PowerLoss(1, ignored_syncs=(planted,)).run(CONTROL_POINTS, max_violations=1)
    print(report)
    assert report.violations, "the planted fault was not found"


def test_control_an_acknowledgement_before_the_sync_is_caught() -> None:
    report = PowerLoss(1, early_acknowledgement=True).run(CONTROL_POINTS, max_violations=1)
    print(report)
    assert report.violations, "the planted fault was not found"


def log_with_a_failed_frame() -> tuple[SimulatedDisk, AppendLog]:
    """The frame `lost` could neither be synced nor be cut off."""
    disk = SimulatedDisk()
    log, _ = AppendLog.open(disk, LOG)
    log.append([b"kept"])
    log.sync()
    log.append([b"lost"])
    disk.fault = Fault(disk.operations, count=2)
    with pytest.raises(OSError, match="Input/output"):
        log.sync()
    return disk, log


def found_after_power_loss(disk: SimulatedDisk, seed: int) -> list[bytes]:
    _, scan = AppendLog.open(disk.crash(random.Random(seed)), LOG)
    return [body for _, body in scan.frames]


def test_a_frame_that_a_restart_finds_stays_although_its_sync_had_failed() -> None:
    disk, log = log_with_a_failed_frame()
    log.close()
    _, scan = AppendLog.open(disk, LOG)
    listed = [body for _, body in scan.frames]
    assert all(found_after_power_loss(disk, seed) == listed for seed in range(200))


def test_a_cut_whose_sync_failed_is_done_again() -> None:
    disk, log = log_with_a_failed_frame()
    disk.fault = Fault(disk.operations + 1)
    with pytest.raises(OSError, match="Input/output"):
        log.heal()
    log.heal()
    assert all(found_after_power_loss(disk, seed) == [b"kept"] for seed in range(200))
