"""What clients are told about the one model."""

from __future__ import annotations

from typing import Any

import pytest

from kvws.http.model_list import model_list, one_model

CREATED = 1_796_000_000


def listed(model: str = "Qwen3-8B", *, anthropic: bool) -> dict[str, Any]:
    return model_list(model, 500_000, created=CREATED, anthropic=anthropic)


def names(body: dict[str, Any]) -> list[str]:
    return [each["id"] for each in body["data"]]


@pytest.mark.parametrize("anthropic", [False, True])
def test_the_model_is_offered_under_its_own_name_and_as_kvws(anthropic: bool) -> None:
    assert names(listed(anthropic=anthropic))[:3] == ["Qwen3-8B", "kvws", "kvws[1m]"]


def test_claude_code_finds_names_that_it_does_not_ignore() -> None:
    found = [
        name for name in names(listed(anthropic=True)) if name.startswith(("claude", "anthropic"))
    ]
    assert found == ["anthropic-kvws", "anthropic-kvws[1m]"]
    assert not any(name.startswith("claude-") for name in found)


def test_other_clients_are_not_offered_those_names() -> None:
    assert not any("anthropic" in name for name in names(listed(anthropic=False)))


@pytest.mark.parametrize("anthropic", [False, True])
def test_no_name_is_offered_twice(anthropic: bool) -> None:
    offered = names(listed("kvws", anthropic=anthropic))
    assert len(set(offered)) == len(offered)


def test_the_list_is_of_openais_shape() -> None:
    body = listed(anthropic=False)
    assert body["object"] == "list"
    assert body["data"][1] == {
        "id": "kvws",
        "object": "model",
        "created": CREATED,
        "owned_by": "kvws",
        "max_model_len": 500_000,
        "context_window": 500_000,
    }


def test_the_list_is_of_anthropics_shape() -> None:
    body = listed(anthropic=True)
    assert body["has_more"] is False
    assert (body["first_id"], body["last_id"]) == ("Qwen3-8B", "anthropic-kvws[1m]")
    assert body["data"][1] == {
        "type": "model",
        "id": "kvws",
        "display_name": "kvws (Qwen3-8B)",
        "created_at": "2026-11-30T00:53:20Z",
        "max_input_tokens": 500_000,
    }


@pytest.mark.parametrize("anthropic", [False, True])
def test_one_model_is_described_as_in_the_list_under_any_name(anthropic: bool) -> None:
    in_list = listed(anthropic=anthropic)["data"][1]
    kvws = one_model("kvws", "Qwen3-8B", 500_000, created=CREATED, anthropic=anthropic)
    other = one_model("gpt-x", "Qwen3-8B", 500_000, created=CREATED, anthropic=anthropic)
    assert kvws == in_list and other["id"] == "gpt-x"


def test_the_openai_package_reads_the_list() -> None:
    types = pytest.importorskip("openai.types")
    for each in listed(anthropic=False)["data"]:
        assert types.Model.model_validate(each).owned_by == "kvws"
