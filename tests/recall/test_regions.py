"""What of a prompt stays in view whatever it scores, and what gives way when it does not fit."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvws.recall.regions import Reason, Regions, blocks_of, place_of
from kvws.recall.spans import PromptSpans, Span

BY_IMPORTANCE = [
    Reason.TASK, Reason.SYSTEM, Reason.POLICY, Reason.TRAJECTORY, Reason.RECENT,
]  # fmt: skip


def blocks(begin: int, end: int) -> Span:
    """The span of blocks begin … end - 1."""
    return Span(32 * begin, 32 * end)


def regions(
    spans: PromptSpans, *, line: int = 100, budget: int = 40, sink: int = 1, recent: int = 10
) -> Regions:
    """Of a line that is numbered from 1000 on."""
    return Regions.of_prompt(
        range(1000, 1000 + line),
        spans,
        sink_blocks=sink,
        recent_blocks=recent,
        budget_blocks=budget,
    )


def kept(found: Regions, reason: Reason) -> list[int]:
    """Places in the line."""
    return [block - 1000 for block, why in found.pinned.items() if why is reason]


def test_a_span_has_the_blocks_that_it_touches_as_far_as_they_exist() -> None:
    assert blocks_of(Span(0, 32), 9) == range(1)
    assert blocks_of(Span(31, 33), 9) == range(2)
    assert blocks_of(Span(64, 65), 9) == range(2, 3)
    assert blocks_of(Span(64, 1000), 9) == range(2, 9)
    assert list(blocks_of(Span(320, 1000), 9)) == []
    assert list(blocks_of(Span(40, 40), 9)) == list(blocks_of(None, 9)) == []


def test_a_block_has_a_place_in_the_lines_that_it_stands_in() -> None:
    line = (0, 1, 4, 9)
    assert [place_of(block, line) for block in line] == [0, 1, 2, 3]
    assert all(place_of(block, line) is None for block in (2, 3, 8, 10))
    assert place_of(0, ()) is None


def test_a_prompt_of_unknown_parts_keeps_its_beginning_and_its_end() -> None:
    expected = Regions.of_line(range(1000, 1100), 1, 10)
    assert regions(PromptSpans()) == expected
    assert expected.sink == (1000,) and expected.recent == tuple(range(1090, 1100))


def test_parts_that_fit_are_kept_whole() -> None:
    found = regions(
        PromptSpans(
            system=blocks(0, 6),
            policies=(blocks(8, 10), blocks(20, 21)),
            task=blocks(80, 82),
            trajectory=blocks(82, 100),
        ),
        budget=48,
    )
    assert found.sink == (1000,) and found.recent == tuple(range(1095, 1100))
    assert kept(found, Reason.SYSTEM) == [1, 2, 3, 4, 5]
    assert kept(found, Reason.POLICY) == [8, 9, 20]
    assert kept(found, Reason.TASK) == [80, 81]
    assert kept(found, Reason.TRAJECTORY) == list(range(82, 95))
    assert not found.shrunk and list(found.pinned) == sorted(found.pinned)


def test_recent_blocks_beyond_the_newest_are_kept_where_the_trajectory_is_short() -> None:
    found = regions(PromptSpans(task=blocks(96, 97), trajectory=blocks(97, 100)))
    assert kept(found, Reason.RECENT) == [90, 91, 92, 93, 94]
    assert found.recent == (1095, 1096, 1097, 1098, 1099) and not found.shrunk


def test_the_oldest_recent_blocks_give_way_first() -> None:
    found = regions(PromptSpans(system=blocks(0, 22), task=blocks(70, 71)))
    assert kept(found, Reason.RECENT) == [93, 94], "30 - 22 - 1 - 5"
    assert found.shrunk == {Reason.RECENT: 3}


def test_then_the_oldest_of_the_trajectory() -> None:
    found = regions(
        PromptSpans(system=blocks(0, 20), task=blocks(70, 71), trajectory=blocks(71, 100))
    )
    assert kept(found, Reason.TRAJECTORY) == [91, 92, 93, 94]
    assert kept(found, Reason.RECENT) == []
    assert found.shrunk == {Reason.TRAJECTORY: 20, Reason.RECENT: 1}


def test_then_the_end_of_the_policies() -> None:
    found = regions(
        PromptSpans(
            system=blocks(0, 20),
            policies=(blocks(30, 33), blocks(40, 44)),
            task=blocks(70, 71),
            trajectory=blocks(71, 90),
        )
    )
    assert kept(found, Reason.POLICY) == [30, 31, 32, 40]
    assert found.shrunk == {Reason.POLICY: 3, Reason.TRAJECTORY: 19, Reason.RECENT: 5}


def test_then_the_end_of_the_system_prompt() -> None:
    found = regions(PromptSpans(system=blocks(0, 60), task=blocks(70, 75)))
    assert kept(found, Reason.TASK) == [70, 71, 72, 73, 74]
    assert kept(found, Reason.SYSTEM) == list(range(1, 20))
    assert found.shrunk == {Reason.SYSTEM: 40, Reason.RECENT: 5}


def test_a_task_beyond_all_bounds_keeps_both_its_ends_and_leaves_a_head_to_the_system() -> None:
    found = regions(PromptSpans(system=blocks(0, 30), task=blocks(30, 90)))
    assert kept(found, Reason.SYSTEM) == list(range(1, 8)), "a quarter of thirty"
    assert kept(found, Reason.TASK) == [*range(30, 39), *range(82, 90)]
    assert found.shrunk == {Reason.TASK: 43, Reason.SYSTEM: 22, Reason.RECENT: 5}
    alone = regions(PromptSpans(task=blocks(30, 90)))
    assert len(kept(alone, Reason.TASK)) == 24, "nobody claims a share"


def test_sink_and_newest_blocks_are_kept_though_they_exceed_the_cap() -> None:
    found = regions(PromptSpans(task=blocks(70, 75)), budget=12, sink=6, recent=5)
    assert len(found.sink) == 6 and found.recent == (1097, 1098, 1099) and not found.pinned
    assert found.shrunk == {Reason.TASK: 5, Reason.RECENT: 2}


def test_the_newest_version_of_a_part_may_overlap_another() -> None:
    found = regions(
        PromptSpans(system=blocks(0, 4), policies=(Span(100, 140), Span(140, 200), Span(60, 100)))
    )
    assert kept(found, Reason.SYSTEM) == [1, 2, 3]
    assert kept(found, Reason.POLICY) == [4, 5, 6]
    assert not found.shrunk


@st.composite
def prompts(draw: st.DrawFn) -> tuple[PromptSpans, dict[str, int]]:
    def span() -> Span:
        begin = draw(st.integers(0, 32 * 70))
        return Span(begin, begin + draw(st.integers(0, 32 * 40)))

    sink, recent = draw(st.integers(1, 3)), draw(st.integers(1, 8))
    budget = draw(st.integers(sink + recent + 1, 40))
    line = draw(st.integers(budget + 1, 60))
    spans = PromptSpans(
        system=draw(st.none() | st.integers(0, 32 * 70).map(lambda end: Span(0, end))),
        policies=tuple(span() for _ in range(draw(st.integers(0, 3)))),
        task=span() if draw(st.booleans()) else None,
        trajectory=span() if draw(st.booleans()) else None,
    )
    return spans, {"line": line, "budget": budget, "sink": sink, "recent": recent}


@settings(max_examples=500, deadline=None)
@given(prompts())
def test_room_is_given_out_by_importance(case: tuple[PromptSpans, dict[str, int]]) -> None:
    spans, sizes = case
    if spans == PromptSpans():
        return
    found = regions(spans, **sizes)
    line, recent, sink = sizes["line"], sizes["recent"], sizes["sink"]
    cap = 3 * sizes["budget"] // 4
    assert len(set(found.fixed)) == len(found.fixed)
    assert len(found.fixed) <= max(cap, sink + -(-recent // 2))
    assert found.sink == tuple(range(1000, 1000 + sink))
    assert found.recent == tuple(range(1000 + line - -(-recent // 2), 1000 + line))

    of_part = {
        Reason.TASK: {*blocks_of(spans.task, line)},
        Reason.SYSTEM: {*blocks_of(spans.system, line)},
        Reason.POLICY: {place for span in spans.policies for place in blocks_of(span, line)},
        Reason.TRAJECTORY: {*blocks_of(spans.trajectory, line)},
        Reason.RECENT: {*range(line - recent, line)} - {*range(sink)},
    }
    in_view = {block - 1000 for block in found.fixed}
    left_out = {reason: len(places - in_view) for reason, places in of_part.items()}
    assert found.shrunk == {reason: count for reason, count in left_out.items() if count}
    for rank, reason in enumerate(BY_IMPORTANCE):
        assert set(kept(found, reason)) <= of_part[reason]
        less_important = BY_IMPORTANCE[rank + 1 :]
        if reason in found.shrunk:
            assert len(found.fixed) >= cap, "there was room"
            if reason is Reason.TASK:  # the system prompt's share
                assert len(kept(found, Reason.SYSTEM)) <= cap // 4
                less_important = less_important[1:]
            assert not any(kept(found, other) for other in less_important)
