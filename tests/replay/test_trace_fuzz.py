"""Any bytes give a trace or a TraceError, and every trace keeps its invariants."""

from __future__ import annotations

import copy
import gzip
import json
import lzma
from typing import Any

from hypothesis import event, given, settings
from hypothesis import strategies as st

from kvws.errors import TraceError
from kvws.replay.loaders import parse_trace

KEYS = st.sampled_from(
    [
        *("type", "uuid", "parentUuid", "isSidechain", "agentId", "message", "role", "content"),
        *("id", "model", "name", "input", "subtype", "data", "text", "tool_use_id"),
        *("isApiErrorMessage", "messages", "raw_messages", "traj", "response", "choices"),
        *("tools", "tool_calls", "function", "arguments", "function_call", "tool_call_id"),
        *("info", "mini_version", "trajectory_format", "history", "trajectory", "agent"),
        *("action", "observation", "args", "extras", "thought", "source", "cause", "outputs"),
        *("tool_call_metadata", "model_response", "tool_call_ids", "is_demo", "query"),
    ]
)
WORDS = st.sampled_from(
    [
        *("user", "assistant", "system", "tool", "exit", "progress", "agent_progress"),
        *("compact_boundary", "text", "image", "tool_use", "tool_result", "thinking"),
        *("<synthetic>", "mini-swe-agent-1", "u1", "u2", "m1", "m2", "agent", "run", "recall"),
        *("message", "null", "condensation", "finish", "delegate"),
    ]
)
SCALARS = st.one_of(WORDS, WORDS, st.none(), st.booleans(), st.integers(), st.floats(), st.text())
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(KEYS, inner, max_size=5)),
    max_leaves=12,
)

BLOCK = {
    "type": st.sampled_from(["text", "tool_use", "tool_result", "image", "thinking"]),
    "id": WORDS,
    "tool_use_id": WORDS,
    "name": WORDS,
    "input": VALUES,
    "content": VALUES,
    "text": st.text(),
}
BLOCKS = st.lists(st.one_of(st.fixed_dictionaries({}, optional=BLOCK), VALUES), max_size=4)
ROLES = st.sampled_from(["user", "assistant", "tool", "system", "user", "assistant"])
KINDS = st.sampled_from(["user", "assistant", "user", "assistant", "progress", "system"])
IDS = st.sampled_from(["a", "b", "c", "d", "e", "f"])
MESSAGE = st.fixed_dictionaries(
    {
        "role": st.one_of(ROLES, ROLES, ROLES, VALUES),
        "content": st.one_of(BLOCKS, st.text(), VALUES),
    },
    optional={"id": WORDS, "model": WORDS, "tool_calls": BLOCKS, "tool_call_id": WORDS},
)
LINE = st.fixed_dictionaries(
    {"type": KINDS, "message": MESSAGE, "uuid": st.one_of(IDS, st.uuids().map(str))},
    optional={
        "parentUuid": st.one_of(IDS, IDS, st.none(), VALUES),
        "isSidechain": st.booleans(),
        "agentId": WORDS,
        "subtype": st.just("compact_boundary"),
        "data": st.fixed_dictionaries(
            {
                "type": st.just("agent_progress"),
                "message": st.fixed_dictionaries({"type": KINDS, "message": MESSAGE}),
            }
        ),
        "sessionId": WORDS,
    },
)
RECORD = st.fixed_dictionaries(
    {},
    optional={
        "messages": st.lists(MESSAGE, max_size=5),
        "raw_messages": VALUES,
        "traj": st.lists(MESSAGE, max_size=3),
        "response": VALUES,
        "tools": VALUES,
        "info": VALUES,
        "trajectory_format": WORDS,
    },
)
METADATA = st.fixed_dictionaries(
    {"tool_call_id": WORDS, "function_name": st.one_of(WORDS, VALUES)},
    optional={
        "model_response": st.one_of(
            VALUES,
            st.fixed_dictionaries(
                {
                    "id": st.one_of(IDS, VALUES),
                    "choices": st.lists(st.fixed_dictionaries({"message": MESSAGE}), max_size=2),
                }
            ),
        )
    },
)
DETAILS = st.fixed_dictionaries(
    {},
    optional={
        "content": VALUES,
        "command": WORDS,
        "thought": VALUES,
        "hidden": st.booleans(),
        "metadata": VALUES,
        "microagent_knowledge": VALUES,
        "forgotten_event_ids": st.one_of(st.lists(st.integers(0, 8)), VALUES),
        "forgotten_events_start_id": st.one_of(st.integers(0, 8), VALUES),
        "forgotten_events_end_id": st.one_of(st.integers(0, 8), VALUES),
        "summary": st.one_of(WORDS, VALUES),
        "summary_offset": st.one_of(st.integers(-2, 9), VALUES),
        "tools": VALUES,
    },
)
ACTIONS = st.sampled_from(["system", "message", "run", "run", "recall", "condensation", "finish"])
EVENT = st.one_of(
    st.fixed_dictionaries(
        {"action": st.one_of(ACTIONS, ACTIONS, WORDS)},
        optional={
            "id": st.one_of(st.integers(0, 8), VALUES),
            "source": st.one_of(st.sampled_from(["agent", "user"]), VALUES),
            "args": st.one_of(DETAILS, VALUES),
            "tool_call_metadata": st.one_of(METADATA, METADATA, VALUES),
        },
    ),
    st.fixed_dictionaries(
        {"observation": st.one_of(ACTIONS, WORDS), "content": VALUES},
        optional={
            "id": st.one_of(st.integers(0, 8), VALUES),
            "cause": st.one_of(st.integers(0, 8), VALUES),
            "extras": st.one_of(DETAILS, VALUES),
            "tool_call_metadata": st.one_of(METADATA, VALUES),
        },
    ),
)
EVENTS = st.lists(st.one_of(EVENT, EVENT, st.lists(EVENT, max_size=2), VALUES), max_size=10)
RUN = st.fixed_dictionaries({"history": EVENTS}, optional={"instruction": VALUES})
ENTRY = st.builds(
    lambda message, more: {**message, **more},
    MESSAGE,
    st.fixed_dictionaries(
        {},
        optional={
            "agent": st.one_of(WORDS, VALUES),
            "is_demo": st.one_of(st.booleans(), VALUES),
            "tool_call_ids": st.one_of(st.lists(WORDS, max_size=2), VALUES),
        },
    ),
)
STEP = st.fixed_dictionaries(
    {"observation": VALUES},
    optional={
        "action": st.one_of(WORDS, VALUES),
        "response": st.one_of(WORDS, VALUES),
        "thought": VALUES,
        "query": st.one_of(st.lists(ENTRY, max_size=3), VALUES),
        "messages": VALUES,
    },
)
TRAJECTORY = st.fixed_dictionaries(
    {"trajectory": st.lists(st.one_of(STEP, STEP, VALUES), max_size=4)},
    optional={"history": st.one_of(st.lists(ENTRY, max_size=6), VALUES)},
)


def check(data: bytes) -> bool:
    """Parse; whether it gave a trace."""
    try:
        trace = parse_trace(data)
    except TraceError as error:
        assert error.hint
        return False
    assert trace.steps
    for step in trace.steps:
        assert trace.context(step)
        assert trace.reply(step).role == "assistant"
    for messages in trace.threads.values():
        for message in messages:
            message.content.encode()
            for call in message.tool_calls:
                (call.id + call.name + call.arguments).encode()
    return True


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.sampled_from([b"", b"\xfd7zXZ\x00", b"\x1f\x8b\x08", b"{"]))
def test_random_bytes(data: bytes, start: bytes) -> None:
    check(start + data)


@settings(max_examples=300, deadline=None)
@given(st.one_of(VALUES, RECORD, st.lists(RECORD, max_size=3)))
def test_random_documents(value: Any) -> None:
    event(f"a trace: {check(json.dumps(value).encode())}")


@settings(max_examples=500, deadline=None)
@given(st.one_of(RUN, EVENTS, TRAJECTORY))
def test_random_runs(value: Any) -> None:
    event(f"a trace: {check(json.dumps(value).encode())}")


@settings(max_examples=500, deadline=None)
@given(st.lists(st.one_of(LINE, LINE, LINE, VALUES), max_size=8))
def test_random_lines(lines: list[Any]) -> None:
    event(f"a trace: {check(as_lines(lines))}")


def as_lines(rows: list[Any]) -> bytes:
    return "\n".join(map(json.dumps, rows)).encode()


CALL: dict[str, Any] = {"type": "tool_use", "id": "t", "name": "Read", "input": {"path": "a"}}
RESULT: dict[str, Any] = {"type": "tool_result", "tool_use_id": "t", "content": [{"text": "x"}]}
TRANSCRIPT: list[Any] = [
    {"type": "user", "uuid": "a", "parentUuid": None, "message": {"content": "Go."}},
    {
        "type": "assistant",
        "uuid": "b",
        "parentUuid": "a",
        "message": {"id": "m", "content": [{"type": "text", "text": "Hm."}, CALL]},
    },
    {"type": "user", "uuid": "c", "parentUuid": "b", "message": {"content": [RESULT]}},
    {"type": "user", "uuid": "d", "isSidechain": True, "message": {"content": "Task."}},
    {"type": "assistant", "uuid": "e", "parentUuid": "d", "isSidechain": True, "message": {}},
    {"type": "system", "uuid": "f", "subtype": "compact_boundary"},
    {"type": "user", "uuid": "g", "parentUuid": "f", "message": {"content": "Summary."}},
    {"type": "assistant", "uuid": "h", "message": {"id": "n", "content": "Done."}},
]
CHAT: list[Any] = [
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Go."}]},
            {"role": "assistant", "tool_calls": [{"id": "t", "function": {"name": "f"}}]},
            {"role": "tool", "tool_call_id": "t", "content": "x"},
        ],
        "tools": [{"function": {"name": "f"}}],
        "response": {"choices": [{"message": {"role": "assistant", "content": "Done."}}]},
    }
]
ANSWER: dict[str, Any] = {"content": "Hm.", "tool_calls": [{"id": "t", "function": {}}]}
RESPONSE: dict[str, Any] = {"id": "r", "choices": [{"message": ANSWER}]}
TURN: dict[str, Any] = {"tool_call_id": "t", "function_name": "f", "model_response": RESPONSE}
OPENHANDS: list[Any] = [
    {
        "instruction": "Go.",
        "history": [
            {"id": 0, "source": "agent", "action": "system", "args": {"tools": [{"a": "b"}]}},
            {"id": 1, "source": "user", "action": "message", "args": {"content": "Go."}},
            {"id": 2, "source": "agent", "action": "run", "args": {}, "tool_call_metadata": TURN},
            {"id": 3, "cause": 2, "observation": "run", "content": "x", "extras": {}},
            {
                "action": "condensation",
                "args": {"forgotten_event_ids": [2], "summary": "s", "summary_offset": 1},
            },
            {"action": "run", "command": "ls", "thought": "Hm."},
            [{"observation": "null"}, {"action": "finish", "outputs": {"content": "Done."}}],
        ],
    }
]
SWE_AGENT: list[Any] = [
    {
        "trajectory": [{"action": "a", "observation": "x", "response": "a"}],
        "history": [
            {"role": "system", "content": "s", "agent": "main"},
            {"role": "user", "content": [{"type": "text", "text": "Go."}], "is_demo": True},
            {"role": "assistant", "tool_calls": [{"id": "t", "function": {"name": "f"}}]},
            {"role": "tool", "tool_call_ids": ["t"], "content": "x", "agent": "main"},
        ],
    }
]
SEEDS = (TRANSCRIPT, CHAT, OPENHANDS, SWE_AGENT)
SESSIONS = st.sampled_from(SEEDS)


def places(value: Any) -> list[tuple[Any, Any]]:
    """All (container, key) inside a JSON value."""
    pairs = list(value.items() if isinstance(value, dict) else enumerate(value))
    inner = [place for _, v in pairs if isinstance(v, dict | list) for place in places(v)]
    return [(value, key) for key, _ in pairs] + inner


def test_the_seeds_of_the_mutations_are_valid() -> None:
    for session in SEEDS:
        for pack in (bytes, lzma.compress, gzip.compress):
            assert check(pack(as_lines(session)))


@settings(max_examples=1000, deadline=None)
@given(SESSIONS, st.lists(st.tuples(st.integers(0, 10_000), VALUES), min_size=1, max_size=3))
def test_mutated_json(session: list[Any], changes: list[tuple[int, Any]]) -> None:
    mutated = copy.deepcopy(session)
    for position, value in changes:
        if found := places(mutated):
            container, key = found[position % len(found)]
            container[key] = value
    event(f"a trace: {check(as_lines(mutated))}")


@settings(max_examples=500, deadline=None)
@given(
    SESSIONS,
    st.sampled_from([bytes, lzma.compress, gzip.compress]),
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=3),
    st.one_of(st.just(0), st.integers(0, 400)),
)
def test_mutated_bytes(
    session: list[Any], pack: Any, changes: list[tuple[int, int]], cut_bytes: int
) -> None:
    mutated = bytearray(pack(as_lines(session)))
    for position, value in changes:
        mutated[position % len(mutated)] = value
    event(f"a trace: {check(bytes(mutated[: max(1, len(mutated) - cut_bytes)]))}")
