"""Events that the bus makes itself: dead letters, copies for replay and redrive, firings.

Where a crash may make someone write the same event again, its id follows from what it is about.
Claims are kept by id, so a second object of the same id is not handled a second time.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from storage_engine.commitlog.parsing import (
    optional_int,
    optional_object,
    optional_text,
    parsing,
    require_text,
)
from storage_engine.commitlog.records import timestamp
from storage_engine.events.protocol import DeadLetter, EventInfo, MalformedObject
from storage_engine.events.records import (
    TARGET,
    ClaimRecord,
    Envelope,
    parse_envelope,
    require_moment,
)
from storage_engine.model.declarations import Event
from storage_engine.model.field import Field

_IDS = uuid.UUID("6f0d9a52-5c0f-5a5c-9d0e-8f1f3a1c7b11")


class EventDeadLetter(Event, name="event.dead_letter"):
    """A handler gave up on an event. Handle it to be told."""

    event_id: Field[str]
    handler_id: Field[str]
    failed_type: Field[str]
    attempts: Field[int]
    last_error: Field[str]


def derived_id(*parts: str) -> str:
    """The same id for the same parts, on every machine."""
    return str(uuid.uuid5(_IDS, "\x1f".join(parts)))


def dead_letter(namespace: str, envelope: Envelope, record: ClaimRecord) -> DeadLetter:
    assert record.dead_lettered_at is not None
    return DeadLetter(
        namespace=namespace,
        event_id=record.event_id,
        handler_id=record.handler_id,
        failed_at=timestamp(record.dead_lettered_at),
        attempts=record.attempts,
        last_error=record.last_error,
        event_type=envelope["type"],
        event=envelope,
    )


def dead_letter_event(letter: DeadLetter, max_chain_depth: int) -> Envelope | None:
    """What tells handlers of a dead letter; none at the end of a chain, or it could go on."""
    event = letter.event
    assert event is not None
    depth = event["chain_depth"] + 1
    if depth > max_chain_depth:
        return None
    return EventDeadLetter(
        id=derived_id("dead", letter.namespace, letter.event_id, letter.handler_id),
        created_at=datetime.fromisoformat(letter.failed_at),
        root_event_id=event["root_event_id"],
        chain_depth=depth,
        event_id=letter.event_id,
        handler_id=letter.handler_id,
        failed_type=letter.event_type,
        attempts=letter.attempts,
        last_error=letter.last_error or "",
    ).envelope(letter.namespace)


def replayed(envelope: Envelope, now: datetime) -> Envelope:
    """A copy that begins a chain of its own."""
    event_id = str(uuid.uuid4())
    kept = {k: v for k, v in envelope.items() if k != TARGET}
    return {
        **kept,
        "id": event_id,
        "created_at": timestamp(now),
        "root_event_id": event_id,
        "chain_depth": 0,
    }


def redriven(letter: DeadLetter, event_id: str, now: datetime) -> Envelope:
    """A copy for the handler that gave up, in the same chain."""
    assert letter.event is not None
    return {
        **letter.event,
        "id": event_id,
        "created_at": timestamp(now),
        TARGET: letter.handler_id,
    }


def status_of(claims: Sequence[ClaimRecord], now: datetime) -> str:
    """dead_lettered > acked > claimed > pending."""
    if any(c.dead_lettered_at is not None and c.redriven_as is None for c in claims):
        return "dead_lettered"
    if any(c.ack_at is not None or c.redriven_as is not None for c in claims):
        return "acked"
    if any(c.lease_until > now for c in claims):
        return "claimed"
    return "pending"


def event_info(
    envelope: Envelope,
    claims: Sequence[ClaimRecord],
    now: datetime,
    malformed: Sequence[MalformedObject] = (),
) -> EventInfo:
    return EventInfo(envelope, status_of(claims, now), tuple(claims), tuple(malformed))


def with_letter_event(letter: DeadLetter, envelope: Envelope | None) -> DeadLetter:
    """A dead letter of an implementation that kept no copy of the event."""
    if letter.event is not None or envelope is None:
        return letter
    return replace(letter, event=envelope, event_type=letter.event_type or envelope["type"])


def parse_letter(raw: Mapping[str, Any], namespace: str, *, key: str) -> DeadLetter:
    """From what is stored; fields beyond the specification may be missing."""
    with parsing(key, "dead letter"):
        require_moment(raw, "failed_at")
        event = optional_object(raw, "event")
        return DeadLetter(
            namespace=namespace,
            event_id=require_text(raw, "event_id"),
            handler_id=require_text(raw, "handler_id"),
            failed_at=raw["failed_at"],
            attempts=optional_int(raw, "attempts", 0),
            last_error=optional_text(raw, "last_error"),
            event_type=optional_text(raw, "event_type", ""),
            event=parse_envelope(event, namespace, key=key) if event is not None else None,
        )
