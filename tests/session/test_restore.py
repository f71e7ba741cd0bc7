"""A log and what the ranks hold become the session of the newest whole commit.

Set KVWS_SEED to repeat a run.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace
from typing import Any

import pytest

from kvws.observe.step_report import StepReport
from kvws.session.commit import BlockRecord, Commit, encode_commit
from kvws.session.journal import NullJournal, _decode
from kvws.session.restore import restore
from kvws.session.workspace import Workspace
from kvws.store.record import encode_frame

SEED = int(os.environ.get("KVWS_SEED", "3"))


class ListJournal(NullJournal):
    """Keeps frames and, after each, what the session was."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self.file = bytearray()
        self.ends: list[int] = []
        self.commits: list[Commit] = []
        self.states: list[dict[str, Any]] = [state_of(workspace)]

    def append(self, commit: Commit) -> None:
        commit = replace(commit, synced_to=len(self.file))
        self.file += encode_frame(encode_commit(commit), len(self.file))
        self.ends.append(len(self.file))
        self.commits.append(commit)
        state = state_of(self.workspace)
        moved = [commit.thread.name] if commit.thread is not None else []
        threads = {**self.states[-1]["threads"], **{n: state["threads"][n] for n in moved}}
        self.states.append({**state, "threads": threads})

    @property
    def log(self) -> list[tuple[int, Commit]]:
        return list(zip([0, *self.ends], self.commits, strict=False))


def state_of(workspace: Workspace) -> dict[str, Any]:
    blocks = [n for n in range(workspace.block_count) if workspace.exists(n)]
    return {
        "blocks": {n: (workspace.block_tokens(n), tuple(workspace.lineage(n))) for n in blocks},
        "threads": {
            name: (t.line, t.view, t.kept_last_view, frozenset(t.unfinished))
            for name, t in workspace.threads.items()
        },
        "recallable": {
            name: {n for n, mark in enumerate(workspace.recallable(name, ())) if mark}
            for name in ("main", "sub")
        },
    }


def tokens(letters: str) -> list[int]:
    return [ord(letter) for letter in letters for _ in range(32)]


def pass_over(workspace: Workspace, rng: random.Random, *, ended: bool) -> None:
    """One registration of a thread that goes on, forks or edits; some of it may not fit."""
    thread = workspace.thread(rng.choice(["main", "main#2", "sub"]))
    if rng.random() < 0.2:
        source = workspace.thread(rng.choice(["main", "main#2", "sub"])).line
        thread.line = source[: rng.randrange(len(source) + 1)]
    line = thread.line
    new_tokens = tokens("".join(rng.choice("abc") for _ in range(rng.randrange(4))))
    known = len(workspace.continuation(line, new_tokens))
    numbers = workspace.allocate(line, new_tokens)
    workspace.announce(numbers[known:])
    held = rng.choice([len(numbers)] * 4 + [known])
    workspace.take_back(numbers[held:] if held >= known else ())
    numbers = numbers[:held]
    fresh = numbers[known:]
    line = (*line, *numbers)
    if rng.random() < 0.1:  # cut off before anybody knew what became of it
        workspace.leave_unsettled(fresh)
        return
    thread.kept_last_view = rng.random() < 0.5
    view = tuple(rng.sample(line, rng.randrange(len(line) + 1)))
    report = (StepReport(thread.name, new_tokens=rng.randrange(9)), {"n": rng.random()})
    workspace.record(thread, line, view, fresh, ended=report if ended else None)


def session(seed: int, passes: int = 25) -> ListJournal:
    rng = random.Random(seed)
    workspace = Workspace("w")
    journal = workspace.journal = ListJournal(workspace)
    for _ in range(passes):
        pass_over(workspace, rng, ended=rng.random() < 0.4)
    return journal


def of_the_tree(commit: Commit) -> tuple[BlockRecord, ...]:
    return (*commit.unsettled, *commit.blocks)


def every_block(commit: Commit) -> tuple[BlockRecord, ...]:
    return (*commit.announced, *of_the_tree(commit))


def newest_whole(commits: list[Commit], held: frozenset[int]) -> int:
    """By brute force: after how many commits the session goes on."""
    whole = [
        k for k, commit in enumerate(commits, start=1)
        if commit.blocks and all(block.number in held for block in commit.blocks)
    ]  # fmt: skip
    end = max(whole, default=0)
    while end < len(commits) and not commits[end].blocks:
        end += 1
    return end


@pytest.mark.parametrize("seed", range(SEED, SEED + 6))
def test_every_end_of_the_log_with_every_part_of_the_blocks(seed: int) -> None:
    print(f"seed {seed}")
    journal = session(seed)
    count = journal.workspace.block_count
    for length in range(len(journal.commits) + 1):
        for first_missing in range(count + 1):
            held = frozenset(range(first_missing)) & journal.states[-1]["blocks"].keys()
            workspace, restored = restore("w", journal.log[:length], held)
            kept = newest_whole(journal.commits[:length], held)
            expected = journal.states[kept]
            known = {b.number for c in journal.commits[:kept] for b in of_the_tree(c)}
            state = state_of(workspace)
            assert state["threads"] == expected["threads"]
            assert state["recallable"] == expected["recallable"]
            assert state["blocks"].keys() == known
            assert state["blocks"].items() <= expected["blocks"].items()
            named = {b.number for c in journal.commits[:length] for b in every_block(c)}
            assert set(restored.to_forget) == (named | held) - (known & held)
            assert set(restored.lost) == known - held
            assert restored.blocks == len(known & held)
            steps = [c.step for c in journal.commits[:kept] if c.step is not None]
            assert list(restored.steps) == steps
            assert restored.void_from == (
                [0, *journal.ends][kept] if kept < length else None
            )
            assert workspace.block_count >= 1 + max(held | known, default=-1)


def test_blocks_that_are_written_again_at_their_place_get_their_numbers_again() -> None:
    journal = session(SEED)
    everything = state_of(journal.workspace)["blocks"]
    workspace, restored = restore("w", journal.log, frozenset())
    assert restored.cut_blocks == sum(len(c.blocks) for c in journal.commits)
    assert workspace.registered_blocks == 0
    for number, (_, lineage) in everything.items():
        spelled = journal.workspace.tokens_of([*lineage, number])
        assert workspace.allocate((), spelled) == [*lineage, number]
    other = workspace.allocate((), tokens("xyz"))
    assert not set(other) & everything.keys() and min(other) >= journal.workspace.block_count
    workspace.check_integrity()


def test_cut_commits_stay_cut_and_the_session_goes_on_behind_them() -> None:
    """Three lives, each of which loses the blocks of its end."""
    for seed in range(SEED, SEED + 20):
        rng = random.Random(seed)
        journal = session(seed, passes=8)
        held = frozenset(journal.states[-1]["blocks"])
        for _ in range(3):
            held = held - set(sorted(held)[-rng.randrange(1, 4) :])
            workspace, restored = restore("w", journal.log, held)
            survived = state_of(workspace)
            journal.workspace, workspace.journal = workspace, journal
            journal.states.append(survived)
            if restored.void_from is not None:
                journal.append(Commit(void_from=restored.void_from))
            again, twice = restore("w", journal.log, held - set(restored.to_forget))
            assert state_of(again) == survived
            assert twice.void_from is None and twice.steps == restored.steps
            for _ in range(4):
                pass_over(workspace, rng, ended=rng.random() < 0.4)
            whole, _ = restore("w", journal.log, frozenset(state_of(workspace)["blocks"]))
            present = state_of(workspace)
            recorded = present["blocks"].keys() - set(workspace._unsettled)
            for name, expected in journal.states[-1]["threads"].items():
                assert state_of(whole)["threads"][name] == expected
            assert state_of(whole)["blocks"].keys() == recorded
            held = frozenset(recorded)


def test_the_log_cut_at_every_byte_holds_its_whole_commits() -> None:
    journal = session(SEED, passes=12)
    for length in range(len(journal.file) + 1):
        log, valid_bytes, damaged = _decode(bytes(journal.file[:length]))
        whole = sum(end <= length for end in journal.ends)
        assert [commit for _, commit in log] == journal.commits[:whole]
        assert valid_bytes == [0, *journal.ends][whole] and damaged == 0


@pytest.mark.parametrize("bits", [1, 9])
def test_a_damaged_log_never_gives_a_block_other_tokens(bits: int) -> None:
    """Blocks behind the damage whose parents are gone are cut; all others are back."""
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    journal = session(SEED, passes=16)
    truth = journal.states[-1]["blocks"]
    lost_something = kept_behind_damage = 0
    for position in range(0, len(journal.file), 1 if bits == 1 else 5):
        data = bytearray(journal.file)
        for _ in range(bits):
            data[position] ^= 1 << rng.randrange(8)
            position = min(len(data) - 1, position + rng.randrange(3))
        if data == journal.file:
            continue
        log, _, _ = _decode(bytes(data))
        workspace, restored = restore("w", log, frozenset(truth))
        blocks = state_of(workspace)["blocks"]
        assert blocks.items() <= truth.items()
        missing = {b.number for c in journal.commits for b in of_the_tree(c)}
        missing -= {b.number for _, c in log for b in of_the_tree(c)}
        reachable = {n for n, (_, before) in truth.items() if not missing & {n, *before}}
        recorded = {b.number for _, c in log for b in of_the_tree(c)}
        assert blocks.keys() == reachable & recorded
        named = {b.number for _, c in log for b in every_block(c)}
        assert set(restored.to_forget) == (named | truth.keys()) - blocks.keys()
        lost_something += bool(missing)
        kept_behind_damage += bool(missing) and max(blocks, default=-1) > max(missing)
        fresh = workspace.allocate((), tokens("qrs"))
        assert not set(fresh) & truth.keys()
        workspace.check_integrity()
    assert lost_something and kept_behind_damage


def test_a_number_never_stands_for_two_blocks() -> None:
    """Whatever a log claims."""
    one, two = Workspace("w"), Workspace("w")
    journals = [ListJournal(one), ListJournal(two)]
    for workspace, journal, letters in ((one, journals[0], "ab"), (two, journals[1], "ac")):
        workspace.journal = journal
        line = tuple(workspace.allocate((), tokens(letters)))
        workspace.record(workspace.thread(letters), line, line, line)
    log = [(0, journals[0].commits[0]), (9, journals[1].commits[0])]
    workspace, _ = restore("w", log, frozenset({0, 1}))
    assert workspace.tokens_of([0, 1]) == tokens("ab")
    workspace.check_integrity()


def test_a_side_call_that_was_cut_off_is_not_gone_on_with() -> None:
    workspace = Workspace("w")
    journal = workspace.journal = ListJournal(workspace)
    for name, letters in (("main", "ab"), ("aside-1", "abX"), ("main", "abc")):
        thread = workspace.thread(name)
        line = tuple(workspace.allocate((), tokens(letters)))
        workspace.record(thread, line, line, [n for n in line if n not in thread.line])
    restored, _ = restore("w", journal.log, frozenset(range(4)))
    assert list(restored.threads) == ["main"]
    aside = restored.align([*tokens("abX"), 1]).line
    assert len(aside) == 3, "its blocks are in the log"
    assert not any(restored.recallable("aside-1", ()))
    expected = journal.states[-1]["recallable"]["main"]
    assert state_of(restored)["recallable"]["main"] == expected == {*aside[:2], 3}


def test_a_block_that_claims_to_continue_a_later_one_is_cut() -> None:
    """No such log was ever written; numbers grow along every line."""
    blocks = [BlockRecord(5, -1, tuple(tokens("a"))), BlockRecord(3, 5, tuple(tokens("b")))]
    workspace, restored = restore("w", [(0, Commit(blocks=tuple(blocks)))], frozenset({3, 5}))
    assert [workspace.exists(n) for n in (3, 5)] == [False, True]
    assert restored.cut_blocks == 1 and restored.to_forget == (3,)


def test_what_was_acknowledged_and_is_gone_is_counted() -> None:
    journal = session(SEED, passes=8)
    held = frozenset(journal.states[-1]["blocks"])
    numbers = [b.number for c in journal.commits[:5] for b in c.blocks]
    journal.append(Commit(acknowledged_to=journal.ends[4]))
    assert restore("w", journal.log, held)[1].acknowledged_lost == 0
    newest = max(b.number for c in journal.commits for b in c.blocks)
    assert newest not in numbers
    assert restore("w", journal.log, held - {newest})[1].acknowledged_lost == 0
    workspace, restored = restore("w", journal.log, held - {numbers[0], newest})
    assert restored.acknowledged_lost == 1 and numbers[0] in workspace.acknowledged_before
    assert newest not in workspace.acknowledged_before
