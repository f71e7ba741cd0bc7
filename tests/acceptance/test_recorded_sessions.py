"""Sessions of real clients, sent again as they were recorded: nothing is computed twice.

Claude Code, OpenHands, opencode and Codex, each with its own way to spell back what it was told.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.acceptance.front import Front
from tests.acceptance.recorded import Resending, Sent, load_session
from tests.acceptance.reuse import Kind, assert_reuse

SESSIONS = (
    ("basic",), ("norm",), ("sub",), ("img", "img_resume"), ("ptl400",), ("blkD",), ("tui",),
    ("tui2",), ("web",), ("big",), ("err_400max",), ("err_404",), ("err_badtool",),
    ("err_empty",), ("err_maxtok",), ("err_mid_api",), ("oh_basic",), ("oh_stream",),
    ("oh_cond",), ("oh_over",), ("codex",), ("opencode",),
)  # fmt: skip
"""Files of the folder; those of one entry are one session."""

KINDS: dict[tuple[str, int], Kind] = {
    ("tui", 2): "aside",  # title
    ("tui2", 3): "aside",  # title
    ("opencode", 0): "aside",  # title
    ("web", 2): "aside",  # web search
    ("oh_cond", 4): "aside",  # summary by a condenser
    ("oh_over", 4): "aside",  # summary by a condenser
    ("blkD", 6): "summary",
    ("ptl400", 7): "summary",
    ("tui2", 20): "summary",  # the client then goes on without it
    ("blkD", 7): "rewrite",  # a summary took the place of the history
    ("ptl400", 8): "rewrite",  # of all but the newest turns
    ("oh_cond", 5): "rewrite",  # of the middle
    ("oh_over", 5): "rewrite",  # of the middle
    ("err_empty", 2): "rewrite",  # an answer was empty: the client edits its first message
}
"""Requests, by file and number, that are no plain turns."""


@pytest.mark.parametrize("names", SESSIONS, ids="+".join)
def test_a_recorded_session_computes_only_what_is_new(
    thinking_front: Front, harness: Path, names: tuple[str, ...]
) -> None:
    files = {name: load_session(harness / f"{name}.json") for name in names}
    keys = [
        (name, each.number)
        for name, requests in files.items()
        for each in requests
        if each.is_call
    ]
    sent = Resending(thinking_front).send(
        [each for requests in files.values() for each in requests]
    )
    turns: list[Sent] = []
    for key, each in zip(keys, sent, strict=True):
        kind = KINDS.get(key, "turn")
        assert_reuse(each, turns, kind)
        if kind in ("summary", "rewrite"):
            assert each.answered.computed_tokens <= each.answered.usage.prompt_tokens / 10


def test_no_session_of_the_folder_is_left_out(harness: Path) -> None:
    others = {"norm_pairs", "cc_error_matrix"}
    recorded = {file.stem for file in harness.glob("*.json")} - others
    assert recorded == {name for names in SESSIONS for name in names}
