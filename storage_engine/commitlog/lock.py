"""The write lock: one object, held by lease, owned by token.

The lock makes writers wait instead of wasting work; safety rests on the head CAS. Whoever holds
it renews in time or stops: `Lease.guard()` raises as soon as the lease is not certainly ours.
All times are the store's clock.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from queue import Empty, SimpleQueue
from typing import Any, Self, TypeVar

from storage_engine.commitlog import layout
from storage_engine.commitlog.json_object import (
    Won,
    delete_conditionally,
    write_conditionally,
)
from storage_engine.commitlog.records import from_json, parse_timestamp, timestamp, to_json
from storage_engine.errors import (
    IntegrityError,
    LeaseExpiredError,
    LockBreakError,
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
    StoredObject,
)
from storage_engine.process import Owner, identity, is_gone

log = logging.getLogger(__name__)

T = TypeVar("T")

_SLOWEST_POLL_S = 0.5
_FASTEST_POLL_S = 0.01
_FIRST_GUESS_S = 0.1  # of how long a wait is, before the first one
_UNANSWERED_KEPT = 16
_RELEASE_ATTEMPTS = 4  # about half a second; others would wait for the whole lease
_RELEASE_GRACE_S = 1.0  # then the keeper gives back what it was only told not to renew
_LONGEST_LEASE_MS = 1000 * 60 * 60 * 24 * 366
_LOOK_AGAIN = timedelta(seconds=1)  # a holder that renews moves its expiry: read it that often


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

    @classmethod
    def parse(cls, stored: StoredObject, *, key: str) -> Self:
        """Raises IntegrityError when it is no lock object: who wrote it cannot be waited for."""
        try:
            raw = from_json(stored.data, key=key)
            return cls(
                owner_id=_checked(raw["owner_id"], str),
                acquired_at=_checked(raw["acquired_at"], str),
                expires_at=parse_timestamp(_checked(raw["expires_at"], str)),
                lease_ttl_ms=_milliseconds(raw["lease_ttl_ms"]),
                token=_checked(raw.get("token", ""), str),
                holder=_checked(raw.get("holder", {}), dict),
                etag=stored.etag,
            )
        except (IntegrityError, KeyError, TypeError, ValueError, OverflowError) as error:
            problem = str(error) if isinstance(error, IntegrityError) else repr(error)
            raise IntegrityError(
                f"{key} is not a lock object ({problem}): nobody can tell whose it is and when it "
                "ends. If no writer is active, remove it with `onto lock break`",
                key=key,
            ) from error


def _checked(value: Any, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value


def _milliseconds(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _LONGEST_LEASE_MS:
        raise ValueError(f"{value!r} is no length of a lease")
    return value


class Tenure:
    """The leases that one piece of work has asked for.

    Ctrl-C may come between any two instructions: between the answer of the store and the `try` of
    who waits for it, or while another thread still asks. So a lease is noted here before it is
    asked for, and what is given back while the request is on its way is not kept when it comes.

        with Tenure() as tenure, tenure:
            lease = lock.acquire(tenure)

    Twice, because Ctrl-C may also come at the first instruction of giving back.
    """

    def __init__(self) -> None:
        self._leases: list[Lease] = []

    def add(self, lease: Lease) -> None:
        self._leases.append(lease)

    def hand_over(self, lease: Lease) -> None:
        """Somebody else gives this one back."""
        self._leases = [kept for kept in self._leases if kept is not lease]

    def give_back(self) -> None:
        for lease in self._leases:
            lease.stop()  # before anything that takes time
        while self._leases:
            self._leases[-1].release()
            self._leases.pop()

    def __enter__(self) -> Tenure:
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back()


class Lease:
    """A held lock. Renewed in the background until `release`; check `guard` before each write
    that only the holder may do.

    It belongs to the process that took it: a fork neither renews nor releases it.
    """

    def __init__(self, lock: WriteLock, token: str, acquired_at: str) -> None:
        self._lock = lock
        self.token = token
        self.acquired_at = acquired_at
        self._etag = ""
        self._expires_at = lock.store.now()
        self._lost = False
        self._stopped = False
        self._owner = Owner("a write lease")
        self._mutex = threading.Lock()
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._keeper: threading.Thread | None = None

    @property
    def expires_at(self) -> datetime:
        return self._expires_at

    def safe(self) -> bool:
        """True while the lease has more than a third of its time left."""
        margin = timedelta(milliseconds=self._lock.lease_ttl_ms / 3)
        return not self._lost and self._lock.store.now() + margin < self._expires_at

    def guard(self) -> None:
        self._owner.check()
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

    def stop(self) -> None:
        """Renew no more, whatever becomes of the rest."""
        self._stopped = True
        self._wake.put(None)

    def release(self) -> None:
        """Give the lock back if it is still ours, safe or not: the delete names our version.
        Never raises: an unreleased lock expires."""
        if self._owner.elsewhere:
            return
        self.stop()
        self._give_back()
        self._wake.put(None)
        keeper = self._keeper
        if keeper is not None and keeper is not threading.current_thread():
            with suppress(RuntimeError):  # Ctrl-C kept it from being started
                keeper.join()

    def _give_back(self) -> None:
        with self._mutex:
            self._lost = True
            if not self._etag:
                return  # not held, or given back before
            try:
                delete_conditionally(
                    self._lock.store, self._lock.key, self._etag, attempts=_RELEASE_ATTEMPTS
                )
            except PreconditionFailed:
                log.info("the write lock had already passed to another writer")
            except (ObjectStoreError, StorageBackendError) as error:
                expiry = timestamp(self._expires_at)
                self._lock.warn(f"write lock not released, it expires at {expiry}: {error}")
            self._etag = ""

    def _hold(self, etag: str, expires_at: datetime) -> Lease:
        with self._mutex:
            self._etag, self._expires_at = etag, expires_at
        if self._stopped:
            self._give_back()  # who wanted it has gone meanwhile
        elif self._lock.keep_alive:
            self._keeper = threading.Thread(target=self._keep_alive, name="onto-lease", daemon=True)
            self._keeper.start()
        return self

    def _keep_alive(self) -> None:
        interval = self._lock.lease_ttl_ms / 3000
        while not self._stopped:
            try:
                self._wake.get(timeout=interval)
            except Empty:
                if not self.renew():
                    return
        # Who stopped us gives the lock back, unless Ctrl-C keeps it from that.
        deadline = time.monotonic() + _RELEASE_GRACE_S
        while self._etag and (left := deadline - time.monotonic()) > 0:
            with suppress(Empty):
                self._wake.get(timeout=left)
        self._give_back()


class _Stopwatch:
    """How long something takes by a clock that may be set back meanwhile: as if it stood then."""

    def __init__(self, now: datetime) -> None:
        self._last = now
        self._elapsed = timedelta()  # exact, as seconds would not be

    def read(self, now: datetime) -> float:
        self._elapsed += max(timedelta(), now - self._last)
        self._last = now
        return self._elapsed.total_seconds()


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
        self.holder = {**identity(), **(holder or {})}
        self.keep_alive = store.timers if keep_alive is None else keep_alive
        self.key = key
        self.warn = warn
        self._unanswered: OrderedDict[str, Lease] = OrderedDict()  # by token
        self._usual_wait_s = _FIRST_GUESS_S

    def try_acquire(self, tenure: Tenure | None = None) -> Lease | None:
        """One conditional create: the uncontended case, in one request."""
        lease = self._new_lease(tenure)
        expires_at, write_id, data = self.payload(lease.token, lease.acquired_at)
        try:
            etag = self.store.put_if_absent(self.key, data, write_id=write_id)
        except (PreconditionFailed, ConditionalConflict):
            return None
        except OutcomeUnknown:
            return self._after_silence(lease)
        return lease._hold(etag, expires_at)

    def acquire(self, tenure: Tenure | None = None, *, tried: bool = False) -> Lease:
        """Wait for the lock up to the timeout, taking it over from a holder that is past its
        lease, or that has ended on this machine. Raises LockContentionError. `tried` when the
        caller has just found it taken; `tenure` gives the lease back where Ctrl-C may come."""
        looked_at = self.store.now()
        waited = _Stopwatch(looked_at)
        state: LockState | None = None
        look = True
        while True:
            asked = self.store.now()
            if not tried and (lease := self.try_acquire(tenure)) is not None:
                self._note_wait(waited.read(asked))
                return lease
            tried = False
            now = self.store.now()
            expired = state is not None and now >= state.expires_at
            if look or expired or not looked_at <= now < looked_at + _LOOK_AGAIN:
                state, looked_at, look = self.read(), now, False
                if (lease := self._adopt(state)) is not None:
                    return lease
                if state is not None and (now >= state.expires_at or is_gone(state.holder)):
                    lease = self._take_over(state, tenure)
                    if lease is not None:
                        return lease
                    state, look = None, True  # somebody else did: look who, at the next turn
            waited_s = waited.read(self.store.now())
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
        return LockState.parse(stored, key=self.key)

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

    def _new_lease(self, tenure: Tenure | None) -> Lease:
        lease = Lease(self, layout.new_write_id(), timestamp(self.store.now()))
        if tenure is not None:
            tenure.add(lease)
        return lease

    def _take_over(self, state: LockState, tenure: Tenure | None) -> Lease | None:
        lease = self._new_lease(tenure)
        expires_at, write_id, data = self.payload(lease.token, lease.acquired_at)
        try:
            etag = self.store.put_if_match(self.key, data, state.etag, write_id=write_id)
        except (PreconditionFailed, ConditionalConflict):
            return None
        except OutcomeUnknown:
            return self._after_silence(lease)
        log.warning("took over the write lock of %s, which has ended or run out", state.owner_id)
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


@dataclass(frozen=True, slots=True)
class BrokenLock:
    """What `break_lock` took away; `state` is None when it was no lock object."""

    state: LockState | None
    problem: str


def break_lock(
    store: ObjectStore, token: str | None, *, key: str = layout.LOCK, apply: bool = True
) -> BrokenLock:
    """Take a lock away from its holder, whoever that is: for one whose expiry lies far ahead, or
    that cannot be read. Exactly the version that was read is deleted, and only with its token; an
    unreadable one has none. Raises LockBreakError with nothing deleted. Without `apply` it only
    says what would be broken.

    A holder that lives finds out at its next renewal, and publishes nothing: the swap of head
    decides, and its guard comes before.
    """
    try:
        stored = store.get(key)
    except ObjectNotFound:
        raise LockBreakError("nobody holds the write lock") from None
    state, problem = None, ""
    try:
        state = LockState.parse(stored, key=key)
    except IntegrityError as error:
        problem = str(error)
    if state is not None and state.token != (token or ""):
        raise LockBreakError(
            f"the write lock is held by {state.owner_id!r} with another token than was given: "
            "look with `onto lock show`, and break what it shows"
        )
    if not apply:
        return BrokenLock(state, problem)
    try:
        store.delete_if_match(key, stored.etag)
    except (PreconditionFailed, ConditionalConflict):
        raise LockBreakError(
            "the write lock was renewed or changed hands just now: its holder lives; nothing was "
            "broken"
        ) from None
    except OutcomeUnknown as error:
        raise StorageBackendError(
            f"the store did not say whether {key} was deleted: look with `onto lock show`",
            operation="lock break",
            key=key,
            retryable=True,
        ) from error
    return BrokenLock(state, problem)
