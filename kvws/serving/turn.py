"""One call from its prompt to its last event.

    place ─▶ run_step ─▶ chunks ─▶ events
               ▲  │ the answer outgrew the room beside its view:
               └──┘ what was generated becomes prompt, and the view is selected anew

The answer is made in a task of its own, so that a client that reads slowly, or not at all, does
not hold up its thread.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field

from kvws.blocks.key import BLOCK_TOKENS
from kvws.chat.answer import AnswerEvent, Finished, Usage
from kvws.chat.call import ModelCall
from kvws.chat.format import AnswerFormat, Ended, PreparedCall
from kvws.chat.whole_answer import assistant_message
from kvws.engine.protocol import Chunk, Engine
from kvws.limits import Limits
from kvws.observe.step_report import StepReport
from kvws.serving.placing import Placed, Placer
from kvws.serving.sessions import Asker, Session, Sessions, Unheard
from kvws.session.commit import Commit
from kvws.session.transcript import Given, place_in
from kvws.step import StepRequest, run_step


@dataclass(frozen=True)
class Model:
    """What answers are made with."""

    engine: Engine
    limits: Limits
    format: AnswerFormat
    placer: Placer


@dataclass
class _Generated:
    """What the model has said so far, in tokens.

    Attributes:
        tokens: all of them; the first of them may be of an earlier attempt.
        said_before: so many of them.
        parts: what they mean.
        first_report: of the step that the prompt was computed in.
        last: the chunk that ended the answer.
    """

    tokens: list[int] = field(default_factory=list[int])
    said_before: int = 0
    parts: list[AnswerEvent] = field(default_factory=list[AnswerEvent])
    first_report: StepReport | None = None
    last: Chunk | None = None


class Turn:
    """Implements `kvws.serving.service.Admitted`."""

    def __init__(
        self,
        call: ModelCall,
        prepared: PreparedCall,
        asker: Asker,
        thread: str,
        placed: Placed,
        max_tokens: int,
        *,
        model: Model,
        sessions: Sessions,
    ) -> None:
        """
        Args:
            thread: that the step runs in: the caller's, or one of its own for a side call, which
                begins with what the caller's thread knows and adds nothing to it.
            placed: the prompt, by what is known now.
            max_tokens: longest answer.
        """
        self._call = call
        self._prepared = prepared
        self._asker = asker
        self._thread = thread
        self._placed = placed
        self._max_tokens = max_tokens
        self._model = model
        self._sessions = sessions
        self._is_aside = call.side_call

    @property
    def usage(self) -> Usage:
        return Usage(
            self._placed.prompt_tokens, reused_tokens=BLOCK_TOKENS * len(self._placed.behind)
        )

    async def events(self) -> AsyncGenerator[AnswerEvent, None]:
        made: asyncio.Queue[AnswerEvent | None] = asyncio.Queue()
        making = asyncio.create_task(self._make(made.put_nowait))
        making.add_done_callback(lambda _: made.put_nowait(None))
        try:
            while (event := await made.get()) is not None:
                if isinstance(event, Finished):
                    self._sessions.heard(self._asker, self._thread)
                yield event
            await making
        finally:
            making.cancel()
            await asyncio.wait([making])
            if not making.cancelled():
                making.exception()  # raised above, or nobody is left to hear it

    async def _make(self, emit: Callable[[AnswerEvent], None]) -> None:
        async with AsyncExitStack() as held:
            session = await held.enter_async_context(self._sessions.using(self._asker))
            if self._is_aside:
                held.callback(session.workspace.forget_thread, self._thread)
            else:
                await held.enter_async_context(session.turn(self._thread))
            placed = await self._place_again(session)
            generated = _Generated()
            try:
                ended = await self._generate(session, placed, generated, emit)
            finally:
                if not self._is_aside:
                    session.unheard[self._thread] = Unheard(
                        placed.asked, tuple(generated.tokens), generated.last
                    )
            if placed.is_piecewise and not self._is_aside:
                self._learn(session, placed, generated, ended)
            usage = self._usage(session, placed, generated, ended)
            emit(Finished(ended.reason, usage, ended.stop_text))

    async def _place_again(self, session: Session) -> Placed:
        """The prompt by what is known now that the thread is ours."""
        if session.transcript.version == self._placed.version:
            return self._placed
        return await self._model.placer.place(
            self._call,
            self._prepared,
            session.transcript,
            session.workspace,
            session.workspace.thread(self._asker.caller.thread),
        )

    async def _generate(
        self,
        session: Session,
        placed: Placed,
        generated: _Generated,
        emit: Callable[[AnswerEvent], None],
    ) -> Ended:
        chunks = self._chunks(session, placed, generated)
        async with aclosing(chunks), aclosing(
            self._model.format.events(self._prepared, chunks, opening=placed.opening)
        ) as parts:
            async for part in parts:
                if isinstance(part, Ended):
                    return part
                generated.parts.append(part)
                emit(part)
        raise AssertionError("an answer ends with Ended")

    async def _chunks(
        self, session: Session, placed: Placed, generated: _Generated
    ) -> AsyncGenerator[Chunk, None]:
        """The answer's tokens, over as many steps as it takes."""
        unheard = session.unheard.get(self._thread)
        if unheard is not None and unheard.asked == placed.asked:
            # The same call once more: its client did not hear the end of the answer.
            generated.tokens += unheard.tokens[: self._max_tokens]
            if unheard.last is not None and len(unheard.tokens) <= self._max_tokens:
                generated.last = unheard.last
                yield dataclasses.replace(unheard.last, token_ids=unheard.tokens)
                return
            generated.said_before = len(generated.tokens)
            if generated.tokens:
                yield Chunk(tuple(generated.tokens), None, placed.prompt_tokens)
        while True:
            last = None
            room_tokens = max(1, self._max_tokens - len(generated.tokens))
            async with aclosing(
                run_step(
                    self._request(session, placed, generated.tokens, room_tokens),
                    session.workspace,
                    self._model.engine,
                    self._model.limits,
                )
            ) as outputs:
                async for output in outputs:
                    if isinstance(output, StepReport):
                        self._note(session, output, generated)
                        continue
                    generated.tokens += output.token_ids
                    if output.finish_reason is None:
                        yield output
                    else:  # held until the step has ended as a whole
                        last = output
            assert last is not None, "a step ends with its last chunk"
            if last.finish_reason != "length" or len(generated.tokens) >= self._max_tokens:
                generated.last = last
                yield last
                return
            yield dataclasses.replace(last, finish_reason=None)

    def _request(
        self, session: Session, placed: Placed, generated: list[int], max_new_tokens: int
    ) -> StepRequest:
        behind, tokens = placed.behind, placed.tokens
        if generated:
            # What the last step registered of prompt and answer need not be compared again.
            tokens = (*tokens, *generated)
            line = session.workspace.thread(self._thread).line
            known = min(len(line) - len(behind), (len(tokens) - 1) // BLOCK_TOKENS)
            if known > 0 and line[: len(behind)] == behind:
                behind, tokens = line[: len(behind) + known], tokens[BLOCK_TOKENS * known :]
        return StepRequest(
            self._thread,
            tokens,
            max_new_tokens,
            sampling=self._prepared.sampling,
            behind=behind,
            spans=placed.spans,
        )

    def _note(self, session: Session, report: StepReport, generated: _Generated) -> None:
        generated.first_report = generated.first_report or report
        session.reports.append(report)
        session.steps += 1

    def _learn(
        self,
        session: Session,
        placed: Placed,
        generated: _Generated,
        ended: Ended,
    ) -> None:
        """Keep where the prompt and its answer end, for the next call to begin there."""
        line = session.workspace.thread(self._thread).line
        begin, prompt = len(placed.behind), placed.tokens
        if line[:begin] != placed.behind:
            return  # the thread was not moved on: a store in trouble
        tells = (placed.landmarks, placed.told, placed.tools)
        place = place_in(line, begin, prompt, placed.end, *tells)
        given, closing = None, self._model.placer.closing
        if closing is not None and ended.reason != "stop_text":
            said = generated.tokens
            if generated.last is not None and isinstance(generated.last.matched_stop, int):
                said = said[:-1]  # the closing has it
            whole = (*prompt, *said, *closing)
            after = place_in(line, begin, whole, len(whole), *tells)
            given = Given(assistant_message(generated.parts), after)
        note = session.transcript.learn(placed.asked, place, given)
        session.workspace.journal.append(Commit(note=note))

    def _usage(
        self, session: Session, placed: Placed, generated: _Generated, ended: Ended
    ) -> Usage:
        report, prompt = generated.first_report, placed.prompt_tokens
        computed = 0  # without a report every token of the answer was there already
        if report is not None:  # what was said before was computed with the prompt
            new_tokens = report.new_tokens - report.resumed_tokens
            computed = max(0, new_tokens - generated.said_before)
        reused = prompt - computed
        kept = BLOCK_TOKENS * min(
            prompt // BLOCK_TOKENS, len(session.workspace.thread(self._thread).line)
        )
        return Usage(
            prompt_tokens=prompt,
            reused_tokens=reused,
            stored_tokens=max(0, kept - reused),
            answer_tokens=len(generated.tokens),
            reasoning_tokens=ended.reasoning_tokens,
        )
