"""What each client is told about a server."""

from __future__ import annotations

import json
import os
import shlex
import stat
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvws.errors import ConfigError
from kvws.harness_adapters import claude_code, codex, opencode, openhands, other
from kvws.harness_adapters.address import ServerAddress
from kvws.harness_adapters.paste import paste_lines
from kvws.harness_adapters.recognise import launch

KEY = "k-1234"
ADDRESS = ServerAddress("http://127.0.0.1:8123/", KEY, window_tokens=1_000_000, model="Qwen3-8B")
SMALL = ServerAddress("http://127.0.0.1:8123", None, window_tokens=16_000, model="smollm2")


def test_claude_code_is_given_the_address_the_window_and_one_model_for_every_role() -> None:
    environment = claude_code.environment(ADDRESS)
    assert environment["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:8123"
    assert environment["ANTHROPIC_AUTH_TOKEN"] == KEY
    assert environment["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "1000000"
    models = {value for name, value in environment.items() if name.endswith("_MODEL")}
    assert models == {"kvws"}


def test_claude_code_is_kept_from_changing_what_its_prompts_begin_with() -> None:
    environment = claude_code.environment(ADDRESS)
    assert environment["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0"
    assert environment["ENABLE_TOOL_SEARCH"] == "false"


def test_claude_code_is_never_told_not_to_compact() -> None:
    """It would refuse to go on at 177,000 tokens, whatever the window."""
    assert "DISABLE_AUTO_COMPACT" not in claude_code.environment(ADDRESS)
    inherited = {"DISABLE_AUTO_COMPACT": "1", "ANTHROPIC_API_KEY": "another", "HOME": "/h"}
    started = claude_code.launch(["claude"], ADDRESS).environment_over(inherited)
    assert started.keys() & inherited.keys() == {"HOME"}


def test_claude_code_shell_lines_do_in_a_shell_what_the_launcher_does() -> None:
    script = "\n".join([*claude_code.shell_lines(ADDRESS), "env -0"])
    before = {"PATH": os.environ["PATH"], "ANTHROPIC_API_KEY": "another"}
    shell = subprocess.run(["/bin/sh", "-c", script], env=before, capture_output=True, check=True)
    after = dict(entry.split("=", 1) for entry in shell.stdout.decode().split("\0") if entry)
    expected = claude_code.environment(ADDRESS)
    assert {name: after.get(name) for name in expected} == expected
    assert "ANTHROPIC_API_KEY" not in after


def test_claude_code_settings_file_holds_the_same() -> None:
    settings = json.loads(claude_code.settings_json(ADDRESS))
    assert settings == {"env": claude_code.environment(ADDRESS)}


def test_answers_are_at_most_a_quarter_of_a_small_window() -> None:
    assert claude_code.environment(ADDRESS)["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "32000"
    assert claude_code.environment(SMALL)["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "4000"
    model = json.loads(opencode.config_json(SMALL))["provider"]["kvws"]["models"]["kvws"]
    assert model["limit"] == {"context": 16_000, "output": 4_000}


def test_without_a_key_clients_still_get_a_token() -> None:
    """Most refuse to start without one."""
    assert claude_code.environment(SMALL)["ANTHROPIC_AUTH_TOKEN"]
    assert codex.environment(SMALL)["KVWS_API_KEY"]
    assert openhands.environment(SMALL)["LLM_API_KEY"]
    assert other.environment(SMALL)["OPENAI_API_KEY"]


def test_codex_config_is_toml_that_names_the_provider_but_not_the_key() -> None:
    text = codex.config_toml(ADDRESS)
    config = tomllib.loads(text)
    assert config["model_provider"] == "kvws" and config["model_context_window"] == 1_000_000
    provider = config["model_providers"]["kvws"]
    assert provider["base_url"] == "http://127.0.0.1:8123/v1"
    assert (provider["wire_api"], provider["env_key"]) == ("responses", "KVWS_API_KEY")
    assert KEY not in text


def test_codex_overrides_on_the_command_line_say_what_the_config_file_says() -> None:
    command = codex.launch(["codex", "exec", "do it"], ADDRESS).command
    assert command[0] == "codex" and command[-2:] == ("exec", "do it")
    flags, values = command[1:-2:2], command[2:-2:2]
    assert set(flags) == {"-c"}
    assert tomllib.loads("\n".join(values)) == tomllib.loads(codex.config_toml(ADDRESS))


def test_opencode_config_names_the_provider_but_not_the_key_and_prunes_nothing() -> None:
    text = opencode.config_json(ADDRESS)
    config = json.loads(text)
    assert config["model"] == config["small_model"] == "kvws/kvws"
    options = config["provider"]["kvws"]["options"]
    assert options["baseURL"] == "http://127.0.0.1:8123/v1"
    assert options["apiKey"] == "{env:KVWS_API_KEY}" and KEY not in text
    assert config["compaction"] == {"prune": False}
    inline = opencode.environment(ADDRESS)
    assert json.loads(inline["OPENCODE_CONFIG_CONTENT"]) == config
    assert inline["KVWS_API_KEY"] == KEY


def test_openhands_settings_hold_the_window_and_no_condenser() -> None:
    settings = json.loads(openhands.agent_settings(ADDRESS, workspace="mine"))
    assert settings["kind"] == "Agent" and settings["condenser"] is None
    llm = settings["llm"]
    assert llm["model"] == "openai/kvws" and llm["base_url"] == "http://127.0.0.1:8123/v1"
    assert llm["max_input_tokens"] == 1_000_000
    assert llm["extra_headers"] == {"X-Kvws-Workspace": "mine"}
    assert "extra_headers" not in json.loads(openhands.agent_settings(ADDRESS))["llm"]


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["openhands", "-t", "x"], ["openhands", "--override-with-envs", "-t", "x"]),
        (["openhands", "--override-with-envs"], ["openhands", "--override-with-envs"]),
        (["openhands", "serve"], ["openhands", "serve"]),
    ],
)
def test_openhands_is_told_to_read_its_environment(
    command: list[str], expected: list[str]
) -> None:
    assert list(openhands.launch(command, ADDRESS).command) == expected


def test_openhands_llm_is_the_sdks_with_our_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    sdk = SimpleNamespace(LLM=lambda **fields: fields)
    monkeypatch.setitem(sys.modules, "openhands", SimpleNamespace(sdk=sdk))
    monkeypatch.setitem(sys.modules, "openhands.sdk", sdk)
    fields = openhands.llm(ADDRESS, stream=True, timeout=5)
    assert fields["stream"] is True and fields["timeout"] == 5
    assert fields["api_key"] == KEY and fields["max_input_tokens"] == 1_000_000


@pytest.mark.parametrize("make", [lambda: openhands.llm(ADDRESS), openhands.condenser])
def test_without_the_openhands_sdk_it_says_how_to_install_it(
    make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("openhands", "openhands.sdk", "openhands.sdk.context.condenser"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError) as caught:
        make()
    assert "uv pip install openhands-sdk" in caught.value.hint


WRITERS: dict[str, tuple[Callable[[Path], None], Callable[[], str]]] = {
    "codex": (lambda path: codex.write_config(path, ADDRESS), lambda: codex.config_toml(ADDRESS)),
    "opencode": (
        lambda path: opencode.write_config(path, ADDRESS),
        lambda: opencode.config_json(ADDRESS),
    ),
    "openhands": (
        lambda path: openhands.write_agent_settings(path, ADDRESS),
        lambda: openhands.agent_settings(ADDRESS),
    ),
}


@pytest.mark.parametrize("client", WRITERS)
def test_a_config_file_is_written_where_told_readable_by_its_owner_alone(
    client: str, tmp_path: Path
) -> None:
    write, text = WRITERS[client]
    path = tmp_path / "new" / "config"
    write(path)
    assert path.read_text() == text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("client", WRITERS)
def test_a_users_own_config_file_is_never_touched_and_the_hint_is_what_to_merge(
    client: str, tmp_path: Path
) -> None:
    write, text = WRITERS[client]
    path, elsewhere = tmp_path / "config", tmp_path / "elsewhere"
    path.write_text("mine")
    (tmp_path / "link").symlink_to(elsewhere)
    for target in (path, tmp_path / "link"):
        with pytest.raises(ConfigError) as caught:
            write(target)
        assert text() in caught.value.hint
    assert path.read_text() == "mine"
    assert not elsewhere.exists()


@pytest.mark.parametrize(
    ("program", "variable"),
    [
        ("claude", "CLAUDE_CODE_MAX_CONTEXT_TOKENS"),
        ("/opt/bin/claude", "CLAUDE_CODE_MAX_CONTEXT_TOKENS"),
        ("Claude.exe", "CLAUDE_CODE_MAX_CONTEXT_TOKENS"),
        ("codex", "KVWS_API_KEY"),
        ("opencode", "OPENCODE_CONFIG_CONTENT"),
        ("openhands", "LLM_BASE_URL"),
        ("aider", "OPENAI_API_BASE"),
    ],
)
def test_a_client_is_recognised_by_its_programs_name(program: str, variable: str) -> None:
    assert variable in launch([program], ADDRESS).environment


@pytest.mark.parametrize("program", ["claude", "codex", "opencode", "openhands", "aider"])
def test_no_launch_puts_the_key_on_the_command_line_or_into_a_repr(program: str) -> None:
    prepared = launch([program, "x"], ADDRESS)
    assert KEY in str(dict(prepared.environment))
    assert KEY not in " ".join(prepared.command)
    assert KEY not in repr(prepared) + repr(ADDRESS)


@pytest.mark.parametrize("program", ["claude", "openhands", "opencode", "codex"])
@pytest.mark.parametrize("address", [ADDRESS, SMALL])
def test_a_pasted_line_starts_the_client_as_its_launch_does(
    program: str, address: ServerAddress, tmp_path: Path
) -> None:
    """Run by a shell that has the key, with a program in the client's place."""
    client = tmp_path / program
    client.write_text(
        f"#!{sys.executable}\n"
        "import json, os, sys\n"
        "print(json.dumps([sys.argv, dict(os.environ)]))\n"
    )
    client.chmod(0o700)
    (line,) = (line for line in paste_lines(address) if program in shlex.split(line))
    shell = {"PATH": f"{tmp_path}:/usr/bin:/bin", "ANTHROPIC_API_KEY": "another"}
    if address.api_key:
        shell["KVWS_API_KEY"] = address.api_key
    done = subprocess.run(["/bin/sh", "-c", line], env=shell, capture_output=True, check=True)
    arguments, environment = json.loads(done.stdout)
    prepared = launch([program], address)
    assert tuple(arguments[1:]) == prepared.command[1:]
    assert prepared.environment.items() <= environment.items()
    assert not set(prepared.unset) & environment.keys()


def test_pasted_lines_do_not_hold_the_key() -> None:
    assert KEY not in "\n".join(paste_lines(ADDRESS))


def test_importing_the_adapters_imports_no_client_and_no_engine() -> None:
    code = (
        "import sys, kvws.cli.run, kvws.harness_adapters.paste; "
        "print(*sorted({'openhands', 'torch', 'sglang', 'fastapi'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
