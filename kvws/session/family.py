"""What a thread may recall: the blocks that its family of threads ever had in a line.

The threads of a workspace share its log, and must not find each other's work in their views: a
sub-agent's does not show up in the main loop. But a conversation that goes on as another thread,
after its client has summarised it away, still reaches what it was.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from kvws.session.commit import ROOT

_SUCCESSOR = "#"
_ASIDE = "aside-"


def is_aside(thread: str) -> bool:
    """Whether a thread is a side call, which ends with its only step."""
    return thread.startswith(_ASIDE)


def family_of(thread: str) -> str:
    """The first of the threads that continue one another: "main" of "main#2"."""
    return thread if is_aside(thread) else thread.partition(_SUCCESSOR)[0]


class FamilyBlocks:
    """One byte per block and family: 1 where the family had the block in a line.

    A family that had a block also had the blocks before it, so marking a line stops at the first
    block that is marked already: it costs what is new.
    """

    def __init__(self) -> None:
        self._marks: dict[str, bytearray] = {}

    def mark(self, family: str, head: int, parents: Sequence[int]) -> None:
        """A thread of the family has the line that ends with `head`.

        Args:
            head: a block, or ROOT for an empty line.
            parents: by block number, the block before it or ROOT.
        """
        marks = self._marks.setdefault(family, bytearray())
        marks.extend(bytes(len(parents) - len(marks)))
        _mark_back(marks, head, parents)

    def of(self, family: str, head: int, parents: Sequence[int]) -> bytearray:
        """A copy of the family's marks, one byte for each of `parents`, with those of the line
        that ends with `head`."""
        marks = bytearray(self._marks.get(family, b""))
        marks.extend(bytes(len(parents) - len(marks)))
        _mark_back(marks, head, parents)
        return marks

    def unmark(self, numbers: Iterable[int]) -> None:
        """Blocks that are no more; none is left that continues one of them."""
        for number in numbers:
            for marks in self._marks.values():
                if number < len(marks):
                    marks[number] = 0

    def drop(self, family: str) -> None:
        self._marks.pop(family, None)

    def has(self, family: str, numbers: Iterable[int]) -> bool:
        """Whether all these blocks are marked."""
        marks = self._marks.get(family, b"")
        return all(number < len(marks) and marks[number] for number in numbers)

    def check_integrity(self, registered: Collection[int], parents: Sequence[int]) -> None:
        """Every marked block is registered, and so are marked the blocks before it."""
        for family, marks in self._marks.items():
            marked = {number for number, mark in enumerate(marks) if mark}
            assert marked <= set(registered), f"{family} remembers a block that is gone"
            before = {parents[number] for number in marked} - {ROOT}
            assert before <= marked, f"{family} has a block and not the one before it"


def _mark_back(marks: bytearray, head: int, parents: Sequence[int]) -> None:
    while head != ROOT and not marks[head]:
        marks[head] = 1
        head = parents[head]
