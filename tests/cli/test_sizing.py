"""Sizes that nobody set follow the model; what a user set stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvws.cli.sizing import sized_to_model
from kvws.config import Resolved, Settings, resolve_settings


def resolved(tmp_path: Path, **flags: int) -> Resolved:
    return resolve_settings(flags, {}, directory=tmp_path, user_config=tmp_path / "none")


@pytest.mark.parametrize("positions", [2048, 8192, 32_768, 131_072, 1_000_000])
def test_view_and_room_beside_it_fit_the_model(tmp_path: Path, positions: int) -> None:
    settings = sized_to_model(resolved(tmp_path), positions)
    limits = settings.limits()
    assert limits.context_tokens <= max(positions, Settings().budget + Settings().reserve)
    assert settings.budget <= 32_768 and settings.reserve <= 16_384


def test_a_large_model_gets_a_large_view(tmp_path: Path) -> None:
    settings = sized_to_model(resolved(tmp_path), 131_072)
    assert (settings.budget, settings.reserve, settings.query) == (32_768, 16_384, 512)


def test_what_was_set_stays(tmp_path: Path) -> None:
    settings = sized_to_model(resolved(tmp_path, budget=4096, query=64), 131_072)
    assert (settings.budget, settings.query) == (4096, 64)
    assert settings.reserve == 16_384
