"""Three small sessions, talked through with a scripted model and recorded by our own recorder.

python -m tests.acceptance.record        writes tests/acceptance/fixtures/*.jsonl anew
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvws.http.recorder import Recorder
from kvws.models import resolve_model
from tests.acceptance.agent import TOOLS, Agent, calling, results
from tests.acceptance.front import Front, running_front
from tests.acceptance.wire import CHAT, MESSAGES, read_answer

FIXTURES = Path(__file__).parent / "fixtures"
RULES = "\n".join(f"{n}. Keep the tree clean and the tests quick." for n in range(24))
LISTING = "\n".join(f"-rw-r--r-- 1 user user {n * 37} module_{n}.py" for n in range(16))
SOURCE = "\n".join(f"def f{n}(x):\n    return x + {n}" for n in range(12))
SUMMARISE = "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools.\n\nSummarise."
CONTINUED = "This session is being continued from a previous conversation.\nWe edited a.py."


def coding(front: Front) -> None:
    """A loop with parallel calls, an edit that comes back respelled, a title and a compaction."""
    dated = "<system-reminder>\nToday's date is 2026-11-{}.\n</system-reminder>\nMake f3 faster."
    agent = Agent(front, "coding", system=RULES)
    looking = "I look around first.\n" + calling("Bash", command="ls -l", description="List")
    heard = agent.ask(dated.format(29), looking, stream=True)
    title(front, "coding")
    both = calling("Read", file_path="a.py"), calling("Bash", command="wc -l a.py")
    heard = agent.ask(results(heard.answer, LISTING), "\n".join(both), stream=True)
    agent.messages[0]["content"] = dated.format(30)
    editing = calling("Edit", old_string="x + 3", new_string="3 + x  ", file_path="a.py")
    heard = agent.ask(results(heard.answer, SOURCE, "24 a.py"), editing, stream=True)
    (use,) = agent.messages[-1]["content"]
    use["input"] = {
        "replace_all": False,
        "file_path": "a.py",
        **use["input"],
        "new_string": "3 + x",
    }
    heard = agent.ask(results(heard.answer, "Edited."), "It is faster.", stream=True)
    history, agent.messages = agent.messages, [*agent.messages]
    agent.ask(SUMMARISE, "We edited a.py.", stream=True)
    agent.messages = [{"role": "user", "content": CONTINUED}, *history[-3:]]
    heard = agent.ask("And f4?", calling("Read", file_path="a.py", offset="7"), stream=True)
    agent.messages[-1]["content"][0]["input"]["offset"] = 7
    agent.ask(results(heard.answer, SOURCE), "That one is fast.", stream=True)


def title(front: Front, session: str) -> None:
    front.script.saying = '{"title": "Make f3 faster"}'
    body: dict[str, Any] = {
        "model": "kvws",
        "max_tokens": 100,
        "system": "Write a title.",
        "messages": [{"role": "user", "content": "Make f3 faster."}],
        "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
    }
    reply = front.post(MESSAGES, body, session="", **{"x-claude-code-session-id": session})
    assert reply.status_code == 200, reply.text


def agents(front: Front) -> None:
    """A main loop whose two sub-agents take turns."""
    main = Agent(front, "agents", system=RULES)
    starting = calling("Agent", prompt="Read a."), calling("Agent", prompt="Read b.")
    started = main.ask("Ask two agents.", "\n".join(starting), stream=True)
    helpers = [Agent(front, "agents", name, system=RULES) for name in ("agent-a", "agent-b")]
    heard = [
        helper.ask(f"Read {helper.agent_id}.", calling("Bash", command=f"cat {helper.agent_id}"))
        for helper in helpers
    ]
    for step in range(2):
        for n, helper in enumerate(helpers):
            done = results(heard[n].answer, f"{helper.agent_id} {step}: {SOURCE[step * 40 :]}")
            saying = calling("Bash", command=f"tail -{step} {helper.agent_id}")
            heard[n] = helper.ask(done, "Read." if step else saying)
    main.ask(results(started.answer, "Read a.", "Read b."), "Both were read.", stream=True)


def chat(front: Front) -> None:
    """Chat completions, streamed or not, with a condenser that summarises the middle."""
    functions = [
        {"type": "function", "function": {"name": t["name"], "parameters": t["input_schema"]}}
        for t in TOOLS
    ]
    messages: list[Any] = [
        {"role": "system", "content": RULES},
        {"role": "user", "content": "Find the fault."},
    ]

    def ask(saying: str, *results: str, **more: Any) -> None:
        front.script.saying = saying
        body = {"model": "kvws", "messages": messages, "tools": functions, **more}
        answer = read_answer(CHAT, _chat_reply(front, body))
        messages.extend(answer.turn)
        for call_id, result in zip(answer.call_ids, results, strict=True):
            messages.append({"role": "tool", "tool_call_id": call_id, "content": result})

    ask("I look.\n" + calling("Bash", command="ls -l"), LISTING)
    both = calling("Read", file_path="a.py"), calling("Read", file_path="b.py")
    ask("\n".join(both), SOURCE, SOURCE[::-1], stream=True)
    ask(calling("Edit", file_path="a.py", old_string="1", new_string="2"), "Edited.", stream=True)
    front.script.saying = "We read and edited."
    condensing = [
        {"role": "system", "content": "Summarise."},
        {"role": "user", "content": LISTING},
    ]
    _chat_reply(front, {"model": "kvws", "messages": condensing})
    messages[1:6] = [{"role": "user", "content": "Find the fault.\nSo far: we read and edited."}]
    ask("Found.")


def _chat_reply(front: Front, body: dict[str, Any]) -> Any:
    named = {**body, "prompt_cache_key": "chat"}  # as OpenHands does it, both ways
    reply = front.post(CHAT, named, session="", **{"x-litellm-session-id": "chat"})
    assert reply.status_code == 200, reply.text
    return reply


SESSIONS: dict[str, Callable[[Front], None]] = {"coding": coding, "agents": agents, "chat": chat}


def record(model: Path, folder: Path) -> dict[str, Path]:
    """Talk all sessions through; their recordings by name."""
    private = folder / "private"
    with running_front(model, recorder=lambda: Recorder(private)) as front:
        for talk in SESSIONS.values():
            talk(front)
    return {name: next(private.glob(f"{name}-*.jsonl")) for name in SESSIONS}


def main() -> None:
    model = resolve_model("smollm2")
    assert isinstance(model, Path)
    FIXTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for name, file in record(model, Path(folder)).items():
            shutil.copyfile(file, FIXTURES / f"{name}.jsonl")


if __name__ == "__main__":
    main()
