"""Framing: a length that is refused before anything is allocated, then one document."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvws.engine import wire
from kvws.errors import ControlError

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    ours.settimeout(5)
    theirs.settimeout(5)
    with ours, theirs:
        yield ours, theirs


MESSAGES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(0, 99), inner),
    max_leaves=20,
)


@settings(max_examples=80, deadline=None)
@given(MESSAGES)
def test_a_frame_is_its_length_and_one_document(message: object) -> None:
    frame = wire.encode(message)
    header, body = frame[: wire.HEADER_BYTES], frame[wire.HEADER_BYTES :]
    assert wire.frame_length(header) == len(body)
    assert wire.unpack(body) == message


def test_messages_arrive_one_by_one_until_the_stream_ends(pair: Pair) -> None:
    ours, theirs = pair
    theirs.sendall(wire.encode({"a": 1}) + wire.encode([b"\x00" * 5000, "ü"]))
    theirs.shutdown(socket.SHUT_WR)
    assert wire.receive(ours) == {"a": 1}
    assert wire.receive(ours) == [b"\x00" * 5000, "ü"]
    assert wire.receive(ours) is None


@pytest.mark.parametrize("length", [wire.MAX_FRAME_BYTES + 1, 2**32 - 1])
def test_a_length_beyond_the_limit_is_refused_from_its_header_alone(
    pair: Pair, length: int
) -> None:
    ours, theirs = pair
    theirs.sendall(struct.pack("<I", length))
    with pytest.raises(ControlError, match=f"claims {length} bytes"):
        wire.receive(ours)
    with pytest.raises(ControlError, match=f"claims {length} bytes"):
        wire.frame_length(struct.pack("<I", length))


def test_a_stream_cut_at_any_byte_is_no_message(pair: Pair) -> None:
    frame = wire.encode({"operation": "x", "n": [1, 2, 3]})
    for cut in range(len(frame)):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.settimeout(5)
            theirs.sendall(frame[:cut])
            theirs.close()
            assert wire.receive(ours) is None
