"""The names of tests are the same in every process that collects them."""

from __future__ import annotations

import gzip

import pytest

from tests.conftest import pytest_make_parametrize_id


@pytest.mark.parametrize("value", [gzip.compress(b"x"), bytes(range(256)), b"[" * 100_000])
def test_binary_and_long_values_are_numbered(value: bytes, request: pytest.FixtureRequest) -> None:
    assert request.node.callspec.id in ("value0", "value1", "value2")


def test_short_readable_values_keep_their_spelling() -> None:
    assert pytest_make_parametrize_id(b'{"a": 1}', "data") is None
    assert pytest_make_parametrize_id("text", "data") is None
