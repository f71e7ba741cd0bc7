"""`kvws eval variants`: a table and a report, or one clear line and a hint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvws.cli.main import main
from kvws.eval.variants import DEFAULT
from tests.engine.tiny import tiny_model

TRACE = Path(__file__).resolve().parents[2] / "traces" / "step-summary.traj.json"


def evaluate(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["eval", "variants", *map(str, arguments)])


@pytest.fixture(autouse=True)
def own_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)


def test_variants_of_the_default_are_measured_shown_and_reported(
    smollm2: Path, tmp_path: Path
) -> None:
    report_path = tmp_path / "variants.json"
    result = evaluate(
        *(TRACE, "--model", tiny_model(smollm2, tmp_path / "tiny"), "--window", 1800),
        *("--points", 1, "--budgets", "12,25", "--json", report_path),
        *("--only", "which tokens ask", "--only", "no anchors", "--only", "computed anew"),
    )
    assert result.exit_code == 0, result.output
    for shown in ("12 %", "25 %", DEFAULT, "no anchors", "the last 32", "the newest half anew"):
        assert shown in result.output
    assert "rank offset" not in result.output, "nobody asked for it"
    assert "not calibrated" in result.output and "tested steps: 1" in result.output

    report = json.loads(report_path.read_text())
    assert report["settings"] == {
        "budgets": [12, 25], "points": 1, "seed": 0, "window_tokens": 1800
    }
    names = [variant["name"] for variant in report["variants"]]
    assert names[0] == DEFAULT and len(names) == 7
    assert list(report["figures"]["25"]) == names
    (point,) = report["points"]
    assert point["trace"] == "step-summary" and list(point["shown"]["12"]) == names


def test_an_unknown_variant_is_refused_before_the_model_is_loaded() -> None:
    result = evaluate(TRACE, "--model", "no-such-folder", "--only", "anchors")
    assert result.exit_code == 1, result.output
    assert "there is no variant 'anchors'" in result.output and "no anchors" in result.output
