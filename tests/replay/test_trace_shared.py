"""Recorded sessions of real agents load and render as their table says."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from kvws.chat.render import ChatRenderer
from kvws.errors import TraceError
from kvws.replay.loaders import load_trace, parse_trace
from kvws.replay.trace import Trace

CLAUDE_CODE = (
    "claude-reliability-python-to-rust-port",
    "session-share-general-tool-calls",
    "spotter-258c7280",
    "spotter-ae4a77f8",
)
OPENHANDS = ("multi-swe-ponylang__ponyc-4588", "resolver-issue-1")
SWE_AGENT = ("marshmallow-1867-function-calling-replace", "pydicom-1458")
MINI_SWE_AGENT = ("django__django-11066", "django__django-11138", "sphinx-doc__sphinx-9258")


@pytest.fixture(scope="module")
def renderer(smollm2: Path) -> ChatRenderer:
    return ChatRenderer(smollm2)


@pytest.fixture(scope="module")
def table(shared_traces: Path) -> dict[str, list[str]]:
    """Rows of the folder's table by file name: turns in column 3, tokens in column 4."""
    rows = (shared_traces / "README.md").read_text().splitlines()
    cells = [[cell.strip() for cell in row.strip("| ").split("|")] for row in rows if "|" in row]
    return {row[0]: row for row in cells if len(row) > 10}


def claude_code(folder: Path, name: str) -> Path:
    return folder / "claude_code" / f"{name}.jsonl.xz"


def mini_swe_agent(folder: Path, name: str) -> Path:
    return folder / "mini_swe_agent" / f"{name}.traj.json.xz"


def openhands(folder: Path, name: str) -> Path:
    return folder / "openhands_v0" / f"{name}.json.xz"


def swe_agent(folder: Path, name: str) -> Path:
    return folder / "swe_agent" / f"{name}.traj.xz"


def runs_of_events_and_trajectories(folder: Path) -> list[Path]:
    return [openhands(folder, name) for name in OPENHANDS] + [
        swe_agent(folder, name) for name in SWE_AGENT
    ]


def main_threads(trace: Trace) -> list[str]:
    return [name for name in trace.threads if name.startswith("main")]


def rendered_tokens(renderer: ChatRenderer, trace: Trace, thread: str) -> int:
    return len(renderer.tokens(trace.threads[thread], trace.tools, add_generation_prompt=False))


@pytest.mark.parametrize("name", MINI_SWE_AGENT)
def test_mini_swe_agent_matches_the_table(
    shared_traces: Path, table: dict[str, list[str]], renderer: ChatRenderer, name: str
) -> None:
    trace = load_trace(mini_swe_agent(shared_traces, name))
    row = table[f"mini_swe_agent/{name}.traj.json"]
    assert (trace.format, trace.notes) == ("mini-swe-agent", ())
    assert len(trace.steps) == int(row[3])
    assert rendered_tokens(renderer, trace, "main") == pytest.approx(int(row[4]), rel=0.02)


@pytest.mark.parametrize("name", CLAUDE_CODE)
def test_claude_code_has_a_step_per_model_message(
    shared_traces: Path, table: dict[str, list[str]], name: str
) -> None:
    """The table counts lines, each of which holds one block of a model message."""
    path = claude_code(shared_traces, name)
    rows: list[Any] = [json.loads(row) for row in lzma.decompress(path.read_bytes()).splitlines()]
    lines = [row["message"] for row in rows if row["type"] == "assistant"]
    written = {line["id"] for line in lines if line["model"] != "<synthetic>"}
    trace = load_trace(path)
    steps = [step for step in trace.steps if step.thread.startswith("main")]
    assert trace.format == "claude-code"
    assert len(steps) == len(written)
    assert len(lines) == int(table[f"claude_code/{name}.jsonl"][3])


@pytest.mark.parametrize("name", [name for name in CLAUDE_CODE if "session-share" not in name])
def test_claude_code_token_counts_are_near_the_table(
    shared_traces: Path, table: dict[str, list[str]], renderer: ChatRenderer, name: str
) -> None:
    """The table spells tool calls in its own way, hence the tolerance."""
    trace = load_trace(claude_code(shared_traces, name))
    total = sum(rendered_tokens(renderer, trace, thread) for thread in main_threads(trace))
    row = table[f"claude_code/{name}.jsonl"]
    assert total == pytest.approx(int(row[4]), rel=0.1)
    assert len(main_threads(trace)) == 1 + int(row[10].split()[0])


def test_a_resumed_session_is_a_second_thread_of_new_steps(shared_traces: Path) -> None:
    trace = load_trace(claude_code(shared_traces, "session-share-general-tool-calls"))
    per_thread = [sum(s.thread == name for s in trace.steps) for name in main_threads(trace)]
    assert per_thread == [49, 5]


def test_sub_agents_are_found(shared_traces: Path) -> None:
    for name in ("spotter-258c7280", "spotter-ae4a77f8"):
        trace = load_trace(claude_code(shared_traces, name))
        assert [s.thread for s in trace.steps if not s.thread.startswith("main")] == [
            "agent-1"
        ] * 2


def test_openai_chat_logs(shared_traces: Path) -> None:
    paths = sorted(shared_traces.glob("openai_chat/*/*.json*"))
    assert paths
    for path in paths:
        trace = load_trace(path)
        assert trace.format == "openai-chat"
        assert trace.tools
        assert trace.steps[-1].context_messages == len(trace.threads["main"]) - 1
    trace = load_trace(shared_traces / "openai_chat" / "tau-bench-gpt4o-airline-12.json.xz")
    assert len(trace.threads) == 12
    assert len(trace.steps) == 291


@pytest.mark.parametrize(
    ("name", "messages", "steps", "tools"),
    [("multi-swe-ponylang__ponyc-4588", 101, 49, 4), ("resolver-issue-1", 44, 22, 0)],
)
def test_openhands_runs(
    shared_traces: Path, name: str, messages: int, steps: int, tools: int
) -> None:
    trace = load_trace(openhands(shared_traces, name))
    assert trace.format == "openhands-v0"
    assert (len(trace.threads["main"]), len(trace.steps)) == (messages, steps)
    assert len(trace.tools) == tools


@pytest.mark.parametrize(
    ("name", "messages", "steps"),
    [("marshmallow-1867-function-calling-replace", 28, 13), ("pydicom-1458", 26, 12)],
)
def test_swe_agent_trajectories(shared_traces: Path, name: str, messages: int, steps: int) -> None:
    trace = load_trace(swe_agent(shared_traces, name))
    assert (trace.format, trace.notes) == ("swe-agent", ())
    assert (len(trace.threads["main"]), len(trace.steps)) == (messages, steps)


def test_replies_say_something_and_results_answer_the_turn_before(shared_traces: Path) -> None:
    for path in runs_of_events_and_trajectories(shared_traces):
        trace = load_trace(path)
        for step in trace.steps:
            reply = trace.reply(step)
            assert reply.content or reply.tool_calls, (path.name, step)
        called: set[str] = set()
        for message in trace.threads["main"]:
            if message.role == "assistant":
                called = {call.id for call in message.tool_calls}
            elif message.role == "tool":
                assert message.tool_call_id in called, path.name
                assert message.name, path.name
                called.remove(message.tool_call_id)


def test_without_its_history_a_trajectory_has_the_same_replies(shared_traces: Path) -> None:
    for name in SWE_AGENT:
        data = lzma.decompress(swe_agent(shared_traces, name).read_bytes())
        fields: dict[str, Any] = json.loads(data)
        whole = parse_trace(data)
        rebuilt = parse_trace(json.dumps({**fields, "history": None}).encode())
        # pydicom's steps don't hold the prompt: its first turn answers nothing there.
        replies = [whole.reply(step).content for step in whole.steps][-len(rebuilt.steps) :]
        assert len(rebuilt.steps) in (len(whole.steps), len(whole.steps) - 1)
        for reply, step in zip(replies, rebuilt.steps, strict=True):
            assert rebuilt.reply(step).content.startswith(reply)


def test_formats_without_a_loader_are_refused(shared_traces: Path) -> None:
    for path in (shared_traces / "mooncake").iterdir():
        with pytest.raises(TraceError, match="format is not known"):
            load_trace(path)


def test_prompts_share_everything_up_to_the_end_of_the_previous_context(
    shared_traces: Path, renderer: ChatRenderer
) -> None:
    paths = [claude_code(shared_traces, name) for name in CLAUDE_CODE]
    paths += [mini_swe_agent(shared_traces, name) for name in MINI_SWE_AGENT]
    paths += shared_traces.glob("openai_chat/*/*.json*")
    paths += runs_of_events_and_trajectories(shared_traces)
    for path in paths:
        trace = load_trace(path)
        before: dict[str, list[int]] = {}
        for step in trace.steps:
            prompt = renderer.tokens(trace.context(step), trace.tools)
            context = before.get(step.thread, [])
            assert prompt[: len(context)] == context, (path.name, step)
            before[step.thread] = renderer.tokens(
                trace.context(step), trace.tools, add_generation_prompt=False
            )
