"""How the messages of a Messages API request become messages that a model is shown."""

from __future__ import annotations

from typing import Any

import pytest

from kvws.chat.call import ModelCall
from kvws.chat.message import Message, ToolCall
from kvws.http.anthropic import ANTHROPIC

HEADER = "x-anthropic-billing-header: cc_version=2.1.197.90a; cc_entrypoint=cli;"


def read(*entries: dict[str, Any], **more: Any) -> ModelCall:
    return ANTHROPIC.read({"model": "m", "messages": list(entries), **more})


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def tool_use(call_id: str, name: str = "Bash", **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def tool_result(call_id: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **more}


def calls_of(message: dict[str, Any]) -> tuple[ToolCall, ...]:
    return read(user(text("go")), message).messages[1].tool_calls


def result_of(content: Any, **more: Any) -> str:
    return read(user(tool_result("t1", content, **more))).messages[0].content


# Texts ------------------------------------------------------------------------------------------


def test_a_text_equals_a_list_of_that_one_text() -> None:
    assert read({"role": "user", "content": "hi"}).messages == read(user(text("hi"))).messages


def test_texts_of_a_user_message_are_lines_and_those_of_an_assistant_message_continue() -> None:
    call = read(user(text("a"), text("b")), assistant(text("c"), text("d ")))
    assert call.messages == (Message("user", "a\nb"), Message("assistant", "cd "))


def test_cache_marks_and_the_order_of_keys_make_no_difference() -> None:
    plain = read(user(text("hi"), tool_result("t1", "x")))
    mark = {"cache_control": {"type": "ephemeral"}}
    shuffled = {"content": "x", "tool_use_id": "t1", "type": "tool_result", **mark}
    assert read(user({**mark, **text("hi")}, shuffled)).messages == plain.messages


def test_blank_texts_of_an_assistant_message_vanish() -> None:
    call = read(user(text("go")), assistant(text("\n"), text(" a "), text("  \n")))
    assert call.messages[1].content == " a "


def test_the_text_that_stands_for_no_text_is_taken_out_of_the_turn_again() -> None:
    call = read(user(text("go")), assistant(text("(no content)")), user(text("on")))
    assert call.messages[1] == Message("assistant", "")


def test_null_content_and_empty_lists_are_empty_messages() -> None:
    for nothing in (None, [], ""):
        call = read(
            {"role": "user", "content": nothing},
            {"role": "assistant", "content": nothing},
            {"role": "system", "content": nothing},
        )
        assert call.messages == tuple(
            Message(role, "") for role in ("user", "assistant", "system")
        )


# The system prompt ------------------------------------------------------------------------------


def test_the_system_prompt_comes_first_whether_text_or_blocks() -> None:
    as_text = read(user(text("hi")), system="a\nb")
    as_blocks = read(user(text("hi")), system=[text("a"), text("b")])
    assert as_text.messages == as_blocks.messages
    assert as_text.messages[0] == Message("system", "a\nb")


@pytest.mark.parametrize(
    "system",
    [
        [text(HEADER), text("You code.")],
        [text(HEADER + "\n"), text("You code.")],
        [text(HEADER + "\nX-Anthropic-Other: 1\nYou code.")],
        HEADER + "\nYou code.",
    ],
)
def test_header_lines_at_the_start_of_a_system_block_are_stripped(system: object) -> None:
    assert read(user(text("hi")), system=system).messages[0] == Message("system", "You code.")


def test_what_only_mentions_a_header_stays() -> None:
    system = "Send x-anthropic-version: 1.\nx-anthropic-version: 2"
    assert read(user(text("hi")), system=system).messages[0].content == system


@pytest.mark.parametrize("system", [None, "", [], [text("")], [text(HEADER)], HEADER])
def test_a_system_prompt_without_text_is_none(system: object) -> None:
    assert read(user(text("hi")), system=system).messages == (Message("user", "hi"),)


def test_system_messages_stay_where_they_are() -> None:
    inline = {"role": "system", "content": "remember"}
    call = read(user(text("a")), inline, assistant(text("b")), inline, system="s")
    roles = [message.role for message in call.messages]
    assert roles == ["system", "user", "system", "assistant", "system"]


# Turns of the assistant -------------------------------------------------------------------------


def test_thoughts_texts_and_calls_of_a_turn_are_kept_apart() -> None:
    turn = assistant(
        {"type": "thinking", "thinking": "first", "signature": "s"},
        text("mid"),
        {"type": "thinking", "thinking": "then", "signature": ""},
        tool_use("t1", command="ls"),
    )
    call = ToolCall("t1", "Bash", '{"command":"ls"}')
    expected = Message("assistant", "mid", tool_calls=(call,), reasoning="first\nthen")
    assert read(user(text("go")), turn).messages[1] == expected


def test_empty_thoughts_vanish_and_hidden_ones_are_dropped() -> None:
    turn = assistant(
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "redacted_thinking", "data": "…"},
        text("hi"),
    )
    call = read(user(text("go")), turn)
    assert call.messages[1] == Message("assistant", "hi")
    assert call.dropped == ("block of 'redacted_thinking'",)


def test_arguments_are_compact_json_in_the_order_given() -> None:
    turn = assistant(tool_use("t1", z=1, a={"y": [1, 2.5], "b": "é"}))
    assert calls_of(turn)[0].arguments == '{"z":1,"a":{"y":[1,2.5],"b":"é"}}'


@pytest.mark.parametrize(
    ("sent", "arguments"),
    [
        ('{"a": 1}', '{"a": 1}'),
        ("ls -la", '"ls -la"'),
        ("[" * 100_000, '"' + "[" * 100_000 + '"'),
        ("", "{}"),
        (None, "{}"),
        ([1, 2], "[1,2]"),
    ],
)
def test_arguments_of_other_types_become_json_text(sent: object, arguments: str) -> None:
    turn = assistant({"type": "tool_use", "id": "t1", "name": "Bash", "input": sent})
    assert calls_of(turn)[0].arguments == arguments


def test_arguments_that_the_client_could_not_parse_are_again_what_the_model_wrote() -> None:
    broken = '{"command": "ls'
    turn = assistant(tool_use("t1", __unparsedToolInput={"raw": broken, "len": len(broken)}))
    assert calls_of(turn)[0].arguments == broken


def test_a_cut_copy_of_unparsed_arguments_is_not_taken_for_the_whole() -> None:
    turn = assistant(tool_use("t1", __unparsedToolInput={"raw": "{", "len": 9}))
    assert calls_of(turn)[0].arguments == '{"__unparsedToolInput":{"raw":"{","len":9}}'


def test_the_second_call_of_one_id_in_a_turn_is_dropped() -> None:
    turn = assistant(tool_use("t1", n=1), tool_use("t1", n=2), tool_use("t2", n=3))
    assert [call.arguments for call in calls_of(turn)] == ['{"n":1}', '{"n":3}']


def test_calls_without_an_id_are_all_kept() -> None:
    nameless = {"type": "tool_use", "name": "Bash", "input": {}}
    assert calls_of(assistant(nameless, nameless)) == (ToolCall("", "Bash", "{}"),) * 2


# Results of tools -------------------------------------------------------------------------------


def test_results_come_in_the_order_sent_and_carry_the_name_of_their_tool() -> None:
    call = read(
        user(text("go")),
        assistant(tool_use("t1", "Read"), tool_use("t2", "Bash")),
        user(tool_result("t2", "two"), tool_result("t1", "one")),
    )
    assert call.messages[2:] == (
        Message("tool", "two", name="Bash", tool_call_id="t2"),
        Message("tool", "one", name="Read", tool_call_id="t1"),
    )


def test_texts_around_results_keep_their_place() -> None:
    call = read(user(text("a"), text("b"), tool_result("t1", "x"), text("c"), text("d")))
    assert [(m.role, m.content) for m in call.messages] == [
        ("user", "a\nb"),
        ("tool", "x"),
        ("user", "c\nd"),
    ]


def test_a_result_of_an_unknown_call_has_no_name() -> None:
    assert read(user(tool_result("t9", "x"))).messages[0].name is None
    without_id = {"type": "tool_result", "content": "x"}
    assert read(user(without_id)).messages == (Message("tool", "x"),)


def test_a_result_may_be_a_text_a_list_of_blocks_or_nothing() -> None:
    found = {"type": "search_result", "title": "T", "source": "S", "content": [text("found")]}
    tool = {"type": "tool_reference", "tool_name": "WebFetch"}
    assert result_of("x") == "x"
    assert result_of([text("x"), found, tool]) == "x\nT\nS\nfound\n[tool WebFetch]"
    assert result_of(None) == ""
    assert result_of([]) == ""


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ("no such file", "Error: no such file"),
        ("Exit code 3\nx", "Exit code 3\nx"),
        ("<tool_use_error>x</tool_use_error>", "<tool_use_error>x</tool_use_error>"),
        ("Error: x", "Error: x"),
        ("0 errors", "Error: 0 errors"),
        (None, "Error"),
    ],
)
def test_a_failed_result_says_so(content: str | None, shown: str) -> None:
    assert result_of(content, is_error=True) == shown
    assert result_of(content, is_error=False) == (content or "")


# What a model that reads text only cannot use ---------------------------------------------------


def test_images_leave_a_note_in_their_place() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    remote = {"type": "image", "source": {"type": "url", "url": "https://example.org/x"}}
    call = read(user(text("see"), image, remote, text("there")))
    assert call.messages[0].content == (
        "see\n[image/png image: this model reads text only]\n"
        "[image: this model reads text only]\nthere"
    )
    assert call.dropped == ("image (2 times)",)
    assert result_of([image]) == "[image/png image: this model reads text only]"


def test_documents_are_shown_as_far_as_they_are_text() -> None:
    plain = {"type": "text", "media_type": "text/plain", "data": "lines"}
    blocks = {"type": "content", "content": [text("a"), text("b")]}
    pdf = {"type": "base64", "media_type": "application/pdf", "data": "JVBE"}
    call = read(
        user(
            {"type": "document", "source": plain, "title": "T", "context": "C"},
            {"type": "document", "source": blocks},
            {"type": "document", "source": pdf, "title": None},
        )
    )
    assert call.messages[0].content == (
        "T\nC\nlines\na\nb\n[application/pdf document: this model reads text only]"
    )
    assert call.dropped == ("document",)


def test_what_tools_of_other_servers_did_is_told_in_the_turn() -> None:
    results = [
        {"type": "web_search_result", "title": "T", "url": "U", "encrypted_content": "…"},
        {"type": "web_search_result", "title": "T2", "url": "U2", "page_age": None},
    ]
    turn = assistant(
        text("Searching."),
        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "kv"}},
        {"type": "web_search_tool_result", "tool_use_id": "s1", "content": results},
        text("Found."),
    )
    assert read(user(text("go")), turn).messages[1] == Message(
        "assistant", 'Searching.\n[web_search {"query":"kv"}]\n\nT\nU\nT2\nU2\nFound.'
    )


def test_a_failed_search_and_a_fetched_page_are_told_too() -> None:
    failed = {
        "type": "web_search_tool_result",
        "content": {"type": "web_search_tool_result_error", "error_code": "max_uses_exceeded"},
    }
    page = {
        "type": "document",
        "source": {"type": "text", "media_type": "text/plain", "data": "page"},
    }
    fetched = {
        "type": "web_fetch_tool_result",
        "content": {"type": "web_fetch_result", "url": "U", "content": page},
    }
    call = read(user(text("go")), assistant(failed, fetched))
    assert call.messages[1].content == "\nmax_uses_exceeded\n\nU\npage\n"


def test_unknown_blocks_are_skipped_and_counted_wherever_they_stand() -> None:
    odd = {"type": "hologram", "text": "not shown"}
    call = read(
        user(text("a"), odd, {"text": "no type"}, tool_result("t1", [odd, text("x")])),
        assistant(odd, tool_result("t1", "misplaced"), text("b")),
        system=[odd],
    )
    assert [message.content for message in call.messages] == ["a", "x", "b"]
    assert call.dropped == (
        "block of 'hologram' (4 times)",
        "block of no type",
        "block of 'tool_result'",
    )


def test_an_endless_block_type_does_not_flood_the_log() -> None:
    call = read(user({"type": "x\n" * 10_000}))
    assert len(call.dropped[0]) < 100
    assert "\n" not in call.dropped[0]
