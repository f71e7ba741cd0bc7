"""Which blocks of a thread are in its view whatever they score. A pure decision."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain

from kvws.blocks.key import BLOCK_TOKENS
from kvws.recall.spans import PromptSpans, Span


class Reason(StrEnum):
    """Why a block is in the view, or left it."""

    SINK = "sink"
    SYSTEM = "system"
    POLICY = "policy"
    TASK = "task"
    TRAJECTORY = "trajectory"
    RECENT = "recent"
    SCORE = "score"
    ANCHOR = "hit"
    NEIGHBOUR = "beside a hit"
    NEWEST_COPY = "newest copy"
    STILL_FITS = "still fits"
    OUTSCORED = "outscored"


@dataclass(frozen=True)
class Regions:
    """The blocks of a thread that are in every view.

    ```
    line:  | sink | … system … policies … older turns … task … trajectory … | recent |
    view:  | sink | what is pinned of these, and what scored best             | recent |
    ```

    Attributes:
        sink: the line's first blocks, oldest first.
        recent: its newest blocks, without gaps, oldest first; disjoint from `sink`.
        pinned: blocks between them, oldest first, with the part that each is kept for.
        shrunk: parts that did not fit, with the number of their blocks that compete instead.
    """

    sink: tuple[int, ...]
    recent: tuple[int, ...]
    pinned: Mapping[int, Reason] = field(default_factory=dict[int, Reason])
    shrunk: Mapping[Reason, int] = field(default_factory=dict[Reason, int])

    @classmethod
    def of_line(cls, line: Sequence[int], sink_blocks: int, recent_blocks: int) -> Regions:
        """A line of which nothing more is known: its first blocks and its newest ones."""
        first_recent = max(sink_blocks, len(line) - recent_blocks)
        return cls(tuple(line[:sink_blocks]), tuple(line[first_recent:]))

    @classmethod
    def of_prompt(
        cls,
        line: Sequence[int],
        spans: PromptSpans,
        *,
        sink_blocks: int,
        recent_blocks: int,
        budget_blocks: int,
    ) -> Regions:
        """A line whose parts are known: what of them fits three quarters of the budget.

        A quarter is always left to what scores. Room is given out in this order; what comes
        later gets what is left, and what does not fit competes like any other block:

        1. the sink, and the newest half of `recent_blocks`: the newest step is never out of view;
        2. the task, both its ends first, save for a quarter that the system prompt may claim;
        3. the system prompt and the policies, from their beginnings;
        4. the trajectory, its newest part first;
        5. the other half of `recent_blocks`.

        Args:
            line: the prompt's first 32 × len(line) tokens, as blocks; longer than sink + recent.
            spans: in tokens of the prompt; what lies beyond the line is not a block yet.
            budget_blocks: size of a freshly selected view; at least sink + recent.
        """
        if spans == PromptSpans():
            return cls.of_line(line, sink_blocks, recent_blocks)
        end = len(line)
        newest = range(max(sink_blocks, end - -(-recent_blocks // 2)), end)
        recent = range(max(sink_blocks, end - recent_blocks), end)
        task = blocks_of(spans.task, end)
        system = blocks_of(spans.system, end)
        policies = [blocks_of(span, end) for span in spans.policies]
        trajectory = blocks_of(spans.trajectory, end)

        cap = 3 * budget_blocks // 4
        room = _Room(chain(range(sink_blocks), newest))
        claimed = min(len(system), cap // 4)
        room.give(_from_both_ends(task), Reason.TASK, cap - claimed)
        room.give(system, Reason.SYSTEM, cap)
        room.give(_from_both_ends(task), Reason.TASK, cap)  # what of the claim was not needed
        room.give(chain.from_iterable(policies), Reason.POLICY, cap)
        room.give(reversed(trajectory), Reason.TRAJECTORY, cap)
        room.give(reversed(recent), Reason.RECENT, cap)

        parts = {
            Reason.TASK: [task],
            Reason.SYSTEM: [system],
            Reason.POLICY: policies,
            Reason.TRAJECTORY: [trajectory],
            Reason.RECENT: [recent],
        }
        left_out = {reason: room.left_out(part) for reason, part in parts.items()}
        return cls(
            sink=tuple(line[:sink_blocks]),
            recent=tuple(line[newest.start :]),
            pinned={line[place]: reason for place, reason in sorted(room.given.items())},
            shrunk={reason: blocks for reason, blocks in left_out.items() if blocks},
        )

    @property
    def fixed(self) -> tuple[int, ...]:
        """Every block that does not compete."""
        return (*self.sink, *self.pinned, *self.recent)

    def competes(self, block_count: int) -> bytearray:
        """One byte per block of the workspace: 0 for those that are in every view, else 1."""
        mask = bytearray(b"\x01") * block_count
        for block in self.fixed:
            mask[block] = 0
        return mask


class _Room:
    """Places in a line, given out to its parts one after the other.

    Attributes:
        given: place → the part that it was given for.
    """

    def __init__(self, fixed: Iterable[int]) -> None:
        self.given: dict[int, Reason] = {}
        self._fixed = frozenset(fixed)

    def give(self, places: Iterable[int], reason: Reason, up_to: int) -> None:
        """Give a part its places, in that order, until `up_to` are taken in all."""
        free = up_to - len(self._fixed) - len(self.given)
        for place in places:
            if free <= 0:
                return
            if place not in self._fixed and place not in self.given:
                self.given[place] = reason
                free -= 1

    def left_out(self, part: Sequence[range]) -> int:
        """How many places of a part, whose ranges may overlap, were not given to anybody."""
        taken = sorted(self._fixed | self.given.keys())
        left = counted_to = 0
        for places in sorted(part, key=lambda places: places.start):
            begin = max(places.start, counted_to)
            if begin < places.stop:
                given = bisect_left(taken, places.stop) - bisect_left(taken, begin)
                left += places.stop - begin - given
                counted_to = places.stop
        return left


def blocks_of(span: Span | None, line_blocks: int) -> range:
    """Places in a line of the blocks that a span touches, as far as they exist."""
    if span is None or span.end <= span.begin:
        return range(0)
    end = min(line_blocks, -(-span.end // BLOCK_TOKENS))
    return range(min(end, span.begin // BLOCK_TOKENS), end)


def place_of(block: int, line: Sequence[int]) -> int | None:
    """Where a block stands in a line, or None: a block's number is larger than its parent's."""
    place = bisect_left(line, block)
    return place if place < len(line) and line[place] == block else None


def _from_both_ends(places: range) -> Iterator[int]:
    """First, last, second, last but one, …: a request says at its ends what it is about."""
    for first, last in zip(places, reversed(places), strict=True):
        if first > last:
            return
        yield first
        if first < last:
            yield last
