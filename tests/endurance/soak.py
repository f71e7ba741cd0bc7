"""Agents against the real HTTP server over the simulated engine, for as long as wanted.

    agents ──HTTP──▶ server ──▶ sessions ──▶ simulated engine
       │                                           │
       └──── every so many steps all of them stop, and everything is counted

Prints its seed. Whatever leaks, is mixed up or breaks a book's balance ends it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from kvws.engine.chat_format import ChatFormat
from kvws.http.app import make_app
from kvws.http.options import FrontOptions
from kvws.http.server import serve
from kvws.limits import Limits
from kvws.models import resolve_model
from kvws.recall.recipe import recipe_named
from kvws.serving.assemble import assemble_service
from kvws.serving.session_service import SessionService
from kvws.session.identity import identify
from kvws.store.directory import StoreDirectory
from kvws.store.posix import PosixStorage
from tests.e2e.front import DIALECTS, ScriptedFormat
from tests.endurance.agents import KEYS, Agent, Tally
from tests.endurance.model import LeanEngine, Oracle, WatchingTongue
from tests.endurance.wire import exchange
from tests.serving.rig import IDENTITY

LIMITS = Limits(
    budget_tokens=1024, reserve_tokens=512, sink_tokens=32, recent_tokens=256, query_tokens=128
)
_SETTLE_S = 10.0
_WARM_UP = 0.3
"""Part of a run whose memory does not count: caches fill, and the heap finds its size."""


class Leak(AssertionError):
    """Something is left over while nobody asks."""


@dataclass(frozen=True)
class Counts:
    """What there is while nobody asks."""

    tasks: int
    descriptors: int
    threads: int
    rss_bytes: int


@dataclass
class Found:
    """A run.

    Attributes:
        samples: (seconds since the beginning, steps, counts) of every stop.
    """

    seed: int
    tally: Tally
    samples: list[tuple[float, int, Counts]] = field(
        default_factory=list[tuple[float, int, Counts]]
    )
    own_markers: int = 0

    @property
    def rss_growth_bytes_per_minute(self) -> float:
        """After the warm-up."""
        end_s = self.samples[-1][0]
        late = [(at, counts.rss_bytes) for at, _, counts in self.samples if at > _WARM_UP * end_s]
        if len(late) < 3:
            return 0.0
        slope, _ = statistics.linear_regression(*zip(*late, strict=True))
        return 60 * slope

    def lines(self) -> list[str]:
        counts = self.samples[-1][2]
        first = self.samples[0][2]
        rss = [each.rss_bytes >> 20 for _, _, each in self.samples]
        return [
            f"seed {self.seed}: {self.tally.steps} answers, all right; "
            f"{self.own_markers} markers seen, none of another session",
            f"acts: {dict(sorted(self.tally.counts.items()))}",
            f"replies by status (0: the client left): {dict(sorted(self.tally.statuses.items()))}",
            f"stops: {len(self.samples)}; tasks {first.tasks} -> {counts.tasks}, descriptors "
            f"{first.descriptors} -> {counts.descriptors}, threads {first.threads} -> "
            f"{counts.threads}",
            f"RSS MiB: first {rss[0]}, last {rss[-1]}, most {max(rss)}; growth after warm-up "
            f"{self.rss_growth_bytes_per_minute / (1 << 20):.2f} MiB a minute",
        ]


@dataclass(frozen=True)
class Work:
    """How much of it: whichever ends first."""

    seconds: float
    steps: int = sys.maxsize
    steps_between_stops: int = 150


class Soak:
    """A server, its agents, and what is counted."""

    def __init__(
        self,
        service: SessionService,
        engine: LeanEngine,
        tongue: WatchingTongue,
        port: int,
        *,
        seed: int,
        agents: int,
    ) -> None:
        self.service = service
        self.found = Found(seed, Tally())
        self._engine = engine
        self._tongue = tongue
        self._port = port
        self._agents = [Agent(port, number, seed, self.found.tally) for number in range(agents)]
        self._begin_s = time.monotonic()
        self._at_rest: Counts | None = None

    async def run(self, work: Work) -> Found:
        """Let the agents work, and count every so many steps."""
        await self._count_what_is_left()
        until_s = self._begin_s + work.seconds
        while time.monotonic() < until_s and self.found.tally.steps < work.steps:
            wanted = min(work.steps, self.found.tally.steps + work.steps_between_stops)

            async def act(agent: Agent, wanted: int = wanted) -> None:
                while self.found.tally.steps < wanted and time.monotonic() < until_s:
                    await agent.act()

            async with asyncio.TaskGroup() as group:
                for agent in self._agents:
                    group.create_task(act(agent))
            await self._count_what_is_left()
        await self._everybody_leaves()
        return self.found

    async def _everybody_leaves(self) -> None:
        """All sessions that are on disk leave memory, and what they held open is closed."""
        sessions = self.service._sessions
        sessions._idle_s = -1.0
        deadline_s = time.monotonic() + _SETTLE_S
        while any(s.workspace.is_durable for s in sessions.open_sessions.values()):
            _require(time.monotonic() < deadline_s, "sessions do not leave memory")
            await sessions.close_idle()
            await asyncio.sleep(0.05)
        await self._count_what_is_left()

    async def _count_what_is_left(self) -> None:
        """Nobody asks: sessions that are idle go, and what is left must be what was there before
        anybody asked, and tokens."""
        await self._settled()
        service, engine = self.service, self._engine
        await service._sessions.close_idle()
        for name, session in service.open_sessions.items():
            session.workspace.check_integrity()
            _require(not len(session._turns), f"a lock of {name} is held")
            _require(session.users == 0, f"{name} is in use")
            asides = [each for each in session.workspace.threads if each.startswith("aside")]
            _require(not asides, f"{name} keeps {asides}")
        await engine.settle()
        await engine.check_integrity()
        engine.check_idle()
        engine.forget_the_past(set[str]().union(*(agent.sessions for agent in self._agents)))
        self._tongue.forget()
        _require(not self._tongue.seen.foreign, "; ".join(self._tongue.seen.foreign[:3]))
        self.found.own_markers = self._tongue.seen.own
        gc.collect()
        await self._settled()  # what was on disk is acknowledged meanwhile
        counts = _counts()
        self._at_rest = self._at_rest or counts
        stores = sum(s.workspace.is_durable for s in service.open_sessions.values())
        allowed = self._at_rest.descriptors + 8 * stores
        _require(counts.descriptors <= allowed, f"{counts.descriptors} descriptors")
        at_s = time.monotonic() - self._begin_s
        self.found.samples.append((at_s, self.found.tally.steps, counts))

    async def _settled(self) -> None:
        """Wait until aborts and closed connections are through."""
        deadline_s = time.monotonic() + _SETTLE_S
        while True:
            figures = await exchange(self._port, "/metrics", {"x-api-key": KEYS[0]}, None)
            lines = figures.body.decode().splitlines()
            busy = [f for f in ("kvws_answering", "kvws_waiting") if f"{f} 0.0" not in lines]
            used = [s.name for s in self.service.open_sessions.values() if s.users]
            busy += ["a door"] * len(self.service._sessions._doors)  # idle sessions are closed
            tasks = self._at_rest is not None and _counts().tasks > self._at_rest.tasks
            if not busy and not used and not tasks:
                return
            if time.monotonic() > deadline_s:
                raise Leak(f"still busy: {busy}, in use: {used}, {_counts().tasks} tasks")
            await asyncio.sleep(0.02)


def _require(is_right: bool, words: str) -> None:
    if not is_right:
        raise Leak(words)


def _counts() -> Counts:
    statm = Path("/proc/self/statm").read_text()
    return Counts(
        tasks=len(asyncio.all_tasks()),
        descriptors=len(os.listdir("/proc/self/fd")),
        threads=threading.active_count(),
        rss_bytes=int(statm.split()[1]) * os.sysconf("SC_PAGE_SIZE"),
    )


@asynccontextmanager
async def soaking(
    model: Path, *, seed: int, agents: int, store: StoreDirectory | None, storage: Any = None
) -> AsyncGenerator[Soak]:
    """A server with agents that do not work yet."""
    tokenizer: Any = AutoTokenizer.from_pretrained(str(model))
    engine = LeanEngine(
        context_tokens=LIMITS.context_tokens,
        device_pages=1024,
        host_blocks=30_000,
        chunk_tokens=256,
        storage=storage,
    )
    tongue = engine.speak = WatchingTongue(tokenizer)
    engine.stop_tokens = frozenset({tokenizer.eos_token_id})
    service = assemble_service(
        engine,
        LIMITS,
        recipe_named("mean-k"),
        answer_format=ScriptedFormat(ChatFormat.offline(str(model)), Oracle(), tokenizer),
        model_path=model,
        name="simulated",
        window_tokens=1_000_000,
        store=store,
        identity=IDENTITY,
    )
    service._sessions._idle_s = 5.0
    service._sessions._kept_without_disk = 2 * agents
    options = FrontOptions(keys=KEYS, answering_max=max(2, agents // 2), ping_after_s=0.05)
    app = make_app(service, DIALECTS, identify, options)
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    async with service.running():
        serving = asyncio.create_task(
            serve(app, options, 0, ready=ready.set_result, stop=stop, grace_s=1)
        )
        port = int((await ready).rpartition(":")[2])
        try:
            yield Soak(service, engine, tongue, port, seed=seed, agents=agents)
        finally:
            stop.set()
            await serving
            await service.drain(lambda _: None)
            engine.plane.close()


async def soak(model: Path, work: Work, *, seed: int, agents: int, on_disk: bool) -> Found:
    if not on_disk:
        async with soaking(model, seed=seed, agents=agents, store=None) as running:
            return await running.run(work)
    folder = Path(tempfile.mkdtemp(prefix="kvws-soak-"))
    try:
        storage = PosixStorage(folder)
        with StoreDirectory.open(folder / "store", storage) as store:
            async with soaking(
                model, seed=seed, agents=agents, store=store, storage=storage
            ) as running:
                return await running.run(work)
    finally:
        shutil.rmtree(folder)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__.split("\n")[0])
    parser.add_argument("minutes", nargs="?", type=float, default=60.0)
    parser.add_argument("--agents", type=int, default=12)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--disk", action="store_true", help="with a disk tier")
    parser.add_argument("--growth-mib", type=float, default=4.0, help="a minute, at most")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    model = resolve_model("smollm2")
    assert isinstance(model, Path)
    found = asyncio.run(
        soak(
            model,
            Work(60 * options.minutes),
            seed=options.seed,
            agents=options.agents,
            on_disk=options.disk,
        )
    )
    print("\n".join(found.lines()))
    grows = found.rss_growth_bytes_per_minute > options.growth_mib * (1 << 20)
    if grows:
        print("memory grows", file=sys.stderr)
    return int(grows)


if __name__ == "__main__":
    sys.exit(main())
