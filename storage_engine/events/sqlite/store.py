"""The event bus in a SQLite file: the same contract, with transactions instead of CAS.

Events are numbered in the order of arrival, and nothing arrives late: a transaction that is not
committed has no number that others could have passed. So a handler's position is exact.
"""

from __future__ import annotations

import json
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Generic, TypeVar

from storage_engine.commitlog.records import timestamp
from storage_engine.events import envelopes
from storage_engine.events.protocol import (
    Backlog,
    DeadLetter,
    EventInfo,
    NamespaceInfo,
    Subscription,
    WorkerSession,
)
from storage_engine.events.records import Envelope, Policy
from storage_engine.events.sqlite.consumer import CLAIM, SqliteConsumer, record_of
from storage_engine.repository.sqlite import event_tables
from storage_engine.repository.sqlite.control_tables import to_json
from storage_engine.repository.sqlite.engine import SqliteRepository

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FinishedWork(Generic[T]):
    """Work that was done in the foreground."""

    result: T
    done: bool = True

    def wait(self) -> T:
        return self.result


class SqliteEventStore:
    """See `EventStore`."""

    timers = True

    def __init__(self, repository: SqliteRepository, policy: Policy) -> None:
        self._repository = repository
        self.policy = policy

    def now(self) -> datetime:
        return datetime.now(UTC)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def background(self, work: Callable[[], T]) -> FinishedWork[T]:
        """At once: a file has one writer at a time, so working beside the others gains nothing."""
        return FinishedWork(work())

    @contextmanager
    def reading(self, operation: str) -> Iterator[sqlite3.Connection | None]:
        """None as long as there is no bus."""
        with self._repository.reading(operation) as connection:
            ready = connection is not None and event_tables.has_tables(connection)
            yield connection if ready else None

    @contextmanager
    def writing(self, operation: str) -> Iterator[sqlite3.Connection]:
        with self._repository.writing(operation) as connection:
            event_tables.ensure_tables(connection, timestamp(self.now()))
            yield connection

    # -- events -------------------------------------------------------------------------------

    def enqueue(self, envelopes: Sequence[Envelope]) -> None:
        if envelopes:
            with self.writing("enqueue events") as connection:
                event_tables.insert_events(connection, envelopes, timestamp(self.now()))

    def enqueue_once(self, envelope: Envelope) -> bool:
        with self.writing("enqueue event") as connection:
            before = connection.total_changes
            event_tables.insert_events(connection, [envelope], timestamp(self.now()))
            return connection.total_changes > before

    def consumer(
        self, namespace: str, subscriptions: Sequence[Subscription], session_id: str
    ) -> SqliteConsumer:
        return SqliteConsumer(self, namespace, subscriptions, session_id)

    def backlog(self, namespace: str, subscriptions: Sequence[Subscription], limit: int) -> Backlog:
        return SqliteConsumer(self, namespace, subscriptions, "").backlog(limit)

    # -- sessions -----------------------------------------------------------------------------

    def register_session(
        self, namespace: str, session_id: str, metadata: Mapping[str, Any]
    ) -> None:
        now = timestamp(self.now())
        with self.writing("register session") as connection:
            connection.execute(
                "INSERT INTO event_sessions VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
                "started_at = excluded.started_at, last_heartbeat = excluded.last_heartbeat, "
                "metadata = excluded.metadata",
                (namespace, session_id, now, now, to_json(dict(metadata))),
            )

    def heartbeat(self, namespace: str, session_id: str) -> None:
        now = timestamp(self.now())
        with self.writing("session heartbeat") as connection:
            connection.execute(
                "INSERT INTO event_sessions VALUES (?, ?, ?, ?, '{}') ON CONFLICT DO UPDATE SET "
                "last_heartbeat = excluded.last_heartbeat",
                (namespace, session_id, now, now),
            )

    def end_session(self, namespace: str, session_id: str) -> None:
        with self.writing("end session") as connection:
            connection.execute(
                "DELETE FROM event_sessions WHERE namespace = ? AND session_id = ?",
                (namespace, session_id),
            )

    def list_sessions(self, namespace: str, session_ttl_ms: int) -> list[WorkerSession]:
        now, ttl = self.now(), timedelta(milliseconds=session_ttl_ms)
        with self.reading("list sessions") as connection:
            if connection is None:
                return []
            rows = connection.execute(
                "SELECT session_id, started_at, last_heartbeat, metadata FROM event_sessions "
                "WHERE namespace = ? ORDER BY started_at",
                (namespace,),
            ).fetchall()
        return [
            WorkerSession(
                namespace,
                session_id,
                datetime.fromisoformat(started),
                datetime.fromisoformat(beat),
                json.loads(metadata),
                now - datetime.fromisoformat(beat) > ttl,
            )
            for session_id, started, beat, metadata in rows
        ]

    # -- looking ------------------------------------------------------------------------------

    def list_namespaces(self, session_ttl_ms: int) -> list[NamespaceInfo]:
        with self.reading("list namespaces") as connection:
            if connection is None:
                return []
            events, letters = (
                dict(
                    connection.execute(
                        f"SELECT namespace, COUNT(*) FROM {table} GROUP BY namespace"
                    ).fetchall()
                )
                for table in ("events", "event_dead_letters")
            )
            named = connection.execute("SELECT DISTINCT namespace FROM event_sessions").fetchall()
        namespaces = []
        for namespace in sorted({*events, *(name for (name,) in named)}):
            sessions = self.list_sessions(namespace, session_ttl_ms)
            dead = sum(session.is_dead for session in sessions)
            namespaces.append(
                NamespaceInfo(
                    namespace,
                    events.get(namespace, 0),
                    len(sessions) - dead,
                    dead,
                    letters.get(namespace, 0),
                )
            )
        return namespaces

    def list_events(
        self, namespace: str, limit: int, *, status: str | None = None, type: str | None = None
    ) -> list[EventInfo]:
        infos: list[EventInfo] = []
        with self.reading("list events") as connection:
            if connection is None:
                return infos
            rows = connection.execute(
                "SELECT envelope FROM events WHERE namespace = ? AND (? IS NULL OR type = ?) "
                "ORDER BY created_at DESC, seq DESC",
                (namespace, type, type),
            )
            for (text,) in rows:
                info = self._info(connection, namespace, json.loads(text))
                if status is None or info.status == status:
                    infos.append(info)
                    if len(infos) == limit:
                        break
        return infos

    def list_dead_letters(
        self, namespace: str, limit: int, *, handler_id: str | None = None
    ) -> list[DeadLetter]:
        with self.reading("list dead letters") as connection:
            if connection is None:
                return []
            rows = connection.execute(
                "SELECT event_id, handler_id, failed_at, attempts, last_error, event_type, event "
                "FROM event_dead_letters WHERE namespace = ? AND (? IS NULL OR handler_id = ?) "
                "ORDER BY failed_at DESC LIMIT ?",
                (namespace, handler_id, handler_id, limit),
            ).fetchall()
        names = (
            "event_id",
            "handler_id",
            "failed_at",
            "attempts",
            "last_error",
            "event_type",
        )
        return [
            envelopes.letter_of(
                {**dict(zip(names, row, strict=False)), "event": json.loads(row[-1])}, namespace
            )
            for row in rows
        ]

    def inspect_event(self, event_id: str, namespace: str | None = None) -> list[EventInfo]:
        with self.reading("inspect event") as connection:
            if connection is None:
                return []
            rows = connection.execute(
                "SELECT namespace, envelope FROM events WHERE id = ? "
                "AND (? IS NULL OR namespace = ?) ORDER BY namespace",
                (event_id, namespace, namespace),
            ).fetchall()
            return [self._info(connection, name, json.loads(text)) for name, text in rows]

    def _info(
        self, connection: sqlite3.Connection, namespace: str, envelope: Envelope
    ) -> EventInfo:
        rows = connection.execute(
            f"SELECT {CLAIM} FROM event_claims AS c WHERE namespace = ? AND event_id = ? "
            "ORDER BY handler_id",
            (namespace, envelope["id"]),
        ).fetchall()
        return envelopes.event_info(envelope, [record_of(row) for row in rows], self.now())

    # -- doing again --------------------------------------------------------------------------

    def replay_event(self, namespace: str, event_id: str) -> Envelope | None:
        infos = self.inspect_event(event_id, namespace)
        if not infos:
            return None
        copy = envelopes.replayed(infos[0].envelope, self.now())
        self.enqueue([copy])
        return copy

    def redrive(self, letter: DeadLetter) -> Envelope | None:
        now = self.now()
        name = letter.namespace, letter.event_id, letter.handler_id
        where = "WHERE namespace = ? AND event_id = ? AND handler_id = ?"
        with self.writing("redrive") as connection:
            gone = connection.execute(f"DELETE FROM event_dead_letters {where}", name)
            if gone.rowcount == 0:
                return None
            copy = envelopes.redriven(letter, str(uuid.uuid4()), now)
            connection.execute(
                f"UPDATE event_claims SET redriven_as = ? {where}", (copy["id"], *name)
            )
            event_tables.insert_events(connection, [copy], timestamp(now))
        return copy

    # -- cleaning up --------------------------------------------------------------------------

    def cleanup_events(self, namespace: str, before: datetime, *, apply: bool = True) -> int:
        doomed = "FROM events WHERE namespace = ? AND enqueued_at < ?"
        values = (namespace, timestamp(before))
        with self.reading("cleanup events") as connection:
            if connection is None:
                return 0
            if not apply:
                (count,) = connection.execute(f"SELECT COUNT(*) {doomed}", values).fetchone()
                return int(count)
        with self.writing("cleanup events") as connection:
            deleted = connection.execute(f"DELETE {doomed}", values).rowcount
            connection.execute(
                "DELETE FROM event_claims WHERE namespace = ? AND event_id NOT IN "
                "(SELECT id FROM events WHERE namespace = ?)",
                (namespace, namespace),
            )
        return deleted
