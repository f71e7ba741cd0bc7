"""kvws: a KV workspace beside a coding agent."""

__version__ = "0.1.0"
