"""Names of message lists: the same, whether they are digested or compared with the last list."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from kvws.chat.message import Message, ToolCall
from kvws.chat.render import ChatRenderer
from kvws.serving import prompts
from kvws.serving.prompts import PromptBuilder
from kvws.session.transcript import Named, Transcript


@pytest.fixture(scope="module")
def builder(smollm2: Path) -> PromptBuilder:
    return PromptBuilder(ChatRenderer(smollm2))


def a_list(rng: random.Random, length: int) -> list[Message]:
    call = ToolCall("c1", "Read", '{"path": "a", "line": 1}')
    kinds = (
        Message("user", "Today's date is 2026-11-29.\nGo on."),
        Message("assistant", "I look.", (call,), reasoning="Well."),
        Message("tool", "Nothing there.", name="Read", tool_call_id="c1"),
        Message("system", "Be brief."),
    )
    return [replace(rng.choice(kinds), content=f"{rng.randrange(5)}") for _ in range(length)]


def changed(message: Message, rng: random.Random) -> Message:
    call = ToolCall("c2", "Write", "{}")
    changes = ({"content": "else"}, {"reasoning": "else"}, {"tool_calls": (call,)}, {"name": "x"})
    return replace(message, **rng.choice(changes))


def test_what_two_lists_begin_with_has_the_same_names(builder: PromptBuilder) -> None:
    rng = random.Random(5)
    for _ in range(300):
        latest = a_list(rng, rng.randrange(8))
        asked = [*latest[: rng.randrange(9)], *a_list(rng, rng.randrange(4))]
        if asked and rng.random() < 0.5:
            at = rng.randrange(len(asked))
            asked[at] = changed(asked[at], rng)
        known = Named(latest, builder.digests("main", latest))
        assert builder.digests("main", asked, known) == builder.digests("main", asked)


def test_what_is_known_is_not_digested_again(
    builder: PromptBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = a_list(random.Random(6), 50)
    known = Named(messages, builder.digests("main", messages))
    digested: list[Message] = []
    really = prompts.message_digest

    def watched(previous: bytes, message: Message) -> bytes:
        digested.append(message)
        return really(previous, message)

    monkeypatch.setattr(prompts, "message_digest", watched)
    news = Message("user", "And then?")
    builder.digests("main", [*messages, news], known)
    assert digested == [news]


def test_the_lists_of_the_threads_that_were_asked_last_are_remembered() -> None:
    transcript = Transcript()
    lists = {name: Named([Message("user", name)], [b"", name.encode()]) for name in "abcdef"}
    for name in "abcd":
        transcript.keep_latest(name, lists[name])
    transcript.keep_latest("a", lists["a"])
    for name in "ef":
        transcript.keep_latest(name, lists[name])
    assert [name for name in "abcdef" if transcript.latest(name)] == ["a", "d", "e", "f"]
    assert transcript.latest("a") is lists["a"]
