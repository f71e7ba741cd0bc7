"""A model's tokens become events. No engine: tokens are scripted, the parsers are SGLang's own."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import inspect
import json
import random
import shutil
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import transformers

from kvws.chat.answer import Reasoning, Text, ToolArguments, ToolCallBegun
from kvws.chat.call import ModelCall, Sampling, ToolChoice
from kvws.chat.message import Message
from kvws.engine.chat_format import ChatFormat, Ended, PreparedCall
from kvws.engine.chat_parsers import FRAMED_FORMATS
from kvws.engine.protocol import Chunk
from kvws.errors import BadRequest, ConfigError, EngineError

MARKERS = [
    "<think>", "</think>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "<|call|>", "<|channel|>",
    "<|constrain|>", "<|end|>", "<|message|>", "<|start|>", "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
]  # fmt: skip

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
    """A folder with a tokenizer and a chat template, and chat formats of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(str(folder))
        self._formats: dict[tuple[str, str], ChatFormat] = {}

    def format(self, tool_call: str = "auto", reasoning: str = "auto") -> ChatFormat:
        names = (tool_call, reasoning)
        if names not in self._formats:
            self._formats[names] = ChatFormat.offline(
                self.folder, tool_call_parser=tool_call, reasoning_parser=reasoning
            )
        return self._formats[names]

    def tokens(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


@pytest.fixture(scope="session")
def model_with(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    """Models that have everybody's markers in their vocabulary, by chat template."""
    made: dict[str, Model] = {}

    def make(template: str) -> Model:
        if template not in made:
            folder = tmp_path_factory.mktemp("model")
            shutil.copy(smollm2 / "config.json", folder)
            tokenizer = transformers.AutoTokenizer.from_pretrained(str(smollm2))
            tokenizer.add_tokens(MARKERS, special_tokens=True)
            tokenizer.chat_template = template
            tokenizer.save_pretrained(str(folder))
            made[template] = Model(folder)
        return made[template]

    return make


@pytest.fixture(scope="session")
def model(model_with: Callable[[str], Model]) -> Model:
    return model_with(CHATML)


@pytest.fixture(scope="session")
def embedded(smollm2: Path) -> Model:
    return Model(smollm2)


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
    parser: str = "auto",
    reasoning: str = "auto",
    *,
    sizes: Sequence[int] = (),
    finish: str = "stop",
    opening: str = "",
    **changes: Any,
) -> list[tuple[str, ...]]:
    format_ = model.format(parser, reasoning)
    chunks = scripted(model.tokens(text), sizes, finish)
    return in_short(events_of(format_, format_.prepare(call(**changes)), chunks, opening=opening))


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
        "Look.\n<tool_call>bash\n<arg_key>command</arg_key>\n<arg_value>ls -l \"a\" é🎉</arg_value>\n"
        "<arg_key>count</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>edit\n"
        "<arg_key>command</arg_key>\n<arg_value>x</arg_value>\n</tool_call>",
        [
            ("text", "Look.\n"), *TWO_CALLS[:3], ("arguments", '{"command": "x"}'), TWO_CALLS[4],
        ],
    ),
    "kimi_k2": (
        "Look.<|tool_calls_section_begin|><|tool_call_begin|>functions.bash:0"
        '<|tool_call_argument_begin|>{"command": "ls"}<|tool_call_end|><|tool_call_begin|>'
        "functions.edit:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        [
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


def reasoning_of(parser: str) -> str:
    return "gpt-oss" if parser == "gpt-oss" else "auto"


# ---- tool calls --------------------------------------------------------------------------------


@pytest.mark.parametrize("parser", FORMATS)
def test_text_and_parallel_calls_come_in_order(parser: str, model: Model) -> None:
    text, expected = FORMATS[parser]
    assert answer(model, text, parser, reasoning_of(parser)) == expected


@pytest.mark.parametrize("parser", FORMATS)
def test_events_do_not_depend_on_how_tokens_are_cut_into_chunks(
    parser: str, model: Model
) -> None:
    text, expected = FORMATS[parser]
    length = len(model.tokens(text))
    rng = random.Random(parser)
    cuts = [[at] for at in range(0, length, 5)] + [[1] * (length - 1)]
    cuts += [[rng.randrange(6) for _ in range(length // 4)] for _ in range(3)]
    for sizes in cuts:
        assert answer(model, text, parser, reasoning_of(parser), sizes=sizes) == expected, sizes


@pytest.mark.parametrize("parser", FORMATS)
def test_an_answer_that_is_cut_anywhere_still_ends_well(parser: str, model: Model) -> None:
    text, expected = FORMATS[parser]
    arguments = [event[1] for event in expected if event[0] == "arguments"]
    format_ = model.format(parser, reasoning_of(parser))
    tokens = model.tokens(text)
    for count in range(1, len(tokens), 3):
        chunks = scripted(tokens[:count], (), "length")
        short = in_short(events_of(format_, format_.prepare(call()), chunks))
        assert short[-1] == ("ended", "length")
        got = [event[1] for event in short if event[0] == "arguments"]
        for said, meant in zip(got, arguments, strict=False):
            assert meant.startswith(said), "arguments that the model did not write"


@pytest.mark.parametrize("parser", [name for name in FORMATS if name != "gpt-oss"])
@pytest.mark.parametrize(
    "text",
    ["2 < 3, and [x] is {y}", "ends with <", "ends with <tool_", '{"a": [1, 2]}', "[TOOL", "\n\n"],
)
def test_plain_text_is_shown_to_its_last_character(
    text: str, parser: str, model: Model
) -> None:
    assert answer(model, text, parser) == [("text", text), ("ended", "stop")]


@pytest.mark.parametrize("parser", [name for name in FORMATS if name != "gpt-oss"])
def test_a_call_to_a_tool_that_there_is_not_goes_to_the_client(parser: str, model: Model) -> None:
    text, expected = FORMATS[parser]
    short = answer(model, text.replace("bash", "nope"), parser)
    calls = [event[1] for event in short if event[0] == "call"]
    assert calls == ["nope", "edit"]
    assert [e for e in short if e[0] == "text"] == [e for e in expected if e[0] == "text"]


def test_json_in_an_answer_is_no_call_where_calls_need_no_marker(model: Model) -> None:
    text = '{"name": "Bob", "age": 3}'
    assert answer(model, text, "llama3") == [("text", text), ("ended", "stop")]


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
    assert answer(model, broken, parser) == [("text", broken), ("ended", "stop")]


@pytest.mark.parametrize("parser", ["hermes", "qwen25"])
def test_arguments_that_break_off_are_not_made_whole(parser: str, model: Model) -> None:
    text = '<tool_call>\n{"name": "bash", "arguments": {"command": "rm -rf "x" y"}}\n</tool_call>'
    short = answer(model, text, parser)
    assert short[0] == ("call", "bash") and short[-1] == ("ended", "tool_calls")
    with pytest.raises(ValueError):
        json.loads("".join(event[1] for event in short if event[0] == "arguments"))


def test_a_call_behind_a_broken_one_is_shown_and_not_lost(model: Model) -> None:
    second = '<tool_call>\n{"name": "edit", "arguments": {}}\n</tool_call>'
    first = '<tool_call>\n{"name": "bash", "arguments": {"command": "a "b" c"}}\n</tool_call>\n'
    assert answer(model, first + second, "hermes")[-2] == ("text", second)


def test_words_right_before_a_call_are_shown_though_a_token_spans_both(model: Model) -> None:
    text = 'done.<tool_call>\n{"name": "edit", "arguments": {}}\n</tool_call>'
    for parser in ("hermes", "qwen25"):
        expected = [("text", "done."), ("call", "edit"), ("arguments", "{}")]
        assert answer(model, text, parser)[:-1] == expected


def test_text_behind_a_call_is_text(model: Model) -> None:
    text = '<tool_call>\n{"name": "edit", "arguments": {}}\n</tool_call>\n\nNow <wait'
    short = answer(model, text, "hermes")
    assert [event[0] for event in short] == ["call", "arguments", "text", "ended"]
    assert short[2][1].strip() == "Now <wait"


def test_calls_are_not_read_where_none_were_offered(model: Model) -> None:
    for changes in ({"tools": ()}, {"tool_choice": ToolChoice("none")}):
        assert answer(model, HERMES, "hermes", **changes) == [("text", HERMES), ("ended", "stop")]


def test_no_two_calls_of_a_session_have_one_id(model: Model) -> None:
    ids: list[str] = []
    for parser in ("hermes", "kimi_k2"):
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
    assert answer(model, text, "hermes") == [("text", text), ("ended", "stop")]


# ---- which parsers -----------------------------------------------------------------------------


def test_the_embedded_model_calls_tools_the_way_they_are_spelled_out_for_it(
    embedded: Model,
) -> None:
    format_ = embedded.format()
    assert (format_.tool_call_parser, format_.reasoning_parser) == ("hermes", None)


def test_parsers_are_told_from_the_template_as_sglang_tells_them(
    model_with: Callable[[str], Model],
) -> None:
    format_ = model_with(QWEN3).format()
    assert (format_.tool_call_parser, format_.reasoning_parser) == ("qwen", "qwen3")


def test_llama_is_known_by_its_vocabulary(model: Model) -> None:
    assert model.format().tool_call_parser == "llama3"


def test_a_parser_of_no_such_name_is_refused_with_those_there_are(embedded: Model) -> None:
    with pytest.raises(ConfigError, match="qwen25"):
        ChatFormat.offline(embedded.folder, tool_call_parser="qwen2.5")
    with pytest.raises(ConfigError, match="deepseek-r1"):
        ChatFormat.offline(embedded.folder, reasoning_parser="r1")


# ---- reasoning ---------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def qwen3(model_with: Callable[[str], Model]) -> Model:
    return model_with(QWEN3)


THOUGHT = [("reasoning", "Hm, 1 < 2.\n"), ("text", "\n\nYes."), ("ended", "stop")]


def test_reasoning_is_told_from_the_answer(qwen3: Model) -> None:
    assert answer(qwen3, "<think>Hm, 1 < 2.\n</think>\n\nYes.") == THOUGHT


def test_reasoning_that_the_prompt_began_needs_no_beginning(qwen3: Model) -> None:
    assert answer(qwen3, "Hm, 1 < 2.\n</think>\n\nYes.", opening="…<think>\n") == THOUGHT


def test_a_model_that_always_reasons_does_so_without_being_told(
    model_with: Callable[[str], Model],
) -> None:
    always = model_with(ALWAYS_REASONS)
    assert always.format().reasoning_parser == "deepseek-r1"
    assert answer(always, "Hm, 1 < 2.\n</think>\n\nYes.") == THOUGHT


def test_a_prompt_that_opens_reasoning_unexpectedly_is_believed(qwen3: Model) -> None:
    text = "Hm, 1 < 2.\n</think>\n\nYes."
    assert answer(qwen3, text, thinking=False, opening="assistant\n<think>\n") == THOUGHT
    closed = answer(qwen3, "Yes.", thinking=True, opening="<think>\n\n</think>\n\n")
    assert closed == [("text", "Yes."), ("ended", "stop")]


def test_without_thinking_everything_is_the_answer(qwen3: Model) -> None:
    short = answer(qwen3, "Yes.", thinking=False, opening="<think>\n\n</think>\n\n")
    assert short == [("text", "Yes."), ("ended", "stop")]


def test_calls_follow_reasoning_without_the_blanks_between(qwen3: Model) -> None:
    text = "<think>\nHm.\n</think>\n\n" + HERMES.partition("\n\n")[2]
    short = answer(qwen3, text, "hermes")
    assert [event[0] for event in short] == ["reasoning", *(event[0] for event in TWO_CALLS)]


def test_reasoning_tokens_are_counted_however_they_are_cut(qwen3: Model) -> None:
    format_ = qwen3.format()
    thought, rest = qwen3.tokens("<think>Hm, that is hard."), qwen3.tokens("</think>\n\nYes, it is.")
    for sizes in ((), (3,), (1,) * len(thought)):
        chunks = scripted([*thought, *rest], sizes, "stop")
        ended = events_of(format_, format_.prepare(call()), chunks)[-1]
        assert ended.reasoning_tokens == len(thought)


def test_reasoning_that_is_cut_off_stays_reasoning(qwen3: Model) -> None:
    short = answer(qwen3, "<think>Hm, 1 </thi", finish="length")
    assert short == [("reasoning", "Hm, 1 </thi"), ("ended", "length")]


@pytest.mark.parametrize("thinking", [True, False])
def test_thinking_is_an_option_of_the_template(thinking: bool, qwen3: Model) -> None:
    prepared = qwen3.format().prepare(call(thinking=thinking))
    assert prepared.template_options["enable_thinking"] is thinking
    assert not prepared.dropped


def test_effort_is_an_option_of_the_template_and_does_not_overrule_thinking(
    qwen3: Model,
) -> None:
    prepared = qwen3.format().prepare(call(effort="high", thinking=False))
    assert prepared.template_options["reasoning_effort"] == "high"
    assert prepared.template_options["enable_thinking"] is False


def test_what_a_model_cannot_do_is_dropped_with_a_note(
    embedded: Model, model_with: Callable[[str], Model]
) -> None:
    assert "does not reason" in embedded.format().prepare(call(thinking=True)).dropped[0]
    always = model_with(ALWAYS_REASONS).format()
    assert "always reasons" in always.prepare(call(thinking=False)).dropped[0]
    assert "'vast'" in always.prepare(call(effort="vast")).dropped[0]


# ---- the end of an answer ----------------------------------------------------------------------


def test_the_token_that_ends_an_answer_is_not_part_of_it(embedded: Model) -> None:
    format_ = embedded.format()
    prepared = format_.prepare(call())
    eos = embedded.tokenizer.eos_token_id
    word = embedded.tokens(" the")[0]
    for tokens, matched, expected in (
        ([word, eos], eos, " the"),
        ([word, eos], None, " the"),
        ([word, word], word, " the"),
        ([word, word], None, " the the"),
    ):
        events = events_of(format_, prepared, scripted(tokens, (), "stop", matched))
        assert in_short(events) == [("text", expected), ("ended", "stop")]


def test_special_tokens_are_shown_only_where_a_parser_needs_them(model: Model) -> None:
    text = "a<|end|>b"
    assert answer(model, text, "hermes", tools=())[0] == ("text", "ab")
    assert answer(model, text, "hermes")[0] == ("text", text)


def test_a_stop_text_ends_the_answer_and_is_named(embedded: Model) -> None:
    format_ = embedded.format()
    prepared = format_.prepare(call(sampling=Sampling(stop=("\n\nHuman:", "###"))))
    assert list(prepared.sampling["stop"]) == ["\n\nHuman:", "###"]
    tokens = embedded.tokens("Fine.\n\nHuman: no")
    for sizes in ((), (2,), (1,) * (len(tokens) - 1)):
        *events, ended = events_of(format_, prepared, scripted(tokens, sizes, "stop", "\n\nHuman:"))
        assert in_short([*events, ended]) == [("text", "Fine."), ("ended", "stop_text")]
        assert ended.stop_text == "\n\nHuman:"


def test_an_engine_that_reads_over_a_stop_text_is_not_waited_for(embedded: Model) -> None:
    format_ = embedded.format()
    prepared = format_.prepare(call(sampling=Sampling(stop=("STOP",))))
    word = embedded.tokens(" more")[0]

    async def endless() -> AsyncGenerator[Chunk, None]:
        yield Chunk(tuple(embedded.tokens("a STOP")), None, 0)
        while True:
            yield Chunk((word,), None, 0)

    short = in_short(events_of(format_, prepared, endless()))
    assert short == [("text", "a "), ("ended", "stop_text")]


def test_an_answer_may_come_from_several_engine_requests(embedded: Model) -> None:
    tokens = embedded.tokens(HERMES)

    async def two_requests() -> AsyncGenerator[Chunk, None]:
        yield Chunk(tuple(tokens[:20]), "length", 0)
        yield Chunk(tuple(tokens[20:]), "stop", 0)

    format_ = embedded.format()
    short = in_short(events_of(format_, format_.prepare(call()), two_requests()))
    assert short == FORMATS["hermes"][1]


def test_an_empty_answer_ends(embedded: Model) -> None:
    assert answer(embedded, "") == [("ended", "stop")]


def test_closing_the_events_early_closes_the_chunks(embedded: Model) -> None:
    format_ = embedded.format()
    closed = False

    async def endless() -> AsyncGenerator[Chunk, None]:
        nonlocal closed
        try:
            while True:
                yield Chunk(tuple(embedded.tokens(" more")), None, 0)
        finally:
            closed = True

    async def leave_early() -> None:
        events = format_.events(format_.prepare(call()), endless())
        assert isinstance(await anext(events), Text)
        await events.aclose()
        assert closed

    asyncio.run(leave_early())


def test_an_engine_that_fails_is_heard(embedded: Model) -> None:
    format_ = embedded.format()

    async def failing() -> AsyncGenerator[Chunk, None]:
        yield Chunk(tuple(embedded.tokens("some text")), None, 0)
        raise EngineError("it is gone")

    with pytest.raises(EngineError, match="it is gone"):
        events_of(format_, format_.prepare(call()), failing())
    with pytest.raises(EngineError, match="aborted"):
        events_of(format_, format_.prepare(call()), scripted([1], (), "abort"))


# ---- preparing a call --------------------------------------------------------------------------


def test_sampling_is_spelled_as_the_engine_does(embedded: Model) -> None:
    chosen = Sampling(
        temperature=0.25, top_p=0.5, top_k=7, min_p=0.125, frequency_penalty=0.5,
        presence_penalty=-0.5, repetition_penalty=1.5, seed=11,
    )  # fmt: skip
    sampling = embedded.format().prepare(call(sampling=chosen, max_tokens=9)).sampling
    named = dataclasses.asdict(chosen) | {"sampling_seed": 11}
    del named["seed"], named["stop"]
    assert {name: sampling[name] for name in named} == named
    assert "max_new_tokens" not in sampling


def test_what_a_client_leaves_open_is_left_to_the_model(smollm2: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(smollm2 / name, tmp_path)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.375, "top_k": 5}')
    sampling = ChatFormat.offline(tmp_path).prepare(call()).sampling
    assert (sampling["temperature"], sampling["top_k"], sampling["top_p"]) == (0.375, 5, 1.0)


def test_a_schema_constrains_the_answer(embedded: Model) -> None:
    schema = {"type": "object", "properties": {"title": {"type": "string"}}}
    prepared = embedded.format().prepare(call(tools=(), json_schema=schema))
    assert json.loads(prepared.sampling["json_schema"]) == schema
    anything = embedded.format().prepare(call(tools=(), json_schema={}))
    assert json.loads(anything.sampling["json_schema"]) == {"type": "object"}


def test_a_forced_call_is_constrained_to_the_model_s_format(embedded: Model) -> None:
    for choice in (ToolChoice("required"), ToolChoice("required", "edit")):
        sampling = embedded.format().prepare(call(tool_choice=choice)).sampling
        assert "<tool_call>" in sampling["structural_tag"]
        assert "json_schema" not in sampling


def test_a_grammar_waits_for_the_end_of_reasoning(qwen3: Model) -> None:
    schema = {"type": "object"}
    format_ = qwen3.format()
    assert format_.prepare(call(json_schema=schema, thinking=True)).sampling["require_reasoning"]
    silent = format_.prepare(call(json_schema=schema, thinking=False)).sampling
    assert "require_reasoning" not in silent
    assert "require_reasoning" not in format_.prepare(call()).sampling


def test_a_forced_call_has_priority_over_a_schema(embedded: Model) -> None:
    both = call(tool_choice=ToolChoice("required"), json_schema={"type": "object"})
    prepared = embedded.format().prepare(both)
    assert "structural_tag" in prepared.sampling and "JSON schema" in prepared.dropped[0]


def test_without_a_grammar_backend_constraints_are_dropped_with_a_note(embedded: Model) -> None:
    from kvws.engine.chat_parsers import TokenizerOnly

    manager = TokenizerOnly(str(embedded.folder), "auto", "auto")
    known = manager.config_value
    manager.config_value = lambda name: "none" if name == "grammar_backend" else known(name)
    format_ = ChatFormat.of_engine(manager)
    for changes in ({"json_schema": {"type": "object"}}, {"tool_choice": ToolChoice("required")}):
        prepared = format_.prepare(call(**changes))
        assert "no grammar backend" in prepared.dropped[0]
        assert not {"json_schema", "structural_tag"} & set(prepared.sampling)
        tokens = embedded.tokens(HERMES)
        assert in_short(events_of(format_, prepared, scripted(tokens, (), "stop"))) == (
            FORMATS["hermes"][1]
        )


@pytest.mark.parametrize(
    "changes",
    [
        {"json_schema": {"type": "objekt"}},
        {"json_schema": {"type": "object", "properties": 3}},
        {"tools": ({"type": "function", "function": {"description": "nameless"}},)},
        {
            "tools": (
                {"type": "function", "function": {"name": "a", "parameters": {"type": 3}}},
            )
        },
        {"tools": (), "tool_choice": ToolChoice("required")},
        {"tool_choice": ToolChoice("required", "nope")},
        {"sampling": Sampling(temperature=-1.0)},
        {"sampling": Sampling(top_p=2.0)},
        {"sampling": Sampling(top_k=-5)},
    ],
)
def test_a_call_that_the_engine_would_abort_is_refused_before(
    changes: dict[str, Any], embedded: Model
) -> None:
    with pytest.raises(BadRequest):
        embedded.format().prepare(call(**changes))


def test_the_client_s_tools_are_left_as_they_came(embedded: Model) -> None:
    parameters = {"type": "object", "properties": {"name": {"type": "varchar"}}}
    tools = ({"type": "function", "function": {"name": "a", "parameters": parameters}},)
    before = json.dumps(tools)
    embedded.format().prepare(call(tools=tools))
    assert json.dumps(tools) == before


# ---- what this relies on in SGLang -------------------------------------------------------------

CHAT = "sglang.srt.entrypoints.openai.serving_chat:OpenAIServingChat"
DETECTOR = "sglang.srt.function_call.base_format_detector:BaseFormatDetector"
REASONING = "sglang.srt.parser.reasoning_parser:BaseReasoningFormatDetector"
TEMPLATES = "sglang.srt.parser.template_manager:TemplateManager"


def resolve(path: str) -> Any:
    module, _, rest = path.partition(":")
    found: Any = importlib.import_module(module)
    for name in rest.split("."):
        found = getattr(found, name)
    return found


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (f"{CHAT}.__init__", ["self", "tokenizer_manager", "template_manager"]),
        (f"{CHAT}._convert_to_internal_request", ["self", "request", "raw_request"]),
        (
            f"{CHAT}._generate_chat_stream",
            ["self", "adapted_request", "request", "raw_request"],
        ),
        (f"{CHAT}._validate_request", ["self", "request"]),
        (f"{CHAT}._get_reasoning_from_request", ["self", "request"]),
        (f"{CHAT}.apply_reasoning_enabled", ["self", "request", "enabled"]),
        (
            f"{CHAT}._check_for_unstreamed_tool_args",
            ["self", "parser", "content", "request", "index", "created"],
        ),
        (f"{DETECTOR}._get_tool_indices", ["self", "tools"]),
        (
            f"{TEMPLATES}.load_chat_template",
            ["self", "tokenizer_manager", "chat_template_arg", "model_path"],
        ),
        ("sglang.srt.parser.template_detection:resolve_auto_parsers", ["server_args"]),
        (
            "sglang.srt.parser.response_template:tool_close_tokens",
            ["tool_call_parser", "tokenizer"],
        ),
        ("sglang.srt.runtime_context:publish_role", []),
        (
            "sglang.srt.sampling.sampling_params:SamplingParams.verify",
            ["self", "vocab_size"],
        ),
    ],
)
def test_sglang_takes_what_is_given_to_it(path: str, expected: list[str]) -> None:
    assert list(inspect.signature(resolve(path)).parameters) == expected


def test_pieces_of_an_answer_are_generated_with_named_arguments() -> None:
    parameters = inspect.signature(resolve(f"{CHAT}._generate_stream_content")).parameters
    assert {"parser_dict", "index"} <= set(parameters)
    source = inspect.getsource(resolve(f"{CHAT}._generate_chat_stream"))
    assert "self._generate_stream_content(\n                    content=content," in source
    assert "self.tokenizer_manager.generate_request(" in source


def test_parsers_take_their_tools_from_an_index_that_may_be_there_already() -> None:
    source = inspect.getsource(resolve(f"{DETECTOR}.parse_streaming_increment"))
    assert 'if not hasattr(self, "_tool_indices")' in source
    assert "not in self._tool_indices" in source


def test_markers_have_the_names_that_are_asked_for() -> None:
    assert {"bot_token", "eot_token"} <= set(vars(_some_detector()))
    parameters = inspect.signature(resolve(f"{REASONING}.__init__")).parameters
    assert {"think_start_token", "think_end_token"} <= set(parameters)
    assert "tokenizer_manager.template_manager" or resolve(f"{TEMPLATES}.force_reasoning")


def _some_detector() -> Any:
    return resolve("sglang.srt.function_call.hermes_detector:HermesDetector")()


def test_framed_formats_are_formats() -> None:
    names = resolve("sglang.srt.function_call.parser_names:TOOL_CALL_PARSER_NAMES")
    assert set(names) >= FRAMED_FORMATS


def test_the_engine_can_be_told_that_reasoning_comes_first() -> None:
    request = resolve("sglang.srt.managers.io_struct:GenerateReqInput")
    assert "require_reasoning" in {field.name for field in dataclasses.fields(request)}


def test_grammars_can_be_checked_without_an_engine() -> None:
    grammar = resolve("xgrammar:Grammar")
    assert callable(grammar.from_json_schema) and callable(grammar.from_structural_tag)
