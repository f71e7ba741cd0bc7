"""Two API keys on one server: neither can see, guess or time anything of the other's.

Time is that of this process, which is client and server: what a client sees on a quiet machine.
"""

from __future__ import annotations

import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvws.engine.protocol import Chunk, GenerateRequest
from kvws.http.app import make_app
from kvws.http.options import FrontOptions
from kvws.serving.prompts import PromptBuilder
from kvws.session.identity import identify
from tests.http.asking import DIALECTS, serving, until
from tests.serving.rig import LIMITS, Rig
from tests.step.session import in_loop
from tests.step.simulated_engine import SimulatedEngine

A, B = "key-of-a", "key-of-b"
SESSION = "the-same-name"
_WORDS = ("river", "stone", "cloud", "engine", "letter", "garden", "window", "market", "signal")


class CostlyEngine(SimulatedEngine):
    """Every token that is computed takes time."""

    token_s = 0.0

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        async with aclosing(super().generate(request)) as chunks:
            first = await anext(chunks)
            computed_tokens = len(request.token_ids) - first.cached_tokens
            until_s = time.process_time() + self.token_s * computed_tokens
            while time.process_time() < until_s:
                pass
            yield first
            async for chunk in chunks:
                yield chunk


@dataclass(frozen=True)
class Waited:
    """Seconds until a client saw something of an answer."""

    first_byte_s: float
    first_text_s: float
    reused_tokens: int


class Client:
    """One server, and whoever asks it. The model always says the same."""

    def __init__(self, http: httpx.AsyncClient, rig: Rig) -> None:
        self._http = http
        self.rig = rig

    async def ask(
        self, key: str, text: str, *, session: str = SESSION, says: str = "Fine.", **body: Any
    ) -> dict[str, Any]:
        """A whole answer."""
        self.rig.script.play(self.rig.words.encode(says))
        reply = await self._http.post(
            "/v1/messages", json=_body(text) | body, headers=_headers(key, session)
        )
        assert reply.status_code == 200, reply.text
        return reply.json()

    async def wait(self, key: str, text: str, session: str) -> Waited:
        """How long a streamed answer takes to begin."""
        self.rig.script.play(self.rig.words.encode("Fine."))
        headers, body = _headers(key, session), _body(text) | {"stream": True}
        begin = time.process_time()
        first_byte_s = first_text_s = 0.0
        heard = b""
        async with self._http.stream("POST", "/v1/messages", json=body, headers=headers) as reply:
            async for piece in reply.aiter_raw():
                first_byte_s = first_byte_s or time.process_time() - begin
                heard += piece
                if not first_text_s and b"content_block_delta" in heard:
                    first_text_s = time.process_time() - begin
        assert first_text_s, heard
        reused = heard.rpartition(b'"cache_read_input_tokens":')[2]
        return Waited(first_byte_s, first_text_s, int(reused.split(b",")[0].split(b"}")[0]))

    @asynccontextmanager
    async def endless(
        self, key: str, text: str, *, says: str = " on"
    ) -> AsyncGenerator[AsyncIterator[bytes]]:
        """An answer that has no end, until its client leaves."""
        script = self.rig.script
        script.forever = self.rig.words.encode(says)[0]
        headers, body = _headers(key, SESSION), _body(text) | {"stream": True, "max_tokens": 9999}
        async with self._http.stream("POST", "/v1/messages", json=body, headers=headers) as reply:
            yield reply.aiter_raw()
        script.forever = None

    async def get(self, key: str, path: str) -> httpx.Response:
        return await self._http.get(path, headers=_headers(key, SESSION))

    async def count(self, key: str, text: str) -> float:
        """Seconds that counting takes."""
        begin = time.process_time()
        reply = await self._http.post(
            "/v1/messages/count_tokens", json=_body(text), headers=_headers(key, SESSION)
        )
        assert reply.status_code == 200, reply.text
        return time.process_time() - begin


def _headers(key: str, session: str) -> dict[str, str]:
    return {"x-api-key": key, "x-session-id": session}


def _body(text: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "any", "max_tokens": 20, "system": "Be brief.", "messages": messages}


@asynccontextmanager
async def two_keys(
    model: Path, *, token_s: float = 0.0, **options: Any
) -> AsyncGenerator[Client, None]:
    engine = CostlyEngine(
        context_tokens=LIMITS.context_tokens,
        device_pages=20_000,
        host_blocks=50_000,
        chunk_tokens=256,
    )
    engine.token_s = token_s
    rig = Rig.start(model, engine=engine)
    front = FrontOptions(keys=(A, B), **options)
    app = make_app(rig.service, DIALECTS, identify, front)
    async with (
        serving(app, front) as (host, port),
        httpx.AsyncClient(base_url=f"http://{host}:{port}", timeout=60) as http,
    ):
        yield Client(http, rig)
    engine.check_idle()


def words(count: int, rng: random.Random) -> str:
    return " ".join(rng.choices(_WORDS, k=count))


# ---- what can be seen ------------------------------------------------------------------------


@in_loop
async def test_what_one_key_sent_is_new_for_the_other(smollm2: Path) -> None:
    text = words(200, random.Random(1))
    async with two_keys(smollm2) as client:
        for asked_before in (False, True):
            for key in (A, B):
                usage = (await client.ask(key, text))["usage"]
                assert (usage["cache_read_input_tokens"] > 0) is asked_before
        assert len(client.rig.service.open_sessions) == 2


@in_loop
async def test_a_session_is_there_for_its_own_key_only(smollm2: Path) -> None:
    async with two_keys(smollm2) as client:
        await client.ask(A, "Hello.", session="of-a")
        path = "/v1/kvws/sessions/of-a"
        assert (await client.get(A, path)).status_code == 200
        theirs, nobodys = [
            await client.get(B, f"/v1/kvws/sessions/{name}") for name in ("of-a", "of-nobody")
        ]
        assert theirs.status_code == nobodys.status_code == 404
        assert theirs.json() == nobodys.json()
        await client.ask(B, "Hello.", session="of-a")
        mine = (await client.get(B, path)).json()
        assert mine["steps"] == 1 == (await client.get(A, path)).json()["steps"]


@in_loop
async def test_the_state_names_a_keys_own_sessions_and_counts_all(smollm2: Path) -> None:
    async with two_keys(smollm2) as client:
        for number in range(3):
            await client.ask(A, "Hello.", session=f"secret-{number}")
        await client.ask(B, "Hello.", session="mine")
        seen = await client.get(B, "/v1/kvws/state")
        assert [session["session"] for session in seen.json()["sessions"]] == ["mine"]
        assert seen.json()["totals"]["sessions"] == 4 == seen.json()["totals"]["steps"]
        assert "secret" not in seen.text
        owners = (await client.get(A, "/v1/kvws/state")).json()["sessions"]
        assert [session["session"] for session in owners] == [f"secret-{n}" for n in range(3)]


@in_loop
async def test_figures_name_no_session_and_tell_of_the_tiers(smollm2: Path) -> None:
    async with two_keys(smollm2) as client:
        await client.ask(A, "Hello.", session="secret-session")
        for key in (A, B):
            text = (await client.get(key, "/metrics")).text
            assert "secret" not in text
            assert 'kvws_state{key="totals.sessions"} 1.0' in text
            assert 'kvws_state{key="ranks.0.blocks"}' in text


@in_loop
async def test_an_answer_that_one_client_left_is_not_told_to_the_others(smollm2: Path) -> None:
    text = "Tell me all about it."
    async with two_keys(smollm2) as client:
        async with client.endless(A, text, says=" secret") as pieces:
            async for piece in pieces:
                if b"secret" in piece:
                    break
        (session,) = client.rig.service.open_sessions.values()
        await until(lambda: not session.users)
        assert session.unheard["main"].tokens
        answer = await client.ask(B, text, says="Nothing.")
        assert answer["content"][0]["text"] == "Nothing."
        answer = await client.ask(A, text, says=" And so on.")
        assert answer["content"][0]["text"].startswith(" secret secret")


@in_loop
async def test_one_key_does_not_use_up_what_the_other_may_ask_at_once(smollm2: Path) -> None:
    async with (
        two_keys(smollm2, per_session_max=1) as client,
        client.endless(A, "Tell me all about it.") as pieces,
    ):
        await anext(pieces)
        refused = await client._http.post(
            "/v1/messages", json=_body("Hello."), headers=_headers(A, SESSION)
        )
        assert refused.status_code == 429
        assert (await client.ask(B, "Hello."))["content"]


# ---- what can be timed -----------------------------------------------------------------------

Measure = Callable[[bool, int], Awaitable[Sequence[float]]]
"""Waits of one guess, by every clock there is: of something that was said before, or was not."""

_A_ROUND, _ROUNDS_MIN, _ROUNDS_MAX = 100, 2, 12
_TELLS_NOTHING = 0.03


def auc(hits: Sequence[float], misses: Sequence[float]) -> float:
    """Probability that a hit takes less time than a miss."""
    ordered = sorted([(wait_s, 1) for wait_s in misses] + [(wait_s, 0) for wait_s in hits])
    hits_before = wins = 0
    for _, is_miss in ordered:
        hits_before += not is_miss
        wins += hits_before * is_miss
    return wins / (len(hits) * len(misses))


class Guessing:
    """Hits and misses in random order; AUCs of every clock."""

    def __init__(self, measure: Measure, seed: int) -> None:
        self._measure = measure
        self._rng = random.Random(seed)
        self._waits: tuple[list[Sequence[float]], list[Sequence[float]]] = ([], [])
        self._count = 0

    async def round(self) -> list[float]:
        order = [True, False] * _A_ROUND
        self._rng.shuffle(order)
        for is_hit in order:
            self._waits[not is_hit].append(await self._measure(is_hit, self._count))
            self._count += 1
        hits, misses = (list(zip(*waits, strict=True)) for waits in self._waits)
        return [auc(*clock) for clock in zip(hits, misses, strict=True)]

    async def tells_nothing(self) -> bool:
        """Whether hits and misses look alike. Chance alone moves the AUC of a few hundred guesses
        by as much as is allowed here, so there are more until it is sure."""
        for number in range(_ROUNDS_MAX):
            found = await self.round()
            alike = all(abs(each - 0.5) <= _TELLS_NOTHING for each in found)
            if alike and number + 1 >= _ROUNDS_MIN:
                return True
        return False


def guesses_of(client: Client, attacker: str, rng: random.Random) -> Measure:
    """Time what A asked just before, in a session of the same name, or did not ask."""

    async def measure(is_hit: bool, number: int) -> Sequence[float]:
        text, session = words(64, rng), f"s{number}"
        if is_hit:
            await client.ask(A, text, session=session)
        else:
            await client.ask(A, words(64, rng), session=session)
        waited = await client.wait(attacker, text, session)
        assert attacker == A or not waited.reused_tokens
        return waited.first_byte_s, waited.first_text_s

    return measure


@in_loop
async def test_how_long_an_answer_takes_does_not_tell_what_the_other_key_asked(
    smollm2: Path,
) -> None:
    async with two_keys(smollm2, token_s=2e-5) as client:
        assert await Guessing(guesses_of(client, B, random.Random(3)), 4).tells_nothing()


@in_loop
async def test_and_it_does_tell_a_key_what_it_asked_itself(smollm2: Path) -> None:
    """Positive control: there is something to time."""
    async with two_keys(smollm2, token_s=6e-5) as client:
        _, first_text = await Guessing(guesses_of(client, A, random.Random(5)), 6).round()
        assert first_text >= 0.95


def counted_guesses(client: Client, rng: random.Random) -> Measure:
    async def measure(is_hit: bool, number: int) -> Sequence[float]:
        text, other = words(600, rng), words(600, rng)
        await client.count(A, text if is_hit else other)
        return (await client.count(B, text),)

    return measure


@in_loop
async def test_how_long_counting_takes_does_not_tell_what_the_other_key_counted(
    smollm2: Path,
) -> None:
    async with two_keys(smollm2) as client:
        assert await Guessing(counted_guesses(client, random.Random(7)), 8).tells_nothing()


@in_loop
async def test_and_it_would_if_pieces_of_text_were_remembered(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control."""

    def remembering(self: PromptBuilder, call: Any, options: Any) -> tuple[int, ...]:
        return self._segments.whole(call.messages, call.tools, options)

    monkeypatch.setattr(PromptBuilder, "_whole", remembering)
    async with two_keys(smollm2) as client:
        (counting,) = await Guessing(counted_guesses(client, random.Random(9)), 10).round()
        assert counting >= 0.9
