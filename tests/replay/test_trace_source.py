"""Files of any kind: what is read, and how the rest is refused."""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path

import pytest

from kvws.errors import TraceError
from kvws.replay.loaders import load_trace, parse_trace
from kvws.replay.loaders.source import decompress, read_bounded

CHAT = json.dumps(
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
)
LINES = "\n".join([CHAT] * 2)


@pytest.mark.parametrize("pack", [bytes, lzma.compress, gzip.compress])
def test_the_name_says_nothing(tmp_path: Path, pack: object) -> None:
    assert callable(pack)
    path = tmp_path / "session.jsonl"
    path.write_bytes(pack(CHAT.encode()))
    trace = load_trace(path)
    assert (trace.format, trace.name) == ("openai-chat", "session")


@pytest.mark.parametrize(
    ("file", "name"),
    [("a.traj.json.xz", "a"), ("b.jsonl.gz", "b"), ("c-1.2.log", "c-1.2.log"), ("d", "d")],
)
def test_a_trace_is_named_after_its_file(tmp_path: Path, file: str, name: str) -> None:
    (tmp_path / file).write_text(CHAT)
    assert load_trace(tmp_path / file).name == name


def test_a_byte_order_mark_is_ignored() -> None:
    assert parse_trace(b"\xef\xbb\xbf" + CHAT.encode()).steps


def test_concatenated_archives_are_one_file() -> None:
    halves = LINES[:50].encode(), LINES[50:].encode()
    for pack in (lzma.compress, gzip.compress):
        assert decompress(b"".join(map(pack, halves))) == LINES.encode()


@pytest.mark.parametrize("pack", [lzma.compress, gzip.compress])
def test_a_small_archive_cannot_fill_the_memory(pack: object) -> None:
    assert callable(pack)
    bomb = pack(b" " * (8 << 20))
    assert len(bomb) < 1 << 16
    with pytest.raises(TraceError, match="larger than"):
        decompress(bomb, limit_bytes=4 << 20)


def test_a_large_file_is_not_even_read(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(b" " * 1001)
    with pytest.raises(TraceError, match="larger than"):
        read_bounded(path, limit_bytes=1000)


def test_a_line_being_written_is_left_out() -> None:
    trace = parse_trace((LINES + '\n{"messages": [{"ro').encode())
    assert len(trace.steps) == 1
    assert trace.notes == ("unfinished last lines skipped: 1",)


def test_line_separators_inside_strings_do_not_end_a_line() -> None:
    text = LINES.replace("ho", "one\u2028two\u0085three")
    assert next(iter(parse_trace(text.encode()).threads.values()))[1].content.count("three") == 1


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b" \n\n", "empty"),
        (b"\x7fELF\x00\xff\xfe", "not UTF-8"),
        (b"hello", "line 1"),
        (CHAT[:40].encode(), "line 1"),
        (json.dumps(json.loads(CHAT), indent=1)[:60].encode(), "line 1"),
        (f"{CHAT}\n{{broken\n{CHAT}".encode(), "line 2"),
        (b"null", "format is not known"),
        (b"{}", "format is not known"),
        (b"[]", "format is not known"),
        (b"[1, 2]", "format is not known"),
        (b'{"history": [], "trajectory": []}', "format is not known"),
        (b'{"messages": "none"}', "format is not known"),
        (b'{"messages": []}', "no assistant turn"),
        (b'{"messages": [{"role": "user", "content": "hi"}]}', "no assistant turn"),
        (b'{"messages": [{"role": "assistant", "content": "hi"}]}', "no assistant turn"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"messages": [' + b"[" * 100_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "line 1"),
        (lzma.compress(CHAT.encode())[:-20], "damaged"),
        (gzip.compress(CHAT.encode(), mtime=0)[:-3], "damaged"),
        (b"\xfd7zXZ\x00" + b"?" * 40, "damaged"),
        (b"\x1f\x8b" + b"?" * 40, "damaged"),
    ],
)
def test_refused_in_one_line_with_a_hint(data: bytes, reason: str) -> None:
    with pytest.raises(TraceError, match=reason) as caught:
        parse_trace(data)
    assert caught.value.hint
    assert "\n" not in str(caught.value)


def test_the_hint_names_the_formats() -> None:
    with pytest.raises(TraceError) as caught:
        parse_trace(b"{}")
    for name in ("Claude Code", "mini-swe-agent", "OpenAI"):
        assert name in caught.value.hint


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing", Path("a\0b"), Path("/dev/zero")):
        with pytest.raises(TraceError) as caught:
            load_trace(path)
        assert caught.value.hint
