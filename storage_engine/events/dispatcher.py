"""The worker's loop: claim, hand to handlers, settle; all three at once where there is much to do.

While one batch is being handled, the next one is claimed and the last one is acked. The loop
promises that nothing it holds is forgotten: on any way out, what was handled is settled and the
rest is given back. A storage that does not answer for a while is waited for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

from storage_engine.errors import OntologiaError
from storage_engine.events.protocol import BackgroundWork, Consumer, EventStore
from storage_engine.events.records import Claim, Envelope, Failure
from storage_engine.events.schedules import Scheduler

log = logging.getLogger(__name__)

_SETTLE_ATTEMPTS = 5
_GATHER_S = 0.02  # for what is handled meanwhile to be settled together
_DRAIN_ATTEMPTS = 5  # of a storage that fails, before drain gives up
_LONGEST_PAUSE_S = 30.0
_FOREGROUND = 10  # every so many rounds, suspects that wait get their turn: none is claimed ahead
_FOR_OTHERS = timedelta(seconds=0.25)  # a drain looks again at what they have yet to do
_KEEP_UP_S = 2.0  # with other workers, however long a handler takes
_NOTES_KEPT = 20
_UNSETTLED = 4  # claim limits of handled events, after which handlers wait for the acks


@dataclass(frozen=True, slots=True)
class Success:
    """The handler succeeded; `emits` go out before its ack. `committed`: the commit has acked.
    `notes` are on what may surprise in that commit."""

    emits: Sequence[Envelope] = ()
    committed: bool = False
    notes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class HandlerFailure:
    """The handler failed; without `retry`, trying again cannot help."""

    error: str
    retry: bool = True


@dataclass(frozen=True, slots=True)
class Drop:
    """The claim is not ours to settle: it was lost, or nobody knows whether its commit landed."""

    reason: str


HandlerOutcome = Success | HandlerFailure | Drop


class Execute(Protocol):
    """Runs the handler of a claim. Raises only what should end the worker."""

    def __call__(self, claim: Claim) -> HandlerOutcome: ...


@dataclass(slots=True)
class Totals:
    """What a worker has done so far."""

    handled: int = 0
    failed: int = 0
    dead_lettered: int = 0
    dropped: int = 0
    emitted: int = 0
    fired: int = 0
    iterations: int = 0
    held: int = 0
    malformed: int = 0  # set aside, as it or its claim cannot be read
    notes: list[str] = field(default_factory=list)  # of handlers' commits, each text once
    more_notes: int = 0  # beyond those: a worker may live for long

    def note(self, notes: Sequence[str]) -> None:
        for text in notes:
            if text in self.notes:
                continue
            if len(self.notes) < _NOTES_KEPT:
                self.notes.append(text)
            else:
                self.more_notes += 1


@dataclass(frozen=True, slots=True)
class Pace:
    """How much at once, and how often."""

    claim_limit: int
    poll_interval: timedelta
    lease: timedelta
    session_ttl: timedelta


class Settler:
    """Acks and releases what was handled, together with whatever is handled meanwhile."""

    def __init__(self, store: EventStore, consumer: Consumer, totals: Totals) -> None:
        self._store = store
        self._consumer = consumer
        self._totals = totals
        self._waiting: list[tuple[Claim, Success | HandlerFailure]] = []
        self._flight: BackgroundWork[None] | None = None
        self._attempts: dict[int, int] = {}
        self._went_at = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, claim: Claim, outcome: Success | HandlerFailure) -> None:
        self._waiting.append((claim, outcome))

    def go(self, *, now: bool = False) -> None:
        """Send what waits, unless the last is still on its way, or (but for `now`) just went."""
        if self._flight is not None:
            if not self._flight.done:
                return
            self._land()
        if not (now or not self._store.timers or time.monotonic() - self._went_at > _GATHER_S):
            return
        if self._waiting:
            self._went_at = time.monotonic()
            work, self._waiting = self._waiting, []
            self._flight = self._store.background(lambda: self._settle(work))

    def flush(self) -> None:
        """Settle everything; returns when it is done."""
        self._land()
        while self._waiting:
            self.go(now=True)
            self._land()

    def _land(self) -> None:
        flight, self._flight = self._flight, None
        if flight is not None:
            flight.wait()

    def _settle(self, work: Sequence[tuple[Claim, Success | HandlerFailure]]) -> None:
        try:
            done = [(c, o) for c, o in work if isinstance(o, Success)]
            failed = [
                Failure(c, o.error, o.retry) for c, o in work if isinstance(o, HandlerFailure)
            ]
            emits = [envelope for _, outcome in done for envelope in outcome.emits]
            if emits:
                self._store.enqueue(emits)
            if done:
                self._note_acks(done, self._consumer.ack([claim for claim, _ in done]))
            if failed:
                released = self._consumer.release(failed)
                self._totals.failed += sum(record is not None for record in released)
                self._totals.dead_lettered += sum(
                    record is not None and record.dead_lettered_at is not None
                    for record in released
                )
        except OntologiaError as error:
            self._again(work, error)

    def _note_acks(self, done: Sequence[tuple[Claim, Success]], acked: Sequence[bool]) -> None:
        for (claim, outcome), ok in zip(done, acked, strict=True):
            self._totals.emitted += len(outcome.emits)
            if ok or outcome.committed:
                self._totals.handled += 1
            else:
                self._totals.dropped += 1
                log.warning(
                    "event %s was handled by %s, but another worker had taken it over meanwhile",
                    claim.event_id,
                    claim.handler_id,
                )

    def _again(
        self, work: Sequence[tuple[Claim, Success | HandlerFailure]], error: OntologiaError
    ) -> None:
        """Leases may still hold: try a few times, then leave it to whoever finds them expired."""
        for claim, outcome in work:
            if claim.settled and not claim.lost:
                continue
            tried = self._attempts[id(claim)] = self._attempts.get(id(claim), 0) + 1
            if tried < _SETTLE_ATTEMPTS and error.retryable:
                self._waiting.append((claim, outcome))
                continue
            self._consumer.let_go([claim])
            self._totals.dropped += 1
            log.warning(
                "event %s could not be settled for %s and will come again: %s",
                claim.event_id,
                claim.handler_id,
                error,
            )
        if self._waiting:
            self._store.sleep(0.2)


@dataclass(slots=True)
class HeldClaims:
    """The claims that this worker has and has not settled."""

    claims: dict[int, Claim] = field(default_factory=dict)
    guard: threading.Lock = field(default_factory=threading.Lock)

    def add(self, claims: Sequence[Claim]) -> None:
        with self.guard:
            self.claims.update((id(claim), claim) for claim in claims)

    def all(self) -> list[Claim]:
        with self.guard:
            self.claims = {k: c for k, c in self.claims.items() if not c.settled}
            return list(self.claims.values())


class Ticker:
    """What must happen however long a handler takes: leases, the session's heartbeat, schedules.

    A thread does it; where time does not pass by itself the loop does, between handlers.
    """

    def __init__(self, worker: Dispatcher) -> None:
        self._worker = worker
        self._guard = threading.Lock()
        self._beat_at = worker.store.now()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self._worker.store.timers:
            self._thread = threading.Thread(target=self._loop, name="onto-events", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def _loop(self) -> None:
        while not self._stopping.wait(self._seconds()):
            self.tick()

    def _seconds(self) -> float:
        worker = self._worker
        pause = min(worker.pace.lease, worker.pace.session_ttl).total_seconds() / 6
        if worker.consumer.shares:
            pause = min(pause, _KEEP_UP_S)
        due = worker.scheduler.next_due()
        if due is not None:
            pause = min(pause, (due - worker.store.now()).total_seconds())
        return max(pause, 0.01)

    def tick(self) -> None:
        with self._guard:
            try:
                self._tick()
            except OntologiaError as error:
                log.warning("a worker's heartbeat failed: %s", error)
            except Exception:  # the thread must live on, or leases would run out
                log.exception("a worker's heartbeat failed")

    def _tick(self) -> None:
        worker = self._worker
        worker.totals.fired += worker.scheduler.fire()
        now = worker.store.now()
        soon = now + worker.pace.lease * 2 / 3
        ending = [claim for claim in worker.held.all() if claim.record.lease_until < soon]
        if ending:
            worker.consumer.extend(ending)
        if now - self._beat_at >= worker.pace.session_ttl / 3:
            self._beat_at = now
            worker.store.heartbeat(worker.namespace, worker.session_id, worker.metadata)
        worker.consumer.keep_up()


class Dispatcher:
    """One worker on one namespace. Use once.

    `flush` waits until the events of the handlers' own commits are where workers look for them.
    """

    def __init__(
        self,
        store: EventStore,
        consumer: Consumer,
        execute: Execute,
        *,
        namespace: str,
        session_id: str,
        pace: Pace,
        scheduler: Scheduler,
        metadata: Mapping[str, Any],
        flush: Callable[[], None],
        progress: Callable[[Totals], None] | None = None,
    ) -> None:
        self.store = store
        self.consumer = consumer
        self.namespace = namespace
        self.session_id = session_id
        self.pace = pace
        self.scheduler = scheduler
        self.totals = Totals()
        self.held = HeldClaims()
        self._execute = execute
        self.metadata = metadata
        self._flush = flush
        self._progress = progress
        self._stopping = threading.Event()
        self._settler = Settler(store, consumer, self.totals)
        self._ticker = Ticker(self)
        self._next: BackgroundWork[list[Claim]] | None = None
        self._failures = 0

    def stop(self) -> None:
        """End after the handler that runs now; what is claimed besides is given back."""
        self._stopping.set()

    def run(self, *, max_iterations: int | None = None, until_idle: bool = False) -> Totals:
        """Work until stopped, until nothing is due, or for so many rounds."""
        self.store.register_session(self.namespace, self.session_id, self.metadata)
        self._ticker.start()
        try:
            self._join()
            self._loop(max_iterations, until_idle)
        finally:
            self._leave()
        return self.totals

    def _join(self) -> None:
        """Begin to divide the work with those who are here."""
        try:
            self.consumer.keep_up()
        except OntologiaError as error:
            log.warning("a worker does not see whether there are others: %s", error)

    # -- rounds -------------------------------------------------------------------------------

    def _loop(self, max_iterations: int | None, until_idle: bool) -> None:
        whole = False
        while not self._stopping.is_set():
            self._ticker.tick()
            try:
                batch = self._claimed(whole)
            except OntologiaError as error:
                self._bear(error, until_idle)
                continue
            self._failures = 0
            self.totals.iterations += 1
            last = max_iterations is not None and self.totals.iterations >= max_iterations
            if batch:
                whole = False
                if batch[0].suspect:
                    self._settler.flush()  # nothing else may come to harm
                elif not last and not self._is_turn_of_suspects():
                    self._next = self.store.background(lambda: self._claim(ahead=True))
                self._handle(batch)
            else:
                self._settler.flush()
                if until_idle and whole and not self.consumer.shares:
                    return
                if until_idle and not whole:
                    self._flush()  # the last look must not be too early for our own events
                whole = until_idle
            self._report()
            if last:
                return
            if not batch and not until_idle:
                self._pause(self.pace.poll_interval)
            elif not batch and self.consumer.shares:
                self._pause(max(self.pace.poll_interval, _FOR_OTHERS))

    def _is_turn_of_suspects(self) -> bool:
        return self.consumer.suspects and self.totals.iterations % _FOREGROUND == 0

    def _claimed(self, whole: bool) -> list[Claim]:
        pending, self._next = self._next, None
        if pending is not None and (claims := pending.wait()):
            return claims
        return self._claim(whole=whole)

    def _claim(self, *, whole: bool = False, ahead: bool = False) -> list[Claim]:
        claims = self.consumer.claim(self.pace.claim_limit, whole=whole, ahead=ahead)
        self.held.add(claims)
        return claims

    def _handle(self, batch: Sequence[Claim]) -> None:
        for number, claim in enumerate(batch):
            if self._stopping.is_set():
                return
            if number and not self.store.timers:
                self._ticker.tick()
            if claim.lost:
                continue
            outcome = self._execute(claim)
            if isinstance(outcome, Drop):
                log.warning("event %s: %s", claim.event_id, outcome.reason)
                self.totals.dropped += 1
                self.consumer.let_go([claim])
            else:
                if isinstance(outcome, Success):
                    self.totals.note([f"{claim.handler_id}: {note}" for note in outcome.notes])
                self._settler.add(claim, outcome)
                self._settler.go()
        self._settler.go(now=True)
        if len(self._settler) > _UNSETTLED * self.pace.claim_limit or batch[0].suspect:
            self._settler.flush()

    def _bear(self, error: OntologiaError, until_idle: bool) -> None:
        """A storage that fails for a while is waited for."""
        self._failures += 1
        if not error.retryable or (until_idle and self._failures >= _DRAIN_ATTEMPTS):
            raise error
        pause = min(self.pace.poll_interval.total_seconds() * 2**self._failures, _LONGEST_PAUSE_S)
        log.warning("looking for events failed, trying again in %.1f s: %s", pause, error)
        self._sleep(pause)

    def _pause(self, longest: timedelta) -> None:
        now = self.store.now()
        until = now + longest
        for due in (self.consumer.next_due(), self.scheduler.next_due()):
            until = min(until, due) if due is not None else until
        self._sleep(max((until - now).total_seconds(), 0.0))

    def _sleep(self, seconds: float) -> None:
        if self.store.timers:
            self._stopping.wait(seconds)
        else:
            self.store.sleep(seconds)

    def _report(self) -> None:
        self.totals.held = len(self.held.all())
        self.totals.malformed = self.consumer.malformed
        if self._progress is not None:
            self._progress(self.totals)

    # -- the end ------------------------------------------------------------------------------

    def _leave(self) -> None:
        """Whatever ends the loop: settle what was handled, give back the rest."""
        pending, self._next = self._next, None
        steps: list[Callable[[], object]] = [
            *([pending.wait] if pending is not None else []),
            self._settler.flush,
            self._ticker.stop,
            lambda: self.consumer.give_back(self.held.all()),
            self.consumer.save,
            lambda: self.store.end_session(self.namespace, self.session_id),
        ]
        for step in steps:
            try:
                step()
            except OntologiaError as error:
                log.warning("while a worker ended: %s", error)
        self._report()
