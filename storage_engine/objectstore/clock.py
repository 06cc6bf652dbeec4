"""What time it is at the store: a virtual clock to simulate with, and an offset to estimate.

Leases are judged by the store's clock. S3 tells it only through the Date header of its answers,
in whole seconds, so `ClockOffset` keeps the interval in which the true offset must lie and
narrows it with every answer.
"""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from typing import Protocol

_START = datetime(2026, 1, 1, tzinfo=UTC)
# Two clocks that nobody corrects part by about this much per second.
_DRIFT = 1e-4


class Clock(Protocol):
    """Where a simulated client takes its time from."""

    def now(self) -> datetime:
        """The time, in UTC."""

    def sleep(self, seconds: float) -> None:
        """Let time pass."""


class VirtualClock:
    """A clock that moves only when someone sleeps."""

    def __init__(self, start: datetime = _START) -> None:
        self._now = start
        self._lock = threading.Lock()

    def now(self) -> datetime:
        with self._lock:
            return self._now

    def sleep(self, seconds: float) -> None:
        """Move on by `seconds`; a clock never goes back."""
        with self._lock:
            self._now += timedelta(seconds=max(0.0, seconds))


class ClockOffset:
    """How far the store's clock is ahead of the local one, as far as its answers tell."""

    def __init__(self) -> None:
        self._low = float("-inf")
        self._high = float("inf")
        self._at = 0.0
        self._lock = threading.Lock()

    def observe(self, sent: float, received: float, date: float) -> None:
        """Note an answer: local times of sending and receiving, and its Date, in whole seconds.

        The store read its clock somewhere between `sent` and `received`, and cut the fraction off.
        """
        low, high = date - received, date + 1 - sent
        if low > high:
            return  # The local clock was set back meanwhile: this answer tells nothing.
        with self._lock:
            widening = _DRIFT * max(0.0, received - self._at)
            self._at = received
            narrowed = max(low, self._low - widening), min(high, self._high + widening)
            # An empty intersection means that a clock was set: only the newest answer counts.
            self._low, self._high = narrowed if narrowed[0] <= narrowed[1] else (low, high)

    @property
    def seconds(self) -> float:
        """The offset: 0 as long as that is possible, else the middle of what is possible."""
        with self._lock:
            if self._low <= 0 <= self._high:
                return 0.0
            return (self._low + self._high) / 2
