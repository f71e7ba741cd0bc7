"""What the scripted model says: one script per client, told by the tools that it names.

The task is the same for all: look around, read a file and count its lines at the same time, edit
it, run a check, report. A script is a pure function of the call, so a resent call is answered
alike.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvws.chat.call import ModelCall

OLD, NEW = "Hello", "Good morning"
TASK = f"Change the greeting in greeting.py from {OLD} to {NEW}, then run check.py."
REPORT = "Done: the greeting is changed and the check passes."
TITLE = "Change the greeting"


@dataclass(frozen=True)
class Turn:
    """One answer: text, then calls of (tool, arguments)."""

    text: str = ""
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()

    @property
    def generated(self) -> str:
        """As the model writes it."""
        blocks = [
            f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
            for name, arguments in self.calls
        ]
        return "\n".join([self.text, *blocks] if self.text else blocks)


def _call(name: str, **arguments: Any) -> tuple[str, dict[str, Any]]:
    return name, arguments


@dataclass(frozen=True)
class Script:
    """Answers of one agent, by how many tool results the call's history holds."""

    turns: tuple[Turn, ...]

    def next_turn(self, call: ModelCall) -> Turn:
        """Raises AssertionError where the client offers no tool of a name that is called next,
        or sends tool results that answer no turn."""
        if not call.tools:
            return Turn(TITLE)
        results = sum(message.role == "tool" for message in call.messages)
        turn = self._after(results)
        offered = {tool["function"]["name"] for tool in call.tools}
        missing = {name for name, _ in turn.calls} - offered
        assert not missing, f"the client offers {sorted(offered)}, not {sorted(missing)}"
        return turn

    def _after(self, results: int) -> Turn:
        answered = 0
        for turn in self.turns:
            if answered == results:
                return turn
            answered += len(turn.calls)
        raise AssertionError(f"{results} tool results answer no turn of the script")


@dataclass(frozen=True)
class Family:
    """Scripts of a client that starts further agents: a phrase of an agent's task tells which."""

    main: Script
    agents: dict[str, Script] = field(default_factory=dict[str, Script])

    def next_turn(self, call: ModelCall) -> Turn:
        task = next(message.content for message in call.messages if message.role == "user")
        for phrase, script in self.agents.items():
            if phrase in task:
                return script.next_turn(call)
        return self.main.next_turn(call)


CHECK = "python3 check.py"
COUNT = "wc -l greeting.py"


def _looking(*calls: tuple[str, dict[str, Any]]) -> Turn:
    return Turn("I look around first.", calls)


def claude_code(repo: Path) -> Script:
    path = str(repo / "greeting.py")
    return Script(
        (
            _looking(_call("Bash", command="ls -la", description="List files")),
            Turn(
                calls=(
                    _call("Read", file_path=path),
                    _call("Bash", command=COUNT, description="Count lines"),
                )
            ),
            Turn(calls=(_call("Edit", file_path=path, old_string=OLD, new_string=NEW),)),
            Turn(calls=(_call("Bash", command=CHECK, description="Run the check"),)),
            Turn(REPORT),
        )
    )


def opencode(repo: Path) -> Script:
    path = str(repo / "greeting.py")
    return Script(
        (
            _looking(_call("bash", command="ls -la")),
            Turn(calls=(_call("read", filePath=path), _call("bash", command=COUNT))),
            Turn(calls=(_call("edit", filePath=path, oldString=OLD, newString=NEW),)),
            Turn(calls=(_call("bash", command=CHECK),)),
            Turn(REPORT),
        )
    )


def openhands(repo: Path) -> Script:
    path = str(repo / "greeting.py")
    edit = _call("file_editor", command="str_replace", path=path, old_str=OLD, new_str=NEW)
    return Script(
        (
            _looking(_call("terminal", command="ls -la")),
            Turn(
                calls=(
                    _call("file_editor", command="view", path=path),
                    _call("terminal", command=COUNT),
                )
            ),
            Turn(calls=(edit,)),
            Turn(calls=(_call("terminal", command=CHECK),)),
            Turn(calls=(_call("finish", message=REPORT),)),
        )
    )


def codex(repo: Path) -> Script:
    edit = f"sed -i 's/{OLD}/{NEW}/' greeting.py"
    return Script(
        (
            _looking(_call("exec_command", cmd="ls -la")),
            Turn(
                calls=(
                    _call("exec_command", cmd="cat greeting.py"),
                    _call("exec_command", cmd=COUNT),
                )
            ),
            Turn(calls=(_call("exec_command", cmd=edit),)),
            Turn(calls=(_call("exec_command", cmd=CHECK),)),
            Turn(REPORT),
        )
    )


COUNTING, LISTING = "Count the lines of greeting.py.", "List the files of the repository."


def claude_code_with_agents(repo: Path) -> Family:
    """Two sub-agents at a time; the main loop waits for both."""

    def agent(task: str) -> tuple[str, dict[str, Any]]:
        return _call(
            "Agent",
            description="Look around",
            prompt=task,
            subagent_type="general-purpose",
            run_in_background=False,
        )

    def asked_to(command: str, report: str) -> Script:
        return Script(
            (
                Turn(calls=(_call("Bash", command=command, description="Look"),)),
                Turn(report),
            )
        )

    main = Script((Turn(calls=(agent(COUNTING), agent(LISTING))), Turn(REPORT)))
    agents = {COUNTING: asked_to(COUNT, "One line."), LISTING: asked_to("ls", "Two files.")}
    return Family(main, agents)


def claude_code_loading_tools() -> Script:
    """Tools that the first request does not offer; the last turn could call them."""
    return Script(
        (
            Turn(calls=(_call("ToolSearch", query="select:WebFetch,TaskStop", max_results=5),)),
            Turn(calls=(_call("Bash", command="ls", description="List files"),)),
            Turn(REPORT),
        )
    )


SUMMARY = "We read big.txt again and again."
CONTINUED = "Done, from a summary."


@dataclass(frozen=True)
class Compacting:
    """Reads a large file until the client replaces its history by a summary, then stops."""

    def next_turn(self, call: ModelCall) -> Turn:
        said = [message.content for message in call.messages if message.role == "user"]
        if "<summary>" in said[-1]:
            return Turn(f"<summary>\n{SUMMARY}\n</summary>")
        if any(SUMMARY in message for message in said):
            return Turn(CONTINUED)
        reading = _call("Bash", command="cat big.txt", description="Read")
        return Turn(calls=(reading,))
