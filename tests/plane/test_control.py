"""The control socket: one answer for each request, whatever happens in between."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvws.engine import wire
from kvws.engine.control_client import RankClient, Ranks, lane_of
from kvws.engine.control_server import ControlServer
from kvws.errors import ControlError, EngineDied, HostTierFull


class Desk:
    """Answers what the tests ask for."""

    def __init__(self) -> None:
        self.asked_slowly = threading.Event()
        self.gate = threading.Event()

    def handle(self, operation: str, arguments: dict[str, Any]) -> Any:
        if operation == "echo":
            return arguments
        if operation == "full":
            raise HostTierFull("no room", hint="raise --host-gb")
        if operation == "integrity":
            raise AssertionError("a slot is held twice")
        if operation == "crash":
            raise KeyError("oops")
        if operation == "unsendable":
            return object()
        if operation == "slow":
            self.asked_slowly.set()
            assert self.gate.wait(10)
            return "slow"
        raise ControlError(f"unknown control operation {operation!r}")


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.fixture
def path(tmp_path: Path, desk: Desk) -> Iterator[Path]:
    path = tmp_path / "rank-0.sock"
    server = ControlServer(path, desk)
    server.start()
    yield path
    desk.gate.set()
    server.stop()


def ask(path: Path, operation: str, **arguments: Any) -> Any:
    async def go() -> Any:
        client = RankClient(path)
        try:
            return await client.call(operation, arguments)
        finally:
            await client.close()

    return asyncio.run(go())


def test_an_answer_comes_back(path: Path) -> None:
    sent = {"n": 1, "bytes": b"\x00\xff", "list": [1, [2, "x"]], "none": None}
    assert ask(path, "echo", **sent) == sent


def test_a_refusal_comes_back_as_a_control_error_with_its_hint(path: Path) -> None:
    with pytest.raises(ControlError, match="full: no room") as refused:
        ask(path, "full")
    assert refused.value.hint == "raise --host-gb"


def test_an_unknown_operation_is_refused(path: Path) -> None:
    with pytest.raises(ControlError, match="unknown control operation 'format_disk'"):
        ask(path, "format_disk")


def test_a_broken_invariant_comes_back_as_integrity(path: Path) -> None:
    with pytest.raises(ControlError, match="integrity: a slot is held twice"):
        ask(path, "integrity")


@pytest.mark.parametrize(("operation", "kind"), [("crash", "KeyError"), ("unsendable", "TypeErr")])
def test_our_own_fault_comes_back_and_the_connection_stays(
    path: Path, operation: str, kind: str
) -> None:
    async def go() -> None:
        client = RankClient(path)
        with pytest.raises(ControlError, match=kind):
            await client.call(operation, {})
        assert await client.call("echo", {"n": 2}) == {"n": 2}
        await client.close()

    asyncio.run(go())


def test_a_request_that_is_no_request_is_answered(path: Path) -> None:
    for message in ([1, 2], {"no": "operation"}, None, "text"):
        with socket.socket(socket.AF_UNIX) as peer:
            peer.settimeout(5)
            peer.connect(str(path))
            peer.sendall(wire.encode(message))
            reply = wire.receive(peer)
            if message is not None:
                assert reply is not None and "error" in reply


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("garbage", [b"\xff\xff\xff\xff", b"\x01\x00\x00\x00\xc1", b"\x09\x00"])
def test_garbage_ends_its_own_connection_only(path: Path, garbage: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(5)
        peer.connect(str(path))
        peer.sendall(garbage)
        peer.shutdown(socket.SHUT_WR)
        assert peer.recv(1) == b""
    assert ask(path, "echo", n=1) == {"n": 1}


def test_requests_at_once_get_their_own_answers(path: Path) -> None:
    async def go() -> list[Any]:
        client = RankClient(path)
        answers = await asyncio.gather(*(client.call("echo", {"n": n}) for n in range(50)))
        await client.close()
        return answers

    assert asyncio.run(go()) == [{"n": n} for n in range(50)]


def test_a_caller_that_gives_up_does_not_shift_the_answers(path: Path, desk: Desk) -> None:
    """Its answer comes all the same, and is not taken for the next request's."""

    async def go() -> Any:
        client = RankClient(path)
        impatient = asyncio.create_task(client.call("slow", {}))
        await asyncio.to_thread(desk.asked_slowly.wait, 5)
        impatient.cancel()
        with pytest.raises(asyncio.CancelledError):
            await impatient
        next_call = asyncio.create_task(client.call("echo", {"n": 1}))
        await asyncio.sleep(0.01)
        desk.gate.set()
        answer = await next_call
        await client.close()
        return answer

    assert asyncio.run(go()) == {"n": 1}


def test_a_peer_that_is_not_there_is_a_dead_engine(tmp_path: Path) -> None:
    with pytest.raises(EngineDied, match="gone") as died:
        ask(tmp_path / "nobody.sock", "echo")
    assert died.value.hint


@pytest.mark.parametrize("said", [b"", b"\x05", b"\x05\x00\x00\x00\x81"])
def test_a_peer_that_dies_in_mid_answer_is_a_dead_engine(tmp_path: Path, said: bytes) -> None:
    path = tmp_path / "dying.sock"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def die() -> None:
        peer, _ = listener.accept()
        with peer:
            peer.recv(1)
            peer.sendall(said)

    thread = threading.Thread(target=die)
    thread.start()
    with pytest.raises(EngineDied):
        ask(path, "echo")
    thread.join()
    listener.close()


def test_a_client_connects_again_after_its_peer_came_back(tmp_path: Path, desk: Desk) -> None:
    path = tmp_path / "rank-0.sock"

    async def go() -> None:
        client = RankClient(path)
        for _ in range(2):
            with pytest.raises(EngineDied):
                await client.call("echo", {})
        server = ControlServer(path, desk)
        server.start()
        assert await client.call("echo", {"n": 1}) == {"n": 1}
        await client.close()
        server.stop()

    asyncio.run(go())


def test_a_stopped_server_leaves_neither_file_nor_thread(tmp_path: Path, desk: Desk) -> None:
    path = tmp_path / "rank-0.sock"
    wait_until(lambda: accepting() == 0)  # servers of earlier tests may still be ending
    server = ControlServer(path, desk)
    server.start()
    assert path.exists() and accepting() == 1
    server.stop()
    assert not path.exists()
    wait_until(lambda: accepting() == 0)


def test_ranks_are_asked_together(tmp_path: Path) -> None:
    paths = [tmp_path / f"rank-{rank}.sock" for rank in range(2)]
    desks = [Desk(), Desk()]
    servers = [ControlServer(path, desk) for path, desk in zip(paths, desks, strict=True)]
    for server in servers:
        server.start()

    async def go() -> list[Any]:
        ranks = Ranks(paths)
        slow = asyncio.create_task(ranks.call("slow"))
        for desk in desks:
            assert await asyncio.to_thread(desk.asked_slowly.wait, 5)
        for desk in desks:
            desk.gate.set()
        answers = await slow
        await ranks.close()
        return answers

    assert asyncio.run(go()) == ["slow", "slow"]
    for server in servers:
        server.stop()


def lanes(path: Path, scenario: Callable[[Ranks], Coroutine[Any, Any, None]]) -> None:
    """Run a scenario of one rank."""

    async def go() -> None:
        ranks = Ranks([path])
        try:
            await scenario(ranks)
        finally:
            await ranks.close()

    asyncio.run(go())


class Slow:
    """A rank that holds what it is told to hold, and notes what it was asked in which order."""

    def __init__(self, *held: str) -> None:
        self.held = held
        self.gate = threading.Event()
        self.began: list[str] = []
        self.ended: list[str] = []
        self._asked = threading.Event()

    def handle(self, operation: str, arguments: dict[str, Any]) -> Any:
        self.began.append(operation)
        self._asked.set()
        if operation in self.held:
            assert self.gate.wait(10)
        self.ended.append(operation)

    async def has_begun(self) -> None:
        """Wait for the first request."""
        assert await asyncio.to_thread(self._asked.wait, 5)


@pytest.fixture
def slow(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Slow, Path]]:
    rank, path = Slow(*request.param), tmp_path / "slow.sock"
    server = ControlServer(path, rank)
    server.start()
    yield rank, path
    rank.gate.set()
    server.stop()


@pytest.mark.parametrize("slow", [("score", "score_runs", "attach")], indirect=True)
@pytest.mark.parametrize(
    ("operation", "arguments"),
    [
        ("score", {"workspace": "w", "rid": "a.probe"}),
        ("score_runs", {"workspace": "w", "rid": "a.probe"}),
        ("attach", {"workspace": "w", "directory": "/x"}),
    ],
)
def test_steps_go_on_while_a_rank_scores_or_opens_a_workspace(
    slow: tuple[Slow, Path], operation: str, arguments: dict[str, Any]
) -> None:
    rank, path = slow

    async def scenario(ranks: Ranks) -> None:
        long = asyncio.create_task(ranks.call(operation, **arguments))
        async with asyncio.timeout(5):
            for step in ("a", "b"):  # a is the one that is scored
                await ranks.call("open_step", step=step, workspace="w")
                await ranks.call("close_step", step=step, named=[])
            await ranks.call("stats")
            await ranks.call("check_integrity")
        assert not long.done()
        rank.gate.set()
        await long

    lanes(path, scenario)


@pytest.mark.parametrize("slow", [("close_step",)], indirect=True)
def test_a_step_opens_while_another_one_closes(slow: tuple[Slow, Path]) -> None:
    rank, path = slow

    async def scenario(ranks: Ranks) -> None:
        closing = asyncio.create_task(ranks.call("close_step", step="a", named=[]))
        mine = lane_of("close_step", {"step": "a"})
        others = [s for s in "bcdefgh" if lane_of("open_step", {"step": s}) != mine]
        assert others, "all steps share a lane"
        async with asyncio.timeout(5):
            await ranks.call("open_step", step=others[0], workspace="w")
        assert not closing.done()
        rank.gate.set()
        await closing

    lanes(path, scenario)


@pytest.mark.parametrize("slow", [("open_step",)], indirect=True)
def test_a_step_whose_opening_was_given_up_is_closed_behind_it(slow: tuple[Slow, Path]) -> None:
    rank, path = slow

    async def scenario(ranks: Ranks) -> None:
        opening = asyncio.create_task(ranks.call("open_step", step="a", workspace="w"))
        await rank.has_begun()
        opening.cancel()
        closing = asyncio.create_task(ranks.call("close_step", step="a", named=[]))
        await asyncio.sleep(0.05)
        assert rank.began == ["open_step"]
        rank.gate.set()
        await closing

    lanes(path, scenario)
    assert rank.ended == ["open_step", "close_step"]


@pytest.mark.parametrize("operation", ["watch", "score"])
def test_requests_of_one_step_share_a_lane_unless_they_are_scores(operation: str) -> None:
    of_step = lane_of("close_step", {"step": "5f"})
    of_request = lane_of(operation, {"rid": "5f.probe"})
    assert (of_request == of_step) == (operation == "watch")


@pytest.mark.parametrize("slow", [("close_step",)], indirect=True)
@pytest.mark.parametrize(
    ("operation", "arguments"),
    [
        ("forget", {"workspace": "w", "numbers": [1]}),
        ("unsaved_blocks", {"workspace": "w"}),
        ("drop_workspace", {"workspace": "w"}),
        ("check_integrity", {}),
        ("stats", {}),
    ],
)
def test_what_needs_settled_steps_waits_for_an_end_whose_caller_gave_up(
    slow: tuple[Slow, Path], operation: str, arguments: dict[str, Any]
) -> None:
    """A block must not be forgotten, or be counted as saved, before it is there."""
    rank, path = slow

    async def scenario(ranks: Ranks) -> None:
        closing = asyncio.create_task(ranks.call("close_step", step="a", named=[]))
        await rank.has_begun()
        closing.cancel()
        behind = asyncio.create_task(ranks.call(operation, **arguments))
        await asyncio.sleep(0.05)
        assert rank.began == ["close_step"]
        rank.gate.set()
        await behind

    lanes(path, scenario)
    assert rank.ended == ["close_step", operation]


@pytest.mark.parametrize("slow", [("score",)], indirect=True)
def test_scores_are_one_at_a_time_and_workspaces_take_turns(slow: tuple[Slow, Path]) -> None:
    rank, path = slow
    answered: list[str] = []

    async def scenario(ranks: Ranks) -> None:
        async def score(workspace: str, step: str) -> None:
            await ranks.call("score", workspace=workspace, rid=f"{step}.probe")
            answered.append(step)

        asking: list[asyncio.Task[None]] = []
        for workspace, step in (("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1")):
            asking.append(asyncio.create_task(score(workspace, step)))
            await asyncio.sleep(0)
        await rank.has_begun()
        await asyncio.sleep(0.05)
        assert len(rank.began) == 1
        rank.gate.set()
        await asyncio.gather(*asking)

    lanes(path, scenario)
    assert answered == ["a1", "a2", "b1", "a3"]


def accepting() -> int:
    return sum(thread.name == "kvws-control" for thread in threading.enumerate())


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline, "did not come true"
        time.sleep(0.01)
