"""Claude Code on the packaged model: `python -m tests.engine.real_client [OPTION OF SERVE]…`.

Two turns of one session, the second one taken up again by a new process of the client. Fails when
the client reports an error, or when the second turn computes more than what is new in it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from kvws.harness_adapters.address import ServerAddress
from kvws.harness_adapters.recognise import launch
from tests.e2e.clients import CLAUDE, bare_environment, run_client
from tests.engine.serve_process import ServeProcess, serve_process

WINDOW_TOKENS = 200_000
ONE_SENTENCE = {"temperature": 0, "stop_sequences": [".", "!", "?", "\n"]}
"""A small model says the same over and over until it is cut off, which the client takes for an
error of the server."""

OVERHEAD_TOKENS = 128
"""What a turn's markup, and the part of a block that was open, may cost beside what is new."""

_TURN_MAX_S = 1800.0


@dataclass(frozen=True)
class Turn:
    """One run of the client.

    Attributes:
        result: what the client printed.
        steps: reports of the steps that it took.
    """

    seconds: float
    result: dict[str, Any]
    steps: list[dict[str, Any]]

    def __str__(self) -> str:
        lines = [f"{self.seconds:.1f} s; the client heard {self.result.get('result')!r}"]
        for step in self.steps:
            reused_tokens = step["prompt_tokens"] - step["new_tokens"]
            lines.append(
                f"  prompt {step['prompt_tokens']:,} tokens, {reused_tokens:,} of them known "
                f"({reused_tokens / step['prompt_tokens']:.1%}); computed "
                f"{step['computed_tokens']:,} in {step['passes']} passes, generated "
                f"{step['generated_tokens']}; first token after "
                f"{step['ms']['first_token'] / 1000:.1f} s"
            )
        return "\n".join(lines)


class Claude:
    """The client in a repository and a home of its own."""

    def __init__(self, server: ServeProcess, folder: Path) -> None:
        self._server = server
        self._repository, self._home = folder / "repo", folder / "home"
        self._repository.mkdir()
        subprocess.run(["git", "init", "-q", str(self._repository)], check=True)
        self._seen_steps = 0

    def say(self, text: str, *more: str) -> Turn:
        """One turn.

        Raises:
            AssertionError: the client fails.
        """
        command = [str(CLAUDE.executable), "-p", text, *more, "--output-format", "json"]
        prepared = launch(command, ServerAddress(self._server.base_url, None, WINDOW_TOKENS, ""))
        environment = {
            **bare_environment(self._home),
            "CLAUDE_CONFIG_DIR": str(self._home / ".claude"),
            "CLAUDE_CODE_MAX_RETRIES": "0",
        }
        environment = prepared.environment_over(environment)
        environment["CLAUDE_CODE_EXTRA_BODY"] = json.dumps(ONE_SENTENCE)
        begin = time.monotonic()
        finished = run_client(
            prepared.command, environment, self._repository, timeout_s=_TURN_MAX_S
        )
        seconds = time.monotonic() - begin
        result = json.loads(finished.out) if finished.out.startswith("{") else {}
        turn = Turn(seconds, result, self._new_steps(result.get("session_id", "")))
        print(turn, flush=True)
        assert finished.code == 0 and not result["is_error"], finished.out + finished.err
        return turn

    def _new_steps(self, session: str) -> list[dict[str, Any]]:
        reply = httpx.get(f"{self._server.base_url}/v1/kvws/sessions/{session}", timeout=30)
        steps = reply.json()["latest_steps"] if reply.status_code == 200 else []
        new, self._seen_steps = steps[self._seen_steps :], len(steps)
        return new


def main(arguments: list[str]) -> None:
    options = ["--budget", "2048", "--reserve", "1024", "--window", str(WINDOW_TOKENS), *arguments]
    with tempfile.TemporaryDirectory(prefix="kvws-e2e-") as name:
        folder = Path(name)
        with serve_process(folder, *options) as server:
            claude = Claude(server, folder)
            first = claude.say("say hi")
            again = claude.say("say hi once more", "--continue")
    known_tokens = first.steps[-1]["prompt_tokens"]
    told_tokens = again.steps[0]["prompt_tokens"] - known_tokens
    assert again.result["session_id"] == first.result["session_id"]
    assert again.steps[0]["new_tokens"] <= told_tokens + OVERHEAD_TOKENS
    print("each turn computed only what was new in it")


if __name__ == "__main__":
    main(sys.argv[1:])
