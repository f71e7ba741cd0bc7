"""Steps in flight: a promise holds as long as any step that made it is open."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvws.blocks.ledger import Promise, StepLedger
from kvws.blocks.page import whole_block


@pytest.fixture
def ledger() -> StepLedger:
    ledger = StepLedger()
    ledger.open("s", "a")
    ledger.open("t", "a")
    return ledger


def test_a_promise_says_what_fills_the_page(ledger: StepLedger) -> None:
    ledger.promise("s", "h", 3, whole_block(9))
    assert ledger.promise_of("h") == Promise("a", 3, whole_block(9))
    assert ledger.promise_of("other") is None


def test_a_promise_of_overlapping_steps_lapses_with_the_last(ledger: StepLedger) -> None:
    ledger.promise("s", "h", 0, whole_block(0))
    ledger.promise("s", "h", 0, whole_block(0))
    ledger.promise("t", "h", 0, whole_block(0))
    ledger.close("s")
    assert ledger.promise_of("h") is not None
    ledger.close("t")
    assert ledger.promise_of("h") is None
    ledger.check_integrity()


def test_a_step_is_opened_once(ledger: StepLedger) -> None:
    with pytest.raises(AssertionError, match="already open"):
        ledger.open("s", "a")


def test_a_closed_step_is_unknown(ledger: StepLedger) -> None:
    assert ledger.close("s") is not None
    assert ledger.find("s") is None and ledger.close("s") is None
    assert ledger.find(None) is None
    assert ledger.open_steps == 1


def test_staged_slots_are_those_of_all_open_steps(ledger: StepLedger) -> None:
    for step, slot in (("s", 4), ("t", 5)):
        entry = ledger.find(step)
        assert entry is not None
        entry.staged[f"page {slot}"] = slot
    assert sorted(ledger.staged_slots()) == [4, 5]
    closed = ledger.close("s")
    assert closed is not None and closed.staged == {"page 4": 4}
    assert ledger.staged_slots() == [5]


@pytest.mark.parametrize("fault", ["promise without holder", "holder without step"])
def test_integrity_catches_a_planted_fault(ledger: StepLedger, fault: str) -> None:
    ledger.promise("s", "h", 0, whole_block(0))
    if fault == "promise without holder":
        ledger._promises["i"] = Promise("a", 0, whole_block(0))
    else:
        ledger._holders["h"] += 1
    with pytest.raises(AssertionError):
        ledger.check_integrity()


class OverlappingSteps(RuleBasedStateMachine):
    """Against a model: a page is promised when an open step promised it."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = StepLedger()
        self.model: dict[str, set[str]] = {}

    @rule(step=st.sampled_from("stuv"))
    def open(self, step: str) -> None:
        if step not in self.model:
            self.ledger.open(step, "a")
            self.model[step] = set()

    @precondition(lambda self: self.model)
    @rule(data=st.data(), page=st.sampled_from("hijk"), block=st.integers(0, 3))
    def promise(self, data: st.DataObject, page: str, block: int) -> None:
        step = data.draw(st.sampled_from(sorted(self.model)))
        self.ledger.promise(step, page, 0, whole_block(block))
        self.model[step].add(page)

    @rule(step=st.sampled_from("stuv"))
    def close(self, step: str) -> None:
        assert (self.ledger.close(step) is not None) == (step in self.model)
        self.model.pop(step, None)

    @invariant()
    def promised_iff_an_open_step_promised(self) -> None:
        self.ledger.check_integrity()
        held = set().union(*self.model.values())
        assert {page for page in "hijk" if self.ledger.promise_of(page)} == held
        assert self.ledger.open_steps == len(self.model)


TestOverlappingSteps = OverlappingSteps.TestCase
TestOverlappingSteps.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
