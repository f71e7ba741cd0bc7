"""Commits as bytes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvws.errors import StoreFormatError
from kvws.observe.step_report import StepReport, Timings, report_from_plain, report_to_plain
from kvws.recall.plan import Action, Decision, Reason
from kvws.session.commit import (
    ROOT,
    BlockRecord,
    Commit,
    StepRecord,
    ThreadRecord,
    decode_commit,
    encode_commit,
)
from kvws.store.record import pack

NUMBERS = st.integers(0, (1 << 26) - 1)
TOKENS = st.lists(st.integers(0, (1 << 32) - 1), min_size=32, max_size=32).map(tuple)
BLOCKS = st.lists(
    st.builds(BlockRecord, NUMBERS, st.one_of(st.just(ROOT), NUMBERS), TOKENS), max_size=3
).map(tuple)
TIMES = st.floats(0, 1e9)
DECISIONS = st.builds(
    Decision,
    NUMBERS,
    st.sampled_from(Action),
    st.sampled_from(Reason),
    st.one_of(st.none(), st.floats(allow_nan=False)),
)
REPORTS = st.builds(
    StepReport,
    thread=st.text(max_size=5),
    new_tokens=NUMBERS,
    resumed_tokens=NUMBERS,
    recalled=st.booleans(),
    decisions=st.lists(DECISIONS, max_size=3).map(tuple),
    ms=st.builds(Timings, ingest=TIMES, first_token=TIMES),
)
NOTES = st.one_of(st.none(), st.dictionaries(st.text(max_size=3), st.integers(-5, 5)))
COMMITS = st.builds(
    Commit,
    announced=BLOCKS,
    blocks=BLOCKS,
    unsettled=BLOCKS,
    thread=st.one_of(
        st.none(),
        st.builds(
            ThreadRecord,
            st.text(max_size=5),
            st.one_of(st.just(ROOT), NUMBERS),
            st.lists(NUMBERS, max_size=5).map(tuple),
            st.booleans(),
        ),
    ),
    step=st.one_of(st.none(), st.builds(StepRecord, REPORTS, NUMBERS, NOTES)),
    note=NOTES,
    void_from=st.one_of(st.none(), st.integers(0, 1 << 40)),
    acknowledged_to=st.integers(0, 1 << 40),
    synced_to=st.integers(0, 1 << 40),
)


@settings(max_examples=200, deadline=None)
@given(COMMITS)
def test_a_commit_comes_back_as_it_was(commit: Commit) -> None:
    assert decode_commit(encode_commit(commit)) == commit


@settings(max_examples=100, deadline=None)
@given(REPORTS)
def test_a_report_comes_back_as_it_was(report: StepReport) -> None:
    assert report_from_plain(report_to_plain(report)) == report


def test_a_report_of_another_version_is_read_as_far_as_it_goes() -> None:
    plain = report_to_plain(StepReport("main", new_tokens=5))
    plain["of_the_future"] = 1
    del plain["passes"]
    assert report_from_plain(plain) == StepReport("main", new_tokens=5)


@settings(max_examples=300, deadline=None)
@given(
    st.recursive(
        st.one_of(st.none(), st.integers(-5, 1 << 40), st.text(max_size=4), st.binary(max_size=9)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=4),
            st.dictionaries(
                st.sampled_from(["blocks", "thread", "step", "void_from", "note", "x"]), inner
            ),
        ),
        max_leaves=12,
    )
)
def test_any_other_message_is_refused_or_read(message: object) -> None:
    try:
        decode_commit(pack(message))
    except StoreFormatError:
        return


@pytest.mark.parametrize(
    "message",
    [
        {"blocks": [b"\0" * 4, b"\0" * 4, b"\0" * 127]},
        {"blocks": [b"\0" * 4, b"\0" * 8, b"\0" * 128]},
        {"blocks": [b"\xff" * 4, b"\0" * 4, b"\0" * 128]},
        {"thread": ["main", 0, b"\0" * 5, True]},
        {"thread": [3, 0, b"", True]},
        {"step": [{"thread": "main", "new_tokens": "many"}, 0, None]},
        {"step": [{}, 0, None]},
        {"void_from": "0"},
        [],
    ],
)
def test_damaged_messages_are_refused(message: object) -> None:
    with pytest.raises(StoreFormatError):
        decode_commit(pack(message))
