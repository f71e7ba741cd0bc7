"""Long requests of a session are read where they are new, and no session reads another's."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import orjson
import pytest

from kvws.chat.call import ModelCall
from kvws.errors import BadRequest
from kvws.http.anthropic import ANTHROPIC
from kvws.http.app import make_app
from kvws.http.chat_completions import CHAT_COMPLETIONS
from kvws.http.dialect import Dialect
from kvws.http.options import FrontOptions
from kvws.http.reading_memory import ReadingMemory
from kvws.http.recollection import Recollection
from kvws.http.replies import Dialects
from kvws.http.responses import RESPONSES
from kvws.session.identity import identify
from tests.http.asking import client_of
from tests.http.fake_service import FakeService

LONG = 300_000
SESSION = {"x-claude-code-session-id": "s1"}


class Watched:
    """A dialect that notes how many entries were known before each of its readings."""

    def __init__(self, dialect: Dialect = ANTHROPIC) -> None:
        self.name = dialect.name
        self.writer = dialect.writer
        self.error = dialect.error
        self.known: list[int] = []
        self._dialect = dialect

    def read(self, body: object, recollection: Recollection | None = None) -> ModelCall:
        self.known.append(len(recollection.entries) if recollection else 0)
        return self._dialect.read(body, recollection)


def body_of(texts: Sequence[str], **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text} for text in texts], **more}


def read(
    memory: ReadingMemory,
    dialect: Dialect,
    texts: Sequence[str] = ("a", "b"),
    *,
    body_bytes: int = LONG,
    salt: str = "salt",
    headers: dict[str, str] = SESSION,
    **more: Any,
) -> ModelCall:
    body = body_of(texts, **more)
    return memory.read(dialect, body, body_bytes=body_bytes, salt=salt, headers=headers)


def test_the_next_long_request_of_a_session_takes_over_the_messages_it_repeats() -> None:
    memory, dialect = ReadingMemory(), Watched()
    first = read(memory, dialect, ["a", "b"])
    second = read(memory, dialect, ["a", "b", "c"])
    third = read(memory, dialect, ["a", "b", "c", "d"])
    assert dialect.known == [0, 2, 3]
    assert all(one is other for one, other in zip(first.messages, third.messages, strict=False))
    assert second.messages[2] is third.messages[2]


def test_short_requests_neither_use_the_memory_nor_change_it() -> None:
    memory, dialect = ReadingMemory(), Watched()
    read(memory, dialect, ["a", "b"])
    read(memory, dialect, ["a"], body_bytes=1000)
    read(memory, dialect, ["a", "b"])
    assert dialect.known == [0, 0, 2]


@pytest.mark.parametrize(
    "other",
    [
        {"salt": "another key's"},
        {"headers": {"x-claude-code-session-id": "s2"}},
        {"headers": {"session-id": "s1"}},
        {"headers": {**SESSION, "x-claude-code-agent-id": "a1"}},
        {"headers": {**SESSION, "x-kvws-thread": "t1"}},
        {"headers": {}},
        {"prompt_cache_key": "s1"},
        {"metadata": {"user_id": "u1"}},
    ],
)
def test_keys_sessions_and_threads_know_nothing_of_each_other(other: dict[str, Any]) -> None:
    memory, dialect = ReadingMemory(), Watched()
    for _ in range(2):
        read(memory, dialect)
        read(memory, dialect, **other)
    assert dialect.known == [0, 0, 2, 2]


def test_names_cannot_be_put_together_from_those_of_others() -> None:
    """A salt or a name that holds what stands between the parts of another's is still its own."""
    memory, dialect = ReadingMemory(), Watched()
    read(memory, dialect, salt="a", headers={"session-id": "b"})
    read(memory, dialect, salt="a\0session-id", headers={"session-id": "b"})
    read(memory, dialect, salt="a", headers={}, metadata={"user_id": "b"})
    read(memory, dialect, salt="a", headers={}, prompt_cache_key="b")
    assert dialect.known == [0, 0, 0, 0]


def test_dialects_know_nothing_of_each_other() -> None:
    memory, messages, chat = ReadingMemory(), Watched(), Watched(CHAT_COMPLETIONS)
    for dialect in (messages, chat, messages, chat):
        read(memory, dialect)
    assert messages.known == chat.known == [0, 2]


def test_names_that_are_no_texts_are_nobodys() -> None:
    memory, dialect = ReadingMemory(), Watched()
    read(memory, dialect, prompt_cache_key=7, metadata=[7])
    with pytest.raises(BadRequest):
        memory.read(dialect, [7], body_bytes=LONG, salt="salt", headers={})


def test_a_refused_request_leaves_the_memory_as_it_was() -> None:
    memory, dialect = ReadingMemory(), Watched()
    read(memory, dialect, ["a", "b"])
    with pytest.raises(BadRequest):
        read(memory, dialect, ["a", "b", "c"], max_tokens=-1)
    read(memory, dialect, ["a", "b"])
    assert dialect.known == [0, 2, 2]


def test_the_list_that_was_unused_for_longest_is_forgotten_first() -> None:
    memory, dialect = ReadingMemory(lists_max=2), Watched()
    for session in ("s1", "s2", "s1", "s3", "s1", "s2"):
        read(memory, dialect, headers={"session-id": session})
    assert dialect.known == [0, 0, 2, 0, 2, 0]


def test_lists_are_forgotten_when_their_bodies_are_too_long_together() -> None:
    memory, dialect = ReadingMemory(bytes_max=1_000_000), Watched()
    for session in ("s1", "s1", "s1", "s2", "s1"):
        read(memory, dialect, headers={"session-id": session}, body_bytes=500_000)
    assert dialect.known == [0, 2, 2, 0, 2]
    read(memory, dialect, headers={"session-id": "s3"}, body_bytes=500_001)
    read(memory, dialect, headers={"session-id": "s1"}, body_bytes=300_000)
    assert dialect.known[5:] == [0, 0]


def test_a_body_longer_than_all_that_may_be_kept_is_read_all_the_same() -> None:
    memory, dialect = ReadingMemory(bytes_max=1_000_000), Watched()
    for _ in range(2):
        assert len(read(memory, dialect, body_bytes=1_000_001).messages) == 2
    assert dialect.known == [0, 0]


def test_requests_of_one_session_at_the_same_time_do_not_harm_each_other() -> None:
    memory = ReadingMemory(lists_max=2)
    lists = [[f"{n % 3}"] * (1 + n % 5) + [str(n)] * 50 for n in range(40)]

    def texts_read(number: int) -> list[str]:
        headers = {"session-id": str(number % 4)}
        call = read(memory, ANTHROPIC, lists[number % 40], headers=headers)
        return [message.content for message in call.messages]

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(texts_read, range(400)))
    assert answers == [lists[number % 40] for number in range(400)]


def test_the_endpoint_remembers_for_a_key_what_that_key_has_sent() -> None:
    dialect = Watched()
    options = FrontOptions(keys=("key-of-a", "key-of-b"))
    dialects = Dialects(dialect, CHAT_COMPLETIONS, RESPONSES)
    app = make_app(FakeService(), dialects, identify, options)
    content = orjson.dumps(body_of(["x" * LONG, "b"]))

    async def ask(key: str, path: str) -> None:
        headers = {"authorization": f"Bearer {key}", **SESSION}
        async with client_of(app) as client:
            assert (await client.post(path, content=content, headers=headers)).status_code == 200

    async def ask_all() -> None:
        for key in ("key-of-a", "key-of-b", "key-of-a", "key-of-b"):
            await ask(key, "/v1/messages")
        await ask("key-of-a", "/v1/messages/count_tokens")

    asyncio.run(ask_all())
    assert dialect.known == [0, 0, 2, 2, 2]
