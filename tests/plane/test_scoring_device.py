"""Where a rank scores is decided at its start, said, and checked."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from kvws.engine.scoring_device import (
    KeysOfRank,
    ScoringDevice,
    open_scoring_device,
    require_same_scores,
)
from kvws.errors import ConfigError, SelfCheckFailed
from kvws.recall.device_rows import DeviceRows
from kvws.recall.signals.build import SIGNAL_NAMES
from kvws.recall.signals.content import Content
from kvws.recall.signals.signal import Query, Tile
from kvws.tiers.geometry import PayloadGeometry
from tests.recall.keys import DIM, KV_HEADS, LAYERS, QUERY_HEADS
from tests.recall.test_index import signals

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
ENABLED = signals(*SIGNAL_NAMES)
KEYS = KeysOfRank(PayloadGeometry(LAYERS, KV_HEADS, DIM, torch.float32), QUERY_HEADS, 320)
ENOUGH_BYTES = 60 * ENABLED.row_bytes


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose memory is the CPU's own, of which 400 rows are free."""
    free_bytes = 400 * ENABLED.row_bytes
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free_bytes, 2 * free_bytes))
    monkeypatch.setattr(
        "kvws.engine.scoring_device.DeviceRows",
        lambda signals, device, blocks: DeviceRows(signals, CPU, blocks),
    )


@pytest.mark.parametrize("index_bytes", [None, 0])
def test_without_a_gpu_there_is_nothing_to_decide(index_bytes: int | None) -> None:
    assert open_scoring_device(ENABLED, CPU, index_bytes, KEYS) == ScoringDevice(None, "")


def test_memory_of_a_gpu_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ConfigError, match="runs on a CPU") as caught:
        open_scoring_device(ENABLED, CPU, 1 << 30, KEYS)
    assert "--index-gb" in (caught.value.hint or "")


@pytest.mark.usefixtures("gpu")
def test_unasked_a_fourth_of_what_is_free_is_taken() -> None:
    scoring = open_scoring_device(ENABLED, GPU, None, KEYS)
    assert scoring.rows is not None and scoring.rows.capacity_blocks == 100
    assert scoring.description == "on cuda:0, up to 100 blocks at once"


@pytest.mark.usefixtures("gpu")
def test_what_was_asked_for_is_taken() -> None:
    scoring = open_scoring_device(ENABLED, GPU, ENOUGH_BYTES, KEYS)
    assert scoring.rows is not None and scoring.rows.capacity_blocks == 60
    assert open_scoring_device(ENABLED, GPU, 0, KEYS).rows is None


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("rows", "says"), [(39, "a step needs 40"), (401, "are free beside the engine")]
)
def test_sizes_that_cannot_work_are_refused(rows: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        open_scoring_device(ENABLED, GPU, rows * ENABLED.row_bytes, KEYS)
    assert "--index-gb" in (caught.value.hint or "")


class TestWhereScoresAreWrong:
    @pytest.fixture(autouse=True)
    def wrong(self, gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
        """One signal scores wrongly in the tiles of `DeviceRows`, which have a row per slot."""
        right = Content.score

        def score(self: Content, query: Query, tiles: Sequence[Tile]) -> torch.Tensor:
            found = right(self, query, tiles)
            return found.roll(1) if len(found) >= 60 else found

        monkeypatch.setattr(Content, "score", score)

    def test_the_check_says_which(self) -> None:
        with pytest.raises(SelfCheckFailed, match="scores by content differ"):
            require_same_scores(ENABLED, DeviceRows(ENABLED, CPU, 60), KEYS)

    def test_the_cpu_scores_unless_the_gpu_was_asked_for(self) -> None:
        scoring = open_scoring_device(ENABLED, GPU, None, KEYS)
        assert scoring.rows is None
        assert scoring.description.startswith("on the CPU, since on cuda:0 scores by content")
        with pytest.raises(SelfCheckFailed):
            open_scoring_device(ENABLED, GPU, ENOUGH_BYTES, KEYS)


@pytest.mark.usefixtures("gpu")
def test_whatever_goes_wrong_on_a_gpu_that_was_not_asked_for_the_cpu_scores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A kernel that does not compile raises an error of its compiler's own."""

    class CompilationError(Exception):
        pass

    def fail(*_: object) -> DeviceRows:
        raise CompilationError("out of registers")

    monkeypatch.setattr("kvws.engine.scoring_device.DeviceRows", fail)
    scoring = open_scoring_device(ENABLED, GPU, None, KEYS)
    assert scoring == ScoringDevice(None, "on the CPU, since on cuda:0 out of registers")
    with pytest.raises(CompilationError):
        open_scoring_device(ENABLED, GPU, ENOUGH_BYTES, KEYS)
