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
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from typing import Any, Generic, TypeVar

from storage_engine.commitlog.records import timestamp
from storage_engine.events import envelopes, records
from storage_engine.events.protocol import (
    Claim,
    DeadLetter,
    EventInfo,
    Failure,
    NamespaceInfo,
    Subscription,
    WorkerSession,
)
from storage_engine.events.records import ClaimRecord, Envelope, Policy
from storage_engine.repository.sqlite import outbox
from storage_engine.repository.sqlite.base import SqliteRepository
from storage_engine.repository.sqlite.records import to_json

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Finished(Generic[T]):
    """Work that was done in the foreground."""

    result: T
    done: bool = True

    def wait(self) -> T:
        return self.result


_COLUMNS = tuple(f.name for f in fields(ClaimRecord))
_CLAIM = ", ".join(f"c.{name}" for name in _COLUMNS)


class SqliteEventStore:
    """See `EventStore`."""

    simulated = False

    def __init__(self, repository: SqliteRepository, policy: Policy) -> None:
        self._repository = repository
        self.policy = policy

    def now(self) -> datetime:
        return datetime.now(UTC)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def background(self, work: Callable[[], T]) -> Finished[T]:
        """At once: a file has one writer at a time, so working beside the others gains nothing."""
        return Finished(work())

    @contextmanager
    def reading(self, operation: str) -> Iterator[sqlite3.Connection | None]:
        """None as long as there is no bus."""
        with self._repository.reading(operation) as connection:
            ready = connection is not None and outbox.has_tables(connection)
            yield connection if ready else None

    @contextmanager
    def writing(self, operation: str) -> Iterator[sqlite3.Connection]:
        with self._repository.writing(operation) as connection:
            outbox.ensure_tables(connection, timestamp(self.now()))
            yield connection

    # -- events -------------------------------------------------------------------------------

    def enqueue(self, envelopes: Sequence[Envelope]) -> None:
        if envelopes:
            with self.writing("enqueue events") as connection:
                outbox.insert_events(connection, envelopes, timestamp(self.now()))

    def enqueue_once(self, envelope: Envelope) -> bool:
        with self.writing("enqueue event") as connection:
            before = connection.total_changes
            outbox.insert_events(connection, [envelope], timestamp(self.now()))
            return connection.total_changes > before

    def consumer(
        self, namespace: str, subscriptions: Sequence[Subscription], session_id: str
    ) -> SqliteConsumer:
        return SqliteConsumer(self, namespace, subscriptions, session_id)

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
        found = []
        for namespace in sorted({*events, *(name for (name,) in named)}):
            sessions = self.list_sessions(namespace, session_ttl_ms)
            dead = sum(session.is_dead for session in sessions)
            found.append(
                NamespaceInfo(
                    namespace,
                    events.get(namespace, 0),
                    len(sessions) - dead,
                    dead,
                    letters.get(namespace, 0),
                )
            )
        return found

    def list_events(
        self, namespace: str, limit: int, *, status: str | None = None, type: str | None = None
    ) -> list[EventInfo]:
        found: list[EventInfo] = []
        with self.reading("list events") as connection:
            if connection is None:
                return found
            rows = connection.execute(
                "SELECT envelope FROM events WHERE namespace = ? AND (? IS NULL OR type = ?) "
                "ORDER BY created_at DESC, seq DESC",
                (namespace, type, type),
            )
            for (text,) in rows:
                info = self._info(connection, namespace, json.loads(text))
                if status is None or info.status == status:
                    found.append(info)
                    if len(found) == limit:
                        break
        return found

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
            f"SELECT {_CLAIM} FROM event_claims AS c WHERE namespace = ? AND event_id = ? "
            "ORDER BY handler_id",
            (namespace, envelope["id"]),
        ).fetchall()
        return envelopes.event_info(envelope, [_record(row) for row in rows], self.now())

    # -- doing again --------------------------------------------------------------------------

    def replay_event(self, namespace: str, event_id: str) -> Envelope | None:
        found = self.inspect_event(event_id, namespace)
        if not found:
            return None
        copy = envelopes.replayed(found[0].envelope, self.now())
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
            outbox.insert_events(connection, [copy], timestamp(now))
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


class SqliteConsumer:
    """See `Consumer`."""

    def __init__(
        self,
        store: SqliteEventStore,
        namespace: str,
        subscriptions: Sequence[Subscription],
        session_id: str,
    ) -> None:
        self._store = store
        self._policy = store.policy
        self._namespace = namespace
        self._subscriptions = subscriptions
        self._session_id = session_id
        self._alone = False

    # -- claiming -----------------------------------------------------------------------------

    def claim(self, limit: int, *, whole: bool = False, ahead: bool = False) -> list[Claim]:
        """The first look takes no lock, so that an idle worker is in nobody's way."""
        with self._store.reading("look for events") as connection:
            if connection is None or not self._due(connection, 1):
                return []
        won: list[Claim] = []
        with self._store.writing("claim events") as connection:
            due = self._due(connection, limit)
            suspect = [item for item in due if self._is_suspect(item[1])]
            ordinary = [item for item in due if not self._is_suspect(item[1])]
            self._alone = not ahead and bool(suspect) and not (self._alone and ordinary)
            due = suspect[:1] if self._alone else ordinary
            for envelope, record, handler_id in due:
                claim = self._take(connection, envelope, record, handler_id)
                if claim is not None:
                    won.append(claim)
            self._advance(connection)
        return won

    def _due(
        self, connection: sqlite3.Connection, limit: int
    ) -> list[tuple[Envelope, ClaimRecord | None, str]]:
        now = timestamp(self._store.now())
        found: list[tuple[tuple[Any, ...], Envelope, ClaimRecord | None, str]] = []
        for subscription in self._subscriptions:
            types = sorted(subscription.event_types)
            marks = ", ".join("?" * len(types))
            rows = connection.execute(
                f"SELECT e.envelope, {_CLAIM} FROM events AS e LEFT JOIN event_claims AS c "
                "ON c.namespace = e.namespace AND c.event_id = e.id AND c.handler_id = ? "
                f"WHERE e.namespace = ? AND e.seq > ? AND e.type IN ({marks}) "
                "AND c.ack_at IS NULL AND c.dead_lettered_at IS NULL "
                "AND (c.lease_until IS NULL OR (c.lease_until <= ? AND c.available_at <= ?)) "
                f"AND coalesce(json_extract(e.envelope, '$.{envelopes.TARGET}'), ?) = ? "
                "ORDER BY e.priority DESC, e.created_at, e.id LIMIT ?",
                (
                    subscription.handler_id,
                    self._namespace,
                    self._position(connection, subscription),
                    *types,
                    now,
                    now,
                    subscription.handler_id,
                    subscription.handler_id,
                    limit,
                ),
            ).fetchall()
            for text, *columns in rows:
                envelope = json.loads(text)
                record = _record(columns) if columns[0] is not None else None
                rank = (
                    -envelope["priority"],
                    -subscription.priority,
                    envelope["created_at"],
                    envelope["id"],
                    subscription.handler_id,
                )
                found.append((rank, envelope, record, subscription.handler_id))
        found.sort(key=lambda item: item[0])
        return [(envelope, record, handler) for _, envelope, record, handler in found[:limit]]

    def _is_suspect(self, record: ClaimRecord | None) -> bool:
        return record is not None and record.is_suspect(self._policy)

    def _take(
        self,
        connection: sqlite3.Connection,
        envelope: Envelope,
        record: ClaimRecord | None,
        handler_id: str,
    ) -> Claim | None:
        now, suspect = self._store.now(), self._is_suspect(record)
        if record is None:
            record = records.first_claim(
                envelope["id"], handler_id, self._session_id, now, self._policy, 0
            )
        elif records.is_worn_out(record, self._policy):
            dead = records.wear_out(record, now)
            self._write(connection, dead)
            self._bury(connection, envelope, dead)
            return None
        else:
            record = records.reclaim(record, self._session_id, now, self._policy, 0)
        self._write(connection, record)
        return Claim(self._namespace, envelope, record, suspect)

    # -- settling -----------------------------------------------------------------------------

    def ack(self, claims: Sequence[Claim]) -> list[bool]:
        now = self._store.now()
        done = self._settle("ack events", claims, lambda claim: records.ack(claim.record, now))
        return [record is not None for record in done]

    def release(self, failures: Sequence[Failure]) -> list[ClaimRecord | None]:
        now = self._store.now()
        by_claim = {id(f.claim): f for f in failures}

        def failed(claim: Claim) -> ClaimRecord:
            failure = by_claim[id(claim)]
            return records.release(
                claim.record, now, self._policy, failure.error, retry=failure.retry
            )

        return self._settle("release events", [f.claim for f in failures], failed)

    def give_back(self, claims: Sequence[Claim]) -> None:
        now = self._store.now()
        self._settle("give back events", claims, lambda c: records.give_back(c.record, now))

    def extend(self, claims: Sequence[Claim]) -> list[bool]:
        now = self._store.now()
        held = [claim for claim in claims if not claim.settled]
        done = self._settle(
            "extend leases", held, lambda c: records.extend(c.record, now, self._policy), end=False
        )
        return [record is not None for record in done]

    def _settle(
        self,
        operation: str,
        claims: Sequence[Claim],
        change: Callable[[Claim], ClaimRecord],
        *,
        end: bool = True,
    ) -> list[ClaimRecord | None]:
        if not claims:
            return []
        done: list[tuple[Claim, ClaimRecord | None]] = []
        with self._store.writing(operation) as connection:
            for claim in claims:
                stored = self._read(connection, claim)
                record: ClaimRecord | None = None
                if stored is not None and stored.token == claim.record.token:
                    # Acked already: by the commit that handled it.
                    if stored.finished:
                        record = stored if stored.ack_at is not None and end else None
                    else:
                        claim.record = stored
                        record = change(claim)
                        self._write(connection, record)
                        if record.dead_lettered_at is not None:
                            self._bury(connection, claim.envelope, record)
                done.append((claim, record))
        for claim, record in done:
            if record is None:
                claim.lost = claim.settled = True
            else:
                claim.record, claim.settled = record, end
        return [record for _, record in done]

    def _read(self, connection: sqlite3.Connection, claim: Claim) -> ClaimRecord | None:
        row = connection.execute(
            f"SELECT {_CLAIM} FROM event_claims AS c "
            "WHERE namespace = ? AND event_id = ? AND handler_id = ?",
            (self._namespace, claim.event_id, claim.handler_id),
        ).fetchone()
        return _record(row) if row else None

    def _write(self, connection: sqlite3.Connection, record: ClaimRecord) -> None:
        values = record.as_dict()
        connection.execute(
            f"INSERT OR REPLACE INTO event_claims (namespace, {', '.join(_COLUMNS)}) "
            f"VALUES (?, {', '.join('?' * len(_COLUMNS))})",
            (self._namespace, *(values[name] for name in _COLUMNS)),
        )

    def _bury(
        self, connection: sqlite3.Connection, envelope: Envelope, record: ClaimRecord
    ) -> None:
        letter = envelopes.dead_letter(self._namespace, envelope, record)
        told = envelopes.dead_letter_event(letter, self._policy.max_chain_depth)
        if told is not None:
            outbox.insert_events(connection, [told], timestamp(self._store.now()))
        connection.execute(
            "INSERT OR REPLACE INTO event_dead_letters VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                letter.namespace,
                letter.event_id,
                letter.handler_id,
                letter.failed_at,
                letter.attempts,
                letter.last_error,
                letter.event_type,
                to_json(dict(envelope)),
            ),
        )

    # -- positions ----------------------------------------------------------------------------

    def _position(self, connection: sqlite3.Connection, subscription: Subscription) -> int:
        row = connection.execute(
            "SELECT seq FROM event_positions WHERE namespace = ? AND handler_id = ? AND types = ?",
            (self._namespace, subscription.handler_id, _types(subscription)),
        ).fetchone()
        return int(row[0]) if row else 0

    def _advance(self, connection: sqlite3.Connection) -> None:
        """Move positions up to the first event that is not finished."""
        for subscription in self._subscriptions:
            known = self._position(connection, subscription)
            types = sorted(subscription.event_types)
            marks = ", ".join("?" * len(types))
            (first,) = connection.execute(
                "SELECT MIN(e.seq) FROM events AS e LEFT JOIN event_claims AS c "
                "ON c.namespace = e.namespace AND c.event_id = e.id AND c.handler_id = ? "
                f"WHERE e.namespace = ? AND e.seq > ? AND e.type IN ({marks}) "
                "AND c.ack_at IS NULL AND c.dead_lettered_at IS NULL "
                f"AND coalesce(json_extract(e.envelope, '$.{envelopes.TARGET}'), ?) = ?",
                (
                    subscription.handler_id,
                    self._namespace,
                    known,
                    *types,
                    subscription.handler_id,
                    subscription.handler_id,
                ),
            ).fetchone()
            (last,) = connection.execute("SELECT coalesce(MAX(seq), 0) FROM events").fetchone()
            reached = first - 1 if first is not None else last
            if reached > known:
                connection.execute(
                    "INSERT INTO event_positions VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
                    "types = excluded.types, seq = excluded.seq",
                    (self._namespace, subscription.handler_id, _types(subscription), reached),
                )

    def next_due(self) -> datetime | None:
        with self._store.reading("look for events") as connection:
            if connection is None:
                return None
            marks = ", ".join("?" * len(self._subscriptions))
            (first,) = connection.execute(
                "SELECT MIN(MAX(lease_until, available_at)) FROM event_claims WHERE namespace = ? "
                f"AND handler_id IN ({marks}) AND ack_at IS NULL AND dead_lettered_at IS NULL",
                (self._namespace, *(s.handler_id for s in self._subscriptions)),
            ).fetchone()
        return datetime.fromisoformat(first) if first is not None else None

    def save(self) -> None:
        """Positions are kept with every claim."""
        return


def _types(subscription: Subscription) -> str:
    return to_json(sorted(subscription.event_types))


def _record(row: Sequence[Any]) -> ClaimRecord:
    return ClaimRecord.parse(dict(zip(_COLUMNS, row, strict=True)), key="event_claims")
