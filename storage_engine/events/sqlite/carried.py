"""Events of a SQLite file that go along with a copy, and those of a copy that arrive there."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from storage_engine.commitlog.records import parse_timestamp, timestamp
from storage_engine.errors import IntegrityError
from storage_engine.events.carried import CarriedEvent, handlers_of, judged, left_letters
from storage_engine.events.protocol import DeadLetter
from storage_engine.events.records import ClaimRecord, Envelope
from storage_engine.events.sqlite.consumer import CLAIM, parse_envelope, record_of
from storage_engine.repository.sqlite.control_tables import to_json


def carried(
    connection: sqlite3.Connection, letters: Sequence[DeadLetter]
) -> Iterator[CarriedEvent]:
    """Of all namespaces, in the order of arrival; `letters` are all that there are."""
    by_namespace: dict[str, dict[str, list[DeadLetter]]] = {}
    for letter in letters:
        by_event = by_namespace.setdefault(letter.namespace, {})
        by_event.setdefault(letter.event_id, []).append(letter)
    claims: dict[tuple[str, str], list[ClaimRecord]] = {}
    for namespace, *row in connection.execute(
        f"SELECT c.namespace, {CLAIM} FROM event_claims AS c"
    ).fetchall():
        try:
            record = record_of(row, namespace)
        except IntegrityError:
            continue  # told by `onto events show --malformed`
        claims.setdefault((namespace, record.event_id), []).append(record)
    takers: dict[str, list[tuple[str, str]]] = {}
    events: dict[str, list[CarriedEvent]] = {}
    for namespace, event_id, text, enqueued_at in connection.execute(
        "SELECT namespace, id, envelope, enqueued_at FROM events ORDER BY seq"
    ):
        try:
            envelope = parse_envelope(text, namespace, event_id)
        except IntegrityError:
            continue
        held = claims.get((namespace, event_id), [])
        takers.setdefault(namespace, []).extend((envelope["type"], r.handler_id) for r in held)
        events.setdefault(namespace, []).append(
            CarriedEvent(
                envelope,
                _moment(enqueued_at, envelope),
                tuple(record for record in held if record.finished),
                tuple(by_namespace.get(namespace, {}).get(event_id, ())),
            )
        )
    for namespace in sorted({*events, *by_namespace}):
        own = events.get(namespace, [])
        yield from judged(own, handlers_of(takers.get(namespace, ())))
        yield from left_letters(by_namespace.get(namespace, {}), own)


def _moment(text: str, envelope: Envelope) -> datetime:
    try:
        return parse_timestamp(text)
    except (TypeError, ValueError):
        return parse_timestamp(envelope["created_at"])


def adopt(connection: sqlite3.Connection, events: Sequence[CarriedEvent]) -> int:
    """Put events of another storage on this bus, unless they are there; how many were not. What
    is there learns which handlers have finished it meanwhile."""
    new = 0
    for event in events:
        namespace, event_id = event.name
        there = connection.execute(
            "SELECT 1 FROM events WHERE namespace = ? AND id = ?", (namespace, event_id)
        ).fetchone()
        if event.done and there is None:
            continue
        if event.pending and there is None:
            _insert_event(connection, event)
            new += 1
        for record in event.finished:
            _insert(connection, "event_claims", {"namespace": namespace, **record.as_dict()})
        for letter in event.letters:
            values = letter.as_dict()
            values["event"] = to_json(values["event"])
            _insert(connection, "event_dead_letters", values)
    return new


def _insert_event(connection: sqlite3.Connection, event: CarriedEvent) -> None:
    envelope = dict(event.envelope)
    values = {name: envelope[name] for name in ("namespace", "id", "type", "created_at")}
    _insert(
        connection,
        "events",
        {
            **values,
            "priority": envelope["priority"],
            "envelope": to_json(envelope),
            "enqueued_at": timestamp(event.enqueued_at),
        },
    )


def _insert(connection: sqlite3.Connection, table: str, values: Mapping[str, Any]) -> None:
    """One that is there stays."""
    marks = ", ".join("?" * len(values))
    connection.execute(
        f"INSERT INTO {table} ({', '.join(values)}) VALUES ({marks}) ON CONFLICT DO NOTHING",
        tuple(values.values()),
    )
