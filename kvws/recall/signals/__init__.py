"""Retrieval signals: what a block's index row holds of its keys, and how a query scores it."""
