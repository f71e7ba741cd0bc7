"""Where an assistant's turns are in a line, and what came before each of them.

    | system | task | turn 0 | result | turn 1 | result | coming turn
    |<-- context -->|        |<--- context ----|
                    |<--- context --->|

A turn begins with the opening. It ends where the next message begins, or the next turn where the
template does not mark messages. What came before it reaches back to the beginning of the turn
before: what the assistant did, and what became of it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvws.blocks.key import BLOCK_TOKENS
from kvws.recall.text.spelling import Spelling
from kvws.recall.text.tree import ROOT, BlockTree

_NONE = -1


class Exchange(NamedTuple):
    """A turn of the assistant and what it answered, in tokens of the line.

    Attributes:
        turn: its number in the workspace.
        context_begin: its context is context_begin … begin - 1.
        begin: of the turn, with its opening.
        end: of the turn; of the line, if the turn goes on.
        goes_on: no message has begun since.
    """

    turn: int
    context_begin: int
    begin: int
    end: int
    goes_on: bool

    @property
    def places(self) -> range:
        """Places in the line of the blocks that the turn touches."""
        return range(self.begin // BLOCK_TOKENS, -(-self.end // BLOCK_TOKENS))


@dataclass(frozen=True)
class Coming:
    """What the next turn answers, in tokens of a line and a question behind it.

    Attributes:
        earlier: the newest exchanges of the line before it, oldest first, as far as they are in
            the line.
        context_begin, context_end: the latest turn, maybe part of the question, and all since.
    """

    earlier: list[Exchange]
    context_begin: int
    context_end: int


class TurnIndex:
    """The assistant's turns in every line of a workspace, found block by block.

    A block keeps what its line has come to with it: 10 bytes. A turn is numbered when its opening
    is complete and keeps 12 bytes; turns of a line are chained, those before a fork are shared.
    """

    def __init__(self, spelling: Spelling, tree: BlockTree) -> None:
        """`tree`: every block is entered there before it is added here."""
        self._opening = spelling.opening
        self._message_start = spelling.message_start
        self._fallbacks = _fallbacks(spelling.opening)
        self._tree = tree
        # By block: matched tokens of an opening, the latest turn, where it ended or _NONE.
        self._matched = array("H")
        self._latest = array("i")
        self._ended = array("i")
        # By turn: where it began, the turn before it, where that one had ended.
        self._begins = array("i")
        self._previous = array("i")
        self._previous_ends = array("i")

    @property
    def turns(self) -> int:
        """Numbers given out."""
        return len(self._begins)

    def add(self, number: int, parent: int) -> list[Exchange]:
        """Read a block behind its parent. Mutates self.

        Returns:
            those whose opening it completes.
        """
        missing = number + 1 - len(self._latest)
        if missing > 0:
            self._matched.extend([0] * missing)
            self._latest.extend([_NONE] * missing)
            self._ended.extend([_NONE] * missing)
        matched, latest, ended = self._state(parent)
        tokens = self._tree.tokens(number)
        opened: list[Exchange] = []
        if matched or (self._opening and self._opening[0] in tokens):
            matched, marks = self._scan(tokens, self._tree.line_tokens(parent), matched)
            for position, opens in marks:
                if ended == _NONE and latest != _NONE:
                    ended = position
                if opens:
                    self._begins.append(position)
                    self._previous.append(latest)
                    self._previous_ends.append(ended)
                    latest, ended = len(self._begins) - 1, _NONE
                    opened.append(self._exchange(latest, ended, number))
        self._matched[number], self._latest[number], self._ended[number] = matched, latest, ended
        return opened

    def exchanges(self, head: int, at_most: int | None = None) -> list[Exchange]:
        """The newest exchanges of the line that ends with block `head`, or all, oldest first."""
        _, turn, ended = self._state(head)
        left = self.turns if at_most is None else at_most
        found: list[Exchange] = []
        while turn != _NONE and left > 0:
            found.append(self._exchange(turn, ended, head))
            turn, ended = self._previous[turn], self._previous_ends[turn]
            left -= 1
        return found[::-1]

    def coming(
        self, head: int, question: Sequence[int], at_most: int | None = None
    ) -> Coming | None:
        """What the turn answers that is to be written behind a line and a question.

        A turn that goes on where the prompt ends is the coming one: just opened, or begun.

        Args:
            at_most: exchanges before it that are looked up, at least one.

        Returns:
            None if it is the first one.
        """
        exchanges = self.exchanges(head, None if at_most is None else at_most + 1)
        line_tokens = self._tree.line_tokens(head)
        prompt_tokens = line_tokens + len(question)
        _, marks = self._scan(question, line_tokens, self._state(head)[0])
        for position, opens in marks:
            if exchanges and exchanges[-1].goes_on:
                exchanges[-1] = exchanges[-1]._replace(end=position, goes_on=False)
            if opens:
                context_begin = exchanges[-1].begin if exchanges else 0
                exchanges.append(Exchange(_NONE, context_begin, position, prompt_tokens, True))
        context_end = prompt_tokens
        if exchanges and exchanges[-1].goes_on:
            context_end = exchanges.pop().begin
        if not exchanges:
            return None
        earlier = [
            exchange if exchange.end <= line_tokens else exchange._replace(end=line_tokens)
            for exchange in exchanges
            if exchange.turn != _NONE
        ]
        if at_most is not None:
            earlier = earlier[max(0, len(earlier) - at_most) :]
        return Coming(earlier, exchanges[-1].begin, context_end)

    def _state(self, head: int) -> tuple[int, int, int]:
        if head == ROOT:
            return 0, _NONE, _NONE
        return self._matched[head], self._latest[head], self._ended[head]

    def _exchange(self, turn: int, ended: int, head: int) -> Exchange:
        previous = self._previous[turn]
        context_begin = 0 if previous == _NONE else self._begins[previous]
        goes_on = ended == _NONE
        end = self._tree.line_tokens(head) if goes_on else ended
        return Exchange(turn, context_begin, self._begins[turn], end, goes_on)

    def _scan(
        self, tokens: Sequence[int], position: int, matched: int
    ) -> tuple[int, list[tuple[int, bool]]]:
        """Marks in tokens that begin at a position of the line, and the state behind them.

        Returns:
            how many tokens of an opening the last ones are, and for each mark its position and
            whether it is a whole opening; otherwise it is the start of some message.
        """
        marks: list[tuple[int, bool]] = []
        opening = self._opening
        if not opening:
            return 0, marks
        for at, token in enumerate(tokens, position):
            if token == self._message_start:
                marks.append((at, False))
            while matched and token != opening[matched]:
                matched = self._fallbacks[matched]
            if token == opening[matched]:
                matched += 1
            if matched == len(opening):
                marks.append((at + 1 - len(opening), True))
                matched = 0
        return matched, marks


def _fallbacks(opening: tuple[int, ...]) -> list[int]:
    """By number of matched tokens: how many still match when the next one does not."""
    fallbacks = [0] * max(1, len(opening))
    matched = 0
    for length in range(1, len(opening)):
        fallbacks[length] = matched
        while matched and opening[length] != opening[matched]:
            matched = fallbacks[matched]
        if opening[length] == opening[matched]:
            matched += 1
    return fallbacks
