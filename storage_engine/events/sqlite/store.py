"""The event bus in a SQLite file: the same contract, with transactions instead of CAS.

Events are numbered in the order of arrival, and nothing arrives late: a transaction that is not
committed has no number that others could have passed. So a handler's position is exact.
"""

from __future__ import annotations

import logging
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any, Generic, TypeVar

from storage_engine.commitlog.records import timestamp
from storage_engine.errors import IntegrityError
from storage_engine.events import envelopes
from storage_engine.events.carried import CarriedEvent
from storage_engine.events.protocol import (
    Backlog,
    DeadLetter,
    EventInfo,
    MalformedObject,
    NamespaceInfo,
    Peek,
    Subscription,
    WorkerSession,
)
from storage_engine.events.records import ClaimRecord, Envelope, Policy
from storage_engine.events.sqlite import carried
from storage_engine.events.sqlite.consumer import (
    CLAIM,
    SqliteConsumer,
    from_row,
    parse_envelope,
    parse_position,
    record_of,
)
from storage_engine.repository.sqlite import event_tables
from storage_engine.repository.sqlite.control_tables import to_json
from storage_engine.repository.sqlite.engine import SqliteRepository

log = logging.getLogger(__name__)

T = TypeVar("T")
_UNKNOWN = datetime(1970, 1, 1, tzinfo=UTC)
_SESSION = "session_id, started_at, last_heartbeat, metadata"
_LETTER = (
    "event_id",
    "handler_id",
    "failed_at",
    "attempts",
    "last_error",
    "event_type",
    "event",
)


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
            if connection is None or not event_tables.has_tables(connection):
                yield None
                return
            with _lenient_text(connection):
                yield connection

    @contextmanager
    def writing(self, operation: str) -> Iterator[sqlite3.Connection]:
        with self._repository.writing(operation) as connection:
            event_tables.ensure_tables(connection, timestamp(self.now()))
            with _lenient_text(connection):
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

    def peek(self, namespace: str, subscriptions: Sequence[Subscription]) -> Peek:
        return SqliteConsumer(self, namespace, subscriptions, "").peek()

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

    def heartbeat(
        self, namespace: str, session_id: str, metadata: Mapping[str, Any] | None = None
    ) -> None:
        now = timestamp(self.now())
        with self.writing("session heartbeat") as connection:
            connection.execute(
                "INSERT INTO event_sessions VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
                "last_heartbeat = excluded.last_heartbeat",
                (namespace, session_id, now, now, to_json(dict(metadata or {}))),
            )

    def end_session(self, namespace: str, session_id: str) -> None:
        with self.writing("end session") as connection:
            connection.execute(
                "DELETE FROM event_sessions WHERE namespace = ? AND session_id = ?",
                (namespace, session_id),
            )

    def list_sessions(self, namespace: str, session_ttl_ms: int) -> list[WorkerSession]:
        alive_since = self.now() - timedelta(milliseconds=session_ttl_ms)
        with self.reading("list sessions") as connection:
            if connection is None:
                return []
            rows = connection.execute(
                f"SELECT {_SESSION} FROM event_sessions WHERE namespace = ? ORDER BY started_at",
                (namespace,),
            ).fetchall()
        workers = []
        for row in rows:
            try:
                workers.append(_parse_session(row, namespace, alive_since))
            except IntegrityError as error:
                # Nobody knows when it was written: it counts as dead.
                at, name = _UNKNOWN, str(row[0])
                workers.append(WorkerSession(namespace, name, at, at, {}, True, str(error)))
        return workers

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
            oldest = dict(
                connection.execute(
                    "SELECT namespace, MIN(created_at) FROM events GROUP BY namespace"
                ).fetchall()
            )
        namespaces = []
        names = {*events, *(name for (name,) in named)}
        for namespace in sorted(name for name in names if isinstance(name, str)):
            sessions = self.list_sessions(namespace, session_ttl_ms)
            dead = sum(session.is_dead for session in sessions)
            namespaces.append(
                NamespaceInfo(
                    namespace,
                    events.get(namespace, 0),
                    len(sessions) - dead,
                    dead,
                    letters.get(namespace, 0),
                    _sent(oldest.get(namespace)),
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
                "SELECT id, envelope FROM events WHERE namespace = ? AND (? IS NULL OR type = ?) "
                "ORDER BY created_at DESC, seq DESC",
                (namespace, type, type),
            )
            for event_id, text in rows:
                try:
                    envelope = parse_envelope(text, namespace, event_id)
                except IntegrityError as error:
                    _leave_out(error)
                    continue
                info = self._info(connection, namespace, envelope)
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
                f"SELECT {', '.join(_LETTER)} FROM event_dead_letters "
                "WHERE namespace = ? AND (? IS NULL OR handler_id = ?) ORDER BY failed_at DESC",
                (namespace, handler_id, handler_id),
            )
            letters: list[DeadLetter] = []
            for row in rows:
                try:
                    letters.append(_parse_letter(row, namespace))
                except IntegrityError as error:
                    _leave_out(error)
                if len(letters) == limit:
                    break
        return letters

    def count_dead_letters(self, namespace: str) -> dict[str, int]:
        with self.reading("count dead letters") as connection:
            if connection is None:
                return {}
            rows = connection.execute(
                "SELECT handler_id, count(*) FROM event_dead_letters WHERE namespace = ? "
                "GROUP BY handler_id",
                (namespace,),
            )
            return {str(handler_id): int(count) for handler_id, count in rows}

    def list_malformed(self, namespace: str, limit: int) -> list[MalformedObject]:
        with self.reading("list malformed") as connection:
            if connection is None:
                return []
            return list(islice(self._malformed(connection, namespace), limit))

    def _malformed(
        self, connection: sqlite3.Connection, namespace: str
    ) -> Iterator[MalformedObject]:
        now = self.now()
        kinds: list[tuple[str, str, str, Callable[[Sequence[Any]], object]]] = [
            (
                "event",
                "id, envelope",
                "events",
                lambda row: parse_envelope(row[1], namespace, row[0]),
            ),
            ("claim", CLAIM, "event_claims AS c", lambda row: record_of(row, namespace)),
            (
                "dead letter",
                ", ".join(_LETTER),
                "event_dead_letters",
                lambda row: _parse_letter(row, namespace),
            ),
            (
                "session",
                _SESSION,
                "event_sessions",
                lambda row: _parse_session(row, namespace, now),
            ),
            (
                "position",
                "handler_id, seq",
                "event_positions",
                lambda row: parse_position(connection, row[1], namespace, row[0]),
            ),
        ]
        for kind, columns, table, parse in kinds:
            sql = f"SELECT {columns} FROM {table} WHERE namespace = ? ORDER BY 1"
            for row in connection.execute(sql, (namespace,)):
                try:
                    parse(row)
                except IntegrityError as error:
                    yield MalformedObject.of(kind, error)

    def inspect_event(self, event_id: str, namespace: str | None = None) -> list[EventInfo]:
        with self.reading("inspect event") as connection:
            if connection is None:
                return []
            rows = connection.execute(
                "SELECT namespace, envelope FROM events WHERE id = ? "
                "AND (? IS NULL OR namespace = ?) ORDER BY namespace",
                (event_id, namespace, namespace),
            ).fetchall()
            return [
                self._info(connection, name, parse_envelope(text, name, event_id))
                for name, text in rows
            ]

    def _info(
        self, connection: sqlite3.Connection, namespace: str, envelope: Envelope
    ) -> EventInfo:
        rows = connection.execute(
            f"SELECT {CLAIM} FROM event_claims AS c WHERE namespace = ? AND event_id = ? "
            "ORDER BY handler_id",
            (namespace, envelope["id"]),
        ).fetchall()
        claims: list[ClaimRecord] = []
        malformed: list[MalformedObject] = []
        for row in rows:
            try:
                claims.append(record_of(row, namespace))
            except IntegrityError as error:
                malformed.append(MalformedObject.of("claim", error))
        return envelopes.event_info(envelope, claims, self.now(), malformed)

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
            row = connection.execute(
                "SELECT envelope FROM events WHERE namespace = ? AND id = ?", name[:2]
            ).fetchone()
            event = None
            if letter.event is None and row is not None:
                event = parse_envelope(row[0], letter.namespace, letter.event_id)
            whole = envelopes.with_letter_event(letter, event)
            if whole.event is None:
                return None
            gone = connection.execute(f"DELETE FROM event_dead_letters {where}", name)
            if gone.rowcount == 0:
                return None
            copy = envelopes.redriven(whole, str(uuid.uuid4()), now)
            connection.execute(
                f"UPDATE event_claims SET redriven_as = ? {where}", (copy["id"], *name)
            )
            event_tables.insert_events(connection, [copy], timestamp(now))
        return copy

    # -- going along with a copy --------------------------------------------------------------

    def carried(self) -> Iterator[CarriedEvent]:
        with self.reading("read events") as connection:
            if connection is None:
                return
            rows = connection.execute(
                f"SELECT namespace, {', '.join(_LETTER)} FROM event_dead_letters "
                "ORDER BY failed_at, event_id"
            )
            letters = []
            for namespace, *row in rows.fetchall():
                try:
                    letters.append(_parse_letter(row, namespace))
                except IntegrityError as error:
                    _leave_out(error)
            yield from carried.carried(connection, letters)

    def adopt(self, events: Sequence[CarriedEvent]) -> int:
        if not events:
            return 0
        with self.writing("copy events") as connection:
            return carried.adopt(connection, events)

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


# -- rows -----------------------------------------------------------------------------------------


@contextmanager
def _lenient_text(connection: sqlite3.Connection) -> Iterator[None]:
    """Text that is no UTF-8 comes as bytes: then one row is malformed, not the whole answer."""
    before = connection.text_factory
    connection.text_factory = _text
    try:
        yield
    finally:
        connection.text_factory = before


def _text(data: bytes) -> str | bytes:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def _sent(text: Any) -> datetime | None:
    """When the event with this time was sent; None where another program wrote what is none."""
    try:
        return datetime.fromisoformat(text).astimezone(UTC)
    except (TypeError, ValueError):
        return None


def _leave_out(error: IntegrityError) -> None:
    log.warning("left out (`onto events show --malformed` lists such): %s", error)


def _parse_session(row: Sequence[Any], namespace: str, alive_since: datetime) -> WorkerSession:
    session_id, started, beat, metadata = row
    key = f"event_sessions ({namespace}, {session_id})"
    raw = {
        "session_id": session_id,
        "started_at": started,
        "last_heartbeat": beat,
        "metadata": from_row(metadata, key=key),
    }
    return WorkerSession.parse(raw, namespace, key=key, alive_since=alive_since)


def _parse_letter(row: Sequence[Any], namespace: str) -> DeadLetter:
    raw = dict(zip(_LETTER, row, strict=True))
    key = f"event_dead_letters ({namespace}, {raw['event_id']}, {raw['handler_id']})"
    event = raw["event"]
    raw["event"] = None if event in (None, "null") else from_row(event, key=key)
    return envelopes.parse_letter(raw, namespace, key=key)
