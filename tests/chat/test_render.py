"""Message lists as tokens: any template, always what tokenising the whole text gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvws.chat import pieces
from kvws.chat.message import Message, ToolCall
from kvws.chat.render import ChatRenderer
from kvws.errors import ModelError, PromptError

TURN = "{{ '<|s|>' + message.role + '\n' + message.content + '<|e|>' }}"
PROMPT = "{% if add_generation_prompt %}<|s|>assistant\n{% endif %}"
PLAIN = "{% for message in messages %}" + TURN + "{% endfor %}" + PROMPT

READ = ToolCall("c1", "Read", '{"path": "ä.py"}')
WRITE = ToolCall("c2", "Write", '{"path": "b.py"}')
TALK = (
    Message("system", "Be brief."),
    Message("user", "Look."),
    Message("assistant", "Reading.", (READ,)),
    Message("tool", "x = 1", name="Read", tool_call_id="c1"),
    Message("assistant", "It sets x."),
)
SCHEMA = {"type": "function", "function": {"name": "Read", "parameters": {"type": "object"}}}

MakeRenderer = Callable[..., ChatRenderer]


def byte_level() -> Tokenizer:
    """One token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def blank_first() -> Tokenizer:
    """One token per letter, and a blank put before the text but not after special tokens."""
    letters = "▁abcdefghijklmnopqrstuvwxyz?"
    vocabulary = {letter: n for n, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    return tokenizer


@pytest.fixture
def renderer_of(tmp_path: Path) -> MakeRenderer:
    """Makes the renderer of a model with the given chat template and tokenizer."""

    def make(template: str | None, tokenizer: Tokenizer | None = None) -> ChatRenderer:
        tokenizer = tokenizer or byte_level()
        tokenizer.add_special_tokens([AddedToken("<|s|>"), AddedToken("<|e|>")])
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template)
        fast.save_pretrained(tmp_path)
        (tmp_path / "config.json").write_text("{}")
        return ChatRenderer(tmp_path)

    return make


@pytest.fixture(scope="module")
def smollm2_renderer(smollm2: Path) -> ChatRenderer:
    return ChatRenderer(smollm2)


class TestForms:
    def test_calls_are_spelled_out_where_the_template_knows_none(
        self, renderer_of: MakeRenderer
    ) -> None:
        assert renderer_of(PLAIN).text(TALK) == (
            "<|s|>system\nBe brief.<|e|>"
            "<|s|>user\nLook.<|e|>"
            "<|s|>assistant\nReading.\n"
            '<tool_call>\n{"name": "Read", "arguments": {"path": "ä.py"}}\n</tool_call><|e|>'
            "<|s|>user\n<tool_response>\nx = 1\n</tool_response><|e|>"
            "<|s|>assistant\nIt sets x.<|e|>"
            "<|s|>assistant\n"
        )

    def test_a_turn_that_only_calls(self, renderer_of: MakeRenderer) -> None:
        turn = Message("assistant", "", (READ, ToolCall("c3", "Raw", "{broken")))
        text = renderer_of(PLAIN).text([TALK[1], turn], add_generation_prompt=False)
        assert text.endswith(
            "<|s|>assistant\n"
            '<tool_call>\n{"name": "Read", "arguments": {"path": "ä.py"}}\n</tool_call>\n'
            '<tool_call>\n{"name": "Raw", "arguments": "{broken"}\n</tool_call><|e|>'
        )

    def test_tools_go_into_the_system_message(self, renderer_of: MakeRenderer) -> None:
        renderer = renderer_of(PLAIN)
        text = renderer.text(TALK, [SCHEMA])
        assert text.startswith("<|s|>system\nBe brief.\n\nThese tools can be called:\n<tools>\n{")
        assert text.count("<|s|>system") == 1
        text = renderer.text(TALK[1:], [SCHEMA])
        assert text.startswith("<|s|>system\nThese tools can be called:")

    def test_a_template_that_knows_calls_gets_parsed_arguments(
        self, renderer_of: MakeRenderer
    ) -> None:
        template = (
            "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
            "{% for message in messages %}{{ message.role }}:{{ message.content }}"
            "{% for call in message.tool_calls or [] %}"
            "{{ call.function.name }}({{ call.function.arguments.path }})#{{ call.id }}"
            "{% endfor %}{% if message.role == 'tool' %}#{{ message.tool_call_id }}{% endif %};"
            "{% endfor %}"
        )
        text = renderer_of(template).text(TALK, [SCHEMA])
        assert text == (
            "[Read]system:Be brief.;user:Look.;assistant:Reading.Read(ä.py)#c1;"
            "tool:x = 1#c1;assistant:It sets x.;"
        )

    def test_a_template_that_wants_arguments_as_text_gets_them(
        self, renderer_of: MakeRenderer
    ) -> None:
        template = (
            "{% for message in messages %}{% for call in message.tool_calls or [] %}"
            "{{ 'call ' + call.function.arguments }}{% endfor %}{% endfor %}"
        )
        assert renderer_of(template).text(TALK) == 'call {"path": "ä.py"}'

    def test_calls_that_the_template_refuses_are_spelled_out(
        self, renderer_of: MakeRenderer
    ) -> None:
        template = (
            "{% for message in messages %}{% if message.tool_calls and "
            "message.tool_calls | length > 1 %}{{ raise_exception('one call only') }}"
            "{% endif %}{{ message.role }}:{{ message.content }};{% endfor %}"
        )
        turn = Message("assistant", "Both.", (READ, WRITE))
        text = renderer_of(template).text([TALK[1], turn])
        assert text.startswith("user:Look.;assistant:Both.\n<tool_call>\n")
        assert text.count("<tool_call>") == 2

    def test_neighbours_are_merged_where_roles_must_alternate(
        self, renderer_of: MakeRenderer
    ) -> None:
        template = (
            "{% for message in messages %}"
            "{% if not loop.first and message.role == messages[loop.index0 - 1].role %}"
            "{{ raise_exception('roles must alternate') }}{% endif %}" + TURN + "{% endfor %}"
        )
        twice = [Message("user", "One."), Message("user", "Two."), Message("assistant", "Hm.")]
        text = renderer_of(template).text(twice)
        assert text == "<|s|>user\nOne.\n\nTwo.<|e|><|s|>assistant\nHm.<|e|>"

    def test_system_text_goes_to_the_user_where_there_is_no_system_role(
        self, renderer_of: MakeRenderer
    ) -> None:
        template = (
            "{% for message in messages %}{% if message.role == 'system' %}"
            "{{ raise_exception('no system role') }}{% endif %}" + TURN + "{% endfor %}"
        )
        text = renderer_of(template).text(TALK[:2])
        assert text == "<|s|>user\nBe brief.\n\nLook.<|e|>"

    def test_a_form_once_refused_is_not_tried_again(self, renderer_of: MakeRenderer) -> None:
        template = (
            "{% if messages | length == 3 %}{{ raise_exception('three') }}{% endif %}" + PLAIN
        )
        renderer = renderer_of(template)
        two = [Message("user", "a"), Message("user", "b")]
        before = renderer.text(two)
        renderer.text([*two, Message("user", "c")])
        assert renderer.text(two) != before

    @pytest.mark.parametrize(
        "template", ["{{ raise_exception('never') }}", "{{ messages[9].role.x }}", "{{ 1 / 0 }}"]
    )
    def test_a_template_that_refuses_everything(
        self, renderer_of: MakeRenderer, template: str
    ) -> None:
        renderer = renderer_of(template)
        with pytest.raises(PromptError, match="refuses") as caught:
            renderer.tokens(TALK)
        assert caught.value.hint

    def test_a_tokenizer_without_a_template(self, renderer_of: MakeRenderer) -> None:
        with pytest.raises(ModelError, match="no chat template") as caught:
            renderer_of(None)
        assert caught.value.hint

    def test_a_folder_without_a_tokenizer(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match="no tokenizer"):
            ChatRenderer(tmp_path)


class TestSystemMessagesFurtherDown:
    NOTED = (*TALK[:2], Message("assistant", "Hm."), Message("system", "It is late."), TALK[1])
    REFUSING = (
        "{% for message in messages %}{% if message.role == 'system' and not loop.first %}"
        "{{ raise_exception('system first') }}{% endif %}" + TURN + "{% endfor %}"
    )
    HOISTING = (
        "{% for message in messages if message.role == 'system' %}" + TURN + "{% endfor %}"
        "{% for message in messages if message.role != 'system' %}" + TURN + "{% endfor %}"
    )
    IGNORING = (
        "{% for message in messages %}{% if message.role != 'system' or loop.first %}"
        + TURN
        + "{% endif %}{% endfor %}"
    )

    def test_are_rendered_where_they_stand(self, renderer_of: MakeRenderer) -> None:
        text = renderer_of(PLAIN).text(self.NOTED)
        assert "Hm.<|e|><|s|>system\nIt is late.<|e|><|s|>user\nLook.<|e|>" in text

    @pytest.mark.parametrize("template", [REFUSING, HOISTING, IGNORING])
    def test_are_reminders_of_the_users_where_the_template_has_no_place_for_them(
        self, renderer_of: MakeRenderer, template: str
    ) -> None:
        assert renderer_of(template).text(self.NOTED) == (
            "<|s|>system\nBe brief.<|e|><|s|>user\nLook.<|e|><|s|>assistant\nHm.<|e|>"
            "<|s|>user\n<system-reminder>\nIt is late.\n</system-reminder><|e|>"
            "<|s|>user\nLook.<|e|>"
        )

    def test_that_are_reminders_already_are_not_wrapped_again(
        self, renderer_of: MakeRenderer
    ) -> None:
        noted = Message("system", "<system-reminder>\nIt is late.\n</system-reminder>\n")
        text = renderer_of(self.REFUSING).text([TALK[1], noted])
        assert text == f"<|s|>user\nLook.<|e|><|s|>user\n{noted.content}<|e|>"


class TestReasoning:
    THOUGHT = (TALK[1], Message("assistant", "x is 1.", reasoning="It says x = 1."))

    def test_is_shown_by_templates_that_read_it(self, renderer_of: MakeRenderer) -> None:
        reading = PLAIN.replace(
            "message.content", "(message.reasoning_content or 'no thought') + message.content"
        )
        text = renderer_of(reading).text(self.THOUGHT)
        assert "user\nno thoughtLook." in text
        assert "assistant\nIt says x = 1.x is 1." in text

    def test_is_left_out_for_others(self, renderer_of: MakeRenderer) -> None:
        assert "says" not in renderer_of(PLAIN).text(self.THOUGHT)

    def test_of_merged_neighbours_is_merged(self, renderer_of: MakeRenderer) -> None:
        alternating = (
            "{% for message in messages %}"
            "{% if not loop.first and message.role == messages[loop.index0 - 1].role %}"
            "{{ raise_exception('roles must alternate') }}{% endif %}"
            "{{ message.reasoning_content }}|{{ message.content }};{% endfor %}"
        )
        text = renderer_of(alternating).text([*self.THOUGHT, self.THOUGHT[1]])
        assert text.endswith(";It says x = 1.\n\nIt says x = 1.|x is 1.\n\nx is 1.;")


class TestOptions:
    def test_reach_the_template(self, renderer_of: MakeRenderer) -> None:
        renderer = renderer_of(PLAIN + "{% if enable_thinking is false %}nothink{% endif %}")
        assert not renderer.text(TALK).endswith("nothink")
        assert renderer.text(TALK, options={"enable_thinking": False}).endswith("nothink")
        tokens = renderer.tokens(TALK, options={"enable_thinking": False})
        assert tokens == [*renderer.tokens(TALK), *b_ids(renderer, "nothink")]

    @pytest.mark.parametrize("name", ["chat_template", "messages", "tools", "tokenize"])
    def test_that_are_no_options_are_refused(self, renderer_of: MakeRenderer, name: str) -> None:
        with pytest.raises(PromptError, match=name) as caught:
            renderer_of(PLAIN).text(TALK, options={name: "x"})
        assert caught.value.hint and caught.value.http_status == 400


def b_ids(renderer: ChatRenderer, text: str) -> list[int]:
    tokenizer: Any = renderer._tokenizer
    return tokenizer(text, add_special_tokens=False)["input_ids"]


class TestTokens:
    def test_ids_are_those_of_the_whole_text(self, renderer_of: MakeRenderer) -> None:
        renderer = renderer_of(PLAIN)
        assert renderer.tokens(TALK) == whole_text_ids(renderer, TALK)

    def test_a_tokenizer_that_marks_where_a_text_begins_is_given_whole_texts(
        self, renderer_of: MakeRenderer
    ) -> None:
        renderer = renderer_of(PLAIN, blank_first())
        for end in range(1, len(TALK)):
            assert renderer.tokens(TALK[:end]) == whole_text_ids(renderer, TALK[:end])

    def test_forgetting_pieces_changes_nothing(
        self, renderer_of: MakeRenderer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        renderer = renderer_of(PLAIN)
        expected = renderer.tokens(TALK)
        monkeypatch.setattr(pieces, "_REMEMBERED_MAX_CHARS", 10)
        for end in (2, 4, len(TALK)):
            renderer.tokens(TALK[:end])
        assert renderer.tokens(TALK) == expected

    def test_smollm2_ends_with_the_generation_prompt(self, smollm2_renderer: ChatRenderer) -> None:
        with_prompt = smollm2_renderer.tokens(TALK)
        without = smollm2_renderer.tokens(TALK, add_generation_prompt=False)
        assert with_prompt[: len(without)] == without
        assert 0 < len(with_prompt) - len(without) < 6


def whole_text_ids(renderer: ChatRenderer, messages: Any) -> list[int]:
    tokenizer: Any = renderer._tokenizer
    text = renderer.text(messages)
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


FRAGMENTS = st.sampled_from(
    ["<|im_start|>", "<|im_end|>", "\n", " ", "  ", "<tool_call>", "word", "12", "é", "\u3000"]
)
CONTENTS = st.one_of(st.text(max_size=30), st.lists(FRAGMENTS, max_size=8).map("".join))
MESSAGES = st.lists(
    st.builds(
        Message,
        role=st.sampled_from(["system", "user", "assistant", "tool"]),
        content=CONTENTS.filter(lambda text: not any("\ud800" <= c <= "\udfff" for c in text)),
        tool_calls=st.just(()) | st.just((READ, WRITE)),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=200, deadline=None)
@given(MESSAGES)
def test_pieces_give_what_the_whole_text_gives(
    smollm2_renderer: ChatRenderer, messages: list[Message]
) -> None:
    assert smollm2_renderer.tokens(messages) == whole_text_ids(smollm2_renderer, messages)


@settings(max_examples=200, deadline=None)
@given(MESSAGES, st.booleans())
def test_prompts_only_grow(
    smollm2_renderer: ChatRenderer, messages: list[Message], with_tools: bool
) -> None:
    tools = [SCHEMA] if with_tools else []
    longest = smollm2_renderer.tokens(messages, tools)
    for end in range(1, len(messages)):
        context = smollm2_renderer.tokens(messages[:end], tools, add_generation_prompt=False)
        assert longest[: len(context)] == context
