"""The endpoint: routes, dialects, streams, and who may ask. It holds no session and no model."""
