"""The reader against transformers as it is, and against itself."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from kvws.eval.reader import KeyValues, Reader
from tests.engine.oracle import Oracle


@pytest.fixture(scope="module")
def reader(smollm2: Path) -> Reader:
    return Reader(smollm2)


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    rng = random.Random(3)
    return [rng.randrange(1000, 40000) for _ in range(700)]


@pytest.fixture(scope="module")
def whole(reader: Reader, tokens: list[int]) -> KeyValues:
    """More than one chunk."""
    return reader.read(tokens).key_values


def test_it_says_what_transformers_says(
    reader: Reader, smollm2: Path, tokens: list[int], whole: KeyValues
) -> None:
    """Over the whole history, and over some of its blocks at compact positions."""
    oracle = Oracle(str(smollm2))
    history = oracle.history(tokens[:640])
    some = torch.cat([torch.arange(0, 32), torch.arange(160, 256), torch.arange(600, 640)])
    for rows in (torch.arange(640), some):
        query = tokens[640:660]
        said, expected = oracle.greedy(history, rows, query, 1)
        reading = reader.read(query, whole.of(rows))
        mine = reader.log_probabilities(reading.hidden[-1:])
        assert int(mine.argmax()) == said[0]
        assert float((mine - expected).abs().max()) < 1e-3


def test_reading_on_is_reading_at_once(
    reader: Reader, tokens: list[int], whole: KeyValues
) -> None:
    later = reader.read(tokens[600:], whole.before(600)).key_values
    together = whole.before(600).and_then(later)
    assert torch.allclose(together.keys, whole.keys, atol=1e-3)
    assert torch.allclose(together.values, whole.values, atol=1e-3)


def test_queries_and_keys_give_the_attention_that_it_paid(
    reader: Reader, tokens: list[int], whole: KeyValues
) -> None:
    """In the first layer of the first new token, computed here from what was handed out."""
    reading = reader.read(tokens[640:641], whole.before(640), with_queries=True, with_mass=True)
    assert reading.queries is not None and reading.mass is not None
    table = reader.rotary

    def turned(x: torch.Tensor, position: int) -> torch.Tensor:
        a, b = x.chunk(2, dim=-1)
        cos, sin = table.cos[position], table.sin[position]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    query = turned(reading.queries[0, 0, 0], 640)
    keys = [turned(whole.keys[0, 0, at], at) for at in range(640)]
    keys.append(turned(reading.key_values.keys[0, 0, 0], 640))
    weights = (torch.stack(keys) @ query / reader.head_dim**0.5).softmax(dim=0)
    assert torch.allclose(reading.mass[0, 0], weights[:640], atol=1e-4)


def test_a_model_that_is_not_there_is_an_error_with_a_hint(tmp_path: Path) -> None:
    from kvws.errors import ModelError

    with pytest.raises(ModelError, match="cannot be loaded") as raised:
        Reader(tmp_path)
    assert raised.value.hint
