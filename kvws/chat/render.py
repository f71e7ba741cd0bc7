"""A message list as the token ids of the model's own chat template.

Templates differ in what they take, so there is a ladder of forms, the most faithful first:

    tool calls      objects with parsed arguments, objects with JSON text, or spelled out:
                        assistant   <tool_call>\\n{"name": …, "arguments": …}\\n</tool_call>
                        user        <tool_response>\\n…\\n</tool_response>
    the list        as it came; neighbours of one role merged; system messages as user messages
    tool schemas    the template's own way, or spelled out in the system message

Long sessions are rendered hundreds of times, each time a little longer. The template is cheap,
tokenisation isn't, so the text is split at the tokenizer's added tokens (`<|im_start|>` and the
like), which no token crosses, and the ids of each piece are remembered.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvws.chat.message import Message, ToolCall
from kvws.errors import ModelError

Entry = dict[str, Any]
"""A message as `apply_chat_template` takes it."""

_PIECES_MAX_CHARS = 64 << 20
_PROBES = ("\nWord", " word", "word ", "\n\n", "  two", "x")


class ChatRenderer:
    """Token ids of message lists, for one model.

    A form that the template refused once is not tried again, so that later prompts of the
    session still begin like the earlier ones.
    """

    def __init__(self, model_path: str | Path) -> None:
        """Load the tokenizer.

        Raises:
            ModelError: no tokenizer there, or one without a chat template.
        """
        tokenizer = _load_tokenizer(str(model_path))
        template = _template_text(tokenizer, model_path)
        self._tokenizer = tokenizer
        self._forms = _forms(template_takes_calls="tool_calls" in template)
        self._template_takes_tools = self._shows_tools()
        self._tokens_of = _SegmentTokenizer(
            lambda texts: tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"],
            _hard_tokens(tokenizer),
        )

    def tokens(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """The prompt for `messages`; the special tokens are the template's.

        Raises:
            ModelError: the template refuses the messages, however they are adapted.
        """
        return self._tokens_of(self.text(messages, tools, add_generation_prompt))

    def text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
    ) -> str:
        """The same prompt as text.

        Raises:
            ModelError: as `tokens`.
        """
        if tools and not self._template_takes_tools:
            messages, tools = _with_tools_spelled_out(messages, tools), ()
        refusal: Exception | None = None
        for position, (entries_of, arrange) in enumerate(self._forms):
            entries = arrange(entries_of(messages))
            try:
                text = self._apply(entries, tools, add_generation_prompt)
            except Exception as error:  # a template is a program and may raise anything
                refusal = error
            else:
                self._forms = self._forms[position:]
                return text
        raise ModelError(
            f"the model's chat template refuses the messages: {refusal}",
            hint="use a model whose template takes these roles",
        ) from refusal

    def _shows_tools(self) -> bool:
        """Whether the template writes the tool schemas that it is given."""
        hello: list[Entry] = [{"role": "user", "content": "Hello"}]
        function = {"name": "probe", "description": "", "parameters": {"type": "object"}}
        try:
            plain = self._apply(hello, (), True)
            return plain != self._apply(hello, [{"type": "function", "function": function}], True)
        except Exception:  # as in text()
            return False

    def _apply(
        self,
        entries: list[Entry],
        tools: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
    ) -> str:
        return self._tokenizer.apply_chat_template(
            entries,
            tools=list(tools) or None,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )


def _load_tokenizer(model_path: str) -> Any:
    from transformers import AutoTokenizer, PreTrainedConfig  # slow: only who renders pays

    loader: Any = AutoTokenizer
    try:
        try:
            return loader.from_pretrained(model_path)
        except ImportError:
            # The model's own module wants a package that is absent or broken here; without
            # that module the tokenizer's files alone decide.
            return loader.from_pretrained(model_path, config=PreTrainedConfig())
    except Exception as error:  # the parsers of a model's files raise whatever they like
        raise ModelError(
            f"no tokenizer can be loaded from {model_path}: {error}",
            hint="give a model folder with tokenizer.json, or the name of a model",
        ) from error


def _template_text(tokenizer: Any, model_path: str | Path) -> str:
    try:
        return str(tokenizer.get_chat_template())
    except ValueError as error:
        raise ModelError(
            f"the tokenizer in {model_path} has no chat template",
            hint="use the instruction-tuned variant of the model",
        ) from error


def _hard_tokens(tokenizer: Any) -> list[str]:
    """Added tokens that take no neighbouring blanks with them and need no normalisation."""
    added: Iterable[Any] = tokenizer.added_tokens_decoder.values()
    return [
        token.content
        for token in added
        if not (token.lstrip or token.rstrip or token.single_word or token.normalized)
    ]


class _SegmentTokenizer:
    """Tokenises text piece by piece and remembers the pieces.

    Pieces are only used if they give what whole texts give: the first text and a few probes
    decide, for good. A tokenizer that puts a blank before each piece fails that.
    """

    def __init__(
        self, encode: Callable[[list[str]], list[list[int]]], hard_tokens: Sequence[str]
    ) -> None:
        """`encode` maps whole texts to token ids; `hard_tokens` are where texts are split."""
        self._encode = encode
        self._hard_tokens = tuple(hard_tokens)
        longest_first = sorted(hard_tokens, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, longest_first))})").split
        self._pieces: dict[str, tuple[int, ...]] = {}
        self._pieces_chars = 0
        self._whole_only: bool | None = None if hard_tokens else True

    def __call__(self, text: str) -> list[int]:
        if self._whole_only is None:
            texts = [text, *self._probes()]
            whole = self._encode(texts)
            self._whole_only = [self._by_piece(each) for each in texts] != whole
        return self._encode([text])[0] if self._whole_only else self._by_piece(text)

    def _probes(self) -> list[str]:
        return [token + probe + token for token in self._hard_tokens for probe in _PROBES]

    def _by_piece(self, text: str) -> list[int]:
        pieces = [piece for piece in self._split(text) if piece]
        self._learn(pieces)
        ids: list[int] = []
        for piece in pieces:
            ids += self._pieces[piece]
        return ids

    def _learn(self, pieces: list[str]) -> None:
        """Add what is missing; forget everything first when there is too much. Mutates self."""
        if self._pieces_chars > _PIECES_MAX_CHARS:
            self._pieces.clear()
            self._pieces_chars = 0
        missing = list(dict.fromkeys(p for p in pieces if p not in self._pieces))
        if missing:
            self._pieces_chars += sum(map(len, missing))
            self._pieces.update(zip(missing, map(tuple, self._encode(missing)), strict=True))


def _forms(
    *, template_takes_calls: bool
) -> list[tuple[Callable[[Sequence[Message]], list[Entry]], Callable[[list[Entry]], list[Entry]]]]:
    ways = [_calls_parsed, _calls_as_text] if template_takes_calls else []
    return [
        (entries_of, arrange)
        for entries_of in (*ways, _calls_spelled_out)
        for arrange in (_as_recorded, _merged, _without_system)
    ]


def _calls_parsed(messages: Sequence[Message]) -> list[Entry]:
    return [_entry(message, _arguments) for message in messages]


def _calls_as_text(messages: Sequence[Message]) -> list[Entry]:
    return [_entry(message, lambda call: call.arguments) for message in messages]


def _entry(message: Message, arguments: Callable[[ToolCall], Any]) -> Entry:
    entry: Entry = {"role": message.role, "content": message.content}
    if message.tool_calls:
        entry["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": arguments(call)},
            }
            for call in message.tool_calls
        ]
    if message.name is not None:
        entry["name"] = message.name
    if message.tool_call_id is not None:
        entry["tool_call_id"] = message.tool_call_id
    return entry


def _calls_spelled_out(messages: Sequence[Message]) -> list[Entry]:
    entries: list[Entry] = []
    for message in messages:
        role, text = message.role, message.content
        if role == "tool":
            role, text = "user", f"<tool_response>\n{text}\n</tool_response>"
        elif message.tool_calls:
            text = "\n".join([text] * bool(text) + [_spelled(c) for c in message.tool_calls])
        entries.append({"role": role, "content": text})
    return entries


def _spelled(call: ToolCall) -> str:
    body = {"name": call.name, "arguments": _arguments(call)}
    return f"<tool_call>\n{json.dumps(body, ensure_ascii=False)}\n</tool_call>"


def _arguments(call: ToolCall) -> Any:
    try:
        return json.loads(call.arguments)
    except (ValueError, RecursionError):  # a model may write broken JSON: show it as it is
        return call.arguments


def _with_tools_spelled_out(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
) -> list[Message]:
    schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = (
        f"These tools can be called:\n<tools>\n{schemas}\n</tools>\n"
        "A call is written as\n"
        '<tool_call>\n{"name": "…", "arguments": {…}}\n</tool_call>'
    )
    if messages and messages[0].role == "system":
        first = Message("system", f"{messages[0].content}\n\n{text}")
        return [first, *messages[1:]]
    return [Message("system", text), *messages]


def _as_recorded(entries: list[Entry]) -> list[Entry]:
    return entries


def _merged(entries: list[Entry]) -> list[Entry]:
    """Neighbours of one role as one entry; tool answers stay apart, they answer calls by id."""
    merged: list[Entry] = []
    for entry in entries:
        if merged and merged[-1]["role"] == entry["role"] != "tool":
            before = merged[-1]
            contents = [text for text in (before["content"], entry["content"]) if text]
            calls = [*before.get("tool_calls", ()), *entry.get("tool_calls", ())]
            merged[-1] = {"role": entry["role"], "content": "\n\n".join(contents)}
            if calls:
                merged[-1]["tool_calls"] = calls
        else:
            merged.append(entry)
    return merged


def _without_system(entries: list[Entry]) -> list[Entry]:
    return _merged(
        [{**entry, "role": "user"} if entry["role"] == "system" else entry for entry in entries]
    )
