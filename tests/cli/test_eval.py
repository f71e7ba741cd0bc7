"""`kvws eval`: tables, a report and pictures, or one clear line and a hint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from kvws.cli.main import main
from kvws.recall.recipe import FUSED
from tests.engine.tiny import tiny_model

TRACE = Path(__file__).resolve().parents[2] / "traces" / "step-summary.traj.json"

Evaluate = Callable[..., Result]


@pytest.fixture(scope="module")
def tiny(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(smollm2, tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def evaluate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Evaluate:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> Result:
        return CliRunner().invoke(main, ["eval", *map(str, arguments)])

    return run


def refused(result: Result, *said: str) -> None:
    assert result.exit_code == 1, result.output
    assert "hint:" in result.output and "Traceback" not in result.output
    for words in said:
        assert words in result.output


@pytest.fixture
def measured(evaluate: Evaluate, tiny: Path, tmp_path: Path) -> tuple[str, Any, Path]:
    report, plots = tmp_path / "report.json", tmp_path / "plots"
    result = evaluate(
        *(TRACE, "--model", tiny, "--window", 1800, "--points", 2, "--budgets", "12,25"),
        *("--signals", "lexical,rotated-mean", "--json", report, "--plots", plots, "--drift"),
    )
    assert result.exit_code == 0, result.output
    return result.output, json.loads(report.read_text()), plots


def test_a_session_is_measured_shown_reported_and_drawn(
    measured: tuple[str, Any, Path], tiny: Path
) -> None:
    output, report, plots = measured
    for shown in ("12 %", "25 %", "sliding window", "lexical,rotated-mean", "mini-swe-agent"):
        assert shown in output
    assert "step-summary: tested steps: 2; left out:" in output
    assert "not calibrated" in output and "drift:" in output

    assert report["model"]["name"] == str(tiny) and report["model"]["profile"] is None
    assert len(report["model"]["identity"]) == 32
    assert report["settings"]["window_tokens"] == 1800 and report["settings"]["points"] == 2
    assert len(report["points"]) == 2 and len(report["drift"]) == 1
    (trace,) = report["traces"]
    assert trace["points"] + sum(trace["left_out"].values()) == 18
    arms = report["overall"]["25"]
    assert arms["full context"]["turn_kl"] == pytest.approx(0, abs=1e-5)
    assert arms["sink + window"]["recovered"]["value"] == pytest.approx(0)
    budgets = {arms[arm]["context_tokens"] for arm in arms if arm != "full context"}
    assert len(budgets) == 1
    assert "content" not in arms
    weights = report["settings"]["recipes"]["auto"]["weights"]
    assert set(weights) == {str(signal) for signal in FUSED.weights} - {"content"}

    assert sorted(path.name for path in plots.iterdir()) == ["all.svg", "step-summary.svg"]
    for picture in plots.iterdir():
        assert "BM25 as text" in ElementTree.fromstring(picture.read_text()).itertext()


def test_fidelity_may_be_left_out(evaluate: Evaluate) -> None:
    for spelled in (["missing.json"], ["fidelity", "missing.json"], ["--seed", 1, "missing.json"]):
        refused(evaluate(*spelled), "missing.json")


def test_help_is_of_the_group_and_of_the_command(evaluate: Evaluate) -> None:
    group = evaluate("--help").output
    for command in ("agent", "fidelity", "needles"):
        assert command in group
    assert "--plots" in evaluate("fidelity", "--help").output
    assert "--plots" in evaluate("--seed", 1, "--help").output


def test_a_session_without_a_long_step_is_refused(
    evaluate: Evaluate, tiny: Path, tmp_path: Path
) -> None:
    short = tmp_path / "short.json"
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    short.write_text(json.dumps({"messages": messages}))
    refused(evaluate(short, "--model", tiny), "no recorded step can be tested", "1,024 tokens")


def test_bad_options_are_refused_before_the_model_is_loaded(
    evaluate: Evaluate, tmp_path: Path
) -> None:
    refused(evaluate(TRACE, "--model", "no-such-folder"), "no-such-folder")
    refused(evaluate(TRACE, TRACE), "two sessions are called step-summary")
    refused(evaluate(TRACE, "--json", tmp_path / "missing" / "report.json"), "--json")
    (tmp_path / "file").write_text("")
    refused(evaluate(TRACE, "--plots", tmp_path / "file"), "--plots")
    for bad in ("0", "100", "12,x", ""):
        assert evaluate(TRACE, "--budgets", bad).exit_code == 2


def test_unknown_signals_and_content_without_a_profile_are_refused(
    evaluate: Evaluate, tiny: Path
) -> None:
    refused(evaluate(TRACE, "--model", tiny, "--signals", "magic"), "magic")
    refused(evaluate(TRACE, "--model", tiny, "--signals", "content"), "needs a profile")


def test_a_window_beyond_the_model_is_refused(evaluate: Evaluate, tiny: Path) -> None:
    refused(evaluate(TRACE, "--model", tiny, "--window", 1 << 20), "--window")
