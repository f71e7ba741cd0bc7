"""What the garbage collector need not look at."""

from __future__ import annotations

import gc


def freeze_what_is_loaded() -> None:
    """Take what is there now for permanent: modules, tokenizer, tables.

    A full collection looks through every object, and holds up all clients meanwhile: hundreds of
    thousands of a server's objects are there from its start to its end, which takes some 200 ms
    each time.
    """
    gc.collect()
    gc.freeze()
