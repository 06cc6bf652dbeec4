"""The worker's loop: claim, hand over, publish, settle; all at once where there is much to do.

While handlers run, the next events are claimed, the commits of those before are published, and the
last ones are acked. The loop promises that nothing it holds is forgotten: on any way out, what was
handled is settled and the rest is given back. A storage that does not answer for a while is waited
for.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from storage_engine.errors import OntologiaError
from storage_engine.events.lanes import Lanes
from storage_engine.events.outcomes import (
    Drop,
    Execute,
    HandlerFailure,
    HandlerOutcome,
    Success,
    Totals,
)
from storage_engine.events.protocol import BackgroundWork, Consumer, EventStore
from storage_engine.events.publications import Publications
from storage_engine.events.records import Claim
from storage_engine.events.schedules import Scheduler
from storage_engine.events.settler import Settler

log = logging.getLogger(__name__)

_DRAIN_ATTEMPTS = 5  # of a storage that fails, before drain gives up
_LONGEST_PAUSE_S = 30.0
_FOREGROUND = 10  # every so many rounds, suspects that wait get their turn: none is claimed ahead
_FOR_OTHERS = timedelta(seconds=0.25)  # a drain looks again at what they have yet to do
_KEEP_UP_S = 2.0  # with other workers, however long a handler takes
_UNSETTLED = 4  # claim limits of handled events, after which handlers wait for the acks
_GRACE_S = 5.0  # for handlers that run when something ends the worker, as Ctrl-C does
_LOOK_S = 1.0  # at what else there is to do, while handlers run
_REAL_S = 0.02  # between two looks at handlers in threads, where time does not pass by itself


@dataclass(frozen=True, slots=True)
class Pace:
    """How much at once, and how often."""

    claim_limit: int
    poll_interval: timedelta
    lease: timedelta
    session_ttl: timedelta
    concurrency: int = 1  # handlers that run beside one another


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
        soon = now + worker.pace.lease / 2  # two more ticks come before it ends
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
    `observe` is told how each event ended, one at a time, in whatever thread that is seen.
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
        observe: Callable[[Claim, Success | HandlerFailure], None] | None = None,
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
        self._observe = observe
        self._stopping = False
        self._left = False
        self._failure: BaseException | None = None  # of another thread, which ends the worker
        self._settling = threading.Lock()
        self._settler = Settler(store, consumer, self.totals)
        self._publications = Publications(
            self._settle,
            threaded=store.timers,
            settled=lambda: self._settler.go(now=True),
            failed=self._fail,
        )
        self._lanes = Lanes(pace.concurrency, self._run)
        self._outlasted: set[Claim] = set()  # handlers that a suspect has waited for in vain
        self._ticker = Ticker(self)
        self._next: BackgroundWork[list[Claim]] | None = None
        self._failures = 0

    def stop(self) -> None:
        """End after the handlers that run now; what is claimed besides is given back."""
        self._stopping = True
        self._lanes.wake()

    def catch_up(self) -> None:
        """Wait until the commits of handlers that have ended are there to be read."""
        self._publications.catch_up()

    def run(self, *, max_iterations: int | None = None, until_idle: bool = False) -> Totals:
        """Work until stopped, until nothing is due, or for so many rounds."""
        self.store.register_session(self.namespace, self.session_id, self.metadata)
        self._ticker.start()
        try:
            self._join()
            self._loop(max_iterations, until_idle)
            self._await_lanes()
        finally:
            self._leave()
        self._check()
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
        while not self._stopping:
            self._ticker.tick()
            try:
                batch = self._claimed(whole)
            except OntologiaError as error:
                self._bear(error, until_idle)
                continue
            self._failures = 0
            self.totals.iterations += 1
            self.totals.claimed += len(batch)
            last = max_iterations is not None and self.totals.iterations >= max_iterations
            idle = not (batch or self._lanes.busy)
            if batch:
                if batch[0].suspect:
                    self._quiet()  # nothing else may come to harm
                elif not last and not self._is_turn_of_suspects():
                    self._next = self.store.background(lambda: self._claim(ahead=True))
                self._handle(batch)
            elif not idle:
                self._settler.go(now=True)
            else:
                self._quiet()
                if until_idle and whole and not self.consumer.shares:
                    return
                if until_idle and not whole:
                    self._flush()  # the last look must not be too early for our own events
            whole = idle and until_idle
            self._report()
            if last:
                return
            if not batch and not (idle and until_idle):
                self._pause(self.pace.poll_interval)
            elif not batch and self.consumer.shares:
                self._pause(max(self.pace.poll_interval, _FOR_OTHERS))

    def _is_turn_of_suspects(self) -> bool:
        return self.consumer.suspects and self.totals.iterations % _FOREGROUND == 0

    def _claimed(self, whole: bool) -> list[Claim]:
        pending, self._next = self._next, None
        if pending is not None and (claims := pending.wait()):
            return claims
        if self.consumer.suspects:
            self._clear_lanes()
        return self._claim(whole=whole, ahead=self._lanes.busy)

    def _claim(self, *, whole: bool = False, ahead: bool = False) -> list[Claim]:
        claims = self.consumer.claim(self.pace.claim_limit, whole=whole, ahead=ahead)
        self.held.add(claims)
        return claims

    def _clear_lanes(self) -> None:
        """A suspect runs alone: wait for the others to end. Not for long, and once for each: one
        that hangs stops nobody but the suspects."""
        running = set(self._lanes.running)
        if running and not running & self._outlasted:
            self._lanes.wait_for_all(self.pace.lease.total_seconds())
        self._outlasted = set(self._lanes.running)

    def _handle(self, batch: Sequence[Claim]) -> None:
        for number, claim in enumerate(batch):
            if number and not self.store.timers:
                self._ticker.tick()
            self._publications.make_room()
            while self._lanes.full and not self._stopping:
                self._wait_for_lane()
            if self._stopping:
                return
            if not claim.lost:
                self._lanes.start(claim)
        if batch[0].suspect:
            self._quiet()
        if not self.store.timers:
            self._publications.flush()
        self._settler.go(now=True)
        if len(self._settler) > _UNSETTLED * self.pace.claim_limit:
            self._settler.flush()

    def _quiet(self) -> None:
        """Everything that was begun is ended and settled."""
        self._await_lanes()
        self._publications.flush()
        self._settler.flush()

    def _await_lanes(self) -> None:
        """Until all handlers have ended, or one of them ends the worker."""
        self._check()
        while self._lanes.busy:
            self._wait_for_lane()
            self._check()

    def _wait_for_lane(self) -> None:
        self._lanes.wait(_LOOK_S)
        self._settler.go()

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
            self._lanes.rest(seconds, lambda: self._stopping)
        elif self._lanes.busy:
            self._lanes.rest(_REAL_S, lambda: self._stopping)
        else:
            self.store.sleep(seconds)

    def _report(self) -> None:
        self.totals.held = len(self.held.all())
        self.totals.malformed = self.consumer.malformed
        if self._progress is not None:
            self._progress(self.totals)

    # -- handlers, in whatever thread -----------------------------------------------------------

    def _run(self, claim: Claim) -> None:
        try:
            ended = self._execute(claim)
            if self._left:
                return  # nobody waits for it any more
            if isinstance(ended, Success | HandlerFailure | Drop):
                self._settle(claim, ended)
            else:
                self._publications.add(claim, ended)
        except BaseException as error:
            if self.pace.concurrency == 1:
                raise
            self._fail(error)

    def _settle(self, claim: Claim, outcome: HandlerOutcome) -> None:
        with self._settling:
            if isinstance(outcome, Drop):
                self._settler.drop(claim, outcome)
            else:
                if isinstance(outcome, Success):
                    self.totals.note([f"{claim.handler_id}: {note}" for note in outcome.notes])
                self._settler.add(claim, outcome)
                observe, self._observe = self._observe, None  # if it raises, it is told no more
                if observe is not None:
                    observe(claim, outcome)
                self._observe = observe
        self._settler.go()

    def _fail(self, error: BaseException) -> None:
        """End the worker: its own thread raises it."""
        self._failure = self._failure or error
        self.stop()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    # -- the end ------------------------------------------------------------------------------

    def _leave(self) -> None:
        """Whatever ends the loop: settle what was handled, give back the rest."""
        pending, self._next = self._next, None
        steps: list[Callable[[], object]] = [
            lambda: self._lanes.wait_for_all(_GRACE_S),
            *([pending.wait] if pending is not None else []),
            self._publications.flush,
            self._settler.flush,
            self._ticker.stop,
            self._let_go_of_undecided,
            lambda: self.consumer.give_back(self.held.all()),
            self.consumer.save,
            lambda: self.store.end_session(self.namespace, self.session_id),
        ]
        try:
            for step in steps:
                try:
                    step()
                except OntologiaError as error:
                    log.warning("while a worker ended: %s", error)
        finally:
            self._left = True
            self._publications.stop()
            self._lanes.close()
            self._ticker.stop()
        self._report()

    def _let_go_of_undecided(self) -> None:
        """A handler that does not end, or a commit that may land yet: whoever finds the lease
        expired asks the log. Given back, it would run a second time beside the first."""
        running = self._lanes.running
        for claim in running:
            log.warning(
                "%s still runs on event %s, and is not waited for", claim.handler_id, claim.event_id
            )
            claim.lost = True  # it must not commit any more
        self.consumer.let_go([*running, *self._publications.claims])
