"""`kvws serve` with a disk tier: killed, started again, interrupted."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvws.blocks.key import BLOCK_TOKENS
from tests.engine.serve_process import ServeProcess, serve_process
from tests.engine.serving import Conversation, Heard, logbook

BUDGET_TOKENS = 256
_ACKNOWLEDGED_WITHIN_S = 20.0
_SAVED_WITHIN_S = 30.0


def talk(
    server: ServeProcess, history: list[dict[str, Any]], questions: list[str]
) -> tuple[list[Heard], dict[str, Any]]:
    """Some turns of a session whose client spells answers in its own way.

    Mutates: `history` has them.

    Returns:
        the answers, and the session's state once it is on disk.
    """

    async def talking() -> tuple[list[Heard], dict[str, Any]]:
        async with httpx.AsyncClient(base_url=server.base_url, timeout=120.0) as client:
            conversation = Conversation(client, "durable", respelled="  \n", messages=history)
            heard = [await conversation.say(question, 16) for question in questions]
            deadline = time.monotonic() + _ACKNOWLEDGED_WITHIN_S
            while True:
                reply = await client.get("/v1/kvws/sessions/durable")
                state = reply.json()
                if state["durable_blocks"] == state["blocks"]:
                    return heard, state
                assert time.monotonic() < deadline, state
                await asyncio.sleep(0.1)

    return asyncio.run(talking())


@pytest.mark.timeout(600)
def test_a_session_outlives_a_killed_server_and_an_interrupted_one_saves_it(
    smollm2: Path, tmp_path: Path
) -> None:
    arguments = [
        "--budget", str(BUDGET_TOKENS), "--reserve", "256", "--query", "64", "--host-gb", "0.5",
        "--disk-dir", str(tmp_path / "store"), "--disk-gb", "1",
    ]  # fmt: skip
    history: list[dict[str, Any]] = []
    questions = [f"{logbook(number, 6)}\nWhat did you read?" for number in range(5)]
    with serve_process(tmp_path, *arguments) as server:
        heard, state = talk(server, history, questions[:3])
        acknowledged_tokens = BLOCK_TOKENS * state["durable_blocks"]
        assert acknowledged_tokens > 2 * BUDGET_TOKENS
        server.kill()
    with serve_process(tmp_path, *arguments) as server:
        (after, last), state = talk(server, history, questions[3:])
        reused_tokens = after.prompt_tokens - after.computed_tokens
        assert reused_tokens >= 0.95 * acknowledged_tokens
        known_tokens = heard[-1].prompt_tokens + heard[-1].answer_tokens - 1
        assert after.computed_tokens <= after.prompt_tokens - known_tokens // 32 * 32
        assert last.computed_tokens < after.prompt_tokens - known_tokens + 3 * BLOCK_TOKENS
        assert all(step["recomputed_acknowledged_blocks"] == 0 for step in state["latest_steps"])
        begin = time.monotonic()
        assert server.interrupt(timeout_s=_SAVED_WITHIN_S) == 0, server.said[-3000:]
        print(f"measured: ended {time.monotonic() - begin:.1f} s after Ctrl-C")
        assert "all sessions are on disk" in server.said
