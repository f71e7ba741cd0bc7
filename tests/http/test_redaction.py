"""Likely secrets are replaced; everything else stays as it is."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvws.http.redaction import redact, redact_json, redact_json_text

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
ALPHABET = LETTERS + "0123456789"


def random_text(length: int, alphabet: str = ALPHABET) -> st.SearchStrategy[str]:
    return st.text(alphabet, min_size=length, max_size=length)


def after(prefix: str, length: int, alphabet: str = ALPHABET) -> st.SearchStrategy[str]:
    # A token without a single digit is unheard of, and looks like a name.
    return random_text(length - 1, alphabet).map(lambda rest: f"{prefix}7{rest}")


WEB_TOKEN = st.tuples(random_text(20), random_text(40), random_text(43)).map(
    lambda parts: "eyJ" + ".".join(parts)
)
TOKENS = {
    "api-key": st.one_of(
        after("sk-", 40), after("sk-ant-api03-", 60), after("sk_" + "live_", 24), after("AIza", 35)
    ),
    "github-token": st.one_of(after("ghp" + "_", 36), after("github_pat" + "_", 60)),
    "gitlab-token": after("glpat" + "-", 20),
    "huggingface-token": after("hf" + "_", 34),
    "npm-token": after("npm" + "_", 36),
    "pypi-token": after("pypi" + "-", 80),
    "slack-token": after("xoxb" + "-", 40),
    "aws-key": after("AKIA", 16, "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"),
    "jwt": WEB_TOKEN,
}
VALUES = after("", 24)
PLACES = {
    "authorization": [
        "Authorization: Bearer {}",
        "curl -H 'authorization: Basic {}' https://example.org",
        'headers={{"Authorization": "Bearer {}"}}',
        '-H "x-api-key: {}"',
        "PRIVATE-TOKEN: {}",
        "sent as bearer {} each time",
    ],
    "assignment": [
        "KEY={}",
        "export OPENAI_API_KEY={}",
        'AWS_SECRET_ACCESS_KEY="{}"',
        "DB_PASSWORD='{}' ./run",
        "SECRET_KEY_BASE={}",
        "GITHUB_TOKEN={} gh pr list",
        'password = "{}"',
        '{{"client_secret": "{}", "n": 1}}',
        "  db.password: {}",
        'self.token = "{}"',
        "mysql --password={} -u root",
        "tool --api-key {} run",
        "https://example.org/a?access_token={}&b=1",
    ],
    "userinfo": ["git clone https://me:{}@example.org/a.git", "postgres://u:{}@db:5432/x"],
}
HARMLESS = [
    "the key to this is a token of appreciation",
    "max_tokens=32000, MAX_TOKENS=32000, key=lambda row: row[0]",
    "token = tokenizer.next_token()\npassword: str\nsecret: bytes | None = None",
    "export TOKEN=$OTHER_TOKEN; curl -H 'Authorization: Bearer $TOKEN'",
    "API_KEY=${API_KEY} PASSWORD=<password>",
    "git@github.com:a/b.git ssh://git@example.org/a https://example.org:8080/a@b",
    "Bearer certificates and sk-learn are harmless; so is task-0123456789abcdef0123",
    "def f(password): return hash(password)",
    "sha256: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    '{"type": "object", "properties": {"password": {"type": "string"}}}',
]


@pytest.mark.parametrize("kind", TOKENS)
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_token_is_found_wherever_it_stands(kind: str, data: st.DataObject) -> None:
    secret = data.draw(TOKENS[kind])
    for before, behind in ((" ", " "), ('"', '"'), ("=", "\n"), ("(", ")"), ("\n", ","), ("", "")):
        assert redact(before + secret + behind) == f"{before}[redacted:{kind}]{behind}"


@pytest.mark.parametrize(
    ("kind", "place"), [(kind, place) for kind, places in PLACES.items() for place in places]
)
@settings(max_examples=40, deadline=None)
@given(VALUES)
def test_a_value_is_found_by_where_it_stands(kind: str, place: str, secret: str) -> None:
    kept, marker, behind = redact(place.format(secret)).partition(f"[redacted:{kind}]")
    assert marker
    before, after_it = place.format("\0").split("\0")
    assert behind == after_it
    assert kept == (before.rpartition("//")[0] + "//" if kind == "userinfo" else before)


def private_key(lines: list[str]) -> str:
    dashes = "-" * 5
    begin, end = (f"{dashes}{word} RSA PRIVATE KEY{dashes}" for word in ("BEGIN", "END"))
    return "\n".join([begin, *lines, end])


KEY_LINES = ["MIIE" + "aB3/" * 15, "cD4+" * 16, "eF5=="]


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\\n", "\n    12\u2192"])
def test_a_private_key_vanishes_whole(newline: str) -> None:
    key = private_key(KEY_LINES).replace("\n", newline)
    assert redact(f"before {key} behind") == "before [redacted:private-key] behind"


def test_a_private_key_that_is_cut_off_vanishes_as_far_as_it_goes() -> None:
    key = "\n".join(private_key(KEY_LINES).split("\n")[:-1])
    assert redact(f"before {key}") == "before [redacted:private-key]"


@pytest.mark.parametrize("text", HARMLESS)
def test_text_without_secrets_stays_as_it_is(text: str) -> None:
    assert redact(text) == text
    assert redact_json({"a": [text, 1, None]}) == {"a": [text, 1, None]}


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(blacklist_characters="=:-_"), max_size=200))
def test_text_without_any_sign_stays_as_it_is(text: str) -> None:
    words = ("bearer", "private key")
    if not any(word in text.lower() for word in words):
        assert redact(text) == text


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.one_of(st.sampled_from([p for places in PLACES.values() for p in places]), st.text()),
        max_size=5,
    ),
    VALUES,
)
def test_redacting_twice_is_redacting_once(places: list[str], secret: str) -> None:
    text = "\n".join(place.replace("{}", secret) for place in places)
    assert redact(redact(text)) == redact(text)


@pytest.mark.parametrize("position", [0, 1 << 15, (1 << 15) - 20, 1 << 16, 99_990])
def test_a_long_text_is_searched_to_its_end(position: int) -> None:
    secret = "ghp" + "_" + "a1" * 18
    text = "." * position + " " + secret + " " + "." * (100_000 - position)
    assert redact(text) == text.replace(secret, "[redacted:github-token]")


def worst_cases() -> Iterator[str]:
    yield "a" * 1_000_000
    yield "://" + "a:" * 500_000
    yield "--" * 500_000
    yield private_key([])[:31] * 30_000
    yield "eyJ" * 300_000
    yield "password " * 100_000
    yield "api_key=" * 100_000


def test_time_grows_with_the_text_and_not_with_its_square() -> None:
    for text in worst_cases():
        begin = time.perf_counter()
        redact(text)
        assert time.perf_counter() - begin < 20, text[:40]


def test_in_json_a_key_can_tell_that_its_value_is_secret() -> None:
    value = {
        "password": "correct horse battery",
        "api_key": "abcdefgh",
        "session_token": "a1" * 10,
        "token": "word",
        "token_count": 5,
        "path": "a.py",
    }
    assert redact_json(value) == {
        "password": "[redacted:assignment]",
        "api_key": "[redacted:assignment]",
        "session_token": "[redacted:assignment]",
        "token": "word",
        "token_count": 5,
        "path": "a.py",
    }


def test_arguments_stay_json() -> None:
    secret = "hunter2hunter2"
    arguments = json.dumps(
        {"command": f'export API_KEY="{secret}"\ncurl "https://u:{secret}@example.org"', "n": 1}
    )
    redacted = json.loads(redact_json_text(arguments))
    assert secret not in str(redacted)
    assert redacted["n"] == 1
    assert redacted["command"].startswith('export API_KEY="[redacted:assignment]"\ncurl')


def test_arguments_without_secrets_keep_their_spelling() -> None:
    for text in ('{ "b":1,\n"a": "\\u00e4" }', "not { json", "", "[1e3, NaN]"):
        assert redact_json_text(text) == text


def test_a_value_hidden_by_a_repeated_key_is_redacted_too() -> None:
    assert "hunter22" not in redact_json_text('{"password": "hunter22", "password": "x"}')
