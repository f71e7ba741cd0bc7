"""`kvws run`: one sidecar for one agent. Server and agent are little programs of these tests."""

from __future__ import annotations

import json
import os
import pty
import signal
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvws.cli.run import read_ready_file, run
from kvws.errors import ConfigError, EngineStartError

FAKE_SERVE = """
import json, os, signal, sys, time
from pathlib import Path

folder = Path(os.environ["FAKE_FOLDER"])
caught = []
signal.signal(signal.SIGINT, lambda *_: caught.append("SIGINT"))

def leave(*_):
    if os.environ.get("FAKE_SERVE") != "deaf":
        (folder / "server-left").write_text(json.dumps(caught))
        sys.exit(0)

signal.signal(signal.SIGTERM, leave)
print("a line for the log", flush=True)
seen = {"arguments": sys.argv[1:], "key": os.environ["KVWS_API_KEY"], "pid": os.getpid()}
(folder / "server").write_text(json.dumps(seen))
if os.environ.get("FAKE_SERVE") == "dies":
    print("no such model", flush=True)
    sys.exit(3)
if os.environ.get("FAKE_SERVE") != "never ready":
    ready = Path(sys.argv[sys.argv.index("--ready-file") + 1])
    ready.write_text("{")  # half a file is no file
    time.sleep(0.2)
    address = {"base_url": "http://127.0.0.1:8123", "pid": os.getpid(),
               "window_tokens": 1000000, "model": "small"}
    ready.write_text(json.dumps(address))
if os.environ.get("FAKE_SERVE") == "dies later":
    time.sleep(0.3)
    sys.exit(4)
while True:
    time.sleep(0.05)
"""

AGENT_THAT_TELLS = """#!{python}
import json, os, sys
from pathlib import Path
seen = {{"arguments": sys.argv[1:], "environment": dict(os.environ)}}
Path(os.environ["FAKE_FOLDER"], "agent").write_text(json.dumps(seen))
print("the agent speaks")
sys.exit(7)
"""

AGENT_THAT_WAITS = """#!{python}
import os, signal, sys, time
from pathlib import Path
folder = Path(os.environ["FAKE_FOLDER"])
caught = []

def note(number, _):
    caught.append(signal.Signals(number).name)
    (folder / "signals").write_text(" ".join(caught))

signal.signal(signal.SIGINT, note)
signal.signal(signal.SIGTERM, note)
(folder / "waiting").touch()
while not caught:
    time.sleep(0.02)
time.sleep(0.3)
sys.exit(9)
"""

DRIVER = """
import sys
import kvws.cli.run
from kvws.cli.main import main
kvws.cli.run.SERVE = (sys.executable, {serve!r})
main.add_command(kvws.cli.run.run)
main(["run", *sys.argv[1:]])
"""


@dataclass
class Rig:
    """A folder in which a fake server and fake agents leave word of what they saw."""

    folder: Path

    def agent(self, name: str, program: str = AGENT_THAT_TELLS) -> str:
        path = self.folder / name
        path.write_text(program.format(python=sys.executable))
        path.chmod(0o700)
        return str(path)

    def command(self, *arguments: str) -> list[str]:
        serve = self.folder / "serve.py"
        serve.write_text(FAKE_SERVE)
        return [sys.executable, "-c", DRIVER.format(serve=str(serve)), *arguments]

    def environment(self, **more: str) -> dict[str, str]:
        state = {"XDG_STATE_HOME": str(self.folder / "state"), "FAKE_FOLDER": str(self.folder)}
        kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        return {**kept, **state, **more}

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment(**environment),
            start_new_session=True,
        )

    def finish(self, *arguments: str, **environment: str) -> tuple[int, str, str]:
        process = self.start(*arguments, **environment)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def said(self, name: str) -> Any:
        return json.loads((self.folder / name).read_text())

    def wait_for(self, name: str) -> None:
        wait_until((self.folder / name).exists)

    def assert_server_is_gone(self) -> None:
        pid = self.said("server")["pid"]
        wait_until(lambda: not Path(f"/proc/{pid}").exists())


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def test_the_agent_runs_beside_a_ready_server_and_its_exit_code_is_returned(rig: Rig) -> None:
    claude = rig.agent("claude")
    code, out, _ = rig.finish("--budget", "512", "--", claude, "-p", "--", "--port")
    assert code == 7
    assert out == "the agent speaks\n"
    server, agent = rig.said("server"), rig.said("agent")
    assert server["arguments"][:2] == ["--port", "0"]
    assert server["arguments"][-2:] == ["--budget", "512"]
    assert agent["arguments"] == ["-p", "--", "--port"]
    assert agent["environment"]["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:8123"
    assert agent["environment"]["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "1000000"
    rig.assert_server_is_gone()
    assert rig.said("server-left") == []


def test_the_key_is_new_in_every_run_and_on_no_command_line(rig: Rig) -> None:
    codex = rig.agent("codex")
    keys: set[str] = set()
    for _ in range(2):
        rig.finish("--", codex, "exec")
        server, agent = rig.said("server"), rig.said("agent")
        assert agent["environment"]["KVWS_API_KEY"] == server["key"]
        assert not any(server["key"] in word for word in server["arguments"] + agent["arguments"])
        keys.add(server["key"])
    assert len(keys) == 2 and all(len(key) >= 32 for key in keys)


def test_the_servers_output_goes_into_a_private_log_and_not_to_the_terminal(rig: Rig) -> None:
    _, out, err = rig.finish("--", rig.agent("claude"))
    (log,) = (rig.folder / "state" / "kvws" / "logs").iterdir()
    assert log.read_text() == "a line for the log\n"
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    assert "a line for the log" not in out + err
    assert str(log) in err


def test_an_unknown_agent_finds_the_address_where_every_client_looks(rig: Rig) -> None:
    rig.finish("--", rig.agent("my-agent"), ANTHROPIC_API_KEY="of another server")
    environment = rig.said("agent")["environment"]
    assert environment["OPENAI_BASE_URL"] == "http://127.0.0.1:8123/v1"
    assert environment["OPENAI_API_KEY"] == rig.said("server")["key"]
    assert environment["ANTHROPIC_AUTH_TOKEN"] == rig.said("server")["key"]
    assert "ANTHROPIC_API_KEY" not in environment


def test_a_server_that_does_not_come_up_is_explained(rig: Rig) -> None:
    code, _, err = rig.finish("--", rig.agent("claude"), FAKE_SERVE="dies")
    assert code == 1
    assert "ended with code 3" in err and "no such model" in err
    assert not (rig.folder / "agent").exists()


def test_a_server_that_ends_first_is_told_and_the_agents_code_still_counts(rig: Rig) -> None:
    slow = "#!/bin/sh\nsleep 1\nexit 5\n"
    code, _, err = rig.finish("--", rig.agent("claude", slow), FAKE_SERVE="dies later")
    assert code == 5
    assert "ended before the agent, with code 4" in err


def test_an_agent_that_cannot_be_started_is_explained_and_the_server_stopped(rig: Rig) -> None:
    code, _, err = rig.finish("--", str(rig.folder / "absent"))
    assert code == 1
    assert "cannot be started: No such file" in err
    rig.assert_server_is_gone()


def test_an_agent_that_dies_of_a_signal_is_reported_as_a_shell_does(rig: Rig) -> None:
    dying = "#!/bin/sh\nkill -KILL $$\n"
    assert rig.finish("--", rig.agent("claude", dying))[0] == 128 + signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_from_a_supervisor_is_handed_to_the_agent(
    rig: Rig, number: signal.Signals
) -> None:
    process = rig.start("--", rig.agent("claude", AGENT_THAT_WAITS))
    rig.wait_for("waiting")
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 9
    assert (rig.folder / "signals").read_text() == number.name
    rig.assert_server_is_gone()
    assert rig.said("server-left") == []


def test_ctrl_c_at_the_terminal_reaches_the_agent_once_and_the_server_never(rig: Rig) -> None:
    command = rig.command("--", rig.agent("claude", AGENT_THAT_WAITS))
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(command[0], command, rig.environment())
    try:
        rig.wait_for("waiting")
        os.write(terminal, b"\x03")
        _, status = os.waitpid(pid, 0)
    finally:
        os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 9
    assert (rig.folder / "signals").read_text() == "SIGINT"
    rig.assert_server_is_gone()
    assert rig.said("server-left") == []


def test_leaving_before_the_server_is_ready_leaves_no_server_behind(rig: Rig) -> None:
    process = rig.start("--", rig.agent("claude"), FAKE_SERVE="never ready")
    rig.wait_for("server")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    rig.assert_server_is_gone()


def test_a_server_that_does_not_listen_is_killed_at_the_second_ctrl_c(rig: Rig) -> None:
    process = rig.start("--", rig.agent("claude"), FAKE_SERVE="deaf")
    rig.wait_for("agent")
    time.sleep(0.5)
    assert process.poll() is None, "it waits for the server"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    rig.assert_server_is_gone()


@pytest.mark.parametrize("arguments", [[], ["claude"], ["--budget", "512", "--"]])
def test_without_an_agent_it_says_where_to_name_one(arguments: list[str]) -> None:
    result = CliRunner().invoke(run, arguments)
    assert isinstance(result.exception, ConfigError)
    assert "kvws run -- claude" in result.exception.hint


def test_help_needs_no_agent() -> None:
    result = CliRunner().invoke(run, ["--help"])
    assert result.exit_code == 0 and "kvws run --disk-dir" in result.output


@pytest.mark.parametrize("text", ["", "{", '{"base_url": "http://127.0.0.1:1"'])
def test_an_unfinished_ready_file_is_not_there_yet(tmp_path: Path, text: str) -> None:
    path = tmp_path / "ready.json"
    assert read_ready_file(path, None) is None
    path.write_text(text)
    assert read_ready_file(path, None) is None


@pytest.mark.parametrize("text", ["[]", "{}", '{"base_url": "u", "window_tokens": "many"}'])
def test_a_ready_file_of_another_kind_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "ready.json"
    path.write_text(textwrap.dedent(text))
    with pytest.raises(EngineStartError, match="not understood"):
        read_ready_file(path, None)
