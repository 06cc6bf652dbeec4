"""Claims on an object store: one object per event and handler, replaced by CAS alone.

Every write carries a write id, so no two versions are equal and an ETag fences as a token does: a
worker that lost its claim holds an ETag that no longer stands. The dead letter of a claim is
written after the CAS that killed it was won, first the event that tells of it, then the letter; a
dead claim without a letter is therefore unfinished, and whoever meets it writes both again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from storage_engine.commitlog import layout
from storage_engine.commitlog.json_object import Lost, Won, write_conditionally
from storage_engine.commitlog.records import from_json, parse_timestamp, to_json
from storage_engine.errors import IntegrityError
from storage_engine.events import envelopes
from storage_engine.events.protocol import DeadLetter, OpenEvent
from storage_engine.events.records import ClaimRecord, Envelope, Policy
from storage_engine.objectstore.protocol import ObjectNotFound, ObjectStore, StoredObject
from storage_engine.repository.object import outbox

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredClaim:
    """A claim that was read or written, and the ETag that a change of it must name."""

    record: ClaimRecord
    etag: str


class ObjectClaims:
    """The claims and dead letters of one namespace."""

    def __init__(self, store: ObjectStore, namespace: str, policy: Policy) -> None:
        self._store = store
        self.namespace = namespace
        self.policy = policy

    def write(self, record: ClaimRecord, etag: str | None) -> StoredClaim | Lost:
        """Create a claim, or replace exactly the version `etag`."""
        write_id = layout.new_write_id()
        key = layout.claim(self.namespace, record.event_id, record.handler_id)
        data = to_json({**record.as_dict(), "write_id": write_id})
        outcome = write_conditionally(self._store, key, data, write_id=write_id, etag=etag)
        return StoredClaim(record, outcome.etag) if isinstance(outcome, Won) else outcome

    def read(self, event_id: str, handler_id: str) -> StoredClaim | None:
        try:
            stored = self._store.get(layout.claim(self.namespace, event_id, handler_id))
        except ObjectNotFound:
            return None
        return self.parse(stored, event_id, handler_id)

    def parse(self, stored: StoredObject, event_id: str, handler_id: str) -> StoredClaim:
        """Raises an IntegrityError when it is no claim, or not this one."""
        key = layout.claim(self.namespace, event_id, handler_id)
        record = ClaimRecord.parse(from_json(stored.data, key=key), key=key)
        if (record.event_id, record.handler_id) != (event_id, handler_id):
            raise IntegrityError(
                f"{key} is not a valid claim: it is one of {record.handler_id} on "
                f"{record.event_id}",
                key=key,
            )
        return StoredClaim(record, stored.etag)

    def open_event(self, envelope: Envelope, handler_id: str) -> OpenEvent | None:
        """An event, with a handler's claim on it; None where that cannot be read. Dead without a
        letter is as good as unclaimed: the letter is left to do."""
        try:
            stands = self.read(envelope["id"], handler_id)
        except IntegrityError:
            return None
        if stands is None:
            return envelope, None
        record = stands.record
        if record.dead_lettered_at is not None and record.redriven_as is None:
            return envelope, record if self.has_letter(record) else None
        return envelope, record

    # -- dead letters -------------------------------------------------------------------------

    def bury(self, envelope: Envelope, dead: StoredClaim) -> StoredClaim:
        """Write what follows from a claim's death. Safe to repeat.

        The event that tells of it has the time of death in its key. Where that is too long ago
        for consumers to look there, the death is given a new time first, by the claim itself: so
        however many bury it, they come to one time.
        """
        late: list[str] = []
        for _ in range(outbox.TIMES):
            record = dead.record
            if record.dead_lettered_at is None or record.redriven_as is not None:
                return dead  # another has dealt with it meanwhile
            letter = envelopes.dead_letter(self.namespace, envelope, record)
            told = envelopes.dead_letter_event(letter, self.policy.max_chain_depth)
            if told is None:
                break
            key = _event_key(letter, told)
            if not outbox.is_late(self._store, record.dead_lettered_at):
                outbox.create(self._store, key, told)
                if not outbox.is_late(self._store, record.dead_lettered_at):
                    break
            elif self.has_letter(record):
                return dead
            late.append(key)
            dead = self._renewed(dead)
        else:
            raise outbox.too_late(envelope)
        letter_key = layout.dead_letter(self.namespace, record.event_id, record.handler_id)
        outbox.create(self._store, letter_key, {**letter.as_dict(), "id": letter.event_id})
        outbox.remove_late(self._store, late)
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

    def _renewed(self, dead: StoredClaim) -> StoredClaim:
        """Give the death a new time, unless another has done so or dealt with it."""
        renewed = replace(dead.record, dead_lettered_at=self._store.now())
        outcome = self.write(renewed, dead.etag)
        if isinstance(outcome, StoredClaim):
            return outcome
        if outcome.current is None:
            return StoredClaim(replace(renewed, redriven_as=""), "")  # cleaned up: nothing to bury
        return self.parse(outcome.current, renewed.event_id, renewed.handler_id)


def _event_key(letter: DeadLetter, told: Mapping[str, Any]) -> str:
    return layout.event(letter.namespace, parse_timestamp(letter.failed_at), told["id"])
