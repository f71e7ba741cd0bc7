"""`kvws eval shortlist`: a table and a report, or one clear line and a hint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvws.cli.main import main
from kvws.eval.synthetic import synthetic_messages
from kvws.models.profiles import model_identity
from kvws.recall.profile import Profile
from tests.engine.tiny import tiny_model


def evaluate(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["eval", "shortlist", *map(str, arguments)])


@pytest.fixture(autouse=True)
def own_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def tiny(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(smollm2, tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def profile(tiny: Path, tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    found = Profile(model_identity(tiny), 3, 4, 2, 16, ((2, 3), (1, 0)), (0,), "int8")
    path.write_text(found.to_json())
    return path


def written(folder: Path, turns: int) -> Path:
    messages = synthetic_messages("long", turns, ["sorter"])
    path = folder / "long.json"
    said = [{"role": message.role, "content": message.content} for message in messages]
    path.write_text(json.dumps({"messages": said}))
    return path


def test_shortlists_of_a_long_session_are_measured_shown_and_reported(
    tiny: Path, profile: Path, tmp_path: Path
) -> None:
    report_path = tmp_path / "shortlist.json"
    result = evaluate(
        *(written(tmp_path, 160), "--model", tiny, "--profile", profile, "--tokens", 8192),
        *("--facts", 2, "--turns", 1, "--shares", "60,45", "--json", report_path),
    )
    assert result.exit_code == 0, result.output
    for words in ("2 verbatim, 2 paraphrased, 1 turn", "60 %", "45 %", "score kept", "first 8"):
        assert words in result.output
    report = json.loads(report_path.read_text())
    assert report["settings"] == {
        "tokens": 8192, "facts": 2, "turns": 1, "shares_percent": [60, 45], "seed": 0
    }
    assert report["traces"] == [{"trace": "long", "first_token": 0}]
    assert report["session_tokens"] > 8192 and len(report["questions"]) == 5
    assert set(report["figures"]) == {"60", "45"}
    assert report["figures"]["60"]["turn"]["first_8"] is None, "no fact was asked for"


def test_a_model_that_is_not_calibrated_is_refused_with_a_hint(
    tiny: Path, tmp_path: Path
) -> None:
    result = evaluate(written(tmp_path, 3), "--model", tiny)
    assert result.exit_code == 1, result.output
    assert "not calibrated" in result.output and "kvws calibrate" in result.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "tokens together, not 200,000"),
        (("--tokens", 8192, "--shares", 6), "places of a view"),
        (("--tokens", 8192, "--facts", 500), "lower --facts"),
        (("--json", "no/such/folder.json"), "cannot be written"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_a_hint(
    arguments: tuple[object, ...], says: str, tiny: Path, profile: Path, tmp_path: Path
) -> None:
    trace = written(tmp_path, 160)
    result = evaluate(trace, "--model", tiny, "--profile", profile, *arguments)
    assert result.exit_code == 1, result.output
    assert says in result.output and "hint:" in result.output


def test_a_share_is_a_percentage() -> None:
    for wrong in ("0", "100", "half", "12,"):
        result = evaluate("x", "--shares", wrong)
        assert result.exit_code == 2 and "Invalid value for '--shares'" in result.output
