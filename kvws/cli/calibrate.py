"""`kvws calibrate`: which heads of a model find content, written down for recall."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from kvws.config import resolve_settings
from kvws.errors import ConfigError, ModelError
from kvws.models import load_config, require_relocatable, resolve_model

if TYPE_CHECKING:
    from kvws.eval.calibrate import Calibration, Figures

_OUT_HINT = "give --out a file in a folder that you can write to"


@click.command()
@click.option("--model", help="Alias smollm2, or Hugging Face folder.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="File to write; by default the user's profile of this model, which is found by itself.",
)
@click.option(
    "--histories",
    type=click.IntRange(min=2),
    default=6,
    show_default=True,
    help="Synthetic histories to choose heads by.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the histories.")
def calibrate(model: str | None, out: Path | None, histories: int, seed: int) -> None:
    """Find the attention heads that a model finds facts with, and keep them as its profile.

    Plants synthetic facts in synthetic histories and asks for them: minutes for a small model.
    """
    folder = _model_folder(resolve_settings({"model": model}).settings.model)
    require_relocatable(load_config(folder))
    # What follows takes seconds to import.
    from kvws.models.profiles import model_identity, user_profile_path

    identity = model_identity(folder)
    path = out or user_profile_path(identity)
    _require_writable(path)
    found = _calibrate(folder, identity, histories, seed)
    _write(path, found.profile.to_json())
    console = Console()
    console.print(_heads_table(found))
    console.print(_figures_table(found))
    click.echo(f"wrote {path}")


def _model_folder(name: str) -> Path:
    folder = resolve_model(name)
    if not isinstance(folder, Path):
        raise ModelError(
            f"{name!r} is not a folder on this machine",
            hint="download the model and give its folder, or --model smollm2",
        )
    return folder


def _calibrate(folder: Path, identity: str, histories: int, seed: int) -> Calibration:
    from kvws.chat.render import ChatRenderer
    from kvws.engine.platform_entry import declare_torchvision_ops
    from kvws.eval.calibrate import calibrate as run
    from kvws.eval.reader import Reader

    declare_torchvision_ops()  # before transformers is imported
    renderer = ChatRenderer(folder)
    reader = Reader(folder)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as progress:
        task = progress.add_task("asking for planted facts", total=None)
        return run(
            reader,
            renderer,
            identity,
            histories=histories,
            seed=seed,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )


def _require_writable(path: Path) -> None:
    """Find out before the minutes are spent.

    Raises:
        ConfigError: a file cannot be put there.
    """
    if path.is_dir():
        raise ConfigError(f"{path} is a folder", hint=_OUT_HINT)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}", hint=_OUT_HINT) from error


def _write(path: Path, text: str) -> None:
    """All or nothing: a server may be reading the old one.

    Raises:
        ConfigError: the disk refuses.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise ConfigError(f"{path} cannot be written: {error}", hint=_OUT_HINT) from error


def _heads_table(found: Calibration) -> Table:
    profile = found.profile
    group = profile.query_heads // profile.kv_heads
    table = Table(title="Heads that find content")
    for column in ("layer", "query head", "KV head", "mean 1/rank alone"):
        table.add_column(column, justify="right")
    for layer, head in profile.content_heads:
        alone = found.alone[layer, head]
        table.add_row(str(layer), str(head), str(head // group), f"{alone:.2f}")
    return table


def _figures_table(found: Calibration) -> Table:
    table = Table(title="Facts found, of forms that were not calibrated with")
    table.add_column("questions")
    table.add_column("heads")
    for column in ("first 1", "first 3", "first 8", "mean 1/rank"):
        table.add_column(column, justify="right")
    for kind in found.development:
        table.add_row(kind.kind, "chosen", *_cells(kind.chosen))
        table.add_row("", "all", *_cells(kind.every_head))
    return table


def _cells(figures: Figures) -> list[str]:
    shares = (figures.recall_1, figures.recall_3, figures.recall_8)
    return [*(f"{share:.0%}" for share in shares), f"{figures.reciprocal_rank:.2f}"]
