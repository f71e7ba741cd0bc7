"""How requests in the Responses dialect are read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvws.chat.call import ToolChoice
from kvws.chat.message import Message, ToolCall
from kvws.errors import BadRequest
from kvws.http.responses import RESPONSES
from kvws.http.responses.tools import ResponsesCall, ToolOrigin

RUN = {
    "type": "function",
    "name": "run",
    "description": "Run it",
    "parameters": {"type": "object"},
}
ASK = {"role": "user", "content": "Fix it"}


def read(**fields: Any) -> ResponsesCall:
    call = RESPONSES.read({"model": "kvws", "input": "Fix it", **fields})
    assert isinstance(call, ResponsesCall)
    return call


def messages(*items: Any) -> tuple[Message, ...]:
    return read(input=list(items)).messages


def said(text: str) -> dict[str, Any]:
    return {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": text}],
    }


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}


def called(call_id: str, arguments: str = "{}") -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "run", "arguments": arguments}


def answered(call_id: str, output: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


class TestMessages:
    def test_a_string_is_one_user_message(self) -> None:
        assert read(input="Hello").messages == (Message("user", "Hello"),)

    def test_instructions_come_first_as_a_system_message(self) -> None:
        call = read(instructions="Be brief", input=[ASK])
        assert call.messages == (Message("system", "Be brief"), Message("user", "Fix it"))

    @pytest.mark.parametrize("absent", [None, ""])
    def test_instructions_may_be_absent(self, absent: Any) -> None:
        assert read(instructions=absent).messages == (Message("user", "Fix it"),)

    @pytest.mark.parametrize("role", ["system", "developer"])
    def test_developer_and_system_messages_stay_where_they_stand(self, role: str) -> None:
        later = {"type": "message", "role": role, "content": "From now on, slowly"}
        assert messages(ASK, later) == (
            Message("user", "Fix it"),
            Message("system", "From now on, slowly"),
        )

    def test_the_parts_of_a_message_are_its_lines(self) -> None:
        parts = [{"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}]
        assert messages({"role": "user", "content": parts}) == (Message("user", "one\ntwo"),)

    def test_a_string_is_as_good_as_a_list_of_one_part(self) -> None:
        part = {"type": "input_text", "text": "Fix it"}
        assert messages({"role": "user", "content": [part]}) == messages(ASK)

    def test_what_the_model_cannot_see_leaves_a_placeholder(self) -> None:
        content = [
            {"type": "input_image", "image_url": "data:image/png;base64,AAAA"},
            {"type": "input_file", "filename": "plan.pdf", "file_data": "AAAA"},
            {"type": "input_file", "file_id": "file_1"},
        ]
        call = read(input=[{"role": "user", "content": content}])
        assert call.messages == (Message("user", "[image]\n[file plan.pdf]\n[file]"),)
        assert call.dropped == (
            "content part input_image replaced by a placeholder",
            "2 x content part input_file replaced by a placeholder",
        )

    def test_a_refusal_is_what_the_assistant_said(self) -> None:
        refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No"}]}
        assert messages(ASK, refused)[1] == Message("assistant", "No")

    def test_lone_surrogates_are_replaced(self) -> None:
        assert messages({"role": "user", "content": "a\ud800b"}) == (Message("user", "a\ufffdb"),)


class TestTurns:
    def test_the_items_of_one_answer_are_one_turn(self) -> None:
        turn = [thought("Look"), said("I look."), called("c1", '{"a": 1}'), called("c2")]
        assert messages(ASK, *turn)[1:] == (
            Message(
                "assistant",
                "I look.",
                tool_calls=(ToolCall("c1", "run", '{"a": 1}'), ToolCall("c2", "run", "{}")),
                reasoning="Look",
            ),
        )

    def test_text_and_reasoning_that_calls_interrupted_are_put_together(self) -> None:
        turn = [thought("a"), said("x"), called("c1"), thought("b"), said("y")]
        (_, message) = messages(ASK, *turn)
        assert (message.reasoning, message.content) == ("ab", "xy")

    def test_a_tool_output_ends_the_turn(self) -> None:
        roles = [m.role for m in messages(ASK, called("c1"), answered("c1", "ok"), called("c2"))]
        assert roles == ["user", "assistant", "tool", "assistant"]

    def test_skipped_items_part_no_turn(self) -> None:
        call = read(input=[ASK, said("x"), {"type": "web_search_call", "id": "ws"}, called("c1")])
        assert len(call.messages) == 2
        assert call.dropped == ("input item web_search_call",)

    def test_full_reasoning_is_preferred_to_its_summary(self) -> None:
        item = {**thought("short"), "content": [{"type": "reasoning_text", "text": "long"}]}
        assert messages(ASK, item, said("x"))[1].reasoning == "long"

    def test_the_parts_of_a_summary_are_paragraphs(self) -> None:
        summary = [{"type": "summary_text", "text": text} for text in ("one", "two")]
        item = {"type": "reasoning", "summary": summary}
        assert messages(ASK, item, said("x"))[1].reasoning == "one\n\ntwo"

    def test_encrypted_reasoning_is_dropped_without_a_trace_in_the_prompt(self) -> None:
        item = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}
        call = read(input=[ASK, item, ASK])
        assert [m.role for m in call.messages] == ["user", "user"]
        assert call.dropped == ("reasoning without readable text",)

    @pytest.mark.parametrize(
        ("arguments", "kept"),
        [("", "{}"), (None, "{}"), ({"a": "é"}, '{"a": "é"}'), ("{broken", "{broken")],
    )
    def test_arguments_are_kept_as_they_were_written(self, arguments: Any, kept: str) -> None:
        item = {**called("c1"), "arguments": arguments}
        assert messages(ASK, item)[1].tool_calls[0].arguments == kept

    def test_a_custom_call_is_a_call_with_its_input_as_the_argument(self) -> None:
        item = {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": "+é\n"}
        output = {"type": "custom_tool_call_output", "call_id": "c1", "output": "ok"}
        assert messages(ASK, item, output)[1:] == (
            Message("assistant", "", tool_calls=(ToolCall("c1", "patch", '{"input": "+é\\n"}'),)),
            Message("tool", "ok", name="patch", tool_call_id="c1"),
        )

    def test_a_local_shell_call_is_a_call_of_its_action(self) -> None:
        action = {"type": "exec", "command": ["ls"]}
        item = {"type": "local_shell_call", "call_id": "c1", "action": action}
        output = {"type": "local_shell_call_output", "call_id": "c1", "output": "a.py"}
        turn, answer = messages(ASK, item, output)[1:]
        assert turn.tool_calls[0].name == answer.name == "local_shell"
        assert json.loads(turn.tool_calls[0].arguments) == action

    def test_a_call_in_a_namespace_has_the_name_that_the_model_knows(self) -> None:
        item = {**called("c1"), "namespace": "agents"}
        assert messages(ASK, item)[1].tool_calls[0].name == "agents__run"


class TestToolOutputs:
    @pytest.mark.parametrize(
        ("output", "text"),
        [
            ("done", "done"),
            (None, ""),
            ([{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}], "a\nb"),
            ([{"type": "input_image", "image_url": "data:"}], "[image]"),
            ({"content": "failed", "success": False}, "failed"),
            ({"exit_code": 1}, '{"exit_code": 1}'),
            (7, "7"),
        ],
    )
    def test_an_output_of_any_shape_is_text(self, output: Any, text: str) -> None:
        answer = messages(ASK, called("c1"), answered("c1", output))[2]
        assert answer == Message("tool", text, name="run", tool_call_id="c1")

    def test_outputs_stay_in_the_order_sent(self) -> None:
        calls = [called("c1"), called("c2")]
        sent = messages(ASK, *calls, answered("c2", "second"), answered("c1", "first"))
        assert [m.tool_call_id for m in sent if m.role == "tool"] == ["c2", "c1"]

    def test_an_output_of_an_unknown_call_is_kept(self) -> None:
        assert messages(answered("c9", "x")) == (Message("tool", "x", tool_call_id="c9"),)


class TestTools:
    def test_a_function_is_spelled_as_in_chat_completions(self) -> None:
        call = read(tools=[{**RUN, "strict": False}])
        function = {"name": "run", "description": "Run it", "parameters": {"type": "object"}}
        assert call.tools == ({"type": "function", "function": function},)
        assert call.origins == {}

    def test_a_function_that_asks_for_it_is_strict(self) -> None:
        assert read(tools=[{**RUN, "strict": True}]).tools[0]["function"]["strict"] is True

    def test_the_key_order_of_a_schema_is_kept(self) -> None:
        schema = {"type": "object", "properties": {"z": {}, "a": {}}, "required": ["z"]}
        function = read(tools=[{**RUN, "parameters": schema}]).tools[0]["function"]
        assert json.dumps(function["parameters"]) == json.dumps(schema)

    def test_a_function_without_parameters_takes_none(self) -> None:
        function = read(tools=[{"type": "function", "name": "now"}]).tools[0]["function"]
        assert function["parameters"] == {"type": "object", "properties": {}}

    @pytest.mark.parametrize(
        ("namespace", "flat"), [("agents", "agents__run"), ("mcp__git__", "mcp__git__run")]
    )
    def test_tools_in_a_namespace_get_a_name_of_their_own(self, namespace: str, flat: str) -> None:
        call = read(tools=[RUN, {"type": "namespace", "name": namespace, "tools": [RUN]}])
        assert [tool["function"]["name"] for tool in call.tools] == ["run", flat]
        assert call.origins == {flat: ToolOrigin("run", namespace)}

    def test_of_two_tools_with_one_name_the_second_is_dropped(self) -> None:
        grouped = {"type": "namespace", "name": "agents", "tools": [RUN]}
        call = read(tools=[{**RUN, "name": "agents__run"}, grouped])
        assert call.origins == {} and len(call.tools) == 1
        assert call.dropped == ("tool agents__run for the second time",)

    def test_a_custom_tool_takes_one_text_and_tells_its_grammar(self) -> None:
        grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}
        tool = {"type": "custom", "name": "patch", "description": "Edit", "format": grammar}
        call = read(tools=[tool])
        function = call.tools[0]["function"]
        (argument, schema), *others = function["parameters"]["properties"].items()
        assert argument == "input" and not others and schema["type"] == "string"
        assert "lark" in schema["description"] and "start: /x/" in schema["description"]
        assert call.origins == {"patch": ToolOrigin("patch", custom=True)}

    def test_tools_that_run_on_a_server_are_dropped(self) -> None:
        call = read(tools=[{"type": "web_search"}, RUN, {"type": "local_shell"}, "junk"])
        assert [tool["function"]["name"] for tool in call.tools] == ["run"]
        assert call.dropped == (
            "tool of type web_search",
            "tool of type local_shell",
            "tool of type unknown",
        )

    @pytest.mark.parametrize(
        ("choice", "meant"),
        [
            (None, ToolChoice()),
            ("auto", ToolChoice()),
            ("none", ToolChoice("none")),
            ("required", ToolChoice("required")),
            ({"type": "function", "name": "run"}, ToolChoice("required", "run")),
            (
                {"type": "function", "name": "run", "namespace": "agents"},
                ToolChoice("required", "agents__run"),
            ),
            (
                {"type": "allowed_tools", "mode": "required", "tools": [RUN]},
                ToolChoice("required", "run"),
            ),
        ],
    )
    def test_tool_choices(self, choice: Any, meant: ToolChoice) -> None:
        tools = [RUN, {"type": "namespace", "name": "agents", "tools": [RUN]}]
        call = read(tools=tools, tool_choice=choice)
        assert call.tool_choice == meant and call.dropped == ()

    @pytest.mark.parametrize(
        "choice",
        [
            {"type": "web_search"},
            {"type": "function", "name": "gone"},
            {"type": "allowed_tools", "mode": "auto", "tools": [RUN]},
            {},
        ],
    )
    def test_a_choice_that_cannot_be_honoured_leaves_the_model_free(self, choice: Any) -> None:
        call = read(tools=[RUN], tool_choice=choice)
        assert call.tool_choice == ToolChoice() and len(call.dropped) == 1


class TestSettings:
    def test_sampling_and_limits(self) -> None:
        call = read(temperature=0, top_p=0.5, max_output_tokens=7, parallel_tool_calls=False)
        assert (call.sampling.temperature, call.sampling.top_p, call.max_tokens) == (0, 0.5, 7)
        assert not call.parallel_tool_calls

    def test_everything_may_be_left_out_or_null(self) -> None:
        names = ["temperature", "top_p", "max_output_tokens", "parallel_tool_calls", "stream"]
        names += ["tools", "tool_choice", "reasoning", "text", "instructions", "background"]
        names += ["previous_response_id", "conversation", "prompt", "client_metadata"]
        assert read(**dict.fromkeys(names)) == read()

    @pytest.mark.parametrize(
        ("reasoning", "thinking", "effort"),
        [
            (None, None, None),
            ({"summary": "auto"}, None, None),
            ({"effort": "high"}, None, "high"),
            ({"effort": "none"}, False, None),
        ],
    )
    def test_effort(self, reasoning: Any, thinking: bool | None, effort: str | None) -> None:
        call = read(reasoning=reasoning)
        assert (call.thinking, call.effort) == (thinking, effort)

    @pytest.mark.parametrize(
        ("text_format", "schema"),
        [
            (None, None),
            ({"type": "text"}, None),
            ({"type": "json_object"}, {}),
            (
                {"type": "json_schema", "name": "x", "schema": {"type": "object"}},
                {"type": "object"},
            ),
        ],
    )
    def test_the_form_of_the_answer(self, text_format: Any, schema: Any) -> None:
        assert read(text={"format": text_format, "verbosity": "low"}).json_schema == schema

    @pytest.mark.parametrize(
        ("kind", "is_side_call"),
        [("turn", False), ("compaction", True), ("memory", True), (None, False)],
    )
    def test_a_summary_that_codex_asks_for_is_no_turn(
        self, kind: str | None, is_side_call: bool
    ) -> None:
        metadata = {"x-codex-turn-metadata": json.dumps({"request_kind": kind})}
        assert read(client_metadata=metadata).side_call == is_side_call

    def test_what_asks_for_storage_is_ignored(self) -> None:
        asking = read(store=True, include=["reasoning.encrypted_content"], metadata={"a": "b"})
        assert asking == read()


class TestBadRequests:
    @pytest.mark.parametrize(
        ("fields", "says"),
        [
            ({"previous_response_id": "resp_1"}, "send the whole input"),
            ({"conversation": "conv_1"}, "send the whole input"),
            ({"prompt": {"id": "p"}}, "send the whole input"),
            ({"background": True}, "stream"),
            ({"model": None}, "model"),
            ({"input": None}, "input must be a string or a list of items, not null"),
            ({"input": {}}, "input must be a string or a list of items, not an object"),
            ({"input": []}, "at least one message"),
            ({"instructions": 3}, "instructions"),
            ({"tools": {}}, "tools must be a list"),
            ({"tool_choice": "any"}, "tool_choice"),
            ({"temperature": "hot"}, "temperature must be a number of at least 0"),
            ({"temperature": True}, "temperature"),
            ({"temperature": float("nan")}, "temperature"),
            ({"temperature": float("inf")}, "temperature"),
            ({"top_p": 2}, "top_p must be a number from 0 to 1, not 2"),
            ({"max_output_tokens": 0}, "max_output_tokens must be a whole number of at least 1"),
            ({"max_output_tokens": 1.5}, "max_output_tokens"),
            ({"stream": "yes"}, "stream must be true or false"),
            ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ],
    )
    def test_a_request_that_cannot_be_read_says_which_part(
        self, fields: dict[str, Any], says: str
    ) -> None:
        with pytest.raises(BadRequest) as refused:
            read(**fields)
        assert says in str(refused.value)

    def test_a_huge_number_is_no_crash(self) -> None:
        assert read(max_output_tokens=10**400).max_tokens == 10**400
        with pytest.raises(BadRequest):
            read(top_p=10**400)

    @pytest.mark.parametrize("place", ["tools", "output", "schema"])
    def test_endless_nesting_is_a_bad_request(self, place: str) -> None:
        deep: dict[str, Any] = {}
        for _ in range(100_000):
            deep = {"a": deep}
        bodies: dict[str, dict[str, Any]] = {
            "tools": {"tools": [{**RUN, "parameters": deep}]},
            "output": {"input": [answered("c1", deep)]},
            "schema": {"text": {"format": {"type": "json_schema", "schema": deep}}},
        }
        with pytest.raises(BadRequest, match="nested too deeply"):
            read(**bodies[place])
