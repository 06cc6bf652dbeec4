"""Between two commits of one writer: the lease of the first is kept for the second for a moment."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from storage_engine.commitlog.lock import Lease, Tenure

LINGER_S = 0.01  # how long a lease waits for the same writer's next commit
_MAX_REUSE = 4  # then others get their turn


@dataclass(slots=True, eq=False)
class _Offer:
    """A lease that its holder no longer needs, up for the same writer's next commit."""

    lease: Lease
    open: bool = True


class LeaseKeeper:
    """Holds a lease for a moment after a commit, so that the next one need not acquire again."""

    def __init__(self, linger_s: float) -> None:
        self._linger_s = linger_s
        # Taken by itself: Ctrl-C inside a condition's own `with` would leave it locked.
        self._mutex = threading.Lock()
        self._condition = threading.Condition(self._mutex)
        self._offer: _Offer | None = None
        self._flushing = False
        self._reused = 0

    def take_over(self, tenure: Tenure) -> Lease | None:
        """The lease of the commit just before, if it is still on offer."""
        with self._mutex:
            self._flushing = False
            offer = self._offer
            if offer is None or not offer.open or self._reused >= _MAX_REUSE:
                self._reused = 0
                return None
            tenure.add(offer.lease)
            offer.open = False
            self._reused += 1
            self._condition.notify_all()
        if offer.lease.safe():
            return offer.lease
        self.release_now(offer.lease)
        return None

    def lingering_release(self, lease: Lease) -> Callable[[], None]:
        """Offer the lease from now on; the result waits a moment and releases it if unwanted.
        Where others wait in line, it is theirs at once."""
        if lease.contended:
            return lambda: self.release_now(lease)
        offer = _Offer(lease)
        with self._mutex:
            self._offer = offer

        def release() -> None:
            with self._mutex:
                self._condition.wait_for(
                    lambda: not offer.open or self._flushing, timeout=self._linger_s
                )
                if not offer.open:
                    return  # another commit goes on with it
                offer.open = False
            self.release_now(lease)

        return release

    def stop_lingering(self) -> None:
        with self._mutex:
            self._flushing = True
            self._condition.notify_all()

    def release_now(self, lease: Lease) -> None:
        with self._mutex:
            self._reused = 0
        lease.release()
