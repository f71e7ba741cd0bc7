"""Texts by which one side of the wire recognises what the other, or it itself, once wrote."""

from __future__ import annotations

import re

NOTHING_SAID = "(no content)"
"""Written as the only text of an answer in which the model showed nothing.

A client that receives no block, or only an empty text, asks again, and edits its first message to
do so; blanks it removes from its history. So it must be a real word. When the turn comes back the
text is taken out again, and the turn is what the model made."""

SIGNATURE = "kvws"
"""Of every thinking block: clients return it verbatim, and some drop thoughts that have none."""

UNPARSED_INPUT = "__unparsedToolInput"
"""The only key of a tool call's input, in the history of a client that could not parse the
arguments; below it "raw" is the text of the arguments and "len" how long it was."""

COMPACTION_PROMPT = "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools."
"""How the text begins with which Claude Code asks for a summary of the conversation."""

HEADER_LINES = re.compile(r"(?:x-anthropic-[a-z0-9-]+:[^\n]*(?:\n|\Z))+", re.IGNORECASE)
"""Lines that carry a client's bookkeeping at the start of a system text. Their values differ
between sessions and even between requests, and would part prompts that are otherwise equal."""
