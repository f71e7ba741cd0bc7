"""An engine that refuses to start says why, across the process boundary."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvws.engine import wire
from kvws.engine.startup_report import read_startup_error, report_startup_error
from kvws.errors import ConfigError, EngineStartError, KvwsError, UnsupportedModel


@pytest.mark.parametrize("kind", [ConfigError, UnsupportedModel, EngineStartError])
def test_the_reason_comes_back_as_the_error_it_was(tmp_path: Path, kind: type[KvwsError]) -> None:
    report_startup_error(tmp_path, kind("it does not go", hint="do it otherwise"))
    error = read_startup_error(tmp_path)
    assert error is not None and type(error) is kind
    assert error.args == ("it does not go",) and error.hint == "do it otherwise"
    assert error.http_status == kind.http_status


def test_without_a_report_there_is_no_reason(tmp_path: Path) -> None:
    assert read_startup_error(tmp_path) is None


def test_the_first_reason_wins(tmp_path: Path) -> None:
    report_startup_error(tmp_path, ConfigError("first"))
    report_startup_error(tmp_path, UnsupportedModel("second"))
    error = read_startup_error(tmp_path)
    assert isinstance(error, ConfigError) and error.args == ("first",)


def test_a_kind_that_this_version_does_not_know_is_a_start_error(tmp_path: Path) -> None:
    report_startup_error(tmp_path, ConfigError("x"))
    (report,) = tmp_path.iterdir()
    report.write_bytes(wire.pack({"kind": "NoSuchError", "message": "m", "hint": "h"}))
    error = read_startup_error(tmp_path)
    assert type(error) is EngineStartError and error.args == ("m",) and error.hint == "h"
