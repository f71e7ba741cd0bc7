"""Bodies as JSON, also those that JavaScript clients cut in the middle of an emoji."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvws.errors import BadRequest
from kvws.http.json_body import decode_json, mended

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(JSON)
def test_what_json_can_say_is_read_as_it_was_meant(value: object) -> None:
    assert decode_json(json.dumps(value).encode()) == value
    assert mended(value) == value


@pytest.mark.parametrize("half", ["\\ud83d", "\\ude00", "\\ude00\\ud83d"])
def test_half_an_emoji_becomes_a_replacement_character(half: str) -> None:
    halves = half.count("\\u")
    body = f'{{"a": ["x{half}y"], "{half}": 1, "whole": "\\ud83d\\ude00"}}'
    read = decode_json(body.encode())
    assert read == {"a": [f"x{'�' * halves}y"], "�" * halves: 1, "whole": "😀"}


@pytest.mark.parametrize("body", [b"", b"{", b'{"a": NaN}', b'{"\\u00e4": NaN}', b'"\xff"'])
def test_what_is_no_json_is_refused_with_its_place(body: bytes) -> None:
    with pytest.raises(BadRequest, match="line 1, column"):
        decode_json(body)
