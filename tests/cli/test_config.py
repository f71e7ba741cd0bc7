"""Where settings come from: flags, environment, ./kvws.toml, the user's file, defaults."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvws.config import Settings, parse_gibibytes, parse_size, resolve_settings
from kvws.errors import ConfigError


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    local, user = tmp_path / "project", tmp_path / "user.toml"
    local.mkdir()
    (local / "kvws.toml").write_text("budget = 300\nsink = 301\nrecent = 302\n")
    user.write_text("budget = 400\nsink = 401\nrecent = 402\nquery = 403\n")
    return {"directory": local, "user_config": user}


def test_the_first_place_that_has_a_value_wins_and_is_named(places: dict[str, Path]) -> None:
    environment = {"KVWS_BUDGET": "200", "KVWS_SINK": "201"}
    resolved = resolve_settings({"budget": 100, "sink": None}, environment, **places)
    settings = resolved.settings
    assert (settings.budget, resolved.sources["budget"]) == (100, "flag")
    assert (settings.sink, resolved.sources["sink"]) == (201, "environment")
    assert settings.recent == 302 and resolved.sources["recent"].endswith("kvws.toml")
    assert settings.query == 403 and resolved.sources["query"].endswith("user.toml")
    assert (settings.reserve, resolved.sources["reserve"]) == (Settings().reserve, "default")


def test_sizes_carry_units() -> None:
    assert parse_size("8GiB") == 8 << 30
    assert parse_size("512 MiB") == 512 << 20
    assert parse_size("2048") == 2048
    assert parse_size("plenty") is None
    assert parse_size("-1") is None


@pytest.mark.parametrize(
    ("content", "hint"),
    [("budgte = 1", "budget"), ("colour = 1", "known keys"), ("budget = [", "TOML")],
)
def test_a_bad_file_says_what_to_do(tmp_path: Path, content: str, hint: str) -> None:
    (tmp_path / "kvws.toml").write_text(content)
    with pytest.raises(ConfigError, match=hint):
        resolve_settings({}, {}, directory=tmp_path, user_config=tmp_path / "none")


@pytest.mark.parametrize("value", [-1, 1.5, True, "many"])
def test_a_number_that_is_none_is_refused(tmp_path: Path, value: object) -> None:
    with pytest.raises(ConfigError, match="whole number"):
        resolve_settings(
            {"budget": value}, {}, directory=tmp_path, user_config=tmp_path / "none"
        )


def test_recent_is_a_quarter_of_the_budget_unless_set() -> None:
    assert Settings(budget=4096).limits().recent_tokens == 1024
    assert Settings(budget=4096, recent=64).limits().recent_tokens == 64


def test_gibibytes_are_sizes_above_zero() -> None:
    assert parse_gibibytes("host_gb", "auto") is None
    assert parse_gibibytes("host_gb", "0.5") == 1 << 29
    assert parse_gibibytes("host_gb", "512MiB") == 1 << 29
    for size in ("0", "-1", "nan", "inf", "plenty", ""):
        with pytest.raises(ConfigError, match="above zero"):
            parse_gibibytes("host_gb", size)


def test_index_memory_may_be_none_at_all() -> None:
    assert Settings().index_bytes is None
    assert Settings(index_gb="0").index_bytes == Settings(index_gb=" 0.0 ").index_bytes == 0
    assert Settings(index_gb="1.5").index_bytes == 3 << 29
    with pytest.raises(ConfigError, match="index_gb"):
        assert Settings(index_gb="-1").index_bytes


def test_gibibytes_in_a_file_are_numbers_or_text(tmp_path: Path) -> None:
    (tmp_path / "kvws.toml").write_text('host_gb = 1.5\ndisk_gb = "2"\n')
    settings = resolve_settings({}, {}, directory=tmp_path, user_config=tmp_path / "no").settings
    assert settings.host_bytes == 3 << 29 and settings.disk_bytes == 2 << 30


def test_the_store_directory_is_absolute_and_may_begin_at_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Settings(disk_dir="~/store").store_directory == tmp_path / "store"
    monkeypatch.chdir(tmp_path)
    assert Settings(disk_dir="a/../b").store_directory == tmp_path / "b"
    assert Settings().store_directory is None
