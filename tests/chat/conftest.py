"""Shared by the chat tests."""

from __future__ import annotations

import pytest

from kvws.chat.segments import SegmentRenderer
from tests.chat.templates import FAMILIES, bytes_and_pairs, make_renderer


@pytest.fixture(scope="session")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SegmentRenderer]:
    return {
        name: SegmentRenderer(
            make_renderer(tmp_path_factory.mktemp("model"), template, bytes_and_pairs())
        )
        for name, template in FAMILIES.items()
    }
