"""Sizes that bound a step, checked once against each other."""

from __future__ import annotations

from dataclasses import dataclass

from kvws.blocks.key import BLOCK_TOKENS
from kvws.errors import ConfigError

_ENGINE_HEADROOM_TOKENS = 8
"""SGLang refuses prompts this close to its context length."""


@dataclass(frozen=True)
class Limits:
    """How large views, queries and answers may be.

    ```
    |<------- budget ------->|<------------- reserve ------------->|
    | sink | scored | recent | query (≤ query_tokens) | generation |
    |<------------------- engine context -------------------------->|
    ```

    Attributes:
        budget_tokens: size of a freshly selected execution view.
        reserve_tokens: room beside it for query and generation.
        sink_tokens: first tokens of the thread, in every view.
        recent_tokens: newest tokens of the thread, in every view.
        query_tokens: most new tokens that a probe asks with; earlier ones are ingested ahead.
        probe_tokens: size of the window that a probe asks behind when its answer is not expected
            to be kept. The cost of a probe then does not grow with the budget.
        scored_tokens: at most the blocks of so many tokens, or of four views, are looked at
            closely. Of a longer session a step shortlists them first, so that its cost does not
            grow any more.
    """

    budget_tokens: int
    reserve_tokens: int
    sink_tokens: int
    recent_tokens: int
    query_tokens: int
    probe_tokens: int = 512
    scored_tokens: int = 1_000_000

    def __post_init__(self) -> None:
        smallest = (self.sink_blocks + self.recent_blocks + 1) * BLOCK_TOKENS
        if self.budget_blocks * BLOCK_TOKENS < smallest:
            raise ConfigError(
                f"a budget of {self.budget_tokens} tokens does not hold sink "
                f"({self.sink_tokens}), recent ({self.recent_tokens}) and one block",
                hint=f"set --budget to {smallest} or more, or lower --sink and --recent",
            )
        if self.sink_tokens < 1 or self.recent_tokens < 1:
            raise ConfigError(
                f"sink ({self.sink_tokens}) and recent ({self.recent_tokens}) keep at least "
                "one block each",
                hint=f"set --sink and --recent to {BLOCK_TOKENS} or more",
            )
        if self.query_tokens < BLOCK_TOKENS:
            raise ConfigError(
                f"a query of {self.query_tokens} tokens is less than one block",
                hint=f"set --query to {BLOCK_TOKENS} or more",
            )
        if self.reserve_tokens < 2 * self.query_tokens:
            raise ConfigError(
                f"a reserve of {self.reserve_tokens} tokens does not hold a query of "
                f"{self.query_tokens} and as much generation",
                hint=f"set --reserve to {2 * self.query_tokens} or more",
            )

    @property
    def context_tokens(self) -> int:
        """The engine's context length."""
        return self.budget_blocks * BLOCK_TOKENS + self.reserve_tokens

    @property
    def chunk_tokens(self) -> int:
        """Tokens ingested in one pass: what fits beside a full budget, in whole blocks."""
        return self._usable(self.reserve_tokens) // BLOCK_TOKENS * BLOCK_TOKENS

    @property
    def budget_blocks(self) -> int:
        return self.budget_tokens // BLOCK_TOKENS

    @property
    def scored_blocks(self) -> int:
        return max(self.scored_tokens // BLOCK_TOKENS, 4 * self.budget_blocks)

    @property
    def probe_blocks(self) -> int:
        """Blocks of a probe's window: at least the sink and one block, at most the budget."""
        smallest = self.sink_blocks + 1
        return min(max(self.probe_tokens // BLOCK_TOKENS, smallest), self.budget_blocks)

    @property
    def sink_blocks(self) -> int:
        return -(-self.sink_tokens // BLOCK_TOKENS)

    @property
    def recent_blocks(self) -> int:
        return -(-self.recent_tokens // BLOCK_TOKENS)

    def fits(self, view_blocks: int, other_tokens: int) -> bool:
        """Whether a view and other tokens make a prompt that the engine takes."""
        return view_blocks <= self.room_blocks(other_tokens)

    def room_blocks(self, other_tokens: int) -> int:
        """View blocks that fit beside other tokens, with room to generate."""
        return (self._usable(self.context_tokens) - other_tokens) // BLOCK_TOKENS

    def answer_tokens(self, max_new_tokens: int) -> int:
        """Generation that a view leaves room for, however far it has grown beyond its budget."""
        return min(max_new_tokens, self._usable(self.reserve_tokens) - self.query_tokens)

    def generation_tokens(self, prompt_tokens: int) -> int:
        """Tokens that can be generated behind a prompt that fits."""
        return self.context_tokens - prompt_tokens - 2

    @staticmethod
    def _usable(tokens: int) -> int:
        return tokens - _ENGINE_HEADROOM_TOKENS
