"""What a session log and the ranks' disks together say: the session as it last was. Pure.

The log names blocks a little before every rank has made them durable. The session goes on from
the newest commit that is whole: whose blocks all ranks hold. What was committed behind it is cut
and computed again, as if it had never been; so the session decides as it would have decided.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvws.session.commit import ROOT, BlockRecord, Commit, StepRecord, ThreadRecord
from kvws.session.family import is_aside
from kvws.session.workspace import Thread, Workspace


@dataclass(frozen=True)
class Restored:
    """What came back, and what did not.

    Attributes:
        steps: those that ended, in order.
        notes: of the session's owner, in order.
        blocks: blocks that are back with their bytes.
        lost: blocks whose bytes are gone: computed again when a view needs them.
        to_forget: numbers under which a rank may hold bytes that the session has no use for,
            ascending: of blocks that are cut or unknown, or that not every rank holds.
        cut_blocks: blocks of commits that were cut because a rank lacks some of their blocks, or
            that follow a block which is gone with a damaged commit.
        void_from: file offset of the first commit that was cut; None if none was.
        acknowledged_lost: blocks that were acknowledged as durable, and are not.
    """

    steps: tuple[StepRecord, ...] = ()
    notes: tuple[Any, ...] = ()
    blocks: int = 0
    lost: tuple[int, ...] = ()
    to_forget: tuple[int, ...] = ()
    cut_blocks: int = 0
    void_from: int | None = None
    acknowledged_lost: int = 0


def restore(
    name: str, log: Sequence[tuple[int, Commit]], held: frozenset[int]
) -> tuple[Workspace, Restored]:
    """Rebuild a workspace.

    Args:
        log: (file offset, commit), in file order; damaged ones are missing.
        held: blocks that every rank holds durably.
    """
    valid = _without_void(log)
    whole = _whole_commits([commit for _, commit in valid], held)
    kept = [commit for _, commit in valid[:whole]]
    cut = [commit for _, commit in valid[whole:]]
    blocks = _tree(kept)
    known = {b.number: b for _, commit in log for b in (*commit.announced, *_blocks_of(commit))}
    retired = {number: block for number, block in known.items() if number not in blocks}
    numbers = known.keys() | held
    unreachable = {b.number for commit in kept for b in _blocks_of(commit)} - blocks.keys()
    acknowledged = _acknowledged(log, valid)

    workspace = Workspace.restored(
        name, blocks, retired, block_count=1 + max(numbers, default=-1)
    )
    workspace.acknowledged_before = acknowledged | (held & blocks.keys())
    for thread in _threads(kept, blocks):
        workspace.threads[thread.name] = thread
    for record in _records_of_threads(kept):
        if record.head in blocks:
            workspace.remember_line(record.name, record.head)
    workspace.check_integrity()
    return workspace, Restored(
        steps=tuple(commit.step for commit in kept if commit.step is not None),
        notes=tuple(commit.note for commit in kept if commit.note is not None),
        blocks=len(held & blocks.keys()),
        lost=tuple(sorted(blocks.keys() - held)),
        to_forget=tuple(sorted(numbers - (held & blocks.keys()))),
        cut_blocks=sum(len(commit.blocks) for commit in cut) + len(unreachable),
        void_from=valid[whole][0] if cut else None,
        acknowledged_lost=len(acknowledged - held),
    )


def _without_void(log: Sequence[tuple[int, Commit]]) -> list[tuple[int, Commit]]:
    """The log without the commits that an earlier restart cut."""
    valid: list[tuple[int, Commit]] = []
    for offset, commit in log:
        if commit.void_from is not None:
            while valid and valid[-1][0] >= commit.void_from:
                valid.pop()
        valid.append((offset, commit))
    return valid


def _whole_commits(commits: Sequence[Commit], held: frozenset[int]) -> int:
    """Length of the longest prefix whose newest blocks are all held.

    Commits without blocks stand and fall with those before them.
    """
    length = len(commits)
    for index in reversed(range(len(commits))):
        numbers = [block.number for block in commits[index].blocks]
        if numbers:
            if held.issuperset(numbers):
                break
            length = index
    return length


def _blocks_of(commit: Commit) -> Iterable[BlockRecord]:
    return (*commit.unsettled, *commit.blocks)


def _tree(commits: Sequence[Commit]) -> dict[int, BlockRecord]:
    """The blocks whose whole lineage is known, each behind its parent.

    No number stands for two blocks, and no block has two numbers.
    """
    blocks: dict[int, BlockRecord] = {}
    places: dict[tuple[int, tuple[int, ...]], int] = {}
    for commit in commits:
        for block in _blocks_of(commit):
            reachable = block.parent == ROOT or (
                block.parent in blocks and block.parent < block.number
            )
            number = places.get((block.parent, block.tokens), block.number)
            if reachable and number == block.number and block.number not in blocks:
                blocks[block.number] = block
                places[block.parent, block.tokens] = block.number
    return blocks


def _threads(commits: Sequence[Commit], blocks: Mapping[int, BlockRecord]) -> list[Thread]:
    """Every thread as the newest commit that names it left it."""
    newest = {record.name: record for record in _records_of_threads(commits)}
    unfinished: dict[str, set[int]] = {name: set() for name in newest}
    for commit in commits:
        if commit.thread is None or commit.thread.name not in newest:
            continue
        if commit.step is None:
            numbers = {block.number for block in commit.blocks}
            unfinished[commit.thread.name].update(numbers & blocks.keys())
        else:
            unfinished[commit.thread.name].clear()
    return [
        Thread(
            name=record.name,
            line=_line_to(record.head, blocks),
            view=tuple(number for number in dict.fromkeys(record.view) if number in blocks),
            kept_last_view=record.kept_last_view,
            unfinished=unfinished[record.name],
        )
        for record in newest.values()
    ]


def _records_of_threads(commits: Sequence[Commit]) -> Iterable[ThreadRecord]:
    """Oldest first. A side call's client went away with the process: nothing of it is left."""
    for commit in commits:
        if commit.thread is not None and not is_aside(commit.thread.name):
            yield commit.thread


def _line_to(head: int, blocks: Mapping[int, BlockRecord]) -> tuple[int, ...]:
    """The path from the root; empty if the head is gone."""
    line: list[int] = []
    block = blocks.get(head)
    while block is not None:
        line.append(block.number)
        block = blocks.get(block.parent)
    return tuple(reversed(line))


def _acknowledged(
    log: Sequence[tuple[int, Commit]], valid: Sequence[tuple[int, Commit]]
) -> frozenset[int]:
    """Blocks of commits before the newest offset that was acknowledged."""
    end = max((commit.acknowledged_to for _, commit in log), default=0)
    return frozenset(
        block.number for offset, commit in valid if offset < end for block in commit.blocks
    )
