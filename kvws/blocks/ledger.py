"""The steps in flight on one rank: which page hashes they promised, and which pages they made.

The two roles never mix. A *promised* page is a source: it is filled from finished blocks, and
bytes that the engine computes for it are never the truth of a block. A *staged* page is a sink:
it was computed by the step and becomes a block only when the step is closed with a name for it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from kvws.blocks.page import PageSource
from kvws.blocks.table import BlockId


class Promise(NamedTuple):
    """What fills a view page. Its hash covers everything before it, so the index is part of it."""

    workspace: str
    view_index: int
    source: PageSource


@dataclass
class OpenStep:
    """One agent step between `open` and `close`.

    Attributes:
        workspace: whose blocks its pages are made of.
        wanted: blocks of every view that the step asked for, promised or not yet.
        promised: hashes of the pages of every view that the step has committed.
        staged: page hash → host slot, for the pages that the step computed.
        refused_pages: offers of pages that the host tier had no room for.
        loaded_pages: view pages filled for the step so far.
        stage_in_ms: time spent filling them.
    """

    workspace: str
    wanted: set[int] = field(default_factory=set[int])
    promised: set[str] = field(default_factory=set[str])
    staged: dict[str, int] = field(default_factory=dict[str, int])
    refused_pages: int = 0
    loaded_pages: int = 0
    stage_in_ms: float = 0.0


class StepLedger:
    """All open steps. Not thread-safe: the owner holds a lock."""

    def __init__(self) -> None:
        self._steps: dict[str, OpenStep] = {}
        self._holders: Counter[str] = Counter()
        self._promises: dict[str, Promise] = {}

    def open(self, step: str, workspace: str) -> None:
        assert step not in self._steps, f"step {step} is already open"
        self._steps[step] = OpenStep(workspace)

    def find(self, step: str | None) -> OpenStep | None:
        return self._steps.get(step) if step is not None else None

    def promise(self, step: str, page_hash: str, view_index: int, source: PageSource) -> None:
        """Commit a view page for as long as the step is open."""
        entry = self._steps[step]
        if page_hash not in entry.promised:
            entry.promised.add(page_hash)
            self._holders[page_hash] += 1
        self._promises[page_hash] = Promise(entry.workspace, view_index, source)

    def promise_of(self, page_hash: str) -> Promise | None:
        """The promise of an open step for this page, if there is one."""
        return self._promises.get(page_hash)

    def close(self, step: str) -> OpenStep | None:
        """End a step: its promises lapse. The caller disposes of what it staged."""
        entry = self._steps.pop(step, None)
        if entry is None:
            return None
        for page_hash in entry.promised:
            self._holders[page_hash] -= 1
            if self._holders[page_hash] == 0:
                del self._holders[page_hash], self._promises[page_hash]
        return entry

    def wants(self, block: BlockId) -> bool:
        """Whether an open step asked for a block."""
        workspace, number = block
        return any(
            entry.workspace == workspace and number in entry.wanted
            for entry in self._steps.values()
        )

    @property
    def open_steps(self) -> int:
        return len(self._steps)

    def staged_slots(self) -> list[int]:
        return [slot for entry in self._steps.values() for slot in entry.staged.values()]

    def check_integrity(self) -> None:
        """Promises counted = promises held by open steps, and none other is kept."""
        held = Counter(page for entry in self._steps.values() for page in entry.promised)
        assert held == self._holders, "a promise outlived its step"
        assert self._promises.keys() == held.keys(), "a promise is kept that no step holds"
