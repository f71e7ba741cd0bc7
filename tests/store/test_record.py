"""Frames: what was written is found, what was damaged is not, and damage stays local."""

from __future__ import annotations

import contextlib
import random

import pytest

from kvws.errors import StoreFormatError
from kvws.store import record
from kvws.store.record import HEADER_BYTES, MAX_BODY_BYTES, encode_frame, pack, scan_frames, unpack

MAGIC = b"kvw\x01"


def written(bodies: list[bytes]) -> bytes:
    data = b""
    for body in bodies:
        data += encode_frame(body, len(data))
    return data


def offsets(bodies: list[bytes]) -> list[int]:
    return [sum(HEADER_BYTES + len(body) for body in bodies[:n]) for n in range(len(bodies))]


BODIES = [b"first", b"", b"the third body " * 20, MAGIC * 3, b"last"]


def test_every_frame_is_found_where_it_was_written() -> None:
    data = written(BODIES)
    scan = scan_frames(data)
    assert scan.frames == list(zip(offsets(BODIES), BODIES, strict=True))
    assert (scan.valid_bytes, scan.torn_bytes, scan.skipped_bytes) == (len(data), 0, 0)
    assert scan_frames(memoryview(data)) == scan


def test_an_empty_file_holds_nothing() -> None:
    scan = scan_frames(b"")
    assert (scan.frames, scan.valid_bytes, scan.torn_bytes, scan.skipped_bytes) == ([], 0, 0, 0)


def test_a_file_cut_at_any_byte_keeps_its_whole_frames() -> None:
    data = written(BODIES)
    ends = [*offsets(BODIES)[1:], len(data)]
    for length in range(len(data)):
        scan = scan_frames(data[:length])
        whole = sum(end <= length for end in ends)
        assert [body for _, body in scan.frames] == BODIES[:whole]
        assert scan.valid_bytes == (ends[whole - 1] if whole else 0)
        assert scan.torn_bytes == length - scan.valid_bytes
        assert scan.skipped_bytes == 0


def test_a_flip_of_any_bit_costs_only_its_frame() -> None:
    data = written(BODIES)
    begins = [*offsets(BODIES), len(data)]
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        hit = sum(begin <= bit // 8 for begin in begins) - 1
        scan = scan_frames(bytes(damaged))
        assert [body for _, body in scan.frames] == BODIES[:hit] + BODIES[hit + 1 :]
        hit_bytes = begins[hit + 1] - begins[hit]
        last = hit == len(BODIES) - 1
        assert scan.skipped_bytes == (0 if last else hit_bytes)
        assert scan.torn_bytes == (hit_bytes if last else 0)


def test_a_frame_is_valid_only_at_its_own_offset() -> None:
    frame = encode_frame(b"body", 100)
    assert scan_frames(frame).frames == []
    assert scan_frames(bytes(100) + frame).frames == [(100, b"body")]


def test_a_copy_of_the_file_inside_a_body_is_not_taken_for_frames() -> None:
    inner = written(BODIES)
    frame = bytearray(encode_frame(inner, 0))
    assert [body for _, body in scan_frames(bytes(frame)).frames] == [inner]
    frame[5] ^= 1
    assert scan_frames(bytes(frame)).frames == []


def test_garbage_before_between_and_after_is_skipped() -> None:
    garbage = b"\x00garbage" + MAGIC
    first = garbage + encode_frame(b"one", len(garbage))
    data = first + garbage + encode_frame(b"two", len(first) + len(garbage)) + garbage
    scan = scan_frames(data)
    assert [body for _, body in scan.frames] == [b"one", b"two"]
    assert scan.skipped_bytes == 2 * len(garbage)
    assert scan.torn_bytes == len(garbage)
    assert scan.valid_bytes == len(data) - len(garbage)


@pytest.mark.parametrize("length", [0, 10_000, MAX_BODY_BYTES + 1, 2**32 - 1])
def test_a_length_that_is_wrong_is_not_believed(length: int) -> None:
    frame = bytearray(encode_frame(b"body", 0))
    frame[4:8] = length.to_bytes(4, "little")
    assert scan_frames(bytes(frame)).frames == []


def test_random_bytes_hold_no_frame() -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(300):
        pieces = [rng.choice([MAGIC, rng.randbytes(rng.randrange(40))]) for _ in range(20)]
        data = b"".join(pieces)
        scan = scan_frames(data)
        assert scan.frames == [] and scan.torn_bytes == len(data)


def test_without_the_digest_damage_would_go_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the flips above: they are caught by the digest and nothing else."""
    monkeypatch.setattr(record, "_digest", lambda body, offset: bytes(16))
    frame = bytearray(encode_frame(b"body", 0))
    frame[-1] ^= 1
    assert scan_frames(bytes(frame)).frames == [(0, b"bodx")]


def test_a_body_beyond_the_limit_is_our_own_fault() -> None:
    with pytest.raises(AssertionError, match="record of"):
        encode_frame(bytes(MAX_BODY_BYTES + 1), 0)


def test_plain_values_come_back() -> None:
    message = {"a": [1, -1, 2**63, "ü", b"\x00", None, True, 1.5], 7: []}
    assert unpack(pack(message)) == message


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        pack(1) + pack(2),
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xffabc",
        b"\xa2\xff\xff",
        b"\xd6\xff\x00\x00\x00\x00",
        b"\xc7\x02\x05ab",
        b"\x81\x90\x01",
        b"\x91" * 5000,
    ],
    ids=[
        "empty", "reserved", "two documents", "array longer than the body", "map longer",
        "bytes longer", "no text", "timestamp", "extension", "list as key", "too deep",
    ],
)  # fmt: skip
def test_a_body_that_is_no_message_is_a_format_error(body: bytes) -> None:
    with pytest.raises(StoreFormatError):
        unpack(body)


def test_any_bytes_unpack_to_a_value_or_a_format_error() -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    whole = pack([{"kind": "put", "blocks": [[1, b"x" * 32, -1, 5]] * 3}, "text", 2.5])
    for _ in range(20_000):
        body = bytearray(whole)
        for _ in range(rng.randrange(1, 6)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        with contextlib.suppress(StoreFormatError):
            unpack(bytes(body[: rng.randrange(len(body) + 1)]))
