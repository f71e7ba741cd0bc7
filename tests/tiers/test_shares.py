"""Whose block goes: a greedy session lives on its own share, an idle one on what is left over."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch

from kvws.blocks.table import BlockId, Residency
from kvws.errors import HostTierFull
from kvws.tiers.geometry import PayloadGeometry
from kvws.tiers.host import HostTier
from kvws.tiers.policy import EvictionPolicy
from kvws.tiers.repository import YOUNG_SELECTIONS, Repository
from kvws.tiers.shares import ACTIVE_S, SharedOrder, Shares

CAPACITY = 40
GEOMETRY = PayloadGeometry(layers=1, kv_heads=1, head_dim=2, dtype=torch.float32)


@dataclass
class Tier:
    """A host tier above a disk that has every block, and sessions that use it."""

    stored: bool = True
    now_s: float = 0.0
    repository: Repository = field(init=False)
    _numbers: Counter[str] = field(default_factory=Counter[str])

    def __post_init__(self) -> None:
        host = HostTier(GEOMETRY, CAPACITY * GEOMETRY.slot_bytes)
        self.repository = Repository(host, clock_s=lambda: self.now_s)

    def write(self, workspace: str, count: int = 1) -> list[int]:
        """New blocks, one at a time; each is a step of its own."""
        new: list[int] = []
        for _ in range(count):
            (slot,) = self.repository.allocate(1, workspace)
            number = self._numbers[workspace]
            self._numbers[workspace] += 1
            entry = Residency(f"{workspace} {number}", slot, 0, stored=self.stored)
            self.repository.add((workspace, number), entry)
            self.repository.retrieve(workspace, [])
            self.repository.check_integrity([])
            new.append(number)
        return new

    def use(self, workspace: str, numbers: list[int]) -> None:
        """A step that wants blocks, wherever they are."""
        self.repository.retrieve(workspace, numbers)

    def on_host(self, workspace: str) -> list[int]:
        return [
            number
            for number in self.repository.table.blocks_of(workspace)
            if (entry := self.repository.table.find((workspace, number))) is not None
            and entry.slot is not None
        ]

    def grow_old(self) -> None:
        """What was written so far is no longer spared for its youth."""
        for _ in range(int(YOUNG_SELECTIONS) + 1):
            self.repository.retrieve("nobody", [])


def test_a_greedy_session_pushes_out_its_own_blocks_once_the_tier_is_full() -> None:
    tier = Tier()
    modest = tier.write("modest", 15)
    tier.write("greedy", 500)
    assert tier.on_host("modest") == modest, "it is within its share"
    assert len(tier.on_host("greedy")) == CAPACITY - 15


def test_without_shares_the_greedy_session_would_have_pushed_the_other_one_out() -> None:
    """The control: by value alone, what was not used for long goes."""
    order = SharedOrder(half_life_steps=4.0)
    for number in range(15):
        order.admit(("modest", number), importance=0.0, now=0.0)
    for number in range(25):
        order.admit(("greedy", number), importance=0.0, now=100.0)
    unlimited = {"modest": CAPACITY, "greedy": CAPACITY}
    assert {ws for ws, _ in order.pick(15, lambda _: True, unlimited)} == {"modest"}


def test_two_greedy_sessions_end_with_equal_shares_however_much_one_asks() -> None:
    tier = Tier()
    for _ in range(60):
        tier.write("often", 9)
        tier.write("seldom", 1)
    assert abs(len(tier.on_host("often")) - len(tier.on_host("seldom"))) <= YOUNG_SELECTIONS


def test_what_a_session_does_not_need_of_its_share_is_for_the_others() -> None:
    tier = Tier()
    tier.write("modest", 2)
    tier.write("greedy", 100)
    assert len(tier.on_host("greedy")) == CAPACITY - 2


def test_an_idle_session_gives_its_blocks_up_before_an_active_one() -> None:
    tier = Tier()
    tier.write("idle", 20)
    tier.now_s += ACTIVE_S + 1
    active = tier.write("active", CAPACITY)
    assert tier.on_host("active") == active
    assert tier.on_host("idle") == []


def test_a_session_is_active_as_long_as_its_steps_ask_for_blocks() -> None:
    tier = Tier()
    mine = tier.write("mine", 20)
    tier.now_s += ACTIVE_S + 1
    tier.use("mine", mine[:1])
    tier.now_s += ACTIVE_S - 1
    tier.write("other", 200)
    assert tier.on_host("mine") == mine


def test_an_idle_session_loses_nothing_while_there_is_room() -> None:
    tier = Tier()
    idle = tier.write("idle", 20)
    tier.now_s += 100 * ACTIVE_S
    tier.write("active", CAPACITY - 20)
    assert tier.on_host("idle") == idle


def test_of_one_session_the_least_valuable_blocks_go() -> None:
    tier = Tier()
    numbers = tier.write("mine", CAPACITY)
    tier.grow_old()
    for _ in range(3):
        tier.use("mine", numbers[:5])
    tier.write("mine", CAPACITY - 5)
    assert tier.on_host("mine")[:5] == numbers[:5]


def test_when_all_are_within_their_shares_the_least_valuable_block_goes_all_the_same() -> None:
    """Pages of open steps and blocks on their way up take slots as well."""
    tier = Tier()
    ours, theirs = tier.write("ours", 18), tier.write("theirs", 18)
    tier.grow_old()
    tier.use("theirs", theirs)
    tier.repository.allocate(8, "ours")  # 4 more than are free
    assert tier.on_host("ours") == ours[4:]
    assert tier.on_host("theirs") == theirs


def test_only_copies_are_not_given_up_for_a_share_while_the_disk_writes() -> None:
    tier = Tier(stored=False)
    tier.write("greedy", CAPACITY - 1)
    tier.grow_old()
    tier.stored = True
    tier.write("modest", 1)
    tier.grow_old()
    tier.repository.only_copies_may_go = lambda: False
    tier.repository.allocate(1, "third")
    assert tier.on_host("modest") == [], "its copy is safe on disk, though it is within its share"
    with pytest.raises(HostTierFull):
        tier.repository.allocate(1, "third")
    tier.repository.only_copies_may_go = lambda: True
    tier.repository.allocate(1, "third")
    assert tier.repository.lost_only_copies == 1


def test_what_an_open_step_wants_stays_whoever_holds_too_much() -> None:
    tier = Tier()
    greedy, modest = tier.write("greedy", 30), tier.write("modest", 10)
    tier.grow_old()
    tier.repository.is_wanted = lambda block: block[0] == "greedy"
    tier.repository.allocate(10, "third")
    assert tier.on_host("greedy") == greedy
    assert len(modest) == 10 and tier.on_host("modest") == []
    with pytest.raises(HostTierFull):
        tier.repository.allocate(1, "third")


def test_a_workspace_that_left_is_forgotten() -> None:
    tier = Tier()
    for number in tier.write("gone", 5):
        tier.repository.drop(("gone", number))
    assert dict(tier.repository._shares.held) == {}
    assert tier.repository._stored._by_workspace == {}
    tier.now_s += ACTIVE_S + 1
    tier.repository._shares.excess("another", 1)
    assert tier.repository._shares._asked_s == {}


def test_shares_divide_the_capacity_among_those_who_are_active_and_have_blocks() -> None:
    now_s = 0.0
    shares = Shares(12, clock_s=lambda: now_s)
    for workspace, blocks in (("a", 7), ("b", 3), ("idle", 2)):
        for _ in range(blocks):
            shares.enter(workspace)
    shares.ask("a")
    shares.ask("b")
    shares.ask("has none")
    assert shares.excess("a", 0) == {"a": 1, "idle": 2}
    assert shares.excess("b", 5) == {"a": 1, "b": 2, "idle": 2}
    assert shares.excess("b", 100)["b"] == 3, "no more than it has"
    assert shares.excess("newcomer", 4) == {"a": 3, "idle": 2}, "it is active at once"
    now_s = ACTIVE_S + 1
    shares.ask("a")
    assert shares.excess("a", 0) == {"b": 3, "idle": 2}


@pytest.mark.parametrize("seed", range(6))
def test_picks_are_those_of_one_order_of_all_blocks_within_the_limits(seed: int) -> None:
    """Beside a single policy for all blocks, asked again and again."""
    rng = random.Random(seed)
    order, single = SharedOrder(half_life_steps=8.0), EvictionPolicy[BlockId](8.0)
    held: list[BlockId] = []
    for now in range(300):
        block = (rng.choice("abcd"), now)
        importance = float(rng.randrange(3))
        for each in (order, single):
            each.admit(block, importance=importance, now=now)
        held.append(block)
        for touched in rng.sample(held, min(5, len(held))):
            order.touch(touched, now)
            single.touch(touched, now)
        if now % 7 == 0:
            removed = held.pop(rng.randrange(len(held)))
            order.remove(removed)
            single.remove(removed)
        if now % 5 == 0:
            spared = set(rng.sample(held, len(held) // 3))
            left = Counter({ws: rng.randrange(4) for ws in "abc"})
            limits = {ws: count for ws, count in left.items() if count}

            def within(block: BlockId, left: Counter[str] = left) -> bool:
                return left[block[0]] > 0

            expected: list[BlockId] = []
            while len(expected) < 6:
                least = single.pick(
                    1, lambda block, spared=spared: block not in spared and within(block)
                )
                if not least:
                    break
                left[least[0][0]] -= 1
                expected += least
            picked = order.pick(6, lambda block, spared=spared: block not in spared, limits)
            assert picked == expected
            held = [block for block in held if block not in expected]
        assert all(block in order for block in held)
