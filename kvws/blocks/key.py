"""Names of pages: the hash chain under which the engine's prefix tree knows them.

A page hash covers the namespace, every token before the page and the page itself, so it names
"this page at this index of exactly this prompt". It is computed here with hashlib alone, equal to
the engine's own, so that a view can be promised before the request that uses it arrives.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

BLOCK_TOKENS = 32
"""Tokens of a block, and of an engine page: the unit of scoring, selection and movement."""

_DOMAIN = b"sglang-cache-namespace-v1"


def page_hashes(token_ids: Sequence[int], namespace: str) -> list[str]:
    """Hash every full page of a prompt.

    Args:
        token_ids: the prompt; a partial last page has no hash.
        namespace: the request's `extra_key`.

    Returns:
        len(token_ids) // BLOCK_TOKENS lower-case hex digests, in page order.
    """
    digest = _namespace_seed(namespace)
    page = struct.Struct(f"<{BLOCK_TOKENS}I")
    hashes: list[str] = []
    for start in range(0, len(token_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        tokens = token_ids[start : start + BLOCK_TOKENS]
        digest = hashlib.sha256(digest + page.pack(*tokens)).digest()
        hashes.append(digest.hex())
    return hashes


def _namespace_seed(namespace: str) -> bytes:
    """The chain's first digest: (extra_key, cache_salt) length-prefixed; the salt is unused."""
    encoded = namespace.encode()
    extra_key = b"\x01" + len(encoded).to_bytes(8, "little") + encoded
    no_salt = b"\x00"
    return hashlib.sha256(_DOMAIN + extra_key + no_salt).digest()
