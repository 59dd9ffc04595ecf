"""What a share may be: the weight of an adapter inside its tenant, and of a tenant in an engine."""

from __future__ import annotations

import math

MIN_WEIGHT, MAX_WEIGHT = 1e-3, 1e3


def is_weight(weight: float) -> bool:
    """Finite, positive and within 1 : 1,000 of the default of 1 either way."""
    return math.isfinite(weight) and MIN_WEIGHT <= weight <= MAX_WEIGHT
