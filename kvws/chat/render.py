"""A message list as the text and the token ids of the model's own chat template.

Templates differ in what they take, so there is a ladder of forms (`forms`), the most faithful
first. Long sessions are rendered hundreds of times, each time a little longer: the template is
cheap, tokenisation isn't, so the ids of pieces of text are remembered (`pieces`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvws.chat.forms import Entry, Form, ladder, with_reminders, with_tools_spelled_out
from kvws.chat.message import Message
from kvws.chat.pieces import PieceTokenizer
from kvws.errors import ModelError, PromptError

Options = Mapping[str, Any]
"""What a template is told besides the messages, such as enable_thinking or reasoning_effort."""

NO_OPTIONS: Options = MappingProxyType({})

_NOT_OPTIONS = frozenset(
    {
        *("conversation", "messages", "tools", "documents", "chat_template", "tokenize"),
        *("add_generation_prompt", "continue_final_message", "padding", "truncation"),
        *("max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
        "tokenizer_kwargs",
    }
)


class ChatRenderer:
    """Token ids of message lists, for one model.

    `tokens` and `text` are for one session after another: a form that the template refused once
    is not tried again, so that later prompts of the session still begin like the earlier ones.
    `text_in` takes the form from its caller and remembers nothing.
    """

    def __init__(self, model_path: str | Path) -> None:
        """Load the tokenizer.

        Raises:
            ModelError: no tokenizer there, or one without a chat template.
        """
        tokenizer = _load_tokenizer(str(model_path))
        template = _template_text(tokenizer, model_path)
        self._tokenizer = tokenizer
        self._forms = ladder(
            takes_calls="tool_calls" in template, reads_reasoning="reasoning_content" in template
        )
        self._first_form = 0
        self._pieces = PieceTokenizer(
            lambda texts: tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"],
            _hard_tokens(tokenizer),
        )

    @property
    def forms(self) -> tuple[Form, ...]:
        """Every form that this template may take, the most faithful first."""
        return self._forms

    @property
    def pieces(self) -> PieceTokenizer:
        return self._pieces

    @property
    def vocabulary(self) -> int:
        """Entries of the tokenizer's vocabulary, without markers that were added to it."""
        return self._tokenizer.vocab_size

    def tokens(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        options: Options = NO_OPTIONS,
    ) -> list[int]:
        """The prompt for `messages`; the special tokens are the template's.

        Raises:
            PromptError: the template refuses the messages, however they are adapted.
        """
        return self._pieces(self.text(messages, tools, add_generation_prompt, options))

    def text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        options: Options = NO_OPTIONS,
    ) -> str:
        """The same prompt as text.

        Raises:
            PromptError: as `tokens`.
        """
        form, text = self.first_text(
            messages, tools, add_generation_prompt, options, since=self._first_form
        )
        self._first_form = form
        return text

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        return self._tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def first_text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        options: Options,
        *,
        since: int = 0,
    ) -> tuple[int, str]:
        """The first form that the template takes, from number `since` on, and the text in it.

        Raises:
            PromptError: it takes none.
        """
        refusal: PromptError | None = None
        for number in range(since, len(self._forms)):
            try:
                text = self.text_in(
                    self._forms[number], messages, tools, add_generation_prompt, options
                )
            except PromptError as error:
                refusal = error
            else:
                return number, text
        assert refusal is not None  # there is always a form
        raise refusal

    def text_in(
        self,
        form: Form,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        options: Options,
    ) -> str:
        """The text of `messages` in one form.

        Raises:
            PromptError: the template refuses it.
        """
        if taken := _NOT_OPTIONS & options.keys():
            raise PromptError(
                f"{', '.join(sorted(taken))} cannot be set for a chat template",
                hint="leave it out of the template's options",
            )
        if not self._shows_system_in_place:
            messages = with_reminders(messages)
        if tools and not self._shows_tools:
            messages, tools = with_tools_spelled_out(messages, tools), ()
        try:
            return self._apply(form.entries(messages), tools, add_generation_prompt, options)
        except Exception as error:  # a template is a program and may raise anything
            raise PromptError(
                f"the model's chat template refuses the messages: {error}",
                hint="begin with a system or user message, answer tool calls right behind them, "
                "or use a model whose template takes these roles",
            ) from error

    @cached_property
    def _shows_tools(self) -> bool:
        """Whether the template writes the tool schemas that it is given."""
        hello: list[Entry] = [{"role": "user", "content": "Hello"}]
        function = {"name": "probe", "description": "", "parameters": {"type": "object"}}
        try:
            plain = self._apply(hello, ())
            return plain != self._apply(hello, [{"type": "function", "function": function}])
        except Exception:  # as in text_in()
            return False

    @cached_property
    def _shows_system_in_place(self) -> bool:
        """Whether a system message further down is written where it stands, and is not refused,
        left out or moved to the front."""
        roles = ("system", "user", "assistant", "system", "user")
        marks = [f"mark{position}" for position in range(len(roles))]
        probe: list[Entry] = [
            {"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)
        ]
        try:
            text = self._apply(probe, ())
        except Exception:  # as in text_in()
            return False
        places = [text.find(mark) for mark in marks]
        return -1 not in places and places == sorted(places)

    def _apply(
        self,
        entries: list[Entry],
        tools: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        options: Options = NO_OPTIONS,
    ) -> str:
        return self._tokenizer.apply_chat_template(
            entries,
            tools=list(tools) or None,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **options,
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
