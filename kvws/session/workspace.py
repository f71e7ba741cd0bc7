"""The chronological token log of one agent session, shared by all its threads.

Blocks form a tree: a block's parent is the block that came right before it in the line of the
thread that wrote it. A thread is a path in that tree plus a tail of fewer than one block. Nothing
is ever removed because a client rewrote its history: an edited history is a new branch, and the
old one stays recallable.

What a workspace needs to outlive its process goes into its journal, one commit a registration.
"""

from __future__ import annotations

import asyncio
import uuid
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvws.blocks.key import BLOCK_TOKENS
from kvws.observe.step_report import StepReport
from kvws.recall.recipe import recipe_named
from kvws.recall.selector import Selector
from kvws.session.commit import ROOT, BlockRecord, Commit, StepRecord, ThreadRecord
from kvws.session.family import FamilyBlocks, family_of, is_aside
from kvws.session.journal import Journal, NullJournal

BlockTokens = tuple[int, ...]

_ONE_EACH: dict[int, int] = {}
"""Every token id that any block has, once: a number object of its own for each of a block's tokens
takes more memory than all else that is kept of it."""


@dataclass
class Thread:
    """One growing message list inside a session.

    Attributes:
        name: unique in its workspace.
        line: the thread's blocks, oldest first.
        view: blocks on the device for this thread, in view order; a newly registered block is
            appended, because it was computed right behind the view.
        kept_last_view: whether the last recall left the view as it was (predicts the next).
        unfinished: blocks that its steps registered since the last one that ended.
        lock: steps of one thread are serialised, they share the view.
    """

    name: str
    line: tuple[int, ...] = ()
    view: tuple[int, ...] = ()
    kept_last_view: bool = True
    unfinished: set[int] = field(default_factory=set[int])
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(frozen=True)
class Alignment:
    """A prompt against the log: the blocks it starts with, and the tokens that are new.

    Attributes:
        line: blocks whose tokens are the prompt's first 32 × len(line) tokens.
        pending: the rest of the prompt, at least one token.
    """

    line: tuple[int, ...]
    pending: tuple[int, ...]


class Workspace:
    """All that one agent session has processed.

    Attributes:
        registration: held from the allocation of blocks until it is known which of them are
            resident, and by whoever must not see those that will be taken back.
        journal: what outlives the process.
        selector: what chooses among its blocks.
        selecting: held while the selector reads blocks or chooses; it is not safe to use from two
            threads.
        acknowledged_before: blocks that an earlier life had made durable.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.threads: dict[str, Thread] = {}
        self.registration = asyncio.Lock()
        self.journal: Journal = NullJournal()
        self.selector = Selector(recipe_named("mean-k"))
        self.selecting = asyncio.Lock()
        self.acknowledged_before: frozenset[int] = frozenset()
        self._life = uuid.uuid4().hex[:12]
        self._epoch = 0
        self._condemned: set[str] = set()
        self._tokens: list[BlockTokens | None] = []  # None: allocated, but never became resident
        self._parents = array("i")
        self._first_positions = array("i")
        self._children: dict[tuple[int, BlockTokens], int] = {}
        self._retired: dict[tuple[int, BlockTokens], int] = {}
        self._unsettled: list[int] = []
        self._families = FamilyBlocks()

    @classmethod
    def restored(
        cls,
        name: str,
        blocks: Mapping[int, BlockRecord],
        retired: Mapping[int, BlockRecord],
        block_count: int,
    ) -> Workspace:
        """A workspace as an earlier life left it, without threads.

        Args:
            blocks: by number, each behind its parent.
            retired: blocks that are gone; if their tokens are written again at their place, they
                get their numbers again.
            block_count: at least one more than every number that was ever given out.
        """
        workspace = cls(name)
        workspace._tokens = [None] * block_count
        workspace._parents = array("i", [ROOT]) * block_count
        workspace._first_positions = array("i", bytes(4 * block_count))
        for block in blocks.values():
            workspace._enter(block.number, block.parent, block.tokens)
        for block in retired.values():
            workspace._retired[block.parent, block.tokens] = block.number
        return workspace

    @property
    def namespace(self) -> str:
        """The engine's `extra_key`: pages are shared only within it.

        New for every life of a workspace: the engine's tree may still hold pages of a dropped
        workspace of the same name, which it takes for stored and would never offer again.
        """
        return f"kvws/{self.name}/{self._life}.{self._epoch}"

    @property
    def block_count(self) -> int:
        """Numbers given out; blocks are among 0 … block_count - 1."""
        return len(self._tokens)

    @property
    def registered_blocks(self) -> int:
        """Blocks in the log."""
        return len(self._children)

    @property
    def is_durable(self) -> bool:
        """Whether it outlives its process."""
        return not isinstance(self.journal, NullJournal)

    def start_new_epoch(self) -> None:
        """Leave the namespace: the engine's tree names pages in it that it will not offer."""
        self._epoch += 1

    def condemn(self, namespace: str) -> None:
        """Leave a namespace whose pages may hold KV that is not what their hash says, for good:
        an answer that another thread asked for in it before is not to be trusted either."""
        self._condemned.add(namespace)
        if namespace == self.namespace:
            self.start_new_epoch()

    def is_condemned(self, namespace: str) -> bool:
        return namespace in self._condemned

    def thread(self, name: str) -> Thread:
        """The thread of that name, created at first use."""
        return self.threads.setdefault(name, Thread(name))

    def forget_thread(self, name: str) -> None:
        """Drop the state of a thread that runs no step. Its blocks stay in the log, and in reach
        of its family, if there is any: a side call leaves nothing that another thread recalls."""
        assert name not in self.threads or not self.threads[name].lock.locked(), "it is at work"
        self.threads.pop(name, None)
        if is_aside(name):
            self._families.drop(family_of(name))

    def remember_line(self, thread: str, head: int) -> None:
        """A thread has, or had, the line that ends with block `head`: its family may recall it."""
        self._families.mark(family_of(thread), head, self._parents)

    def recallable(self, thread: str, line: Sequence[int]) -> bytearray:
        """One byte per block: 1 for those of `line` and of every line that the thread or another
        of its family ever had. All of them are in the log, and none will be taken back."""
        return self._families.of(family_of(thread), line[-1] if line else ROOT, self._parents)

    def other_answers(self, line: Sequence[int], question: Sequence[int]) -> list[int]:
        """Blocks that continue a line with a question of less than a block, and more behind it:
        how it was answered before. They repeat the question, so nothing scores higher."""
        if not line or len(question) >= BLOCK_TOKENS:
            return []
        head, asked = line[-1], tuple(question)
        parents_behind = np.frombuffer(self._parents, dtype=np.int32)[head + 1 :]
        children: list[int] = (np.flatnonzero(parents_behind == head) + head + 1).tolist()
        return [
            number
            for number in children
            if (tokens := self._tokens[number]) is not None and tokens[: len(asked)] == asked
        ]

    def exists(self, block: int) -> bool:
        """Whether a number names a block (and not one whose allocation was taken back)."""
        return self._tokens[block] is not None

    def block_tokens(self, block: int) -> BlockTokens:
        """The 32 token ids of a block."""
        tokens = self._tokens[block]
        assert tokens is not None, f"block {block} was never registered"
        return tokens

    def tokens_of(self, blocks: Sequence[int]) -> list[int]:
        """Token ids of blocks, concatenated in the given order."""
        return [token for block in blocks for token in self.block_tokens(block)]

    def parent(self, block: int) -> int | None:
        """The block before `block` in the line that wrote it; None for a first one."""
        parent = self._parents[block]
        return None if parent == ROOT else parent

    @property
    def first_positions(self) -> array[int]:
        """By block number, the position of its first token in the line that wrote it: int32."""
        return self._first_positions

    def lineage(self, block: int) -> list[int]:
        """The blocks before `block` in the line that wrote it, oldest first."""
        before: list[int] = []
        parent = self._parents[block]
        while parent != ROOT:
            before.append(parent)
            parent = self._parents[parent]
        return before[::-1]

    def align(self, token_ids: Sequence[int], behind: tuple[int, ...] = ()) -> Alignment:
        """Find the longest run of whole blocks, over all threads, that the prompt starts with.

        At least one token is left pending: the engine must compute something to answer.

        Args:
            token_ids: the prompt, or what of it follows `behind`; not empty.
            behind: blocks that the prompt is known to start with.
        """
        more = self.continuation(behind, token_ids[: len(token_ids) - 1])
        return Alignment(behind + tuple(more), tuple(token_ids[len(more) * BLOCK_TOKENS :]))

    def continuation(self, line: Sequence[int], token_ids: Sequence[int]) -> list[int]:
        """The blocks behind a line that the tokens start with, whichever thread wrote them."""
        numbers: list[int] = []
        parent = line[-1] if line else ROOT
        for start in range(0, len(token_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            block = self._children.get((parent, tuple(token_ids[start : start + BLOCK_TOKENS])))
            if block is None:
                break
            numbers.append(block)
            parent = block
        return numbers

    def allocate(self, line: Sequence[int], token_ids: Sequence[int]) -> list[int]:
        """Number the full blocks of tokens that continue a line; the partial tail gets none.

        A continuation that another thread has already written keeps its numbers.
        """
        numbers = self.continuation(line, token_ids)
        parent = numbers[-1] if numbers else line[-1] if line else ROOT
        first_new = len(numbers) * BLOCK_TOKENS
        for start in range(first_new, len(token_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            tokens = tuple(token_ids[start : start + BLOCK_TOKENS])
            number = self._retired.pop((parent, tokens), len(self._tokens))
            if number == len(self._tokens):
                self._tokens.append(None)
                self._parents.append(parent)
                self._first_positions.append(0)
            self._enter(number, parent, tokens)
            numbers.append(number)
            parent = number
        return numbers

    def _enter(self, number: int, parent: int, tokens: BlockTokens) -> None:
        tokens = tuple(map(_ONE_EACH.setdefault, tokens, tokens))
        self._tokens[number] = tokens
        self._parents[number] = parent
        self._children[parent, tokens] = number
        before = self._first_positions[parent] + BLOCK_TOKENS if parent != ROOT else 0
        self._first_positions[number] = before

    def take_back(self, numbers: Sequence[int]) -> None:
        """Undo the allocation of blocks that did not become resident, newest first."""
        for number in sorted(numbers, reverse=True):
            tokens = self.block_tokens(number)
            del self._children[self._parents[number], tokens]
            self._tokens[number] = None
        self._families.unmark(numbers)

    def announce(self, numbers: Sequence[int]) -> None:
        """Tell the journal of blocks that are about to be registered. Should the process end
        before it is told what became of them, their numbers still stand for these tokens."""
        if numbers:
            self.journal.append(Commit(announced=self._records_of(numbers)))

    def leave_unsettled(self, numbers: Sequence[int]) -> None:
        """Blocks whose registration was cut off stay in the log, resident or not."""
        self._unsettled += [number for number in numbers if self.exists(number)]

    def record(
        self,
        thread: Thread,
        line: tuple[int, ...],
        view: tuple[int, ...],
        new_blocks: Sequence[int],
        *,
        ended: tuple[StepReport, Any] | None = None,
    ) -> None:
        """Move a thread on, and commit that together with the blocks its pass registered.

        Args:
            line: the thread's blocks from now on.
            view: the thread's view from now on.
            new_blocks: resident blocks that no commit has named yet.
            ended: the report of the thread's step and its caller's note, if it ends here.
        """
        thread.line, thread.view = line, view
        head = line[-1] if line else ROOT
        self.remember_line(thread.name, head)
        if ended is None:
            thread.unfinished.update(new_blocks)
        else:
            thread.unfinished.clear()
            if ended[0].recalled:
                thread.kept_last_view = ended[0].unchanged
        unsettled, self._unsettled = self._unsettled, []
        self.journal.append(
            Commit(
                blocks=self._records_of(new_blocks),
                unsettled=self._records_of(unsettled),
                thread=ThreadRecord(thread.name, head, view, thread.kept_last_view),
                step=StepRecord(ended[0], self.registered_blocks, ended[1]) if ended else None,
            )
        )

    def _records_of(self, numbers: Sequence[int]) -> tuple[BlockRecord, ...]:
        return tuple(
            BlockRecord(number, self._parents[number], self.block_tokens(number))
            for number in numbers
        )

    def check_integrity(self) -> None:
        """The tree index has exactly the registered blocks; threads name registered blocks.

        Every line is a path from the root whose blocks its family may recall, and views hold no
        block twice.
        """
        registered = {n for n, tokens in enumerate(self._tokens) if tokens is not None}
        assert set(self._children.values()) == registered, "tree index ≠ registered blocks"
        for (parent, tokens), number in self._children.items():
            assert self._tokens[number] == tokens and self._parents[number] == parent
            assert parent < number, "a block is numbered before the one it continues"
        self._families.check_integrity(registered, self._parents)
        for name, thread in self.threads.items():
            expected = [ROOT, *thread.line][: len(thread.line)]
            parents = [self._parents[block] for block in thread.line]
            assert parents == expected, f"the line of thread {name} is not a path"
            assert self._families.has(family_of(name), thread.line[-1:]), (
                f"the family of thread {name} has not its line"
            )
            assert set(thread.view) <= registered, f"thread {name} views an unknown block"
            assert len(set(thread.view)) == len(thread.view), f"thread {name} views a block twice"
