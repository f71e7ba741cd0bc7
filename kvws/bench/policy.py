"""What it costs to decide which block to give up, beside two ways to keep an LRU order.

Every method runs the same trace over a full cache: in a step, retrieved blocks are touched, then
newcomers are admitted and as many blocks given up. Retrievals are spread over all blocks alike and
retrieve each twice on average, so that work put off by the touches comes due in the picks.
"""

from __future__ import annotations

import random
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from rich.table import Table

from kvws.tiers.policy import EvictionPolicy

TOUCHES_PER_STEP = 256
NEWCOMERS_PER_STEP = 32
LINEAR_STEPS = 4
LINEAR_LIMIT_BLOCKS = 100_000


@dataclass(frozen=True)
class PolicyCost:
    """One method at one size.

    Attributes:
        method: its name.
        blocks: how many it holds.
        touch_us: microseconds for counting one retrieval.
        replace_us: microseconds for admitting one block and giving one up.
        slowest_step_ms: the longest step, all its touches and replacements together.
    """

    method: str
    blocks: int
    touch_us: float
    replace_us: float
    slowest_step_ms: float


def measure_policy(
    sizes: Sequence[int] = (10_000, 100_000, 1_000_000), *, seed: int = 0
) -> list[PolicyCost]:
    """Measure every method; the linear one only up to LINEAR_LIMIT_BLOCKS.

    Args:
        sizes: blocks held, each at least TOUCHES_PER_STEP.
        seed: of the retrievals.
    """
    costs: list[PolicyCost] = []
    for blocks in sizes:
        steps = 2 * blocks // TOUCHES_PER_STEP
        costs.append(_measure("policy", _Policy(), blocks, steps, seed))
        costs.append(_measure("LRU, ordered dict", _OrderedLru(), blocks, steps, seed))
        if blocks <= LINEAR_LIMIT_BLOCKS:
            costs.append(_measure("LRU, linear erase", _LinearLru(), blocks, LINEAR_STEPS, seed))
    return costs


def policy_table(costs: Sequence[PolicyCost]) -> Table:
    """The costs as a table, one row a method and size."""
    table = Table(box=None, header_style="bold")
    table.add_column("method")
    for name in ("blocks", "touch", "admit + pick", "slowest step"):
        table.add_column(name, justify="right")
    for cost in costs:
        table.add_row(
            cost.method,
            f"{cost.blocks:,}",
            f"{cost.touch_us:,.2f} µs",
            f"{cost.replace_us:,.2f} µs",
            f"{cost.slowest_step_ms:,.1f} ms",
        )
    return table


class _Cache(Protocol):
    def admit(self, block: int, now: int) -> None: ...

    def touch(self, block: int, now: int) -> None: ...

    def pick(self, count: int) -> list[int]: ...


def _measure(method: str, cache: _Cache, blocks: int, steps: int, seed: int) -> PolicyCost:
    rng = random.Random(seed)  # noqa: S311 (not for secrets)
    for block in range(blocks):
        cache.admit(block, 0)
    held = list(range(blocks))
    place = {block: block for block in held}
    touches: list[float] = []
    replacements: list[float] = []
    for step in range(1, steps + 1):
        retrieved = rng.sample(held, TOUCHES_PER_STEP)
        first = blocks + step * NEWCOMERS_PER_STEP
        newcomers = range(first, first + NEWCOMERS_PER_STEP)
        picked: list[int] = []

        def touch(now: int = step, retrieved: list[int] = retrieved) -> None:
            for block in retrieved:
                cache.touch(block, now)

        def replace(
            now: int = step, newcomers: range = newcomers, picked: list[int] = picked
        ) -> None:
            picked += cache.pick(len(newcomers))
            for block in newcomers:
                cache.admit(block, now)

        touches.append(_seconds(touch))
        replacements.append(_seconds(replace))
        for old, new in zip(picked, newcomers, strict=True):
            place[new] = place.pop(old)
            held[place[new]] = new
    return PolicyCost(
        method,
        blocks,
        touch_us=1e6 * sum(touches) / (steps * TOUCHES_PER_STEP),
        replace_us=1e6 * sum(replacements) / (steps * NEWCOMERS_PER_STEP),
        slowest_step_ms=1e3 * max(map(sum, zip(touches, replacements, strict=True))),
    )


def _seconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


class _Policy:
    def __init__(self) -> None:
        policy = EvictionPolicy[int](half_life_steps=64.0)
        self._admit = policy.admit
        self.touch = policy.touch
        self.pick = policy.pick

    def admit(self, block: int, now: int) -> None:
        self._admit(block, importance=0.0, now=now)


class _OrderedLru:
    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def admit(self, block: int, now: int) -> None:
        self._order[block] = None

    def touch(self, block: int, now: int) -> None:
        self._order.move_to_end(block)

    def pick(self, count: int) -> list[int]:
        return [self._order.popitem(last=False)[0] for _ in range(count)]


class _LinearLru:
    def __init__(self) -> None:
        self._order: list[int] = []

    def admit(self, block: int, now: int) -> None:
        self._order.append(block)

    def touch(self, block: int, now: int) -> None:
        self._order.remove(block)
        self._order.append(block)

    def pick(self, count: int) -> list[int]:
        picked = self._order[:count]
        del self._order[:count]
        return picked
