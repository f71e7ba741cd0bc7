"""scripts/bench_gpu's parts that a CPU can run, with a clock that only counts.

Not collected by name: test_bench_gpu.py runs this file in a process of its own, because
TRITON_INTERPRET counts only before triton is imported.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvws.bench.gpu import device_rows, far_cases, kernels, step
from kvws.bench.gpu.case import (
    INTERPRETED,
    Case,
    Prepared,
    Sizes,
    Tensors,
    close,
    equal,
    within,
    within_rounding,
)
from kvws.bench.gpu.ceilings import Ceilings
from kvws.bench.gpu.clock import TooSlowError
from kvws.bench.gpu.command import main
from kvws.bench.gpu.report import FILE_NAME, Report, Row
from kvws.bench.gpu.step_view import HostSlab

CPU = torch.device("cpu")
CEILINGS = Ceilings(device_copy=4000.0, host_to_device=50.0, device_to_host=50.0)


class CountingClock:
    """Every run takes a millisecond."""

    device = CPU

    def device_ms(self, run: Callable[[], object]) -> float:
        run()
        return 1.0

    wall_ms = device_ms


class HurriedClock(CountingClock):
    def device_ms(self, run: Callable[[], object]) -> float:
        raise TooSlowError("one run takes 9.00 s, and 3 s are left")

    wall_ms = device_ms


def wrong_by(excess: float) -> Case:
    def prepare(_sizes: Sizes, device: torch.device) -> Prepared:
        x = torch.ones(3, device=device)
        return Prepared(lambda: (x * (1 + excess),), lambda: (x,), within(1e-3), 24)

    return Case("multiply", f"off by {excess}", prepare)


def test_a_kernel_that_is_off_by_more_than_allowed_fails() -> None:
    assert kernels.check(wrong_by(0.9e-3), CPU).passed
    assert kernels.check(wrong_by(1.1e-3), CPU).passed is False
    assert kernels.check(wrong_by(math.nan), CPU).passed is False


def test_a_kernel_that_does_not_run_fails_and_says_why() -> None:
    def prepare(_sizes: Sizes, _device: torch.device) -> Prepared:
        raise RuntimeError("out of registers\nand so on")

    row = kernels.check(Case("broken", "", prepare), CPU)
    assert row.passed is False and row.note == "RuntimeError: out of registers"


@pytest.mark.parametrize(
    "tolerance", [within(1e-3), close(1e-3, 0.0), equal(), within_rounding(torch.float32)]
)
def test_a_tolerance_allows_no_nan_no_infinity_and_no_other_shape(tolerance: object) -> None:
    share: Callable[[Tensors, Tensors], float] = tolerance.share  # type: ignore[attr-defined]
    ones = torch.ones(4)
    assert share((ones,), (ones,)) == 0
    for value in (math.nan, math.inf, 2.0):
        wrong = ones.clone()
        wrong[2] = value
        assert share((wrong,), (ones,)) > 1
        assert share((ones,), (wrong,)) > 1
    assert share((ones[:3],), (ones,)) == math.inf


def test_a_failed_check_is_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(kernels, "kernel_cases", lambda: iter([wrong_by(0.0), wrong_by(1.0)]))
    monkeypatch.setattr(step, "check_step", lambda _device: iter([]))  # type: ignore[misc]
    monkeypatch.setattr(device_rows, "check_device_rows", lambda _device: iter([]))
    assert main(["--device", "cpu", "--out", str(tmp_path)]) == 1
    written = json.loads((tmp_path / FILE_NAME).read_text())
    assert written["passed"] is False
    assert [row["passed"] for row in written["rows"]] == [True, False]


def test_without_time_every_section_is_skipped_with_a_line(tmp_path: Path) -> None:
    assert main(["--device", "cpu", "--seconds", "5", "--out", str(tmp_path)]) == 0
    written = json.loads((tmp_path / FILE_NAME).read_text())
    assert written["rows"] == []
    assert any("check of a step" in line for line in written["skipped"])
    assert sum("are left" in line for line in written["skipped"]) > 20


def test_operands_beyond_32_bits_are_checked_as_all_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(far_cases, "_FAR_BLOCKS", INTERPRETED.blocks + 2)
    cases = list(kernels.cases_beyond_32_bits())
    assert {case.kernel for case in cases} == {
        "score", "rotated_scores", "token_scores", "rerope", "mean_k", "quant",
    }  # fmt: skip
    for case in cases:
        assert kernels.why_not(case, CPU) == "runs on cuda alone"
        row = kernels.check(case, CPU)
        assert row.passed, row


def test_every_kernel_is_timed_and_told_as_a_share_of_a_copy() -> None:
    timed = [case for case in kernels.kernel_cases() if case.timed is not None]
    assert {case.kernel for case in timed} == {
        "score", "rotated_scores", "token_scores", "rerope", "mean_k", "quant",
    }  # fmt: skip
    small = {case.kernel: replace(case, timed=INTERPRETED) for case in timed}
    for case in small.values():
        row = kernels.time(case, CountingClock(), CEILINGS)  # type: ignore[arg-type]
        assert row.ms == 1.0 and row.moved_bytes and row.of_ceiling
        assert row.of_ceiling == pytest.approx(row.moved_bytes / 4e9)
        assert ("TFLOP/s" in row.note) == ("score" in case.kernel)


def test_a_step_is_timed_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "VIEW_BLOCKS", 6)
    model, space, clock = step._SMALL_MODEL, step._SMALL_WORKSPACE, CountingClock()
    host = HostSlab(model, 7, pinned=False)
    rows = [
        *step.transfer_rows(model, host, clock, CEILINGS),  # type: ignore[arg-type]
        *step.step_rows(model, space, host, clock, CEILINGS),  # type: ignore[arg-type]
    ]
    told = {row.variant.partition(": ")[2] or row.variant: row for row in rows}
    assert told.pop("where it is").note.startswith("device: index")
    assert {"choose", "whole step, layer by layer", "whole step, block by block"} <= set(told)
    assert all(row.ms == 1.0 for row in told.values())
    assert told["the view, block by block"].moved_bytes == 6 * host.block_bytes


def test_what_cannot_be_repeated_in_time_is_told_instead_of_timed() -> None:
    case = next(case for case in kernels.kernel_cases() if case.timed is not None)
    row = kernels.time(
        replace(case, timed=INTERPRETED), HurriedClock(), CEILINGS  # type: ignore[arg-type]
    )
    assert row.ms is None and row.passed is None and "9.00 s" in row.note


def test_the_table_lines_up() -> None:
    report = Report({"device": "none"})
    report.rows.append(Row("check", "a", "b", passed=True))
    report.rows.append(Row("kernel", "long name", "c", ms=1234.5))
    heading, first, second, last = report.text().splitlines()
    assert heading.index("variant") == first.index("b") == second.index("c")
    assert heading.index("ms") + 2 == second.index("1234.500") + 8
    assert last == "1 of 1 checks passed"
