"""How many of a step's new tokens are prefilled ahead, as blocks, before the query is asked."""

from __future__ import annotations

from collections.abc import Sequence

from kvws.blocks.key import BLOCK_TOKENS
from kvws.session.workspace import Workspace


def ahead_of_query(pending_tokens: int, query_tokens: int) -> int:
    """Tokens to ingest so that the rest is a query of at most `query_tokens`.

    Whole blocks only, so that log blocks and view pages stay aligned; the rest keeps at least
    one token.
    """
    excess = pending_tokens - query_tokens
    if excess <= 0:
        return 0
    blocks = -(-excess // BLOCK_TOKENS)
    return min(blocks, (pending_tokens - 1) // BLOCK_TOKENS) * BLOCK_TOKENS


def current_view(view: tuple[int, ...], line: tuple[int, ...]) -> tuple[int, ...] | None:
    """The page prefix of a view that ends with the newest block of a line: still on the device.

    None when the view does not hold that block: it belongs to another branch, or to none yet.
    """
    if not line:
        return ()
    if line[-1] not in view:
        return None
    return view[: view.index(line[-1]) + 1]


def grown_view(view: tuple[int, ...], new: tuple[int, ...]) -> tuple[int, ...]:
    """A view with the blocks that were computed right behind it.

    A history that repeats itself can recall a block and then compute it once more: the view keeps
    it where it was.
    """
    return view if set(view) & set(new) else view + new


def window(line: tuple[int, ...], sink_blocks: int, budget_blocks: int) -> tuple[int, ...]:
    """Sink and newest tail of a line, at most `budget_blocks`: the view when nothing is known."""
    if len(line) <= budget_blocks:
        return line
    tail = budget_blocks - sink_blocks
    return line[:sink_blocks] + line[len(line) - tail :]


def runs_of(blocks: Sequence[int], workspace: Workspace, most_blocks: int) -> list[list[int]]:
    """Blocks in runs in which each is the parent of the next; ancestors come first.

    Args:
        most_blocks: of one run.
    """
    runs: list[list[int]] = []
    for block in sorted(blocks, key=lambda block: workspace.first_positions[block]):
        parent = workspace.parent(block)
        run = next((r for r in runs if r[-1] == parent and len(r) < most_blocks), None)
        if run is None:
            runs.append([block])
        else:
            run.append(block)
    return runs
