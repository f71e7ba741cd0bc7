"""`kvws run`: a sidecar for one agent, started before it and stopped behind it.

    kvws run [options of kvws serve] -- claude -p "…"

    start `kvws serve` on a free port ─ wait until it is ready ─ start the agent ─ wait for its end
                                                                                 ─ stop the sidecar

The agent has the terminal; the sidecar writes to a log file. The key is made for this run, and
handed to both in their environments: a command line can be read by other users.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import click

from kvws.errors import ConfigError, EngineStartError
from kvws.harness_adapters.address import ServerAddress
from kvws.harness_adapters.recognise import launch

SERVE = (sys.executable, "-m", "kvws", "serve")
_OF_THIS_RUN = ("--port", "0", "--end-with-parent")

_POLL_S = 0.05
_STOP_S = 60.0
_LOG_TAIL_CHARS = 2000
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class _TwoCommandLines(click.Command):
    """Takes what stands before `--` as one command line and what stands behind it as another."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        cut = args.index("--") if "--" in args else len(args)
        serve_options, agent = args[:cut], args[cut + 1 :]
        if "--help" in serve_options:
            return super().parse_args(ctx, ["--help"])
        super().parse_args(ctx, [])
        ctx.params = {"serve_options": serve_options, "agent": agent}
        return []


@click.command(
    cls=_TwoCommandLines,
    options_metavar="[OPTIONS OF kvws serve]",
    epilog="Example: kvws run --disk-dir ~/kvws-store -- claude",
)
@click.pass_context
def run(ctx: click.Context, serve_options: list[str], agent: list[str]) -> None:
    """Start a server, then an agent that uses it; stop the server when the agent ends.

    claude, codex, opencode and openhands are set up by name; any other program finds the address
    in OPENAI_BASE_URL and ANTHROPIC_BASE_URL. Exits with the agent's exit code.
    """
    if not agent:
        raise ConfigError(
            "there is no agent to run", hint="name it behind two dashes: kvws run -- claude"
        )
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    api_key = secrets.token_urlsafe(32)
    log_path = _new_log_file()
    with (
        tempfile.TemporaryDirectory(prefix="kvws-run-") as folder,
        _sidecar(serve_options, api_key, Path(folder) / "ready.json", log_path) as address,
    ):
        exit_code = _run_agent(agent, address)
    ctx.exit(exit_code)


@contextmanager
def _sidecar(
    options: Sequence[str], api_key: str, ready_file: Path, log_path: Path
) -> Generator[ServerAddress, None, None]:
    """A server that is ready; stopped at the end, however that comes."""
    command = [*SERVE, *_OF_THIS_RUN, "--ready-file", str(ready_file), *options]
    click.echo(f"kvws: starting the server, its log is {log_path}", err=True)
    with log_path.open("ab") as log:
        process = subprocess.Popen(  # noqa: S603 our own command line
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "KVWS_API_KEY": api_key},
            # A session of its own: Ctrl-C at the terminal is for the agent alone.
            start_new_session=True,
        )
    try:
        address = _wait_until_ready(process, ready_file, api_key, log_path)
        click.echo(f"kvws: {address.model} is ready at {address.base_url}", err=True)
        yield address
        if process.poll() is not None:
            click.echo(
                f"kvws: the server ended before the agent, with code {process.returncode}: "
                f"see {log_path}",
                err=True,
            )
    finally:
        _stop(process)


def _wait_until_ready(
    process: subprocess.Popen[bytes], ready_file: Path, api_key: str, log_path: Path
) -> ServerAddress:
    """Wait as long as the server lives: how long a model takes to load is not ours to know.

    Raises:
        EngineStartError: it ended; shows the end of its log.
    """
    while True:
        address = read_ready_file(ready_file, api_key)
        if address is not None:
            return address
        if process.poll() is not None:
            tail = log_path.read_text(encoding="utf-8", errors="replace")[-_LOG_TAIL_CHARS:]
            raise EngineStartError(
                f"the server ended with code {process.returncode} before it was ready:\n{tail}",
                hint=f"the whole log is {log_path}",
            )
        time.sleep(_POLL_S)


def read_ready_file(path: Path, api_key: str | None) -> ServerAddress | None:
    """What `kvws serve --ready-file` wrote; None while it is not there or not complete.

    Raises:
        EngineStartError: it is complete and says something else.
    """
    try:
        text = path.read_text(encoding="utf-8")
        content: Any = json.loads(text)
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    try:
        return ServerAddress(
            base_url=str(content["base_url"]),
            api_key=api_key,
            window_tokens=int(content["window_tokens"]),
            model=str(content["model"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise EngineStartError(
            f"the server's ready file is not understood: {text[:200]}",
            hint="use one version of kvws for both",
        ) from error


def _run_agent(agent: Sequence[str], address: ServerAddress) -> int:
    """The agent's exit code, as a shell would report it.

    Raises:
        ConfigError: it cannot be started.
    """
    prepared = launch(agent, address)
    try:
        process = subprocess.Popen(  # noqa: S603 the user's own command
            prepared.command, env=prepared.environment_over(os.environ)
        )
    except OSError as error:
        raise ConfigError(
            f"{agent[0]} cannot be started: {error.strerror}", hint="is it installed?"
        ) from error
    try:
        with _signals_go_to(process):
            code = process.wait()
    finally:
        if process.poll() is None:  # told to leave before it was ours to hand on
            process.terminate()
    return code if code >= 0 else 128 - code


@contextmanager
def _signals_go_to(process: subprocess.Popen[bytes]) -> Generator[None, None, None]:
    """Hand on what we are told, except what the terminal told the agent itself."""

    def hand_on(number: int, _: FrameType | None) -> None:
        by_keyboard = number in (signal.SIGINT, signal.SIGQUIT) and _shares_terminal()
        if not by_keyboard:
            with suppress(ProcessLookupError):
                process.send_signal(number)

    before = {number: signal.signal(number, hand_on) for number in _FORWARDED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _shares_terminal() -> bool:
    """Whether a terminal sends its Ctrl-C to our process group, which is the agent's as well."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


def _leave(number: int, _: FrameType | None) -> None:
    """Unwind, so that the server is stopped."""
    raise SystemExit(128 + number)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server: it may finish what it writes to disk. Nothing of it outlives this."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=_STOP_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt, SystemExit):
            click.echo("kvws: the server did not end in time and is killed", err=True)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # and whatever it left behind
    process.wait()


def _new_log_file() -> Path:
    """An empty file of our own under the user's state folder."""
    state = os.environ.get("XDG_STATE_HOME")
    folder = (Path(state) if state else Path.home() / ".local" / "state") / "kvws" / "logs"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / f"run-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    path.touch(mode=0o600, exist_ok=False)
    return path
