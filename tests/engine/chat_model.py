"""Chat formats of the embedded model and of variants of it, and scripted answers."""

from __future__ import annotations

import asyncio
import atexit
import copy
import dataclasses
import functools
import shutil
import tempfile
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import transformers

from kvws.chat.answer import Reasoning, Text, ToolArguments, ToolCallBegun
from kvws.chat.call import ModelCall
from kvws.chat.message import Message
from kvws.engine.chat_format import ChatFormat, Ended, PreparedCall
from kvws.engine.chat_parsers import TokenizerOnly
from kvws.engine.protocol import Chunk

CHATML = (
    "{%- for m in messages -%}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
)
QWEN3 = (
    "{%- if tools -%}<tool_call>{\"name\": …}</tool_call>{%- endif -%}"
    + CHATML
    + "{%- if enable_thinking is defined and enable_thinking is false -%}"
    "<think>\n\n</think>\n\n{%- endif -%}"
)
ALWAYS_REASONS = (
    "{%- for m in messages -%}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n<think>\\n' }}{%- endif -%}"
)

THINK_TOKENS = ("<think>", "</think>")


def tool(name: str) -> dict[str, Any]:
    properties = {"command": {"type": "string"}, "count": {"type": "integer"}}
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": "…",
            "parameters": {"type": "object", "properties": properties},
        },
    }


TOOLS = (tool("bash"), tool("edit"))


class Model:
    """A folder with a tokenizer and a chat template, loaded once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manager = TokenizerOnly(str(folder), "auto", "auto")
        self.tokenizer = self.manager.tokenizer
        self._formats: dict[Any, ChatFormat] = {}

    def told(self) -> ChatFormat:
        """The format that is told from the template."""
        return self._format({})

    def format(self, tool_call: str = "hermes", reasoning: str | None = None) -> ChatFormat:
        return self._format({"tool_call_parser": tool_call, "reasoning_parser": reasoning})

    def without_grammars(self) -> ChatFormat:
        return self._format({"grammar_backend": "none"})

    def _format(self, settings: dict[str, str | None]) -> ChatFormat:
        key = tuple(settings.items())
        if key not in self._formats:
            manager = copy.copy(self.manager)
            known = manager.config_value
            manager.config_value = lambda name: settings.get(name, known(name))
            self._formats[key] = ChatFormat.of_engine(manager)
        return self._formats[key]

    def tokens(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


@functools.cache
def model_of(folder: Path) -> Model:
    return Model(folder)


@functools.cache
def variant_of(folder: Path, template: str, markers: tuple[str, ...] = ()) -> Model:
    """A model with another chat template, and further tokens."""
    copied = Path(tempfile.mkdtemp(prefix="kvws-chat-"))
    atexit.register(shutil.rmtree, copied, ignore_errors=True)
    shutil.copy(folder / "config.json", copied)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder))
    tokenizer.add_tokens(list(markers), special_tokens=True)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(str(copied))
    return Model(copied)


def call(**changes: Any) -> ModelCall:
    plain = ModelCall("any", (Message("user", "Do it."),), tools=TOOLS)
    return dataclasses.replace(plain, **changes)


async def scripted(
    tokens: Sequence[int], sizes: Sequence[int], finish: str, matched: int | str | None = None
) -> AsyncGenerator[Chunk, None]:
    """Chunks of these sizes, the last of which holds the rest."""
    begin = 0
    for size in sizes:
        yield Chunk(tuple(tokens[begin : begin + size]), None, 0)
        begin += size
    yield Chunk(tuple(tokens[begin:]), finish, 0, matched_stop=matched)


def events_of(
    format_: ChatFormat, prepared: PreparedCall, chunks: AsyncGenerator[Chunk, None], **more: str
) -> list[Any]:
    async def collect() -> list[Any]:
        return [event async for event in format_.events(prepared, chunks, **more)]

    events = asyncio.run(collect())
    check_well_formed(events)
    return events


def check_well_formed(events: list[Any]) -> None:
    """What `kvws.chat.answer` promises."""
    assert isinstance(events[-1], Ended)
    open_call = None
    calls = 0
    for event in events[:-1]:
        if isinstance(event, ToolArguments):
            assert event.index == open_call and event.json_text
            continue
        open_call = None
        if isinstance(event, ToolCallBegun):
            assert event.index == calls and event.name
            open_call, calls = event.index, calls + 1
        else:
            assert isinstance(event, Text | Reasoning) and event.text
    begun = [event.id for event in events if isinstance(event, ToolCallBegun)]
    assert len(begun) == len(set(begun))


def in_short(events: list[Any]) -> list[tuple[str, ...]]:
    """Events without ids, with neighbouring deltas put together."""
    short: list[tuple[str, ...]] = []
    for event in events:
        match event:
            case Text(text) | Reasoning(text):
                kind, rest = type(event).__name__.lower(), text
            case ToolArguments(_, json_text):
                kind, rest = "arguments", json_text
            case ToolCallBegun(_, _, name):
                kind, rest = "call", name
            case Ended(reason):
                kind, rest = "ended", reason
            case _:
                raise AssertionError(event)
        if short and short[-1][0] == kind != "call":
            short[-1] = (kind, short[-1][1] + rest)
        else:
            short.append((kind, rest))
    return short


def answer(
    model: Model,
    text: str,
    format_: ChatFormat | None = None,
    *,
    sizes: Sequence[int] = (),
    finish: str = "stop",
    opening: str = "",
    **changes: Any,
) -> list[tuple[str, ...]]:
    """The events of a text, in short; in the format that is told from the template."""
    format_ = format_ or model.told()
    chunks = scripted(model.tokens(text), sizes, finish)
    return in_short(events_of(format_, format_.prepare(call(**changes)), chunks, opening=opening))


A_CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
AS_EVENTS = [("call", "bash"), ("arguments", '{"command": "ls"}'), ("ended", "tool_calls")]
