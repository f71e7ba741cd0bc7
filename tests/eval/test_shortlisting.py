"""What a shortlist loses is counted against the choice from all blocks."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from rich.console import Console

from kvws.blocks.key import BLOCK_TOKENS
from kvws.chat.render import ChatRenderer
from kvws.chat.spelling import spelling_of
from kvws.engine.platform_entry import declare_torchvision_ops
from kvws.errors import ConfigError, TraceError
from kvws.eval.episodes import opening_of
from kvws.eval.facts import DEVELOPMENT
from kvws.eval.reader import KeyValues, Reader, Reading
from kvws.eval.shortlisting import (
    PLACES,
    RECENT_BLOCKS,
    SINK_BLOCKS,
    STRETCH_TOKENS,
    Compared,
    Comparison,
    Shortlisted,
    index_session,
    require_places,
    shown,
)
from kvws.eval.shortlisting_report import (
    FACT_KINDS,
    KINDS,
    shortlist_figures,
    shortlist_json,
    shortlist_table,
)
from kvws.eval.shortlisting_session import LongQuestion, LongSession, long_session
from kvws.eval.synthetic import synthetic_messages
from kvws.recall.choice import Chosen
from kvws.recall.profile import Profile
from kvws.recall.regions import Reason
from kvws.replay.trace import Trace, TraceStep
from tests.eval.parrot import Parrot

TOKENS, FACTS, TURNS = 8192, 4, 3
PROFILE = Profile("parrot", 2, 1, 1, 8, ((0, 0), (1, 0)), (0, 1), "int8")


class Listener(Parrot):
    """Remembers how many tokens it read behind how many."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[tuple[int, int]] = []

    def read(
        self,
        tokens: Sequence[int],
        before: KeyValues | None = None,
        *,
        with_queries: bool = False,
    ) -> Reading:
        self.reads.append((before.tokens if before else 0, len(tokens)))
        return super().read(tokens, before, with_queries=with_queries)


@pytest.fixture(scope="module")
def renderer(smollm2: Path) -> ChatRenderer:
    declare_torchvision_ops()
    return ChatRenderer(smollm2)


def a_trace(name: str, turns: int) -> Trace:
    messages = tuple(synthetic_messages(name, turns, ["sorter"]))
    return Trace(name, "made", {"main": messages}, (TraceStep("main", 1),))


def made(renderer: ChatRenderer, *, seed: int = 0, tokens: int = TOKENS) -> LongSession:
    traces = [a_trace("one", 12), a_trace("other", 160)]
    return long_session(
        traces, renderer, tokens=tokens, facts=FACTS, turns=TURNS, seed=seed
    )


@pytest.fixture(scope="module")
def session(renderer: ChatRenderer) -> LongSession:
    return made(renderer)


@pytest.fixture(scope="module")
def compared(session: LongSession, renderer: ChatRenderer) -> list[Compared]:
    reader = cast(Reader, Parrot())
    index = index_session(reader, session, PROFILE)
    comparison = Comparison(reader, session, index, spelling_of(renderer))
    return list(comparison.compared([100, 50]))


def text_of(renderer: ChatRenderer, session: LongSession, blocks: Sequence[int]) -> str:
    tokens = session.tokens[min(blocks) * BLOCK_TOKENS : (max(blocks) + 1) * BLOCK_TOKENS]
    return renderer.decode(tokens)


def test_a_session_holds_all_traces_in_order_and_is_of_whole_blocks(
    session: LongSession, renderer: ChatRenderer
) -> None:
    assert len(session.tokens) % BLOCK_TOKENS == 0
    assert TOKENS < len(session.tokens) < TOKENS + 1024, "facts and closing words come on top"
    one, other = session.sources
    assert (one.first_token, one.trace, other.trace) == (0, "one", "other")
    first = synthetic_messages("other", 1, ["sorter"])[0].content
    begins = session.tokens[other.first_token : other.first_token + 200]
    assert first.split("\n")[0][:40] in renderer.decode(begins)
    assert session.source_of(other.first_token - 1) == "one"
    assert session.source_of(other.first_token) == "other"


def test_a_fact_is_asked_for_behind_everything_twice_and_stands_in_its_blocks(
    session: LongSession, renderer: ChatRenderer
) -> None:
    asked = [question for question in session.questions if question.right]
    assert [question.kind for question in asked] == [*FACT_KINDS] * FACTS
    blocks = len(session.tokens) // BLOCK_TOKENS
    for verbatim, other in zip(asked[::2], asked[1::2], strict=True):
        assert verbatim.right == other.right and verbatim.tokens != other.tokens
        assert verbatim.history_blocks == other.history_blocks == blocks
        assert max(verbatim.right) < blocks - RECENT_BLOCKS
        said = renderer.decode(verbatim.tokens).lower()
        (subject,) = (subject for subject in DEVELOPMENT.subjects if subject in said)
        assert subject in text_of(renderer, session, [*verbatim.right]).lower()


def test_a_turn_is_asked_with_the_end_of_its_prompt_in_the_second_half(
    session: LongSession, renderer: ChatRenderer
) -> None:
    turns = [question for question in session.questions if question.kind == "turn"]
    assert len(turns) == TURNS
    for turn in turns:
        first = turn.history_blocks * BLOCK_TOKENS
        assert turn.tokens == session.tokens[first : first + len(turn.tokens)]
        assert len(turn.tokens) <= 128 and first > 0.45 * len(session.tokens)
        assert renderer.decode(turn.tokens).endswith(opening_of(renderer))
    assert [t.history_blocks for t in turns] == sorted(t.history_blocks for t in turns)


def test_the_same_seed_makes_the_same_session_and_another_another(
    session: LongSession, renderer: ChatRenderer
) -> None:
    assert made(renderer) == session
    assert made(renderer, seed=1).tokens != session.tokens


def test_traces_that_are_too_short_are_refused_with_what_they_have(
    renderer: ChatRenderer,
) -> None:
    with pytest.raises(TraceError, match=r"tokens together, not 900,000") as refused:
        made(renderer, tokens=900_000)
    assert "lower --tokens" in refused.value.hint


def test_more_facts_than_there_are_subjects_for_are_refused(renderer: ChatRenderer) -> None:
    with pytest.raises(ConfigError, match="not 400 different facts"):
        long_session([a_trace("one", 160)], renderer, tokens=2048, facts=400, turns=0, seed=0)


def test_a_shortlist_that_does_not_fill_a_view_is_refused() -> None:
    def asked_behind(blocks: int) -> LongSession:
        return LongSession((), (), (LongQuestion("turn", blocks, (1,)),))

    competing = 4 * PLACES
    enough = asked_behind(competing + SINK_BLOCKS + RECENT_BLOCKS)
    require_places(enough, [50, 25])
    with pytest.raises(ConfigError, match="24 % of 188 blocks"):
        require_places(enough, [50, 24])
    with pytest.raises(ConfigError, match="of 0 blocks"):
        require_places(asked_behind(3), [50])


def test_a_session_is_read_in_stretches_of_which_only_rows_are_kept(
    session: LongSession,
) -> None:
    reader, told = Listener(), list[tuple[int, str]]()
    index = index_session(
        cast(Any, reader), session, PROFILE, lambda done, what: told.append((done, what))
    )
    whole, rest = divmod(len(session.tokens), STRETCH_TOKENS)
    assert reader.reads == [(0, STRETCH_TOKENS)] * whole + [(0, rest)] * bool(rest)
    assert index.rows == len(session.tokens) // BLOCK_TOKENS
    assert [done for done, _ in told] == list(range(0, len(session.tokens), STRETCH_TOKENS))
    assert told[0][1] == "one" and told[-1][1] == "other"


def test_a_shortlist_of_everything_loses_nothing(compared: list[Compared]) -> None:
    for each in compared:
        whole = each.by_share[100]
        assert whole.candidates == each.candidates
        assert (whole.score_kept, whole.blocks_kept) == (pytest.approx(1), 1)
        assert whole.rank == each.exact_rank
        assert whole.on_list is (None if each.kind == "turn" else True)


def test_a_shortlist_of_half_loses_something(compared: list[Compared]) -> None:
    halves = [(each, each.by_share[50]) for each in compared]
    assert all(half.candidates == each.candidates // 2 for each, half in halves)
    assert all(0 < half.score_kept <= 1 and 0 < half.blocks_kept <= 1 for _, half in halves)
    assert sum(half.score_kept for _, half in halves) < len(halves)
    assert sum(half.blocks_kept for _, half in halves) < len(halves)
    assert all(half.look_ms > 0 and each.exact_ms > 0 for each, half in halves)


def test_all_blocks_of_the_history_compete_but_those_in_every_view(
    session: LongSession, compared: list[Compared]
) -> None:
    for question, each in zip(session.questions, compared, strict=True):
        assert each.kind == question.kind
        assert each.candidates == question.history_blocks - SINK_BLOCKS - RECENT_BLOCKS


def chosen(**score_of: float) -> list[Chosen]:
    """block_7=1.0 is block 7 with this score."""
    return [
        Chosen(int(name.removeprefix("block_")), Reason.SCORE, score, {}, None)
        for name, score in score_of.items()
    ]


def listed(*blocks: int) -> Any:
    return np.isin(np.arange(60), blocks).astype(np.uint8)


EXACT = chosen(block_10=4, block_20=3, block_30=2, block_40=1)
FEW = chosen(block_10=4, block_50=3, block_30=2)


def test_what_is_kept_is_counted_by_score_and_by_block() -> None:
    found = shown(EXACT, FEW, listed(10, 30, 50), frozenset([30, 31]), 5.0)
    assert found == Shortlisted(
        candidates=3,
        score_kept=6 / 10,
        blocks_kept=2 / 4,
        rank=2,
        on_list=True,
        look_ms=5.0,
    )


def test_a_fact_beside_the_list_is_not_found_and_a_turn_looks_for_none() -> None:
    beside = shown(EXACT, FEW, listed(10, 30, 50), frozenset([20]), 5.0)
    assert (beside.rank, beside.on_list) == (None, False)
    turn = shown(EXACT, FEW, listed(10, 30, 50), frozenset(), 5.0)
    assert (turn.rank, turn.on_list) == (None, None)


LOST = Shortlisted(20, 0.5, 0.25, rank=None, on_list=False, look_ms=10)
FOUND = Shortlisted(20, 0.9, 0.75, rank=7, on_list=True, look_ms=20)
LATE = replace(FOUND, rank=8)
OF_TURN = Shortlisted(20, 0.8, 0.5, rank=None, on_list=None, look_ms=30)
BY_HAND = [
    Compared("verbatim", 80, 0, 40.0, {25: FOUND}),
    Compared("verbatim", 80, 7, 40.0, {25: LOST}),
    Compared("paraphrased", 80, 8, 40.0, {25: LATE}),
    Compared("turn", 80, None, 80.0, {25: OF_TURN}),
]


def test_figures_are_means_over_questions_of_a_kind() -> None:
    verbatim = shortlist_figures(BY_HAND, 25, ["verbatim"])
    assert verbatim.questions == 2
    assert verbatim.score_kept == pytest.approx(0.7)
    assert verbatim.blocks_kept == pytest.approx(0.5)
    assert (verbatim.exact_first_8, verbatim.first_8, verbatim.on_list) == (1, 0.5, 0.5)
    assert (verbatim.look_ms, verbatim.exact_ms) == (15, 40)
    paraphrased = shortlist_figures(BY_HAND, 25, ["paraphrased"])
    assert (paraphrased.exact_first_8, paraphrased.first_8, paraphrased.on_list) == (0, 0, 1)


def test_a_turn_has_no_fact_to_be_found_and_weighs_nothing_where_facts_are_counted() -> None:
    turn = shortlist_figures(BY_HAND, 25, ["turn"])
    assert math.isnan(turn.first_8) and math.isnan(turn.exact_first_8)
    assert math.isnan(turn.on_list) and turn.score_kept == pytest.approx(0.8)
    everything = shortlist_figures(BY_HAND, 25, KINDS)
    assert everything.questions == 4 and everything.on_list == pytest.approx(2 / 3)


def test_a_table_has_a_row_for_all_blocks_and_one_for_each_share() -> None:
    console = Console(width=170, record=True)
    console.print(shortlist_table(BY_HAND, [25]))
    text = console.export_text()
    assert "2 verbatim, 1 paraphrased, 1 turn" in text
    whole = next(line for line in text.splitlines() if line.split()[:1] == ["all"])
    assert "1.00 / 0.00" in whole and "50" in whole.split()
    row = next(line for line in text.splitlines() if line.split()[:2] == ["25", "%"])
    for cell in ("0.70 / 0.90 / 0.80", "0.50 / 0.75 / 0.50", "0.50 / 0.00", "0.50 / 1.00"):
        assert cell in row
    assert row.split()[-2:] == ["20", "0.40"]


def test_a_report_has_figures_by_share_and_kind_and_every_question() -> None:
    report = json.loads(json.dumps(shortlist_json(BY_HAND, [25])))
    assert set(report["figures"]["25"]) == {*KINDS, "all"}
    assert report["figures"]["25"]["verbatim"]["first_8"] == 0.5
    assert len(report["questions"]) == 4
    assert report["questions"][0]["by_share"]["25"]["rank"] == 7
