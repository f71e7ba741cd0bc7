"""Looking after workspaces that no server has open: counting, checking, compacting."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from kvws.errors import KvwsError, StoreFormatError
from kvws.store.block_store import BlockStore
from kvws.store.index_records import replay
from kvws.store.listing import WorkspaceEntry, is_unfinished, rank_directories, require_private
from kvws.store.manifest import MANIFEST_NAME
from kvws.store.rank_manifest import read_layout
from kvws.store.record import Scan, scan_frames
from kvws.store.storage import Storage

SESSION_LOG_NAME = "session.log"
_MAX_LOG_BYTES = 1 << 30
"""An index of ten million blocks; what is larger is not read as a whole on somebody's word."""


@dataclass(frozen=True)
class WorkspaceCheck:
    """What `check_workspace` found.

    Attributes:
        blocks: checked, over all ranks.
        corrupt_blocks: (rank, number) of those whose payload is damaged or cannot be read.
        damaged_rows: (rank, number) of those whose retrieval row is.
        lost_blocks: blocks that an index names, and that have no place in the files.
        damaged_log_bytes: damaged bytes within the session log and the indexes.
        problems: what else is wrong, in words.
    """

    entry: WorkspaceEntry
    blocks: int
    corrupt_blocks: tuple[tuple[int, int], ...]
    damaged_rows: tuple[tuple[int, int], ...]
    lost_blocks: int
    damaged_log_bytes: int
    problems: tuple[str, ...]

    @property
    def is_damaged(self) -> bool:
        return bool(
            self.corrupt_blocks
            or self.damaged_rows
            or self.lost_blocks
            or self.damaged_log_bytes
            or self.problems
        )


class UnlimitedSpace:
    """The budget of a store that only shrinks."""

    def take(self, size_bytes: int) -> None: ...

    def give_back(self, size_bytes: int) -> None: ...


def count_blocks(workspace: Path, storage: Storage) -> int | None:
    """Blocks that rank 0 holds; None if its index cannot be read. Nothing is changed.

    Beside a server it counts what the server has written so far.
    """
    rank = workspace / "rank-0"
    try:
        if not storage.exists(rank) or is_unfinished(rank):
            return 0
        scan = _scan_log(rank / read_layout(storage, rank).index_name, storage)
    except (OSError, EOFError, StoreFormatError):
        return None
    return len(replay(body for _, body in scan.frames).blocks)


def check_workspace(
    entry: WorkspaceEntry, storage: Storage, on_progress: Callable[[int], None] | None = None
) -> WorkspaceCheck:
    """Read and check all of a workspace. What a crash left half-written is put in order first.

    Args:
        on_progress: called with the number of blocks checked since the last call.
    """
    blocks = lost_blocks = damaged_log_bytes = 0
    corrupt: list[tuple[int, int]] = []
    rows: list[tuple[int, int]] = []
    problems = [entry.problem] if entry.problem is not None else []
    if not problems:
        try:
            problems += _missing_ranks(entry)
            damaged_log_bytes += _scan_log(entry.path / SESSION_LOG_NAME, storage).skipped_bytes
            for rank, store in _open_ranks(entry.path, storage):
                report = store.verify(on_progress)
                blocks += report.checked_blocks
                corrupt += [(rank, number) for number in report.corrupt_blocks]
                rows += [(rank, number) for number in report.damaged_rows]
                lost_blocks += store.recovery.dropped_blocks
                damaged_log_bytes += store.recovery.skipped_bytes
        except (KvwsError, OSError, EOFError) as error:
            problems.append(str(error))
    return WorkspaceCheck(
        entry, blocks, tuple(corrupt), tuple(rows), lost_blocks, damaged_log_bytes, tuple(problems)
    )


def compact_workspace(workspace: Path, storage: Storage) -> None:
    """Give the disk space without live blocks back.

    Raises:
        StoreError: a rank's folder is not ours, damaged or newer.
        OSError: the disk's error.
    """
    for _, store in _open_ranks(workspace, storage):
        store.compact()


def _open_ranks(workspace: Path, storage: Storage) -> Iterator[tuple[int, BlockStore]]:
    """Open one rank's store after the other, as each was made."""
    for rank, directory in rank_directories(workspace):
        require_private(directory)
        if is_unfinished(directory):
            continue
        try:
            shape = read_layout(storage, directory).shape
        except FileNotFoundError as error:
            raise StoreFormatError(
                f"{directory} has no {MANIFEST_NAME}",
                hint="restore the file, or remove the workspace",
            ) from error
        store = BlockStore.open(storage, directory, shape, UnlimitedSpace(), rank=rank)
        with closing(store):
            yield rank, store


def _missing_ranks(entry: WorkspaceEntry) -> list[str]:
    """Ranks whose folder is gone while others are there."""
    assert entry.identity is not None, "only of a workspace without a problem"
    present = {rank for rank, _ in rank_directories(entry.path)}
    missing = sorted(set(range(entry.identity.ranks)) - present) if present else []
    return [f"the folder of rank {rank} is missing" for rank in missing]


def _scan_log(path: Path, storage: Storage) -> Scan:
    """The frames of a file, which is empty if it is missing."""
    try:
        file = storage.open_log(path)
    except FileNotFoundError:
        return scan_frames(b"")
    with closing(file):
        size_bytes = file.size()
        if size_bytes > _MAX_LOG_BYTES:
            raise StoreFormatError(f"{path} has {size_bytes} bytes", hint="check the disk")
        data = bytearray(size_bytes)
        if data:
            file.read([memoryview(data)], 0)
        return scan_frames(memoryview(data))
