"""The start-up check: kvws refuses to serve when its plugin does not see what it must see.

SGLang only logs the errors of plugins, so a tap that does not fire, or a rotation that is wrong,
would otherwise show as silently bad recall. The check uses facts that need no reference model:

- K of layer 0 depends on the token alone, so two blocks of the same tokens have the same raw K
  there, wherever they stand: the un-rotation is right.
- The same holds for raw Q of layer 0: the tap fires and its rows are un-rotated.
- A view restored from the host tier gives the answer that the device gave: the load is right.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kvws.blocks.key import BLOCK_TOKENS
from kvws.engine.client import SglangEngine
from kvws.engine.protocol import Chunk, GenerateRequest
from kvws.errors import ControlError, SelfCheckFailed
from kvws.recall.view import ExecutionView, Prompt

_WORKSPACE = "self-check"
_NAMESPACE = f"kvws/{_WORKSPACE}"
_BLOCK = tuple(range(100, 100 + BLOCK_TOKENS))
_HISTORY = (*_BLOCK, *reversed(_BLOCK), *_BLOCK)  # blocks 0 and 2 are the same tokens
_QUERY = (101, 102, 103, 101)
_WATCHED_IDS = tuple(range(64))

_LOSSY_TOLERANCE = {"int8": 0.2, "fp8": 0.5, "int4": 1.0}
"""What a log-probability may be off by behind quantised blocks; a misplaced one is off by more."""


async def self_check(engine: SglangEngine, shapes: list[dict[str, Any]]) -> None:
    """Run the check in a workspace of its own.

    Args:
        shapes: the ranks' descriptions of themselves.

    Raises:
        SelfCheckFailed: what disagreed, and by how much.
    """
    tolerance = 1e-3 if shapes[0]["dtype"] == "float32" else 5e-2
    lossy = _LOSSY_TOLERANCE.get(shapes[0]["host_format"], 0.0)
    await engine.flush_device_cache()
    on_device = await _ask(engine, "computed", register=True)
    await _check_same_raw_keys(engine, max(10 * tolerance, lossy / 5))
    await engine.flush_device_cache()
    restored = await _ask(engine, "restored", register=False)
    await engine.drop_workspace(_WORKSPACE)
    difference = max(
        abs(a - b) for a, b in zip(on_device.logprobs[0], restored.logprobs[0], strict=True)
    )
    allowed = lossy or 10 * tolerance
    if not difference <= allowed or math.isnan(difference):
        raise SelfCheckFailed(
            f"a restored view answers differently (log-probability off by {difference:.2g})",
            hint="this model's keys cannot be relocated; report its architecture",
        )


async def _ask(engine: SglangEngine, step: str, *, register: bool) -> Chunk:
    """Answer the query behind the history: computed as text at first, as a promised view then."""
    blocks = () if register else tuple(range(len(_HISTORY) // BLOCK_TOKENS))
    tokens = (*_HISTORY, *_QUERY)
    view = ExecutionView.of_blocks(blocks)
    prompt = Prompt(view, tokens, _NAMESPACE)
    rid = f"{step}.check"
    request = GenerateRequest(
        rid=rid,
        step=step,
        namespace=_NAMESPACE,
        token_ids=tokens,
        max_new_tokens=1,
        sampling={"temperature": 0.0, "ignore_eos": True},
        logprob_token_ids=_WATCHED_IDS,
    )
    named = [(page_hash, index, index) for page_hash, index in prompt.new_pages()]
    await engine.open_step(step, _WORKSPACE)
    try:
        await engine.promise(step, prompt.promised_pages())
        await engine.watch_queries(rid, len(_HISTORY))
        chunks = [chunk async for chunk in engine.generate(request)]
        if chunks[0].cached_tokens != view.tokens:
            raise SelfCheckFailed(
                f"{chunks[0].cached_tokens} tokens came from the cache, {view.tokens} were "
                "promised",
                hint="the engine does not use the kvws linker",
            )
        await _check_queries(engine, rid)
    finally:
        closed = await engine.close_step(step, named)
    if len(closed.resident) != len(named):
        raise SelfCheckFailed(
            f"{len(closed.resident)} of {len(named)} computed pages reached the host tier",
            hint="raise --host-gb",
        )
    return chunks[-1]


async def _check_queries(engine: SglangEngine, rid: str) -> None:
    try:
        found = await engine.inspect("queries", rid=rid)
    except ControlError as error:
        raise SelfCheckFailed(
            "the tap delivered no query rows",
            hint="the kvws plugin does not see this model's attention; check SGLANG_PLUGINS",
        ) from error
    for queries, _ in found:
        if queries.shape[1] != len(_QUERY):
            raise SelfCheckFailed(
                f"the tap delivered {queries.shape[1]} of {len(_QUERY)} query rows",
                hint="the kvws plugin does not see this model's attention",
            )
        first, last = queries[0, 0], queries[0, -1]  # the same token at two positions
        _require_close("raw queries of one token at two positions", first, last, 5e-2)


async def _check_same_raw_keys(engine: SglangEngine, tolerance: float) -> None:
    """`tolerance`: relative to the largest key."""
    first = await engine.inspect("mean_keys", workspace=_WORKSPACE, number=0)
    last = await engine.inspect("mean_keys", workspace=_WORKSPACE, number=2)
    for (a, _), (b, _) in zip(first, last, strict=True):
        _require_close("raw keys of the same tokens at two positions", a[0], b[0], tolerance)


def _require_close(what: str, a: np.ndarray, b: np.ndarray, tolerance: float) -> None:
    scale = float(np.abs(a).max()) or 1.0
    difference = float(np.abs(a - b).max()) / scale
    if not difference <= tolerance:
        raise SelfCheckFailed(
            f"{what} differ by {difference:.2g} of their size",
            hint="this model's rotary encoding is not undone correctly; report its architecture",
        )
