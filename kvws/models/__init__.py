"""Models by name, and what kvws needs to know of one before it starts an engine."""

from kvws.models.geometry import (
    ModelGeometry,
    RopeParameters,
    load_config,
    read_model_config,
)
from kvws.models.relocatable import require_relocatable
from kvws.models.resolve import resolve_model

__all__ = [
    "ModelGeometry",
    "RopeParameters",
    "load_config",
    "read_model_config",
    "require_relocatable",
    "resolve_model",
]
