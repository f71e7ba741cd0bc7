"""The application as clients see it: routes, answers, and errors in their own dialect."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

import orjson
import pytest
from fastapi.routing import APIRoute

from kvws.chat.answer import Finished, Text
from kvws.chat.call import ModelCall
from kvws.errors import EngineDied, KvwsError, Overloaded, PromptTooLong
from kvws.http.anthropic import ANTHROPIC
from kvws.http.app import make_app
from kvws.http.calls import FinishedCall
from kvws.http.guard import OPEN_PATHS
from kvws.http.options import FrontOptions
from kvws.http.recollection import Recollection
from kvws.http.replies import Dialects
from kvws.http.security import salt_of
from kvws.session.identity import identify
from tests.http.asking import CALLS, DIALECTS, KEY, app_of, ask, client_of, sse_events
from tests.http.fake_service import ANSWER, USAGE, FakeService, failing_after, saying

LOCKED = FrontOptions(keys=(KEY,))


def locked_routes() -> list[tuple[str, str]]:
    """(method, path) of every route, its parameters filled in."""
    routes = [route for route in app_of(FakeService()).routes if isinstance(route, APIRoute)]
    found = [
        (method, route.path.replace(":path", "").replace("{", "").replace("}", ""))
        for route in routes
        for method in route.methods
        if route.path not in OPEN_PATHS
    ]
    assert len(routes) == len(app_of(FakeService()).routes) and len(found) >= 9
    return found


def error_text(path: str, body: dict[str, Any]) -> str:
    """The message of an error, once it is known to have the shape of the path's dialect."""
    if path.startswith("/v1/messages"):
        assert body["type"] == "error" and set(body["error"]) >= {"type", "message"}
    else:
        assert "type" not in body and set(body["error"]) >= {"type", "message", "code"}
    return body["error"]["message"]


@pytest.mark.parametrize(("method", "path"), locked_routes())
def test_every_route_but_the_open_ones_is_locked(method: str, path: str) -> None:
    app = app_of(FakeService(), LOCKED)
    basic = {"authorization": f"Basic {KEY}"}
    for headers in ({}, {"authorization": "Bearer wrong"}, basic, {**basic, "x_api_key": "no"}):
        reply = ask(app, method, path, CALLS.get(path), **headers)
        assert reply.status_code == 401
        assert reply.headers["www-authenticate"] == "Bearer"
        error_text(path, reply.json())


@pytest.mark.parametrize("headers", [{"x_api_key": KEY}, {"authorization": f"Bearer {KEY}"}])
@pytest.mark.parametrize(("method", "path"), locked_routes())
def test_every_route_opens_with_the_key(method: str, path: str, headers: dict[str, str]) -> None:
    reply = ask(app_of(FakeService(), LOCKED), method, path, CALLS.get(path), **headers)
    assert reply.status_code in ({404} if "session_id" in path else {200, 400})


@pytest.mark.parametrize("path", sorted(OPEN_PATHS))
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_health_answers_without_a_key(method: str, path: str) -> None:
    assert ask(app_of(FakeService(), LOCKED), method, path).status_code == 200


def test_health_says_ready() -> None:
    assert ask(app_of(FakeService(), LOCKED), "GET", "/healthz").json() == {"status": "ready"}


@pytest.mark.parametrize(
    "path", ["/nothing", "/v1/messages/other", "/v1/responses/x", "/v1/messages/", "/docs"]
)
def test_an_unknown_path_is_told_in_the_dialect_of_its_prefix(path: str) -> None:
    reply = ask(app_of(FakeService(), LOCKED), "GET", path, x_api_key=KEY)
    assert reply.status_code == 404
    error_text(path, reply.json())
    assert ask(app_of(FakeService(), LOCKED), "GET", path).status_code == 401


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "OPTIONS", "PATCH"])
@pytest.mark.parametrize("path", list(CALLS))
def test_only_post_calls_the_model(method: str, path: str) -> None:
    reply = ask(app_of(FakeService()), method, path)
    assert reply.status_code == 405
    assert reply.headers["allow"] == "POST"
    error_text(path, reply.json())


def test_no_reply_invites_web_pages_or_names_the_server() -> None:
    for method, path in (("OPTIONS", "/v1/messages"), ("GET", "/v1/models")):
        reply = ask(app_of(FakeService()), method, path, origin="http://localhost:3000")
        assert not [name for name in reply.headers if name.startswith("access-control")]
        assert "server" not in reply.headers


@pytest.mark.parametrize("path", list(CALLS))
def test_an_answer_in_one_piece(path: str) -> None:
    service = FakeService()
    reply = ask(app_of(service), "POST", path, CALLS[path])
    assert reply.status_code == 200 and reply.headers["content-type"] == "application/json"
    assert "Hello there" in reply.text and "call_1" in reply.text
    assert (service.opened, service.closed, service.broken_off) == (1, 1, 0)


@pytest.mark.parametrize("path", list(CALLS))
def test_a_streamed_answer(path: str) -> None:
    service = FakeService()
    reply = ask(app_of(service), "POST", path, {**CALLS[path], "stream": True})
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["cache-control"] == "no-store"
    assert reply.headers["x-accel-buffering"] == "no"
    names = [name for name, _ in sse_events(reply.text)]
    data = [data for _, data in sse_events(reply.text)]
    match path:
        case "/v1/messages":
            assert names[0] == "message_start" and names[-1] == "message_stop"
        case "/v1/responses":
            assert names[0] == "response.created" and names[-1] == "response.completed"
        case _:
            assert set(names) == {None} and data[-1] == "[DONE]"
    assert (service.opened, service.closed, service.broken_off) == (1, 1, 0)


def test_the_query_string_is_ignored() -> None:
    reply = ask(app_of(FakeService()), "POST", "/v1/messages?beta=true", CALLS["/v1/messages"])
    assert reply.status_code == 200


def test_the_content_type_is_ignored() -> None:
    body = CALLS["/v1/messages"]
    reply = ask(app_of(FakeService()), "POST", "/v1/messages", body, content_type="text/plain")
    assert reply.status_code == 200


def test_tokens_are_counted_without_making_an_answer() -> None:
    service = FakeService()
    body = {"messages": [{"role": "user", "content": "one two three"}]}
    reply = ask(app_of(service), "POST", "/v1/messages/count_tokens?beta=true", body)
    assert reply.json() == {"input_tokens": 3}
    assert service.opened == 0


def test_the_service_learns_who_calls_and_under_which_key() -> None:
    service = FakeService()
    app = app_of(service, FrontOptions(keys=("first", "second")))
    ask(app, "POST", "/v1/messages", CALLS["/v1/messages"], x_api_key="second", x_session_id="s1")
    ((call, caller, salt),) = service.admitted
    assert isinstance(call, ModelCall) and caller.session == "s1"
    assert salt == salt_of("second") != salt_of("first")


def test_a_title_call_is_an_aside() -> None:
    service = FakeService()
    body = CALLS["/v1/chat/completions"]
    ask(app_of(service), "POST", "/v1/chat/completions", body, x_session_affinity="s")
    ask(app_of(service), "POST", "/v1/chat/completions", body)
    assert [call.side_call for call, _, _ in service.admitted] == [True, False]


@pytest.mark.parametrize(
    ("headers", "is_anthropic"),
    [
        ({"anthropic_version": "2023-06-01", "authorization": "Bearer k"}, True),
        ({"x_api_key": "k"}, True),
        ({"x_api_key": "k", "authorization": "Bearer k"}, False),
        ({"authorization": "Bearer k"}, False),
        ({}, False),
    ],
)
def test_models_are_listed_as_the_client_expects(
    headers: dict[str, str], is_anthropic: bool
) -> None:
    app = app_of(FakeService())
    listed = ask(app, "GET", "/v1/models?limit=1000", **headers).json()
    single = ask(app, "GET", "/v1/models/fake/model", **headers).json()
    assert ("has_more" in listed) is is_anthropic
    assert single["id"] == "fake/model" and (single.get("type") == "model") is is_anthropic


def test_state_and_sessions_can_be_looked_at() -> None:
    app = app_of(FakeService(), LOCKED)
    assert ask(app, "GET", "/v1/kvws/state", x_api_key=KEY).json() == FakeService().state
    known = ask(app, "GET", "/v1/kvws/sessions/known", x_api_key=KEY).json()
    assert known == {"session": "known", "salt": salt_of(KEY)}
    assert ask(app, "GET", "/v1/kvws/sessions/unknown", x_api_key=KEY).status_code == 404
    for name in ("a%20b", "%2e%2e%2fetc", "x" * 129):
        reply = ask(app, "GET", f"/v1/kvws/sessions/{name}", x_api_key=KEY)
        assert reply.status_code in (400, 404), name


@pytest.mark.parametrize("path", list(CALLS))
@pytest.mark.parametrize("stream", [False, True])
def test_an_error_before_the_answer_is_a_plain_reply(path: str, stream: bool) -> None:
    service = FakeService()
    service.admitting = PromptTooLong(5000, 4096)
    reply = ask(app_of(service), "POST", path, {**CALLS[path], "stream": stream})
    assert reply.status_code == 400 and reply.headers["content-type"] == "application/json"
    message = error_text(path, reply.json())
    assert "prompt is too long: 5000 tokens > 4096 maximum" in message


@pytest.mark.parametrize("path", list(CALLS))
def test_a_busy_server_says_when_to_try_again(path: str) -> None:
    service = FakeService()
    service.admitting = Overloaded("busy", retry_after_s=7)
    reply = ask(app_of(service), "POST", path, CALLS[path])
    assert reply.status_code == 503 and reply.headers["retry-after"] == "7"


@pytest.mark.parametrize("path", list(CALLS))
@pytest.mark.parametrize("moment", ["admit", "answer"])
def test_a_fault_is_told_by_an_id_that_is_in_the_log(
    path: str, moment: str, caplog: pytest.LogCaptureFixture
) -> None:
    service = FakeService()
    fault = ValueError("secret-of-the-body")
    if moment == "admit":
        service.admitting = fault
    else:
        service.answering = lambda call: failing_after(fault)
    with caplog.at_level(logging.DEBUG):
        reply = ask(app_of(service), "POST", path, CALLS[path])
    assert reply.status_code == 500
    message = error_text(path, reply.json())
    (request_id,) = [word for word in message.split() if word.startswith("req_")]
    assert reply.headers["request-id"] == reply.headers["x-request-id"] == request_id
    assert f"{request_id} ValueError at " in caplog.text
    assert "Traceback" not in reply.text
    assert "secret-of-the-body" not in caplog.text + reply.text


@pytest.mark.parametrize("path", list(CALLS))
@pytest.mark.parametrize(
    "error", [EngineDied("the engine is gone"), ValueError("secret-of-the-body")]
)
def test_an_error_inside_a_stream_is_told_in_the_stream(path: str, error: Exception) -> None:
    service = FakeService()
    service.answering = lambda call: failing_after(error, Text("Hel"))
    reply = ask(app_of(service), "POST", path, {**CALLS[path], "stream": True})
    assert reply.status_code == 200 and "Hel" in reply.text
    events = sse_events(reply.text)
    match path:
        case "/v1/messages":
            assert events[-1][0] == "error"
        case "/v1/responses":
            assert events[-1][0] == "response.failed"
        case _:
            assert "error" in events[-2][1] and events[-1][1] == "[DONE]"
    assert ("the engine is gone" in reply.text) is isinstance(error, KvwsError)
    assert "secret-of-the-body" not in reply.text
    assert (service.opened, service.closed) == (1, 1)


@pytest.mark.parametrize("path", list(CALLS))
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_breaks_off_is_an_error(path: str, stream: bool) -> None:
    service = FakeService()
    service.answering = lambda call: saying(Text("Hel"))
    reply = ask(app_of(service), "POST", path, {**CALLS[path], "stream": stream})
    assert reply.status_code == (200 if stream else 503)
    assert "ended before it was complete" in reply.text


@pytest.mark.parametrize("path", list(CALLS))
@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b'{"messages": [1,}', "line 1, column 17"),
        (b"", "no JSON"),
        (b"\xff\xfe", "no JSON"),
        (b"[" * 2000 + b"]" * 2000, "no JSON"),
        (b"[]", ""),
        (b"null", ""),
    ],
)
def test_a_body_that_is_no_call_is_refused(path: str, body: bytes, told: str) -> None:
    reply = ask(app_of(FakeService()), "POST", path, body)
    assert reply.status_code == 400
    assert told in error_text(path, reply.json())


@pytest.mark.parametrize("path", list(CALLS))
def test_a_body_nested_as_deeply_as_json_allows_is_no_fault(path: str) -> None:
    deep = b'{"a":' * 1000 + b"1" + b"}" * 1000
    tool = {"name": "t", "type": "function", "input_schema": "DEEP", "parameters": "DEEP"}
    tools = [{**tool, "function": tool}]
    body = orjson.dumps({**CALLS[path], "tools": tools}).replace(b'"DEEP"', deep)
    assert ask(app_of(FakeService()), "POST", path, body).status_code in (200, 400)


def test_compressed_bodies_are_refused() -> None:
    reply = ask(app_of(FakeService()), "POST", "/v1/messages", b"x", content_encoding="gzip")
    assert reply.status_code == 415 and reply.headers["accept-encoding"] == "identity"


@pytest.mark.parametrize(("padding", "beside_the_loop"), [(10, False), (300_000, True)])
def test_large_bodies_are_read_beside_the_event_loop(padding: int, beside_the_loop: bool) -> None:
    readers: list[int] = []

    class Watched:
        name = "anthropic"
        writer = staticmethod(ANTHROPIC.writer)
        error = staticmethod(ANTHROPIC.error)

        def read(self, body: object, recollection: Recollection | None = None) -> ModelCall:
            readers.append(threading.get_ident())
            return ANTHROPIC.read(body, recollection)

    dialects = Dialects(Watched(), DIALECTS.chat_completions, DIALECTS.responses)
    app = make_app(FakeService(), dialects, identify, FrontOptions())
    body = {"messages": [{"role": "user", "content": "x" * padding}]}
    assert ask(app, "POST", "/v1/messages", body).status_code == 200
    assert (readers != [threading.get_ident()]) is beside_the_loop


@pytest.mark.parametrize("stream", [False, True])
def test_a_listener_hears_of_finished_calls_only(stream: bool) -> None:
    heard: list[FinishedCall] = []

    async def listen(finished: FinishedCall) -> None:
        heard.append(finished)

    service = FakeService()
    app = app_of(service, listener=listen)
    body = {**CALLS["/v1/messages"], "stream": stream}
    ask(app, "POST", "/v1/messages", body, x_session_id="s1")
    service.answering = lambda call: failing_after(EngineDied("gone"), Text("Hel"))
    ask(app, "POST", "/v1/messages", body, x_session_id="s1")
    (finished,) = heard
    assert tuple(finished.events) == ANSWER and finished.caller.session == "s1"
    assert finished.dialect == "anthropic" and finished.salt == salt_of("")


def test_a_listener_that_fails_does_not_touch_the_answer() -> None:
    async def listen(finished: FinishedCall) -> None:
        raise OSError("disk full")

    app = app_of(FakeService(), listener=listen)
    assert ask(app, "POST", "/v1/messages", CALLS["/v1/messages"]).status_code == 200


def test_metrics_count_what_happened() -> None:
    service = FakeService()
    app = app_of(service)
    ask(app, "POST", "/v1/messages", CALLS["/v1/messages"])
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    strange = [image, {"type": "from_the_future"}, {"type": "from_the_future"}]
    ask(app, "POST", "/v1/messages", {"messages": [{"role": "user", "content": strange}]})
    ask(app, "GET", "/nothing")
    text = ask(app, "GET", "/metrics").text
    asked = '{dialect="anthropic",route="/v1/messages",status="200"}'
    assert f"kvws_requests_total{asked} 2.0" in text
    assert 'kvws_requests_total{dialect="none",route="none",status="404"} 1.0' in text
    assert 'kvws_first_event_seconds_count{dialect="anthropic"} 2.0' in text
    for name in ("prompt", "reused", "stored", "answer"):
        assert f"kvws_{name}_tokens_total {2.0 * getattr(USAGE, f'{name}_tokens')}" in text
    assert 'kvws_state{key="tiers.host.used_bytes"} 5.0' in text
    assert "kvws_answering 0.0" in text and "kvws_waiting 0.0" in text
    dropped = [line for line in text.splitlines() if line.startswith("kvws_dropped_parts_total{")]
    assert sum(float(line.split()[-1]) for line in dropped) >= 2


def test_metrics_of_two_apps_do_not_mix() -> None:
    first, second = app_of(FakeService()), app_of(FakeService())
    ask(first, "POST", "/v1/messages", CALLS["/v1/messages"])
    assert "kvws_answer_tokens_total 0.0" in ask(second, "GET", "/metrics").text


def test_a_session_that_asks_too_much_at_once_is_told_so() -> None:
    service = FakeService()
    service.admit_s = 0.05
    app = app_of(service, FrontOptions(per_session_max=2))

    async def run() -> None:
        async with client_of(app) as client:

            async def post(session: str) -> int:
                headers = {"x-session-id": session}
                body = CALLS["/v1/messages"]
                reply = await client.post("/v1/messages", json=body, headers=headers)
                assert (reply.status_code == 429) == ("retry-after" in reply.headers)
                return reply.status_code

            for _ in range(2):  # the second time shows that the places came back
                statuses = await asyncio.gather(*map(post, ["a", "a", "a", "b"]))
                assert sorted(statuses) == [200, 200, 200, 429] and statuses[3] == 200

    asyncio.run(run())


def test_requests_wait_for_a_slot_and_are_refused_when_too_many_wait() -> None:
    service = FakeService()
    service.admit_s = 0.05
    app = app_of(service, FrontOptions(answering_max=2, waiting_max=3))

    async def run() -> None:
        async with client_of(app) as client:

            async def post(number: int) -> int:
                headers = {"x-session-id": f"s{number}"}
                body = CALLS["/v1/messages"]
                reply = await client.post("/v1/messages", json=body, headers=headers)
                assert (reply.status_code == 503) == ("retry-after" in reply.headers)
                return reply.status_code

            for _ in range(2):
                statuses = await asyncio.gather(*map(post, range(7)))
                assert statuses == [200] * 5 + [503] * 2

    asyncio.run(run())


def test_slots_come_back_after_errors() -> None:
    service = FakeService()
    app = app_of(service, FrontOptions(answering_max=1, waiting_max=0))
    for trouble in (PromptTooLong(2, 1), ValueError("x"), None):
        service.admitting = trouble
        reply = ask(app, "POST", "/v1/messages", CALLS["/v1/messages"])
        ask(app, "POST", "/v1/messages", b"{")
    assert reply.status_code == 200


def test_the_generator_may_work_on_after_its_last_event() -> None:
    done: list[str] = []

    async def answer(call: ModelCall) -> Any:
        yield Text("Hello")
        yield Finished("stop", USAGE)
        await asyncio.sleep(0.02)
        done.append("stored")

    for stream in (False, True):
        service = FakeService()
        service.answering = answer
        reply = ask(
            app_of(service), "POST", "/v1/messages", {**CALLS["/v1/messages"], "stream": stream}
        )
        assert reply.status_code == 200 and service.broken_off == 0
    assert done == ["stored", "stored"]
