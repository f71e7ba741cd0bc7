"""One commit of the session log: what became true at once, and its bytes.

A commit's parts are durable together or not at all: the blocks that a pass registered, the state
of its thread behind them and, at the end of a step, the step's report. So a session that is
continued from any commit continues from a moment that it was really in.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvws.blocks.key import BLOCK_TOKENS
from kvws.errors import StoreFormatError
from kvws.observe.step_report import StepReport, report_from_plain, report_to_plain
from kvws.store.record import pack, unpack

ROOT = -1
"""Parent of a block that begins a line; head of an empty line."""

_BLOCK_NUMBERS_END = 1 << 26
"""Two billion tokens: a number beyond it is damage."""


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """A block of the log. `parent`: the block before it, or ROOT. `tokens`: its 32 ids."""

    number: int
    parent: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ThreadRecord:
    """The state of a thread. `head`: the newest block of its line, or ROOT."""

    name: str
    head: int
    view: tuple[int, ...]
    kept_last_view: bool


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step that ended.

    Attributes:
        blocks: of the workspace after it.
        note: what the step's caller wanted kept with it; plain data.
    """

    report: StepReport
    blocks: int
    note: Any


@dataclass(frozen=True, slots=True)
class Commit:
    """What became true at once.

    Attributes:
        announced: about to be registered: from here on a rank may hold bytes under their numbers.
        blocks: registered by one pass, and resident when this was written.
        unsettled: numbered by a pass that was cut off: in the log, resident or not.
        thread: the thread that wrote them, behind them.
        step: that thread's step, if it ended with this.
        note: plain data of the session's owner.
        void_from: the commits from this file offset up to here are void.
        acknowledged_to: commits before this file offset were durable with all their blocks.
        synced_to: the file was durable up to this offset.
    """

    announced: tuple[BlockRecord, ...] = ()
    blocks: tuple[BlockRecord, ...] = ()
    unsettled: tuple[BlockRecord, ...] = ()
    thread: ThreadRecord | None = None
    step: StepRecord | None = None
    note: Any = None
    void_from: int | None = None
    acknowledged_to: int = 0
    synced_to: int = 0


def encode_commit(commit: Commit) -> bytes:
    """The body of a commit's frame."""
    thread, step = commit.thread, commit.step
    message: dict[str, Any] = {
        "announced": _pack_blocks(commit.announced),
        "blocks": _pack_blocks(commit.blocks),
        "unsettled": _pack_blocks(commit.unsettled),
        "thread": thread
        and [thread.name, thread.head, _pack_numbers(thread.view), thread.kept_last_view],
        "step": step and [report_to_plain(step.report), step.blocks, step.note],
        "note": commit.note,
        "void_from": commit.void_from,
        "acknowledged_to": commit.acknowledged_to or None,
        "synced_to": commit.synced_to or None,
    }
    return pack({name: value for name, value in message.items() if value is not None})


def decode_commit(body: bytes) -> Commit:
    """The commit that `encode_commit` was given.

    Raises:
        StoreFormatError: the body is no commit.
    """
    message = unpack(body)
    try:
        thread, step = message.get("thread"), message.get("step")
        void_from = message.get("void_from")
        acknowledged_to, synced_to = message.get("acknowledged_to", 0), message.get("synced_to", 0)
        if not all(isinstance(n, int) for n in (void_from or 0, acknowledged_to, synced_to)):
            raise ValueError("an offset is no number")
        return Commit(
            announced=_unpack_blocks(message.get("announced")),
            blocks=_unpack_blocks(message.get("blocks")),
            unsettled=_unpack_blocks(message.get("unsettled")),
            thread=None if thread is None else _unpack_thread(*thread),
            step=None if step is None else _unpack_step(*step),
            note=message.get("note"),
            void_from=void_from,
            acknowledged_to=acknowledged_to,
            synced_to=synced_to,
        )
    except (AttributeError, TypeError, ValueError, struct.error) as error:
        raise StoreFormatError(f"a record of the session log is no commit: {error}") from error


def _pack_blocks(blocks: Sequence[BlockRecord]) -> list[bytes] | None:
    """Numbers, parents and token ids, each as u32 LE, or None for no blocks. ROOT wraps."""
    if not blocks:
        return None
    tokens = b"".join(_pack_numbers(block.tokens) for block in blocks)
    parents = [block.parent & 0xFFFFFFFF for block in blocks]
    return [_pack_numbers([block.number for block in blocks]), _pack_numbers(parents), tokens]


def _unpack_blocks(packed: list[bytes] | None) -> tuple[BlockRecord, ...]:
    if packed is None:
        return ()
    numbers, parents, tokens = map(_unpack_numbers, packed)
    if not len(numbers) == len(parents) == len(tokens) / BLOCK_TOKENS:
        raise ValueError("blocks without parent or tokens")
    return tuple(
        BlockRecord(
            _checked(number),
            ROOT if parent == 0xFFFFFFFF else _checked(parent),
            tokens[i * BLOCK_TOKENS : (i + 1) * BLOCK_TOKENS],
        )
        for i, (number, parent) in enumerate(zip(numbers, parents, strict=True))
    )


def _unpack_thread(name: Any, head: Any, view: Any, kept_last_view: Any) -> ThreadRecord:
    if not isinstance(name, str) or not isinstance(head, int):
        raise ValueError("a thread without name or head")
    return ThreadRecord(name, head, _unpack_numbers(view), bool(kept_last_view))


def _unpack_step(report: Any, blocks: Any, note: Any) -> StepRecord:
    if not isinstance(blocks, int):
        raise ValueError("a step without a count of blocks")
    return StepRecord(report_from_plain(report), blocks, note)


def _checked(number: int) -> int:
    if number >= _BLOCK_NUMBERS_END:
        raise ValueError(f"there is no block {number}")
    return number


def _pack_numbers(numbers: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(numbers)}I", *numbers)


def _unpack_numbers(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(packed) // 4}I", packed)
