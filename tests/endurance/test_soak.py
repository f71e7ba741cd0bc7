"""Agents for some seconds; `scripts/soak` runs them for hours. And: leaks are noticed."""

from __future__ import annotations

import asyncio
import os
import random
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvws.http.admission import Admission
from kvws.http.calls import ModelCalls
from kvws.serving import sessions
from kvws.serving.turn import Turn
from kvws.session.workspace import Workspace
from tests.endurance.agents import Agent, WrongAnswer
from tests.endurance.model import answer_to, marker
from tests.endurance.soak import Leak, Work, soak
from tests.endurance.speech import Said

LITTLE = Work(seconds=60, steps=60, steps_between_stops=20)
SEED = int(os.environ.get("KVWS_SEED", "5"))


@pytest.mark.parametrize("on_disk", [False, True])
def test_nothing_leaks_and_every_answer_is_right(on_disk: bool, smollm2: Path) -> None:
    work = Work(seconds=120, steps=100, steps_between_stops=50)
    found = asyncio.run(soak(smollm2, work, seed=SEED, agents=8, on_disk=on_disk))
    print("\n".join(found.lines()))
    assert found.tally.steps >= 100 and found.own_markers > 100
    assert len(found.tally.counts) >= 8 and len(found.samples) == 4


def _leaked(monkeypatch: pytest.MonkeyPatch, what: str, keep: list[Any]) -> None:
    """Plant a leak of one request in ten or so."""
    rng = random.Random(3)
    if what == "slot":
        really = Admission.slot

        @asynccontextmanager
        async def slot(self: Admission) -> AsyncGenerator[None]:
            async with really(self):
                yield
            self.answering += rng.random() < 0.1

        monkeypatch.setattr(Admission, "slot", slot)
    elif what == "task":
        really_read = ModelCalls._read

        async def read(self: ModelCalls, exchange: Any) -> Any:
            keep.append(asyncio.create_task(asyncio.sleep(3600)))
            return await really_read(self, exchange)

        monkeypatch.setattr(ModelCalls, "_read", read)
    elif what == "descriptor":
        really_learn = Turn._learn

        def learn(self: Turn, *arguments: Any) -> None:
            keep.append(socket.socket())
            really_learn(self, *arguments)

        monkeypatch.setattr(Turn, "_learn", learn)
    else:
        assert what == "side call"
        monkeypatch.setattr(Agent, "_work", Agent._ask_aside)
        monkeypatch.setattr(Workspace, "forget_thread", lambda *_: None)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("slot", "still busy"),
        ("task", "tasks"),
        ("descriptor", "descriptors"),
        ("side call", "keeps"),
    ],
)
def test_a_leak_is_noticed(
    what: str, words: str, smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control."""
    keep: list[Any] = []
    monkeypatch.setattr("tests.endurance.soak._SETTLE_S", 0.5)
    _leaked(monkeypatch, what, keep)
    with pytest.raises(Leak, match=words):
        asyncio.run(soak(smollm2, LITTLE, seed=SEED, agents=6, on_disk=False))
    for held in keep:
        if isinstance(held, socket.socket):
            held.close()


def test_sessions_that_are_mixed_up_are_noticed(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: all agents share one session, as if ids were lost."""
    monkeypatch.setattr(sessions, "workspace_name", lambda caller, salt: "mixed-up")
    with pytest.raises((Leak, BaseExceptionGroup)) as noticed:
        asyncio.run(soak(smollm2, LITTLE, seed=SEED, agents=6, on_disk=False))
    assert "was shown" in str(noticed.value) or noticed.group_contains(WrongAnswer)


def test_an_answer_is_known_from_its_marker() -> None:
    asked = marker("a1n2", "main", 7)
    said = answer_to(asked, offers_tools=True)
    assert said == answer_to(asked, offers_tools=True)
    assert said != answer_to(marker("a1n2", "main", 8), offers_tools=True)
    heard = Said(said.text + "\n", tuple(("id", *call) for call in said.calls))
    assert heard.is_turn(said) and not Said("else").is_turn(said)
