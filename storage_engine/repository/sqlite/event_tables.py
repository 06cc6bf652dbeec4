"""Tables of the event bus, and what a commit does to them in its own transaction.

In SQLite a commit, the events that it sends and the claim that it ends are one transaction, so
there is nothing to project afterwards and nothing to find missing.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from storage_engine.repository.protocol import Ack, ClaimLost
from storage_engine.repository.sqlite.control_tables import to_json

TABLES = (
    """
    CREATE TABLE events (
        seq          INTEGER PRIMARY KEY AUTOINCREMENT,  -- in the order of arrival
        namespace    TEXT NOT NULL,
        id           TEXT NOT NULL,
        type         TEXT NOT NULL,
        created_at   TEXT NOT NULL,
        priority     INTEGER NOT NULL,
        envelope     TEXT NOT NULL,  -- JSON object
        enqueued_at  TEXT NOT NULL,
        UNIQUE (namespace, id)
    )
    """,
    "CREATE INDEX events_by_arrival ON events (namespace, seq)",
    """
    CREATE TABLE event_claims (
        namespace         TEXT NOT NULL,
        event_id          TEXT NOT NULL,
        handler_id        TEXT NOT NULL,
        session_id        TEXT NOT NULL,
        claimed_at        TEXT NOT NULL,
        lease_until       TEXT NOT NULL,
        available_at      TEXT NOT NULL,
        ack_at            TEXT,
        attempts          INTEGER NOT NULL,
        last_error        TEXT,
        dead_lettered_at  TEXT,
        token             TEXT NOT NULL,
        deliveries        INTEGER NOT NULL,
        head_commit       INTEGER NOT NULL,
        redriven_as       TEXT,
        PRIMARY KEY (namespace, event_id, handler_id)
    )
    """,
    """
    CREATE INDEX event_claims_open ON event_claims (namespace, handler_id)
        WHERE ack_at IS NULL AND dead_lettered_at IS NULL
    """,
    """
    CREATE TABLE event_dead_letters (
        namespace   TEXT NOT NULL,
        event_id    TEXT NOT NULL,
        handler_id  TEXT NOT NULL,
        failed_at   TEXT NOT NULL,
        attempts    INTEGER NOT NULL,
        last_error  TEXT,
        event_type  TEXT NOT NULL,
        event       TEXT NOT NULL,  -- JSON object: the envelope
        PRIMARY KEY (namespace, event_id, handler_id)
    )
    """,
    """
    CREATE TABLE event_sessions (
        namespace       TEXT NOT NULL,
        session_id      TEXT NOT NULL,
        started_at      TEXT NOT NULL,
        last_heartbeat  TEXT NOT NULL,
        metadata        TEXT NOT NULL,  -- JSON object
        PRIMARY KEY (namespace, session_id)
    )
    """,
    """
    CREATE TABLE event_positions (
        namespace   TEXT NOT NULL,
        handler_id  TEXT NOT NULL,
        types       TEXT NOT NULL,     -- JSON list: what it was counted for
        seq         INTEGER NOT NULL,  -- everything up to here is finished
        PRIMARY KEY (namespace, handler_id)
    )
    """,
)


def has_tables(connection: sqlite3.Connection) -> bool:
    sql = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'events'"
    return connection.execute(sql).fetchone() is not None


def ensure_tables(connection: sqlite3.Connection, now: str) -> None:
    """Make the tables in the running transaction; commits from before there were any are sent."""
    if has_tables(connection):
        return
    for statement in TABLES:
        connection.execute(statement)
    sql = "SELECT events FROM commits WHERE events <> '[]' ORDER BY id"
    for (text,) in connection.execute(sql).fetchall():
        insert_events(connection, json.loads(text), now)


def insert_events(
    connection: sqlite3.Connection, envelopes: Iterable[Mapping[str, Any]], now: str
) -> None:
    """An event that is there already (by its id) stays as it is."""
    connection.executemany(
        "INSERT INTO events (namespace, id, type, created_at, priority, envelope, enqueued_at) "
        "VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (namespace, id) DO NOTHING",
        [
            (e["namespace"], e["id"], e["type"], e["created_at"], e["priority"], to_json(e), now)
            for e in (dict(envelope) for envelope in envelopes)
        ],
    )


def publish(
    connection: sqlite3.Connection,
    events: Sequence[Mapping[str, Any]],
    acks: Sequence[Ack],
    now: str,
) -> None:
    """The events and acks of a commit, in its transaction."""
    if not events and not acks:
        return
    ensure_tables(connection, now)
    for ack in acks:
        ended = connection.execute(
            "UPDATE event_claims SET ack_at = ? WHERE namespace = ? AND event_id = ? "
            "AND handler_id = ? AND token = ? AND ack_at IS NULL AND dead_lettered_at IS NULL",
            (now, ack.namespace, ack.event_id, ack.handler_id, ack.token),
        )
        if ended.rowcount != 1:
            raise ClaimLost(ack)
    insert_events(connection, events, now)
