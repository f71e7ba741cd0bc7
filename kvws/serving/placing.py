"""Where a call continues its session, and with which tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from kvws.blocks.key import BLOCK_TOKENS
from kvws.chat.call import ModelCall
from kvws.chat.format import PreparedCall
from kvws.recall.spans import PromptSpans
from kvws.serving.prompts import PromptBuilder
from kvws.session.transcript import Landmarks, Named, Transcript
from kvws.session.workspace import Thread, Workspace

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Placed:
    """A call's prompt as the log sees it.

    ```
    | behind: known blocks | tokens                                |
    |                      | list of messages …   end | opening    |
    ```

    Attributes:
        behind: blocks that the prompt is known to start with.
        tokens: all that follows them.
        end: so many of `tokens` belong to the list of messages.
        opening: the text of the rest, which opens the assistant's turn.
        asked: digest of the list of messages.
        landmarks: of the list.
        told: facts that the list tells.
        tools: that it tells of.
        is_piecewise: whether `end` is a place that later prompts can begin at.
        version: of the transcript that it was placed by.
    """

    behind: tuple[int, ...]
    tokens: tuple[int, ...]
    end: int
    opening: str
    asked: bytes
    landmarks: Landmarks
    told: Mapping[str, str]
    tools: Mapping[str, bytes]
    is_piecewise: bool
    version: int

    @property
    def prompt_tokens(self) -> int:
        return BLOCK_TOKENS * len(self.behind) + len(self.tokens)

    @property
    def spans(self) -> PromptSpans:
        return self.landmarks.spans(self.prompt_tokens)


class Placer:
    """Places calls. Rendering runs on a thread of its own, one call at a time, so that the event
    loop goes on."""

    def __init__(self, builder: PromptBuilder, executor: Executor) -> None:
        """`executor`: with a single thread; the builder is not safe to use from two."""
        self._builder = builder
        self._executor = executor
        self.closing = builder.closing()

    async def count(self, call: ModelCall, prepared: PreparedCall) -> int:
        """Tokens of a prompt, without any session.

        Raises:
            PromptError: the template refuses the messages.
        """
        return await self._run(self._builder.count, call, prepared.template_options)

    async def place(
        self,
        call: ModelCall,
        prepared: PreparedCall,
        transcript: Transcript,
        workspace: Workspace,
        thread: Thread,
    ) -> Placed:
        """Find what a thread knows of a call's prompt, and render the rest.

        Raises:
            PromptError: the template refuses the messages.
        """
        options = prepared.template_options
        latest = transcript.latest(thread.name)
        digests = await self._run(self._builder.digests, thread.name, call.messages, latest)
        if not call.side_call:
            transcript.keep_latest(thread.name, Named(call.messages, digests))
        version = transcript.version
        known = transcript.find(call.messages, digests)
        new = await self._run(self._builder.new_tokens, call, options, known)
        behind = new.place.line(thread, workspace)
        tokens = (*new.place.tail, *new.tokens, *new.opening)
        end = len(new.place.tail) + len(new.tokens)
        if not tokens:  # asked once more, and the template opens no turn: something must be asked
            behind, tokens = behind[:-1], workspace.block_tokens(behind[-1])
            end = len(tokens)
        return Placed(
            behind,
            tokens,
            end,
            new.opening_text,
            digests[-1],
            new.landmarks,
            new.told,
            new.tools,
            new.is_piecewise,
            version,
        )

    async def _run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, lambda: work(*args, **kwargs))
