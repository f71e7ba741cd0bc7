"""An agent that speaks the Messages API the way Claude Code does, one call after another."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvws.blocks.key import BLOCK_TOKENS
from tests.acceptance.front import Front
from tests.acceptance.wire import MESSAGES, Answer, read_answer
from tests.e2e.front import Answered

HEADER = "x-anthropic-billing-header: cc_version=2.1.197.{}; cc_entrypoint=cli; cch={};"
RULES = "\n".join(
    f"Rule {number}: keep the tree clean and the tests quick." for number in range(60)
)
OPEN_TOKENS = BLOCK_TOKENS + 2
"""What a call may compute beside what is new: the block that was open, and the token that ended
the answer, which no engine computes."""


def tool(name: str, *arguments: str) -> dict[str, Any]:
    properties = {argument: {"type": "string"} for argument in arguments}
    schema = {"type": "object", "properties": properties}
    return {"name": name, "description": f"Does {name}.", "input_schema": schema}


TOOLS = (
    tool("Bash", "command", "description"),
    tool("Read", "file_path", "offset", "limit"),
    tool("Edit", "file_path", "old_string", "new_string"),
    tool("Write", "file_path", "content"),
    tool("Agent", "prompt"),
    tool("TaskCreate", "subject", "description"),
)


def calling(name: str, **arguments: Any) -> str:
    """A call as a model of the Hermes kind writes it."""
    return calling_raw(name, json.dumps(arguments, ensure_ascii=False))


def calling_raw(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def results(answer: Answer, *texts: str) -> list[dict[str, Any]]:
    """Results of an answer's calls."""
    return [
        {"type": "tool_result", "tool_use_id": call_id, "content": text, "is_error": False}
        for call_id, text in zip(answer.call_ids, texts, strict=True)
    ]


@dataclass(frozen=True)
class Heard:
    """One call's answer, and what it cost.

    Attributes:
        prefilled_tokens: that the engine computed for it, probes included.
        new_tokens: of the prompt, behind the call before and its answer.
    """

    answer: Answer
    answered: Answered
    prefilled_tokens: int
    new_tokens: int

    @property
    def computed_tokens(self) -> int:
        return self.answered.computed_tokens

    def assert_only_new_was_computed(self) -> None:
        assert self.computed_tokens <= self.new_tokens + OPEN_TOKENS, self
        assert self.prefilled_tokens <= 2 * (self.computed_tokens + 2 * BLOCK_TOKENS), self


@dataclass
class Agent:
    """One thread of a session, and its history as the client keeps it.

    Attributes:
        agent_id: of a sub-agent; "" for the main loop.
    """

    front: Front
    session: str = field(default_factory=lambda: str(uuid.uuid4()))
    agent_id: str = ""
    system: Any = RULES
    tools: Sequence[Mapping[str, Any]] = TOOLS
    messages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    _before: Answered | None = None

    @property
    def headers(self) -> dict[str, str]:
        named = {"x-claude-code-session-id": self.session}
        return {**named, "x-claude-code-agent-id": self.agent_id} if self.agent_id else named

    def body(self, **changes: Any) -> dict[str, Any]:
        return {
            "model": "kvws",
            "max_tokens": 4000,
            "system": self.system,
            "messages": self.messages,
            "tools": list(self.tools),
            **changes,
        }

    def ask(self, content: Any, saying: str = "Yes.", **changes: Any) -> Heard:
        """Add a user's message, and the answer that the model is told to give."""
        self.messages.append({"role": "user", "content": content})
        self.front.script.saying = saying
        heard = self.call(**changes)
        self.messages += heard.answer.turn
        return heard

    def call(self, **changes: Any) -> Heard:
        """Send the history as it is, and leave it so."""
        front = self.front
        prefilled, count = front.engine.prefilled_tokens, len(self._answered())
        reply = front.post(MESSAGES, self.body(**changes), session="", **self.headers)
        answer = read_answer(MESSAGES, reply)
        answered = front.told(self._answered, count + 1)[-1]
        known, self._before = self._before, answered
        new_tokens = answered.usage.prompt_tokens
        if known is not None:
            new_tokens -= known.usage.prompt_tokens + known.usage.answer_tokens
        prefilled = front.engine.prefilled_tokens - prefilled
        return Heard(answer, answered, prefilled, max(0, new_tokens))

    def _answered(self) -> list[Answered]:
        return self.front.answered_of(self.session, self.agent_id or "main")

    def logged_tokens(self) -> list[int]:
        """The thread's tokens, as far as they are blocks."""
        workspace = self.front.workspace(self.session)
        line = workspace.thread(self.agent_id or "main").line
        return [token for block in line for token in workspace.block_tokens(block)]
