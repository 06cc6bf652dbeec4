"""Between two commits of one writer: the lease of the first is kept for the second for a moment.

It is on offer from the moment the first one stands, whatever is still to be written after it. Who
goes on with one lease for a while looks whether others wait for it, as one does who had to wait.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from storage_engine.commitlog.lock import Lease, Tenure

LINGER_S = 0.01  # how long a lease waits for the same writer's next commit
_QUEUED_S = 0.25  # or, where that is in the queue already, for whoever leads to come to it
_MAX_REUSE = 4  # then we look whether others wait
_LOOK_EVERY_S = 0.5  # or after so long, as many commits at once take longer


@dataclass(slots=True, eq=False)
class _Offer:
    """A lease that its holder no longer needs, up for the same writer's next commit."""

    lease: Lease
    open: bool = True


class LeaseKeeper:
    """Holds a lease for a moment after a commit, so that the next one need not acquire again."""

    def __init__(self, linger_s: float, queued: Callable[[], bool] = lambda: False) -> None:
        """`queued`: whether commits of this writer wait to be published."""
        self._linger_s = linger_s
        self._queued = queued
        # Taken by itself: Ctrl-C inside a condition's own `with` would leave it locked.
        self._mutex = threading.Lock()
        self._condition = threading.Condition(self._mutex)
        self._offer: _Offer | None = None
        self._flushing = False
        self._reused = 0
        self._looked_at = 0.0

    def take_over(self, tenure: Tenure) -> Lease | None:
        """The lease of the commit just before, if it is still on offer."""
        with self._mutex:
            self._flushing = False
            offer = self._offer
            if offer is None or not offer.open:
                return None
            self._reused += 1
            long = self._reused > _MAX_REUSE or self._elapsed() > _LOOK_EVERY_S
            if long and not offer.lease.can_look:
                self._reused = 0
                return None
            tenure.add(offer.lease)
            offer.open = False
            self._condition.notify_all()
        if not offer.lease.safe():
            self.release_now(offer.lease)
            return None
        if long:
            self._note_look()
            offer.lease.look_who_waits()
        return offer.lease

    def lingering_release(self, lease: Lease) -> Callable[[], None]:
        """Offer the lease from now on; the result waits a moment and releases it if unwanted.
        Where others wait in line, it is theirs at once."""
        if lease.contended:
            return lambda: self.release_now(lease)
        offer = _Offer(lease)
        with self._mutex:
            if self._offer is None or self._offer.lease is not lease:
                self._reused, self._looked_at = 0, time.monotonic()
            self._offer = offer

        def release() -> None:
            with self._mutex:
                self._linger(offer, self._linger_s)
                if self._linger_s and self._queued():
                    self._linger(offer, _QUEUED_S)
                if not offer.open:
                    return  # another commit goes on with it
                offer.open = False
            self.release_now(lease)

        return release

    def _linger(self, offer: _Offer, seconds: float) -> None:
        self._condition.wait_for(lambda: not offer.open or self._flushing, timeout=seconds)

    def stop_lingering(self) -> None:
        with self._mutex:
            self._flushing = True
            self._condition.notify_all()

    def release_now(self, lease: Lease) -> None:
        self._note_look()
        lease.release()

    def _elapsed(self) -> float:
        return time.monotonic() - self._looked_at

    def _note_look(self) -> None:
        with self._mutex:
            self._reused, self._looked_at = 0, time.monotonic()
