"""From a rank's answer to the scores of a whole model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvws.engine.operations import Operations
from kvws.engine.scores import scores_of_ranks
from kvws.engine.scoring_device import ScoringDevice
from kvws.engine.tap import QueryTap
from kvws.engine.tiers import open_signals
from kvws.errors import ConfigError, ProfileError
from kvws.tiers.geometry import PayloadGeometry
from tests.plane.rig import DIM, KV_HEADS, LAYERS, QUERY_HEADS, Rig, rotary_table

ROWS = 6


def packed(*values: float) -> bytes:
    return np.array(values, dtype="<f4").tobytes()


def test_shares_add_up_and_mean_k_is_averaged_over_all_heads() -> None:
    replies = [
        {"rows": 5, "heads": 6, "scores": {"mean-k": packed(3, 6), "content": packed(1, 2)}},
        {"rows": 4, "heads": 6, "scores": {"mean-k": packed(9, 0), "content": packed(0, 4)}},
    ]
    scores = scores_of_ranks(replies)
    assert scores.rows == 4
    assert scores.by_signal["mean-k"].tolist() == [1.0, 0.5]
    assert scores.by_signal["content"].tolist() == [1.0, 6.0]


def test_without_rows_on_some_rank_there_are_no_scores() -> None:
    replies = [
        {"rows": 5, "heads": 6, "scores": {"mean-k": packed(3)}},
        {"rows": 0, "heads": 0, "scores": {}},
    ]
    assert scores_of_ranks(replies).rows == 0 and not scores_of_ranks(replies).by_signal


def asked(rig: Rig, *, blocks: int, content_rows: bytes = b"") -> dict[str, Any]:
    """The reply to `score` of a request whose queries are the same every time."""
    tap = QueryTap()
    tap.watch("probe", 32)
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_extend=lambda: True),
        rids=["probe"],
        extend_seq_lens_cpu=[ROWS],
        positions=torch.arange(32, 32 + ROWS),
    )
    generator = torch.Generator().manual_seed(5)
    for layer in range(LAYERS):
        queries = torch.randn(ROWS, QUERY_HEADS * DIM, generator=generator)
        facts = {"tp_q_head_num": QUERY_HEADS, "qk_head_dim": DIM, "layer_id": layer}
        tap.catch(queries, SimpleNamespace(**facts), batch)
    operations = Operations(
        rig.plane,
        tap,
        rig.tables,
        SimpleNamespace(size=0),
        ScoringDevice(None, ""),
        rank=0,
        weights="",
    )
    arguments = {
        "rid": "probe",
        "workspace": "w",
        "candidates": bytes([1] * blocks),
        "first_positions": np.arange(0, 32 * blocks, 32, dtype="<i4").tobytes(),
        "query_first": 32 * blocks,
        "content_rows": content_rows,
    }
    return operations.handle("score", arguments)


def test_a_rank_answers_with_an_array_for_each_signal(rig: Rig) -> None:
    rig.write(0, [0, 1, 2, 3])
    reply = asked(rig, blocks=4)
    assert (reply["rows"], reply["heads"]) == (ROWS, LAYERS * QUERY_HEADS)
    scores = scores_of_ranks([reply]).by_signal
    assert list(scores) == ["mean-k", "rotated-mean", "content"]
    assert scores["mean-k"].sum() == pytest.approx(ROWS, rel=1e-5)
    assert all(np.count_nonzero(of_blocks) == 4 for of_blocks in scores.values())


def test_content_alone_is_asked_for_fewer_rows(rig: Rig) -> None:
    rig.write(0, [0, 1, 2, 3])
    every, some = (asked(rig, blocks=4, content_rows=rows) for rows in (b"", b"\0\1\0\0\1\0"))
    assert every["scores"]["content"] != some["scores"]["content"]
    for name in ("mean-k", "rotated-mean"):
        assert every["scores"][name] == some["scores"][name]
    spoken = asked(rig, blocks=4, content_rows=bytes([1] * ROWS))
    assert spoken["scores"] == every["scores"]
    nothing = asked(rig, blocks=4, content_rows=bytes(ROWS))
    assert nothing["scores"]["content"] == packed(0, 0, 0, 0)


def test_without_blocks_there_is_nothing_to_score(rig: Rig) -> None:
    assert set(asked(rig, blocks=0)["scores"].values()) == {b""}


def test_mean_keys_are_those_of_the_block_without_its_rotation(rig: Rig) -> None:
    """The same keys at two positions: what the start-up check relies on."""
    rig.write(0, [4], at=0)
    operations = Operations(
        rig.plane,
        QueryTap(),
        rig.tables,
        SimpleNamespace(size=0),
        ScoringDevice(None, ""),
        rank=0,
        weights="",
    )
    reply = operations.handle("mean_keys", {"workspace": "w", "number": 0})
    means = np.frombuffer(reply["float32"], dtype=np.float32).reshape(reply["shape"])
    row = rig.plane.index_row("w", 0)
    assert row is not None and means.shape == (LAYERS, KV_HEADS, DIM)
    half = row[: 2 * means.size].numpy().view(np.float16).reshape(means.shape)
    np.testing.assert_allclose(means, half, atol=1e-3)
    assert operations.handle("mean_keys", {"workspace": "w", "number": 9}) is None


def test_signals_that_a_rank_cannot_have_are_refused() -> None:
    geometry = PayloadGeometry(LAYERS, KV_HEADS, DIM, torch.float32)
    tables = [rotary_table(100.0)] * LAYERS
    with pytest.raises(ConfigError, match="content"):
        open_signals(["content"], "", geometry, tables, rank=0, ranks=1)
    with pytest.raises(ProfileError, match="cannot be read"):
        open_signals(["content"], "{", geometry, tables, rank=0, ranks=1)
    found = open_signals(["mean-k"], "", geometry, tables, rank=0, ranks=1)
    assert found.row_format == "mean-k/f16"
