"""Summarize a figure that was measured in several rounds."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median


def spread(values: Sequence[float], scale: float = 1.0) -> dict[str, float] | None:
    """Return the median, the lowest and the highest value; None if nothing was measured."""
    if not values:
        return None
    scaled = [value * scale for value in values]
    return {"median": median(scaled), "low": min(scaled), "high": max(scaled)}
