"""Options that several commands share: the fields of `Settings` as flags."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, get_args

import click

from kvws.cli.selecting import Selecting, selecting
from kvws.config import Settings
from kvws.engine.settings import EngineSettings
from kvws.errors import ConfigError
from kvws.limits import Limits
from kvws.models import load_config, read_model_config, require_relocatable, resolve_model
from kvws.store.storage import Backend
from kvws.tiers.formats import PAYLOAD_FORMATS

Command = TypeVar("Command", bound=Callable[..., Any])

_SETTINGS = (
    click.option("--model", help="Alias smollm2, Hugging Face folder or hub name."),
    click.option("--budget", type=int, help="Tokens of the execution view."),
    click.option("--reserve", type=int, help="Tokens beside it for query and generation."),
    click.option("--sink", type=int, help="First tokens of a thread, always in view."),
    click.option("--recent", type=int, help="Newest tokens of a thread, always in view."),
    click.option("--query", type=int, help="Most new tokens a selection is asked with."),
    click.option("--probe", type=int, help="Tokens of the window a selection is probed behind."),
    click.option("--scored", type=int, help="Most tokens whose blocks a step looks at closely."),
    click.option("--host-gb", help="GiB of the host tier, or auto: half of the free memory."),
    click.option("--index-gb", help="GiB of a GPU for scoring blocks, or auto; 0 for the CPU."),
    click.option(
        "--host-format",
        type=click.Choice(PAYLOAD_FORMATS),
        help="How blocks lie there: bit for bit, or quantised.",
    ),
    click.option("--disk-dir", help="Folder of the disk tier: sessions outlive the process."),
    click.option("--disk-gb", help="GiB of the disk tier, or auto: most of what is free."),
    click.option(
        "--disk-format",
        type=click.Choice(PAYLOAD_FORMATS),
        help="How blocks lie on disk.",
    ),
    click.option(
        "--disk-backend",
        type=click.Choice(get_args(Backend)),
        help="What moves blocks to and from disk.",
    ),
    click.option("--signals", help="What blocks are chosen by: auto, or names with commas."),
    click.option("--profile", help="The model's retrieval profile, or auto (kvws calibrate)."),
    click.option("--threads", type=int, help="Compute threads of the engine on a CPU."),
    click.option("--running", type=int, help="Requests that the engine computes at once."),
)


def settings_options(command: Command) -> Command:
    """Add the flags of `Settings` to a command."""
    for option in reversed(_SETTINGS):
        command = option(command)
    return command


def engine_settings(settings: Settings, limits: Limits) -> tuple[EngineSettings, Selecting]:
    """Resolve the model and check that the limits fit it, before an engine is started.

    Returns:
        (how to start the engine, how views are chosen with it).

    Raises:
        ModelError, UnsupportedModel: the model is not there, or its keys cannot be relocated.
        ConfigError: budget + reserve exceed the model's positions, or no request may run; or as
            `selecting`.
    """
    model = resolve_model(settings.model)
    if isinstance(model, Path):
        require_relocatable(load_config(model))
        positions = read_model_config(model).max_position
        if limits.context_tokens > positions:
            raise ConfigError(
                f"budget and reserve need {limits.context_tokens} positions, "
                f"{settings.model} has {positions}",
                hint="lower --budget or --reserve",
            )
    if settings.running < 1:
        raise ConfigError(
            "an engine that computes no request cannot answer", hint="set --running to 1 or more"
        )
    chosen_by = selecting(settings, model)
    start = EngineSettings(
        model=model,
        context_tokens=limits.context_tokens,
        name=settings.model,
        host_bytes=settings.host_bytes,
        host_format=settings.host_format,
        index_bytes=settings.index_bytes,
        disk_dir=settings.store_directory,
        disk_bytes=settings.disk_bytes,
        disk_format=settings.disk_format,
        disk_backend=settings.disk_backend,
        threads=settings.threads or None,
        max_running_requests=settings.running,
        tool_call_parser=settings.tool_parser,
        reasoning_parser=settings.reasoning_parser,
        signals=chosen_by.recipe.rank_signals,
        profile=chosen_by.profile,
    )
    return start, chosen_by
