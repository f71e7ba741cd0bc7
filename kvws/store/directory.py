"""The store directory: who owns it, which workspaces it has, and how they come and go."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from kvws.errors import ConfigError, KvwsError, OtherModel, StoreFormatError
from kvws.store.identity import ModelIdentity
from kvws.store.listing import (
    WORKSPACE_KIND,
    WorkspaceEntry,
    disk_usage,
    find_workspace,
    folder_name,
    is_folder_name,
    is_unfinished,
    is_workspace_name,
    list_workspaces,
    rank_directories,
    read_workspace_manifest,
    require_private,
)
from kvws.store.lock import LOCK_NAME, DirectoryLock, is_ours
from kvws.store.maintenance import compact_workspace
from kvws.store.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    TEMPORARY_SUFFIX,
    write_manifest,
)
from kvws.store.storage import Storage

_REMOVED_PREFIX = ".removed-"
_IN_ANY_STORE = frozenset({LOCK_NAME, "lost+found"})
_OWNER_CAN_USE = stat.S_IRUSR | stat.S_IWUSR | stat.S_IXUSR


@dataclass(frozen=True)
class GarbageReport:
    """What `collect_garbage` did.

    Attributes:
        removals: half-done removals that it finished.
        unfinished: workspaces without a manifest, left by a process that died making them.
        temporary_files: files of interrupted writes.
        freed_bytes: disk space given back, what compaction freed included.
        problems: (workspace, text) of those it left as they are.
    """

    removals: int
    unfinished: int
    temporary_files: int
    freed_bytes: int
    problems: tuple[tuple[str, str], ...]


class StoreDirectory:
    """A store directory that this process owns until `close`.

    Not thread-safe. Workspaces that are removed or compacted must not be open.
    """

    def __init__(self, root: Path, storage: Storage, lock: DirectoryLock) -> None:
        self.root = root
        self.storage = storage
        self._lock = lock

    @classmethod
    def open(cls, root: Path, storage: Storage, *, create: bool = True) -> StoreDirectory:
        """Take a directory, and make it if it is missing.

        Raises:
            ConfigError: it is missing and not to be made, or cannot be written.
            UnsafeStore: a symbolic link, another user's, or others can write to it.
            StoreFormatError: a file, or a folder with other things in it.
            StoreInUse: another process owns it.
        """
        root = Path(os.path.abspath(root))
        if create:
            _make(root, storage)
        require_store(root)
        require_writable(root)
        lock = DirectoryLock(root)
        try:
            storage.sync_directory(root)
        except BaseException:
            lock.close()
            raise
        return cls(root, storage, lock)

    def close(self) -> None:
        """Give the directory up; a second call does nothing."""
        self._lock.close()

    def __enter__(self) -> StoreDirectory:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def workspace_path(self, name: str) -> Path:
        """Folder of a workspace, whether it is there or not. The name is never part of a path.

        Raises:
            ConfigError: the name is empty, longer than 512 characters or not printable.
        """
        if not is_workspace_name(name):
            raise ConfigError(
                f"a workspace cannot be named {name[:64]!r}",
                hint="use 1 to 512 printable characters",
            )
        return self.root / folder_name(name)

    def open_workspace(self, name: str, identity: ModelIdentity) -> Path:
        """Folder of a workspace that the model can use, made durably at first use.

        Raises:
            OtherModel: it was written with another model or layout.
            StoreFormatError: it is damaged, or of a newer format version.
            UnsafeStore: its folder is a link, not ours or open to others.
            OSError: the disk's error.
        """
        path = self.workspace_path(name)
        if not self.storage.exists(path):
            self.storage.make_directory(path)
        require_private(path)
        if is_unfinished(path):
            content = {
                "kind": WORKSPACE_KIND,
                "version": FORMAT_VERSION,
                "name": name,
                "identity": identity.as_dict(),
            }
            write_manifest(self.storage, path / MANIFEST_NAME, content)
        stored = read_workspace_manifest(path, self.storage).identity
        differences = stored.differences(identity)
        if differences:
            raise OtherModel(
                f"workspace {name!r} was written with {stored.model}: {'; '.join(differences)}",
                hint="use that model and layout, another workspace name, or remove it with "
                f"`kvws sessions rm {path.name}`",
            )
        # Also when it was there: its maker may have died before it got here.
        self.storage.sync_directory(path)
        self.storage.sync_directory(self.root)
        return path

    def list_workspaces(self) -> list[WorkspaceEntry]:
        """See `kvws.store.listing.list_workspaces`."""
        return list_workspaces(self.root, self.storage)

    def remove(self, wanted: str) -> WorkspaceEntry:
        """Delete a workspace and its bytes. After a crash it is whole, or gone for good.

        Args:
            wanted: its name, or the first hex digits of its folder.

        Raises:
            ConfigError: there is no such workspace, or several.
            OSError: the disk's error; what is left goes with the next `collect_garbage`.
        """
        entry = find_workspace(self.list_workspaces(), wanted)
        doomed = self.root / f"{_REMOVED_PREFIX}{entry.path.name}"
        self._delete(doomed)  # the rest of an earlier workspace of that name
        self.storage.rename(entry.path, doomed)
        self.storage.sync_directory(self.root)
        self._delete(doomed)
        self.storage.sync_directory(self.root)
        return entry

    def collect_garbage(self) -> GarbageReport:
        """Finish what was interrupted, and give disk space without live data back.

        Raises:
            OSError: the disk's error.
        """
        before_bytes, _ = disk_usage(self.root)
        removals = unfinished = temporary_files = 0
        problems: list[tuple[str, str]] = []
        for name in self.storage.list_directory(self.root):
            path = self.root / name
            if _is_removed(name):
                self._delete(path)
                removals += 1
            elif is_folder_name(name) and _is_folder(path) and is_unfinished(path):
                self._delete(path)
                unfinished += 1
        self.storage.sync_directory(self.root)
        for entry in self.list_workspaces():
            if entry.problem is not None:
                problems.append((entry.name, entry.problem))
                continue
            try:
                temporary_files += self._delete_temporary_files(entry.path)
                compact_workspace(entry.path, self.storage)
            except (KvwsError, OSError) as error:
                problems.append((entry.name, str(error)))
        after_bytes, _ = disk_usage(self.root)
        freed_bytes = max(0, before_bytes - after_bytes)
        return GarbageReport(
            removals, unfinished, temporary_files, freed_bytes, tuple(problems)
        )

    def _delete_temporary_files(self, workspace: Path) -> int:
        """Delete what interrupted writes left; returns how many files that were."""
        deleted = 0
        for folder in (workspace, *(path for _, path in rank_directories(workspace))):
            require_private(folder)
            for name in self.storage.list_directory(folder):
                if name.endswith(TEMPORARY_SUFFIX):
                    self.storage.unlink(folder / name)
                    deleted += 1
            self.storage.sync_directory(folder)
        return deleted

    def _delete(self, path: Path) -> None:
        """Delete a file, a link or a folder with all that is in it; links are not followed."""
        if not self.storage.exists(path):
            return
        if not _is_folder(path):
            self.storage.unlink(path)
            return
        for name in self.storage.list_directory(path):
            self._delete(path / name)
        self.storage.remove_directory(path)


def require_store(root: Path) -> None:
    """Refuse what is no store directory of ours; an empty folder may become one.

    Raises:
        ConfigError: it is missing or cannot be read.
        UnsafeStore: a symbolic link, another user's, or others can write to it.
        StoreFormatError: a file, or a folder with other things in it.
    """
    try:
        require_private(root)
        names = set(os.listdir(root))
    except OSError as error:
        raise ConfigError(
            f"{root} cannot be read: {error.strerror}", hint="name another --disk-dir"
        ) from error
    foreign = {name for name in names - _IN_ANY_STORE if not _is_store_entry(root / name)}
    if foreign and not is_ours(root):
        raise StoreFormatError(
            f"{root} holds other things, such as {min(foreign)!r}, and no store of kvws",
            hint="name an empty folder, or one that does not exist yet",
        )


def require_writable(root: Path) -> None:
    """Refuse a folder that we cannot write to, by its mode bits even for root.

    Raises:
        ConfigError: it is read-only.
    """
    mode = root.stat().st_mode
    if mode & _OWNER_CAN_USE != _OWNER_CAN_USE or not os.access(root, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{root} is read-only", hint=f"run `chmod u+rwx {root}`, or name another --disk-dir"
        )


def _make(root: Path, storage: Storage) -> None:
    """Make a folder and the ones above it that are missing, each durably."""
    if os.path.lexists(root):
        return
    _make(root.parent, storage)
    try:
        storage.make_directory(root)
        storage.sync_directory(root.parent)
    except OSError as error:
        raise ConfigError(
            f"{root} cannot be made: {error.strerror}", hint="name another --disk-dir"
        ) from error


def _is_store_entry(path: Path) -> bool:
    """Whether something that a directory without our mark holds is a part of a store."""
    is_workspace = is_folder_name(path.name) and os.path.lexists(path / MANIFEST_NAME)
    return is_workspace or _is_removed(path.name)


def _is_removed(name: str) -> bool:
    return name.startswith(_REMOVED_PREFIX) and is_folder_name(name[len(_REMOVED_PREFIX) :])


def _is_folder(path: Path) -> bool:
    return stat.S_ISDIR(path.lstat().st_mode)
