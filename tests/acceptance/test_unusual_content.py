"""Content that no text model can use: never refused, always answered, and the session goes on."""

from __future__ import annotations

from typing import Any

import pytest

from tests.acceptance.agent import Agent, calling, results
from tests.acceptance.front import Front
from tests.acceptance.wire import CHAT, RESPONSES, read_answer

PNG = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
PDF = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0xLjQ="}

USER_BLOCKS: dict[str, Any] = {
    "an image": {"type": "image", "source": PNG},
    "an image by its address": {
        "type": "image",
        "source": {"type": "url", "url": "https://example.org/a.png"},
    },
    "a document": {"type": "document", "source": PDF, "title": "Manual"},
    "a document of text": {
        "type": "document",
        "source": {"type": "text", "media_type": "text/plain", "data": "Plain words."},
        "citations": {"enabled": True},
    },
    "a search result": {
        "type": "search_result",
        "source": "https://example.org",
        "title": "A page",
        "content": [{"type": "text", "text": "Found words."}],
    },
    "a container upload": {"type": "container_upload", "file_id": "file_1"},
    "a block of tomorrow": {"type": "hologram", "beam": [1, 2, {"three": None}]},
    "a block without a type": {"beam": 1},
    "a text that is null": {"type": "text", "text": None},
}
ASSISTANT_BLOCKS: dict[str, Any] = {
    "a server tool and its result": [
        {
            "type": "server_tool_use",
            "id": "srvtoolu_1",
            "name": "web_search",
            "input": {"q": "kv"},
        },
        {
            "type": "web_search_tool_result",
            "tool_use_id": "srvtoolu_1",
            "content": [
                {
                    "type": "web_search_result",
                    "url": "https://example.org",
                    "title": "A page",
                    "encrypted_content": "abc",
                    "page_age": None,
                }
            ],
        },
    ],
    "a failed server tool": [
        {"type": "server_tool_use", "id": "srvtoolu_2", "name": "web_fetch", "input": {}},
        {
            "type": "web_fetch_tool_result",
            "tool_use_id": "srvtoolu_2",
            "content": {"type": "web_fetch_tool_error", "error_code": "url_not_accessible"},
        },
    ],
    "redacted thinking": [{"type": "redacted_thinking", "data": "xyz"}],
    "unsigned thinking": [{"type": "thinking", "thinking": "Hm.", "signature": ""}],
    "an input that is text": [
        {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": '{"command": "ls"}'}
    ],
    "code execution": [
        {
            "type": "code_execution_tool_result",
            "tool_use_id": "srvtoolu_3",
            "content": {"type": "code_execution_result", "stdout": "1", "return_code": 0},
        }
    ],
    "no content": [],
}
TOOL_KINDS: dict[str, Any] = {
    "a web search": {"type": "web_search_20250305", "name": "web_search", "max_uses": 3},
    "a web search of tomorrow": {"type": "web_search_20991231", "name": "web_search", "x": {}},
    "code execution": {"type": "code_execution_20250825", "name": "code_execution"},
    "a shell": {"type": "bash_20250124", "name": "bash"},
    "an editor": {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
    "a computer": {"type": "computer_20250124", "name": "computer", "display_width_px": 800},
    "memory": {"type": "memory_20250818", "name": "memory"},
    "a tool of tomorrow": {"type": "telepathy_20991231", "name": "telepathy"},
}


def go_on(agent: Agent) -> None:
    """The session is as good as before: its next calls compute only what is new."""
    heard = agent.ask("Go on.", "I look.\n" + calling("Bash", command="ls"))
    heard.assert_only_new_was_computed()
    heard = agent.ask(results(heard.answer, "a.py " * 30), "Done.")
    heard.assert_only_new_was_computed()
    assert heard.answer.text == "Done."


@pytest.mark.parametrize("what", USER_BLOCKS)
def test_a_users_message_may_hold(front: Front, what: str) -> None:
    agent = Agent(front)
    block = USER_BLOCKS[what]
    assert agent.ask([{"type": "text", "text": "Look."}, block]).answer.text == "Yes."
    go_on(agent)
    assert agent.ask([block], "Alone, too.").answer.text == "Alone, too."


@pytest.mark.parametrize("what", USER_BLOCKS)
def test_a_tools_result_may_hold(front: Front, what: str) -> None:
    agent = Agent(front)
    heard = agent.ask("Look.", calling("Read", file_path="/repo/a.png"))
    result = results(heard.answer, "")[0]
    heard = agent.ask([{**result, "content": [USER_BLOCKS[what]]}])
    heard.assert_only_new_was_computed()
    go_on(agent)


@pytest.mark.parametrize("what", ASSISTANT_BLOCKS)
def test_a_history_may_hold(front: Front, what: str) -> None:
    """What another server answered, before the client was pointed here."""
    agent = Agent(front)
    agent.messages = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": ASSISTANT_BLOCKS[what]},
    ]
    assert agent.ask("And?").answer.text == "Yes."
    go_on(agent)


@pytest.mark.parametrize("what", TOOL_KINDS)
def test_the_tools_may_hold(front: Front, what: str) -> None:
    agent = Agent(front)
    agent.tools = [*agent.tools, TOOL_KINDS[what]]
    assert agent.ask("Look.").answer.text == "Yes."
    go_on(agent)


def test_a_request_may_hold_members_that_nobody_knows(front: Front) -> None:
    agent = Agent(front)
    more: dict[str, Any] = {
        "container": {"skills": []},
        "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
        "mcp_servers": [{"type": "url", "url": "https://example.org", "name": "x"}],
        "output_config": {"effort": "none", "taste": "sweet"},
        "service_tier": "auto",
        "speed": "fast",
        "thinking": {"type": "telepathic"},
        "diagnostics": None,
    }
    assert agent.ask("Look.", **more).answer.text == "Yes."
    go_on(agent)


def test_a_chat_message_may_hold_images_sounds_and_parts_of_tomorrow(front: Front) -> None:
    parts = [
        {"type": "text", "text": "Look."},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "file", "file": {"file_id": "file-1"}},
        {"type": "hologram"},
    ]
    messages = [{"role": "user", "content": parts}]
    tools = [{"type": "custom", "custom": {"name": "x"}}, {"type": "telepathy"}]
    body = {"model": "kvws", "messages": messages, "tools": tools, "modalities": ["text"]}
    front.script.saying = "Seen."
    assert read_answer(CHAT, front.post(CHAT, body, session="parts")).text == "Seen."


def test_responses_may_hold_items_and_tools_of_tomorrow(front: Front) -> None:
    parts = [
        {"type": "input_text", "text": "Look."},
        {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="},
        {"type": "input_file", "file_id": "file-1"},
        {"type": "hologram"},
    ]
    items = [
        {"type": "message", "role": "user", "content": parts},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "abc"},
        {"type": "local_shell_call", "call_id": "c1", "action": {"type": "exec"}},
        {"type": "telepathy", "thought": 1},
        {"type": "message", "role": "user", "content": "And?"},
    ]
    tools = [{"type": "web_search"}, {"type": "local_shell"}, {"type": "telepathy", "name": "t"}]
    front.script.saying = "Seen."
    body = {"model": "kvws", "input": items, "tools": tools}
    assert read_answer(RESPONSES, front.post(RESPONSES, body, session="items")).text == "Seen."
