"""`kvws sessions`: what a store directory keeps of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from kvws.config import resolve_settings
from kvws.errors import ConfigError
from kvws.store.directory import StoreDirectory, require_store
from kvws.store.listing import WorkspaceEntry, find_workspace, list_workspaces
from kvws.store.maintenance import WorkspaceCheck, check_workspace, count_blocks
from kvws.store.posix import PosixStorage

Command = TypeVar("Command", bound=Callable[..., Any])

_disk_dir_option = click.option("--disk-dir", help="Folder of the disk tier.")
_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group()
def sessions() -> None:
    """Sessions on disk."""


@sessions.command("ls")
@_disk_dir_option
@_json_option
def list_sessions(disk_dir: str | None, as_json: bool) -> None:
    """List them, last written first. Works while a server uses the directory."""
    root = _root(disk_dir)
    require_store(root)
    storage = PosixStorage(root)
    entries = list_workspaces(root, storage)
    blocks = [None if entry.problem else count_blocks(entry.path, storage) for entry in entries]
    if as_json:
        _print_json([_listed(*pair) for pair in zip(entries, blocks, strict=True)])
    else:
        _print_table(_list_table(entries, blocks))
        _print_problems((entry.name, entry.problem) for entry in entries if entry.problem)


@sessions.command("rm")
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@_disk_dir_option
@click.option("--yes", is_flag=True, help="Do not ask.")
def remove(names: tuple[str, ...], disk_dir: str | None, yes: bool) -> None:
    """Delete sessions with all their bytes. NAME may be the first digits of a folder."""
    with _open(disk_dir) as directory:
        doomed = _find(directory, names)
        if not yes:
            listed = ", ".join(f"{entry.name} ({_size(entry.disk_bytes)})" for entry in doomed)
            click.confirm(f"Delete {listed}?", abort=True, err=True)
        for entry in doomed:
            directory.remove(entry.path.name)
            click.echo(f"deleted {entry.name}, {_size(entry.disk_bytes)}")


@sessions.command()
@click.argument("names", metavar="[NAME]...", nargs=-1)
@_disk_dir_option
@_json_option
def verify(names: tuple[str, ...], disk_dir: str | None, as_json: bool) -> None:
    """Read and check every block of all or some sessions; exit code 1 if any is damaged."""
    with _open(disk_dir) as directory:
        entries = _find(directory, names) if names else directory.list_workspaces()
        checks = _check(entries, directory)
    if as_json:
        _print_json([_checked(check) for check in checks])
    else:
        _print_table(_check_table(checks))
        _print_problems((check.entry.name, text) for check in checks for text in _texts(check))
    if any(check.is_damaged for check in checks):
        sys.exit(1)


@sessions.command("gc")
@_disk_dir_option
def collect_garbage(disk_dir: str | None) -> None:
    """Finish interrupted deletions, and give disk space without live blocks back."""
    with _open(disk_dir) as directory:
        report = directory.collect_garbage()
    click.echo(
        f"freed {_size(report.freed_bytes)}: "
        f"{_several(report.removals, 'interrupted deletion')}, "
        f"{_several(report.unfinished, 'unfinished session')}, "
        f"{_several(report.temporary_files, 'temporary file')}"
    )
    _print_problems(report.problems)


def _root(disk_dir: str | None) -> Path:
    """The store directory that is set.

    Raises:
        ConfigError: none is.
    """
    root = resolve_settings({"disk_dir": disk_dir}).settings.store_directory
    if root is None:
        raise ConfigError(
            "no store directory is set",
            hint="give --disk-dir, or set KVWS_DISK_DIR or disk_dir in kvws.toml",
        )
    return root


def _open(disk_dir: str | None) -> StoreDirectory:
    root = _root(disk_dir)
    return StoreDirectory.open(root, PosixStorage(root), create=False)


def _find(directory: StoreDirectory, names: Sequence[str]) -> list[WorkspaceEntry]:
    """The sessions meant, each once; all are found before any is touched."""
    entries = directory.list_workspaces()
    found = [find_workspace(entries, name) for name in names]
    return list(dict.fromkeys(found))


def _check(entries: Sequence[WorkspaceEntry], directory: StoreDirectory) -> list[WorkspaceCheck]:
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as progress:
        return [_check_one(entry, directory, progress) for entry in entries]


def _check_one(
    entry: WorkspaceEntry, directory: StoreDirectory, progress: Progress
) -> WorkspaceCheck:
    ranks = entry.identity.ranks if entry.identity else 0
    total = (count_blocks(entry.path, directory.storage) or 0) * ranks
    task = progress.add_task(escape(entry.name), total=total)
    return check_workspace(
        entry, directory.storage, lambda blocks: progress.advance(task, blocks)
    )


def _tokens(entry: WorkspaceEntry, blocks: int | None) -> int | None:
    if blocks is None or entry.identity is None:
        return None
    return blocks * entry.identity.block_tokens


def _listed(entry: WorkspaceEntry, blocks: int | None) -> dict[str, Any]:
    return {
        "name": entry.name,
        "folder": entry.path.name,
        "blocks": blocks,
        "tokens": _tokens(entry, blocks),
        "disk_bytes": entry.disk_bytes,
        "model": entry.identity.as_dict() if entry.identity else None,
        "modified_s": entry.modified_s,
        "state": entry.state.value,
        "problem": entry.problem,
    }


def _checked(check: WorkspaceCheck) -> dict[str, Any]:
    return {
        "name": check.entry.name,
        "folder": check.entry.path.name,
        "damaged": check.is_damaged,
        "blocks": check.blocks,
        "corrupt_blocks": [list(each) for each in check.corrupt_blocks],
        "damaged_rows": [list(each) for each in check.damaged_rows],
        "lost_blocks": check.lost_blocks,
        "damaged_log_bytes": check.damaged_log_bytes,
        "problems": list(check.problems),
    }


def _texts(check: WorkspaceCheck) -> Iterator[str]:
    """What is wrong with a session, and what will come of it."""
    yield from check.problems
    damaged = {*check.corrupt_blocks, *check.damaged_rows}
    if damaged or check.lost_blocks:
        blocks = len(damaged) + check.lost_blocks
        yield (
            f"{_several(blocks, 'damaged block')}, never used: their tokens are computed again "
            "when the session needs them"
        )
    if check.damaged_log_bytes:
        yield (
            f"{_several(check.damaged_log_bytes, 'damaged byte')} in its logs: what they told is "
            "computed again when the session needs it"
        )


def _list_table(entries: Sequence[WorkspaceEntry], blocks: Sequence[int | None]) -> Table:
    table = _table("name", "blocks", "tokens", "size", "model", "modified", "state")
    for entry, count in zip(entries, blocks, strict=True):
        modified = datetime.fromtimestamp(entry.modified_s)
        table.add_row(
            Text(entry.name),
            _count(count),
            _count(_tokens(entry, count)),
            _size(entry.disk_bytes),
            Text(entry.identity.model if entry.identity else "?"),
            f"{modified:%Y-%m-%d %H:%M}",
            entry.state.value,
        )
    return table


def _check_table(checks: Sequence[WorkspaceCheck]) -> Table:
    table = _table("name", "blocks", "damaged blocks", "damaged rows", "lost blocks", "result")
    for check in checks:
        table.add_row(
            Text(check.entry.name),
            _count(check.blocks),
            _count(len(check.corrupt_blocks)),
            _count(len(check.damaged_rows)),
            _count(check.lost_blocks),
            "damaged" if check.is_damaged else "ok",
        )
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="bold")
    for column in columns:
        is_text = column in ("name", "model", "modified", "state", "result")
        table.add_column(column, justify="left" if is_text else "right", overflow="fold")
    return table


def _print_table(table: Table) -> None:
    Console(width=None if Console().is_terminal else 170).print(table)


def _print_problems(problems: Iterable[tuple[str, str]]) -> None:
    for name, problem in problems:
        click.echo(f"{name}: {problem}", err=True)


def _print_json(content: list[dict[str, Any]]) -> None:
    click.echo(json.dumps(content, indent=1))


def _count(count: int | None) -> str:
    return "?" if count is None else f"{count:,}"


def _several(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _size(size_bytes: int) -> str:
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:,.1f} GiB"
