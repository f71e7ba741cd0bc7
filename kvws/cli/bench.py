"""`kvws bench`: what things cost here, as ratios within one run."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from kvws.cli.bench_scale import COMMANDS
from kvws.cli.bench_sessions import sessions
from kvws.cli.options import engine_settings, settings_options
from kvws.config import Settings, resolve_settings
from kvws.errors import ConfigError
from kvws.limits import Limits
from kvws.models import read_model_config, resolve_model
from kvws.models.profiles import find_profile

# Each command imports what it measures itself: the engine and torch take seconds to import.


@click.group()
def bench() -> None:
    """Benchmarks."""


bench.add_command(sessions)
for command in COMMANDS:
    bench.add_command(command)


@bench.command()
@settings_options
@click.option("--view", "views", type=int, multiple=True, default=(1024, 2048, 7168))
@click.option("--repetitions", type=click.IntRange(min=1), default=3)
def recall(views: tuple[int, ...], repetitions: int, **flags: Any) -> None:
    """A recall step against the same view prefilled as text, at several view sizes."""
    from kvws.bench.recall_step import QUERY_TOKENS, measure_recall, recall_table
    from kvws.engine.launch import running_engine

    settings = resolve_settings(flags).settings
    largest = max(views)
    reserve = max(settings.reserve, 4 * QUERY_TOKENS)
    limits = Limits(largest, reserve, settings.sink, largest // 4, QUERY_TOKENS)
    # Room for the text prompts beside the views: recall is measured with its view on the device.
    start, chosen_by = engine_settings(settings, limits)
    start = replace(start, device_tokens=4 * limits.context_tokens, disk_dir=None)
    errors = Console(stderr=True)
    with running_engine(start) as running:
        costs = [
            running.run(
                measure_recall(
                    running.engine, view, reserve, repetitions, chosen_by.recipe, errors.print
                )
            )
            for view in views
        ]
    Console().print(recall_table(costs))


@bench.command()
@click.option("--model", help="Alias smollm2, or a Hugging Face folder with a profile.")
@click.option("--blocks", type=click.IntRange(min=1), multiple=True, default=(1000, 10_000))
@click.option("--query", "query_tokens", type=click.IntRange(min=1), default=128)
@click.option("--repetitions", type=click.IntRange(min=1), default=3)
def signals(
    model: str | None, blocks: tuple[int, ...], query_tokens: int, repetitions: int
) -> None:
    """What each retrieval signal's index weighs, and what scoring with it costs."""
    settings = resolve_settings({"model": model}).settings
    path = resolve_model(settings.model)
    found = find_profile(path) if isinstance(path, Path) else None
    if not isinstance(path, Path) or found is None:
        raise ConfigError(
            f"{settings.model} has no retrieval profile",
            hint=f"make one with: kvws calibrate --model {settings.model}",
        )
    from kvws.bench.signals import measure_signals, signals_table

    errors = Console(stderr=True)
    for count in blocks:
        costs = measure_signals(
            read_model_config(path),
            found[0],
            blocks=count,
            query_tokens=query_tokens,
            repetitions=repetitions,
            progress=errors.print,
        )
        Console().print(signals_table(costs, count))


@bench.command("stage-out")
@settings_options
@click.option("--chunk", "chunk_tokens", type=click.IntRange(min=32), default=512)
@click.option("--chunks", type=click.IntRange(min=2), default=4)
@click.option("--rounds", type=click.IntRange(min=1), default=7)
def stage_out(chunk_tokens: int, chunks: int, rounds: int, **flags: Any) -> None:
    """Prefill with and without stage-out to host and disk, in pairs."""
    from kvws.bench.stage_out import measure_stage_out, stage_out_table
    from kvws.engine.launch import running_engine

    settings = resolve_settings(flags).settings
    tokens = chunk_tokens // 32 * 32 * chunks
    limits = Limits(tokens, max(settings.reserve, 256), 32, tokens // 4, 128)
    errors = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="kvws-bench-", dir=_work_folder(settings)) as folder:
        start, _ = engine_settings(settings, limits)
        start = replace(
            start,
            device_tokens=4 * limits.context_tokens,
            disk_dir=Path(folder) / "store",
        )
        with running_engine(start) as running:
            cost = running.run(
                measure_stage_out(
                    running.engine,
                    running.store,
                    running.identity,
                    chunk_tokens=chunk_tokens // 32 * 32,
                    chunks=chunks,
                    rounds=rounds,
                    progress=errors.print,
                )
            )
    Console().print(stage_out_table(cost))


@bench.command()
@click.option("--disk-dir", help="Folder on the disk to measure; emptied again.")
@click.option("--blocks", type=click.IntRange(min=8), default=256)
@click.option("--rounds", type=click.IntRange(min=1), default=5)
def store(disk_dir: str | None, blocks: int, rounds: int) -> None:
    """The store against a memcpy and against the raw disk, in 32-bit and 16-bit KV."""
    import torch

    from kvws.bench.store import SMOLLM2, measure_store, store_table

    settings = resolve_settings({"disk_dir": disk_dir}).settings
    errors = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="kvws-bench-", dir=_work_folder(settings)) as folder:
        figures = [
            measure_store(
                Path(folder),
                geometry=replace(SMOLLM2, dtype=dtype),
                blocks=blocks,
                rounds=rounds,
                progress=errors.print,
            )
            for dtype in (torch.float32, torch.float16)
        ]
    Console().print(store_table(figures))


@bench.command()
@click.argument(
    "trace", type=click.Path(path_type=Path), default=Path("traces/step-summary.traj.json")
)
def quantisation(trace: Path) -> None:
    """What each format of blocks at rest takes, and costs in fidelity, on a recorded TRACE."""
    from kvws.bench.quantisation import measure_quantisation, quantisation_table

    costs = measure_quantisation(trace, progress=Console(stderr=True).print)
    Console().print(quantisation_table(costs))


@bench.command()
def eviction() -> None:
    """The host tier's eviction policy at 10,000 to 1,000,000 blocks."""
    from kvws.bench.policy import measure_policy, policy_table

    Console().print(policy_table(measure_policy()))


def _work_folder(settings: Settings) -> Path | None:
    """Where a benchmark puts its files: in --disk-dir, else in the temporary folder."""
    folder: Path | None = settings.store_directory
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"{folder} is no folder", hint="name one on the disk to measure")
    return folder


@bench.command()
@settings_options
@click.option("--tokens", type=click.IntRange(min=10_000), default=1_000_000)
@click.option("--steps", type=click.IntRange(min=2), default=50)
def front(tokens: int, steps: int, **flags: Any) -> None:
    """What a step costs in front of the engine, in a session of that many tokens."""
    from kvws.bench.front import front_table, measure_front
    from kvws.models import resolve_model

    settings = resolve_settings(flags).settings
    model = resolve_model(settings.model)
    if not isinstance(model, Path):
        raise ConfigError("the front is measured with a model folder", hint="give its path")
    Console().print(front_table(measure_front(model, settings.limits(), tokens, steps)))
