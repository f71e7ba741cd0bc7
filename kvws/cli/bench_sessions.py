"""`kvws bench sessions`: many sessions on one engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click
from rich.console import Console

from kvws.cli.options import engine_settings, settings_options
from kvws.config import resolve_settings
from kvws.errors import ConfigError
from kvws.limits import Limits

_COMPANIONS = 2
_FEWEST_SESSIONS = _COMPANIONS + 3
_FEWEST_RUNNING = _COMPANIONS + 2
_BUDGET_TOKENS = 512


@click.command()
@settings_options
@click.option("--sessions", type=click.IntRange(min=_FEWEST_SESSIONS), default=16)
@click.option("--tokens", type=click.IntRange(min=2 * _BUDGET_TOKENS), default=1024)
@click.option("--steps", type=click.IntRange(min=1), default=4)
@click.option("--answer", "answer_tokens", type=click.IntRange(min=8), default=48)
@click.option("--index", "index_blocks", type=click.IntRange(min=1), default=4000)
@click.option("--rounds", type=click.IntRange(min=1), default=3)
def sessions(
    sessions: int,
    tokens: int,
    steps: int,
    answer_tokens: int,
    index_blocks: int,
    rounds: int,
    **flags: Any,
) -> None:
    """Steps of many sessions at once, and what they cost one that decodes."""
    from kvws.bench.decode_gaps import gaps_table, measure_gaps
    from kvws.bench.sessions import QUERY_TOKENS, grown_sessions, measure_steps, steps_table
    from kvws.engine.launch import running_engine

    settings = resolve_settings(flags).settings
    if settings.running < _FEWEST_RUNNING:
        raise ConfigError(
            f"{_FEWEST_RUNNING} requests have to run at once, or those that decode would wait",
            hint=f"set --running to {_FEWEST_RUNNING} or more",
        )
    reserve = 4 * QUERY_TOKENS + 4 * answer_tokens
    limits = Limits(_BUDGET_TOKENS, reserve, 32, 128, QUERY_TOKENS, probe_tokens=128)
    start, chosen_by = engine_settings(settings, limits)
    start = replace(start, disk_dir=None)
    errors = Console(stderr=True)
    with running_engine(start) as engine_run:
        engine = engine_run.engine
        grown = engine_run.run(
            grown_sessions(
                engine,
                limits,
                chosen_by.recipe,
                sessions=sessions,
                tokens=tokens,
                progress=errors.print,
            )
        )
        times = engine_run.run(measure_steps(grown, steps=steps, progress=errors.print))
        gaps = engine_run.run(
            measure_gaps(
                engine,
                grown,
                tokens=answer_tokens,
                companions=_COMPANIONS,
                index_blocks=index_blocks,
                rounds=rounds,
                progress=errors.print,
            )
        )
        engine_run.run(engine.check_integrity())
    console = Console()
    console.print(steps_table(times))
    console.print(gaps_table(gaps))
