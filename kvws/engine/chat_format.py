# pyright: basic
"""How a model calls tools and reasons, read out of its tokens by SGLang's own parsers.

    ModelCall → CallPreparation → sampling, template options
    tokens → Detokeniser → StopTexts → ChatParsers → AnswerEvents → events

Prompts are rendered elsewhere, and tokens may come from several engine requests; so text is made
here, a token at a time, however many a chunk brings: what the parsers say depends on how text is
cut, and must not depend on timing.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

from sglang.srt.parser.response_template import tool_close_tokens

from kvws.chat.call import ModelCall
from kvws.chat.detokenise import Detokeniser, StopTexts
from kvws.chat.format import AnswerPart, Ended
from kvws.engine.chat_answer import AnswerEvents
from kvws.engine.chat_parsers import ChatParsers, ParserFailed, TokenizerOnly
from kvws.engine.chat_request import CallPreparation, PreparedCall
from kvws.engine.protocol import Chunk
from kvws.errors import EngineError

__all__ = ["AnswerPart", "ChatFormat", "Ended", "PreparedCall"]

_HARMONY_CALL = "<|call|>"
"""Ends a tool call and the answer in gpt-oss's format; its parser needs to see it."""

_UNSETTLED_PER_FED = 128
"""Characters of an open call per character of the next piece of it. The parsers read a call from
its beginning at every piece; so that a long one does not cost the square of its length, its
pieces grow with it."""


class ChatFormat:
    """The chat format of one model."""

    def __init__(self, manager: Any) -> None:
        self._parsers = ChatParsers.of(manager)
        self._tokenizer = manager.tokenizer
        self._stop_tokens = _stop_tokens(manager)
        self._shown_stop_tokens = _shown_stop_tokens(
            self._parsers.tool_call_parser, self._tokenizer
        )
        self._prepare = CallPreparation(self._parsers)

    @classmethod
    def of_engine(cls, tokenizer_manager: Any) -> ChatFormat:
        """The format of the model that an engine serves.

        Raises:
            ConfigError: there are no parsers of the names that the engine was given.
        """
        return cls(tokenizer_manager)

    @classmethod
    def offline(
        cls,
        model_path: str | Path,
        *,
        tool_call_parser: str = "auto",
        reasoning_parser: str = "auto",
    ) -> ChatFormat:
        """The format of a model that no engine serves: tokenizer and configuration suffice.

        Raises:
            ModelError: they cannot be loaded.
            ConfigError: there are no parsers of these names.
        """
        return cls(TokenizerOnly(str(model_path), tool_call_parser, reasoning_parser))

    @property
    def tool_call_parser(self) -> str:
        """SGLang's name of it."""
        return self._parsers.tool_call_parser

    @property
    def reasoning_parser(self) -> str | None:
        """SGLang's name of it; None for a model that does not reason."""
        return self._parsers.reasoning_parser

    def prepare(self, call: ModelCall) -> PreparedCall:
        """What a call means for engine, renderer and parsers.

        Raises:
            BadRequest: a tool, a schema or a sampling parameter is no such thing.
        """
        return self._prepare(call)

    async def events(
        self, prepared: PreparedCall, chunks: AsyncGenerator[Chunk, None], *, opening: str = ""
    ) -> AsyncGenerator[AnswerPart, None]:
        """Read an answer; `Ended` is last. Closing it early closes `chunks`.

        Args:
            chunks: of one answer; the last finish reason counts.
            opening: how the prompt opens the assistant's turn: it may have begun to reason.

        Raises:
            KvwsError: `chunks` fails.
        """
        answer = AnswerEvents()
        beginning = self._opened_thinking(prepared, opening)
        pieces = _Pieces(self, prepared, chunks, answer, beginning)
        async with aclosing(chunks), aclosing(pieces):
            parsed = self._parsers.events(prepared.request, pieces, answer)
            try:
                async with aclosing(parsed):
                    async for event in parsed:
                        yield event
            except ParserFailed:
                if pieces.failure is not None:
                    raise pieces.failure from None
                async for _ in pieces:
                    for event in answer.unparsed():
                        yield event
            for event in answer.end(pieces.finish_reason, pieces.stop_text):
                yield event

    def detokeniser(self, prepared: PreparedCall) -> Detokeniser:
        def decode(ids: list[int]) -> str:
            return self._tokenizer.decode(
                ids,
                skip_special_tokens=not prepared.keep_special_tokens,
                clean_up_tokenization_spaces=False,
            )

        return Detokeniser(decode)

    def is_silent_stop(self, chunk: Chunk) -> bool:
        """Whether a chunk's last token only ends the answer, and is no part of it."""
        if chunk.finish_reason != "stop" or not chunk.token_ids:
            return False
        last = chunk.token_ids[-1]
        return last not in self._shown_stop_tokens and (
            last == chunk.matched_stop or last in self._stop_tokens
        )

    def _opened_thinking(self, prepared: PreparedCall, opening: str) -> str:
        """The marker that the prompt ends with, if the parsers would expect another beginning."""
        detector = self._parsers._reasoning_detector
        if detector is None:
            return ""
        begins_thinking = self._parsers.template_manager.force_reasoning or (
            self._parsers._get_reasoning_from_request(prepared.request)
        )
        end = opening.rstrip()
        if end.endswith(detector.think_start_token) and not begins_thinking:
            return detector.think_start_token
        if end.endswith(detector.think_end_token) and begins_thinking:
            return detector.think_end_token
        return ""


class _Pieces(AsyncIterator[str | None]):
    """An answer's text in the pieces that the parsers take; None at its end.

    Attributes:
        finish_reason: the engine's; known at the end.
        stop_text: the text that ended it, if one of the client's did.
        failure: of the chunks; SGLang takes some kinds of errors for its own.
    """

    def __init__(
        self,
        format_: ChatFormat,
        prepared: PreparedCall,
        chunks: AsyncGenerator[Chunk, None],
        answer: AnswerEvents,
        beginning: str,
    ) -> None:
        self.finish_reason: str | None = None
        self.failure: ValueError | None = None
        self._stops = StopTexts(prepared.stop)
        self._answer = answer
        self._pieces = self._iterate(format_, format_.detokeniser(prepared), chunks, beginning)

    @property
    def stop_text(self) -> str | None:
        return self._stops.matched

    async def __anext__(self) -> str | None:
        try:
            return await anext(self._pieces)
        except ValueError as error:
            self.failure = error
            raise

    async def aclose(self) -> None:
        await self._pieces.aclose()

    async def _iterate(
        self,
        format_: ChatFormat,
        detokeniser: Detokeniser,
        chunks: AsyncGenerator[Chunk, None],
        beginning: str,
    ) -> AsyncGenerator[str | None, None]:
        if beginning:
            yield beginning
        held, held_tokens = "", 0
        async for chunk in chunks:
            if chunk.finish_reason == "abort":
                raise EngineError("the answer was aborted", hint="ask again")
            if self.stop_text is not None and chunk.finish_reason is None and chunk.token_ids:
                break  # the engine reads on where it does not see the stop text
            self.finish_reason = chunk.finish_reason or self.finish_reason
            for token in chunk.token_ids[: -1 if format_.is_silent_stop(chunk) else None]:
                held += self._stops.add(detokeniser.add(token))
                held_tokens += 1
                if held and len(held) * _UNSETTLED_PER_FED >= self._answer.unsettled_chars:
                    self._answer.fed(held, held_tokens)
                    yield held
                    held, held_tokens = "", 0
        held += self._stops.add(detokeniser.finish()) + self._stops.finish()
        if held:
            self._answer.fed(held, held_tokens)
            yield held
        yield None


def _stop_tokens(manager: Any) -> frozenset[int]:
    """Tokens that end an answer of this model, whatever the request says."""
    tokenizer = manager.tokenizer
    of_model = manager.model_config.hf_eos_token_id or ()
    of_tokenizer = getattr(tokenizer, "additional_stop_token_ids", None) or ()
    return frozenset({tokenizer.eos_token_id, *of_model, *of_tokenizer} - {None})


def _shown_stop_tokens(tool_call_parser: str, tokenizer: Any) -> frozenset[int]:
    """Tokens that end an answer, and a tool call in it, so that the parser must see them."""
    shown = set(tool_close_tokens(tool_call_parser, tokenizer))
    if tool_call_parser == "gpt-oss":
        shown.update(tokenizer.encode(_HARMONY_CALL, add_special_tokens=False))
    return frozenset(shown)
