"""Scores of rows that lie in a second memory: those of the index, whatever came and went there.

The second memory is the CPU's own here; the arithmetic is that of the device that it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import pytest
import torch

from kvws.kernels.rotary import RotaryTable
from kvws.recall import index as index_module
from kvws.recall.device_rows import DeviceRows
from kvws.recall.index import BlockIndex
from kvws.recall.signals import content, mean_k, rotated_mean
from kvws.recall.signals.build import SIGNAL_NAMES
from kvws.recall.signals.enabled import EnabledSignals
from tests.recall.test_index import QUERIES, rows_of, signals

CPU = torch.device("cpu")
BLOCKS = 40
ENABLED = signals(*SIGNAL_NAMES)
ROWS = rows_of(2 * BLOCKS, ENABLED)


class ReadLog:
    """Notes which rows an index is asked for."""

    def __init__(self, index: BlockIndex, monkeypatch: pytest.MonkeyPatch) -> None:
        self.blocks: list[int] = []
        read = index._parts_of

        def noting(blocks: torch.Tensor) -> Sequence[tuple[torch.Tensor, ...]]:
            self.blocks += [int(block) for block in blocks]
            return read(blocks)

        monkeypatch.setattr(index, "_parts_of", noting)

    def taken(self) -> list[int]:
        blocks, self.blocks = self.blocks, []
        return blocks


def filled(near: DeviceRows | None, rows: torch.Tensor = ROWS[:BLOCKS]) -> BlockIndex:
    index = BlockIndex(ENABLED, near)
    index.write(range(len(rows)), rows)
    return index


def scores(index: BlockIndex, wanted: Sequence[int]) -> dict[str, torch.Tensor]:
    candidates = torch.zeros(BLOCKS, dtype=torch.bool)
    candidates[list(wanted)] = True
    return index.score(QUERIES, 32 * torch.arange(BLOCKS), 32 * BLOCKS, candidates)


def require_same(index: BlockIndex, wanted: Sequence[int], rows: torch.Tensor) -> None:
    """Scores are those of an index without a second memory."""
    for name, expected in scores(filled(None, rows), wanted).items():
        torch.testing.assert_close(scores(index, wanted)[name], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("tile_blocks", [16, 2048])
def test_scores_are_those_of_the_index(
    monkeypatch: pytest.MonkeyPatch, tile_blocks: int
) -> None:
    monkeypatch.setattr(index_module, "TILE_BLOCKS", tile_blocks)
    index = filled(DeviceRows(ENABLED, CPU, 30))
    for wanted in (range(5, 30), [0, 15, 16, 17, 39], [39], range(0, BLOCKS, 2), range(30)):
        require_same(index, wanted, ROWS[:BLOCKS])
    assert all(not of_blocks.any() for of_blocks in scores(index, []).values())


def test_rows_are_read_when_they_are_first_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    index = filled(DeviceRows(ENABLED, CPU, 30))
    log = ReadLog(index, monkeypatch)
    scores(index, range(10))
    assert log.taken() == list(range(10))
    scores(index, range(5, 15))
    assert log.taken() == list(range(10, 15))
    scores(index, range(15))
    assert log.taken() == []


def test_a_row_that_is_written_anew_is_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    index = filled(DeviceRows(ENABLED, CPU, 30))
    scores(index, range(10))
    index.write([3, 7], ROWS[[BLOCKS + 3, BLOCKS + 7]])
    log = ReadLog(index, monkeypatch)
    changed = ROWS[:BLOCKS].clone()
    changed[[3, 7]] = ROWS[[BLOCKS + 3, BLOCKS + 7]]
    require_same(index, range(10), changed)
    assert log.taken() == [3, 7]


def test_a_row_that_is_written_while_it_is_read_is_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index = filled(DeviceRows(ENABLED, CPU, 30))
    read = index._parts_of

    def written_meanwhile(blocks: torch.Tensor) -> Sequence[tuple[torch.Tensor, ...]]:
        parts = read(blocks)
        monkeypatch.setattr(index, "_parts_of", read)
        index.write([4], ROWS[[BLOCKS + 4]])
        return parts

    monkeypatch.setattr(index, "_parts_of", written_meanwhile)
    scores(index, range(10))
    changed = ROWS[:BLOCKS].clone()
    changed[4] = ROWS[BLOCKS + 4]
    require_same(index, range(10), changed)


def test_sessions_share_the_memory_and_never_their_rows() -> None:
    near = DeviceRows(ENABLED, CPU, 30)
    mine, theirs = filled(near), filled(near, ROWS[BLOCKS:])
    for wanted in (range(20), range(10, 30), range(25), range(5)):
        require_same(mine, wanted, ROWS[:BLOCKS])
        require_same(theirs, wanted, ROWS[BLOCKS:])


def test_more_candidates_than_there_is_room_for_are_scored_in_host_memory() -> None:
    near = DeviceRows(ENABLED, CPU, 30)
    index = filled(near)
    found, expected = scores(index, range(31)), scores(filled(None), range(31))
    assert all(torch.equal(found[name], expected[name]) for name in SIGNAL_NAMES)


def test_a_released_index_leaves_room(monkeypatch: pytest.MonkeyPatch) -> None:
    near = DeviceRows(ENABLED, CPU, 30)
    gone, other = filled(near), filled(near)
    scores(other, range(10))
    scores(gone, range(20))
    gone.release()
    log = ReadLog(other, monkeypatch)
    scores(other, range(10, 30))
    scores(other, range(10))
    assert log.taken() == list(range(10, 30)), "the first ten were not pushed out"


def test_rows_that_could_not_be_read_are_not_taken_for_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index = filled(DeviceRows(ENABLED, CPU, 30))
    with monkeypatch.context() as broken:

        def fail(blocks: torch.Tensor) -> Sequence[tuple[torch.Tensor, ...]]:
            raise MemoryError

        broken.setattr(index, "_parts_of", fail)
        with pytest.raises(MemoryError):
            scores(index, range(10))
    require_same(index, range(10), ROWS[:BLOCKS])


def test_runs_are_scored_there_too() -> None:
    near, alone = filled(DeviceRows(ENABLED, CPU, 30)), filled(None)
    found, expected = near.score_runs(QUERIES), alone.score_runs(QUERIES)
    assert found is not None and expected is not None and expected.any()
    torch.testing.assert_close(found, expected)


def test_an_index_without_signals_has_nothing_to_score() -> None:
    nothing = EnabledSignals((), [])
    index = BlockIndex(nothing, DeviceRows(nothing, CPU, 4))
    index.write([0], torch.zeros((1, nothing.row_bytes), dtype=torch.uint8))
    assert scores(index, [0]) == {}


def test_all_that_is_scored_with_lies_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device without bytes, whose operations only look at where their arguments lie."""
    meta = torch.device("meta")
    asked: list[str] = []

    def looking(name: str) -> Callable[..., torch.Tensor]:
        def operation(*arguments: Any) -> torch.Tensor:
            asked.append(name)
            assert {tensor.device for tensor in tensors_in(arguments)} == {meta}
            (candidates,) = arguments[-1] if name != "rotated" else arguments[3]
            return torch.zeros(len(candidates), device=meta)

        return operation

    monkeypatch.setattr(content, "token_scores", looking("content"))
    monkeypatch.setattr(mean_k, "mean_k_scores", looking("mean-k"))
    monkeypatch.setattr(rotated_mean, "rotated_scores", looking("rotated"))
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: torch.zeros(self.shape))
    index = filled(DeviceRows(ENABLED, meta, 30))
    counting = torch.tensor([True, False, True])
    candidates = torch.arange(BLOCKS) < 20
    found = index.score(QUERIES, 32 * torch.arange(BLOCKS), 32 * BLOCKS, candidates, counting)
    assert asked == ["mean-k", "rotated", "content"]
    assert {of_blocks.device for of_blocks in found.values()} == {CPU}
    runs = index.score_runs(QUERIES, counting)
    assert runs is not None and runs.device == CPU and asked[3:] == ["content"]


def tensors_in(found: Any) -> Iterator[torch.Tensor]:
    match found:
        case torch.Tensor():
            yield found
        case RotaryTable():
            yield from (found.cos, found.sin)
        case list() | tuple():
            for each in cast("Sequence[Any]", found):
                yield from tensors_in(each)
        case _:
            raise AssertionError(f"an argument that no tensor is in: {type(found)}")
