"""Dates in early messages: found, masked and told anew, and nothing else with them."""

from __future__ import annotations

import pytest

from kvws.chat.volatile import facts, masked, reminder

REMINDER = """<system-reminder>
# claudeMd
Contents of /repo/CLAUDE.md (project instructions, checked into the codebase):

Use tabs. Today's date is important to us.
# currentDate
Today's date is {}.

Use this only where it helps.
</system-reminder>"""
ENV = """<env>
  Working directory: /repo
  Platform: linux
  Today's date: {}
</env>"""
CODEX = """<environment_context>
  <cwd>/repo</cwd>
  <current_date>{}</current_date>
  <timezone>UTC</timezone>
</environment_context>"""
OPENHANDS = """<CURRENT_DATETIME>
The current date and time is: {}
</CURRENT_DATETIME>"""


@pytest.mark.parametrize(
    ("text", "kind", "before", "after"),
    [
        (REMINDER, "date", "2026-11-30", "2026-12-01"),
        (ENV, "date", "Mon Nov 30 2026", "Tue Dec 01 2026"),
        (ENV, "date", "11/30/2026", "12/1/2026"),
        ("Current date: {}", "date", "November 30, 2026", "December 1, 2026"),
        ("Today's date is now {}.", "date", "Monday, 2026-11-30", "Tuesday, 2026-12-01"),
        (CODEX, "date", "2026-11-30", "2026-12-01"),
        (
            OPENHANDS,
            "date and time",
            "2026-11-30T23:59:59.125+00:00",
            "2026-12-01T00:00:01+00:00",
        ),
    ],
)
def test_two_days_differ_in_the_value_only(text: str, kind: str, before: str, after: str) -> None:
    assert facts(text.format(before)) == {kind: before}
    assert facts(text.format(after)) == {kind: after}
    assert masked(text.format(before)) == masked(text.format(after))
    assert masked(text.format(before)) == text.format(f"<{kind}>")


@pytest.mark.parametrize(
    "text",
    [
        "Today's date is important to us.",
        "Today's date is 2026-11-30 and the release is due.",
        "I think that Today's date is 2026-11-30.",
        "today's date is 2026-11-30.",
        "Current date: see calendar 2026",
        "Current date:",
        "print('Today\\'s date: 2026')",
        "<current_date>$(date +2026)</current_date>",
        "The current date and time is: unknown",
        "Release date: 2026-11-30",
        "Last commit: 2026-11-30",
        "",
    ],
)
def test_other_lines_stay(text: str) -> None:
    assert facts(text) == {}
    assert masked(text) == text


def test_the_last_value_of_a_kind_counts_and_all_are_masked() -> None:
    text = "Today's date: 2026-11-30\nand later\nToday's date is now 2026-12-01."
    assert facts(text) == {"date": "2026-12-01"}
    assert masked(text) == "Today's date: <date>\nand later\nToday's date is now <date>."


def test_a_reminder_tells_every_new_value() -> None:
    told = reminder({"date": "2026-12-01", "date and time": "2026-12-01 00:01"})
    assert "the date is now 2026-12-01." in told
    assert "the date and time is now 2026-12-01 00:01." in told
    assert "\n" not in told
