"""Bad input: one clear line with a hint, exit code 1, no traceback, no engine started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvws.cli.main import main
from kvws.engine import launch


@pytest.fixture(autouse=True)
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every one of these must be noticed before an engine is started."""

    def started(*_: Any, **__: Any) -> None:
        raise AssertionError("an engine was started")

    monkeypatch.setattr(launch, "running_engine", started)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "session.json"
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    path.write_text(json.dumps({"messages": messages}))
    return path


def model_folder(tmp_path: Path, **config: Any) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "vocab_size": 1000,
}


def replay(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["replay", *map(str, arguments)])


def assert_one_clear_line(result: Result, *words: str) -> None:
    assert result.exit_code == 1, result.output
    lines = [line for line in result.output.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("starting the engine")]  # progress
    assert lines[0].startswith("kvws: ")
    assert lines[1].startswith("hint: ")
    assert len(lines) == 2, result.output
    for word in words:
        assert word in result.output


def test_a_trace_that_does_not_exist(tmp_path: Path) -> None:
    assert_one_clear_line(replay(tmp_path / "nothing.json"), "nothing.json")


def test_a_file_that_is_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(200))
    assert_one_clear_line(replay(path))


def test_truncated_json(trace: Path) -> None:
    trace.write_text(trace.read_text()[:-20])
    assert_one_clear_line(replay(trace))


def test_an_unknown_format(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"spam": [1, 2, 3]}')
    assert_one_clear_line(replay(path), "mini-swe-agent")


def test_a_budget_below_sink_recent_and_one_block(trace: Path) -> None:
    result = replay(trace, "--budget", 64, "--sink", 32, "--recent", 64)
    assert_one_clear_line(result, "--budget", "128")


def test_a_reserve_that_holds_no_query(trace: Path) -> None:
    assert_one_clear_line(replay(trace, "--reserve", 100), "--reserve")


def test_a_model_without_rotary_encoding(trace: Path, tmp_path: Path) -> None:
    folder = model_folder(
        tmp_path, architectures=["GPT2LMHeadModel"], model_type="gpt2", n_embd=64, n_layer=2,
        n_head=4, n_positions=4096, vocab_size=1000,
    )  # fmt: skip
    assert_one_clear_line(replay(trace, "--model", folder))


def test_a_model_with_latent_attention(trace: Path, tmp_path: Path) -> None:
    folder = model_folder(tmp_path, **LLAMA | {"kv_lora_rank": 512})
    assert_one_clear_line(replay(trace, "--model", folder))


def test_a_model_with_sliding_window_attention(trace: Path, tmp_path: Path) -> None:
    folder = model_folder(
        tmp_path, **LLAMA | {"model_type": "mistral", "sliding_window": 1024}
    )
    assert_one_clear_line(replay(trace, "--model", folder), "sliding")


def test_a_folder_that_is_no_model(trace: Path, tmp_path: Path) -> None:
    assert_one_clear_line(replay(trace, "--model", tmp_path))


def test_limits_beyond_the_model_s_positions(trace: Path, tmp_path: Path) -> None:
    folder = model_folder(tmp_path, **LLAMA)
    result = replay(trace, "--model", folder, "--budget", 4096)
    assert_one_clear_line(result, "positions", "4096")


def test_a_report_that_could_not_be_written(trace: Path, tmp_path: Path) -> None:
    assert_one_clear_line(replay(trace, "--json", tmp_path / "no" / "report.json"), "report.json")


def test_a_host_tier_size_that_is_no_size(trace: Path) -> None:
    assert_one_clear_line(replay(trace, "--host-gb", "plenty"), "host_gb", "plenty")


def test_an_engine_for_no_request(trace: Path) -> None:
    assert_one_clear_line(replay(trace, "--running", 0), "no request", "--running")


@pytest.mark.parametrize("option", ["--host-gb", "--disk-gb"])
@pytest.mark.parametrize("size", ["0", "-1", "nan", "inf"])
def test_a_tier_of_no_size(trace: Path, option: str, size: str) -> None:
    assert_one_clear_line(replay(trace, option, size), "above zero")


def test_a_misspelt_setting_in_the_configuration_file(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kvws.toml").write_text("budgte = 1024\n")
    monkeypatch.chdir(tmp_path)
    assert_one_clear_line(replay(trace), "budgte", "budget")
