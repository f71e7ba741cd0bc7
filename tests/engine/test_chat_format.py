"""A model's tool calls become events. No engine: tokens are scripted, the parsers SGLang's own."""

from __future__ import annotations

import functools
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvws.chat.answer import ToolArguments, ToolCallBegun
from kvws.chat.call import ToolChoice
from kvws.engine.chat_format import ChatFormat
from tests.engine.chat_model import (
    CHATML,
    Model,
    answer,
    call,
    events_of,
    in_short,
    model_of,
    scripted,
    variant_of,
)

HERMES = (
    'Let me look.\n\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls -l \\"a\\" é🎉", '
    '"count": 3}}\n</tool_call>\n<tool_call>\n{"name": "edit", "arguments": {}}\n</tool_call>'
)
TWO_CALLS = [
    ("call", "bash"),
    ("arguments", '{"command": "ls -l \\"a\\" é🎉", "count": 3}'),
    ("call", "edit"),
    ("arguments", "{}"),
    ("ended", "tool_calls"),
]
FORMATS: dict[str, tuple[str, list[tuple[str, ...]]]] = {
    "hermes": (HERMES, [("text", "Let me look.\n\n"), *TWO_CALLS]),
    "qwen25": (HERMES, [("text", "Let me look.\n\n"), *TWO_CALLS]),
    "llama3": (
        '<|python_tag|>{"name": "bash", "parameters": {"command": "ls -l \\"a\\" é🎉", '
        '"count": 3}};{"name": "edit", "parameters": {}}',
        TWO_CALLS,
    ),
    "mistral": (
        'Sure. [TOOL_CALLS]bash[ARGS]{"command": "ls -l \\"a\\" é🎉", "count": 3}'
        "[TOOL_CALLS]edit[ARGS]{}",
        [("text", "Sure. "), *TWO_CALLS],
    ),
    "qwen3_coder": (
        "Look.\n<tool_call>\n<function=bash>\n<parameter=command>\nls -l \"a\" é🎉\n</parameter>\n"
        "<parameter=count>\n3\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n"
        "<function=edit>\n</function>\n</tool_call>",
        [("text", "Look.\n"), *TWO_CALLS],
    ),
    "glm45": (
        "Look.\n<tool_call>bash\n<arg_key>command</arg_key>\n"
        "<arg_value>ls -l \"a\" é🎉</arg_value>\n"
        "<arg_key>count</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>edit\n"
        "<arg_key>command</arg_key>\n<arg_value>x</arg_value>\n</tool_call>",
        [
            ("text", "Look.\n"), *TWO_CALLS[:3], ("arguments", '{"command": "x"}'), TWO_CALLS[4],
        ],
    ),
}  # fmt: skip
OF_SPECIAL_TOKENS: dict[str, tuple[str, list[tuple[str, ...]]]] = {
    "kimi_k2": (
        "Hm.</think>Look.<|tool_calls_section_begin|><|tool_call_begin|>functions.bash:0"
        '<|tool_call_argument_begin|>{"command": "ls"}<|tool_call_end|><|tool_call_begin|>'
        "functions.edit:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        [
            ("reasoning", "Hm."),
            ("text", "Look."),
            ("call", "bash"), ("arguments", '{"command": "ls"}'),
            ("call", "edit"), ("arguments", "{}"),
            ("ended", "tool_calls"),
        ],
    ),
    "gpt-oss": (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.bash <|constrain|>json<|message|>{"command": "ls"}<|call|>',
        [
            ("reasoning", "Hm."),
            ("call", "bash"), ("arguments", '{"command": "ls"}'),
            ("ended", "tool_calls"),
        ],
    ),
}  # fmt: skip
ALL_FORMATS = FORMATS | OF_SPECIAL_TOKENS


@pytest.fixture(scope="module")
def model(smollm2: Path) -> Model:
    return model_of(smollm2)


Variant = Callable[..., Model]


@pytest.fixture(scope="module")
def variant(smollm2: Path) -> Variant:
    return functools.partial(variant_of, smollm2)


@pytest.fixture
def speaker(parser: str, model: Model, variant: Variant) -> tuple[Model, ChatFormat]:
    """A model that speaks the format `parser`, and its chat format."""
    if parser in FORMATS:
        return model, model.format(parser)
    markers = dict.fromkeys(re.findall(r"<[^>]*\|>", OF_SPECIAL_TOKENS[parser][0]))
    special = variant(CHATML, (*markers, "<think>", "</think>"))
    return special, special.format(parser, parser)


@pytest.mark.parametrize("parser", ALL_FORMATS)
def test_text_and_parallel_calls_come_in_order(
    parser: str, speaker: tuple[Model, ChatFormat]
) -> None:
    text, expected = ALL_FORMATS[parser]
    assert answer(speaker[0], text, speaker[1]) == expected


@pytest.mark.parametrize("parser", ALL_FORMATS)
def test_events_do_not_depend_on_how_tokens_are_cut_into_chunks(
    parser: str, speaker: tuple[Model, ChatFormat]
) -> None:
    model, format_ = speaker
    text, expected = ALL_FORMATS[parser]
    length = len(model.tokens(text))
    rng = random.Random(parser)
    cuts = [[at] for at in range(0, length, 3)] + [[1] * (length - 1)]
    cuts += [[rng.randrange(6) for _ in range(length // 4)] for _ in range(3)]
    for sizes in cuts:
        assert answer(model, text, format_, sizes=sizes) == expected, sizes


@pytest.mark.parametrize("parser", ALL_FORMATS)
def test_an_answer_that_is_cut_anywhere_still_ends_well(
    parser: str, speaker: tuple[Model, ChatFormat]
) -> None:
    model, format_ = speaker
    text, expected = ALL_FORMATS[parser]
    meant = [event[1] for event in expected if event[0] == "arguments"]
    tokens = model.tokens(text)
    for count in range(1, len(tokens), 2):
        chunks = scripted(tokens[:count], (), "length")
        short = in_short(events_of(format_, format_.prepare(call()), chunks))
        assert short[-1] == ("ended", "length")
        said = [event[1] for event in short if event[0] == "arguments"]
        for got, whole in zip(said, meant, strict=False):
            # A cut may halve a character.
            assert whole.startswith(got.rstrip("\ufffd")), "arguments that the model did not write"


@pytest.mark.parametrize("parser", FORMATS)
@pytest.mark.parametrize(
    "text",
    ["2 < 3, and [x] is {y}", "ends with <", "ends with <tool_", '{"a": [1, 2]}', "[TOOL", "\n\n"],
)
def test_plain_text_is_shown_to_its_last_character(
    text: str, parser: str, model: Model
) -> None:
    assert answer(model, text, model.format(parser)) == [("text", text), ("ended", "stop")]


@pytest.mark.parametrize("parser", FORMATS)
def test_a_call_to_a_tool_that_there_is_not_goes_to_the_client(parser: str, model: Model) -> None:
    text, expected = FORMATS[parser]
    short = answer(model, text.replace("bash", "nope"), model.format(parser))
    calls = [event[1] for event in short if event[0] == "call"]
    assert calls == ["nope", "edit"]
    assert [e for e in short if e[0] == "text"] == [e for e in expected if e[0] == "text"]


def test_json_in_an_answer_is_no_call_where_calls_need_no_marker(model: Model) -> None:
    text = '{"name": "Bob", "age": 3}'
    assert answer(model, text, model.format("llama3")) == [("text", text), ("ended", "stop")]


@pytest.mark.parametrize(
    "broken",
    [
        "<tool_call>\nls -l\n</tool_call>",
        "<tool_call>\n[1, 2\n</tool_call> and text",
        '<tool_call>\n{"arguments": {}}\n</tool_call>',
    ],
)
@pytest.mark.parametrize("parser", ["hermes", "qwen25"])
def test_what_never_becomes_a_call_is_shown_as_it_was_written(
    parser: str, broken: str, model: Model
) -> None:
    assert answer(model, broken, model.format(parser)) == [("text", broken), ("ended", "stop")]


@pytest.mark.parametrize("parser", ["hermes", "qwen25"])
def test_arguments_that_break_off_are_not_made_whole(parser: str, model: Model) -> None:
    text = '<tool_call>\n{"name": "bash", "arguments": {"command": "rm -rf "x" y"}}\n</tool_call>'
    short = answer(model, text, model.format(parser))
    assert short[0] == ("call", "bash") and short[-1] == ("ended", "tool_calls")
    with pytest.raises(ValueError):
        json.loads("".join(event[1] for event in short if event[0] == "arguments"))


def test_a_call_behind_a_broken_one_is_shown_and_not_lost(model: Model) -> None:
    second = '<tool_call>\n{"name": "edit", "arguments": {}}\n</tool_call>'
    first = '<tool_call>\n{"name": "bash", "arguments": {"command": "a "b" c"}}\n</tool_call>\n'
    assert answer(model, first + second)[-2] == ("text", second)


def test_words_right_before_a_call_are_shown_though_a_token_spans_both(model: Model) -> None:
    text = 'done.<tool_call>\n{"name": "edit", "arguments": {}}\n</tool_call>'
    for parser in ("hermes", "qwen25"):
        expected = [("text", "done."), ("call", "edit"), ("arguments", "{}")]
        assert answer(model, text, model.format(parser))[:-1] == expected


def test_text_behind_a_call_is_text(model: Model) -> None:
    text = '<tool_call>\n{"name": "edit", "arguments": {}}\n</tool_call>\n\nNow <wait'
    short = answer(model, text)
    assert [event[0] for event in short] == ["call", "arguments", "text", "ended"]
    assert short[2][1].strip() == "Now <wait"


def test_calls_are_not_read_where_none_were_offered(model: Model) -> None:
    for changes in ({"tools": ()}, {"tool_choice": ToolChoice("none")}):
        assert answer(model, HERMES, **changes) == [("text", HERMES), ("ended", "stop")]


def test_no_two_calls_of_a_session_have_one_id(model: Model) -> None:
    ids: list[str] = []
    for parser in ("hermes", "glm45"):
        format_ = model.format(parser)
        for _ in range(3):
            tokens = model.tokens(FORMATS[parser][0])
            events = events_of(format_, format_.prepare(call()), scripted(tokens, (), "stop"))
            ids += [event.id for event in events if isinstance(event, ToolCallBegun)]
    assert len(ids) == len(set(ids)) == 12


def test_a_long_call_is_read_whole_in_pieces_that_grow_with_it(model: Model) -> None:
    content = "\n".join(f'if x[{n}] < {{"a": "é{n}"}}: return' for n in range(400))
    body = json.dumps({"name": "edit", "arguments": {"command": content}})
    format_ = model.format("hermes")
    tokens = model.tokens(f"<tool_call>\n{body}\n</tool_call>")
    events = events_of(format_, format_.prepare(call()), scripted(tokens, (), "stop"))
    deltas = [event.json_text for event in events if isinstance(event, ToolArguments)]
    assert json.loads("".join(deltas)) == {"command": content}
    assert 50 < len(deltas) < len(tokens) / 4


def test_parsers_that_fail_are_not_needed_to_show_the_text(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    parse = FunctionCallParser.parse_stream_chunk

    def failing(self: Any, text: str) -> Any:
        if "three" in text:
            raise ValueError("out of order")
        return parse(self, text)

    monkeypatch.setattr(FunctionCallParser, "parse_stream_chunk", failing)
    text = "one two three four <tool_call> five"
    assert answer(model, text) == [("text", text), ("ended", "stop")]
