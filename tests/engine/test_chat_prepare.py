"""What a model call means for engine, template and parsers, and which parsers those are."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvws.chat.call import Sampling, ToolChoice
from kvws.engine.chat_format import ChatFormat
from kvws.errors import BadRequest, ConfigError
from tests.engine.chat_model import (
    A_CALL,
    ALWAYS_REASONS,
    AS_EVENTS,
    CHATML,
    QWEN3,
    THINK_TOKENS,
    Model,
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


# ---- which parsers -----------------------------------------------------------------------------


def test_the_embedded_model_calls_tools_the_way_they_are_spelled_out_for_it(
    model: Model,
) -> None:
    format_ = model.told()
    assert (format_.tool_call_parser, format_.reasoning_parser) == ("hermes", None)


def test_parsers_are_told_from_the_template_as_sglang_tells_them(
    variant: Variant,
) -> None:
    format_ = variant(QWEN3, THINK_TOKENS).told()
    assert (format_.tool_call_parser, format_.reasoning_parser) == ("qwen", "qwen3")


def test_llama_is_known_by_its_vocabulary(variant: Variant) -> None:
    assert variant(CHATML, ("<|python_tag|>",)).told().tool_call_parser == "llama3"


def test_a_parser_of_no_such_name_is_refused_with_those_there_are(model: Model) -> None:
    with pytest.raises(ConfigError, match="qwen25"):
        model.format("qwen2.5")
    with pytest.raises(ConfigError, match="deepseek-r1"):
        model.format(reasoning="r1")


# ---- thinking ----------------------------------------------------------------------------------


@pytest.mark.parametrize("thinking", [True, False])
def test_thinking_is_an_option_of_the_template(thinking: bool, qwen3: Model) -> None:
    prepared = qwen3.told().prepare(call(thinking=thinking))
    assert prepared.template_options["enable_thinking"] is thinking
    assert not prepared.dropped


def test_effort_is_an_option_of_the_template_and_does_not_overrule_thinking(
    qwen3: Model,
) -> None:
    prepared = qwen3.told().prepare(call(effort="high", thinking=False))
    assert prepared.template_options["reasoning_effort"] == "high"
    assert prepared.template_options["enable_thinking"] is False


def test_what_a_model_cannot_do_is_dropped_with_a_note(
    model: Model, variant: Variant
) -> None:
    assert "does not reason" in model.told().prepare(call(thinking=True)).dropped[0]
    always = variant(ALWAYS_REASONS, THINK_TOKENS).told()
    assert "always reasons" in always.prepare(call(thinking=False)).dropped[0]
    assert "'vast'" in always.prepare(call(effort="vast")).dropped[0]


# ---- sampling, grammars, tools -----------------------------------------------------------------


def test_sampling_is_spelled_as_the_engine_does(model: Model) -> None:
    chosen = Sampling(
        temperature=0.25, top_p=0.5, top_k=7, min_p=0.125, frequency_penalty=0.5,
        presence_penalty=-0.5, repetition_penalty=1.5, seed=11,
    )  # fmt: skip
    sampling = model.told().prepare(call(sampling=chosen, max_tokens=9)).sampling
    named = dataclasses.asdict(chosen) | {"sampling_seed": 11}
    del named["seed"], named["stop"]
    assert {name: sampling[name] for name in named} == named
    assert "max_new_tokens" not in sampling


def test_no_mass_to_draw_from_is_the_likeliest_token(model: Model) -> None:
    sampling = model.told().prepare(call(sampling=Sampling(top_p=0.0, temperature=0.9))).sampling
    assert (sampling["temperature"], sampling["top_p"]) == (0.0, 1.0)


def test_what_a_client_leaves_open_is_left_to_the_model(smollm2: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(smollm2 / name, tmp_path)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.375, "top_k": 5}')
    sampling = ChatFormat.offline(tmp_path).prepare(call()).sampling
    assert (sampling["temperature"], sampling["top_k"], sampling["top_p"]) == (0.375, 5, 1.0)


def test_a_schema_constrains_the_answer(model: Model) -> None:
    schema = {"type": "object", "properties": {"title": {"type": "string"}}}
    prepared = model.told().prepare(call(tools=(), json_schema=schema))
    assert json.loads(prepared.sampling["json_schema"]) == schema
    anything = model.told().prepare(call(tools=(), json_schema={}))
    assert json.loads(anything.sampling["json_schema"]) == {"type": "object"}


def test_a_forced_call_is_constrained_to_the_model_s_format(model: Model) -> None:
    for choice in (ToolChoice("required"), ToolChoice("required", "edit")):
        sampling = model.told().prepare(call(tool_choice=choice)).sampling
        assert "<tool_call>" in sampling["structural_tag"]
        assert ("bash" in sampling["structural_tag"]) is (choice.name is None)
        assert "json_schema" not in sampling


def test_a_grammar_waits_for_the_end_of_reasoning(qwen3: Model) -> None:
    schema = {"type": "object"}
    format_ = qwen3.told()
    assert format_.prepare(call(json_schema=schema, thinking=True)).sampling["require_reasoning"]
    silent = format_.prepare(call(json_schema=schema, thinking=False)).sampling
    assert "require_reasoning" not in silent
    assert "require_reasoning" not in format_.prepare(call()).sampling


def test_a_forced_call_has_priority_over_a_schema(model: Model) -> None:
    both = call(tool_choice=ToolChoice("required"), json_schema={"type": "object"})
    prepared = model.told().prepare(both)
    assert "structural_tag" in prepared.sampling and "JSON schema" in prepared.dropped[0]


def test_without_a_grammar_backend_constraints_are_dropped_with_a_note(model: Model) -> None:
    format_ = model.without_grammars()
    for changes in ({"json_schema": {"type": "object"}}, {"tool_choice": ToolChoice("required")}):
        prepared = format_.prepare(call(**changes))
        assert "no grammar backend" in prepared.dropped[0]
        assert not {"json_schema", "structural_tag"} & set(prepared.sampling)
        tokens = model.tokens(A_CALL)
        assert in_short(events_of(format_, prepared, scripted(tokens, (), "stop"))) == AS_EVENTS


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
    changes: dict[str, Any], model: Model
) -> None:
    with pytest.raises(BadRequest):
        model.told().prepare(call(**changes))


def test_the_client_s_tools_are_left_as_they_came(model: Model) -> None:
    parameters = {"type": "object", "properties": {"name": {"type": "varchar"}}}
    tools = ({"type": "function", "function": {"name": "a", "parameters": parameters}},)
    before = json.dumps(tools)
    model.told().prepare(call(tools=tools))
    assert json.dumps(tools) == before
