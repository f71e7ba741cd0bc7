"""What a step is compared with."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

from kvws.engine.protocol import Engine, GenerateRequest


async def cold_text_ms(engine: Engine, token_ids: Sequence[int]) -> float:
    """Milliseconds to the first token when the prompt is prefilled as text, nothing cached.

    A namespace of its own keeps every cached page out of reach.
    """
    rid = uuid.uuid4().hex
    request = GenerateRequest(
        rid=rid,
        step=None,
        namespace=f"cold/{rid}",
        token_ids=token_ids,
        max_new_tokens=1,
        sampling={"temperature": 0.0},
    )
    begin = time.perf_counter()
    stream = engine.generate(request)
    await anext(stream)
    elapsed_ms = 1e3 * (time.perf_counter() - begin)
    await stream.aclose()
    return elapsed_ms
