"""The write lock: one object, held by lease, owned by token.

The lock makes writers wait instead of wasting work; safety rests on the head CAS. Whoever holds
it renews in time or stops: `Lease.guard()` raises as soon as the lease is not certainly ours.
All times are the store's clock.
"""

from __future__ import annotations

import logging
import os
import random
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from storage_engine.commitlog import layout
from storage_engine.commitlog.conditional import Won, write_conditionally
from storage_engine.commitlog.parsing import (
    FieldError,
    optional_object,
    optional_text,
    require_int,
    require_text,
    require_time,
)
from storage_engine.commitlog.records import from_json, parse_timestamp, timestamp, to_json
from storage_engine.errors import (
    IntegrityError,
    LeaseExpiredError,
    LockContentionError,
    StorageBackendError,
)
from storage_engine.objectstore.protocol import (
    ConditionalConflict,
    ObjectNotFound,
    ObjectStore,
    ObjectStoreError,
    OutcomeUnknown,
    PreconditionFailed,
)

log = logging.getLogger(__name__)

_SLOWEST_POLL_S = 0.5
_FASTEST_POLL_S = 0.01
_FIRST_GUESS_S = 0.1  # of how long a wait is, before the first one
_UNANSWERED_KEPT = 16
_LOOK_AGAIN_S = 1.0  # a holder that renews moves its expiry: read it again this often


@dataclass(frozen=True, slots=True)
class LockState:
    """What the lock object says."""

    owner_id: str
    acquired_at: str
    expires_at: datetime
    lease_ttl_ms: int
    token: str
    holder: Mapping[str, Any]
    etag: str


class Lease:
    """A held lock. Renewed in the background until `release`; check `guard` before each write
    that only the holder may do."""

    def __init__(self, lock: WriteLock, token: str, acquired_at: str) -> None:
        self._lock = lock
        self.token = token
        self.acquired_at = acquired_at
        self._etag = ""
        self._expires_at = lock.store.now()
        self._lost = False
        self._released = False
        self._mutex = threading.Lock()
        self._stop = threading.Event()
        self._keeper: threading.Thread | None = None

    @property
    def expires_at(self) -> datetime:
        return self._expires_at

    def safe(self) -> bool:
        """True while the lease has more than a third of its time left."""
        margin = timedelta(milliseconds=self._lock.lease_ttl_ms / 3)
        return not self._lost and self._lock.store.now() + margin < self._expires_at

    def guard(self) -> None:
        if not self.safe():
            self._lost = True
            raise LeaseExpiredError(expires_at=timestamp(self._expires_at))

    def renew(self) -> bool:
        """Extend the lease; False (and unsafe from then on) when it is not ours any more."""
        with self._mutex:
            if self._lost:
                return False
            expires_at, write_id, data = self._lock.payload(self.token, self.acquired_at)
            try:
                outcome = write_conditionally(
                    self._lock.store,
                    self._lock.key,
                    data,
                    write_id=write_id,
                    etag=self._etag,
                    attempts=3,
                )
            except StorageBackendError as error:
                self._lock.warn(f"write lease could not be renewed: {error}")
                self._lost = True
                return False
            if not isinstance(outcome, Won):
                self._lock.warn("write lease was taken over by another writer")
                self._lost = True
                return False
            self._etag, self._expires_at = outcome.etag, expires_at
            return True

    def release(self) -> None:
        """Give the lock back if it is still ours, safe or not: the delete names our version.
        Never raises: an unreleased lock expires."""
        self._stop_keeper()
        with self._mutex:
            if self._released:
                return
            self._lost = self._released = True
            try:
                self._lock.store.delete_if_match(self._lock.key, self._etag)
            except PreconditionFailed:
                log.info("the write lock had already passed to another writer")
            except (ObjectStoreError, StorageBackendError) as error:
                expiry = timestamp(self._expires_at)
                self._lock.warn(f"write lock not released, it expires at {expiry}: {error}")

    def _hold(self, etag: str, expires_at: datetime) -> Lease:
        self._etag, self._expires_at = etag, expires_at
        if self._lock.keep_alive:
            self._keeper = threading.Thread(target=self._keep_alive, name="onto-lease", daemon=True)
            self._keeper.start()
        return self

    def _keep_alive(self) -> None:
        interval = self._lock.lease_ttl_ms / 3000
        while not self._stop.wait(interval) and self.renew():
            pass

    def _stop_keeper(self) -> None:
        self._stop.set()
        if self._keeper is not None and self._keeper is not threading.current_thread():
            self._keeper.join()


class WriteLock:
    """Acquires leases on the one write lock of a storage, or on another object that one process
    at a time may hold (`key`)."""

    def __init__(
        self,
        store: ObjectStore,
        *,
        owner_id: str,
        lease_ttl_ms: int,
        timeout_ms: int,
        holder: Mapping[str, Any] | None = None,
        keep_alive: bool | None = None,
        key: str = layout.LOCK,
        warn: Callable[[str], None] = log.warning,
    ) -> None:
        """`keep_alive`: whether leases renew themselves; by default where time passes by itself."""
        self.store = store
        self.owner_id = owner_id
        self.lease_ttl_ms = lease_ttl_ms
        self.timeout_ms = timeout_ms
        self.holder = {"host": socket.gethostname(), "pid": os.getpid(), **(holder or {})}
        self.keep_alive = store.timers if keep_alive is None else keep_alive
        self.key = key
        self.warn = warn
        self._unanswered: OrderedDict[str, Lease] = OrderedDict()  # by token
        self._usual_wait_s = _FIRST_GUESS_S

    def try_acquire(self) -> Lease | None:
        """One conditional create: the uncontended case, in one request."""
        lease = Lease(self, layout.new_write_id(), timestamp(self.store.now()))
        expires_at, write_id, data = self.payload(lease.token, lease.acquired_at)
        try:
            etag = self.store.put_if_absent(self.key, data, write_id=write_id)
        except (PreconditionFailed, ConditionalConflict):
            return None
        except OutcomeUnknown:
            return self._after_silence(lease)
        return lease._hold(etag, expires_at)

    def acquire(self, *, tried: bool = False) -> Lease:
        """Wait for the lock up to the timeout, taking it over from a holder that is past its
        lease. Raises LockContentionError. `tried` when the caller has just found it taken."""
        started = self.store.now()
        state: LockState | None = None
        looked_at = started - timedelta(days=1)
        while True:
            asked = self.store.now()
            if not tried and (lease := self.try_acquire()) is not None:
                self._note_wait((asked - started).total_seconds())
                return lease
            tried = False
            now = self.store.now()
            expired = state is not None and now >= state.expires_at
            if expired or now - looked_at >= timedelta(seconds=_LOOK_AGAIN_S):
                state, looked_at = self.read(), now
                if (lease := self._adopt(state)) is not None:
                    return lease
                if state is not None and now >= state.expires_at:
                    lease = self._take_over(state)
                    if lease is not None:
                        return lease
                    state = None  # somebody else did: look who, at the next turn
                    looked_at = started - timedelta(days=1)
            waited_s = (self.store.now() - started).total_seconds()
            if waited_s * 1000 >= self.timeout_ms:
                raise self._contention(waited_s, state)
            pause_s = self._poll_interval(waited_s, (now - asked).total_seconds())
            self.store.sleep(min(pause_s, self.timeout_ms / 1000 - waited_s))

    def read(self) -> LockState | None:
        """Who holds the lock, or None."""
        try:
            stored = self.store.get(self.key)
        except ObjectNotFound:
            return None
        raw = from_json(stored.data, key=self.key)
        try:
            return LockState(
                owner_id=require_text(raw, "owner_id"),
                acquired_at=require_time(raw, "acquired_at"),
                expires_at=parse_timestamp(require_time(raw, "expires_at")),
                lease_ttl_ms=require_int(raw, "lease_ttl_ms"),
                token=optional_text(raw, "token", ""),
                holder=optional_object(raw, "holder") or {},
                etag=stored.etag,
            )
        except FieldError as error:
            raise IntegrityError(
                f"{self.key} is not a lock object ({error}); if no writer is active, delete it",
                key=self.key,
            ) from error

    def payload(self, token: str, acquired_at: str) -> tuple[datetime, str, bytes]:
        """Expiry, write id and bytes of a lock object written now."""
        expires_at = self.store.now() + timedelta(milliseconds=self.lease_ttl_ms)
        write_id = layout.new_write_id()
        body = {
            "owner_id": self.owner_id,
            "acquired_at": acquired_at,
            "expires_at": timestamp(expires_at),
            "lease_ttl_ms": self.lease_ttl_ms,
            "token": token,
            "holder": self.holder,
            "write_id": write_id,
        }
        return expires_at, write_id, to_json(body)

    def _take_over(self, state: LockState) -> Lease | None:
        lease = Lease(self, layout.new_write_id(), timestamp(self.store.now()))
        expires_at, write_id, data = self.payload(lease.token, lease.acquired_at)
        try:
            etag = self.store.put_if_match(self.key, data, state.etag, write_id=write_id)
        except (PreconditionFailed, ConditionalConflict):
            return None
        except OutcomeUnknown:
            return self._after_silence(lease)
        log.warning("took over the write lock of %s, whose lease had run out", state.owner_id)
        return lease._hold(etag, expires_at)

    def _after_silence(self, lease: Lease) -> Lease | None:
        """An unanswered request: it has landed, or may land while we go on asking."""
        self._unanswered[lease.token] = lease
        while len(self._unanswered) > _UNANSWERED_KEPT:
            self._unanswered.popitem(last=False)
        return self._adopt(self.read())

    def _adopt(self, state: LockState | None) -> Lease | None:
        """A lock with the token of an unanswered request is ours, if it leaves time enough."""
        lease = self._unanswered.pop(state.token, None) if state is not None else None
        if state is None or lease is None:
            return None
        held = lease._hold(state.etag, state.expires_at)
        if held.safe():
            return held
        held.release()
        return None

    def _note_wait(self, waited_s: float) -> None:
        self._usual_wait_s = (self._usual_wait_s + waited_s) / 2  # the last few count most

    def _poll_interval(self, waited_s: float, answer_s: float) -> float:
        # The nearer its usual turn, the more often a writer asks: who has waited longest is likely
        # to be next, while newcomers leave the store alone. Nobody asks faster than it answers.
        until_turn_s = 0.3 * (self._usual_wait_s - waited_s)
        span = min(_SLOWEST_POLL_S, max(_FASTEST_POLL_S, answer_s, until_turn_s))
        return span * random.uniform(0.5, 1.5)

    def _contention(self, waited_s: float, state: LockState | None) -> LockContentionError:
        state = state or self.read()
        return LockContentionError(
            waited_ms=round(waited_s * 1000),
            owner_id=state.owner_id if state else "",
            holder=state.holder if state else None,
            acquired_at=state.acquired_at if state else "",
            expires_at=timestamp(state.expires_at) if state else "",
        )
