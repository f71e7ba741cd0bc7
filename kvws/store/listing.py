"""The workspaces of a store directory, as anybody may look at them: nothing here changes a file.

Needs no lock, so a directory can be listed while a server owns it.
"""

from __future__ import annotations

import difflib
import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from pathlib import Path

from kvws.errors import ConfigError, StoreError, StoreFormatError, UnsafeStore
from kvws.store.identity import ModelIdentity
from kvws.store.manifest import MANIFEST_NAME, TEMPORARY_SUFFIX, read_manifest
from kvws.store.record import scan_frames
from kvws.store.storage import Storage

WORKSPACE_KIND = "kvws-workspace"
_FOLDER_NAME = re.compile(r"[0-9a-f]{32}")
_RANK_NAME = re.compile(r"rank-(0|[1-9][0-9]{0,3})")
_MIN_PREFIX_DIGITS = 4
_MAX_MANIFEST_BYTES = 1 << 20
_STAT_BLOCK_BYTES = 512


class WorkspaceState(StrEnum):
    OK = "ok"
    OTHER_FORMAT = "other format"
    DAMAGED = "damaged"


@dataclass(frozen=True)
class WorkspaceEntry:
    """One workspace on the disk.

    Attributes:
        name: as its session calls it; the folder's name when that cannot be read.
        path: its folder.
        state: whether this program can use it.
        identity: the model it was written with; None if it cannot be read.
        problem: what is wrong with it, in words; None if nothing is.
        disk_bytes: space its files take.
        modified_s: when a file of it was last written, seconds since 1970.
    """

    name: str
    path: Path
    state: WorkspaceState
    identity: ModelIdentity | None
    problem: str | None
    disk_bytes: int
    modified_s: float


@dataclass(frozen=True)
class WorkspaceManifest:
    name: str
    identity: ModelIdentity


def folder_name(name: str) -> str:
    """The folder of a workspace: 32 hex digits, whatever characters its name has."""
    return blake2b(name.encode(), digest_size=16).hexdigest()


def is_folder_name(name: str) -> bool:
    return _FOLDER_NAME.fullmatch(name) is not None


def list_workspaces(root: Path, storage: Storage) -> list[WorkspaceEntry]:
    """All workspaces, last written first. A bad folder is an entry with a problem, no error.

    Raises:
        ConfigError: the directory itself cannot be read.
    """
    try:
        names = [name for name in storage.list_directory(root) if is_folder_name(name)]
    except OSError as error:
        raise ConfigError(
            f"{root} cannot be read: {error.strerror}", hint="name another --disk-dir"
        ) from error
    entries = [_entry(root / name, storage) for name in names]
    return sorted(entries, key=lambda entry: (-entry.modified_s, entry.name))


def find_workspace(entries: Sequence[WorkspaceEntry], wanted: str) -> WorkspaceEntry:
    """The workspace with that folder, or of that name, or the only one whose folder begins so.

    Raises:
        ConfigError: there is none, or there are several.
    """
    digits = wanted.lower()
    exact = [entry for entry in entries if entry.path.name == digits]
    exact += [entry for entry in entries if entry.name == wanted]
    if exact:
        return exact[0]
    long_enough = len(digits) >= _MIN_PREFIX_DIGITS
    prefixed = [e for e in entries if long_enough and e.path.name.startswith(digits)]
    if len(prefixed) == 1:
        return prefixed[0]
    if prefixed:
        names = ", ".join(entry.path.name for entry in prefixed)
        raise ConfigError(f"{wanted!r} begins several workspaces", hint=f"one of {names}")
    known = [entry.name for entry in entries]
    near = difflib.get_close_matches(wanted, known, n=3)
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "see `kvws sessions ls`"
    raise ConfigError(f"there is no workspace {wanted!r}", hint=hint)


def read_workspace_manifest(path: Path, storage: Storage) -> WorkspaceManifest:
    """Name and model of the workspace in a folder.

    Raises:
        StoreFormatError: its manifest is missing, damaged, newer or another folder's.
        UnsafeStore: the folder is a link, not ours or open to others.
        StoreError: the disk's error.
    """
    try:
        require_private(path)
        content = read_manifest(storage, path / MANIFEST_NAME, kind=WORKSPACE_KIND)
    except FileNotFoundError as error:
        raise StoreFormatError(
            f"{path} has no {MANIFEST_NAME}", hint="restore the file, or remove the workspace"
        ) from error
    except (OSError, EOFError) as error:
        raise StoreError(f"{path} cannot be read: {error}", hint="check the disk") from error
    name = content.get("name")
    if not isinstance(name, str) or not is_workspace_name(name):
        raise StoreFormatError(f"{path} does not say which workspace it is")
    if folder_name(name) != path.name:
        raise StoreFormatError(
            f"{path} belongs to another folder",
            hint=f"a copy cannot be used; the workspace's folder is {folder_name(name)}",
        )
    try:
        return WorkspaceManifest(name, ModelIdentity.from_dict(content.get("identity")))
    except StoreFormatError as error:
        raise StoreFormatError(f"{path}: {error}") from error


def is_workspace_name(name: str) -> bool:
    """Printable Unicode text of 1 to 512 characters: it is shown to people as it is."""
    return 0 < len(name) <= 512 and name.isprintable()


def rank_directories(workspace: Path) -> list[tuple[int, Path]]:
    """(rank, folder) of the rank stores in a workspace, by rank."""
    found = [(_RANK_NAME.fullmatch(child.name), child) for child in _children(workspace)]
    return sorted((int(match[1]), child) for match, child in found if match)


def is_unfinished(path: Path) -> bool:
    """Whether a workspace's folder was left by a process that died before it wrote the manifest.
    """
    return set(os.listdir(path)) <= {MANIFEST_NAME + TEMPORARY_SUFFIX}


def require_private(path: Path) -> None:
    """Refuse a folder that others may have put there, or can write to.

    Raises:
        UnsafeStore: a symbolic link, another user's, or writable by group or others.
        StoreFormatError: no folder at all.
        OSError: FileNotFoundError, …
    """
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise UnsafeStore(
            f"{path} is a symbolic link", hint=f"name the folder itself: {path.resolve()}"
        )
    if not stat.S_ISDIR(status.st_mode):
        raise StoreFormatError(f"{path} is no folder", hint="name an empty folder")
    if status.st_uid != os.geteuid():
        raise UnsafeStore(
            f"{path} belongs to user {status.st_uid}, not to {os.geteuid()}",
            hint=f"name a folder of your own, or run `chown {os.geteuid()} {path}`",
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UnsafeStore(
            f"others can write to {path} (mode {stat.S_IMODE(status.st_mode):04o})",
            hint=f"run `chmod go-w {path}`",
        )


def disk_usage(path: Path) -> tuple[int, float]:
    """Bytes that a folder and what is in it take, and when it was last written."""
    used_bytes, modified_s = 0, 0.0
    for each in (path, *_descendants(path)):
        try:
            status = each.lstat()
        except FileNotFoundError:
            continue  # its owner deleted it meanwhile
        used_bytes += status.st_blocks * _STAT_BLOCK_BYTES
        modified_s = max(modified_s, status.st_mtime)
    return used_bytes, modified_s


def _entry(path: Path, storage: Storage) -> WorkspaceEntry:
    name, identity, problem, state = path.name, None, None, WorkspaceState.OK
    try:
        manifest = read_workspace_manifest(path, storage)
        name, identity = manifest.name, manifest.identity
    except StoreError as error:
        problem = str(error)
        intact = _has_intact_manifest(path, storage)
        state = WorkspaceState.OTHER_FORMAT if intact else WorkspaceState.DAMAGED
    used_bytes, modified_s = disk_usage(path)
    return WorkspaceEntry(name, path, state, identity, problem, used_bytes, modified_s)


def _has_intact_manifest(path: Path, storage: Storage) -> bool:
    """Whether a manifest that was refused is whole all the same: of another version or kind."""
    try:
        require_private(path)
        file = storage.open_log(path / MANIFEST_NAME)
    except (OSError, StoreError):
        return False
    try:
        data = bytearray(min(file.size(), _MAX_MANIFEST_BYTES))
        file.read([memoryview(data)], 0)
    except OSError:
        return False
    finally:
        file.close()
    scan = scan_frames(memoryview(data))
    return len(scan.frames) == 1 and scan.torn_bytes == scan.skipped_bytes == 0


def _children(path: Path) -> list[Path]:
    try:
        return sorted(path.iterdir()) if not path.is_symlink() else []
    except OSError:
        return []


def _descendants(path: Path) -> Iterator[Path]:
    for child in _children(path):
        yield child
        yield from _descendants(child)
