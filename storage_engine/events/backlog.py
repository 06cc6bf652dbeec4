"""What handlers have yet to do, counted without touching it."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from functools import partial

from storage_engine.commitlog.records import parse_timestamp
from storage_engine.events.object_claims import ObjectClaims
from storage_engine.events.protocol import Backlog
from storage_engine.events.records import ClaimRecord, Envelope
from storage_engine.events.window import Window
from storage_engine.objectstore.port import ObjectStore

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


def of_objects(store: ObjectStore, window: Window, claims: ObjectClaims, limit: int) -> Backlog:
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
