"""The write lock: one object, held by lease, owned by token.

The lock makes writers wait instead of wasting work; safety rests on the head CAS. Whoever holds
it renews in time or stops: `Lease.guard()` raises as soon as the lease is not certainly ours.
All times are the store's clock.

Who had to wait knows that there is a line (`commitlog.line`): it looks who is next, and at the end
offers the lock to that one instead of deleting it. An offer is a lock object in the name of the
next, of a second; past that it is open to all, as any lease that has run out. Who got the lock at
its first request deletes it, and pays for no line.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from storage_engine.commitlog import layout
from storage_engine.commitlog.chain import HeadVersion
from storage_engine.commitlog.json_object import (
    Won,
    delete_conditionally,
    write_conditionally,
)
from storage_engine.commitlog.layout import Ticket
from storage_engine.commitlog.line import Place, TicketLine, gone, holder_of, tokens_of
from storage_engine.commitlog.lock_object import LineNotes, LockState
from storage_engine.commitlog.records import Head, parse_timestamp, timestamp, to_json
from storage_engine.commitlog.waiting import LookAhead, PollPace, Waiting
from storage_engine.errors import (
    IntegrityError,
    LeaseExpiredError,
    LockBreakError,
    OntologiaError,
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
from storage_engine.process import Owner, identity

log = logging.getLogger(__name__)

OFFER_MS = 1000  # who does not accept the lock within that has lost its turn
_UNANSWERED_KEPT = 16
_RELEASE_ATTEMPTS = 4  # about half a second; others would wait for the whole lease
_ACCEPT_ATTEMPTS = 3
_ACCEPT_AFTER_S = OFFER_MS / 1000 / 4  # an offer that is held is accepted after so long
_RELEASE_GRACE_S = 1.0  # then the keeper gives back what it was only told not to renew
_LINE_SHOWN = 64  # tokens in a lock object
_LISTED = timedelta(seconds=1)  # so long, a listing tells who waits
_INHERITED = timedelta(seconds=0.5)  # and so long, it need not be made again
_INHERITED_LINE = 2
_LONGEST_TURN_MS = 60_000
_PASSED_ON = timedelta(seconds=1)  # so long after it was handed over, the lock counts as taken


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

    One that is only `promised` (the holder's commit stands, and we are next) has still to be
    waited for: `guard` does, while whatever needs no lock is under way.
    """

    def __init__(self, lock: WriteLock, token: str, acquired_at: str) -> None:
        self._lock = lock
        self.token = token
        self.acquired_at = acquired_at
        self._etag = ""
        self._expires_at = lock.store.now()
        self._lost = False
        self._stopped = False
        self._on_offer = False  # held by what was offered to us, for as long as that lasts
        self._owner = Owner("a write lease")
        self._mutex = threading.Lock()
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._keeper: threading.Thread | None = None
        self._waiting: Waiting | None = None  # for what was promised
        self._place: Place | None = None  # in line: who has one knows that there is a line
        self._line: LineNotes | None = None  # what the lock object says of it
        self._next: list[Ticket] | None = None  # who waits, as far as we have looked
        self._missed: str | None = None  # the token of who did not accept the lock
        self._attempted = False  # whether the attempt that others know of has been made

    @property
    def expires_at(self) -> datetime:
        return self._expires_at

    @property
    def stopped(self) -> bool:
        return self._stopped

    @property
    def promised(self) -> bool:
        """Whether it was taken for granted before it was ours."""
        return self._waiting is not None

    @property
    def on_offer(self) -> bool:
        """Whether it is held, or was lost, as it was offered to us: a lease of a second."""
        return self._on_offer

    @property
    def contended(self) -> bool:
        """Whether somebody waits, for all we know: there was a line when we came."""
        return self._place is not None and (self._next is None or len(self._next) > 0)

    @property
    def others_take_ms(self) -> int:
        """How long those who wait will take, as far as we know."""
        turn_ms = self._line.turn_ms if self._line is not None else 0
        return turn_ms * len(self._next or ())

    @property
    def left_head(self) -> HeadVersion | None:
        """The head that the holder before left when it handed the lock to us, if we were told."""
        notes = self._line
        if notes is None or not (notes.head and notes.head_etag):
            return None
        try:
            head = Head.parse(notes.head.encode(), key=self._lock.key)
        except IntegrityError as error:
            log.info("the write lock tells of no head: %s", error)
            return None
        return HeadVersion(head, notes.head_etag)

    def note_head(self, version: HeadVersion | None) -> None:
        """We have swung head to this: what the next one builds on. None: we are about to swing it,
        and until that is answered nobody knows."""
        if self._place is None:
            return
        notes = replace(self._line or LineNotes(), head_commit_id=None, head="", head_etag="")
        if version is not None:
            notes = replace(
                notes,
                head_commit_id=version.head.commit_id,
                head=version.head.to_bytes().decode(),
                head_etag=version.etag,
            )
        self._line = notes

    def take_attempt(self) -> str:
        """A name for an attempt at a commit: the first one, where others may wait, is one that
        they know. Given once, so that no other content ever has it."""
        if self._place is None or self._attempted:
            return layout.new_commit_attempt()
        self._attempted = True
        return layout.commit_attempt_of(self.token)

    def safe(self) -> bool:
        """True while the lease has more than a third of its time left; an offer lasts a second."""
        margin_ms = OFFER_MS / 8 if self._on_offer else self._lock.lease_ttl_ms / 3
        margin = timedelta(milliseconds=margin_ms)
        return not self._lost and self._lock.store.now() + margin < self._expires_at

    def guard(self) -> None:
        self._owner.check()
        if (waiting := self._waiting) is not None:
            waiting.wait_out()
        # Asked once more, as the background may have renewed it between the first two.
        if not (self.safe() or (self._on_offer and self.renew()) or self.safe()):
            self._lost = True
            raise LeaseExpiredError(expires_at=timestamp(self._expires_at))

    def renew(self) -> bool:
        """Extend the lease; False (and unsafe from then on) when it is not ours any more."""
        with self._mutex:
            if self._lost:
                return False
            expires_at, write_id, data = self._payload()
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
                self._note_lost(f"write lease could not be renewed: {error}")
                return False
            if not isinstance(outcome, Won):
                self._note_lost("write lease was taken over by another writer")
                return False
            self._etag, self._expires_at = outcome.etag, expires_at
            self._on_offer = False
            return True

    def _note_lost(self, problem: str) -> None:
        """Who misses an offer waits for another turn, and nobody need be told."""
        self._lost = True
        if self._on_offer:
            log.info("the write lock's offer was missed: %s", problem)
        else:
            self._lock.warn(problem)

    def stop(self) -> None:
        """Renew no more, whatever becomes of the rest."""
        self._stopped = True
        self._wake.put(None)

    def release(self) -> None:
        """Give the lock back if it is still ours, safe or not: only our version is deleted, or
        offered to the next in line. Never raises: an unreleased lock expires."""
        if self._owner.elsewhere:
            return
        self.stop()
        self._give_back()
        self._wake.put(None)
        keeper = self._keeper
        if keeper is not None and keeper is not threading.current_thread():
            with suppress(RuntimeError):  # Ctrl-C kept it from being started
                keeper.join()
        self._leave_line()

    # -- the lock object ----------------------------------------------------------------------

    def _payload(self) -> tuple[datetime, str, bytes]:
        return self._lock.payload(self.token, self.acquired_at, self._line)

    def create(self) -> bool:
        """Take a lock that nobody holds, in one request. Raises OutcomeUnknown."""
        expires_at, write_id, data = self._payload()
        try:
            etag = self._lock.store.put_if_absent(self._lock.key, data, write_id=write_id)
        except (PreconditionFailed, ConditionalConflict):
            return False
        self._hold(etag, expires_at)
        return True

    def take_over(self, state: LockState) -> bool:
        """Take exactly this version of the lock: one that has run out, or of somebody who has
        ended. Raises OutcomeUnknown."""
        if state.line is not None:  # whether its holder has made its commit, nobody has told us
            waiting = tuple(token for token in state.line.waiting if token != self.token)
            self._line = LineNotes(waiting, state.line.listed_at, state.line.turn_ms)
        expires_at, write_id, data = self._payload()
        try:
            etag = self._lock.store.put_if_match(
                self._lock.key, data, state.etag, write_id=write_id
            )
        except (PreconditionFailed, ConditionalConflict):
            return False
        if state.offered:
            log.info("%s did not accept the write lock when it was next", state.owner_id)
            self._missed = state.token
        else:
            log.warning("took over the write lock of %s: it has ended or run out", state.owner_id)
        self._hold(etag, expires_at)
        return True

    def accept(self, state: LockState) -> bool:
        """Take the lock that stands in our name: it was offered to us, or an unanswered request
        of ours has landed."""
        now = self._lock.store.now()
        self._line = state.line
        self.acquired_at = timestamp(now - timedelta(seconds=state.held_for(now)))
        expires_at, write_id, data = self._payload()
        try:
            outcome = write_conditionally(
                self._lock.store,
                self._lock.key,
                data,
                write_id=write_id,
                etag=state.etag,
                attempts=_ACCEPT_ATTEMPTS,
            )
        except StorageBackendError as error:
            self._line = None
            if not error.retryable:
                raise
            return False  # the next look tells whether it landed
        if isinstance(outcome, Won):
            self._hold(outcome.etag, expires_at)
            return True
        self._line = None  # the head that it tells of will be an older one when it is our turn
        return False

    def hold_offer(self, state: LockState) -> bool:
        """Take the lock as it was offered to us, without a word: an offer is a lease of a second,
        and most who were next have uploaded everything by then. Who needs longer accepts it in the
        background. False where that takes too long to be seen, or time does not pass by itself."""
        late = self._lock.store.now() + timedelta(milliseconds=OFFER_MS / 2) >= state.expires_at
        if late or not (state.offered and self._lock.keep_alive):
            return False
        self._line = state.line
        self.acquired_at = state.acquired_at
        self._on_offer = True
        self._hold(state.etag, state.expires_at)
        return True

    def hold(self, state: LockState) -> None:
        """A request of ours has landed unanswered: the lock stands as we wrote it."""
        self._line = state.line
        self._hold(state.etag, state.expires_at)

    def _hold(self, etag: str, expires_at: datetime) -> None:
        with self._mutex:
            self._etag, self._expires_at = etag, expires_at
        if self._stopped:
            self._give_back()  # who wanted it has gone meanwhile
        elif self._lock.keep_alive and self._keeper is None:
            self._start(self._keep_alive)

    def _start(self, work: Callable[[], None]) -> None:
        self._keeper = threading.Thread(target=work, name="onto-lease", daemon=True)
        self._keeper.start()

    # -- waiting ------------------------------------------------------------------------------

    def stands_in_line(self, place: Place) -> None:
        self._place = place

    def promise(self, waiting: Waiting) -> None:
        """It will be ours soon: go on waiting in the background, where time passes by itself."""
        self._waiting = waiting
        if self._lock.keep_alive:
            self._start(self._wait_and_keep)

    def _wait_and_keep(self) -> None:
        assert self._waiting is not None
        if self._waiting.run_to_end(self._rest):
            self._keep_alive()

    def _rest(self, seconds: float) -> bool:
        """Wait in the background; False when nobody wants the lock any more."""
        with suppress(Empty):
            self._wake.get(timeout=seconds)
        return not self._stopped

    def _leave_line(self) -> None:
        """Without having held the lock, or where our ticket could not be taken away. An offer
        that stands in our name is open to all at once."""
        line, place = self._lock.line, self._place
        if line is None or place is None or not place.standing:
            return
        line.leave(place)
        try:
            state = self._lock.read()
            if state is not None and state.token == self.token:
                delete_conditionally(
                    self._lock.store, self._lock.key, state.etag, attempts=_RELEASE_ATTEMPTS
                )
        except (ObjectStoreError, OntologiaError) as error:
            log.info("nobody can tell whether the write lock was offered to us: %s", error)

    # -- the line behind us -------------------------------------------------------------------

    @property
    def can_look(self) -> bool:
        """Whether it can be found out who waits, without anybody waiting for that."""
        return self._lock.line is not None and self._lock.keep_alive

    def look_who_waits(self) -> None:
        """Beside whatever is done next, although we did not have to wait: we keep others waiting
        for longer than a commit takes. Until that is known, somebody does for all we know."""
        if self._place is None and self._lock.line is not None:
            self._place = self._lock.place(self.token)
        self._next = None
        self._wake.put(None)

    def _look_at_line(self) -> None:
        with self._mutex:
            if self._etag and self._next is None and not self._inherit_line():
                self._find_next()

    def _inherit_line(self) -> bool:
        """Whether the holder before has told who waits, just now, and enough of them that those
        who come next know their place."""
        line, place, notes = self._lock.line, self._place, self._line
        if line is None or place is None or notes is None or notes.listed_at is None:
            return False
        if self._missed is not None or self._lock.store.now() > notes.listed_at + _INHERITED:
            return False
        waiting = line.named(notes.tickets, ours=self.token)
        if len(waiting) < _INHERITED_LINE:
            return False
        line.leave(place)
        self._next = waiting
        return True

    def _listed_long_ago(self) -> bool:
        listed_at = self._line.listed_at if self._line is not None else None
        return listed_at is None or self._lock.store.now() > listed_at + _LISTED

    def _find_next(self) -> None:
        """Who waits behind us. Our own ticket goes before the lock does, else it would be offered
        to us when we no longer want it."""
        line, place = self._lock.line, self._place
        if line is None or place is None:
            return
        try:
            listed_at = self._lock.store.now()
            missed = {self._missed} if self._missed is not None else ()
            _, tickets = self._lock.store.parallel.both(
                partial(line.leave, place),
                partial(line.waiting, ours=self.token, without=missed),
            )
        except (ObjectStoreError, OntologiaError) as error:
            log.info("nobody can tell who is next in line: %s", error)
            self._next = []
            return
        self._next = tickets
        notes = self._line or LineNotes()
        self._line = replace(notes, listed_at=listed_at, waiting=tokens_of(tickets))

    # -- giving back --------------------------------------------------------------------------

    def _give_back(self) -> None:
        with self._mutex:
            self._lost = True
            if not self._etag:
                return  # not held, or given back before
            if not self._next or self._listed_long_ago():
                self._find_next()  # again: somebody may have come since, or gone
            ours = identity()
            waiting = [ticket for ticket in self._next or () if not gone(ticket, ours)]
            try:
                if waiting:
                    self._offer(waiting[0], waiting[1:], ours)
                else:
                    self._lock.note_passed_on(False)
                    delete_conditionally(
                        self._lock.store, self._lock.key, self._etag, attempts=_RELEASE_ATTEMPTS
                    )
            except PreconditionFailed:
                log.info("the write lock had already passed to another writer")
            except (ObjectStoreError, StorageBackendError) as error:
                expiry = timestamp(self._expires_at)
                self._lock.warn(f"write lock not released, it expires at {expiry}: {error}")
            self._etag = ""

    def _offer(self, to: Ticket, others: list[Ticket], ours: Mapping[str, Any]) -> None:
        """Write the lock in the name of the next: theirs for a second, and for longer as soon as
        they renew it."""
        lock, now = self._lock, self._lock.store.now()
        before = self._line or LineNotes()
        held = now - parse_timestamp(self.acquired_at)
        turn_ms = max(0, round(held.total_seconds() * 1000))
        if before.turn_ms:  # fast ones count most: who waits for slow ones makes them so
            share = 2 if turn_ms < before.turn_ms else 8
            turn_ms = before.turn_ms + (turn_ms - before.turn_ms) // share
        write_id = layout.new_write_id()
        body = {
            "owner_id": to.owner,
            "acquired_at": timestamp(now),
            "expires_at": timestamp(now + timedelta(milliseconds=OFFER_MS)),
            "lease_ttl_ms": OFFER_MS,
            "token": to.token,
            "holder": holder_of(to, ours),
            "offered": True,
            "line": replace(
                before,
                waiting=tokens_of(others[:_LINE_SHOWN]),
                tickets=self._names(others[:_LINE_SHOWN]),
                turn_ms=min(max(1, turn_ms), _LONGEST_TURN_MS),
            ).to_dict(),
            "write_id": write_id,
        }
        lock.note_passed_on(True, turn_ms * (1 + len(others)))
        outcome = write_conditionally(
            lock.store,
            lock.key,
            to_json(body),
            write_id=write_id,
            etag=self._etag,
            attempts=_RELEASE_ATTEMPTS,
        )
        if not isinstance(outcome, Won):
            log.info("the write lock had already passed to another writer")

    def _names(self, tickets: list[Ticket]) -> tuple[str, ...]:
        line = self._lock.line
        return tuple(line.name(ticket) for ticket in tickets) if line is not None else ()

    def _keep_alive(self) -> None:
        interval = self._lock.lease_ttl_ms / 3000
        renewed = time.monotonic()
        while not self._stopped:
            if self._place is not None and self._next is None:
                self._look_at_line()
            try:
                due = _ACCEPT_AFTER_S if self._on_offer else interval
                left = due - (time.monotonic() - renewed)
                self._wake.get(timeout=max(0.0, left))
            except Empty:
                if not self.renew():
                    return
                renewed = time.monotonic()
        # Who stopped us gives the lock back, unless Ctrl-C keeps it from that.
        deadline = time.monotonic() + _RELEASE_GRACE_S
        while self._etag and (left := deadline - time.monotonic()) > 0:
            with suppress(Empty):
                self._wake.get(timeout=left)
        self._give_back()


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
        prefix = layout.line_of(key)
        self.line = TicketLine(store, prefix) if prefix is not None else None
        self.pace = PollPace()
        self._unanswered: OrderedDict[str, Lease] = OrderedDict()  # by token
        self._passed_on_at: datetime | None = None
        self._others_take_s = 0.0

    def try_acquire(self, tenure: Tenure | None = None) -> Lease | None:
        """One conditional create: the uncontended case, in one request."""
        lease = self._new_lease(tenure)
        try:
            return lease if lease.create() else None
        except OutcomeUnknown:
            return self._after_silence(lease)

    def acquire(
        self,
        tenure: Tenure | None = None,
        *,
        tried: bool = False,
        early: LookAhead | None = None,
        quiet: bool = False,
    ) -> Lease:
        """Wait for the lock up to the timeout, taking it over from a holder that is past its
        lease, or that has ended on this machine. Raises LockContentionError. `tried` when the
        caller has just found it taken; `tenure` gives the lease back where Ctrl-C may come.

        With `early` the lease may be one that is only promised: see `Lease`. `quiet`: an offer is
        held without a word where that is possible; who stands still for a second loses it, so that
        is for those who then wait for another turn (`Lease.on_offer`)."""
        if not tried and (lease := self.try_acquire(tenure)) is not None:
            self.pace.note(0.0)
            return lease
        return Waiting(self, self._new_lease(tenure), early, quiet=quiet).run()

    def read(self) -> LockState | None:
        """Who holds the lock, or None."""
        try:
            stored = self.store.get(self.key)
        except ObjectNotFound:
            return None
        return LockState.parse(stored, key=self.key)

    def waiting(self) -> list[dict[str, Any]]:
        """Who waits in line, for people; nothing is changed."""
        tickets = self.line.waiting(remove=False) if self.line is not None else []
        return [
            {"owner_id": t.owner, "since": timestamp(t.since), "token": t.token} for t in tickets
        ]

    def payload(
        self, token: str, acquired_at: str, line: LineNotes | None = None
    ) -> tuple[datetime, str, bytes]:
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
        if line is not None:
            body["line"] = line.to_dict()
        return expires_at, write_id, to_json(body)

    def place(self, token: str) -> Place:
        """Where somebody who came now would stand in the line, which there is."""
        assert self.line is not None
        return self.line.place(token, owner_id=self.owner_id, patience_ms=self.timeout_ms)

    @property
    def passed_on(self) -> bool:
        """Whether we have offered it to somebody else a moment ago: no need to try it first."""
        at = self._passed_on_at
        return at is not None and at <= self.store.now() < at + _PASSED_ON

    @property
    def others_take_s(self) -> float:
        """How long those take whom we have let before us, as far as we know."""
        return self._others_take_s if self.passed_on else 0.0

    def note_passed_on(self, passed_on: bool, others_take_ms: int = 0) -> None:
        self._passed_on_at = self.store.now() if passed_on else None
        self._others_take_s = others_take_ms / 1000

    def _new_lease(self, tenure: Tenure | None) -> Lease:
        lease = Lease(self, layout.new_write_id(), timestamp(self.store.now()))
        if tenure is not None:
            tenure.add(lease)
        return lease

    def _after_silence(self, lease: Lease) -> Lease | None:
        """An unanswered request: it has landed, or may land while we go on asking."""
        self._unanswered[lease.token] = lease
        while len(self._unanswered) > _UNANSWERED_KEPT:
            self._unanswered.popitem(last=False)
        state = self.read()
        if state is None or not self.forget_unanswered(state.token):
            return None
        lease.hold(state)
        if lease.safe():
            return lease
        lease.release()
        return None

    def forget_unanswered(self, token: str) -> bool:
        """Whether a lock with this token is that of an unanswered request of ours."""
        return self._unanswered.pop(token, None) is not None


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
