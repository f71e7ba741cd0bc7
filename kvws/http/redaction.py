"""Likely secrets in text, replaced by what kind of secret they were.

Found are tokens that look like one whoever holds them (API keys with a vendor's prefix, JSON web
tokens, private keys) and values that stand where secrets stand (authorization headers, `KEY=…`
and `"password": "…"`, passwords in URLs and in command lines).

What no pattern can know: a password in prose or one made of words beside a harmless name, a secret
in a form of its own, one that is encoded, broken over lines or split between two messages, and
everything that is confidential without being a credential. A redacted transcript is still a
transcript. The other way round, a harmless value beside a telling name is replaced too.

Variables that only name a secret (`$TOKEN`, `${TOKEN}`, `<token>`) stay as they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeGuard

_WINDOW_CHARS = 1 << 15
"""Every search keeps all other threads waiting: long texts are searched in windows."""
_LONGEST_CHARS = 1 << 14
"""Of one match: how far a search reaches beyond its window. Every pattern is bounded, so that its
cost is linear in the text, whatever the text."""
_SHORTEST_VALUE_CHARS = 4

_NO_REFERENCE = r"(?!\[redacted:)(?![$<{])"
_BARE = rf"{_NO_REFERENCE}[^\s\"'\\]"
_QUOTED = rf"{_NO_REFERENCE}[^\"'\\\n]"
_QUOTE = r"\\{0,3}[\"']"
_TO = rf"(?:{_QUOTE})?\s{{0,8}}[:=]\s{{0,8}}"
_RANDOM = r"(?=[\w.~+/=-]{0,64}(?-i:\d|[a-z][A-Z]))[\w.~+/=-]"
_TELLING_NAME = (
    r"(?:(?:api|secret|access|private|auth|encryption|signing|account)[_-]?key"
    r"|pass(?:word|wd|phrase)|secret|(?:auth|access|refresh|bearer)[_-]?token)"
)
_KEY = r"-----{0} [A-Z0-9 ]{{0,24}}PRIVATE KEY(?: BLOCK)?-----"


class _Sign(NamedTuple):
    """How a kind of secret shows.

    Attributes:
        kind: what it is called in the text that replaces it.
        clues: lower-case texts of which one stands in every match.
        pattern: what is replaced is its group "secret".
    """

    kind: str
    clues: tuple[str, ...]
    pattern: re.Pattern[str]


def _token(kind: str, clue: str, pattern: str) -> _Sign:
    return _Sign(kind, (clue.lower(),), re.compile(rf"\b(?P<secret>{pattern})"))


def _value(kind: str, clues: tuple[str, ...], *pattern: str) -> _Sign:
    return _Sign(kind, clues, re.compile("".join(pattern), re.IGNORECASE))


_SIGNS: tuple[_Sign, ...] = (
    _Sign(
        "private-key",
        ("private key",),
        re.compile(
            rf"(?P<secret>{_KEY.format('BEGIN')}"
            rf"(?:(?:(?!-----BEGIN)[\s\S]){{0,15000}}?{_KEY.format('END')}"
            r"|[\sA-Za-z0-9+/=\\:,.|→-]{0,15000}))"  # its end is cut off
        ),
    ),
    _token("jwt", "eyJ", r"eyJ[\w-]{8,4096}\.[\w-]{8,8192}\.[\w-]{0,2048}"),
    _token("api-key", "sk-", r"sk-(?=[\w-]{0,64}\d)[\w-]{16,512}"),
    _token("api-key", "k_live_", r"[sr]k_live_\w{16,256}"),
    _token("api-key", "k_test_", r"[sr]k_test_\w{16,256}"),
    _token("api-key", "AIza", r"AIza[\w-]{35}"),
    _token("github-token", "gh", r"gh[pousr]_\w{20,255}"),
    _token("github-token", "github_pat_", r"github_pat_\w{20,255}"),
    _token("gitlab-token", "glpat-", r"glpat-[\w-]{16,255}"),
    _token("huggingface-token", "hf_", r"hf_[A-Za-z0-9]{20,255}"),
    _token("npm-token", "npm_", r"npm_[A-Za-z0-9]{30,255}"),
    _token("pypi-token", "pypi-", r"pypi-[\w-]{32,1024}"),
    _token("slack-token", "xox", r"xox[a-z]-[\w-]{10,512}"),
    _token("slack-token", "xapp-", r"xapp-[\w-]{10,512}"),
    _token("aws-key", "AKIA", r"AKIA[A-Z0-9]{16}\b"),
    _token("aws-key", "ASIA", r"ASIA[A-Z0-9]{16}\b"),
    _value(
        "authorization",
        ("authorization",),
        rf"authorization{_TO}(?:{_QUOTE})?(?:(?:bearer|basic|token|digest|apikey)\s{{1,8}})?",
        rf"(?P<secret>{_BARE}{{8,4096}})",
    ),
    _value(
        "authorization",
        ("bearer",),
        rf"\bbearer\s{{1,8}}(?P<secret>{_NO_REFERENCE}{_RANDOM}{{8,4096}})",
    ),
    _value(
        "authorization",
        ("key", "token"),
        rf"(?:api-?key|(?:auth|private|access)-token)(?:{_QUOTE})?\s{{0,8}}:\s{{0,8}}(?:{_QUOTE})?",
        rf"(?P<secret>{_BARE}{{8,4096}})",
    ),
    _Sign(  # KEY=… of an environment
        "assignment",
        ("key", "token", "pass", "secret", "credential"),
        re.compile(
            r"(?:(?<![A-Za-z])(?:KEY|TOKEN)|APIKEY|PASSWORD|PASSWD|PASSPHRASE|SECRET|CREDENTIALS?)"
            rf"(?:[_0-9][A-Z0-9_]{{0,24}})?=(?P<quote>{_QUOTE})?"
            rf"(?P<secret>(?(quote){_QUOTED}|{_BARE}){{{_SHORTEST_VALUE_CHARS},4096}})"
        ),
    ),
    _value(  # "password": "…" of a program or a document
        "assignment",
        ("key", "token", "pass", "secret"),
        rf"{_TELLING_NAME}\w{{0,16}}{_TO}{_QUOTE}(?P<secret>{_QUOTED}{{6,4096}})",
    ),
    _value(
        "assignment",
        ("token",),
        rf"token{_TO}{_QUOTE}(?P<secret>{_NO_REFERENCE}{_RANDOM}{{16,4096}})",
    ),
    _value(  # password = … alone on a line of a settings file
        "assignment",
        ("key", "token", "pass", "secret"),
        rf"(?m:^)[ \t]{{0,32}}[\w.-]{{0,40}}{_TELLING_NAME}[ \t]{{0,8}}[:=][ \t]{{0,8}}",
        rf"(?P<secret>{_NO_REFERENCE}(?=[^\n]{{0,64}}\d)[^\s\"'\\()\[\]{{}}]{{6,4096}})",
        r"[ \t\r]{0,8}(?m:$)",
    ),
    _value(  # --password … of a command line
        "assignment",
        ("--",),
        r"(?<![\w-])--[a-z-]{0,24}(?:password|token|secret|api-?key)[= ]",
        rf"(?P<secret>{_NO_REFERENCE}(?!-)[^\s\"'\\]{{6,4096}})",
    ),
    _value(  # ?access_token=… of a URL
        "assignment",
        ("key=", "token=", "password=", "secret=", "signature="),
        r"[?&][\w-]{0,24}(?:password|token|secret|api_?key|signature)=",
        rf"(?P<secret>{_NO_REFERENCE}[^\s\"'\\&]{{6,4096}})",
    ),
    _Sign(
        "userinfo",
        ("://",),
        re.compile(
            rf"(?<=://)(?P<secret>[^\s/@:\"'<>\\]{{0,256}}:{_NO_REFERENCE}"
            r"[^\s/\"'<>\\]{1,256})@(?=[\w.\[-])"
        ),
    ),
)
_SECRET_KEY = re.compile(rf".{{0,64}}{_TELLING_NAME}\w{{0,16}}", re.IGNORECASE)
_TOKEN_KEY = re.compile(r".{0,64}token", re.IGNORECASE)
_TOKEN_VALUE = re.compile(rf"{_RANDOM}{{16,4096}}", re.IGNORECASE)
_MARKER = re.compile(r"\[redacted:[a-z-]{1,32}\]")


class _Found(NamedTuple):
    begin: int
    end: int
    kind: str


def redact(text: str) -> str:
    """`text` with each likely secret replaced by `[redacted:<kind>]`.

    The same text always gives the same result; text without likely secrets is returned as it is.
    """
    found = sorted(_find(text))
    if not found:
        return text
    pieces: list[str] = []
    kept_to = 0
    for secret in _merged(found):
        pieces += [text[kept_to : secret.begin], f"[redacted:{secret.kind}]"]
        kept_to = secret.end
    return "".join([*pieces, text[kept_to:]])


def redact_json(value: Any) -> Any:
    """A copy of a JSON value whose texts, keys too, are redacted; also by the key they are under.

    Raises:
        RecursionError: it is nested too deeply.
    """
    if isinstance(value, str):
        return redact(value)
    if _is_list(value):
        return [redact_json(each) for each in value]
    if _is_mapping(value):
        return {redact(key): _redact_member(key, each) for key, each in value.items()}
    return value


def redact_json_text(text: str) -> str:
    """JSON text, redacted as a value; other text, and JSON without secrets, as text.

    A call's arguments must stay JSON, and secrets in them are easier to see unescaped.
    """
    try:
        value = json.loads(text)
        redacted = redact_json(value)
    except (ValueError, RecursionError):
        return redact(text)
    if redacted == value:
        return redact(text)  # a key that stands twice in an object hides its first value
    return json.dumps(redacted, ensure_ascii=False, separators=(",", ":"))


def _redact_member(key: str, value: Any) -> Any:
    if not isinstance(value, str):
        return redact_json(value)
    redacted = redact(value)
    if redacted != value or len(value) < 6 or value[0] in "$<{" or _MARKER.search(value):
        return redacted
    is_secret = _SECRET_KEY.fullmatch(key) is not None or (
        _TOKEN_KEY.fullmatch(key) is not None and _TOKEN_VALUE.fullmatch(value) is not None
    )
    return "[redacted:assignment]" if is_secret else value


def _find(text: str) -> Iterator[_Found]:
    for begin in range(0, len(text), _WINDOW_CHARS):
        reach = min(begin + _WINDOW_CHARS + _LONGEST_CHARS, len(text))
        window = text[begin:reach].lower()
        for kind, clues, pattern in _SIGNS:
            if not any(clue in window for clue in clues):
                continue
            for match in pattern.finditer(text, begin, reach):
                if match.start() < begin + _WINDOW_CHARS:
                    yield _Found(*match.span("secret"), kind)


def _merged(found: list[_Found]) -> Iterator[_Found]:
    """Spans that overlap become one, of the first one's kind."""
    current = found[0]
    for each in found[1:]:
        if each.begin < current.end:
            current = current._replace(end=max(current.end, each.end))
        else:
            yield current
            current = each
    yield current


def _is_list(value: object) -> TypeGuard[list[Any]]:
    return isinstance(value, list)


def _is_mapping(value: object) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(value, dict)
