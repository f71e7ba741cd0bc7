"""What the benchmark of many sessions says of the times that it took."""

from __future__ import annotations

import pytest

from kvws.bench.decode_gaps import Gaps, gaps_table
from kvws.bench.sessions import StepTimes, percentile, steps_table


def cells(table: object, column: int) -> list[str]:
    return list(table.columns[column].cells)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("percent", "value"), [(0, 1.0), (50, 51.0), (95, 96.0), (99, 100.0), (100, 100.0)]
)
def test_a_percentile_is_one_of_the_values(percent: float, value: float) -> None:
    hundred = [float(n) for n in range(100, 0, -1)]
    assert percentile(hundred, percent) == value
    assert percentile([7.0], percent) == 7.0


def test_fairness_compares_the_sessions_whose_steps_took_longest_and_shortest() -> None:
    times = StepTimes(alone=(10.0,), among=((10.0, 30.0), (20.0, 20.0), (60.0, 60.0)), all_ms=120)
    assert times.fairness == 3.0


def test_the_gain_is_in_steps_a_second_over_one_session_alone() -> None:
    times = StepTimes(alone=(10.0, 12.0, 11.0), among=((40.0, 40.0), (40.0, 40.0)), all_ms=22.0)
    assert times.gain == pytest.approx(4 * 11.0 / 22.0)
    assert cells(steps_table(times), 2) == ["11 ms", "40 ms"]
    assert cells(steps_table(times), 6) == ["1.00x", "2.00x"]


def test_gaps_are_compared_with_those_beside_sessions_that_only_decode() -> None:
    table = gaps_table(
        [
            Gaps("nothing", [4.0, 4.0]),
            Gaps("decode", [5.0, 15.0]),
            Gaps("decode + score", [10.0, 30.0], [100.0, 300.0, 200.0]),
        ]
    )
    assert cells(table, 5) == ["0.40x", "1.00x", "2.00x"]
    assert cells(table, 6) == ["", "", "3"] and cells(table, 7) == ["", "", "200 ms"]
