"""Histories that look like a coding session and say nothing: what facts are planted in.

Made by seed, so that calibration needs nothing but the model. The names that facts are about come
up all over them: a block isn't right because it names a subject.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from kvws.chat.message import Message

_VERBS = (
    *("parse", "load", "merge", "render", "fetch", "check", "encode", "flush", "rotate"),
    *("split", "apply", "collect", "close", "retry", "order", "trim", "attach", "probe"),
)
_NOUNS = (
    *("config", "buffer", "record", "token", "request", "header", "payload", "cursor", "matrix"),
    *("entry", "socket", "batch", "frame", "window", "branch", "handler", "worker", "lease"),
)
_OPENINGS = (
    "Let me look at the {a} of the {b} first.",
    "Next I want to see how {a} and {b} fit together.",
    "That did not help. I will read the {a} once more.",
    "Now the {b}: I run the tests that {v} the {a}.",
    "I think that the {a} is fine, but the {b} isn't. Searching for it.",
)
_TASKS = (
    "The {a} of {n} fails when the {b} is empty. Find out why and repair it.",
    "Please make {n} {v} every {a} only once, and add a test.",
    "Our {b} has become slow since {n} was split. Find the cause.",
)


def synthetic_messages(seed: int | str, turns: int, names: Sequence[str]) -> list[Message]:
    """A session of alternating user and assistant messages; the last is the assistant's.

    Args:
        turns: results that the assistant is shown.
        names: words that its texts mention now and then, at least one.
    """
    chance = random.Random(f"session {seed}")  # noqa: S311 (not for secrets)
    messages = [Message("user", _filled(chance.choice(_TASKS), chance, names))]
    for _ in range(turns):
        messages += [
            Message("assistant", _filled(chance.choice(_OPENINGS), chance, names)),
            Message("user", chance.choice(_RESULTS)(chance, names)),
        ]
    return [*messages, Message("assistant", "I have seen enough of it for now.")]


def _filled(form: str, chance: random.Random, names: Sequence[str]) -> str:
    return form.format(
        a=chance.choice(_NOUNS),
        b=chance.choice(_NOUNS),
        v=chance.choice(_VERBS),
        n=chance.choice(names),
    )


def _lines(
    low: int, high: int, form: Callable[[random.Random, Sequence[str]], str]
) -> Callable[[random.Random, Sequence[str]], str]:
    """`low` to `high` lines of one form."""

    def text(chance: random.Random, names: Sequence[str]) -> str:
        count = chance.randrange(low, high + 1)
        return "".join(form(chance, names) + "\n" for _ in range(count))

    return text


def _code(chance: random.Random, names: Sequence[str]) -> str:
    verb, noun, other = chance.choice(_VERBS), chance.choice(_NOUNS), chance.choice(_NOUNS)
    subject = chance.choice([*_NOUNS, *names])
    return (
        f"def {verb}_{noun}({other}, limit={chance.randrange(100)}):\n"
        f"    result = []\n"
        f"    for item in {other}.{chance.choice(_VERBS)}_all():\n"
        f"        if item.{chance.choice(_NOUNS)} is None or item.origin == '{subject}':\n"
        f"            continue\n"
        f"        result.append({chance.choice(_VERBS)}(item, {chance.randrange(10)}))\n"
        f"    return result\n"
    )


def _log_line(chance: random.Random, names: Sequence[str]) -> str:
    return (
        f"2024-0{chance.randrange(1, 10)}-1{chance.randrange(10)} "
        f"{chance.randrange(10, 24)}:{chance.randrange(10, 60)}:{chance.randrange(10, 60)} "
        f"{chance.choice(('INFO', 'WARN', 'DEBUG'))} {chance.choice([*_NOUNS, *names])}."
        f"{chance.choice(_VERBS)}: {chance.choice(_NOUNS)} took {chance.randrange(900)} ms"
    )


def _found_line(chance: random.Random, names: Sequence[str]) -> str:
    return (
        f"src/{chance.choice([*_NOUNS, *names])}/{chance.choice(_VERBS)}_{chance.choice(_NOUNS)}"
        f".py:{chance.randrange(400)}: {chance.choice(_VERBS)}({chance.choice(_NOUNS)})"
    )


def _listed_file(chance: random.Random, names: Sequence[str]) -> str:
    return (
        f"-rw-r--r-- 1 dev dev {chance.randrange(100, 90000):>6} "
        f"{chance.choice(('Jan', 'Apr', 'Sep'))} {chance.randrange(10, 29)} "
        f"{chance.choice([*_NOUNS, *names])}_{chance.choice(_NOUNS)}."
        f"{chance.choice(('py', 'toml', 'md', 'json'))}"
    )


def _prose(chance: random.Random, names: Sequence[str]) -> str:
    return (
        f"{chance.choice(('The', 'This', 'Every', 'No other'))} {chance.choice(_NOUNS)} of "
        f"{chance.choice([*_NOUNS, *names])} will {chance.choice(_VERBS)} the "
        f"{chance.choice(_NOUNS)} before the {chance.choice(_NOUNS)} can "
        f"{chance.choice(_VERBS)} it again."
    )


def _setting(chance: random.Random, names: Sequence[str]) -> str:
    return (
        f'  "{chance.choice([*_NOUNS, *names])}_{chance.choice(_NOUNS)}": '
        f"{chance.choice((str(chance.randrange(5000)), 'true', 'null', repr('default')))},"
    )


def _changed_lines(chance: random.Random, names: Sequence[str]) -> str:
    noun, verb = chance.choice([*_NOUNS, *names]), chance.choice(_VERBS)
    return (
        f"@@ -{chance.randrange(300)},4 +{chance.randrange(300)},4 @@\n"
        f"-    {noun}.{verb}({chance.randrange(50)})\n"
        f"+    {noun}.{verb}({chance.randrange(50)}, strict=True)\n"
        f"     return {chance.choice(_NOUNS)}"
    )


_RESULTS = (
    _lines(2, 4, _code),
    _lines(6, 12, _log_line),
    _lines(8, 14, _found_line),
    _lines(8, 14, _listed_file),
    _lines(4, 8, _prose),
    _lines(8, 14, _setting),
    _lines(2, 4, _changed_lines),
)
