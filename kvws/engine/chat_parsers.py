# pyright: basic
"""SGLang's chat handler, with the text of an answer given by us instead of its own engine.

Its parsers for tool calls and reasoning, how they are chosen for a model and how a stream is
taken through them are used as they are.
"""

from __future__ import annotations

import copy
import json
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from typing import Any

from kvws.chat.format import AnswerPart
from kvws.engine.chat_answer import AnswerEvents, Markup
from kvws.engine.platform_entry import activate

if activate() is not None:
    os.environ.setdefault("SGLANG_PLUGINS", "kvws")
    os.environ.setdefault("SGLANG_PLATFORM", "kvws_cpu")
# A call to a tool that there isn't is the client's to refuse: it can tell the model so.
os.environ.setdefault("SGLANG_FORWARD_UNKNOWN_TOOLS", "true")

from sglang.srt import runtime_context
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.parser.reasoning_parser import ReasoningParser
from sglang.srt.parser.template_detection import resolve_auto_parsers
from sglang.srt.parser.template_manager import TemplateManager
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.hf_transformers_utils import get_tokenizer

from kvws.errors import ConfigError, ModelError

FRAMED_FORMATS = frozenset(
    {
        "apertus2509", "beam", "cohere_command4", "gemma4", "gpt-oss", "inkling", "k2_horizon",
        "kimi_k3", "muse", "response_template",
    }
)  # fmt: skip
"""Tool-call parsers of models that frame every part of an answer, plain text too."""

_CALL_MARKERS = {"mistral": "[TOOL_CALLS"}
"""What begins a call where a parser knows several ways of it, of which it names one."""

SPELLED_OUT_CALLS = "hermes"
"""The parser of calls as `kvws.chat.render` spells them for templates that know no tools."""


class TokenizerOnly:
    """What the chat handler asks of a TokenizerManager, with no engine behind it."""

    def __init__(self, model_path: str, tool_call_parser: str, reasoning_parser: str) -> None:
        """Load tokenizer and configuration; choose parsers that are "auto".

        Raises:
            ModelError: they cannot be loaded.
        """
        logging.getLogger("sglang").setLevel(logging.CRITICAL)
        try:
            arguments: dict[str, Any] = {
                "model_path": model_path,
                "tokenizer_path": model_path,
                "device": "cpu",
                "grammar_backend": "xgrammar",
                "tool_call_parser": tool_call_parser,
                "reasoning_parser": reasoning_parser,
            }
            self.server_args = ServerArgs(**arguments)
            resolve_auto_parsers(self.server_args)
            if runtime_context.publish_role() is None:  # one per process: an engine's has priority
                runtime_context.publish(self.server_args, role="tokenizer")
            self.model_config = ModelConfig.from_server_args(self.server_args)
            self.tokenizer = get_tokenizer(model_path)
        except Exception as error:  # the parsers of a model's files raise whatever they like
            raise ModelError(
                f"no tokenizer can be loaded from {model_path}: {error}",
                hint="give a model folder with config.json and tokenizer.json",
            ) from error
        self.model_path = self.served_model_name = model_path

    def config_value(self, name: str) -> Any:
        return getattr(resolving_view(self.server_args), name)


class _Overlay:
    """A TokenizerManager but for some of what it says."""

    def __init__(self, manager: Any, **replaced: Any) -> None:
        self._manager = manager
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)


class ChatParsers(OpenAIServingChat):
    """The handler of one model; `events` makes a copy of it for each answer."""

    tokenizer_manager: Any
    _answer: AnswerEvents
    _is_adapted: bool

    @classmethod
    def of(cls, manager: Any) -> ChatParsers:
        """The handler for the model of a TokenizerManager.

        Raises:
            ConfigError: there is no parser of a name that was asked for.
        """
        tool_call = _tool_call_parser(manager)
        _require_known(tool_call, FunctionCallParser.ToolCallParserEnum, "tool calls")
        _require_known(
            manager.config_value("reasoning_parser"), ReasoningParser.DetectorMap, "reasoning"
        )
        templates = TemplateManager()
        templates.load_chat_template(manager, None, manager.model_path)

        def config_value(name: str) -> Any:
            return tool_call if name == "tool_call_parser" else manager.config_value(name)

        overlay: Any = _Overlay(manager, config_value=config_value)
        return cls(overlay, templates)

    async def events(
        self,
        request: ChatCompletionRequest,
        texts: AsyncIterator[str | None],
        answer: AnswerEvents,
    ) -> AsyncGenerator[AnswerPart, None]:
        """Parse an answer.

        Args:
            texts: its pieces; None is the end.
            answer: what the events are built with; the caller tells it what is fed.

        Raises:
            ParserFailed: the parsers gave up; the rest is not for them.
        """
        handler = copy.copy(self)
        handler._answer = answer
        handler._is_adapted = False
        handler.tokenizer_manager = _Overlay(
            self.tokenizer_manager, generate_request=lambda *_: _outputs(texts)
        )
        lines = handler._generate_chat_stream(None, request, None)  # type: ignore[arg-type]
        try:
            async for line in lines:
                for event in _events_of(line, answer):
                    yield event
        except ValueError as error:
            raise ParserFailed(str(error)) from error
        finally:
            await lines.aclose()

    # ---- hooks of the handler ----------------------------------------------------------------

    async def _generate_stream_content(self, **arguments: Any) -> AsyncGenerator[str, None]:
        async for line in super()._generate_stream_content(**arguments):
            yield line
        if not self._is_adapted:  # the first piece is empty, so nothing was parsed yet
            self._is_adapted = True
            self._adapt(arguments["parser_dict"].get(arguments["index"]))

    def _adapt(self, parser: Any) -> None:
        answer = self._answer
        detector = getattr(parser, "detector", parser)
        reasoning = self._reasoning_detector
        answer.markup = Markup(
            call=_CALL_MARKERS.get(self.tool_call_parser, getattr(detector, "bot_token", "")),
            thinking=(reasoning.think_start_token, reasoning.think_end_token) if reasoning else (),
            is_framed=self.tool_call_parser in FRAMED_FORMATS
            or self.reasoning_parser in FRAMED_FORMATS,
        )
        if detector is not None:
            names = detector._get_tool_indices(parser.tools if parser is not detector else [])
            detector._tool_indices = _ToolNames(names, lambda: answer.may_begin_call)

    def _check_for_unstreamed_tool_args(self, *_: Any, **__: Any) -> None:
        """Never: it would close the arguments of a call that was cut off or is broken, and a
        command that was never meant would be run."""
        return None


class ParserFailed(Exception):
    """SGLang's parsers cannot go on with an answer."""


class _ToolNames(dict[str, int]):
    """The tools there are, and in a call that is marked as one any other too."""

    def __init__(self, names: dict[str, int], is_marked: Callable[[], bool]) -> None:
        super().__init__(names)
        self._is_marked = is_marked

    def __contains__(self, name: object) -> bool:
        if isinstance(name, str) and not super().__contains__(name) and self._is_marked():
            self[name] = -1  # known from now on: the parsers look again at every piece
        return super().__contains__(name)


async def _outputs(texts: AsyncIterator[str | None]) -> AsyncGenerator[dict[str, Any], None]:
    """Pieces of text as the engine would report them: all of it so far, every time."""
    meta = {"id": "answer", "prompt_tokens": 0, "finish_reason": None}
    so_far = ""
    yield {"text": "", "meta_info": meta}
    async for text in texts:
        so_far += text or ""
        if text is None:
            meta = {**meta, "finish_reason": {"type": "stop", "matched": None}}
        yield {"text": so_far, "meta_info": meta}


def _events_of(line: str, answer: AnswerEvents) -> list[AnswerPart]:
    """The events in one line of the handler's stream.

    Raises:
        ParserFailed: it reports an error.
    """
    data = line.removeprefix("data: ").strip()
    if data == "[DONE]":
        return []
    frame = json.loads(data)
    if "error" in frame:
        raise ParserFailed(str(frame["error"]))
    events: list[AnswerPart] = []
    for choice in frame["choices"]:
        delta = choice["delta"]
        if delta.get("reasoning_content"):
            events += answer.reasoning(delta["reasoning_content"])
        if delta.get("content"):
            events += answer.text(delta["content"])
        for call in delta.get("tool_calls") or ():
            function = call["function"]
            events += answer.call(call["index"], function["name"], function["arguments"] or "")
    return events


def _tool_call_parser(manager: Any) -> str:
    """The parser that SGLang chose or was told, or one for the models that it does not know.

    It has one for Llama 3, but tells these models neither by template nor by architecture.
    """
    chosen = manager.config_value("tool_call_parser")
    if chosen is not None:
        return chosen
    return "llama3" if "<|python_tag|>" in manager.tokenizer.get_vocab() else SPELLED_OUT_CALLS


def _require_known(name: str | None, known: Iterable[str], what: str) -> None:
    if name is not None and name not in known:
        raise ConfigError(
            f"there is no parser {name!r} for {what}",
            hint=f"use auto or one of: {', '.join(sorted(known))}",
        )
