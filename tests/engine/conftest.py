"""One real engine with the embedded model for the whole test session."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvws.engine.launch import RunningEngine
from kvws.engine.settings import EngineSettings
from kvws.replay.loaders import load_trace
from tests.engine.timed import timed_engine

CONTEXT_TOKENS = 2048


@pytest.fixture(scope="session")
def running(smollm2: Path) -> Iterator[RunningEngine]:
    settings = EngineSettings(
        model=smollm2, context_tokens=CONTEXT_TOKENS, device_tokens=4096, host_bytes=2 << 30
    )
    with timed_engine(settings) as engine:
        yield engine


@pytest.fixture(scope="session")
def text(smollm2: Path) -> list[int]:
    """Tokens of a real agent session, some 12K of them."""
    from transformers import AutoTokenizer

    trace = load_trace(Path(__file__).parents[2] / "traces" / "step-summary.traj.json")
    tokenizer = AutoTokenizer.from_pretrained(str(smollm2))
    messages = (message.content for message in trace.threads["main"])
    return tokenizer("\n".join(messages)).input_ids


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Seeded by the test's name, so that a failure repeats."""
    return random.Random(request.node.name)
