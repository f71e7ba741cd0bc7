"""Streams that are silent for long, clients that go away, and what they find when they come back.

The intervals of real time are minutes: here they are fractions of a second.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvws.blocks.key import BLOCK_TOKENS
from kvws.http.options import FrontOptions
from tests.acceptance.agent import Agent, calling, results
from tests.acceptance.front import LIMITS, Front, running_front
from tests.acceptance.wire import CHAT, MESSAGES, RESPONSES, frames, read_answer
from tests.e2e.front import KEY

IMPATIENT = FrontOptions(keys=(KEY,), ping_after_s=0.05, stay_alive_after_s=0.2)
SAYING = " ".join(f"Word {number}." for number in range(60))
ABORT_MAX_S = 0.1
_PACE_S = 0.01


@pytest.fixture(scope="module")
def slow_front(smollm2: Path) -> Generator[Front, None, None]:
    with running_front(smollm2, options=IMPATIENT) as front:
        yield front


@pytest.fixture
def front(slow_front: Front) -> Iterator[Front]:
    """A server that speaks one word at a time."""
    slow_front.engine.pause_s = _PACE_S
    slow_front.script.saying = SAYING
    yield slow_front
    slow_front.engine.pause_s = 0.0


@contextmanager
def silent(front: Front, *, after_chunks: int = 0) -> Generator[threading.Event, None, None]:
    """The engine says nothing from some chunk on until the event is set."""
    go_on = threading.Event()
    front.engine.hold(after_chunks, go_on)
    try:
        yield go_on
    finally:
        go_on.set()
        front.engine.hold(0, None)


def streamed_bodies(session: str) -> dict[str, dict[str, Any]]:
    asked = [{"role": "user", "content": f"Speak, {session}."}]
    return {
        MESSAGES: {"model": "kvws", "max_tokens": 500, "messages": asked, "stream": True},
        CHAT: {"model": "kvws", "messages": asked, "stream": True},
        RESPONSES: {"model": "kvws", "input": asked, "stream": True},
    }


@pytest.mark.parametrize("after_chunks", [0, 5])
@pytest.mark.parametrize("path", [MESSAGES, CHAT, RESPONSES])
def test_a_silent_stream_is_kept_alive(front: Front, path: str, after_chunks: int) -> None:
    """As during a stage-in of minutes: before the first word, and in the middle of the answer."""
    front.engine.pause_s = 0.0
    session = f"silent-{path.rpartition('/')[2]}-{after_chunks}"
    body = streamed_bodies(session)[path]
    with (
        silent(front, after_chunks=after_chunks) as go_on,
        front.client(**{"x-session-id": session}) as client,
        client.stream("POST", path, json=body) as reply,
    ):
        heard, arrivals_s = "", [time.monotonic()]
        for piece in reply.iter_text():
            heard += piece
            arrivals_s.append(time.monotonic())
            if arrivals_s[-1] - arrivals_s[0] > 1.0:
                go_on.set()
        gaps_s = [b - a for a, b in pairwise(arrivals_s)]
        assert reply.status_code == 200
        assert read_answer(path, _Whole(reply, heard)).text == SAYING
    assert arrivals_s[-1] - arrivals_s[0] > 1.0, "there was no silence"
    assert max(gaps_s) < 0.5, "a watchdog of the client would have bitten"


class _Whole(httpx.Response):
    """A streamed reply that has been read."""

    def __init__(self, reply: httpx.Response, text: str) -> None:
        super().__init__(reply.status_code, headers=reply.headers, text=text)
        self.headers["content-type"] = "text/event-stream"


def test_the_watchdog_of_claude_code_is_reset_and_no_block_is_broken(front: Front) -> None:
    """Only a delta of a content block resets it; a ping does not."""
    front.engine.pause_s = 0.0
    body = streamed_bodies("watchdog")[MESSAGES]
    with silent(front) as go_on, front.client(**{"x-session-id": "watchdog"}) as client:
        timer = threading.Timer(1.0, go_on.set)
        timer.start()
        stream = client.post(MESSAGES, json=body).text
        timer.join()
    kinds = [frame["type"] for frame in frames(stream)]
    first_word = next(n for n, f in enumerate(frames(stream)) if f.get("delta", {}).get("text"))
    assert kinds[0] == "message_start"
    assert kinds[:first_word].count("ping") >= 3
    assert kinds[:first_word].count("content_block_delta") >= 2
    opened = [frame["index"] for frame in frames(stream) if frame["type"].endswith("block_start")]
    closed = [frame["index"] for frame in frames(stream) if frame["type"].endswith("block_stop")]
    assert opened == closed == list(range(len(opened)))


def abort_s(front: Front, leave: Callable[[], None]) -> float:
    """Seconds from when a client has left to the end of the engine's work for it."""
    begun = len(front.engine.requests)
    leave()
    left_s = time.monotonic()
    wait_until(lambda: front.engine.running_requests == 0)
    rids = [request.rid for request in front.engine.requests[begun:]]
    assert rids, "it left before there was any work"
    return max(front.engine.ended_s[rid] for rid in rids) - left_s


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


@pytest.mark.parametrize("pieces", [1, 12])
def test_a_disconnect_ends_the_engines_work_within_100_ms(front: Front, pieces: int) -> None:
    """Before the first word, and in the middle of the answer."""
    assert len(front.tokens(SAYING)) * _PACE_S > 4 * ABORT_MAX_S, "it would end by itself"

    def leave() -> None:
        body = streamed_bodies(f"left-{pieces}-{uuid.uuid4()}")[MESSAGES]
        with front.client() as client, client.stream("POST", MESSAGES, json=body) as reply:
            heard = reply.iter_text()
            for _ in range(pieces):
                next(heard)
            wait_until(lambda: front.engine.running_requests > 0)

    assert statistics.median(abort_s(front, leave) for _ in range(3)) < ABORT_MAX_S


def test_a_client_of_whole_answers_that_goes_away_ends_the_engines_work_too(
    front: Front,
) -> None:
    def leave() -> None:
        body = {**streamed_bodies(f"whole-{uuid.uuid4()}")[MESSAGES], "stream": False}
        with front.client() as client, pytest.raises(httpx.ReadTimeout):
            client.post(MESSAGES, json=body, timeout=0.3)

    assert statistics.median(abort_s(front, leave) for _ in range(3)) < ABORT_MAX_S


def cut_after(front: Front, agent: Agent, is_enough: Callable[[str], bool]) -> str:
    """Read a stream until it says enough, and go away; what was read."""
    said = ""
    with (
        front.client(**agent.headers) as client,
        client.stream("POST", MESSAGES, json=agent.body(stream=True)) as reply,
    ):
        heard = reply.iter_text()
        while not is_enough(said):
            said += next(heard)
    wait_until(lambda: front.engine.running_requests == 0)
    front.engine.pause_s = 0.0
    return said


def deltas(stream: str, member: str) -> str:
    whole = stream[: stream.rfind("\n\n") + 2]
    return "".join(frame.get("delta", {}).get(member, "") for frame in frames(whole))


@pytest.mark.parametrize("words", [1, 5, 40])
def test_a_resend_after_a_cut_stream_finds_the_work_done(front: Front, words: int) -> None:
    """Claude Code sends the same body once more, not streamed. The model goes on where it was
    cut off: nothing is generated twice."""
    agent = Agent(front)
    agent.messages = [{"role": "user", "content": "Speak. " * 300}]
    stream = cut_after(front, agent, lambda said: deltas(said, "text").count(".") >= words)
    opened = front.service.open_sessions.values()
    session = next(each for each in opened if each.caller.session == agent.session)
    wait_until(lambda: "main" in session.unheard)
    said_tokens = len(session.unheard["main"].tokens)
    assert 0 < said_tokens < len(front.tokens(SAYING))
    generated = front.engine.generated_tokens
    again = agent.call()
    assert again.answer.text == SAYING
    assert again.answer.text.startswith(deltas(stream, "text"))
    generated = front.engine.generated_tokens - generated
    probe_tokens = 1
    assert generated <= again.answered.usage.answer_tokens - said_tokens + probe_tokens
    # What was said is computed as a prompt: that is quick, and the only thing done again.
    assert again.computed_tokens <= BLOCK_TOKENS + said_tokens
    agent.messages += again.answer.turn
    agent.ask("Go on.", "Fine.").assert_only_new_was_computed()


def test_a_tool_call_that_was_cut_in_the_middle_arrives_whole_when_sent_again(
    front: Front,
) -> None:
    front.script.saying = "I write.\n" + calling("Write", file_path="a", content=SAYING)
    agent = Agent(front)
    agent.messages = [{"role": "user", "content": "Write it."}]
    stream = cut_after(front, agent, lambda said: said.count("input_json_delta") > 20)
    again = agent.call()
    (use,) = [block for block in again.answer.turn[0]["content"] if block["type"] == "tool_use"]
    assert use["input"] == {"file_path": "a", "content": SAYING}
    heard = deltas(stream, "partial_json")
    assert "Word 0." in heard and json.dumps(use["input"]).startswith(heard)
    agent.messages += again.answer.turn
    agent.ask(results(again.answer, "Written."), "Done.").assert_only_new_was_computed()


def test_a_client_that_leaves_before_the_first_word_finds_its_prompt_but_for_the_question(
    front: Front,
) -> None:
    agent = Agent(front)
    agent.messages = [{"role": "user", "content": "Speak. " * 300}]
    with (
        silent(front),
        front.client(**agent.headers) as client,
        client.stream("POST", MESSAGES, json=agent.body(stream=True)) as reply,
    ):
        heard = reply.iter_text()
        next(heard)
        wait_until(lambda: front.engine.is_held)
    wait_until(lambda: front.engine.running_requests == 0)
    front.engine.pause_s = 0.0
    again = agent.call()
    assert again.answer.text == SAYING
    assert again.computed_tokens <= LIMITS.query_tokens
