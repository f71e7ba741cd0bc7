"""Claude Code: everything it needs is in its environment.

Three settings keep its prompts append-only, so that each step computes only what is new:
    CLAUDE_CODE_ATTRIBUTION_HEADER=0   no header text, new in every session, before the system
                                       prompt
    ENABLE_TOOL_SEARCH=false           all tools from the first request on; with tool search, tools
                                       loaded later are inserted into the middle of the list
    CLAUDE_CODE_MAX_CONTEXT_TOKENS     the window of the server; without it the client compacts as
                                       if the model were small
The server copes without them; it then computes more.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence

from kvws.harness_adapters.address import MODEL_NAME, STALL_S, ServerAddress
from kvws.harness_adapters.launching import Launch

ELSEWHERE = (
    "ANTHROPIC_API_KEY",
    "ANTHROPIC_SMALL_FAST_MODEL",
    "CLAUDE_CODE_OAUTH_TOKEN",
    "CLAUDE_CODE_USE_BEDROCK",
    "CLAUDE_CODE_USE_FOUNDRY",
    "CLAUDE_CODE_USE_VERTEX",
    "DISABLE_AUTO_COMPACT",
)
"""Variables that would send it to another server, or, the last one, make it refuse to go on at
177,000 tokens."""


def environment(address: ServerAddress) -> dict[str, str]:
    """All settings, as environment variables."""
    stall_ms = str(1000 * STALL_S)
    return {
        "ANTHROPIC_BASE_URL": address.base_url,
        "ANTHROPIC_AUTH_TOKEN": address.token,
        "ANTHROPIC_MODEL": MODEL_NAME,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL_NAME,
        "ANTHROPIC_DEFAULT_SONNET_MODEL": MODEL_NAME,
        "ANTHROPIC_DEFAULT_OPUS_MODEL": MODEL_NAME,
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(address.window_tokens),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(address.answer_tokens),
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "ENABLE_TOOL_SEARCH": "false",
        "API_TIMEOUT_MS": stall_ms,
        "CLAUDE_STREAM_IDLE_TIMEOUT_MS": stall_ms,
        "CLAUDE_STREAM_FIRST_BYTE_TIMEOUT_MS": stall_ms,
    }


def shell_lines(address: ServerAddress) -> list[str]:
    """What a user pastes into a shell before starting `claude` there."""
    exports = [
        f"export {name}={shlex.quote(value)}" for name, value in environment(address).items()
    ]
    return [*exports, f"unset {' '.join(ELSEWHERE)}"]


def settings_json(address: ServerAddress) -> str:
    """The same as a settings file: `claude --settings FILE`, or merged into the user's own."""
    return json.dumps({"env": environment(address)}, indent=2) + "\n"


def launch(command: Sequence[str], address: ServerAddress) -> Launch:
    """Start `claude` with any arguments of its own."""
    return Launch(tuple(command), environment(address), ELSEWHERE)
