"""The endpoint put together: engine, sessions, HTTP; from its first breath to its last."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Generator
from pathlib import Path

from rich.console import Console

from kvws.config import Settings
from kvws.engine.launch import RunningEngine
from kvws.errors import EngineDied
from kvws.harness_adapters.address import ServerAddress
from kvws.harness_adapters.paste import paste_lines
from kvws.http.anthropic import ANTHROPIC
from kvws.http.app import make_app
from kvws.http.calls import FinishedCall, Listener
from kvws.http.chat_completions import CHAT_COMPLETIONS
from kvws.http.options import FrontOptions
from kvws.http.recorder import Recorder
from kvws.http.replies import Dialects
from kvws.http.responses import RESPONSES
from kvws.http.server import serve
from kvws.limits import Limits
from kvws.recall.recipe import Recipe
from kvws.serving.assemble import assemble_service
from kvws.serving.garbage import freeze_what_is_loaded
from kvws.session.identity import identify

DIALECTS = Dialects(ANTHROPIC, CHAT_COMPLETIONS, RESPONSES)

_LIVENESS_EVERY_S = 1.0
_log = logging.getLogger("kvws.serving")


class Endpoint:
    """One engine behind one address."""

    def __init__(
        self,
        running: RunningEngine,
        model_path: str | Path,
        settings: Settings,
        limits: Limits,
        recipe: Recipe,
        options: FrontOptions,
        recorder: Recorder | None,
    ) -> None:
        self.service = assemble_service(
            running.engine,
            limits,
            recipe,
            answer_format=running.answer_format,
            model_path=model_path,
            name=settings.model,
            window_tokens=settings.window,
            store=running.store,
            identity=running.identity,
        )
        self._running = running
        self._settings = settings
        self._options = options
        self._recorder = recorder
        listener = _recording(recorder) if recorder is not None else None
        self._app = make_app(self.service, DIALECTS, identify, options, listener)

    async def serve(
        self, ready: Callable[[str], None], console: Console, *, parent: int | None = None
    ) -> None:
        """Answer until the user interrupts; then let running answers end, and save all blocks.

        Args:
            ready: called with the base URL once requests are answered.
            parent: the process that started this one; its end is an interrupt, too.

        Raises:
            ConfigError: the address cannot be bound.
            EngineDied: the engine's process is gone.
        """
        freeze_what_is_loaded()
        stop = asyncio.Event()
        with _interrupts(stop):
            watching = asyncio.create_task(self._watch_processes(stop, parent))
            try:
                async with self.service.running():
                    await serve(
                        self._app, self._options, self._settings.port, ready=ready, stop=stop
                    )
                if watching.done():
                    watching.result()
                if self._recorder is not None:
                    await self._recorder.close()
                await self._drain(console, watching)
            finally:
                watching.cancel()

    async def _watch_processes(self, stop: asyncio.Event, parent: int | None) -> None:
        """Stop when the parent is gone.

        Raises:
            EngineDied: the engine is gone; stops as well.
        """
        try:
            while True:
                self._running.require_alive()
                if parent is not None and os.getppid() != parent:
                    stop.set()
                await asyncio.sleep(_LIVENESS_EVERY_S)
        except EngineDied:
            stop.set()
            raise

    async def _drain(self, console: Console, watching: asyncio.Task[None]) -> None:
        """Save what is not durable yet; a second interrupt gives that up.

        Args:
            watching: ends when the engine dies.

        Raises:
            EngineDied: it did; nothing more can be saved.
        """
        if self._running.store is None:
            return
        stop = asyncio.Event()
        with _interrupts(stop):
            shown: list[int] = []

            def show(unsaved_blocks: int) -> None:
                if unsaved_blocks and unsaved_blocks not in shown:
                    console.print(f"saving {unsaved_blocks} blocks … (Ctrl-C gives up)")
                shown.append(unsaved_blocks)

            draining = asyncio.create_task(self.service.drain(show))
            stopping = asyncio.create_task(stop.wait())
            await asyncio.wait({draining, stopping, watching}, return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            if not draining.done():
                draining.cancel()
                if watching.done():
                    watching.result()
                console.print("not all blocks were saved; they will be computed again")
            elif draining.result():
                console.print("all sessions are on disk")
            else:
                console.print("the disk does not take blocks; not all sessions are on disk")

    def announce(self, console: Console, base_url: str) -> None:
        """Say where the server is, what it keeps where, and how to point a client at it."""
        settings, running = self._settings, self._running
        key = self._options.keys[0] if self._options.keys else None
        address = ServerAddress(base_url, key, settings.window, settings.model)
        console.print(
            f"{settings.model} answers at {base_url}, with a window of {settings.window:,} tokens"
        )
        console.print(
            f"view: {settings.budget:,} tokens and {settings.reserve:,} beside it; "
            f"host tier: {running.host_bytes / 2**30:.1f} GiB, {settings.host_format}"
        )
        if running.scoring:
            console.print(f"blocks are scored {running.scoring}")
        if running.store is not None:
            console.print(f"disk tier: {running.store.root} ({running.disk})")
        else:
            console.print("no disk tier: sessions end with this process (--disk-dir keeps them)")
        console.print()
        for line in paste_lines(address):
            console.print(line, markup=False)
        console.print()
        console.print("Ctrl-C ends it.")


@contextlib.contextmanager
def _interrupts(stop: asyncio.Event) -> Generator[None]:
    """Ctrl-C and a polite kill set an event meanwhile, instead of tearing the loop down."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _recording(recorder: Recorder) -> Listener:
    async def record(finished: FinishedCall) -> None:
        await recorder.record(
            finished.caller,
            finished.call,
            finished.events,
            dialect=finished.dialect,
            started_at_s=finished.started_at_s,
            duration_ms=finished.duration_ms,
        )

    return record
