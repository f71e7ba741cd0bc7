"""Who gets in: host names, origins, keys, salts, and what the log keeps quiet about."""

from __future__ import annotations

import logging

import pytest

from kvws.errors import ConfigError, HostRefused, NotAuthorised
from kvws.http.app import make_app
from kvws.http.options import FrontOptions
from kvws.http.security import Gatekeeper, header_map, is_loopback, salt_of
from kvws.session.identity import identify
from tests.http.asking import CALLS, DIALECTS, KEY, app_of, ask
from tests.http.fake_service import FakeService


def gatekeeper(host: str = "127.0.0.1", allowed_hosts: tuple[str, ...] = ()) -> Gatekeeper:
    return Gatekeeper([KEY], host, allowed_hosts)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:8000", "localhost", "LocalHost:1", "[::1]", "[::1]:8000"]
)
def test_loopback_names_are_always_served(host: str) -> None:
    gatekeeper("10.0.0.5").check_host({"host": host})


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "evil.example#localhost",
        "localhost@evil.example",
        "127.0.0.1.evil.example",
        "127.0.0.2",
        "10.0.0.6",
        "[::2]",
        "[::1",
        "[",
        ":",
        ":8000",
        "localhost:80:80",
        "localhost:x",
        "",
    ],
)
def test_other_names_are_refused(host: str) -> None:
    with pytest.raises(HostRefused):
        gatekeeper("10.0.0.5").check_host({"host": host})


def test_no_name_at_all_is_refused() -> None:
    with pytest.raises(HostRefused):
        gatekeeper().check_host({})


def test_the_bound_and_the_configured_names_are_served() -> None:
    gate = gatekeeper("10.0.0.5", ("Box.local", "fd00::5"))
    for host in ("10.0.0.5:8000", "box.local", "BOX.LOCAL:80", "[fd00::5]:80"):
        gate.check_host({"host": host})


@pytest.mark.parametrize(
    "origin", ["http://localhost:3000", "http://127.0.0.1", "https://[::1]:8443"]
)
def test_pages_of_this_machine_may_call(origin: str) -> None:
    gatekeeper().check_host({"host": "localhost", "origin": origin})


@pytest.mark.parametrize(
    "origin",
    [
        "https://evil.example",
        "null",
        "",
        "http://localhost.evil.example",
        "http://localhost@evil.example",
        "file://",
        "http://[::1",
        "chrome-extension://abcdef",
    ],
)
def test_other_pages_may_not_call(origin: str) -> None:
    with pytest.raises(HostRefused):
        gatekeeper().check_host({"host": "localhost", "origin": origin})


@pytest.mark.parametrize("path", ["/", "/healthz", "/v1/messages", "/v1/responses", "/nothing"])
@pytest.mark.parametrize("headers", [{"host": "evil.example"}, {"origin": "https://evil.example"}])
def test_every_route_checks_host_and_origin_before_the_key(
    path: str, headers: dict[str, str]
) -> None:
    for key in ({}, {"x_api_key": KEY}):
        app = app_of(FakeService(), FrontOptions(keys=(KEY,)))
        reply = ask(app, "POST", path, CALLS.get(path), **headers, **key)
        assert reply.status_code == 403
        assert reply.json()["error"]["type"] == "permission_error"


@pytest.mark.parametrize(
    "headers",
    [
        {"x-api-key": "second"},
        {"authorization": "Bearer second"},
        {"authorization": "bearer  second"},
        {"authorization": "Bearer wrong", "x-api-key": "second"},
        {"authorization": "Bearer second", "x-api-key": "wrong"},
    ],
)
def test_any_configured_key_opens_in_either_header(headers: dict[str, str]) -> None:
    gate = Gatekeeper(["first", "second"], "127.0.0.1", ())
    assert gate.salt(headers) == salt_of("second")


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"x-api-key": ""},
        {"x-api-key": "firs"},
        {"x-api-key": "first "},
        {"x-api-key": "\xff"},
        {"authorization": "Bearer"},
        {"authorization": "first"},
        {"authorization": "Token first"},
    ],
)
def test_anything_else_does_not_open(headers: dict[str, str]) -> None:
    with pytest.raises(NotAuthorised):
        Gatekeeper(["first", "second"], "127.0.0.1", ()).salt(headers)


def test_a_key_of_any_alphabet_opens() -> None:
    sent = "schlüssel".encode().decode("latin-1")
    assert Gatekeeper(["schlüssel"], "127.0.0.1", ()).salt({"x-api-key": sent})


def test_an_empty_key_is_no_key() -> None:
    with pytest.raises(ConfigError):
        Gatekeeper([""], "0.0.0.0", ())


def test_without_keys_everybody_on_this_machine_is_the_same() -> None:
    gate = Gatekeeper([], "127.0.0.1", ())
    assert gate.salt({}) == gate.salt({"x-api-key": "dummy"}) == salt_of("")


def test_salts_differ_stay_and_do_not_show_the_key() -> None:
    salts = [salt_of(key) for key in ("", "a", "b", "a" * 1000)]
    assert len(set(salts)) == len(salts)
    assert salt_of("a") == "c9047fb1fca4bd35f3729e9c1dc54719"  # stores depend on it
    assert all(len(salt) == 32 for salt in salts)


def test_a_repeated_header_does_not_override_the_first() -> None:
    raw = [(b"X-Api-Key", b"one"), (b"x-api-key", b"two")]
    assert header_map(raw) == {"x-api-key": "one"}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "box.local", ""])
def test_a_server_that_others_can_reach_needs_a_key(host: str) -> None:
    with pytest.raises(ConfigError, match="KVWS_API_KEY"):
        make_app(FakeService(), DIALECTS, identify, FrontOptions(host=host))
    make_app(FakeService(), DIALECTS, identify, FrontOptions(host=host, keys=(KEY,)))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "localhost", "::1", "[::1]"])
def test_loopback_needs_none(host: str) -> None:
    assert is_loopback(host)
    make_app(FakeService(), DIALECTS, identify, FrontOptions(host=host))


def test_neither_keys_nor_bodies_are_logged_or_shown(caplog: pytest.LogCaptureFixture) -> None:
    options = FrontOptions(keys=(KEY,))
    app = app_of(FakeService(), options)
    body = {"messages": [{"role": "user", "content": "the-secret-text"}]}
    with caplog.at_level(logging.DEBUG):
        ask(app, "POST", "/v1/messages?key=the-secret-query", body, x_api_key=KEY)
        ask(app, "POST", "/v1/messages", body, x_api_key="the-wrong-key")
        ask(app, "POST", "/v1/messages", {"messages": "the-secret-text"}, x_api_key=KEY)
        ask(app, "POST", "/the-secret-path", body, x_api_key=KEY)
    ours = "\n".join(r.getMessage() for r in caplog.records if r.name.startswith("kvws"))
    assert ours.count("req_") == 4
    for secret in (KEY, "the-secret", "the-wrong"):
        assert secret not in ours
    assert KEY not in repr(options)
