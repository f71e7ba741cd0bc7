"""Answers that must follow a grammar do, though the model is small and drawn at random."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from kvws.chat.call import ModelCall, Sampling, ToolChoice
from kvws.chat.message import Message
from kvws.engine.chat_format import ChatFormat
from kvws.engine.launch import RunningEngine
from kvws.engine.protocol import GenerateRequest
from tests.engine.chat_model import in_short, tool

TOOLS = (tool("bash"), tool("edit"))
SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 30},
        "priority": {"type": "integer", "minimum": 1, "maximum": 5},
        "kind": {"enum": ["bug", "feature"]},
    },
    "required": ["title", "priority", "kind"],
    "additionalProperties": False,
}
MOST_TOKENS = 640
"""As many as an answer by the schema can have: twelve places for 32 blanks, 30 characters of at
most six tokens each, which an escape has, and the names."""
_serial = itertools.count()


@pytest.fixture(scope="module")
def format_(running: RunningEngine) -> ChatFormat:
    return ChatFormat.of_engine(running.engine._manager)


def ask(
    running: RunningEngine,
    format_: ChatFormat,
    prompt: str = "File a ticket: the door squeaks.",
    most_tokens: int = 160,
    **changes: Any,
) -> list[tuple[str, ...]]:
    """The events of the engine's answer, in short."""
    call = ModelCall("any", (Message("user", prompt),), **changes)
    prepared = format_.prepare(call)
    assert not prepared.dropped
    rid = f"grammar-{next(_serial)}"
    tokens = format_._tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}],
        add_generation_prompt=True,
        return_dict=False,
    )
    request = GenerateRequest(
        rid=rid,
        step=None,
        namespace=rid,
        token_ids=tokens,
        max_new_tokens=most_tokens,
        sampling=prepared.sampling,
    )

    async def collect() -> list[Any]:
        chunks = running.engine.generate(request)
        return [event async for event in format_.events(prepared, chunks)]

    return in_short(running.run(collect()))


@pytest.mark.parametrize(
    "drawn",
    [
        Sampling(temperature=1.0, seed=0),
        Sampling(temperature=1.0, frequency_penalty=-2.0, seed=0),  # says again what it has said
    ],
    ids=["freely", "repeating"],
)
def test_an_answer_follows_its_schema_and_ends(
    drawn: Sampling, running: RunningEngine, format_: ChatFormat
) -> None:
    """Of blanks between values the grammar would allow any number, until the tokens run out."""
    (kind, text), ended = ask(
        running, format_, json_schema=SCHEMA, sampling=drawn, most_tokens=MOST_TOKENS
    )
    assert kind == "text" and ended == ("ended", "stop"), text[-200:]
    answer = json.loads(text)
    assert set(answer) == {"title", "priority", "kind"}
    assert answer["kind"] in ("bug", "feature") and 1 <= answer["priority"] <= 5


def test_a_named_tool_is_called(running: RunningEngine, format_: ChatFormat) -> None:
    forced = ToolChoice("required", "edit")
    events = ask(
        running, format_, tools=TOOLS, tool_choice=forced, sampling=Sampling(temperature=0.0)
    )
    assert events[0] == ("call", "edit")
    assert events[-1] in {("ended", "tool_calls"), ("ended", "length")}


def test_an_answer_ends_at_a_stop_text_that_is_not_shown(
    running: RunningEngine, format_: ChatFormat
) -> None:
    told = "Tell me a long story about a door."
    (_, whole), _ = ask(running, format_, told, sampling=Sampling(temperature=0.0))
    words = whole.split()
    word = words[len(words) // 2]
    before = whole.partition(word)[0]
    assert before.strip(), "the word in the middle is also the first"
    cut = ask(running, format_, told, sampling=Sampling(temperature=0.0, stop=(word,)))
    assert cut == [("text", before), ("ended", "stop_text")]
