"""`kvws serve`: the endpoint."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from kvws.cli.options import engine_settings, settings_options
from kvws.cli.sizing import sized_to_model
from kvws.config import Resolved, Settings, resolve_settings
from kvws.errors import ConfigError
from kvws.models import read_model_config, resolve_model


@click.command()
@settings_options
@click.option("--window", type=int, help="Tokens of prompt and answer, as clients see them.")
@click.option("--host", help="Address to listen on; anything but loopback needs a key.")
@click.option("--port", type=int, help="Port to listen on; 0 for any that is free.")
@click.option(
    "--api-key",
    envvar="KVWS_API_KEY",
    multiple=True,
    help="What clients must send; better set as KVWS_API_KEY. May be given several times.",
)
@click.option(
    "--allow-host", "allowed_hosts", multiple=True, help="Another name it is reached by."
)
@click.option("--tool-parser", help="How the model writes tool calls, as SGLang names it.")
@click.option("--reasoning-parser", help="How the model writes reasoning, as SGLang names it.")
@click.option(
    "--record",
    "record_to",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write sessions there, for `kvws replay`.",
)
@click.option("--record-secrets", is_flag=True, help="Record what looks like a secret, too.")
@click.option(
    "--ready-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the address there as JSON once requests are answered.",
)
@click.option("--end-with-parent", is_flag=True, help="End when the starting process ends.")
def serve(
    api_key: tuple[str, ...],
    allowed_hosts: tuple[str, ...],
    record_to: Path | None,
    record_secrets: bool,
    ready_file: Path | None,
    end_with_parent: bool,
    **flags: Any,
) -> None:
    """Serve a model to coding agents, behind KV workspaces: Anthropic and OpenAI dialects."""
    resolved = resolve_settings(flags)
    resolved.settings.limits()  # what contradicts itself is told before torch is imported

    from kvws.http.options import FrontOptions
    from kvws.http.recorder import Recorder
    from kvws.http.security import Gatekeeper

    options = FrontOptions(
        keys=api_key, host=resolved.settings.host, allowed_hosts=allowed_hosts
    )
    Gatekeeper(options.keys, options.host, options.allowed_hosts)  # before minutes of starting
    recorder = Recorder(record_to, redacts=not record_secrets) if record_to else None
    settings = _sized(resolved)
    limits = settings.limits()
    if settings.window < limits.context_tokens:
        raise ConfigError(
            f"a window of {settings.window} tokens is smaller than the engine's own context",
            hint=f"set --window to {limits.context_tokens} or more",
        )
    start, chosen_by = engine_settings(settings, limits)

    from kvws.endpoint import Endpoint
    from kvws.engine.launch import running_engine

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(f"starting {settings.model} …")
    if chosen_by.notice:
        console.print(chosen_by.notice)
    with running_engine(start) as running:
        endpoint = Endpoint(
            running, start.model, settings, limits, chosen_by.recipe, options, recorder
        )

        def ready(base_url: str) -> None:
            if ready_file is not None:
                _write_ready_file(ready_file, base_url, endpoint)
            endpoint.announce(console, base_url)

        parent = os.getppid() if end_with_parent else None
        running.run(endpoint.serve(ready, console, parent=parent))


def _sized(resolved: Resolved) -> Settings:
    """The settings, with sizes that nobody set fitted to the model where it runs on a GPU."""
    from kvws.engine.platform_entry import activate

    model = resolve_model(resolved.settings.model)
    if activate() is not None or not isinstance(model, Path):
        return resolved.settings
    return sized_to_model(resolved, read_model_config(model).max_position)


def _write_ready_file(path: Path, base_url: str, endpoint: Any) -> None:
    """Whole or not at all: whoever waits for it reads it at once."""
    content = {
        "base_url": base_url,
        "pid": os.getpid(),
        "window_tokens": endpoint.service.window_tokens,
        "model": endpoint.service.model,
    }
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(content), encoding="utf-8")
    partial.replace(path)
