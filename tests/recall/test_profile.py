"""A retrieval profile says what was found out, or why it cannot be used."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvws.errors import ConfigError, ProfileError
from kvws.recall.profile import Profile

PROFILE = Profile(
    model="small/0123",
    layers=4,
    query_heads=6,
    kv_heads=2,
    head_dim=8,
    content_heads=((3, 5), (1, 0)),
    rotated_layers=(0, 3),
    content_keys="int4",
)


def changed(**fields: Any) -> str:
    return json.dumps({**json.loads(PROFILE.to_json()), **fields})


def test_a_profile_survives_its_file() -> None:
    assert Profile.from_json(PROFILE.to_json()) == PROFILE


def test_a_profile_may_choose_nothing() -> None:
    found = Profile.from_json(changed(content_heads=[], rotated_layers=[]))
    assert found.content_heads == () and found.rotated_layers == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ("[]", "no JSON object"),
        ("{}", "no kvws-profile/1"),
        (changed(format="kvws-profile/2"), "no kvws-profile/1"),
        (changed(colour="red"), "unknown colour"),
        (json.dumps({"format": "kvws-profile/1", "model": "m"}), "lacks content_heads"),
        (changed(model=""), "names no model"),
        (changed(model=3), "model = 3"),
        (changed(layers=0), "layers = 0"),
        (changed(layers=True), "layers: True"),
        (changed(layers=4.0), r"layers: 4\.0"),
        (changed(kv_heads=4), "6 query heads share 4"),
        (changed(content_keys="int2"), "content_keys = 'int2'"),
        (changed(content_keys=["int4"]), "content_keys"),
        (changed(content_heads=[[4, 0]]), r"head 4\.0"),
        (changed(content_heads=[[0, 6]]), r"head 0\.6"),
        (changed(content_heads=[[0, -1]]), r"head 0\.-1"),
        (changed(content_heads=[[0, 1], [0, 1]]), "twice"),
        (changed(content_heads=[[0, 1, 2]]), r"head \[0, 1, 2\]"),
        (changed(content_heads=[3]), "no list"),
        (changed(content_heads=[["0", 1]]), "content_heads: '0'"),
        (changed(rotated_layers=[3, 0]), "do not ascend"),
        (changed(rotated_layers=[0, 0]), "do not ascend"),
        (changed(rotated_layers=[0, 4]), "layer 4"),
        (changed(rotated_layers={"0": 1}), "no list"),
    ],
)
def test_a_broken_profile_is_refused_with_a_way_out(text: str, said: str) -> None:
    with pytest.raises(ProfileError, match=said) as refused:
        Profile.from_json(text)
    assert refused.value.hint and isinstance(refused.value, ConfigError)


def test_a_profile_of_a_model_of_other_sizes_is_refused() -> None:
    sizes = {"layers": 4, "query_heads": 6, "kv_heads": 2, "head_dim": 8}
    PROFILE.require_fits(**sizes)
    for name in sizes:
        with pytest.raises(ProfileError, match="small/0123"):
            PROFILE.require_fits(**{**sizes, name: 1})
