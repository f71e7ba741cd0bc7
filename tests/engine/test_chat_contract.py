"""What the chat format relies on in SGLang. An upgrade fails here, in a second, by name."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from typing import Any

import pytest

from kvws.engine.chat_parsers import FRAMED_FORMATS

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
    assert isinstance(resolve(f"{TEMPLATES}.force_reasoning"), property)


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
