"""Whether a recorded turn reads a file. A pure decision."""

from __future__ import annotations

import json
import re
from typing import Any, cast

from kvws.chat.message import Message, ToolCall

_READERS = frozenset({"read", "read_file", "view", "view_file", "open", "open_file", "cat"})
_EDITORS = frozenset({"str_replace_editor", "str_replace_based_edit_tool", "edit_anthropic"})
_COMMAND_KEYS = ("command", "cmd", "code")

_SHELL = re.compile(
    r"""(?:^|[;&|(]|\n)\s*                           # at the beginning of a command
        (?:(?:cat|nl|bat|less|more|head|tail)(?=\s)|sed\s+-n|open_file|open|view)
        (?![^\n;&|]*<<)                             # a document that follows is written, not read
        [^\n;&|>]*?                                 # options
        [\w~-]*[./][\w./-]*\w                       # a name that looks like a file's
    """,
    re.VERBOSE,
)
_SPOKEN = re.compile(r"```[\w-]*\n(.*?)```|<execute_\w+>(.*?)</execute_\w+>", re.DOTALL)


def reads_file(turn: Message) -> bool:
    """Whether an assistant's turn shows itself a file, with a tool or a command."""
    if any(_call_reads(call) for call in turn.tool_calls):
        return True
    commands = (first or second for first, second in _SPOKEN.findall(turn.content))
    return any(_SHELL.search(command) for command in commands)


def _call_reads(call: ToolCall) -> bool:
    name = call.name.lower()
    if name in _READERS:
        return True
    arguments = _arguments(call)
    if name in _EDITORS:
        return arguments.get("command") == "view"
    commands = (arguments.get(key) for key in _COMMAND_KEYS)
    return any(isinstance(command, str) and _SHELL.search(command) for command in commands)


def _arguments(call: ToolCall) -> dict[str, Any]:
    try:
        arguments: Any = json.loads(call.arguments)
    except ValueError:  # a recording may hold what the model wrote, whatever it was
        return {}
    return cast("dict[str, Any]", arguments) if isinstance(arguments, dict) else {}
