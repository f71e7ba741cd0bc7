"""Which session and thread a request belongs to."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvws.chat.call import ModelCall
from kvws.chat.message import Message
from kvws.errors import BadRequest
from kvws.session.caller import Caller, IdentitySource
from kvws.session.identity import identify, workspace_name

SESSION = "0f5d1668-6903-41b2-b4a4-914bc10647f8"
RUN = {"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}


def call(*messages: Message, tools: tuple[Any, ...] = (RUN,)) -> ModelCall:
    asked = messages or (Message("system", "Be brief"), Message("user", "Fix it"))
    return ModelCall("kvws", asked, tools=tools)


def user_id(**fields: Any) -> dict[str, Any]:
    return {"metadata": {"user_id": json.dumps(fields)}}


NAMED: list[tuple[IdentitySource, dict[str, str], dict[str, Any]]] = [
    ("x-kvws-workspace", {"x-kvws-workspace": SESSION}, {}),
    ("x-claude-code-session-id", {"x-claude-code-session-id": SESSION}, {}),
    ("x-litellm-session-id", {"x-litellm-session-id": SESSION}, {}),
    ("x-session-id", {"x-session-id": SESSION}, {}),
    ("session-id", {"session-id": SESSION}, {}),
    ("prompt_cache_key", {}, {"prompt_cache_key": SESSION}),
    ("metadata.user_id", {}, user_id(device_id="0", session_id=SESSION)),
]


@pytest.mark.parametrize(("source", "headers", "body"), NAMED)
def test_a_name_in_any_of_the_known_places_is_the_session(
    source: IdentitySource, headers: dict[str, str], body: dict[str, Any]
) -> None:
    assert identify(headers, body, call()) == Caller(SESSION, "main", source)


@pytest.mark.parametrize("first", range(len(NAMED)))
def test_of_several_names_the_first_in_order_counts(first: int) -> None:
    headers: dict[str, str] = {}
    body: dict[str, Any] = {}
    for number, (source, its_headers, its_body) in enumerate(NAMED[first:]):
        name = f"session-{number}"
        headers |= dict.fromkeys(its_headers, name)
        body |= user_id(session_id=name) if source == "metadata.user_id" else {}
        body |= {key: name for key in its_body if key == "prompt_cache_key"}
    assert identify(headers, body, call()).source == NAMED[first][0]
    assert identify(headers, body, call()).session == "session-0"


class TestThreads:
    def test_a_sub_agent_of_claude_code_is_a_thread(self) -> None:
        headers = {"x-claude-code-session-id": SESSION, "x-claude-code-agent-id": "a9a612"}
        caller = identify(headers, {}, call())
        assert (caller.session, caller.thread) == (SESSION, "a9a612")

    def test_a_sub_agent_of_codex_is_a_thread(self) -> None:
        assert identify({"session-id": "s", "thread-id": "t"}, {}, call()).thread == "t"

    def test_the_main_loop_of_codex_is_the_main_thread(self) -> None:
        assert identify({"session-id": "s", "thread-id": "s"}, {}, call()).thread == "main"

    def test_a_person_names_workspace_and_thread(self) -> None:
        headers = {"x-kvws-workspace": "mine", "x-kvws-thread": "left"}
        assert identify(headers, {}, call()) == Caller("mine", "left", "x-kvws-workspace")

    def test_sub_agents_stay_apart_in_a_workspace_that_a_person_named(self) -> None:
        headers = {
            "x-kvws-workspace": "mine",
            "x-claude-code-session-id": SESSION,
            "x-claude-code-agent-id": "a9a612",
        }
        assert identify(headers, {}, call()) == Caller("mine", "a9a612", "x-kvws-workspace")

    def test_a_thread_of_no_workspace_is_refused(self) -> None:
        with pytest.raises(BadRequest, match="x-kvws-workspace"):
            identify({"x-kvws-thread": "left", "session-id": "s"}, {}, call())


class TestMalformedNames:
    @pytest.mark.parametrize("name", ["", " ", "a/b", "../x", "a\n", "é", "a" * 129, "a b", "a\0"])
    @pytest.mark.parametrize(("source", "headers", "body"), NAMED)
    def test_a_malformed_name_is_an_error_that_says_what_may_be_in_it(
        self,
        source: IdentitySource,
        headers: dict[str, str],
        body: dict[str, Any],
        name: str,
    ) -> None:
        headers = dict.fromkeys(headers, name)
        if source == "metadata.user_id":
            body = user_id(session_id=name)
        elif body:
            body = {"prompt_cache_key": name}
        with pytest.raises(BadRequest, match=r"A-Z, a-z, 0-9 and \._:-"):
            identify(headers, body, call())

    @pytest.mark.parametrize(
        "headers",
        [
            {"x-kvws-workspace": "mine", "x-kvws-thread": "a/b"},
            {"x-claude-code-session-id": SESSION, "x-claude-code-agent-id": "a/b"},
            {"session-id": "s", "thread-id": "a/b"},
        ],
    )
    def test_so_is_a_malformed_thread(self, headers: dict[str, str]) -> None:
        with pytest.raises(BadRequest, match="no usable id"):
            identify(headers, {}, call())

    @pytest.mark.parametrize("name", [7, [], {}, True])
    def test_a_name_that_is_no_string_is_malformed(self, name: Any) -> None:
        with pytest.raises(BadRequest, match="prompt_cache_key"):
            identify({}, {"prompt_cache_key": name}, call())

    def test_the_longest_name_is_good(self) -> None:
        assert identify({"x-session-id": "a" * 128}, {}, call()).session == "a" * 128

    @pytest.mark.parametrize(
        "body",
        [
            None,
            [],
            {"prompt_cache_key": None},
            {"metadata": None},
            {"metadata": {"user_id": "user_1_account_2"}},
            {"metadata": {"user_id": "[" * 100_000}},
            {"metadata": {"user_id": "[1]"}},
            user_id(device_id="0"),
            user_id(session_id=None),
        ],
    )
    def test_a_body_that_names_no_session_leaves_it_to_the_prompt(self, body: Any) -> None:
        assert identify({}, body, call()).source == "prompt"


class TestSessionsThatNobodyNames:
    def identified(self, *messages: Message, tools: tuple[Any, ...] = (RUN,)) -> str:
        return identify({}, {}, call(*messages, tools=tools)).session

    def test_a_session_keeps_its_name_while_it_grows(self) -> None:
        start = (Message("system", "Be brief"), Message("user", "Fix it"))
        later = (
            Message("assistant", "Done"),
            Message("system", "It is late"),
            Message("user", "Thanks"),
        )
        assert self.identified(*start) == self.identified(*start, *later)

    def test_the_key_order_of_tools_does_not_matter(self) -> None:
        turned = {key: RUN[key] for key in reversed(RUN)}
        assert self.identified(tools=(RUN,)) == self.identified(tools=(turned,))

    def test_another_beginning_is_another_session(self) -> None:
        system, task = Message("system", "Be brief"), Message("user", "Fix it")
        names = [
            self.identified(system, task),
            self.identified(system, Message("user", "Fix that")),
            self.identified(Message("system", "Be long"), task),
            self.identified(task),
            self.identified(system, task, tools=()),
            self.identified(Message("assistant", "Fix it")),
        ]
        assert len(set(names)) == len(names)

    def test_text_that_is_no_unicode_is_no_crash(self) -> None:
        assert self.identified(Message("user", "a\ud800"))


names = st.from_regex(r"[A-Za-z0-9._:-]{1,128}", fullmatch=True)
sources = st.sampled_from([source for source, _, _ in NAMED])


class TestWorkspaceNames:
    def test_it_is_stable_readable_and_plain(self) -> None:
        caller = Caller(SESSION, "main", "x-claude-code-session-id")
        name = workspace_name(caller, "salt")
        assert name == workspace_name(caller, "salt")
        readable, digest = name.split("-")
        assert readable == "0f5d16686903"
        assert len(digest) * 4 >= 128 and set(digest) <= set("0123456789abcdef")

    def test_the_threads_of_a_session_share_its_workspace(self) -> None:
        main, agent = (Caller(SESSION, thread, "session-id") for thread in ("main", "a9"))
        assert workspace_name(main, "salt") == workspace_name(agent, "salt")

    def test_a_session_of_punctuation_has_a_name_too(self) -> None:
        name = workspace_name(Caller("..", "main", "x-session-id"), "salt")
        assert name.startswith("session-")

    @settings(deadline=None)
    @given(names, names, sources, sources, st.text(), st.text())
    def test_two_salts_sessions_or_sources_never_share_one(
        self,
        one: str,
        other: str,
        source: IdentitySource,
        other_source: IdentitySource,
        salt: str,
        other_salt: str,
    ) -> None:
        first = workspace_name(Caller(one, "main", source), salt)
        second = workspace_name(Caller(other, "main", other_source), other_salt)
        same = (one, source, salt) == (other, other_source, other_salt)
        assert (first == second) == same
        assert workspace_name(Caller(one, "main", source), salt + "'") != first


@pytest.fixture(scope="module")
def folder() -> Path:
    """Of recorded traffic, which doesn't belong to this repository."""
    beside_repository = Path(__file__).resolve().parents[3] / "shared" / "harness"
    folder = Path(os.environ.get("KVWS_HARNESS") or beside_repository)
    if not folder.is_dir():
        pytest.skip("no recorded harness traffic: set KVWS_HARNESS to its folder")
    return folder


class TestRecordedSessions:
    def callers(self, folder: Path, name: str) -> list[Caller]:
        """Of the requests that carry a prompt, in the order they came."""
        recorded = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        return [
            identify({key.lower(): value for key, value in each["headers"]}, each["body"], call())
            for each in recorded["requests"]
            if each["method"] == "POST"
        ]

    def test_every_recorded_session_is_one_session(self, folder: Path) -> None:
        sessions = 0
        for path in sorted(folder.glob("*.json")):
            if isinstance(json.loads(path.read_text(encoding="utf-8")), dict):
                callers = self.callers(folder, path.stem)
                assert len({(each.session, each.source) for each in callers}) == 1, path.stem
                sessions += 1
        assert sessions > 10

    @pytest.mark.parametrize(
        ("name", "source"),
        [
            ("basic", "x-claude-code-session-id"),
            ("oh_basic", "x-litellm-session-id"),
            ("oh_cond", "x-litellm-session-id"),
            ("opencode", "x-session-id"),
            ("codex", "session-id"),
        ],
    )
    def test_each_client_names_its_sessions_itself(
        self, folder: Path, name: str, source: IdentitySource
    ) -> None:
        assert {each.source for each in self.callers(folder, name)} == {source}

    def test_sub_agents_are_threads_that_last_over_their_turns(self, folder: Path) -> None:
        threads = [each.thread for each in self.callers(folder, "sub")]
        assert threads[0] == "main" and threads[-1] == "main"
        agents = set(threads) - {"main"}
        assert len(agents) == 2 and all(threads.count(agent) > 1 for agent in agents)

    def test_a_resumed_session_is_the_same_session(self, folder: Path) -> None:
        begun, resumed = self.callers(folder, "img"), self.callers(folder, "img_resume")
        assert begun[0] == resumed[0]

    @pytest.mark.parametrize("name", ["ptl400", "blkD", "tui2", "oh_cond"])
    def test_compaction_leaves_session_and_thread_as_they_are(
        self, folder: Path, name: str
    ) -> None:
        assert {each.thread for each in self.callers(folder, name)} == {"main"}

    def test_different_sessions_have_different_workspaces(self, folder: Path) -> None:
        recorded = ["basic", "big", "sub", "oh_basic", "opencode", "codex"]
        callers = [self.callers(folder, name)[0] for name in recorded]
        assert len({workspace_name(each, "salt") for each in callers}) == len(recorded)
