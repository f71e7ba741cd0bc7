"""What the default's index weighs, beside the published one: promised figures of the packaged
model's profile."""

from __future__ import annotations

from pathlib import Path

from kvws.bench.signals import measure_signals, signals_table
from kvws.models import read_model_config
from kvws.models.profiles import find_profile


def test_the_default_index_is_hardly_larger_than_mean_k_and_half_of_it_with_means(
    smollm2: Path,
) -> None:
    found = find_profile(smollm2)
    assert found is not None
    costs = measure_signals(
        read_model_config(smollm2),
        found[0],
        blocks=40,
        query_tokens=4,
        repetitions=1,
        progress=lambda _: None,
    )
    weight = {cost.name: cost.block_bytes / costs[0].block_bytes for cost in costs}
    assert costs[0].name == "mean-k" and costs[0].block_bytes == 30 * 3 * 64 * 2
    assert weight["auto (int8)"] <= 1.1 and weight["auto (means)"] <= 0.6
    assert all(len(cost.score_ms) == 1 for cost in costs)
    assert signals_table(costs, 40).row_count == len(costs)
