"""What the garbage collector need not look at."""

from __future__ import annotations

import gc

_NEW_OBJECTS = 20_000
"""Looked through for garbage at once, in about a millisecond. A long request alone makes tens of
thousands, none of them garbage while it is read."""


def freeze_what_is_loaded() -> None:
    """Take what is there now for permanent: modules, tokenizer, tables.

    A full collection looks through every object, and holds up all clients meanwhile: hundreds of
    thousands of a server's objects are there from its start to its end, which takes some 200 ms
    each time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS)
