"""Acks and releases what was handled, together with whatever is handled meanwhile."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from storage_engine.errors import OntologiaError
from storage_engine.events.outcomes import (
    Drop,
    HandlerFailure,
    HandlerOutcome,
    Success,
    Totals,
)
from storage_engine.events.protocol import BackgroundWork, Consumer, EventStore
from storage_engine.events.records import Claim, Failure

log = logging.getLogger(__name__)

_SETTLE_ATTEMPTS = 5
_GATHER_S = 0.02  # for what is handled meanwhile to be settled together


class Settler:
    """Of one worker. Safe for use from several threads: handlers may end in any of them."""

    def __init__(self, store: EventStore, consumer: Consumer, totals: Totals) -> None:
        self._store = store
        self._consumer = consumer
        self._totals = totals
        self._waiting: list[tuple[Claim, HandlerOutcome]] = []
        self._attempts: dict[int, int] = {}
        self._mutex = threading.Lock()  # of what waits, and of the totals
        self._turn = threading.RLock()  # of who sends
        self._flight: BackgroundWork[None] | None = None
        self._flying = False
        self._went_at = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, claim: Claim, outcome: HandlerOutcome) -> None:
        with self._mutex:
            self._waiting.append((claim, outcome))

    def drop(self, claim: Claim, outcome: Drop) -> None:
        """It is not ours to settle, but for the claim on what another has handled."""
        log.warning("event %s: %s", claim.event_id, outcome.reason)
        with self._mutex:
            self._totals.dropped += 1
            if outcome.handled:
                self._waiting.append((claim, outcome))
        if not outcome.handled:
            self._consumer.let_go([claim])

    def go(self, *, now: bool = False) -> None:
        """Send what waits, unless some is on its way, which takes it along, or (but for `now`) some
        just went."""
        with self._turn:
            if self._flying:
                return
            self._land()
            if not (now or not self._store.timers or time.monotonic() - self._went_at > _GATHER_S):
                return
            if self._waiting:
                self._went_at = time.monotonic()
                self._flying = True
                self._flight = self._store.background(self._fly)

    def flush(self) -> None:
        """Settle everything; returns when it is done."""
        with self._turn:
            self._land()
            while self._waiting:
                self.go(now=True)
                self._land()

    def _land(self) -> None:
        flight, self._flight = self._flight, None
        if flight is not None:
            flight.wait()

    def _fly(self) -> None:
        try:
            while work := self._taken():
                self._settle(work)
        except BaseException:
            self._flying = False
            raise

    def _taken(self) -> Sequence[tuple[Claim, HandlerOutcome]]:
        with self._mutex:
            work, self._waiting = self._waiting, []
            self._flying = bool(work)  # who adds from here on sees that nobody takes it along
            return work

    def _settle(self, work: Sequence[tuple[Claim, HandlerOutcome]]) -> None:
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
            if over := [claim for claim, outcome in work if isinstance(outcome, Drop)]:
                self._consumer.ack(over)
            if failed:
                released = self._consumer.release(failed)
                with self._mutex:
                    self._totals.failed += sum(record is not None for record in released)
                    self._totals.dead_lettered += sum(
                        record is not None and record.dead_lettered_at is not None
                        for record in released
                    )
        except OntologiaError as error:
            self._again(work, error)

    def _note_acks(self, done: Sequence[tuple[Claim, Success]], acked: Sequence[bool]) -> None:
        with self._mutex:
            for (claim, outcome), ok in zip(done, acked, strict=True):
                self._totals.emitted += len(outcome.emits)
                if ok or outcome.commit is not None:
                    self._totals.handled += 1
                else:
                    self._totals.dropped += 1
                    log.warning(
                        "event %s was handled by %s, but another worker had taken it over "
                        "meanwhile",
                        claim.event_id,
                        claim.handler_id,
                    )

    def _again(self, work: Sequence[tuple[Claim, HandlerOutcome]], error: OntologiaError) -> None:
        """Leases may still hold: try a few times, then leave it to whoever finds them expired."""
        again = False
        for claim, outcome in work:
            if claim.settled and not claim.lost:
                continue
            tried = self._attempts[id(claim)] = self._attempts.get(id(claim), 0) + 1
            if tried < _SETTLE_ATTEMPTS and error.retryable:
                self.add(claim, outcome)
                again = True
                continue
            self._consumer.let_go([claim])
            if isinstance(outcome, Drop):
                continue  # it was counted
            with self._mutex:
                self._totals.dropped += 1
            log.warning(
                "event %s could not be settled for %s and will come again: %s",
                claim.event_id,
                claim.handler_id,
                error,
            )
        if again:
            self._store.sleep(0.2)
