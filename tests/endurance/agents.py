"""An agent that works in a loop for session after session, and behaves as badly as clients do."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

import orjson

from tests.endurance.model import answer_to, marker, prose
from tests.endurance.speech import Anthropic, History, Round, Said, Speech, any_speech
from tests.endurance.wire import STAYS, Manner, Reply, exchange

KEYS = ("soak-key-1", "soak-key-2")
_STEPS_A_SESSION = 40
_TITLE_NUMBER = 10**6
"""Side calls are numbered from here."""

_BAD_BODIES = (b"", b"{", b"[]", b'{"messages": 5}', b'{"messages": []}', b'\xff\xfe{"a": 1}')


class WrongAnswer(AssertionError):
    """A client did not hear what the model said to it."""


@dataclass
class Tally:
    """What happened, by kind."""

    counts: Counter[str] = field(default_factory=Counter[str])
    statuses: Counter[int] = field(default_factory=Counter[int])

    @property
    def steps(self) -> int:
        return self.counts["answers"]


@dataclass
class Thread:
    """One message list of a session.

    Attributes:
        asked: markers given out.
    """

    name: str
    history: History
    asked: int = 0


class Agent:
    """One agent. All that it does follows from its seed and from nothing else."""

    def __init__(self, port: int, number: int, seed: int, tally: Tally) -> None:
        self._port = port
        self._number = number
        self._rng = random.Random(f"{seed}/{number}")
        self._tally = tally
        self._key = KEYS[number % len(KEYS)]
        self._session_number = 0
        self._left: deque[tuple[str, Speech, Thread]] = deque(maxlen=1)
        self._begin_session()

    def _begin_session(self) -> None:
        """Another client, perhaps of another kind."""
        self._session_number += 1
        self._session = f"a{self._number}n{self._session_number}"
        self._speech: Speech = any_speech(self._rng)
        self._main = self._begin_thread("main")
        self._steps_left = self._rng.randrange(_STEPS_A_SESSION // 2, _STEPS_A_SESSION)
        self._tally.counts["sessions"] += 1

    def _begin_thread(self, name: str) -> Thread:
        first = f"Work on {prose(self._rng, 12)} {marker(self._session, name, 0)}"
        return Thread(name, History(first))

    @property
    def sessions(self) -> set[str]:
        """Those that it may still ask."""
        return {self._session, *(session for session, _, _ in self._left)}

    async def act(self) -> None:
        """Whatever comes next."""
        if self._steps_left <= 0:
            self._left.append((self._session, self._speech, self._main))
            self._begin_session()
        acts: list[tuple[float, Callable[[], Awaitable[None]]]] = [
            (0.50, self._work),
            (0.10, self._leave_and_ask_again),
            (0.05, self._read_slowly),
            (0.06, self._fork),
            (0.04, self._edit),
            (0.03, self._compact),
            (0.06, self._ask_aside),
            (0.05, self._send_agents),
            (0.05, self._misbehave),
            (0.02, self._send_half),
            (0.02, self._count),
            (0.02, self._look_around),
            (0.01, self._come_back),
        ]
        weights, choices = zip(*acts, strict=True)
        (chosen,) = self._rng.choices(choices, weights)
        self._tally.counts[chosen.__name__.strip("_")] += 1
        await chosen()

    # ---- what a good client does ---------------------------------------------------------------

    async def _work(self) -> None:
        await self._step(self._main)

    async def _step(self, thread: Thread, manner: Manner = STAYS) -> None:
        """Ask, check what is heard, and have the next request ready."""
        said = await self._ask(thread.name, thread.history, manner)
        thread.asked += 1
        self._steps_left -= 1
        asked = marker(self._session, thread.name, thread.asked)
        told = [f"{prose(self._rng, self._rng.choice((5, 20, 80)))}" for _ in said.calls or (1,)]
        told[-1] += f" {asked}"
        thread.history = replace(
            thread.history, rounds=(*thread.history.rounds, Round(said, tuple(told)))
        )

    async def _ask(
        self, thread: str, history: History, manner: Manner = STAYS, *, aside: bool = False
    ) -> Said:
        """Raises:
        WrongAnswer: it is not what the model says to this.
        """
        stream = self._rng.random() < 0.7
        body = self._speech.body(history, stream=stream, aside_of=self._session if aside else None)
        reply = await self._send(self._speech.path, body, thread, manner)
        if reply.status != 200:
            raise WrongAnswer(f"{self._session} {thread}: {reply.status} {reply.body[:300]!r}")
        try:
            said = self._speech.said(reply, stream=stream)
        except Exception as error:
            words = f"{self._session} {thread}: {reply.body[-300:]!r}"
            raise WrongAnswer(words) from error
        last = history.rounds[-1].told[-1] if history.rounds else history.task
        expected = answer_to(last[last.rindex("[[") :], offers_tools=not aside)
        if not said.is_turn(expected):
            raise WrongAnswer(f"{self._session} {thread}: {said} is not {expected}")
        self._tally.counts["asides" if aside else "answers"] += 1
        return said

    async def _send(self, path: str, body: object, thread: str, manner: Manner = STAYS) -> Reply:
        content = body if isinstance(body, bytes) or body is None else orjson.dumps(body)
        reply = await exchange(self._port, path, self._headers(thread), content, manner)
        self._tally.statuses[reply.status] += 1
        return reply

    def _headers(self, thread: str) -> dict[str, str]:
        key = {"authorization": f"Bearer {self._key}", "content-type": "application/json"}
        if not isinstance(self._speech, Anthropic):
            return {**key, "x-litellm-session-id": self._session}
        agent = {} if thread == "main" else {"x-claude-code-agent-id": thread}
        return {**key, **agent, "x-claude-code-session-id": self._session}

    async def _read_slowly(self) -> None:
        await self._step(self._main, Manner(pause_s=self._rng.choice((0.001, 0.01, 0.03))))

    async def _ask_aside(self) -> None:
        """While the main thread works."""
        number = _TITLE_NUMBER + self._rng.randrange(1000)
        title = History(f"Name this session. {marker(self._session, 'title', number)}")
        await asyncio.gather(self._ask("main", title, aside=True), self._step(self._main))

    async def _send_agents(self) -> None:
        """Sub-agents, beside the main thread. Only some clients tell them apart."""
        if not isinstance(self._speech, Anthropic):
            return await self._step(self._main)
        names = [f"k{self._rng.randrange(3)}", f"k{3 + self._rng.randrange(3)}"]
        agents = [self._begin_thread(name) for name in names]

        async def work(agent: Thread) -> None:
            for _ in range(3):
                await self._step(agent)

        await asyncio.gather(*(work(agent) for agent in agents), self._step(self._main))

    # ---- what happens to histories -------------------------------------------------------------

    async def _fork(self) -> None:
        """Go back, and on from there in another direction."""
        rounds = self._main.history.rounds
        if rounds:
            kept = self._rng.randrange(1, len(rounds) + 1)
            self._main.history = replace(
                self._main.history, rounds=(*rounds[: kept - 1], self._retold(rounds[kept - 1]))
            )
        await self._step(self._main)

    def _retold(self, old: Round) -> Round:
        self._main.asked += 1
        asked = marker(self._session, "main", self._main.asked)
        return replace(old, told=(*old.told[:-1], f"No: {prose(self._rng, 15)} {asked}"))

    async def _edit(self) -> None:
        """Say something else about the middle."""
        rounds = list(self._main.history.rounds)
        if len(rounds) > 2:
            at = self._rng.randrange(len(rounds) - 1)
            rounds[at] = self._retold(rounds[at])
            self._main.history = replace(self._main.history, rounds=tuple(rounds))
        await self._step(self._main)

    async def _compact(self) -> None:
        """Begin anew with a summary, and perhaps the newest rounds."""
        self._main.asked += 1
        asked = marker(self._session, "main", self._main.asked)
        kept = self._main.history.rounds[-1:] if self._rng.random() < 0.5 else ()
        summary = f"We go on from a summary: {prose(self._rng, 60)} {asked}"
        self._main.history = History(summary, kept)
        await self._step(self._main)

    async def _come_back(self) -> None:
        """To a session that was left, and may have left memory."""
        if self._left:
            now = (self._session, self._speech, self._main)
            self._session, self._speech, self._main = self._left.popleft()
            self._left.append(now)
            self._steps_left = max(5, self._steps_left)
        await self._step(self._main)

    # ---- what bad clients, and bad lines, do ---------------------------------------------------

    async def _leave_and_ask_again(self) -> None:
        """Once or twice, at once or after a while, as the same request or another form of it."""
        for _ in range(self._rng.choice((1, 1, 2))):
            leaves = Manner(reads_bytes=self._rng.choice((0, 1, 300, 700, 1500, 4000)))
            body = self._speech.body(self._main.history, stream=True)
            await self._send(self._speech.path, body, "main", leaves)
            await asyncio.sleep(self._rng.choice((0, 0, 0.01, 0.2)))
        await self._step(self._main)

    async def _send_half(self) -> None:
        body = self._speech.body(self._main.history, stream=True)
        await self._send(self._speech.path, body, "main", Manner(sends=self._rng.random() * 0.9))

    async def _misbehave(self) -> None:
        path, headers = self._speech.path, self._headers("main")
        body, expected = self._rng.choice(_BAD_BODIES), {400}
        case = self._rng.randrange(4)
        if case == 1:
            headers["authorization"], expected = "Bearer no-key", {401}
        elif case == 2:
            path, expected = "/v1/nothing", {404}
        elif case == 3:
            headers["x-kvws-workspace"] = "../../etc"
            body = orjson.dumps(self._speech.body(self._main.history, stream=True))
        reply = await exchange(self._port, path, headers, body)
        self._tally.statuses[reply.status] += 1
        if reply.status not in expected:
            raise WrongAnswer(f"case {case}: {reply.status} {reply.body[:300]!r}")

    async def _count(self) -> None:
        body = Anthropic().body(self._main.history, stream=False)
        reply = await self._send("/v1/messages/count_tokens?beta=true", body, "main")
        if reply.status != 200 or reply.json["input_tokens"] < 100:
            raise WrongAnswer(f"{reply}")

    async def _look_around(self) -> None:
        """At its own sessions: those of the other key are not to be seen."""
        for path in ("/v1/kvws/state", "/metrics", f"/v1/kvws/sessions/{self._session}"):
            reply = await self._send(path, None, "main")
            mine = {f"a{number}n" for number in range(self._number % 2, 100, 2)}
            if path.endswith("state"):
                named = {one["session"].partition("n")[0] + "n" for one in reply.json["sessions"]}
                if not named <= mine:
                    raise WrongAnswer(f"{self._session} is told of {named - mine}")
