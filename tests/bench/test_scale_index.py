"""Index rows of made-up sessions: as the signals make them, and no two alike."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvws.bench.scale_index import (
    VariedRows,
    grow_index,
    profile_of,
    random_queries,
    signals_of,
)
from kvws.errors import ConfigError
from kvws.models import read_model_config
from kvws.models.geometry import ModelGeometry
from kvws.recall.index import BlockIndex
from kvws.recall.signals.enabled import EnabledSignals
from tests.engine.tiny import tiny_model

NAMES = ("rotated-mean", "content")
BLOCKS = 700
"""More than a tile, and far more than there are samples of keys."""


@pytest.fixture(scope="module")
def geometry(smollm2: Path) -> ModelGeometry:
    return read_model_config(smollm2)


@pytest.fixture(scope="module")
def signals(smollm2: Path, geometry: ModelGeometry) -> EnabledSignals:
    return signals_of(NAMES, geometry, profile_of(smollm2))


@pytest.fixture(scope="module")
def rows(signals: EnabledSignals, geometry: ModelGeometry) -> torch.Tensor:
    return VariedRows(signals, geometry, seed=1).some(BLOCKS)


def test_rows_are_as_long_as_the_signals_make_them(
    rows: torch.Tensor, signals: EnabledSignals
) -> None:
    assert rows.shape == (BLOCKS, signals.row_bytes) and rows.dtype == torch.uint8


def test_no_two_rows_are_alike(rows: torch.Tensor) -> None:
    assert len({row.numpy().tobytes() for row in rows}) == BLOCKS


def test_all_numbers_of_a_row_are_finite(rows: torch.Tensor, signals: EnabledSignals) -> None:
    for part in (part for parts in signals.parts(rows) for part in parts):
        assert part.float().isfinite().all() and part.float().abs().max() > 0


def test_rows_are_the_same_in_every_run(
    rows: torch.Tensor, signals: EnabledSignals, geometry: ModelGeometry
) -> None:
    assert torch.equal(VariedRows(signals, geometry, seed=1).some(BLOCKS), rows)
    assert not torch.equal(VariedRows(signals, geometry, seed=2).some(BLOCKS), rows)


def test_a_grown_index_tells_its_blocks_apart(
    signals: EnabledSignals, geometry: ModelGeometry
) -> None:
    index = BlockIndex(signals)
    source = VariedRows(signals, geometry, seed=1)
    grow_index(index, source, 0, 300)
    grow_index(index, source, 300, BLOCKS)
    assert index.rows == BLOCKS
    scores = index.score(
        random_queries(geometry, 2, seed=3),
        32 * torch.arange(BLOCKS),
        32 * BLOCKS,
        torch.ones(BLOCKS, dtype=torch.bool),
    )
    assert set(scores) == set(NAMES)
    for of_blocks in scores.values():
        assert of_blocks.isfinite().all() and len(of_blocks.unique()) > BLOCKS // 2


def test_a_model_without_a_profile_is_refused(smollm2: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no retrieval profile") as refused:
        profile_of(tiny_model(smollm2, tmp_path))
    assert refused.value.hint is not None and "kvws calibrate" in refused.value.hint
