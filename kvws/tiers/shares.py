"""Which workspace gives blocks of the host tier up.

A workspace is *active* while a step asked for its blocks within the last `ACTIVE_S`. The host
tier is shared out: an active workspace's *share* is the capacity over the number of active ones,
an idle one has none. A block of a workspace within its share is only given up when no other block
may go instead. So an active session keeps as much as it would have if all active ones were
equally greedy, and a share that its workspace does not need is for the others to use. Among the
workspaces beyond their shares, the least valuable block goes, whosever it is.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial

from kvws.blocks.table import BlockId
from kvws.tiers.policy import EvictionPolicy, History, Picking, Rank

ACTIVE_S = 600.0
"""Longer than an agent's tools run, shorter than a person is away."""


class Shares:
    """How many blocks each workspace has in the host tier, and how many are too many."""

    def __init__(
        self, capacity_blocks: int, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._capacity_blocks = capacity_blocks
        self._clock_s = clock_s
        self._held: Counter[str] = Counter()
        self._asked_s: dict[str, float] = {}
        """When a step last asked for blocks of a workspace; of active ones, and of some others."""

    @property
    def held(self) -> Mapping[str, int]:
        """Blocks by workspace, of those that have any."""
        return self._held

    def ask(self, workspace: str) -> None:
        """A step of a workspace asks for blocks or has new ones."""
        self._asked_s[workspace] = self._clock_s()

    def enter(self, workspace: str) -> None:
        """A block of a workspace has a host copy from now on."""
        self._held[workspace] += 1

    def leave(self, workspace: str) -> None:
        """A block of a workspace has none any more."""
        self._held[workspace] -= 1
        if not self._held[workspace]:
            del self._held[workspace]

    def excess(self, workspace: str, more: int) -> dict[str, int]:
        """Blocks beyond the share, of every workspace that has any: O(workspaces).

        Args:
            workspace: it will have so many `more`.
        """
        since_s = self._clock_s() - ACTIVE_S
        self._asked_s = {name: at for name, at in self._asked_s.items() if at >= since_s}
        active = (self._held.keys() & self._asked_s.keys()) | {workspace}
        share = self._capacity_blocks // len(active)
        excess: dict[str, int] = {}
        for name, held in self._held.items():
            due = held - share if name in active else held
            due += more if name == workspace else 0
            if due > 0:
                excess[name] = min(due, held)
        return excess


class SharedOrder:
    """The eviction order of the blocks of many workspaces. The owner holds a lock."""

    def __init__(self, half_life_steps: float) -> None:
        """`half_life_steps`: as for `EvictionPolicy`."""
        self._half_life_steps = half_life_steps
        self._serials = itertools.count()
        self._by_workspace: dict[str, EvictionPolicy[int]] = {}

    def __contains__(self, block: BlockId) -> bool:
        workspace, number = block
        policy = self._by_workspace.get(workspace)
        return policy is not None and number in policy

    def admit(
        self, block: BlockId, *, importance: float, now: float, history: History | None = None
    ) -> None:
        """As `EvictionPolicy.admit`."""
        workspace, number = block
        policy = self._by_workspace.get(workspace)
        if policy is None:
            policy = EvictionPolicy[int](self._half_life_steps, self._serials)
            self._by_workspace[workspace] = policy
        policy.admit(number, importance=importance, now=now, history=history)

    def touch(self, block: BlockId, now: float) -> None:
        """As `EvictionPolicy.touch`."""
        workspace, number = block
        self._by_workspace[workspace].touch(number, now)

    def remove(self, block: BlockId) -> History:
        """As `EvictionPolicy.remove`."""
        workspace, number = block
        history = self._by_workspace[workspace].remove(number)
        self._let_go_if_empty(workspace)
        return history

    def pick(
        self, count: int, may_go: Callable[[BlockId], bool], at_most: Mapping[str, int]
    ) -> list[BlockId]:
        """Take out the `count` blocks to give up, the least valuable first: O(workspaces), and
        O(log n) for each.

        Args:
            may_go: as for `EvictionPolicy.pick`.
            at_most: so many of each workspace; none of those that it does not name.
        """
        picked: list[BlockId] = []
        left = dict(at_most)
        with ExitStack() as on_leaving:
            pickings: dict[str, Picking[int]] = {}
            ranked: list[tuple[Rank, str]] = []
            for workspace in self._by_workspace.keys() & left.keys():
                of_workspace = self._by_workspace[workspace].picking(
                    partial(_may_go, may_go, workspace)
                )
                pickings[workspace] = picking = on_leaving.enter_context(of_workspace)
                rank = picking.next_rank()
                if rank is not None:
                    ranked.append((rank, workspace))
            heapq.heapify(ranked)
            while ranked and len(picked) < count:
                _, workspace = ranked[0]
                picked.append((workspace, pickings[workspace].take()))
                left[workspace] -= 1
                rank = pickings[workspace].next_rank() if left[workspace] else None
                if rank is None:
                    heapq.heappop(ranked)
                else:
                    heapq.heapreplace(ranked, (rank, workspace))
        for workspace in {workspace for workspace, _ in picked}:
            self._let_go_if_empty(workspace)
        return picked

    def _let_go_if_empty(self, workspace: str) -> None:
        if not len(self._by_workspace[workspace]):
            del self._by_workspace[workspace]


def _may_go(may_go: Callable[[BlockId], bool], workspace: str, number: int) -> bool:
    return may_go((workspace, number))
