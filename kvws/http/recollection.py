"""Reading a message list most of which was read before.

An agent's request repeats nearly every message of the one before it. Entries are compared from
the first on; those that come again as they were are not read again, and become the very same
`Message` objects, which are then cheap to compare, too.

    known      e0  e1  e2  e3  e4
    values     e0  e1  e2  x   e4  e5
               as read before  read anew

What a reader carries from entry to entry, such as the names of tools by the ids of their calls,
it must gather from the `ReadEntry`s alone, old or new: then it carries the same either way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from kvws.chat.message import Message


@dataclass(frozen=True, slots=True)
class ReadEntry:
    """One entry of a message list, and what it read as.

    Attributes:
        value: as decoded; never changed by anyone.
        messages: what it added to the list.
        dropped: (what, how often) of it was not shown.
        is_open: it begins or continues something that the entry behind it may continue.
    """

    value: Any
    messages: tuple[Message, ...]
    dropped: tuple[tuple[str, int], ...]
    is_open: bool = False


class Recollection:
    """What is remembered while one request is read.

    Attributes:
        entries: those of an earlier list; once a list was read to its end, that one's.
    """

    def __init__(self, entries: tuple[ReadEntry, ...] = ()) -> None:
        self.entries = entries

    def read(
        self, values: Sequence[Any], read: Callable[[int, Any], ReadEntry]
    ) -> Iterator[ReadEntry]:
        """Every entry of a list, in order. Mutates self at its end.

        Args:
            values: as decoded.
            read: reads the entry of an index. It is called when all earlier entries were given
                out, and may depend on nothing but them and its own value.
        """
        entries = list(self._repeated(values))
        yield from entries
        for index in range(len(entries), len(values)):
            entry = read(index, values[index])
            entries.append(entry)
            yield entry
        self.entries = tuple(entries)

    def _repeated(self, values: Sequence[Any]) -> tuple[ReadEntry, ...]:
        """The known entries that a list begins with, up to where something is left open."""
        known = self.entries
        pairs = enumerate(zip(known, values, strict=False))
        ends = (index for index, (entry, value) in pairs if not reads_alike(entry.value, value))
        end = next(ends, min(len(known), len(values)))
        while end and known[end - 1].is_open:
            end -= 1
        return known[:end]


def reads_alike(one: Any, other: Any) -> bool:
    """Whether no reader can tell two decoded values apart.

    `==` alone takes true for 1 and 1.0, 0.0 for -0.0, and objects whose keys come in another
    order for equal; spelled as JSON these differ. Spelling alone takes a number that is not finite
    for null. What cannot be spelled is like nothing.
    """
    try:
        return orjson.dumps(one) == orjson.dumps(other) and one == other
    except TypeError:
        return False
