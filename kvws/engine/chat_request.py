# pyright: basic
"""A model call as SGLang's chat handler takes it, and what it makes of that for the engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import xgrammar
from jsonschema import Draft202012Validator, SchemaError
from pydantic import ValidationError
from sglang.srt.constrained.utils import is_legacy_structural_tag
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, Tool
from sglang.srt.sampling.sampling_params import SamplingParams

from kvws.chat.call import ModelCall
from kvws.engine.chat_parsers import ChatParsers
from kvws.errors import BadRequest

_EFFORTS = frozenset({"none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max"})
_GRAMMARS = ("json_schema", "structural_tag", "regex", "ebnf")
"""Sampling parameters that constrain the answer to a grammar."""

_NO_MESSAGES: Any = [{"role": "user", "content": ""}]
_MAX_TOOL_LISTS = 16


@dataclass(frozen=True)
class PreparedCall:
    """What the engine, the renderer and the parsers need to know of a call.

    Attributes:
        sampling: sampling parameters as the engine spells them, without max_new_tokens.
        template_options: variables of the model's chat template.
        stop: texts that end the answer.
        keep_special_tokens: whether the parsers need to see special tokens.
        dropped: what of the call has no effect with this model or engine, one phrase each.
        request: the call as SGLang's parsers take it.
    """

    sampling: Mapping[str, Any]
    template_options: Mapping[str, Any]
    stop: tuple[str, ...]
    keep_special_tokens: bool
    dropped: tuple[str, ...]
    request: ChatCompletionRequest


class CallPreparation:
    """Prepares calls for one model."""

    def __init__(self, parsers: ChatParsers) -> None:
        manager = parsers.tokenizer_manager
        self._parsers = parsers
        self._has_grammars = manager.config_value("grammar_backend") not in (None, "none")
        self._vocabulary = manager.model_config.vocab_size
        self._tools: dict[str, list[Tool]] = {}

    def __call__(self, call: ModelCall) -> PreparedCall:
        """Raises:
        BadRequest: a tool, a schema or a sampling parameter is no such thing.
        """
        if self._has_grammars and call.tools and _is_forced(call):
            # A call that must come must be one that its tool can take, as far as grammars go.
            with suppress(BadRequest):
                return self._prepared(call, strict=True)
        return self._prepared(call, strict=False)

    def _prepared(self, call: ModelCall, *, strict: bool) -> PreparedCall:
        dropped: list[str] = []
        try:
            request = self._request(call, dropped, strict=strict)
            self._set_thinking(request, call.thinking, dropped)
            adapted, request = self._parsers._convert_to_internal_request(request)
            sampling: dict[str, Any] = dict(cast(Any, adapted.sampling_params))
            SamplingParams(
                **{name: value for name, value in sampling.items() if name != "n"}
            ).verify(self._vocabulary)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise BadRequest(
                f"{where}: {first['msg']}", hint="correct that part of the request"
            ) from error
        except (ValueError, TypeError) as error:
            raise BadRequest(str(error), hint="correct that part of the request") from error
        del sampling["max_new_tokens"]
        sampling = {name: value for name, value in sampling.items() if value is not None}
        _check_grammar(sampling)
        if adapted.require_reasoning and any(name in sampling for name in _GRAMMARS):
            sampling["require_reasoning"] = True
        return PreparedCall(
            sampling=sampling,
            template_options=_template_options(request),
            stop=tuple(sampling["stop"]),
            keep_special_tokens=not request.skip_special_tokens,
            dropped=tuple(dropped),
            request=request,
        )

    def _request(
        self, call: ModelCall, dropped: list[str], *, strict: bool
    ) -> ChatCompletionRequest:
        """The request, without its messages: they are rendered elsewhere, and read by nothing
        else. `strict`: arguments follow their schemas to the letter."""
        fields: dict[str, Any] = {
            "messages": _NO_MESSAGES,
            "model": "kvws",
            "input_ids": [],
            "stream": True,
            "stop": list(call.sampling.stop),
            "parallel_tool_calls": call.parallel_tool_calls,
        }
        greedy = call.sampling.top_p == 0  # nothing but the likeliest token; engines refuse the 0
        sampling = {
            "temperature": 0.0 if greedy else call.sampling.temperature,
            "top_p": None if greedy else call.sampling.top_p,
            "top_k": -1 if call.sampling.top_k == 0 else call.sampling.top_k,
            "min_p": call.sampling.min_p,
            "frequency_penalty": call.sampling.frequency_penalty,
            "presence_penalty": call.sampling.presence_penalty,
            "repetition_penalty": call.sampling.repetition_penalty,
            "seed": call.sampling.seed,
        }
        fields |= {name: value for name, value in sampling.items() if value is not None}
        if call.effort in _EFFORTS:
            fields["reasoning_effort"] = call.effort
        elif call.effort is not None:
            dropped.append(f"effort {call.effort!r}: there is no such level")
        choice: Any = "none"
        if call.tools:
            fields["tools"] = self._checked_tools(call)
            if strict:
                fields["tools"] = [_strict(tool) for tool in fields["tools"]]
            choice = call.tool_choice.mode
        is_forced = _is_forced(call)
        if is_forced:
            choice = self._forced_choice(call, dropped)
        if isinstance(choice, dict):
            # The grammars of most formats hold every tool that is offered.
            name = call.tool_choice.name
            fields["tools"] = [tool for tool in fields["tools"] if tool.function.name == name]
        fields["tool_choice"] = choice
        if call.json_schema is not None:
            if is_forced:
                dropped.append("the JSON schema of the answer: the answer must call a tool")
            elif self._has_grammars:
                fields["response_format"] = _response_format(call.json_schema)
            else:
                _response_format(call.json_schema)
                dropped.append("the JSON schema of the answer: the engine has no grammar backend")
        return ChatCompletionRequest(**fields)

    def _checked_tools(self, call: ModelCall) -> list[Tool]:
        """The tools; sessions send the same list with every request, and it is checked once."""
        key = json.dumps(call.tools, sort_keys=True, default=dict)
        tools = self._tools.get(key)
        if tools is None:
            # The check rewrites schemas in place, and the client's are not ours.
            tools = [Tool.model_validate(_plain(tool)) for tool in call.tools]
            problem = self._parsers._validate_request(
                ChatCompletionRequest(messages=_NO_MESSAGES, tools=tools)
            )
            if problem:
                raise ValueError(problem)
            while len(self._tools) >= _MAX_TOOL_LISTS:
                del self._tools[next(iter(self._tools))]
            self._tools[key] = tools
        return tools

    def _forced_choice(self, call: ModelCall, dropped: list[str]) -> Any:
        name = call.tool_choice.name
        if not call.tools:
            raise ValueError("tool_choice asks for a tool, but there are none")
        if name is not None and name not in {t["function"]["name"] for t in call.tools}:
            raise ValueError(f"tool_choice asks for {name!r}, which is none of the tools")
        if not self._has_grammars:
            dropped.append("tool_choice: the engine has no grammar backend to force a call with")
            return "auto"
        return "required" if name is None else {"type": "function", "function": {"name": name}}

    def _set_thinking(
        self, request: ChatCompletionRequest, thinking: bool | None, dropped: list[str]
    ) -> None:
        if thinking is None:
            return
        try:
            self._parsers.apply_reasoning_enabled(request, thinking)
        except ValueError:
            what = "always reasons" if self._parsers.reasoning_parser else "does not reason"
            dropped.append(f"thinking {'on' if thinking else 'off'}: the model {what}")


def _response_format(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Raises:
    ValueError: the schema is none.
    """
    if not schema:
        return {"type": "json_object"}
    plain = _plain(schema)
    try:
        Draft202012Validator.check_schema(plain)
    except (SchemaError, RecursionError) as error:
        message = getattr(error, "message", "it is nested too deeply")
        raise ValueError(f"the JSON schema of the answer is none: {message}") from error
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": plain}}


def _check_grammar(sampling: Mapping[str, Any]) -> None:
    """Compile what the engine could only abort the answer over.

    Raises:
        BadRequest: a schema cannot be followed.
    """
    try:
        if "json_schema" in sampling:
            xgrammar.Grammar.from_json_schema(sampling["json_schema"])
        if "structural_tag" in sampling:
            tag = json.loads(sampling["structural_tag"])
            if is_legacy_structural_tag(tag):
                for structure in tag["structures"]:
                    xgrammar.Grammar.from_json_schema(json.dumps(structure["schema"]))
            else:
                xgrammar.Grammar.from_structural_tag(sampling["structural_tag"])
    except (RuntimeError, ValueError) as error:
        raise BadRequest(
            f"a JSON schema cannot be followed: {str(error).strip()}",
            hint="use the parts of JSON Schema that xgrammar supports",
        ) from error


def _is_forced(call: ModelCall) -> bool:
    return call.tool_choice.mode == "required" or call.tool_choice.name is not None


def _strict(tool: Tool) -> Tool:
    function = tool.function.model_copy(update={"strict": True})
    return tool.model_copy(update={"function": function})


def _plain(value: Mapping[str, Any]) -> dict[str, Any]:
    """A copy that is dictionaries and lists all through."""
    return json.loads(json.dumps(value, default=dict))


def _template_options(request: ChatCompletionRequest) -> dict[str, Any]:
    options = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        options.setdefault("reasoning_effort", request.reasoning_effort)
    return options
