"""A model whose every answer is a function of what it was asked last, over an engine that watches
what it is shown.

Each request ends with a marker of its own, `[[session.thread:number]]`. The answer is made from
the marker alone, so that a client knows it beforehand; and a prompt in which a marker of another
session appears is a leak.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvws.chat.call import ModelCall
from kvws.engine.protocol import GenerateRequest
from tests.e2e.scripts import Turn
from tests.step.simulated_engine import SimulatedEngine

TOOLS = ("Read", "Run")
_MARKER = re.compile(r"\[\[([a-z0-9]+)\.([a-z0-9]+):(\d+)\]\]")
_PROSE = """the file has a line that reads a value and writes it to the store before the test is
run again so we look at the next function and keep what it returns in a table of its own"""
_WORDS = _PROSE.split()
_SAID_TOKENS = 24
"""So many tokens tell where in its script a model is."""


def marker(session: str, thread: str, number: int) -> str:
    return f"[[{session}.{thread}:{number}]]"


def session_of(workspace: str) -> str:
    """The session that a workspace is named after."""
    return workspace.partition("-")[0]


def prose(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(_WORDS, k=words))


def answer_to(asked: str, *, offers_tools: bool) -> Turn:
    """What the model says to a marker."""
    rng = random.Random(f"{asked}{offers_tools}")
    words = rng.choice((4, 8, 12, 30, 60)) if rng.random() < 0.97 else 600
    text = f"As to {asked.strip('[]')}: {prose(rng, words)}."
    if not offers_tools or rng.random() < 0.3:
        return Turn(text)
    calls = tuple(
        (rng.choice(TOOLS), {"path": f"src/{rng.randrange(1000)}.py", "what": prose(rng, 6)})
        for _ in range(rng.choice((1, 1, 1, 2)))
    )
    return Turn(text if rng.random() < 0.7 else "", calls)


class Oracle:
    """Implements `tests.e2e.front.Speaks`."""

    def next_turn(self, call: ModelCall) -> Turn:
        for message in reversed(call.messages):
            found = list(_MARKER.finditer(message.content))
            if found and message.role != "assistant":
                return answer_to(found[-1][0], offers_tools=bool(call.tools))
        return Turn("Nothing was asked.")


@dataclass
class Seen:
    """What requests of the engine were shown.

    Attributes:
        own: markers of the session that asked.
        foreign: descriptions of those of other sessions.
    """

    own: int
    foreign: list[str]


class WatchingTongue:
    """Speaks the script, and looks at every prompt first. A marker that a block cuts in two is not
    seen, and two halves of different ones are not taken for one.

    An answer may take several requests, and a request may be made twice: where the script goes on
    is read from the end of the prompt, which need not show all that was said.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._end: int = tokenizer.eos_token_id
        self._spoken: dict[str, int] = {}
        self.seen = Seen(0, [])

    def __call__(self, request: GenerateRequest) -> int:
        script: tuple[int, ...] = request.sampling["script"]
        at = self._spoken.get(request.rid)
        if at is None:
            self._look_at(request)
            at = _said_tokens(request.token_ids, script)
        self._spoken[request.rid] = at + 1
        return script[at] if at < len(script) else self._end

    def _look_at(self, request: GenerateRequest) -> None:
        session = session_of(request.namespace.split("/")[1])
        ids = list(request.token_ids)
        pages = [ids[start : start + 32] for start in range(0, len(ids), 32)]
        for text in self._tokenizer.batch_decode(pages):
            for found in _MARKER.finditer(text):
                if found[1] == session:
                    self.seen.own += 1
                else:
                    self.seen.foreign.append(f"{session} was shown {found[0]}")

    def forget(self) -> None:
        """What requests that have ended were told."""
        self._spoken.clear()


def _said_tokens(prompt: Sequence[int], script: tuple[int, ...]) -> int:
    """Tokens of the script that the model has said before the prompt's end."""
    end = tuple(prompt[-_SAID_TOKENS:])
    for said in range(len(script), 0, -1):
        shown = script[max(0, said - len(end)) : said]
        if end[len(end) - len(shown) :] == shown:
            return said
    return 0


class LeanEngine(SimulatedEngine):
    """Forgets what it remembers for tests' sake only, so that what is left growing is a leak."""

    def forget_the_past(self, sessions: set[str]) -> None:
        """Nobody asks, and only these sessions will ask again. Pages outside the tree are over."""
        self.requests.clear()
        self.answered.clear()
        self._workspace_of.clear()
        self._computed = {h: held for h, held in self._computed.items() if h in self._tree}
        self._truth = {k: v for k, v in self._truth.items() if session_of(k[0]) in sessions}
        self._versions = {k: v for k, v in self._versions.items() if session_of(k[0]) in sessions}
