"""Page names: a chain over the namespace and everything before, equal to the engine's own."""

from __future__ import annotations

import importlib
from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvws.blocks.key import BLOCK_TOKENS, page_hashes

TOKENS = st.integers(0, 2**32 - 1)


@pytest.fixture(scope="module")
def engine() -> Any:
    """SGLang's hash function and radix key, by the names that kvws relies on."""
    pytest.importorskip("sglang")
    utils = importlib.import_module("sglang.srt.mem_cache.utils")
    radix = importlib.import_module("sglang.srt.mem_cache.radix_cache")
    for module, name in (
        (utils, "get_storage_hash_str"),
        (utils, "storage_namespace_seed"),
        (radix, "RadixKey"),
    ):
        assert hasattr(module, name), f"{module.__name__}.{name} moved: page hashes are unchecked"

    class Engine:
        @staticmethod
        def hashes(token_ids: list[int], namespace: str) -> list[str]:
            key = radix.RadixKey(array("q", token_ids), extra_key=namespace)
            return utils.get_storage_hash_str(key, None, page_size=BLOCK_TOKENS)

        seed = staticmethod(utils.storage_namespace_seed)

    return Engine


@pytest.mark.parametrize("namespace", ["kvws/session/3f.0", "", "ein Schlüssel", "x" * 300])
def test_the_engine_names_pages_alike(engine: Any, namespace: str) -> None:
    token_ids = [(7919 * n) % 151_936 for n in range(7 * BLOCK_TOKENS)]
    assert page_hashes(token_ids, namespace) == engine.hashes(token_ids, namespace)


def test_the_engine_names_pages_alike_at_the_ends_of_the_token_range(engine: Any) -> None:
    token_ids = [0, 1, 2**31 - 1] * 32
    assert page_hashes(token_ids, "n") == engine.hashes(token_ids, "n")


def test_the_engine_continues_a_chain_from_its_last_hash(engine: Any) -> None:
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    token_ids = list(range(4 * BLOCK_TOKENS))
    whole = page_hashes(token_ids, "n")
    tail = RadixKey(array("q", token_ids[2 * BLOCK_TOKENS :]), extra_key="n")
    assert get_storage_hash_str(tail, whole[1], page_size=BLOCK_TOKENS) == whole[2:]


def test_an_absent_namespace_is_not_the_empty_one(engine: Any) -> None:
    assert engine.seed(None, None) is None
    assert engine.seed("", None) is not None


@pytest.mark.parametrize("length", [0, 1, 31, 32, 33, 63, 64, 65])
def test_only_full_pages_have_a_name(length: int) -> None:
    assert len(page_hashes(range(length), "n")) == length // BLOCK_TOKENS


def test_a_name_does_not_depend_on_what_follows() -> None:
    token_ids = list(range(96))
    assert page_hashes(token_ids, "n")[:2] == page_hashes([*token_ids[:64], 5, 6], "n")


@settings(max_examples=50, deadline=None)
@given(st.lists(TOKENS, min_size=64, max_size=128), st.integers(0, 63), TOKENS)
def test_one_other_token_renames_its_page_and_all_behind_it(
    token_ids: list[int], at: int, token: int
) -> None:
    changed = [*token_ids[:at], token, *token_ids[at + 1 :]]
    before, after = page_hashes(token_ids, "n"), page_hashes(changed, "n")
    page = at // BLOCK_TOKENS
    assert before[:page] == after[:page]
    differs = token != token_ids[at]
    assert all((a != b) == differs for a, b in zip(before[page:], after[page:], strict=True))


def test_namespaces_share_no_name() -> None:
    token_ids = range(64)
    names = [page_hashes(token_ids, namespace) for namespace in ("a", "b", "", "ab", "a/b")]
    flat = [name for hashes in names for name in hashes]
    assert len(set(flat)) == len(flat)
