"""Answering model calls from workspaces, between the HTTP front and the engine."""
