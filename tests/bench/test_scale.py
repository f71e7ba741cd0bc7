"""Steps of a growing session without a model, at sizes that take no time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvws.bench import scale
from kvws.bench.scale import SizeCost, measure_scale, scale_table
from kvws.bench.scale_session import LongSession
from kvws.bench.step import NEW_BLOCKS, PARTS, DataPath, PartTimes, step_table, steps_in_turn
from kvws.errors import ConfigError
from kvws.limits import Limits

LIMITS = Limits(
    budget_tokens=256,
    reserve_tokens=256,
    sink_tokens=32,
    recent_tokens=64,
    query_tokens=64,
    scored_tokens=1024,
)
SIZES = (16_000, 8_000)


@pytest.fixture(scope="module")
def costs(smollm2: Path) -> list[SizeCost]:
    return measure_scale(smollm2, LIMITS, SIZES, query_tokens=8, staged_blocks=4, steps=2)


def test_sizes_are_measured_from_the_smallest_on(costs: list[SizeCost]) -> None:
    assert [(cost.tokens, cost.blocks) for cost in costs] == [(8_000, 250), (16_000, 500)]


def test_every_part_of_every_step_takes_its_time(costs: list[SizeCost]) -> None:
    for times in (cost.shortlisted for cost in costs):
        assert len(times.ms) == len(times.cpu_ms) == 2
        assert all(step[part] > 0 for step in times.ms for part in PARTS)


def test_a_close_look_at_everything_needs_no_look_at_runs(costs: list[SizeCost]) -> None:
    for times in (cost.exact for cost in costs):
        (step,) = times.ms
        assert step["run scores"] == 0
        assert all(step[part] > 0 for part in PARTS if part != "run scores")


def test_the_small_session_takes_as_many_steps_beside_every_size(costs: list[SizeCost]) -> None:
    for cost in costs:
        assert cost.small_shortlisted is not cost.shortlisted
        assert len(cost.small_shortlisted.ms) == 2 and len(cost.small_exact.ms) == 1
    assert costs[1].exact.growth(costs[1].small_exact, cpu=True) > 0


def test_growth_is_the_median_of_pairs() -> None:
    large, small = PartTimes(), PartTimes()
    for of_large, of_small in ((10, 10), (30, 20), (100, 25)):
        for times, ms in ((large, of_large), (small, of_small)):
            times.begin_step()
            times.add("commit", 1e-3 * ms, 1e-3 * ms)
    assert large.growth(small) == pytest.approx(1.5)
    assert large.growth(small, cpu=True) == pytest.approx(1.5)


def test_one_size_alone_has_no_session_beside_it(smollm2: Path) -> None:
    (cost,) = measure_scale(smollm2, LIMITS, (8_000,), query_tokens=4, staged_blocks=2, steps=1)
    assert cost.small_shortlisted is cost.shortlisted and cost.small_exact is cost.exact


def test_what_is_kept_grows_with_the_session(costs: list[SizeCost]) -> None:
    small, large = costs
    assert 0 < small.index_bytes <= large.index_bytes
    assert small.text_bytes <= large.text_bytes


def test_all_is_the_sum_of_the_parts() -> None:
    times = PartTimes()
    for ms in (1, 2, 4):
        times.begin_step()
        for part in PARTS:
            times.add(part, 1e-3 * ms, 2e-3 * ms)
    assert times.median_ms("commit") == pytest.approx(2)
    assert times.median_ms("commit", "shortlist", cpu=True) == pytest.approx(8)
    assert times.median_ms() == pytest.approx(2 * len(PARTS))
    assert times.as_json()["all_cpu_ms"] == pytest.approx(4 * len(PARTS))


def test_growth_is_told_against_the_small_session_at_that_time() -> None:
    def times(ms: float) -> PartTimes:
        found = PartTimes(extra_bytes=3_000_000)
        found.begin_step()
        found.add("close scores", 1e-3 * ms, 1e-4 * ms)
        return found

    # The machine was half as fast while the large session took its steps.
    costs = [
        SizeCost(256_000, 8_000, 10**8, 10**7, times(100), times(100), times(100), times(100)),
        SizeCost(
            10_000_000, 312_500, 4 * 10**9, 10**9,
            times(300), times(8_000), times(200), times(200),
        ),
    ]  # fmt: skip
    for cpu in (False, True):
        table = scale_table(costs, cpu=cpu)
        cells = {str(column.header): list(column.cells) for column in table.columns}
        assert cells["tokens"] == ["256,000", "10,000,000"]
        assert cells["growth"] == ["1.0×", "40.0×"]  # of the exact steps, the last such column
    assert next(list(c.cells) for c in table.columns if c.header == "growth") == ["1.00×", "1.50×"]
    rows = step_table(256_000, costs[0].shortlisted, costs[0].exact)
    assert rows.row_count == len(PARTS) + 2


def test_a_size_that_memory_does_not_allow_is_left_out_with_a_line(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scale, "free_bytes", lambda: 2 << 30)
    said: list[str] = []
    costs = measure_scale(
        smollm2,
        LIMITS,
        (8_000, 10_000_000),
        query_tokens=4,
        staged_blocks=2,
        steps=1,
        progress=said.append,
    )
    assert [cost.tokens for cost in costs] == [8_000]
    assert said[-1].startswith("left out: 10,000,000 tokens need ")


def test_a_session_that_fits_its_view_is_refused(smollm2: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to choose"):
        measure_scale(smollm2, LIMITS, (256, 8_000))


def test_a_step_leaves_log_words_and_index_of_one_length(smollm2: Path) -> None:
    session = LongSession(smollm2, LIMITS)
    session.grow(100, lambda line: None)
    path = DataPath(session, query_tokens=8, staged_blocks=2)
    asyncio.run(steps_in_turn([path], 1, LIMITS.scored_blocks))
    blocks = 100 + 2 * NEW_BLOCKS  # the first step is not measured
    assert session.blocks == session.workspace.block_count == session.index.rows == blocks
    assert session.workspace.selector.catch_up(session.workspace, 0)
    session.workspace.check_integrity()
    view = session.thread.view
    assert len(view) == LIMITS.budget_blocks and set(view) <= set(session.thread.line)
    assert view[0] == 0 and view[-1] == session.thread.line[-1]
