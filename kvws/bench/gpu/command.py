"""`scripts/bench_gpu`: everything in order, within the time that it is given."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kvws.bench.gpu.budget import Budget
from kvws.bench.gpu.report import FILE_NAME, Report, Row

_SECONDS = 470.0

_CASE_SECONDS = 10.0
"""What a case may take, its compilation included, for it to begin."""

_WORKSPACE_SECONDS = 30.0


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status: 0, or 1 when a check failed, or 2 for what cannot run here."""
    asked = _parser().parse_args(arguments)
    if asked.device == "cpu":
        # Read by triton when it is imported, which nothing has done so far.
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    if asked.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: give --device cpu to run the checks alone", file=sys.stderr)
        return 2
    device = torch.device("cpu") if asked.device == "cpu" else torch.device("cuda", 0)
    return _Run(device, Budget(asked.seconds), asked.out).everything()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench_gpu",
        description="Check kvws's kernels on this GPU, time them, and time the path of a step.",
    )
    parser.add_argument("--out", type=Path, help=f"folder for {FILE_NAME}")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda",
                        help="cpu: checks alone, small, in Triton's interpreter")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=_SECONDS, help="time for all of it")
    return parser


class _Run:
    def __init__(self, device: Any, budget: Budget, out: Path | None) -> None:
        self._device = device
        self._budget = budget
        self._out = out
        self._report = Report(_machine(device))

    def everything(self) -> int:
        call_off = self._budget.end_process_when_spent(self._last_words)
        try:
            self._checks()
            if self._device.type == "cuda":
                self._measurements()
            else:
                self._report.skipped.append("all measurements: not timed on a CPU")
        except Exception as error:  # a device that a kernel has broken; the table is wanted still
            self._add([_failure("run", error)])
        finally:
            call_off()
            self._write()
        print(self._report.text())
        return 1 if self._report.failed else 0

    def _last_words(self) -> None:
        self._report.skipped.append("what was left when time ran out")
        self._write()
        print(self._report.text(), flush=True)

    def _write(self) -> None:
        if self._out is not None:
            self._report.write(self._out)

    def _checks(self) -> None:
        from kvws.bench.gpu import kernels
        from kvws.bench.gpu.device_rows import check_device_rows
        from kvws.bench.gpu.step import check_step

        of_kernels = list(kernels.kernel_cases())
        self._cases(of_kernels, lambda case: kernels.check(case, self._device))
        self._rows("check of a step", _CASE_SECONDS, lambda: check_step(self._device))
        self._rows("check of rows", _CASE_SECONDS, lambda: check_device_rows(self._device))
        if self._device.type == "cuda":
            far = list(kernels.cases_beyond_32_bits())
            self._cases(far, lambda case: kernels.check(case, self._device))

    def _measurements(self) -> None:
        from kvws.bench.gpu import kernels, step
        from kvws.bench.gpu.ceilings import measure_ceilings
        from kvws.bench.gpu.clock import Clock

        clock = Clock(self._device, self._budget)
        ceilings, rows = measure_ceilings(clock)
        self._add(rows)
        timed = [case for case in kernels.kernel_cases() if case.timed is not None]
        self._cases(timed, lambda case: kernels.time(case, clock, ceilings))
        for model in step.MODELS:
            if self._begins(f"steps {model.name}", _WORKSPACE_SECONDS):
                self._steps(model, clock, ceilings)

    def _steps(self, model: Any, clock: Any, ceilings: Any) -> None:
        from kvws.bench.gpu import kernels, step

        host = step.host_slab(model)
        self._rows(
            f"view {model.name}",
            _CASE_SECONDS,
            lambda: step.transfer_rows(model, host, clock, ceilings),
        )
        for tokens in step.WORKSPACE_TOKENS:
            name, space = f"{tokens:,} tokens {model.name}", step.workspace(tokens)
            kernels.forget(self._device)
            if reason := step.why_not(model, space, self._device):
                self._report.skipped.append(f"{name}: {reason}")
                continue
            rows = partial(step.step_rows, model, space, host, clock, ceilings)
            self._rows(name, _WORKSPACE_SECONDS, rows)

    def _cases(self, cases: Iterable[Any], run: Callable[[Any], Row]) -> None:
        from kvws.bench.gpu import kernels

        for case in cases:
            name = f"{case.kernel}, {case.variant}"
            if not self._begins(name, _CASE_SECONDS):
                continue
            if reason := kernels.why_not(case, self._device):
                self._report.skipped.append(f"{name}: {reason}")
                continue
            self._add([run(case)])
            kernels.forget(self._device)
        self._write()

    def _rows(self, name: str, seconds: float, rows: Callable[[], Iterable[Row]]) -> None:
        """Rows of a section; what goes wrong fails it and nothing after it."""
        if not self._begins(name, seconds):
            return
        try:
            for row in rows():
                self._add([row])
        except Exception as error:
            self._add([_failure(name, error)])
        self._write()

    def _begins(self, name: str, seconds: float) -> bool:
        if self._budget.allows(seconds):
            return True
        self._report.skipped.append(f"{name}: {self._budget.left_s:.0f} s are left")
        return False

    def _add(self, rows: Iterable[Row]) -> None:
        """Progress goes to stderr: the table is the last thing on stdout."""
        for row in rows:
            self._report.rows.append(row)
            outcome = {None: "", True: "ok", False: "FAILED"}[row.passed]
            took = "" if row.ms is None else f"{row.ms:.3f} ms"
            print(row.section, row.name, row.variant, outcome, took, file=sys.stderr, flush=True)


def _failure(name: str, error: Exception) -> Row:
    line = f"{type(error).__name__}: {error}".splitlines()[0]
    return Row("failure", name, "", passed=False, note=line)


def _machine(device: Any) -> dict[str, Any]:
    import torch
    import triton

    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "device": device.type,
    }
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        found |= {
            "device": torch.cuda.get_device_name(device),
            "compute_capability": f"{major}.{minor}",
            "memory_bytes": torch.cuda.mem_get_info(device)[1],
            "cuda": torch.version.cuda,
        }
    return found
