"""Claims events of an object store for one worker: `PendingEvents` finds them, a CAS decides.

First claims are created in parallel and learn from a refusal whose claim stands; ETags are kept,
so an ack is one request. Before a claim is taken over, the log is searched for an ack that came
with a commit. What is known to be held by another is left alone until its lease has run out.

Where several workers are at it, each takes its part (`Peers`), and what others have finished it
learns from the positions that they keep. A worker that has nothing of its own left helps others
with what they have had for PATIENCE, from the end; and takes everything of one that finishes
nothing for so long, after it has tried a few: who holds those has claimed the others too, and is
given the time once more. One that is busy takes all of them after LONG_PATIENCE.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from storage_engine.commitlog import state
from storage_engine.commitlog.chain import Chain
from storage_engine.commitlog.json_object import Lost
from storage_engine.errors import IntegrityError, StorageBackendError
from storage_engine.events import records
from storage_engine.events.object.claims import ObjectClaims, StoredClaim
from storage_engine.events.object.peers import Peers
from storage_engine.events.object.pending_events import PendingEvent, PendingEvents
from storage_engine.events.protocol import Subscription
from storage_engine.events.records import Claim, ClaimRecord, Envelope, Failure
from storage_engine.objectstore.protocol import ObjectStore

log = logging.getLogger(__name__)

SAVE_INTERVAL = timedelta(seconds=30)
LOOK_INTERVAL = timedelta(seconds=1)  # for more urgent ones, while there is enough to do
_PAUSE = timedelta(seconds=1)  # after the store failed to answer
_ROUNDS = 20
_AHEAD = 10  # events read, in claim limits, among which priority decides
PATIENCE = timedelta(seconds=5)
LONG_PATIENCE = timedelta(seconds=30)
EXCHANGE_INTERVAL = timedelta(seconds=2)  # of positions, between workers
_IDLE_INTERVAL = timedelta(seconds=0.5)  # the same, of a worker that waits for others
_BEHIND = 10_000  # events read that wait for one before them; then no more are read
_NAMES_A_SECOND = 5_000  # that are exchanged: with more, it is done less often


@dataclass(slots=True, eq=False)
class Candidate:
    """An event that a handler has yet to finish, and its claim as last seen."""

    event: PendingEvent
    envelope: Envelope
    subscription: Subscription
    stands: StoredClaim | None = None
    was_left: bool = False  # to another worker, which had its time
    is_behind: bool = False  # one of the same order that is not finished

    @property
    def is_open(self) -> bool:
        return self.subscription.handler_id in self.event.open

    @property
    def rank(self) -> tuple[int, int, str, str]:
        envelope = self.envelope
        priority = -envelope["priority"], -self.subscription.priority
        return *priority, *self.age

    @property
    def age(self) -> tuple[str, str]:
        return self.envelope["created_at"], self.envelope["id"]

    @property
    def order(self) -> tuple[str, str] | None:
        """In which line it stands, if in any: it must not overtake who is before it there."""
        key = self.subscription.order_of(self.envelope)
        return None if key is None else (self.subscription.handler_id, key)


class _Lines:
    """Candidates that must not overtake one another: of each line only the first is ready, and
    while one is in hand, none."""

    def __init__(self) -> None:
        self._lines: dict[tuple[str, str], list[tuple[tuple[str, str], int, Candidate]]] = {}
        self._in_hand: dict[tuple[str, str], Candidate] = {}
        self._numbers = itertools.count()
        self.behind = 0  # how many are not ready for that reason alone

    def enter(self, candidate: Candidate) -> None:
        if (order := candidate.order) is not None:
            place = candidate.age, next(self._numbers), candidate
            heapq.heappush(self._lines.setdefault(order, []), place)

    def is_turn_of(self, candidate: Candidate) -> bool:
        """If not, it is left to `next`."""
        order = candidate.order
        if order is None or (self._lines[order][0][2] is candidate and order not in self._in_hand):
            return True
        candidate.is_behind = True
        self.behind += 1
        return False

    def take(self, candidate: Candidate) -> None:
        """It is in hand, until it is put `back`."""
        if (order := candidate.order) is not None:
            self._in_hand[order] = candidate

    def back(self, candidate: Candidate) -> None:
        order = candidate.order
        if order is not None and self._in_hand.get(order) is candidate:
            del self._in_hand[order]

    def next(self) -> list[Candidate]:
        """Those whose turn has come, as everyone before them is finished."""
        turns: list[Candidate] = []
        for order, line in list(self._lines.items()):
            while line and not line[0][2].is_open:
                _, _, ended = heapq.heappop(line)
                self.behind -= ended.is_behind
                ended.is_behind = False
            if not line:
                del self._lines[order]
            elif line[0][2].is_behind and order not in self._in_hand:
                line[0][2].is_behind = False
                self.behind -= 1
                turns.append(line[0][2])
        return turns


class ObjectConsumer:
    """See `Consumer`."""

    def __init__(
        self,
        store: ObjectStore,
        chain: Chain,
        claims: ObjectClaims,
        subscriptions: Sequence[Subscription],
        session_id: str,
    ) -> None:
        self._store = store
        self._chain = chain
        self._claims = claims
        self._policy = claims.policy
        self._session_id = session_id
        self._subscriptions = {s.handler_id: s for s in subscriptions}
        self._peers = Peers(
            store, claims.namespace, session_id, self._subscriptions, claims.policy.session_ttl
        )
        self._pending = PendingEvents(
            store, chain, claims.namespace, subscriptions, peers=self._peers
        )
        self._turn = threading.Lock()  # of who claims, or exchanges
        self._ready: list[Candidate] = []
        self._waiting: list[tuple[datetime, int, Candidate]] = []
        self._lines = _Lines()
        self._numbers = itertools.count()
        self._mutex = threading.Lock()
        self._looked_at: datetime | None = None
        self._must_look = False  # the last look beside claims failed
        self._last_look_is_due = False  # it was asked for, and others had not finished theirs
        self._saved_at = store.now()
        self._exchanged_at = store.now()
        self._checked_at = store.now()
        self._alone = False  # whether the last claim was a suspect
        self.suspects = False

    @property
    def malformed(self) -> int:
        return len(self._pending.malformed)

    # -- claiming -----------------------------------------------------------------------------

    def claim(self, limit: int, *, whole: bool = False, ahead: bool = False) -> list[Claim]:
        with self._turn:
            return self._claim_all(limit, whole, ahead)

    def _claim_all(self, limit: int, whole: bool, ahead: bool) -> list[Claim]:
        read, tried, won = self._claim(limit, whole, ahead)
        rounds = _ROUNDS + self._pending.unread // limit
        # All of these were others', or are known better now: go on. A whole look goes to the end
        # of what there is to read; claims that are lost again and again end it.
        while not won and (read or tried) and rounds and self._has_more():
            rounds -= not (whole and read)
            read, tried, won = self._claim(limit, False, ahead)
        self._save_if_due()
        return won

    def _claim(self, limit: int, whole: bool, ahead: bool) -> tuple[int, int, list[Claim]]:
        """How many events were read, how many claims tried, and those that were won."""
        read, looks = self._refill(limit, whole)
        chosen = self._choose(limit, suspects=not ahead)
        try:
            outcomes = self._attempt(chosen, limit if ahead else 0, looks)
        except BaseException:
            with self._mutex:
                self._ready += chosen
            raise
        won: list[Claim] = []
        failure: BaseException | None = None
        for candidate, outcome in zip(chosen, outcomes, strict=True):
            if isinstance(outcome, Claim):
                won.append(outcome)
                with self._mutex:
                    self._lines.take(candidate)
            elif isinstance(outcome, StorageBackendError):
                failure = failure or outcome
                self._wait(candidate, self._store.now() + _PAUSE)
            elif isinstance(outcome, IntegrityError):
                self._set_aside(candidate, outcome)
            elif outcome is not None:
                raise outcome
        if failure is not None and not won:
            raise failure
        return read, len(chosen), won

    def _has_more(self) -> bool:
        with self._mutex:
            due = bool(self._waiting) and self._waiting[0][0] <= self._store.now()
            return due or bool(self._ready) or self._pending.unread > 0 or self._pending.unlisted

    def _refill(self, limit: int, whole: bool) -> tuple[int, bool]:
        """Have enough to choose from: how many events were read for it (they may all be of types
        that nobody here handles), and whether to look for more while those are claimed."""
        now = self._store.now()
        self._divide(limit)
        # The last look is for when others have finished theirs, and may have sent more.
        self._last_look_is_due = False
        self._last_look_is_due = waits = whole and self.shares
        whole = whole and not waits
        with self._mutex:
            while self._waiting and self._waiting[0][0] <= now:
                candidate = heapq.heappop(self._waiting)[2]
                if candidate.is_open:
                    self._ready.append(candidate)
            self._ready += self._lines.next()
            at_hand = len(self._ready) + self._pending.unread
        due = self._looked_at is None or now - self._looked_at >= LOOK_INTERVAL
        looks_now = whole or self._must_look or (at_hand < limit and (due or not waits))
        if due or looks_now:
            self._looked_at = now
        if looks_now:
            self._must_look = False
            self._pending.look(whole=whole)
        missing = min(limit - len(self._ready), self._pending.unread)
        if self._lines.behind >= _BEHIND:
            missing = 0
        if missing > 0:
            self._offer(self._pending.read(missing))
        return max(missing, 0), due and not looks_now

    def _offer(self, events: Sequence[PendingEvent]) -> None:
        with self._mutex:
            for event in events:
                if (envelope := event.envelope) is None:
                    continue  # another has finished it meanwhile
                for handler_id in sorted(event.open - event.offered):
                    event.offered.add(handler_id)
                    candidate = Candidate(event, envelope, self._subscriptions[handler_id])
                    candidate.was_left = event.passed_on > 1
                    self._lines.enter(candidate)
                    self._ready.append(candidate)

    # -- with other workers -------------------------------------------------------------------

    @property
    def shares(self) -> bool:
        with self._mutex:
            return (
                self._last_look_is_due
                or self._pending.left > 0
                or any(
                    candidate.was_left and candidate.stands is None and candidate.is_open
                    for _, _, candidate in self._waiting
                )
            )

    def keep_up(self) -> None:
        if not self._turn.acquire(blocking=False):
            return  # a claim is under way, which does it too
        try:
            if self._peers.keep_up():
                self._pending.share()
            self._exchange(EXCHANGE_INTERVAL)
        finally:
            self._turn.release()

    def _divide(self, limit: int) -> None:
        """As far as the storage lets us: claims need none of it."""
        try:
            self._see_to_others(limit)
        except StorageBackendError as error:
            log.info("the work is divided as before: %s", error)

    def _see_to_others(self, limit: int) -> None:
        """See to it that what others leave lying is taken, and not what they are about to."""
        if self._peers.welcome() | (self._peers.has_stranger and self._peers.refresh(timedelta())):
            self._pending.share()
        if self._peers.alone:
            return
        with self._mutex:
            idle = not self._ready and not self._pending.unread
        self._exchange(_IDLE_INTERVAL if idle else EXCHANGE_INTERVAL)
        patience = PATIENCE if idle else LONG_PATIENCE
        now = self._store.now()
        if now - self._checked_at >= _IDLE_INTERVAL and self._pending.overdue(patience):
            self._checked_at = now
            self._exchange(_IDLE_INTERVAL)
            if self._peers.refresh():
                self._pending.share()
            self._pending.pass_on(patience, probes=idle)
        if idle and not self._pending.unread:
            self._pending.help_others(limit, PATIENCE)

    def _exchange(self, interval: timedelta) -> None:
        """Tell others what is finished, and learn what they have."""
        if self._peers.alone or not (self._pending.has_news or self._pending.left):
            return
        names = timedelta(seconds=len(self._pending.events) / _NAMES_A_SECOND)
        if self._store.now() - self._exchanged_at < max(interval, names):
            return
        self._exchanged_at = self._saved_at = self._store.now()
        self._pending.exchange()

    def _choose(self, limit: int, *, suspects: bool) -> list[Candidate]:
        """The best of what is due: ordinary ones together, suspects one by one in between."""
        with self._mutex:
            self._leave_to_others()
            self._ready = [c for c in self._ready if self._lines.is_turn_of(c)]
            self._ready.sort(key=lambda candidate: candidate.rank)
            suspect = [c for c in self._ready if self._is_suspect(c)]
            self.suspects = bool(suspect)
            ordinary = [c for c in self._ready if c not in suspect] if suspect else self._ready
            self._alone = suspects and bool(suspect) and not (self._alone and ordinary)
            chosen = suspect[:1] if self._alone else ordinary[:limit]
            taken = set(map(id, chosen))
            self._ready = [c for c in self._ready if id(c) not in taken]
        return chosen

    def _leave_to_others(self) -> None:
        """What others have finished is forgotten; what is theirs to take waits for them once."""
        ready, self._ready = self._ready, []
        until = self._store.now() + PATIENCE
        for candidate in ready:
            handler_id, name = candidate.subscription.handler_id, candidate.event.event_id
            if not candidate.is_open:
                continue
            if candidate.was_left or candidate.stands or self._peers.owns(name, handler_id):
                self._ready.append(candidate)
            else:
                candidate.was_left = True
                heapq.heappush(self._waiting, (until, next(self._numbers), candidate))

    def _is_suspect(self, candidate: Candidate) -> bool:
        stands = candidate.stands
        if stands is None or stands.record.finished:
            return False
        return stands.record.is_suspect(self._policy)

    def _attempt(
        self, chosen: Sequence[Candidate], ahead: int, looks: bool
    ) -> list[Claim | BaseException | None]:
        earlier = [c.stands.record for c in chosen if c.stands and not c.stands.record.finished]
        acked: set[tuple[str, str, str]] = set()
        head = self._pending.head_commit
        if earlier:
            version = self._chain.read_head()
            head = version.head.commit_id
            # A claim that says it was made after head is of another history, and tells nothing.
            since = min(r.head_commit if r.head_commit <= head else 0 for r in earlier)
            names = [(self._claims.namespace, r.event_id, r.handler_id) for r in earlier]
            acked = state.acked_since(self._chain, version.head, since, names)
        steps: list[Callable[[], Claim | None]] = []
        for candidate in chosen:
            name = candidate.envelope["id"], candidate.subscription.handler_id
            # Of one that was never looked at, the claim itself tells: another may have handled it.
            stands = candidate.stands
            if stands is not None and (self._claims.namespace, *name) in acked:
                steps.append(partial(self._end_acked, candidate, stands))
            else:
                steps.append(partial(self._take, candidate, head))
        # The next events are read meanwhile, so that the next claim need not wait for them.
        enough = len(self._ready) >= _AHEAD * ahead or self._lines.behind >= _BEHIND
        reading = self._pending.begin_read(0 if enough else ahead)
        look = [self._pending.look] if looks else []
        together: list[Callable[[], Any]] = [*look, *steps, *reading.fetches]
        outcomes = self._store.parallel.gather_outcomes(together)
        claimed, read = len(look), len(look) + len(steps)
        self._offer(self._pending.end_read(reading, outcomes[read:]))
        for looked in outcomes[:claimed]:
            if isinstance(looked, BaseException) and not isinstance(looked, Exception):
                raise looked
            # What was claimed is not lost to a failure beside it: looking fails again, or not.
            self._must_look = isinstance(looked, Exception)
        return outcomes[claimed:read]

    def _take(self, candidate: Candidate, head: int) -> Claim | None:
        stands, now = candidate.stands, self._store.now()
        suspect = self._is_suspect(candidate)
        if stands is None:
            handler_id = candidate.subscription.handler_id
            record = records.first_claim(
                candidate.envelope["id"], handler_id, self._session_id, now, self._policy, head
            )
            outcome = self._claims.write(record, None)
        elif stands.record.finished:
            self._see_to_dead(candidate, stands)
            return None
        elif records.is_worn_out(stands.record, self._policy):
            outcome = self._claims.write(records.wear_out(stands.record, now), stands.etag)
            if isinstance(outcome, StoredClaim):
                self._end_dead(candidate, outcome)
                return None
        else:
            record = records.reclaim(stands.record, self._session_id, now, self._policy, head)
            outcome = self._claims.write(record, stands.etag)
        if isinstance(outcome, Lost):
            self._learn(candidate, outcome)
            return None
        candidate.event.claimed = True
        return Claim(
            namespace=self._claims.namespace,
            envelope=candidate.envelope,
            record=outcome.record,
            suspect=suspect,
            etag=outcome.etag,
            entry=candidate,
        )

    # -- settling -----------------------------------------------------------------------------

    def ack(self, claims: Sequence[Claim]) -> list[bool]:
        now = self._store.now()
        done = self._settle(claims, lambda claim: records.ack(claim.record, now))
        for claim, record in zip(claims, done, strict=True):
            if record is not None:
                self._finish(claim.entry)
        return [record is not None for record in done]

    def release(self, failures: Sequence[Failure]) -> list[ClaimRecord | None]:
        now = self._store.now()
        claims = [f.claim for f in failures]
        done = self._settle(claims, records.released(failures, now, self._policy))
        dead = [c for c, r in zip(claims, done, strict=True) if r and r.dead_lettered_at]
        for outcome in self._store.parallel.gather_outcomes(
            [partial(self._end_dead, c.entry, StoredClaim(c.record, c.etag)) for c in dead]
        ):
            if isinstance(outcome, StorageBackendError):
                log.warning("a dead letter is left for later: %s", outcome)
            elif isinstance(outcome, IntegrityError):
                self._pending.set_aside(outcome)
            elif isinstance(outcome, BaseException):
                raise outcome
        for claim, record in zip(claims, done, strict=True):
            if record is not None and record.dead_lettered_at is None:
                self._known(claim.entry, StoredClaim(record, claim.etag))
        return done

    def give_back(self, claims: Sequence[Claim]) -> None:
        now = self._store.now()
        done = self._settle(claims, lambda claim: records.give_back(claim.record, now))
        for claim, record in zip(claims, done, strict=True):
            if record is not None:
                self._known(claim.entry, StoredClaim(record, claim.etag))

    def let_go(self, claims: Sequence[Claim]) -> None:
        for claim in claims:
            with claim.guard:
                was_settled, claim.settled = claim.settled, True
            if not was_settled:
                self._known(claim.entry, StoredClaim(claim.record, claim.etag))

    def extend(self, claims: Sequence[Claim]) -> list[bool]:
        now = self._store.now()
        held = [claim for claim in claims if not claim.settled]
        done = self._settle(held, lambda c: records.extend(c.record, now, self._policy), end=False)
        return [record is not None for record in done]

    def _settle(
        self, claims: Sequence[Claim], change: Callable[[Claim], ClaimRecord], *, end: bool = True
    ) -> list[ClaimRecord | None]:
        """Replace claims that are still ours, all together; None where one is not."""
        outcomes = self._store.parallel.gather_outcomes(
            [partial(self._replace, claim, change, end) for claim in claims]
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return [o for o in outcomes if not isinstance(o, BaseException)]

    def _replace(
        self, claim: Claim, change: Callable[[Claim], ClaimRecord], end: bool
    ) -> ClaimRecord | None:
        with claim.guard:  # a heartbeat may be on its way
            if claim.settled:
                return claim.record if end and not claim.lost else None
            outcome = self._claims.write(change(claim), claim.etag)
            if isinstance(outcome, StoredClaim):
                claim.record, claim.etag = outcome.record, outcome.etag
                claim.settled = end
                return outcome.record
            claim.lost = claim.settled = True
        self._learn(claim.entry, outcome)
        return None

    # -- what becomes of a candidate ----------------------------------------------------------

    def _learn(self, candidate: Candidate, lost: Lost) -> None:
        """Another claim stands: wait for its end, or see that it has ended."""
        if lost.current is None:
            self._finish(candidate)  # cleaned up
            return
        handler_id = candidate.subscription.handler_id
        event_id = candidate.envelope["id"]
        try:
            stands = self._claims.parse(lost.current, event_id, handler_id)
        except IntegrityError as error:
            self._set_aside(candidate, error)
        else:
            self._known(candidate, stands)

    def _set_aside(self, candidate: Candidate, error: IntegrityError) -> None:
        """Nobody can tell whether this handler has had the event: it is left to a person."""
        self._pending.set_aside(error)
        self._finish(candidate)

    def _known(self, candidate: Candidate, stands: StoredClaim) -> None:
        record = stands.record
        self._peers.meet(record.session_id, record.ack_at or record.claimed_at)
        if record.ack_at is not None or record.redriven_as is not None:
            self._finish(candidate)
            return
        candidate.stands = stands
        # Whoever marked it dead may have died before its letter: look again when it had time.
        dead = record.dead_lettered_at
        until = dead + _PAUSE if dead is not None else record.not_before
        if self._peers.is_alive(record.session_id):
            until += PATIENCE  # it sees to that itself
        self._wait(candidate, until)

    def _end_acked(self, candidate: Candidate, stands: StoredClaim) -> None:
        """A commit has handled it, and its worker died before it could say so here."""
        record = records.ack(stands.record, self._store.now())
        outcome = self._claims.write(record, stands.etag)
        if isinstance(outcome, Lost):
            self._learn(candidate, outcome)
        else:
            self._finish(candidate)

    def _end_dead(self, candidate: Candidate, dead: StoredClaim) -> None:
        """We killed it: the letter is ours to write, or someone's who finds it missing."""
        try:
            self._claims.bury(candidate.envelope, dead)
        except StorageBackendError:
            candidate.stands = dead
            self._wait(candidate, self._store.now() + _PAUSE)
            raise
        self._finish(candidate)

    def _see_to_dead(self, candidate: Candidate, dead: StoredClaim) -> None:
        """Another killed it; whether it came to writing the letter, only a look can tell."""
        record = dead.record
        stands = self._claims.read(record.event_id, record.handler_id)
        if stands is None:
            self._finish(candidate)
        elif stands.record.dead_lettered_at is None or stands.record.redriven_as is not None:
            self._known(candidate, stands)
        elif self._claims.has_letter(record):
            self._finish(candidate)
        else:
            self._end_dead(candidate, stands)

    def _wait(self, candidate: Candidate, until: datetime) -> None:
        with self._mutex:
            self._lines.back(candidate)
            heapq.heappush(self._waiting, (until, next(self._numbers), candidate))

    def _finish(self, candidate: Candidate) -> None:
        with self._mutex:
            self._lines.back(candidate)
        self._pending.finish(candidate.event, candidate.subscription.handler_id)

    # -- the rest -----------------------------------------------------------------------------

    def next_due(self) -> datetime | None:
        with self._mutex:
            self._ready += self._lines.next()
            if self._ready:
                return self._store.now()
            return self._waiting[0][0] if self._waiting else None

    def save(self) -> None:
        with self._turn:
            self._save()

    def _save_if_due(self) -> None:
        if self._store.now() - self._saved_at >= SAVE_INTERVAL:
            self._save()

    def _save(self) -> None:
        self._saved_at = self._store.now()
        self._pending.save()
