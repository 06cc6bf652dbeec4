"""Claims on an object store: one object per event and handler, replaced by CAS alone.

Every write carries a write id, so no two versions are equal and an ETag fences as a token does: a
worker that lost its claim holds an ETag that no longer stands. The dead letter of a claim is
written after the CAS that killed it was won, first the event that tells of it, then the letter; a
dead claim without a letter is therefore unfinished, and whoever meets it writes both again.

What handlers have yet to do, counted without touching it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from storage_engine.commitlog import layout
from storage_engine.commitlog.conditional import Lost, Won, write_conditionally
from storage_engine.commitlog.records import from_json, parse_timestamp, to_json
from storage_engine.events import envelopes
from storage_engine.events.object.pending_events import Window
from storage_engine.events.protocol import Backlog, DeadLetter
from storage_engine.events.records import ClaimRecord, Envelope, Policy
from storage_engine.objectstore.protocol import ObjectNotFound, ObjectStore, StoredObject
from storage_engine.repository.object.outbox import create

log = logging.getLogger(__name__)

# A dead letter event keeps the time of death in its key. Later than this, consumers may no longer
# look there for late arrivals, so the time is set anew.
_FRESH = timedelta(minutes=1)


@dataclass(frozen=True, slots=True)
class Stands:
    """A claim that was read or written, and the ETag that a change of it must name."""

    record: ClaimRecord
    etag: str


class ObjectClaims:
    """The claims and dead letters of one namespace."""

    def __init__(self, store: ObjectStore, namespace: str, policy: Policy) -> None:
        self._store = store
        self.namespace = namespace
        self.policy = policy

    def write(self, record: ClaimRecord, etag: str | None) -> Stands | Lost:
        """Create a claim, or replace exactly the version `etag`."""
        write_id = layout.new_write_id()
        key = layout.claim(self.namespace, record.event_id, record.handler_id)
        data = to_json({**record.as_dict(), "write_id": write_id})
        outcome = write_conditionally(self._store, key, data, write_id=write_id, etag=etag)
        return Stands(record, outcome.etag) if isinstance(outcome, Won) else outcome

    def read(self, event_id: str, handler_id: str) -> Stands | None:
        try:
            stored = self._store.get(layout.claim(self.namespace, event_id, handler_id))
        except ObjectNotFound:
            return None
        return self.parse(stored, event_id, handler_id)

    def parse(self, stored: StoredObject, event_id: str, handler_id: str) -> Stands:
        key = layout.claim(self.namespace, event_id, handler_id)
        return Stands(ClaimRecord.parse(from_json(stored.data, key=key), key=key), stored.etag)

    # -- dead letters -------------------------------------------------------------------------

    def bury(self, envelope: Envelope, dead: Stands) -> Stands:
        """Write what follows from a claim's death. Safe to repeat."""
        record = dead.record
        assert record.dead_lettered_at is not None
        if self._store.now() - record.dead_lettered_at > _FRESH:
            if self.has_letter(record):
                return dead
            dead = self._renewed(envelope, dead)
            record = dead.record
            if record.dead_lettered_at is None or record.redriven_as is not None:
                return dead  # another has dealt with it meanwhile
        letter = envelopes.dead_letter(self.namespace, envelope, record)
        told = envelopes.dead_letter_event(letter, self.policy.max_chain_depth)
        if told is not None:
            create(self._store, _event_key(letter, told), told)
        key = layout.dead_letter(self.namespace, record.event_id, record.handler_id)
        create(self._store, key, {**letter.as_dict(), "id": letter.event_id})
        log.warning(
            "event %s (%s) is a dead letter of %s after %d attempts: %s",
            record.event_id,
            letter.event_type,
            record.handler_id,
            record.attempts,
            record.last_error,
        )
        return dead

    def has_letter(self, record: ClaimRecord) -> bool:
        try:
            self._store.get(layout.dead_letter(self.namespace, record.event_id, record.handler_id))
        except ObjectNotFound:
            return False
        return True

    def _renewed(self, envelope: Envelope, dead: Stands) -> Stands:
        """A late burial: give the death a new time, unless its event is out already."""
        letter = envelopes.dead_letter(self.namespace, envelope, dead.record)
        told = envelopes.dead_letter_event(letter, self.policy.max_chain_depth)
        if told is None or self._exists(_event_key(letter, told)):
            return dead
        renewed = replace(dead.record, dead_lettered_at=self._store.now())
        outcome = self.write(renewed, dead.etag)
        if isinstance(outcome, Stands):
            return outcome
        if outcome.current is None:
            return Stands(replace(renewed, redriven_as=""), "")  # cleaned up: nothing to bury
        return self.parse(outcome.current, renewed.event_id, renewed.handler_id)

    def _exists(self, key: str) -> bool:
        try:
            self._store.get(key)
        except ObjectNotFound:
            return False
        return True


def _event_key(letter: DeadLetter, told: Mapping[str, Any]) -> str:
    return layout.event(letter.namespace, parse_timestamp(letter.failed_at), told["id"])


Open = tuple[Envelope, ClaimRecord | None]  # an event, and a handler's claim on it


def count(found: Iterable[Open], now: datetime, *, more: bool = False) -> Backlog:
    """Of what is not finished; finished claims among it are passed over."""
    due = waiting = 0
    oldest: datetime | None = None
    next_due: datetime | None = None
    for envelope, record in found:
        if record is not None and record.finished:
            continue
        created = parse_timestamp(envelope["created_at"])
        oldest = created if oldest is None else min(oldest, created)
        if record is None or record.not_before <= now:
            due += 1
        else:
            waiting += 1
            next_due = record.not_before if next_due is None else min(next_due, record.not_before)
    return Backlog(due, waiting, oldest, next_due, more)


def backlog_of_objects(
    store: ObjectStore, window: Window, claims: ObjectClaims, limit: int
) -> Backlog:
    """From where the handlers' positions are, as a worker would begin."""
    window.look(whole=True)
    found = store.parallel.gather(
        [
            partial(_claimed, claims, entry.envelope, handler_id)
            for entry in window.read(limit)
            if entry.envelope is not None
            for handler_id in sorted(entry.open)
        ]
    )
    return count(found, store.now(), more=window.unread > 0)


def _claimed(claims: ObjectClaims, envelope: Envelope, handler_id: str) -> Open:
    stands = claims.read(envelope["id"], handler_id)
    record = stands.record if stands is not None else None
    if record is not None and record.dead_lettered_at is not None and record.redriven_as is None:
        # Dead, but its letter was never written: that is left to do.
        return envelope, record if claims.has_letter(record) else None
    return envelope, record
