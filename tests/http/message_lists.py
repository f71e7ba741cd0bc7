"""Message lists of each dialect, and what clients may do to one from request to request.

Some entries are no messages, some hold numbers and flags, some are left out in part; all can be
spelled so that `==` sees no difference where a reader does.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any, cast

from hypothesis import strategies as st

from kvws.http.anthropic import ANTHROPIC
from kvws.http.chat_completions import CHAT_COMPLETIONS
from kvws.http.dialect import Dialect
from kvws.http.responses import RESPONSES

TWINS: tuple[tuple[Any, ...], ...] = ((True, 1, 1.0), (False, 0, 0.0, -0.0), (None, float("inf")))
"""Values that `==`, or their spelling as JSON, takes for one another."""

_numbers = st.sampled_from([value for twins in TWINS for value in twins])
_ids = st.sampled_from(["c1", "c2", "", None, 1])
_names = st.sampled_from(["Bash", "Read", "Edit"])
_texts = st.sampled_from(["", "a", "b", "(no content)", "é\nb"])
_arguments = st.dictionaries(st.sampled_from(["x", "y"]), _numbers | _texts, max_size=2)
_cache_mark = {"cache_control": {"type": "ephemeral"}}


def _object(**members: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(members)


def _just(value: str) -> st.SearchStrategy[str]:
    return st.just(value)


_text_block = _object(type=_just("text"), text=_texts | st.just(7))
_anthropic_blocks = st.one_of(
    _text_block,
    _object(type=_just("tool_use"), id=_ids, name=_names, input=_arguments),
    _object(type=_just("tool_result"), tool_use_id=_ids, content=_texts, is_error=_numbers),
    _object(type=_just("image"), source=st.just({"media_type": "image/png", "data": "AAAA"})),
    _object(type=_just("server_tool_use"), name=_names, input=_arguments),
    _object(type=_just("thinking"), thinking=_texts),
    _object(type=_numbers),
)
_anthropic_entries = _object(
    role=st.sampled_from(["user", "user", "assistant", "assistant", "system", "nobody"]),
    content=st.lists(_anthropic_blocks, max_size=3) | _texts,
)

_chat_calls = _object(
    id=_ids,
    type=st.sampled_from(["function", None, "custom"]),
    function=_object(name=_names, arguments=_arguments | _texts),
)
_chat_parts = st.one_of(
    _text_block,
    _object(type=_just("image_url"), image_url=_object(url=_just("data:image/png;base64,AA"))),
    _object(type=_numbers),
)
_chat_entries = st.one_of(
    _object(role=_just("assistant"), content=_texts, tool_calls=st.lists(_chat_calls, max_size=2)),
    _object(role=_just("tool"), content=_texts, tool_call_id=_ids),
    _object(role=_just("user"), content=st.lists(_chat_parts, max_size=2) | _texts),
    _object(role=st.sampled_from(["system", "nobody"]), content=_texts),
)

_responses_parts = _object(
    type=st.sampled_from(["input_text", "input_image", "unheard of"]), text=_texts
)
_responses_entries = st.one_of(
    _object(
        type=_just("message"),
        role=st.sampled_from(["user", "assistant", "developer", "nobody"]),
        content=st.lists(_responses_parts, max_size=2) | _texts | _arguments,
    ),
    _object(type=_just("reasoning"), summary=st.lists(_responses_parts, max_size=1)),
    _object(type=_just("function_call"), call_id=_ids, name=_names, arguments=_arguments),
    _object(type=_just("function_call_output"), call_id=_ids, output=_texts | _arguments),
    _object(type=_just("item_reference"), id=_ids),
)

_anything = _numbers | _texts | st.lists(_numbers, max_size=1)

ENTRIES: dict[str, st.SearchStrategy[Any]] = {
    "anthropic": _anthropic_entries | _anthropic_entries | _anything,
    "chat": _chat_entries | _chat_entries | _anything,
    "responses": _responses_entries | _responses_entries | _anything,
}
DIALECTS: dict[str, Dialect] = {
    each.name: each for each in (ANTHROPIC, CHAT_COMPLETIONS, RESPONSES)
}


def body_of(dialect: str, entries: list[Any]) -> dict[str, Any]:
    return {"model": "m", "input" if dialect == "responses" else "messages": entries}


def edits(dialect: str) -> st.SearchStrategy[Callable[[list[Any]], list[Any]]]:
    """What makes the next request's list of the last one's; nothing of the old one is shared."""
    places = st.integers(0, 12)
    fresh = st.lists(ENTRIES[dialect], max_size=3)
    return st.one_of(
        st.builds(_appended, fresh),
        st.builds(_appended, fresh),
        st.builds(_spliced, places, st.integers(0, 2), fresh),
        st.builds(_marked, places),
        st.builds(_respelled, places, st.integers(1, 3)),
        st.builds(_cut, places),
    )


def _appended(fresh: list[Any]) -> Callable[[list[Any]], list[Any]]:
    return lambda entries: deepcopy([*entries, *fresh])


def _spliced(place: int, gone: int, fresh: list[Any]) -> Callable[[list[Any]], list[Any]]:
    return lambda entries: deepcopy([*entries[:place], *fresh, *entries[place + gone :]])


def _cut(place: int) -> Callable[[list[Any]], list[Any]]:
    return lambda entries: deepcopy(entries[:place])


def _marked(place: int) -> Callable[[list[Any]], list[Any]]:
    """The cache mark moves to another entry."""

    def edit(entries: list[Any]) -> list[Any]:
        return [
            _with_mark(entry, index == place) if isinstance(entry, dict) else entry
            for index, entry in enumerate(deepcopy(entries))
        ]

    return edit


def _with_mark(entry: Any, marked: bool) -> dict[str, Any]:
    members = cast("dict[str, Any]", entry)
    kept = {name: value for name, value in members.items() if name not in _cache_mark}
    return {**kept, **_cache_mark} if marked else kept


def _respelled(place: int, step: int) -> Callable[[list[Any]], list[Any]]:
    """One entry with its keys turned round, and its numbers and flags replaced by twins."""

    def edit(entries: list[Any]) -> list[Any]:
        return [
            respelled(entry, step) if index == place else deepcopy(entry)
            for index, entry in enumerate(entries)
        ]

    return edit


def respelled(value: Any, step: int) -> Any:
    """`value` with every object's keys in the other order, and every leaf that has a twin
    replaced by the one `step` further on."""
    if isinstance(value, dict):
        members = cast("dict[str, Any]", value)
        return {key: respelled(each, step) for key, each in reversed(members.items())}
    if isinstance(value, list):
        return [respelled(each, step) for each in cast("list[Any]", value)]
    for twins in TWINS:
        for index, twin in enumerate(twins):
            if repr(value) == repr(twin):
                return twins[(index + step) % len(twins)]
    return value
