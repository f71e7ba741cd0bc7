"""Giving blocks up: least valuable first, whatever came between, and a scan does not matter."""

from __future__ import annotations

import math
import os
import random
from collections import OrderedDict
from collections.abc import Set
from dataclasses import dataclass, field

import pytest

from kvws.tiers.policy import EvictionPolicy, History

SEEDS = [int(os.environ["KVWS_SEED"])] if "KVWS_SEED" in os.environ else range(8)
LATE = 10**9


def policy_of(*importances: float, now: float = 0.0) -> EvictionPolicy[int]:
    """Blocks 0, 1, … admitted in this order at one step."""
    policy = EvictionPolicy[int](half_life_steps=4.0)
    for block, importance in enumerate(importances):
        policy.admit(block, importance=importance, now=now)
    return policy


@pytest.mark.parametrize("start", [0, LATE])
def test_a_retrieval_counts_half_after_a_half_life(start: int) -> None:
    policy = policy_of(1.0, now=start)
    assert policy.score(0, start) == 1.0
    assert policy.score(0, start + 4) == pytest.approx(0.5)
    policy.touch(0, start + 4)
    policy.touch(0, start + 4)
    assert policy.score(0, start + 4) == pytest.approx(2.5, rel=1e-6)
    assert policy.score(0, start + 12) == pytest.approx(2.5 / 4, rel=1e-6)


def test_often_beats_just_now_within_a_half_life_and_not_beyond() -> None:
    for steps_later, first in ((4, 1), (40, 0)):
        policy = policy_of(0.0)
        for step in (1, 2, 3):
            policy.touch(0, step)
        policy.admit(1, importance=9.0, now=3 + steps_later)
        assert policy.pick(1) == [first]


def test_equals_go_by_key_norm_then_by_age() -> None:
    assert policy_of(3.0, 1.0, 2.0, 1.0).pick(4) == [1, 3, 2, 0]


def test_equals_stay_equals_after_the_same_retrievals() -> None:
    policy = policy_of(3.0, 1.0, 2.0, 1.0)
    for step in (1, 5, LATE):
        for block in (2, 0, 3, 1):
            policy.touch(block, step)
    assert policy.pick(4) == [1, 3, 2, 0]


def test_what_is_picked_is_no_longer_held() -> None:
    policy = policy_of(1.0, 2.0)
    assert policy.pick(0) == []
    assert policy.pick(1) == [0]
    assert 0 not in policy and 1 in policy and len(policy) == 1
    assert policy.pick(5) == [1] and policy.pick(5) == []
    policy.check_integrity()


def test_a_block_that_may_not_go_keeps_its_place() -> None:
    policy = policy_of(1.0, 2.0, 3.0, 4.0)
    policy.touch(0, 1)
    asked: list[int] = []

    def may_go(block: int) -> bool:
        asked.append(block)
        return block not in (1, 0)

    assert policy.pick(1, may_go) == [2] and asked == [1, 2]
    assert policy.pick(5, may_go) == [3]
    policy.check_integrity()
    assert policy.pick(5, may_go) == [] and policy.pick(5) == [1, 0]


def test_a_removed_block_is_never_picked() -> None:
    policy = policy_of(1.0, 2.0, 3.0)
    policy.remove(0)
    assert 0 not in policy and policy.pick(3) == [1, 2]


def test_a_block_put_back_with_its_history_goes_on_as_if_it_had_stayed() -> None:
    policy = policy_of(1.0, 1.0, 1.0)
    policy.touch(1, 2)
    before = policy.score(1, 3)
    for block in (0, 1):
        history = policy.remove(block)
        policy.admit(block, importance=1.0, now=3, history=history)
    assert policy.score(1, 3) == before
    assert policy.pick(3) == [0, 2, 1], "0 lost its age"


def test_a_block_put_back_without_history_is_new() -> None:
    policy = policy_of(1.0, 1.0, 1.0)
    for _ in range(5):
        policy.touch(1, 0)
    for block in (0, 1):
        policy.remove(block)
        policy.admit(block, importance=1.0, now=0)
    assert policy.score(1, 0) == 1.0
    assert policy.pick(3) == [2, 0, 1]


def test_names_need_not_be_comparable() -> None:
    policy = EvictionPolicy[object](half_life_steps=4.0)
    names = [("a", 1), None, 7, "a"]
    for name in names:
        policy.admit(name, importance=0.0, now=0)
    policy.admit(7, importance=0.0, now=0, history=policy.remove(7))
    assert policy.pick(4) == names


def test_a_block_is_admitted_once() -> None:
    with pytest.raises(AssertionError, match="admitted twice"):
        policy_of(1.0).admit(0, importance=1.0, now=0)


@dataclass
class Record:
    importance: float
    serial: int
    retrievals: list[int] = field(default_factory=list[int])


class Oracle:
    """Every retrieval of every block; values are summed anew at each question."""

    def __init__(self, half_life: float, tolerance: float) -> None:
        self.half_life = half_life
        self.tolerance = tolerance
        self.held: dict[int, Record] = {}
        self.out: dict[int, tuple[Record, History]] = {}
        self.serial = 0

    def record(self, importance: float, now: int) -> Record:
        self.serial += 1
        return Record(importance, self.serial, [now])

    def value(self, block: int, now: int) -> float:
        retrievals = self.held[block].retrievals
        return math.fsum(2.0 ** ((step - now) / self.half_life) for step in retrievals)

    def accept(self, block: int, now: int, spared: Set[int] = frozenset()) -> None:
        """`block` may go first: nothing is worth less, and its equals are larger or younger."""
        chosen = self.held[block]
        candidates = self.held.keys() - spared
        least = min(self.value(other, now) for other in candidates)
        assert self.value(block, now) <= least * (1 + self.tolerance), "not the least valuable"
        rank = min(
            (record.importance, record.serial)
            for record in map(self.held.__getitem__, candidates)
            if record.retrievals == chosen.retrievals
        )
        assert (chosen.importance, chosen.serial) == rank, "equals are out of order"
        del self.held[block]


def compare_with_oracle(
    policy: EvictionPolicy[int], half_life: float, start: int, seed: int, operations: int = 600
) -> None:
    rng = random.Random(seed)
    oracle = Oracle(half_life, 1e-12 if start == 0 else 1e-6)
    now = start
    for _ in range(operations):
        now += rng.choice((0, 0, 1, 3))
        held = sorted(oracle.held)
        moves = ("admit", "touch", "remove", "put back", "pick")
        move = rng.choices(moves, weights=(3, 8, 2, 2, 4))[0]
        if move == "admit":
            outside = sorted(set(range(60)) - set(held) - set(oracle.out))
            for block in rng.sample(outside, min(rng.randrange(1, 5), len(outside))):
                importance = float(rng.randrange(3))
                policy.admit(block, importance=importance, now=now)
                oracle.held[block] = oracle.record(importance, now)
        elif move == "put back":
            for block, (record, history) in oracle.out.items():
                kept = rng.random() < 0.7
                policy.admit(
                    block,
                    importance=record.importance,
                    now=now,
                    history=history if kept else None,
                )
                oracle.held[block] = record if kept else oracle.record(record.importance, now)
            oracle.out.clear()
        elif move == "pick":
            count, spared = rng.randrange(4), set(rng.sample(held, len(held) // 4))
            picked = policy.pick(count, lambda block, spared=spared: block not in spared)
            assert len(picked) == min(count, len(held) - len(spared))
            for block in picked:
                oracle.accept(block, now, spared)
        elif move == "touch":
            for block in rng.sample(held, min(rng.randrange(1, 9), len(held))):
                policy.touch(block, now)
                oracle.held[block].retrievals.append(now)
        elif held:
            block = rng.choice(held)
            oracle.out[block] = (oracle.held.pop(block), policy.remove(block))
        policy.check_integrity()
        assert len(policy) == len(oracle.held) and all(block in policy for block in oracle.held)
    for block in oracle.held:
        expected = oracle.value(block, now)
        assert policy.score(block, now) == pytest.approx(expected, rel=oracle.tolerance)
    while oracle.held:
        oracle.accept(policy.pick(1)[0], now)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("half_life", [2.0, 17.5])
@pytest.mark.parametrize("start", [0, LATE])
def test_the_order_is_that_of_the_definition(half_life: float, start: int, seed: int) -> None:
    """KVWS_SEED=<n> repeats one seed."""
    print(f"seed {seed}")
    compare_with_oracle(EvictionPolicy[int](half_life), half_life, start, seed)


class ForgetsCounts(EvictionPolicy[int]):
    """A planted fault: only the last retrieval counts."""

    def touch(self, block: int, now: float) -> None:
        resident = self._residents[block]
        resident.weight_log2 = max(resident.weight_log2, now / 17.5)


class ForgetsNorms(EvictionPolicy[int]):
    """A planted fault: ties go by age alone."""

    def admit(
        self, block: int, *, importance: float, now: float, history: History | None = None
    ) -> None:
        super().admit(block, importance=0.0, now=now, history=history)


class IgnoresRetrievals(EvictionPolicy[int]):
    """A planted fault: blocks go by admission."""

    def touch(self, block: int, now: float) -> None:
        pass


@pytest.mark.parametrize("fault", [ForgetsCounts, ForgetsNorms, IgnoresRetrievals])
def test_the_oracle_catches_a_planted_fault(fault: type[EvictionPolicy[int]]) -> None:
    with pytest.raises(AssertionError, match=r"not the least valuable|out of order"):
        compare_with_oracle(fault(17.5), 17.5, 0, seed=0)


@pytest.mark.parametrize("fault", ["garbage miscounted", "promises too much", "entry lost"])
def test_integrity_catches_a_planted_fault(fault: str) -> None:
    policy = policy_of(1.0, 2.0)
    if fault == "garbage miscounted":
        policy._garbage += 1
    elif fault == "promises too much":
        policy._residents[0].weight_log2 -= 1
    else:
        policy._heap.pop()
    with pytest.raises(AssertionError):
        policy.check_integrity()


@pytest.mark.parametrize("churn", ["touch", "pin and unpin", "admit and pick"])
def test_garbage_stays_within_the_number_of_blocks(churn: str) -> None:
    policy = policy_of(*[0.0] * 100)
    rng = random.Random(5)
    for now in range(20_000):
        if churn == "touch":
            policy.touch(rng.randrange(100), now)
        elif churn == "pin and unpin":
            block = rng.randrange(100)
            policy.touch(block, now)
            policy.admit(block, importance=0.0, now=now, history=policy.remove(block))
        else:
            policy.touch(rng.choice(list(policy._residents)), now)
            policy.admit(100 + now, importance=0.0, now=now)
            policy.pick(1)
        assert len(policy._heap) <= 2 * 100 + 1
    policy.check_integrity()
    assert len(policy) == 100


def misses_of_hot_blocks(cache: Cache, hot: range, scan_blocks: int) -> int:
    """20 steps that each retrieve the hot blocks and admit a scan that is never retrieved."""
    for block in hot:
        cache.retrieve(block, 0)
    misses = 0
    for step in range(1, 21):
        misses += sum(cache.retrieve(block, step) for block in hot)
        for number in range(scan_blocks):
            cache.retrieve(1000 * step + number, step)
    return misses


class Cache:
    """100 blocks under the policy."""

    def __init__(self) -> None:
        self.policy = EvictionPolicy[int](half_life_steps=8.0)

    def retrieve(self, block: int, now: int) -> bool:
        """Whether the block had to be fetched."""
        if block in self.policy:
            self.policy.touch(block, now)
            return False
        if len(self.policy) == 100:
            self.policy.pick(1)
        self.policy.admit(block, importance=0.0, now=now)
        return True


class RecencyCache(Cache):
    """The control: 100 blocks under LRU."""

    def __init__(self) -> None:
        self.order: OrderedDict[int, None] = OrderedDict()

    def retrieve(self, block: int, now: int) -> bool:
        missed = block not in self.order
        if missed and len(self.order) == 100:
            self.order.popitem(last=False)
        self.order[block] = None
        self.order.move_to_end(block)
        return missed


def test_a_scan_does_not_push_out_blocks_that_every_step_retrieves() -> None:
    assert misses_of_hot_blocks(Cache(), range(20), scan_blocks=300) == 0
    assert misses_of_hot_blocks(RecencyCache(), range(20), scan_blocks=300) == 19 * 20


def test_blocks_that_were_hot_once_give_way_in_the_end() -> None:
    cache = Cache()
    misses_of_hot_blocks(cache, range(20), scan_blocks=0)
    for step in range(21, 21 + 8 * 6):
        for number in range(20):
            cache.retrieve(1000 * step + number, step)
    assert not any(block in cache.policy for block in range(20))
