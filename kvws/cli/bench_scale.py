"""`kvws bench score`, `stage-in`, `step` and `scale`: millions of tokens, without the model."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from rich.console import Console
from rich.table import Table

from kvws.blocks.key import BLOCK_TOKENS
from kvws.config import Settings, resolve_settings
from kvws.errors import ConfigError
from kvws.models import read_model_config, resolve_model

if TYPE_CHECKING:
    from kvws.bench.scale import SizeCost

# Each command imports what it measures itself: torch takes seconds to import.

Command = TypeVar("Command", bound=Callable[..., Any])

_UNITS = {"K": 1_000, "M": 1_000_000}
_HOST_SIZES = (1_000, 10_000)
_WIDEST_COLUMNS = 1000


def _token_counts(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    """Numbers of tokens with commas between them: 256K is 256,000, 10M ten million."""
    return tuple(_token_count(text.strip()) for text in value.split(","))


def _token_count(text: str) -> int:
    unit = _UNITS.get(text[-1:].upper(), 1)
    try:
        tokens = int(float(text if unit == 1 else text[:-1]) * unit)
    except (ValueError, OverflowError):
        tokens = 0
    if tokens < BLOCK_TOKENS:
        raise click.BadParameter(f"{text!r} is no number of tokens such as 256K or 10M")
    return tokens


def _tokens(default: str) -> Callable[[Command], Command]:
    return click.option("--tokens", callback=_token_counts, default=default, show_default=True)


_model = click.option("--model", help="Alias smollm2, or a Hugging Face folder with a profile.")
_threads = click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True)
_json = click.option(
    "--json", "json_path", type=click.Path(path_type=Path), help="Write the figures there."
)


@click.command()
@_model
@_threads
@_json
@_tokens("1M")
@click.option("--query-tokens", type=click.IntRange(min=1), multiple=True, default=(128, 4, 1))
@click.option("--repetitions", type=click.IntRange(min=1), default=3, show_default=True)
def score(
    model: str | None,
    threads: int,
    json_path: Path | None,
    tokens: tuple[int, ...],
    query_tokens: tuple[int, ...],
    repetitions: int,
) -> None:
    """Exact scoring of whole sessions, against reading their index and multiplying matrices."""
    _require_writable(json_path)
    from kvws.bench.scale_index import profile_of
    from kvws.bench.score import measure_score, score_table

    folder = _model_folder(_settings(model=model))
    of_sizes: list[dict[str, Any]] = []
    for size in tokens:
        costs = measure_score(
            read_model_config(folder),
            profile_of(folder),
            blocks=size // BLOCK_TOKENS,
            query_tokens=query_tokens,
            threads=threads,
            repetitions=repetitions,
            progress=_progress(),
        )
        _print(score_table(costs, size))
        of_sizes += [cost.as_json() for cost in costs]
    _write(json_path, {"threads": threads, "costs": of_sizes})


@click.command("stage-in")
@_model
@_threads
@_json
@click.option("--view", "view_blocks", type=click.IntRange(min=1), default=64, show_default=True)
@click.option(
    "--host",
    "host_sizes",
    type=click.IntRange(min=1),
    multiple=True,
    help="Blocks of a host tier; 1,000, 10,000 and as many as fit by default.",
)
@click.option("--disk-dir", help="Folder on the disk to measure; emptied again.")
@click.option(
    "--stored", "stored_blocks", type=click.IntRange(min=0), default=1024, show_default=True,
    help="Blocks on disk; none to leave the disk out.",
)  # fmt: skip
@click.option("--kv-bits", type=click.Choice(("16", "32")), default="16", show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=20, show_default=True)
def stage_in(
    model: str | None,
    threads: int,
    json_path: Path | None,
    view_blocks: int,
    host_sizes: tuple[int, ...],
    disk_dir: str | None,
    stored_blocks: int,
    kv_bits: str,
    rounds: int,
) -> None:
    """A view out of a large host tier and from disk, against a memcpy and raw reads."""
    _require_writable(json_path)
    import torch

    from kvws.bench.stage_in import (
        measure_disk,
        measure_host,
        most_host_blocks,
        payload_geometry,
        stage_in_table,
    )

    settings = _settings(model=model, disk_dir=disk_dir)
    geometry = payload_geometry(read_model_config(_model_folder(settings)), int(kv_bits))
    torch.set_num_threads(threads)
    sizes = host_sizes or (*_HOST_SIZES, most_host_blocks(geometry))
    costs = measure_host(
        geometry, sizes, view_blocks=view_blocks, rounds=rounds, progress=_progress()
    )
    if stored_blocks:
        where = settings.store_directory
        with tempfile.TemporaryDirectory(prefix="kvws-bench-", dir=where) as folder:
            costs.append(
                measure_disk(
                    geometry,
                    Path(folder),
                    stored_blocks,
                    view_blocks=view_blocks,
                    rounds=rounds,
                    progress=_progress(),
                )
            )
    _print(stage_in_table(costs))
    _write(json_path, {"threads": threads, "costs": [cost.as_json() for cost in costs]})


def _session_options(command: Command) -> Command:
    for option in (
        click.option("--exact-steps", type=click.IntRange(min=1), default=1, show_default=True),
        click.option("--steps", type=click.IntRange(min=1), default=5, show_default=True),
        click.option("--query-tokens", type=click.IntRange(min=1), default=128, show_default=True),
        click.option("--staged", "staged_blocks", type=click.IntRange(min=1), default=64),
        click.option("--scored", type=int, help="Most tokens that are looked at closely."),
        click.option("--budget", type=int, help="Tokens of the execution view."),
        _json,
        _threads,
        _model,
    ):
        command = option(command)
    return command


@click.command()
@_session_options
@_tokens("256K,1M,2M,4M,10M")
def scale(tokens: tuple[int, ...], **options: Any) -> None:
    """A step's data path in one session that grows, against the same step when it was small."""
    costs = _steps_of(tokens, options)
    if costs:
        from kvws.bench.scale import scale_table

        _print(scale_table(costs, cpu=options["threads"] == 1))


@click.command()
@_session_options
@_tokens("1M")
def step(tokens: tuple[int, ...], **options: Any) -> None:
    """A step's data path in a session of one size, part by part."""
    from kvws.bench.step import step_table

    for cost in _steps_of(tokens, options):
        _print(step_table(cost.tokens, cost.shortlisted, cost.exact))


def _steps_of(tokens: tuple[int, ...], options: Mapping[str, Any]) -> list[SizeCost]:
    json_path: Path | None = options["json_path"]
    _require_writable(json_path)
    from kvws.bench.scale import measure_scale

    names = ("model", "budget", "scored")
    settings = _settings(**{name: options[name] for name in names})
    costs = measure_scale(
        _model_folder(settings),
        settings.limits(),
        tokens,
        query_tokens=options["query_tokens"],
        staged_blocks=options["staged_blocks"],
        steps=options["steps"],
        exact_steps=options["exact_steps"],
        threads=options["threads"],
        progress=_progress(),
    )
    of_sizes = [cost.as_json() for cost in costs]
    _write(json_path, {"threads": options["threads"], "sizes": of_sizes})
    return costs


def _settings(**flags: str | int | None) -> Settings:
    return resolve_settings(flags).settings


def _model_folder(settings: Settings) -> Path:
    path = resolve_model(settings.model)
    if not isinstance(path, Path):
        raise ConfigError(
            f"{settings.model} is no folder", hint="give the model's folder: --model PATH"
        )
    return path


def _progress() -> Callable[[str], None]:
    return Console(stderr=True).print


def _print(table: Table) -> None:
    """As wide as it is: where output is no terminal, columns would be cut."""
    console = Console()
    wide = console.options.update(width=_WIDEST_COLUMNS)
    width = max(console.width, console.measure(table, options=wide).maximum)
    Console(width=width).print(table, soft_wrap=True)


def _require_writable(path: Path | None) -> None:
    if path is not None:
        from kvws.replay.report import require_writable

        require_writable(path, "--json")


def _write(path: Path | None, figures: Mapping[str, Any]) -> None:
    if path is not None:
        from kvws.replay.report import write_json

        write_json(path, dict(figures))


COMMANDS: Sequence[click.Command] = (score, stage_in, step, scale)
