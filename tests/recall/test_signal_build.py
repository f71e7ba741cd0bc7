"""Names become signals; what their rows hold is told in a few words."""

from __future__ import annotations

import pytest
import torch

from kvws.errors import ConfigError, ProfileError
from kvws.recall.profile import Profile
from kvws.recall.signals import enabled
from kvws.recall.signals.build import SIGNAL_NAMES, KeyGeometry, enabled_signals
from kvws.recall.signals.enabled import ROW_FORMAT_MAX_BYTES, EnabledSignals, raw_keys
from tests.recall.keys import DIM, KV_HEADS, LAYERS, RAW, TABLES, baked, profile, seeded

GEOMETRY = KeyGeometry(LAYERS, KV_HEADS, DIM)
TABLES_OF_LAYERS = [TABLES["neox"]] * LAYERS


def signals(*names: str, of: Profile | None = None) -> EnabledSignals:
    return enabled_signals(names, GEOMETRY, TABLES_OF_LAYERS, of if of is not None else profile())


def names_of(found: EnabledSignals) -> list[str]:
    return [signal.name for signal in found.signals]


def test_signals_stand_in_one_order_however_they_are_asked_for() -> None:
    mixed = signals("content", "mean-k", "rotated-mean", "mean-k")
    assert tuple(names_of(mixed)) == SIGNAL_NAMES
    assert mixed.row_format == signals(*SIGNAL_NAMES).row_format


def test_an_unknown_signal_is_refused() -> None:
    with pytest.raises(ConfigError, match="'lexical'") as refused:
        signals("mean-k", "lexical")
    assert "rotated-mean" in refused.value.hint


def test_content_needs_a_profile() -> None:
    with pytest.raises(ConfigError, match="profile") as refused:
        enabled_signals(["content"], GEOMETRY, TABLES_OF_LAYERS)
    assert "kvws calibrate" in refused.value.hint


def test_a_profile_of_another_model_is_refused() -> None:
    with pytest.raises(ProfileError, match="of small"):
        enabled_signals(["mean-k"], KeyGeometry(5, 2, 8), [TABLES["neox"]] * 5, profile())


def test_without_a_profile_some_layers_are_read_most_of_them_late() -> None:
    geometry = KeyGeometry(12, KV_HEADS, DIM)
    found = enabled_signals(["rotated-mean"], geometry, [TABLES["neox"]] * 12)
    assert found.row_format == "rotated-mean/f16/0+4+8+10"
    assert found.row_bytes == 2 * 4 * KV_HEADS * (DIM + DIM // 2)


def test_a_row_says_what_it_holds() -> None:
    found = signals(*SIGNAL_NAMES)
    assert found.row_format == (
        "mean-k/f16 rotated-mean/f16/0+2 content/int8/1.0+1.1+2.1"
    )
    others = (
        signals("mean-k", "content"),
        signals(*SIGNAL_NAMES, of=profile(((1, 0),))),
        signals(*SIGNAL_NAMES, of=profile(content_keys="int4")),
        signals(*SIGNAL_NAMES, of=profile(rotated_layers=(0, 1))),
    )
    assert len({found.row_format, *(other.row_format for other in others)}) == 5
    same_keys = signals(*SIGNAL_NAMES, of=profile(((1, 1), (1, 2), (2, 3))))
    assert same_keys.row_format == found.row_format, "other query heads of the same KV heads"


def test_what_a_row_holds_is_told_briefly_of_large_models_too() -> None:
    def format_of(*layers: int) -> str:
        large = Profile(
            model="large",
            layers=200,
            query_heads=2,
            kv_heads=2,
            head_dim=8,
            content_heads=tuple((layer, 1) for layer in range(100)),
            rotated_layers=layers,
            content_keys="int4",
        )
        geometry, tables = KeyGeometry(200, 2, 8), [TABLES["neox"]] * 200
        return enabled_signals(SIGNAL_NAMES, geometry, tables, large).row_format

    text = format_of(*range(100))
    assert len(text.encode()) <= ROW_FORMAT_MAX_BYTES and text == format_of(*range(100))
    assert text.startswith("mean-k/f16 rotated-mean/f16/0") and " content/int4/0.1" in text
    assert text != format_of(*range(99), 150), "a layer at the end of a long list"


def test_each_rank_has_the_content_heads_that_it_holds() -> None:
    formats = [
        enabled_signals(
            ["content"], KeyGeometry(LAYERS, 1, DIM, rank, 2), TABLES_OF_LAYERS, profile()
        ).row_format
        for rank in range(2)
    ]
    assert formats == ["content/int8/1.0", "content/int8/1.0+2.0"]


def test_ranks_that_hold_copies_of_a_kv_head_score_their_own_query_heads() -> None:
    """Four query heads and two KV heads over four ranks."""
    formats = [
        enabled_signals(
            ["content"], KeyGeometry(LAYERS, 1, DIM, rank, 4), TABLES_OF_LAYERS, profile()
        ).row_format
        for rank in range(4)
    ]
    assert formats == ["content/int8/1.0", "content/int8/", "content/int8/2.0", "content/int8/1.0"]


def test_without_signals_a_row_is_a_few_zeros() -> None:
    nothing = enabled_signals([], GEOMETRY, TABLES_OF_LAYERS)
    keys = raw_keys(seeded(1, LAYERS, 64, KV_HEADS, DIM))
    rows = nothing.rows(keys, torch.full((2,), RAW))
    assert rows.shape == (2, nothing.row_bytes) and nothing.row_bytes > 0 and not rows.any()
    assert nothing.row_format and nothing.importance(rows) == [1.0, 1.0]


def test_rows_of_many_blocks_are_made_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    found = signals(*SIGNAL_NAMES)
    first = [320, RAW, 64, 0, 3000]
    raw = seeded(1, LAYERS, 32 * len(first), KV_HEADS, DIM)
    keys = raw_keys(baked(raw, TABLES["neox"], first))
    together = found.rows(keys, torch.tensor(first))
    monkeypatch.setattr(enabled, "_BLOCKS_AT_ONCE", 2)
    assert torch.equal(found.rows(keys, torch.tensor(first)), together)


def test_only_layers_that_a_signal_reads_are_asked_for() -> None:
    raw = seeded(1, LAYERS, 64, KV_HEADS, DIM)
    asked: set[int] = set()

    def of_layer(layer: int, some: slice) -> torch.Tensor:
        asked.add(layer)
        return raw_keys(raw)(layer, some)

    signals("content", of=profile(((2, 0), (3, 0)))).rows(of_layer, torch.full((2,), RAW))
    assert asked == {2, 3}


@pytest.mark.parametrize("name", SIGNAL_NAMES)
def test_importance_is_the_norm_of_mean_keys(name: str) -> None:
    raw = seeded(1, LAYERS, 64, KV_HEADS, DIM)
    raw[:, 32:] = 3 * raw[:, :32]
    found = signals(name, of=profile(rotated_layers=tuple(range(LAYERS))))
    one, three = found.importance(found.rows(raw_keys(raw), torch.full((2,), RAW)))
    assert one > 0 and three == pytest.approx(3 * one, rel=0.02)
    if name == "mean-k":
        means = raw[:, :32].mean(dim=1)
        assert one == pytest.approx(float(means.norm()), rel=1e-3)
