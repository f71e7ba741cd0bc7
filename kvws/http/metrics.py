"""Figures of the endpoint, as Prometheus reads them.

They tell how much and how long, never who or what: no label is a session, a key or a text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvws.chat.answer import Usage
from kvws.http.admission import Admission

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_KINDS_MAX = 32
_KIND_MAX_CHARS = 48
_STATE_MAX = 1000
_TIMES = re.compile(r" \((?P<bracketed>\d{1,9}) times\)$|: (?P<plain>\d{1,9})$")
_PARTICULARS = re.compile(r"'[^']*'|\"[^\"]*\"|\S*\d\S*|\S+\.\S+")


class FrontMetrics:
    """Counters of one app, in a registry of its own."""

    def __init__(self, admission: Admission) -> None:
        self._registry = CollectorRegistry()
        self._kinds: set[str] = set()
        asked = ("route", "dialect")
        self._requests = self._counter("requests", "Requests that ended.", (*asked, "status"))
        self._durations = self._histogram("request_seconds", "From a request to its end.", asked)
        self._first_events = self._histogram(
            "first_event_seconds", "From a request to the answer's first event.", ("dialect",)
        )
        self._aborts = self._counter(
            "aborts", "Requests whose client left before the end.", ("dialect",)
        )
        self._prompt = self._counter("prompt_tokens", "Tokens of prompts.")
        self._reused = self._counter("reused_tokens", "Those of them that were not computed anew.")
        self._stored = self._counter("stored_tokens", "Those of them that can be reused now.")
        self._answers = self._counter("answer_tokens", "Generated tokens.")
        self._dropped = self._counter(
            "dropped_parts", "Parts of requests that the model cannot use.", ("kind",)
        )
        answering = Gauge("kvws_answering", "Requests in work.", registry=self._registry)
        answering.set_function(lambda: admission.answering)
        waiting = Gauge("kvws_waiting", "Requests that wait for a slot.", registry=self._registry)
        waiting.set_function(lambda: admission.waiting)
        self._state = Gauge(
            "kvws_state", "Every number of /v1/kvws/state.", ("key",), registry=self._registry
        )

    def request_ended(self, route: str, dialect: str, status: int, seconds: float) -> None:
        self._requests.labels(route, dialect, str(status)).inc()
        self._durations.labels(route, dialect).observe(seconds)

    def first_event(self, dialect: str, seconds: float) -> None:
        self._first_events.labels(dialect).observe(seconds)

    def aborted(self, dialect: str) -> None:
        self._aborts.labels(dialect).inc()

    def answered(self, usage: Usage) -> None:
        self._prompt.inc(usage.prompt_tokens)
        self._reused.inc(usage.reused_tokens)
        self._stored.inc(usage.stored_tokens)
        self._answers.inc(usage.answer_tokens)

    def dropped(self, phrases: Iterable[str]) -> None:
        """Count by kind; clients word the phrases, so only so many kinds are told apart."""
        for phrase in phrases:
            kind, times = _kind(phrase)
            if kind not in self._kinds and len(self._kinds) >= _KINDS_MAX:
                kind = "other"
            self._kinds.add(kind)
            self._dropped.labels(kind).inc(times)

    def text(self, state: Mapping[str, Any]) -> bytes:
        """All figures, those of `ModelService.inspect` among them."""
        self._state.clear()
        for count, (key, number) in enumerate(_numbers(state, "")):
            if count == _STATE_MAX:
                break
            self._state.labels(key).set(number)
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(f"kvws_{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, labels: tuple[str, ...]) -> Histogram:
        return Histogram(f"kvws_{name}", text, labels, buckets=_SECONDS, registry=self._registry)


def _kind(phrase: str) -> tuple[str, int]:
    """What a phrase is about, without the names and places in it, and how often it was so."""
    counted = _TIMES.search(phrase)
    words = _PARTICULARS.sub("", phrase[: counted.start()] if counted else phrase)
    kind = " ".join(words.replace(":", " ").split())[:_KIND_MAX_CHARS]
    return kind or "other", int(counted["bracketed"] or counted["plain"]) if counted else 1


def _numbers(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    """The numbers of a tree of mappings, by dotted path; lists name sessions and are left out."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _numbers(cast("Mapping[str, Any]", value), f"{key}.")
        elif isinstance(value, int | float):
            yield key, float(value)
