"""`kvws config`: what is set, and by whom."""

from __future__ import annotations

from dataclasses import asdict

import click
from rich.console import Console
from rich.table import Table

from kvws.config import resolve_settings


@click.group()
def config() -> None:
    """Settings."""


@config.command()
def show() -> None:
    """Print every setting with the place its value came from."""
    resolved = resolve_settings({})
    table = Table(box=None, header_style="bold")
    for column in ("setting", "value", "from"):
        table.add_column(column)
    for name, value in asdict(resolved.settings).items():
        table.add_row(name, str(value), resolved.sources[name])
    Console().print(table)
