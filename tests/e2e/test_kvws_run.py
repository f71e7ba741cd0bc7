"""`kvws run` from one end to the other: a real engine with a real model, and a real client.

It takes minutes, so it runs only where a model is named: KVWS_E2E_MODEL=smollm2 scripts/e2e claude
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

import pytest

from tests.e2e.clients import CLAUDE, bare_environment, run_client
from tests.e2e.conftest import require

ANSWER_TOKENS = 24
WINDOW_TOKENS = 40_000
_INHERITED = ("OMP_NUM_THREADS", "HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM")


@pytest.mark.timeout(1000)
def test_claude_code_talks_to_a_real_model_and_nothing_is_left_behind(
    repo: Path, tmp_path: Path
) -> None:
    """What so small a model says is of no use to an agent: it is cut short, and the client asks a
    few times for more before it gives up. Each time, all but the new message is reused."""
    require(CLAUDE)
    model = os.environ.get("KVWS_E2E_MODEL")
    if not model:
        pytest.skip("no model is named: KVWS_E2E_MODEL=smollm2")
    home = tmp_path / "home"
    agent = tmp_path / "claude"
    agent.write_text(
        "#!/bin/sh\n"
        f"export CLAUDE_CODE_MAX_OUTPUT_TOKENS={ANSWER_TOKENS} CLAUDE_CODE_MAX_RETRIES=0\n"
        f'exec {shlex.quote(str(CLAUDE.executable))} "$@"\n'
    )
    agent.chmod(0o700)
    sizes = ["--budget", "1024", "--reserve", "512", "--window", str(WINDOW_TOKENS)]
    command = [sys.executable, "-m", "kvws", "run", "--model", model, *sizes]
    command += ["--", str(agent), "-p", "Say hello.", "--output-format", "json"]
    environment = {
        **bare_environment(home),
        **{name: os.environ[name] for name in _INHERITED if name in os.environ},
        "PATH": os.environ["PATH"],
        "XDG_CACHE_HOME": str(Path.home() / ".cache"),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "CLAUDE_CONFIG_DIR": str(home / ".claude"),
    }
    finished = run_client(command, environment, repo, timeout_s=900)
    log = "".join(path.read_text() for path in (tmp_path / "state").rglob("*.log"))
    said = f"{finished.out[-2000:]}\n{finished.err[-2000:]}\n{log[-4000:]}"
    result = json.loads(finished.out)
    assert result.get("api_error") in (None, "max_output_tokens"), said
    assert finished.code == int(result["is_error"]), said
    (used,) = result["modelUsage"].values()
    assert used["contextWindow"] == WINDOW_TOKENS, said
    calls = result["num_turns"]
    assert 0 < used["outputTokens"] <= calls * ANSWER_TOKENS, said
    fresh_tokens = used["cacheCreationInputTokens"] + used["inputTokens"]
    assert fresh_tokens > 10_000, said
    assert used["cacheReadInputTokens"] > 0.9 * (calls - 1) * fresh_tokens, said
