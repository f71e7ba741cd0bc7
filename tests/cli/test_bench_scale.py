"""`kvws bench score`, `stage-in`, `step` and `scale`: a table, and the same figures in a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvws.cli.main import main

pytestmark = pytest.mark.usefixtures("smollm2")

Bench = Callable[..., Result]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> Result:
        return CliRunner().invoke(main, ["bench", *map(str, arguments)])

    return run


def figures(result: Result, path: Path) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    return json.loads(path.read_text())


def test_score_tells_the_limit_of_every_size_and_query(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "score.json"
    result = bench(
        "score", "--tokens", "16K,0.02M", "--query-tokens", 2, "--repetitions", 1, "--json", path
    )
    costs = figures(result, path)["costs"]
    assert [(cost["signals"], cost["blocks"]) for cost in costs] == [
        (arm, blocks)
        for blocks in (500, 625)
        for arm in ("mean-k", "rotated-mean", "content", "auto")
    ]
    assert all(cost["binds"] in ("read", "multiply") for cost in costs)
    assert "16,000 tokens" in result.output and "GB/s copied" in result.output


def test_stage_in_tells_host_and_disk(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "stage-in.json"
    result = bench(
        "stage-in", "--view", 2, "--host", 4, "--host", 6, "--stored", 4, "--rounds", 1,
        "--json", path,
    )  # fmt: skip
    costs = figures(result, path)["costs"]
    assert [(cost["source"], cost["held_blocks"]) for cost in costs] == [
        ("host", 4), ("host", 6), ("disk", 4),
    ]  # fmt: skip
    assert "memcpy" in result.output and "raw reads" in result.output


def test_stage_in_leaves_the_disk_out_when_nothing_is_to_be_stored(
    bench: Bench, tmp_path: Path
) -> None:
    path = tmp_path / "stage-in.json"
    result = bench(
        "stage-in", "--view", 2, "--host", 4, "--stored", 0, "--rounds", 1, "--json", path
    )
    assert [cost["source"] for cost in figures(result, path)["costs"]] == ["host"]


@pytest.mark.parametrize("command", ["step", "scale"])
def test_steps_are_told_with_a_shortlist_and_exactly(
    bench: Bench, tmp_path: Path, command: str
) -> None:
    path = tmp_path / "steps.json"
    result = bench(
        command, "--tokens", "16K", "--budget", 256, "--scored", 1024, "--query-tokens", 2,
        "--staged", 2, "--steps", 1, "--json", path,
    )  # fmt: skip
    (size,) = figures(result, path)["sizes"]
    assert size["tokens"] == 16_000 and size["blocks"] == 500
    assert size["shortlisted"]["ms"]["run scores"] > 0 == size["exact"]["ms"]["run scores"]
    assert "16,000" in result.output and "exact" in result.output


@pytest.mark.parametrize("text", ["", "many", "10X", "0", "-1M", "31", "inf", "nan", "1M,,2M"])
def test_what_is_no_number_of_tokens_is_refused(bench: Bench, text: str) -> None:
    result = bench("scale", "--tokens", text)
    assert result.exit_code == 2 and "no number of tokens such as 256K or 10M" in result.output


@pytest.mark.parametrize("command", ["score", "stage-in", "step", "scale"])
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    bench: Bench, tmp_path: Path, command: str
) -> None:
    result = bench(command, "--json", tmp_path / "none" / "figures.json")
    assert result.exit_code == 1 and "give --json a file in a folder that exists" in result.output


def test_a_model_that_is_no_folder_is_refused(bench: Bench) -> None:
    result = bench("score", "--model", "some/hub-name")
    assert result.exit_code == 1 and "--model PATH" in result.output
