"""One writer's wait for the lock.

A wait is a ticket in line and looks at the lock object. Each look tells what to do: take a lock
that is free, accept one that is offered to us, take over one whose holder has ended or let its
lease run out, or wait on. How long to the next look depends on the place in line, which the lock
object tells: whoever is next looks often, the others seldom.

Who is next, or next but one, may begin before the lock is its own (`LookAhead`): as soon as what
the one before it commits can be known, everything that is to be uploaded can be, and the rest of
the wait goes on beside it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Protocol

from storage_engine.commitlog.line import Place
from storage_engine.commitlog.lock_object import LockState
from storage_engine.commitlog.records import timestamp
from storage_engine.errors import LockContentionError, OntologiaError
from storage_engine.objectstore.parallel import Latch
from storage_engine.objectstore.protocol import ObjectStoreError, OutcomeUnknown
from storage_engine.process import is_gone

if TYPE_CHECKING:
    from storage_engine.commitlog.lock import Lease, WriteLock

Rest = Callable[[float], bool]  # lets time pass; False: nobody waits any more

_FIRST_GUESS_S = 0.1  # of how long a wait is, before the first one
_SLOWEST_POLL_S = 0.5
_SLOWEST_IN_LINE_S = 1.0
_FASTEST_POLL_S = 0.01
_NEXT_SLOWEST_POLL_S = 0.2
_SLOWEST_LOOK_S = 0.25  # at the lock, of who may begin: a turn may pass without a commit
_SHARE_OF_WAIT = 0.8  # of what is left until our turn, to the next look
_BEFORE_US = 1  # who has no more than that before it, the holder left out, may begin
_SHARE_TO_MANIFEST = 0.25  # of a turn, between two looks for the manifest of one who waits too
_SHARE_TO_HAND_OVER = 1.0  # of a usual turn: earlier, the holder has not handed it over
_SEEN_WITHIN = timedelta(seconds=1)  # a listing shows tickets that are so old, clocks and all
_OVERDUE = 6  # looks come that many times as fast as what they wait for has taken so far


class LookAhead(Protocol):
    def __call__(self, commit_id: int, token: str, *, holds: bool) -> bool:
        """Whether the commit that follows `commit_id` can be built on: of who holds the lock under
        this token (`holds`), or is next."""


class Stopwatch:
    """How long something takes by a clock that may be set back meanwhile: as if it stood then."""

    def __init__(self, now: datetime) -> None:
        self._last = now
        self._elapsed = timedelta()  # exact, as seconds would not be

    def read(self, now: datetime) -> float:
        self._elapsed += max(timedelta(), now - self._last)
        self._last = now
        return self._elapsed.total_seconds()


class PollPace:
    """How often one looks who knows nothing of a line: by how long it had to wait before."""

    def __init__(self) -> None:
        self._usual_wait_s = _FIRST_GUESS_S

    def note(self, waited_s: float) -> None:
        self._usual_wait_s = (self._usual_wait_s + waited_s) / 2  # the last few count most

    def pause_s(self, waited_s: float, answer_s: float) -> float:
        """The nearer its usual turn, the more often a writer looks: who has waited longest is
        likely to be next, while newcomers leave the store alone. Nobody asks faster than it
        answers."""
        until_turn_s = 0.3 * (self._usual_wait_s - waited_s)
        span = min(_SLOWEST_POLL_S, max(_FASTEST_POLL_S, answer_s, until_turn_s))
        return span * random.uniform(0.5, 1.5)


class Waiting:
    """Waits until the lease holds the lock, or is as good as certain to."""

    def __init__(
        self,
        lock: WriteLock,
        lease: Lease,
        early: LookAhead | None = None,
        *,
        quiet: bool = False,
    ) -> None:
        """`quiet`: an offer may be held without a word."""
        self._lock = lock
        self._store = lock.store
        self._lease = lease
        self._early = early
        self._quiet = quiet
        self._waited = Stopwatch(self._store.now())
        self._state: LockState | None = None
        self._looked_at = self._store.now()
        self._answer_s = 0.0
        self._place: Place | None = None
        self._ended = Latch()
        self._failure: BaseException | None = None

    def run(self) -> Lease:
        """Raises LockContentionError at the timeout."""
        try:
            self._join_and_look()
            while not self._served():
                if self._begins_early():
                    self._lease.promise(self)
                    return self._lease
                self._rest_or_give_up(self._sleep)
                self._look_if_due()
            return self._lease
        except BaseException:
            self._lease.release()  # and leave the line
            raise

    def run_to_end(self, rest: Rest) -> bool:
        """The rest of a wait, in the background; whether the lease holds the lock then."""
        try:
            self._early = None
            rest(self._pause_s(self._waited.read(self._store.now())))
            self._finish(rest)
            return self._failure is None
        finally:
            self._ended.open()

    def wait_out(self) -> None:
        """Until a promise has come true. Raises what kept it from that."""
        if self._lock.keep_alive:
            self._ended.wait()
        elif not self._ended.is_open:
            self._early = None
            self._finish(self._sleep)
            self._ended.open()
        if self._failure is not None:
            raise self._failure

    def _finish(self, rest: Rest) -> None:
        try:
            while True:
                self._look()
                if self._served():
                    return
                self._rest_or_give_up(rest)
        except BaseException as error:  # noqa: BLE001 - raised by who waits for it
            self._failure = error

    # -- one look -----------------------------------------------------------------------------

    def _join_and_look(self) -> None:
        line = self._lock.line
        if line is None or self._lock.timeout_ms == 0:
            self._look()
            return

        self._place = place = self._lock.place(self._lease.token)
        self._lease.stands_in_line(place)
        others_s = self._lock.others_take_s if self._lock.keep_alive else 0.0
        if others_s == 0.0:
            self._store.parallel.both(self._join, self._look)
            return
        # We have handed it over just now, to those whom we have seen in line.
        self._join()
        self._sleep(
            min(_SLOWEST_IN_LINE_S, _SHARE_OF_WAIT * others_s, self._lock.timeout_ms / 2000)
        )
        self._look()

    def _join(self) -> None:
        line, place = self._lock.line, self._place
        assert line is not None
        assert place is not None
        line.join(place, owner_id=self._lock.owner_id, holder=self._lock.holder)
        if self._lease.stopped:  # Ctrl-C came while it was on its way
            line.leave(place)

    def _look(self) -> None:
        asked = self._store.now()
        self._state = self._lock.read()
        self._looked_at = self._store.now()
        self._answer_s = (self._looked_at - asked).total_seconds()
        self._stand_again_if_missed()

    def _served(self) -> bool:
        """Whether the lease holds the lock now, by what the last look has told."""
        state, lease, now = self._state, self._lease, self._store.now()
        try:
            if state is None:
                held = lease.create()
            elif state.token == lease.token:
                held = (self._quiet and lease.hold_offer(state)) or lease.accept(state)
            elif self._may_take_over(state, now):
                held = lease.take_over(state)
            else:
                return False
        except OutcomeUnknown:
            return False  # it may have landed: then the next look finds our token
        if not held:
            self._state = None  # somebody else was faster: look who
        else:
            self._lock.pace.note(self._waited.read(now))
        return held

    def _may_take_over(self, state: LockState, now: datetime) -> bool:
        """From ourselves, from who has let its lease run out, from who has ended."""
        ours = self._lock.forget_unanswered(state.token)
        return ours or now >= state.expires_at or is_gone(state.holder)

    def _look_if_due(self) -> None:
        """Who waits for head to move need not look at the lock as often."""
        if not self._may_begin_early() or self._since_look() >= self._look_every():
            self._look()

    def _since_look(self) -> float:
        return (self._store.now() - self._looked_at).total_seconds()

    def _look_every(self) -> float:
        turn_ms = self._state.line.turn_ms if self._state and self._state.line else 0
        return min(_SLOWEST_LOOK_S, max(turn_ms / 1000, 0.1))

    def _stand_again_if_missed(self) -> None:
        """Who listed the line since we joined did not find us: somebody took us for dead."""
        state, place = self._state, self._place
        if state is None or place is None or state.line is None or state.line.listed_at is None:
            return
        listed_since = state.line.listed_at > place.ticket.since + _SEEN_WITHIN
        if listed_since and self._lease.token not in (*state.line.waiting, state.token):
            self._join()

    # -- beginning early ----------------------------------------------------------------------

    def _may_begin_early(self) -> bool:
        notes = self._state.line if self._state is not None else None
        return (
            self._early is not None
            and notes is not None
            and notes.head_commit_id is not None
            and self._lease.token in notes.waiting[: _BEFORE_US + 1]
        )

    def _begins_early(self) -> bool:
        if not self._may_begin_early():
            return False
        assert self._early is not None
        assert self._state is not None
        assert self._state.line is not None
        assert self._state.line.head_commit_id is not None
        ahead = self._places_ahead()
        before = (self._state.token, *self._state.line.waiting)[ahead]
        return self._early(self._state.line.head_commit_id + ahead, before, holds=ahead == 0)

    def _places_ahead(self) -> int:
        """How many are before us, the holder left out; all of them where we are not named."""
        notes = self._state.line if self._state is not None else None
        if notes is None:
            return 0
        named = self._lease.token in notes.waiting
        return notes.waiting.index(self._lease.token) if named else len(notes.waiting) + 1

    # -- between two looks --------------------------------------------------------------------

    def _rest_or_give_up(self, rest: Rest) -> None:
        waited_s = self._waited.read(self._store.now())
        left_s = self._lock.timeout_ms / 1000 - waited_s
        if left_s <= 0 or not rest(min(self._pause_s(waited_s), left_s)):
            raise self._contention(waited_s)

    def _sleep(self, seconds: float) -> bool:
        self._store.sleep(seconds)
        return True

    def _pause_s(self, waited_s: float) -> float:
        state = self._state
        if state is None or state.line is None or state.line.turn_ms == 0:
            return self._lock.pace.pause_s(waited_s, self._answer_s)
        turn_s, held_s = state.line.turn_ms / 1000, state.held_for(self._store.now())
        ahead = self._places_ahead()
        if ahead == 0:
            overdue = min(_NEXT_SLOWEST_POLL_S, max(_FASTEST_POLL_S, held_s / _OVERDUE))
            early = self._lease.promised  # all that is left is to be handed the lock
            to_hand_over = _SHARE_TO_HAND_OVER * turn_s - held_s if early else 0.0
            span = min(_NEXT_SLOWEST_POLL_S, max(to_hand_over, overdue))
        elif self._may_begin_early():
            span = max(_FASTEST_POLL_S, self._answer_s, _SHARE_TO_MANIFEST * turn_s)
            span = min(_NEXT_SLOWEST_POLL_S, span)
        else:
            left_s = ahead * turn_s + max(0.0, turn_s - held_s)
            if self._early is not None:
                left_s -= _BEFORE_US * turn_s  # then we may begin
            span = max(_FASTEST_POLL_S, self._answer_s, _SHARE_OF_WAIT * left_s)
        return min(_SLOWEST_IN_LINE_S, span) * random.uniform(0.8, 1.2)

    def _contention(self, waited_s: float) -> LockContentionError:
        state, place = self._state, None
        try:
            state = state or self._lock.read()
            if self._place is not None and self._lock.line is not None:
                place = self._lock.line.place_of(self._lease.token)
        except (ObjectStoreError, OntologiaError):
            pass  # it is for people, who are told the rest
        return LockContentionError(
            waited_ms=round(waited_s * 1000),
            owner_id=state.owner_id if state else "",
            holder=state.holder if state else None,
            acquired_at=state.acquired_at if state else "",
            expires_at=timestamp(state.expires_at) if state else "",
            place=place[0] if place else None,
            waiting=place[1] if place else None,
        )
