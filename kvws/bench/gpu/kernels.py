"""The table of all kernels, and what running a line of it gives."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator

import torch

from kvws.bench.gpu.case import CHECKED, INTERPRETED, Case, Prepared
from kvws.bench.gpu.ceilings import Ceilings
from kvws.bench.gpu.clock import Clock, TooSlowError
from kvws.bench.gpu.far_cases import far_cases
from kvws.bench.gpu.place_cases import place_cases
from kvws.bench.gpu.quant_cases import quant_cases
from kvws.bench.gpu.report import Row
from kvws.bench.gpu.rotary_cases import rotary_cases
from kvws.bench.gpu.score_cases import score_cases


def kernel_cases() -> Iterator[Case]:
    """Every kernel in every variant. A new kernel is a new line here."""
    yield from rotary_cases()
    yield from quant_cases()
    yield from score_cases()
    yield from place_cases()


def cases_beyond_32_bits() -> Iterator[Case]:
    yield from far_cases()


def why_not(case: Case, device: torch.device) -> str | None:
    """What keeps a case from running on a device; None if nothing does."""
    if case.only_on is not None and case.only_on != device.type:
        return f"runs on {case.only_on} alone"
    if device.type == "cuda" and case.needed_bytes:
        free, _ = torch.cuda.mem_get_info(device)
        if free < case.needed_bytes:
            return f"needs {case.needed_bytes >> 30} GB of device memory, {free >> 30} are free"
    return None


def check(case: Case, device: torch.device) -> Row:
    """One run of the kernel beside one of its reference."""
    row = Row("check", case.kernel, case.variant)
    try:
        prepared = case.prepare(CHECKED if device.type == "cuda" else INTERPRETED, device)
        got = prepared.kernel()
        share = prepared.tolerance.share(got, prepared.reference())
    except Exception as error:  # a kernel that does not build or run fails its check, no more
        return _failed(row, error)
    row.passed = share <= 1.0
    row.share_of_tolerance = share if math.isfinite(share) else None
    row.note = f"allowed: {prepared.tolerance.text}"
    return row


def time(case: Case, clock: Clock, ceilings: Ceilings) -> Row:
    """The kernel at the size at which it is to be timed."""
    assert case.timed is not None
    row = Row("kernel", case.kernel, case.variant)
    try:
        prepared = case.prepare(case.timed, clock.device)
        row.took(clock.device_ms(prepared.kernel), prepared.moved_bytes)
    except TooSlowError as error:
        row.note = str(error)
        return row
    except Exception as error:  # as above
        return _failed(row, error)
    row.compared_with(ceilings.device_copy)
    row.note = _rate(prepared, row)
    return row


def _failed(row: Row, error: Exception) -> Row:
    row.passed, row.note = False, f"{type(error).__name__}: {error}".splitlines()[0]
    return row


def _rate(prepared: Prepared, row: Row) -> str:
    if not prepared.multiplications or row.ms is None:
        return ""
    return f"{2e-9 * prepared.multiplications / row.ms:.1f} TFLOP/s"


def forget(device: torch.device) -> None:
    """Give back what the last case held: the next may need all of a GPU."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
