"""Reasoning, stop texts and the end of an answer, from scripted tokens."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import pytest

from kvws.chat.answer import Text
from kvws.chat.call import Sampling
from kvws.engine.protocol import Chunk
from kvws.errors import EngineError
from tests.engine.chat_model import (
    A_CALL,
    ALWAYS_REASONS,
    AS_EVENTS,
    QWEN3,
    THINK_TOKENS,
    Model,
    answer,
    call,
    events_of,
    in_short,
    model_of,
    scripted,
    variant_of,
)


@pytest.fixture(scope="module")
def model(smollm2: Path) -> Model:
    return model_of(smollm2)


Variant = Callable[..., Model]


@pytest.fixture(scope="module")
def variant(smollm2: Path) -> Variant:
    return functools.partial(variant_of, smollm2)


@pytest.fixture(scope="module")
def qwen3(smollm2: Path) -> Model:
    return variant_of(smollm2, QWEN3, THINK_TOKENS)


# ---- reasoning ---------------------------------------------------------------------------------

THOUGHT = [("reasoning", "Hm, 1 < 2.\n"), ("text", "\n\nYes."), ("ended", "stop")]


def test_reasoning_is_told_from_the_answer(qwen3: Model) -> None:
    assert answer(qwen3, "<think>Hm, 1 < 2.\n</think>\n\nYes.") == THOUGHT


def test_reasoning_that_the_prompt_began_needs_no_beginning(qwen3: Model) -> None:
    assert answer(qwen3, "Hm, 1 < 2.\n</think>\n\nYes.", opening="…<think>\n") == THOUGHT


def test_a_model_that_always_reasons_does_so_without_being_told(
    variant: Variant,
) -> None:
    always = variant(ALWAYS_REASONS, THINK_TOKENS)
    assert always.told().reasoning_parser == "deepseek-r1"
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
    text = "<think>\nHm.\n</think>\n\n" + A_CALL
    assert answer(qwen3, text) == [("reasoning", "\nHm.\n"), *AS_EVENTS]


def test_reasoning_tokens_are_counted_however_they_are_cut(qwen3: Model) -> None:
    format_ = qwen3.told()
    thought = qwen3.tokens("<think>Hm, that is hard.")
    rest = qwen3.tokens("</think>\n\nYes, it is.")
    for sizes in ((), (3,), (1,) * len(thought)):
        chunks = scripted([*thought, *rest], sizes, "stop")
        ended = events_of(format_, format_.prepare(call()), chunks)[-1]
        assert ended.reasoning_tokens == len(thought)


def test_reasoning_that_is_cut_off_stays_reasoning(qwen3: Model) -> None:
    short = answer(qwen3, "<think>Hm, 1 </thi", finish="length")
    assert short == [("reasoning", "Hm, 1 </thi"), ("ended", "length")]


# ---- the end of an answer ----------------------------------------------------------------------


def test_the_token_that_ends_an_answer_is_not_part_of_it(model: Model) -> None:
    format_ = model.told()
    prepared = format_.prepare(call())
    eos = model.tokenizer.eos_token_id
    word = model.tokens(" the")[0]
    for tokens, matched, expected in (
        ([word, eos], eos, " the"),
        ([word, eos], None, " the"),
        ([word, word], word, " the"),
        ([word, word], None, " the the"),
    ):
        events = events_of(format_, prepared, scripted(tokens, (), "stop", matched))
        assert in_short(events) == [("text", expected), ("ended", "stop")]


def test_special_tokens_are_shown_only_where_a_parser_needs_them(model: Model) -> None:
    text = "a<|im_start|>b"
    assert answer(model, text, tools=())[0] == ("text", "ab")
    assert answer(model, text)[0] == ("text", text)


def test_a_stop_text_ends_the_answer_and_is_named(model: Model) -> None:
    format_ = model.told()
    prepared = format_.prepare(call(sampling=Sampling(stop=("\n\nHuman:", "###"))))
    assert list(prepared.sampling["stop"]) == ["\n\nHuman:", "###"]
    tokens = model.tokens("Fine.\n\nHuman: no")
    for sizes in ((), (2,), (1,) * (len(tokens) - 1)):
        chunks = scripted(tokens, sizes, "stop", "\n\nHuman:")
        *events, ended = events_of(format_, prepared, chunks)
        assert in_short([*events, ended]) == [("text", "Fine."), ("ended", "stop_text")]
        assert ended.stop_text == "\n\nHuman:"


def test_an_engine_that_reads_over_a_stop_text_is_not_waited_for(model: Model) -> None:
    format_ = model.told()
    prepared = format_.prepare(call(sampling=Sampling(stop=("STOP",))))
    word = model.tokens(" more")[0]

    async def endless() -> AsyncGenerator[Chunk, None]:
        yield Chunk(tuple(model.tokens("a STOP")), None, 0)
        while True:
            yield Chunk((word,), None, 0)

    short = in_short(events_of(format_, prepared, endless()))
    assert short == [("text", "a "), ("ended", "stop_text")]


def test_an_answer_may_come_from_several_engine_requests(model: Model) -> None:
    tokens = model.tokens(A_CALL)

    async def two_requests() -> AsyncGenerator[Chunk, None]:
        yield Chunk(tuple(tokens[:20]), "length", 0)
        yield Chunk(tuple(tokens[20:]), "stop", 0)

    format_ = model.told()
    short = in_short(events_of(format_, format_.prepare(call()), two_requests()))
    assert short == AS_EVENTS


def test_an_empty_answer_ends(model: Model) -> None:
    assert answer(model, "") == [("ended", "stop")]


def test_closing_the_events_early_closes_the_chunks(model: Model) -> None:
    format_ = model.told()
    closed = False

    async def endless() -> AsyncGenerator[Chunk, None]:
        nonlocal closed
        try:
            while True:
                yield Chunk(tuple(model.tokens(" more")), None, 0)
        finally:
            closed = True

    async def leave_early() -> None:
        events = format_.events(format_.prepare(call()), endless())
        assert isinstance(await anext(events), Text)
        await events.aclose()
        assert closed

    asyncio.run(leave_early())


def test_an_engine_that_fails_is_heard(model: Model) -> None:
    format_ = model.told()

    async def failing(error: Exception) -> AsyncGenerator[Chunk, None]:
        yield Chunk(tuple(model.tokens("some text")), None, 0)
        raise error

    for error in (EngineError("it is gone"), ValueError("it is gone")):
        with pytest.raises(type(error), match="it is gone"):
            events_of(format_, format_.prepare(call()), failing(error))
    with pytest.raises(EngineError, match="aborted"):
        events_of(format_, format_.prepare(call()), scripted([1], (), "abort"))
