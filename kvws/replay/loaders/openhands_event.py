"""One OpenHands event: whose it is, and its words where it carries no tool call.

Later recordings nest what an event is about under `args` or `extras`, earlier ones don't.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvws.replay.loaders.content import Skipped, flatten, is_list, json_text, mapping, string

CONDENSATION = "condensation"

_NEVER_IN_A_PROMPT = frozenset(
    {
        *("null", "change_agent_state", "agent_state_changed", "pause", "resume", "stop"),
        *("condensation_request", "loop_recovery"),
    }
)
_WORDS_ALONE = frozenset({"finish", "reject", "think"})
_TEXT_CALLS = {
    "run": ("command", "execute_bash"),
    "run_ipython": ("code", "execute_ipython"),
    "browse_interactive": ("browser_actions", "execute_browse"),
}
"""By action: the field that holds its program, and the tag that the agent was told to use."""

_NOT_THE_MODELS = frozenset(
    {
        *("id", "timestamp", "source", "cause", "message", "tool_call_metadata", "llm_metrics"),
        *("action", "args", "thought", "action_risk", "security_risk", "is_confirmed"),
        *("confirmation_state", "keep_prompt", "kernel_init_code", "blocking", "is_static"),
        *("hidden", "cwd"),
    }
)


def is_event(value: object) -> bool:
    """Whether it is an action or an observation, and not a chat message that names one."""
    fields = mapping(value)
    return "role" not in fields and isinstance(fields.get("action"), str) != isinstance(
        fields.get("observation"), str
    )


def is_action(event: dict[str, Any]) -> bool:
    return isinstance(event.get("action"), str)


def kind_of(event: dict[str, Any]) -> str:
    return string(event.get("action")) or string(event.get("observation"))


def details(event: dict[str, Any]) -> dict[str, Any]:
    """The fields that its kind has, wherever they are recorded."""
    nested = mapping(event.get("args" if is_action(event) else "extras"))
    return nested or event


def is_unseen(event: dict[str, Any]) -> bool:
    """Whether no prompt shows it."""
    return kind_of(event) in _NEVER_IN_A_PROMPT or details(event).get("hidden") is True


def is_agents(event: dict[str, Any]) -> bool:
    """Whether the agent did it. Where none is named: it did all but to answer itself."""
    if source := string(event.get("source")):
        return source == "agent"
    return kind_of(event) != "message" or details(event).get("wait_for_response") is True


def is_turn(event: dict[str, Any]) -> bool:
    """Whether the model asked for it."""
    is_told = is_unseen(event) or kind_of(event) in ("system", "recall", CONDENSATION)
    return is_action(event) and is_agents(event) and not is_told


def thought(event: dict[str, Any]) -> str:
    """What the model said before it acted."""
    recorded = details(event).get("thought")
    return string(recorded) or string(mapping(recorded).get("text"))


def arguments(event: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an action, as far as they can be told from the runtime's own fields."""
    return {
        key: value
        for key, value in details(event).items()
        if key not in _NOT_THE_MODELS and value not in (None, "")
    }


def action_text(event: dict[str, Any], skipped: Skipped) -> str:
    """An action as text, in the agent's own notation where it has one. Mutates `skipped`."""
    fields, kind = details(event), kind_of(event)
    if kind in ("message", "system"):
        return flatten(fields.get("content"), skipped)
    said = thought(event)
    if kind in _WORDS_ALONE:
        outputs = mapping(fields.get("outputs"))
        said = said or string(fields.get("final_thought")) or string(outputs.get("content"))
        if said:
            return said
    return "\n".join(filter(None, (said, _call_text(event))))


def _call_text(event: dict[str, Any]) -> str:
    if notation := _TEXT_CALLS.get(kind_of(event)):
        field, tag = notation
        if program := string(details(event).get(field)):
            return f"<{tag}>\n{program}\n</{tag}>"
    return json_text({"action": kind_of(event), **arguments(event)})


def observation_text(event: dict[str, Any], skipped: Skipped) -> str:
    """What an observation shows the model. Mutates `skipped`."""
    fields, kind = details(event), kind_of(event)
    if kind == "recall":
        return "\n\n".join(_recalled(fields))
    content = flatten(event.get("content"), skipped)
    if kind == "delegate":
        return string(mapping(fields.get("outputs")).get("content")) or content
    metadata = mapping(fields.get("metadata"))
    return string(metadata.get("prefix")) + content + string(metadata.get("suffix"))


def _recalled(fields: dict[str, Any]) -> Iterator[str]:
    for key in ("repo_instructions", "additional_agent_instructions", "conversation_instructions"):
        if text := string(fields.get(key)):
            yield text
    knowledge = fields.get("microagent_knowledge")
    for known in map(mapping, knowledge if is_list(knowledge) else ()):
        if text := string(known.get("content")):
            yield text
