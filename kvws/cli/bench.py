"""`kvws bench`: what things cost here, as ratios within one run."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from kvws.bench.recall_step import QUERY_TOKENS, RecallCost, measure_recall
from kvws.cli.options import engine_settings, settings_options
from kvws.config import resolve_settings
from kvws.limits import Limits


@click.group()
def bench() -> None:
    """Benchmarks."""


@bench.command()
@settings_options
@click.option("--view", "views", type=int, multiple=True, default=(1024, 2048, 7168))
@click.option("--repetitions", type=click.IntRange(min=1), default=3)
def recall(views: tuple[int, ...], repetitions: int, **flags: Any) -> None:
    """A recall step against the same view prefilled as text, at several view sizes."""
    settings = resolve_settings(flags).settings
    largest = max(views)
    reserve = max(settings.reserve, 4 * QUERY_TOKENS)
    limits = Limits(largest, reserve, settings.sink, largest // 4, QUERY_TOKENS)
    # Room for the text prompts beside the views: recall is measured with its view on the device.
    start = replace(
        engine_settings(settings, limits), device_tokens=4 * limits.context_tokens
    )

    from kvws.engine.launch import running_engine

    errors = Console(stderr=True)
    with running_engine(start) as running:
        costs = [
            running.run(measure_recall(running.engine, view, reserve, repetitions, errors.print))
            for view in views
        ]
    Console().print(_table(costs))


def _table(costs: list[RecallCost]) -> Table:
    table = Table(box=None, header_style="bold")
    for name in (
        "view", "text, cold", "recall", "unchanged", "query alone", "text / recall",
        "text / unchanged",
    ):  # fmt: skip
        table.add_column(name, justify="right")
    for cost in costs:
        table.add_row(
            str(cost.view_tokens),
            *(
                f"{statistics.median(ms):,.0f} ms"
                for ms in (cost.text, cost.recall, cost.unchanged, cost.alone)
            ),
            f"{cost.ratio(cost.recall):.1f}x",
            f"{cost.ratio(cost.unchanged):.1f}x",
        )
    return table
