"""The one place that turns alpha and rank into the factor that multiplies x·Aᵀ·B."""

from __future__ import annotations

import math


def scaling(alpha: float, rank: int, *, rslora: bool) -> float:
    """alpha / rank, or alpha / √rank for rank-stabilised LoRA."""
    return alpha / math.sqrt(rank) if rslora else alpha / rank
