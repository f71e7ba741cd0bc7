"""Names of the forms in which a block's payload can lie at rest; see `kvws.tiers.codec`."""

from __future__ import annotations

EXACT = "exact"
PAYLOAD_FORMATS = (EXACT, "fp8", "int8", "int4")
