"""The real clients do a task of five steps to its end, and nothing is computed twice.

They are run as `kvws run` would run them, with the environment and the arguments of their
adapters. `scripts/e2e` installs them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from kvws.harness_adapters.address import ServerAddress
from kvws.harness_adapters.recognise import launch
from tests.e2e import scripts
from tests.e2e.clients import (
    CLAUDE,
    CODEX,
    OPENCODE,
    OPENHANDS,
    Finished,
    bare_environment,
    run_client,
)
from tests.e2e.conftest import require
from tests.e2e.front import WINDOW_TOKENS, Answered, Front, running_front

SMALL_WINDOW_TOKENS = 60_000
ROOT = Path(__file__).resolve().parents[2]
OVERHEAD_TOKENS = 128
"""What a turn's markup, and the part of a block that was open, may cost beside what is new."""


def claude(
    address: ServerAddress,
    repo: Path,
    task: str,
    *more: str,
    tools: str = "Bash Read Edit",
    **environment: str,
) -> Finished:
    home = repo.parent / "home"
    command = [str(CLAUDE.executable), "-p", task, *more, "--output-format", "json"]
    command += ["--permission-mode", "acceptEdits", "--allowedTools", tools]
    prepared = launch(command, address)
    inherited = {
        **bare_environment(home),
        "CLAUDE_CONFIG_DIR": str(home / ".claude"),
        "CLAUDE_CODE_MAX_RETRIES": "0",
    }
    return run_client(
        prepared.command, {**prepared.environment_over(inherited), **environment}, repo
    )


def codex(front: Front, repo: Path) -> Finished:
    home = repo.parent / "home"
    (home / ".codex").mkdir(parents=True)
    command = [str(CODEX.executable), "exec", "--sandbox", "danger-full-access", scripts.TASK]
    prepared = launch(command, front.address)
    inherited = {**bare_environment(home), "CODEX_HOME": str(home / ".codex")}
    return run_client(prepared.command, prepared.environment_over(inherited), repo)


def opencode(front: Front, repo: Path) -> Finished:
    prepared = launch([str(OPENCODE.executable), "run", scripts.TASK], front.address)
    inherited = bare_environment(repo.parent / "home")
    return run_client(prepared.command, prepared.environment_over(inherited), repo)


def openhands(front: Front, repo: Path, mode: str) -> Finished:
    address = front.address
    agent = str(ROOT / "tests" / "e2e" / "openhands_agent.py")
    told = [address.base_url, str(address.window_tokens), scripts.TASK, mode]
    environment = bare_environment(repo.parent / "home")
    environment["PATH"] = f"{OPENHANDS.executable.parent}{os.pathsep}{environment['PATH']}"
    environment |= {
        "KVWS_API_KEY": address.token,
        "PYTHONPATH": str(ROOT),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "OPENHANDS_SUPPRESS_BANNER": "1",
    }
    return run_client([str(OPENHANDS.executable), agent, *told], environment, repo)


def assert_task_is_done(finished: Finished, front: Front, repo: Path) -> None:
    said = f"{finished.out[-3000:]}\n{finished.err[-3000:]}\n{front.replies}"
    assert finished.code == 0, said
    assert (repo / "greeting.py").read_text() == f'GREETING = "{scripts.NEW}"\n', said
    assert front.refused == []


def assert_each_step_computes_only_what_is_new(turns: Sequence[Answered]) -> None:
    assert turns[0].usage.prompt_tokens > WINDOW_TOKENS // 1000
    for before, turn in pairwise(turns):
        new_tokens = turn.usage.prompt_tokens - before.usage.prompt_tokens
        assert turn.computed_tokens <= new_tokens + OVERHEAD_TOKENS, turns


def test_claude_code_does_the_task(repo: Path, smollm2: Path) -> None:
    require(CLAUDE)
    with running_front(scripts.claude_code(repo), smollm2) as front:
        finished = claude(front.address, repo, scripts.TASK)
        assert_task_is_done(finished, front, repo)
        result = json.loads(finished.out)
        assert result["result"] == scripts.REPORT
        assert not result["is_error"] and result["num_turns"] == 6
        (used,) = result["modelUsage"].values()
        assert used["contextWindow"] == WINDOW_TOKENS
        assert len(front.turns) == 5
        assert {(turn.caller, turn.thread) for turn in front.turns} == {
            (result["session_id"], "main")
        }
        assert used["cacheReadInputTokens"] == sum(t.usage.reused_tokens for t in front.turns)
        assert_each_step_computes_only_what_is_new(front.turns)


def test_claude_code_sub_agents_are_threads_of_their_own(repo: Path, smollm2: Path) -> None:
    require(CLAUDE)
    with running_front(scripts.claude_code_with_agents(repo), smollm2) as front:
        finished = claude(front.address, repo, "Ask two agents.", tools="Bash Read Edit Agent")
        assert finished.code == 0, finished.out + finished.err
        assert json.loads(finished.out)["result"] == scripts.REPORT
        assert front.refused == []
        threads = {turn.thread for turn in front.turns}
        assert "main" in threads and len(threads) == 3
        assert len({turn.caller for turn in front.turns}) == 1
        for thread in threads:
            of_thread = [turn for turn in front.turns if turn.thread == thread]
            assert len(of_thread) == 2
            assert_each_step_computes_only_what_is_new(of_thread)


def test_a_claude_code_session_that_is_taken_up_again_computes_only_the_new_request(
    repo: Path, smollm2: Path
) -> None:
    require(CLAUDE)
    with running_front(scripts.claude_code(repo), smollm2) as front:
        assert claude(front.address, repo, scripts.TASK).code == 0
        again = claude(front.address, repo, "Say that once more.", "--continue")
        assert json.loads(again.out)["result"] == scripts.REPORT
        assert front.refused == []
        assert len(front.turns) == 6
        assert len({turn.caller for turn in front.turns}) == 1
        assert_each_step_computes_only_what_is_new(front.turns)


def test_claude_code_may_load_tools_during_a_session(repo: Path, smollm2: Path) -> None:
    """The adapter has all tools sent at once. Without it they come one by one, into the middle of
    the list that every prompt begins with."""
    require(CLAUDE)
    with running_front(scripts.claude_code_loading_tools(), smollm2) as front:
        finished = claude(
            front.address,
            repo,
            "Load a tool.",
            tools="Bash ToolSearch",
            ENABLE_TOOL_SEARCH="true",
        )
        assert finished.code == 0, finished.out + finished.err
        assert json.loads(finished.out)["result"] == scripts.REPORT
        assert front.refused == []
        assert len(front.turns) == 3
        assert_each_step_computes_only_what_is_new(front.turns)


@pytest.mark.parametrize("told_tokens", [SMALL_WINDOW_TOKENS, WINDOW_TOKENS])
def test_claude_code_goes_on_from_a_summary(repo: Path, smollm2: Path, told_tokens: int) -> None:
    """It summarises by itself near the window that it was told, or else when it is refused. The
    request for a summary is the whole history once more: none of that is computed again."""
    require(CLAUDE)
    lines = (f"line {number} of a file about nothing in particular" for number in range(500))
    (repo / "big.txt").write_text("\n".join(lines))
    script, window = scripts.Compacting(), SMALL_WINDOW_TOKENS
    with running_front(script, smollm2, window_tokens=window) as front:
        told = replace(front.address, window_tokens=told_tokens)
        finished = claude(told, repo, "Read big.txt.")
        assert finished.code == 0, finished.out + finished.err
        assert json.loads(finished.out)["result"] == scripts.CONTINUED
        refusals = {status for _, _, status in front.refused}
        assert refusals == ({400} if told_tokens > window else set())
        (summary,) = (call for call in front.answered if call.is_aside)
        assert summary.usage.prompt_tokens > window // 3
        assert summary.computed_tokens < summary.usage.prompt_tokens // 5, front.answered
        assert len({(call.caller, call.thread) for call in front.answered}) == 1
        *growing, continued = front.turns
        assert len(growing) >= 2
        assert_each_step_computes_only_what_is_new(growing)
        kept_tokens = growing[0].usage.prompt_tokens // 2
        assert continued.usage.reused_tokens > kept_tokens, "tools and system prompt are the same"


def test_codex_does_the_task(repo: Path, smollm2: Path) -> None:
    require(CODEX)
    with running_front(scripts.codex(repo), smollm2) as front:
        finished = codex(front, repo)
        assert_task_is_done(finished, front, repo)
        assert scripts.REPORT in finished.out
        assert len(front.turns) == 5
        assert_each_step_computes_only_what_is_new(front.turns)


def test_opencode_does_the_task(repo: Path, smollm2: Path) -> None:
    require(OPENCODE)
    with running_front(scripts.opencode(repo), smollm2) as front:
        finished = opencode(front, repo)
        assert_task_is_done(finished, front, repo)
        assert scripts.REPORT in finished.out
        assert len(front.turns) == 5
        assert len(front.answered) == 6, "a title besides"
        assert_each_step_computes_only_what_is_new(front.turns)


@pytest.mark.parametrize("mode", ["stream", "whole"])
def test_openhands_does_the_task(repo: Path, smollm2: Path, mode: str) -> None:
    require(OPENHANDS)
    with running_front(scripts.openhands(repo), smollm2) as front:
        finished = openhands(front, repo, mode)
        assert_task_is_done(finished, front, repo)
        assert "FINISHED" in finished.out
        assert {turn.is_streamed for turn in front.turns} == {mode == "stream"}
        assert len(front.turns) == 5
        assert_each_step_computes_only_what_is_new(front.turns)
