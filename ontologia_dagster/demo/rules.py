"""What counts as trouble. The figures are definitions, not results."""

from __future__ import annotations

SEVERE_MINUTES = 600
HOUR_LATE = 60
DISRUPTED_SHARE = 0.25


def disrupted(flights: int, late: int) -> bool:
    """Whether a day with so many flights, and so many of them over an hour late, was disrupted."""
    return late >= flights * DISRUPTED_SHARE
