"""The log: a tree of blocks that grows, forks and never forgets."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from kvws.session.workspace import Workspace


def tokens(blocks: str, tail: int = 0) -> list[int]:
    """32 tokens for each letter, then a tail of other tokens."""
    return [ord(letter) for letter in blocks for _ in range(32)] + [1] * tail


def written(workspace: Workspace, blocks: str, thread: str = "main") -> tuple[int, ...]:
    """Let a thread's history be those blocks."""
    line = tuple(workspace.allocate((), tokens(blocks)))
    workspace.record(workspace.thread(thread), line, (), ())
    return line


def recalled(workspace: Workspace, thread: str, line: tuple[int, ...] = ()) -> set[int]:
    """The blocks that a thread may recall."""
    marks = workspace.recallable(thread, line)
    assert len(marks) == workspace.block_count
    return {number for number, mark in enumerate(marks) if mark}


@pytest.fixture
def workspace() -> Workspace:
    return Workspace("w")


def test_an_empty_log_aligns_nothing(workspace: Workspace) -> None:
    aligned = workspace.align(tokens("ab"))
    assert aligned.line == () and list(aligned.pending) == tokens("ab")


def test_a_grown_prompt_starts_with_its_blocks(workspace: Workspace) -> None:
    line = written(workspace, "abc")
    aligned = workspace.align(tokens("abcd", tail=5))
    assert aligned.line == line and list(aligned.pending) == tokens("d", tail=5)


def test_at_least_one_token_is_pending(workspace: Workspace) -> None:
    line = written(workspace, "abc")
    aligned = workspace.align(tokens("abc"))
    assert aligned.line == line[:2] and list(aligned.pending) == tokens("c")
    assert workspace.align([]).pending == ()


def test_the_partial_tail_gets_no_block(workspace: Workspace) -> None:
    assert len(workspace.allocate((), tokens("ab", tail=31))) == 2
    assert workspace.allocate((), tokens("", tail=31)) == []


def test_an_edited_history_is_a_new_branch_and_the_old_one_stays(workspace: Workspace) -> None:
    old = written(workspace, "abcd")
    edited = workspace.align(tokens("abX", tail=3))
    assert edited.line == old[:2]
    branch = workspace.allocate(edited.line, edited.pending)
    assert not set(branch) & set(old)
    assert workspace.align(tokens("abcd", tail=1)).line == old
    assert workspace.align(tokens("abX", tail=1)).line == (*old[:2], *branch)
    assert workspace.tokens_of([*old[:2], *branch]) == tokens("abX")
    workspace.check_integrity()


def test_equal_tokens_behind_another_history_are_another_block(workspace: Workspace) -> None:
    a, first, b, second = written(workspace, "axbx")
    assert first != second
    assert workspace.block_tokens(first) == workspace.block_tokens(second)
    assert workspace.lineage(second) == [a, first, b]
    assert workspace.lineage(a) == []


def test_the_shared_prefix_of_sub_agents_is_stored_once(workspace: Workspace) -> None:
    main = written(workspace, "sysA", "main")
    sub = written(workspace, "sysB", "sub")
    assert main[:3] == sub[:3] and main[3] != sub[3]
    assert workspace.block_count == 5
    workspace.check_integrity()


def test_blocks_taken_back_are_as_if_never_written(workspace: Workspace) -> None:
    line = written(workspace, "ab")
    fresh = workspace.allocate(line, tokens("cd"))
    workspace.take_back(fresh)
    assert workspace.align(tokens("abcd", tail=1)).line == line
    assert [workspace.exists(n) for n in (*line, *fresh)] == [True, True, False, False]
    workspace.check_integrity()
    with pytest.raises(AssertionError, match="never registered"):
        workspace.block_tokens(fresh[0])


def test_numbers_taken_back_are_not_given_out_again(workspace: Workspace) -> None:
    """A rank may still hold bytes under such a number."""
    fresh = workspace.allocate((), tokens("ab"))
    workspace.take_back(fresh)
    again = workspace.allocate((), tokens("ab"))
    assert not set(again) & set(fresh)
    workspace.check_integrity()


def test_other_answers_continue_the_line_with_the_same_question(workspace: Workspace) -> None:
    line = written(workspace, "ab")
    for said in ("x" * 20, "y" * 20):
        workspace.allocate(line, [ord(letter) for letter in "ask".ljust(12) + said])
    workspace.allocate(line, tokens("c"))
    workspace.allocate((*line, 2), tokens("d"))
    elsewhere = workspace.allocate(line[:1], [ord(letter) for letter in "ask".ljust(32)])
    question = [ord(letter) for letter in "ask"]
    assert workspace.other_answers(line, question) == [2, 3]
    assert workspace.other_answers(line[:1], question) == elsewhere
    assert workspace.other_answers((), question) == []
    workspace.take_back([3])
    assert workspace.other_answers(line, question) == [2]


def test_a_token_id_is_one_object_in_all_blocks(workspace: Workspace) -> None:
    ids = [int("70001") for _ in range(64)]
    assert len(set(map(id, ids))) == 64
    workspace.allocate((), ids)
    assert len({id(token) for block in (0, 1) for token in workspace.block_tokens(block)}) == 1


def test_a_namespace_belongs_to_one_life_and_epoch(workspace: Workspace) -> None:
    seen = {workspace.namespace}
    for _ in range(3):
        workspace.start_new_epoch()
        seen.add(workspace.namespace)
    seen.add(Workspace("w").namespace)
    seen.add(Workspace("v").namespace)
    assert len(seen) == 6
    assert workspace.namespace == workspace.namespace


def test_a_thread_is_created_at_first_use(workspace: Workspace) -> None:
    thread = workspace.thread("main")
    assert workspace.thread("main") is thread and workspace.thread("other") is not thread
    assert thread.line == () and thread.view == ()


def test_a_thread_recalls_all_it_ever_had_and_nothing_of_another(workspace: Workspace) -> None:
    before = written(workspace, "sysABC")
    after = written(workspace, "sysAX")
    sub = written(workspace, "sysB", "sub")
    assert recalled(workspace, "main") == {*before, *after}
    assert recalled(workspace, "sub") == {*sub}
    assert before[:3] == sub[:3], "what is shared is in reach of both"


def test_a_thread_that_goes_on_after_a_compaction_recalls_what_was_summarised(
    workspace: Workspace,
) -> None:
    before = written(workspace, "abcd")
    sub = written(workspace, "mn", "sub#2")
    assert recalled(workspace, "main#2") == {*before}
    after = written(workspace, "sum", "main#2")
    for name in ("main", "main#2", "main#3"):
        assert recalled(workspace, name) == {*before, *after}
    assert recalled(workspace, "sub") == {*sub}


def test_a_thread_recalls_the_line_it_is_about_to_have(workspace: Workspace) -> None:
    """A new thread whose prompt begins with another's."""
    line = written(workspace, "abcd")
    assert recalled(workspace, "sub", line[:3]) == {*line[:3]}
    assert recalled(workspace, "sub") == set(), "asking leaves no mark"


def test_a_side_call_sees_its_own_line_and_leaves_nothing_to_recall(workspace: Workspace) -> None:
    line = written(workspace, "abc")
    aside = written(workspace, "abcX", "aside-1")
    other = written(workspace, "Y", "aside-2#1")
    assert recalled(workspace, "aside-1") == {*aside}
    assert recalled(workspace, "aside-2#1") == {*other} != recalled(workspace, "aside-2")
    workspace.forget_thread("aside-1")
    assert "aside-1" not in workspace.threads
    assert recalled(workspace, "aside-1") == set()
    assert recalled(workspace, "main") == {*line}
    assert workspace.align(tokens("abcX", tail=1)).line == aside, "its blocks stay in the log"
    workspace.check_integrity()


def test_a_forgotten_thread_is_created_anew_and_its_family_remembers(workspace: Workspace) -> None:
    line = written(workspace, "abc")
    workspace.forget_thread("main")
    workspace.forget_thread("never there")
    assert workspace.thread("main").line == ()
    assert recalled(workspace, "main") == recalled(workspace, "main#2") == {*line}
    workspace.check_integrity()


def test_a_thread_at_work_is_not_forgotten(workspace: Workspace) -> None:
    thread = workspace.thread("aside-1")

    async def forget_while_it_works() -> None:
        async with thread.lock:
            with pytest.raises(AssertionError):
                workspace.forget_thread("aside-1")

    asyncio.run(forget_while_it_works())
    assert workspace.thread("aside-1") is thread


def test_blocks_taken_back_are_not_recalled(workspace: Workspace) -> None:
    line = written(workspace, "abcd")
    thread = workspace.thread("main")
    workspace.record(thread, line[:2], (), ())
    workspace.take_back(line[2:])
    assert recalled(workspace, "main") == {*line[:2]}
    workspace.check_integrity()


@settings(max_examples=60, deadline=None)
@given(st.text("abc", max_size=8), st.text("abc", max_size=8), st.integers(0, 40))
def test_an_alignment_spells_the_prompt(history: str, prompt: str, tail: int) -> None:
    workspace = Workspace("w")
    written(workspace, history)
    asked = tokens(prompt, tail)
    aligned = workspace.align(asked)
    assert [*workspace.tokens_of(aligned.line), *aligned.pending] == asked
    assert not asked or aligned.pending


@pytest.mark.parametrize(
    "fault",
    [
        "index", "parent", "order", "broken path", "unknown block", "block twice", "tokens",
        "forgetful family", "family with a gap", "family of the gone",
    ],
)  # fmt: skip
def test_integrity_catches_a_planted_fault(workspace: Workspace, fault: str) -> None:
    line = written(workspace, "abc")
    thread = workspace.thread("main")
    if fault == "index":
        del workspace._children[line[1], workspace.block_tokens(line[2])]
    elif fault == "parent":
        workspace._parents[line[2]] = line[0]
    elif fault == "order":
        workspace._parents[line[0]] = line[2]
        workspace._children[line[2], workspace.block_tokens(line[0])] = line[0]
        del workspace._children[-1, workspace.block_tokens(line[0])]
        thread.line = ()
    elif fault == "forgetful family":
        workspace._families.drop("main")
    elif fault == "family with a gap":
        workspace._families._marks["main"][line[1]] = 0
    elif fault == "family of the gone":
        thread.line = line[:2]
        workspace.take_back(line[2:])
        workspace._families._marks["main"][line[2]] = 1
    elif fault == "broken path":
        thread.line = (line[0], line[2])
    elif fault == "unknown block":
        thread.view = (line[0], 99)
    elif fault == "block twice":
        thread.view = (line[0], line[1], line[0])
    else:
        workspace._tokens[line[1]] = tuple(range(32))
    with pytest.raises(AssertionError):
        workspace.check_integrity()


class GrowingLog(RuleBasedStateMachine):
    """Against a model: a set of histories, each a text of one letter per block."""

    histories = Bundle("histories")

    def __init__(self) -> None:
        super().__init__()
        self.workspace = Workspace("w")
        self.prefixes: set[str] = set()
        self.number: dict[str, int] = {}
        self.had: dict[str, set[int]] = {}

    @rule(target=histories, text=st.text("ab", max_size=4))
    def start(self, text: str) -> str:
        return self._write("", text)

    @rule(target=histories, history=histories, text=st.text("ab", max_size=3))
    def grow(self, history: str, text: str) -> str:
        return self._write(history, text)

    @rule(
        target=histories,
        history=histories,
        keep=st.integers(0, 6),
        text=st.text("ab", max_size=3),
    )
    def edit(self, history: str, keep: int, text: str) -> str:
        return self._write(history[:keep], text)

    @rule(history=histories, text=st.text("ab", min_size=1, max_size=3), kept=st.integers(0, 2))
    def lose_the_end_of_an_allocation(self, history: str, text: str, kept: int) -> None:
        line = self._line(history)
        first_fresh = self.workspace.block_count
        numbers = self.workspace.allocate(line, tokens(text))
        fresh = [n for n in numbers[kept:] if n >= first_fresh]
        self.workspace.take_back(fresh)
        for i, number in enumerate(numbers):
            if number not in fresh:
                self._remember(history + text[: i + 1], number)

    def _write(self, history: str, text: str) -> str:
        numbers = self.workspace.allocate(self._line(history), tokens(text, tail=3))
        for i, number in enumerate(numbers):
            self._remember(history + text[: i + 1], number)
        return history + text

    def _remember(self, prefix: str, number: int) -> None:
        assert self.number.setdefault(prefix, number) == number, "a block changed its number"
        self.prefixes.add(prefix)

    def _line(self, history: str) -> tuple[int, ...]:
        """A thread has that line now; histories that begin alike are of one family."""
        line = tuple(self.number[history[: i + 1]] for i in range(len(history)))
        family = history[:1] or "none"
        self.workspace.record(self.workspace.thread(f"{family}#{history}"), line, (), ())
        self.had.setdefault(family, set()).update(line)
        return line

    @rule(history=histories, tail=st.integers(1, 31))
    def align(self, history: str, tail: int) -> None:
        aligned = self.workspace.align(tokens(history, tail))
        assert aligned.line == self._line(history) and list(aligned.pending) == [1] * tail

    @invariant()
    def one_block_per_prefix(self) -> None:
        self.workspace.check_integrity()
        existing = [n for n in range(self.workspace.block_count) if self.workspace.exists(n)]
        assert sorted(self.number.values()) == existing
        for prefix, number in self.number.items():
            assert self.workspace.tokens_of([number]) == tokens(prefix[-1])
            before = [self.number[prefix[: i + 1]] for i in range(len(prefix) - 1)]
            assert self.workspace.lineage(number) == before

    @invariant()
    def each_family_recalls_what_it_had(self) -> None:
        for family, had in self.had.items():
            assert recalled(self.workspace, family) == had


TestGrowingLog = GrowingLog.TestCase
TestGrowingLog.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
