"""Claims events of a SQLite file for one worker, in transactions."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import fields
from datetime import datetime
from typing import Any, Protocol

from storage_engine.commitlog.parsing import parsing, require_int
from storage_engine.commitlog.records import from_json, timestamp
from storage_engine.errors import IntegrityError
from storage_engine.events import envelopes, records
from storage_engine.events.protocol import Backlog, Peek, Subscription
from storage_engine.events.records import (
    Claim,
    ClaimRecord,
    Envelope,
    Failure,
    Policy,
    require_moment,
)
from storage_engine.repository.sqlite import event_tables
from storage_engine.repository.sqlite.control_tables import to_json

log = logging.getLogger(__name__)

_PEEKED = 1_000  # events and handlers that a peek counts
_LOOKED_AT = 100  # claims, among which the first that can be read tells when to look again
# The handler that an event is for. One that is not JSON is for everyone: they set it aside.
_TARGET = (
    f"CASE WHEN json_valid(e.envelope) THEN json_extract(e.envelope, '$.{records.TARGET}') END"
)
COLUMNS = tuple(f.name for f in fields(ClaimRecord))
CLAIM = ", ".join(f"c.{name}" for name in COLUMNS)
_CLAIMED = ", ".join(COLUMNS)


class Database(Protocol):
    """What the consumer needs of its store."""

    policy: Policy

    def now(self) -> datetime: ...

    def reading(self, operation: str) -> AbstractContextManager[sqlite3.Connection | None]: ...

    def writing(self, operation: str) -> AbstractContextManager[sqlite3.Connection]: ...


class SqliteConsumer:
    """See `Consumer`."""

    def __init__(
        self,
        store: Database,
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
        self._aside: dict[str, set[int]] = {}  # numbers of malformed events, by handler
        self._malformed: set[str] = set()
        self.suspects = False

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
            self.suspects = bool(suspect)
            ordinary = [item for item in due if not self._is_suspect(item[1])]
            self._alone = not ahead and bool(suspect) and not (self._alone and ordinary)
            due = suspect[:1] if self._alone else ordinary
            for envelope, record, handler_id in due:
                claim = self._take(connection, envelope, record, handler_id)
                if claim is not None:
                    won.append(claim)
            self._advance(connection)
        return won

    def backlog(self, limit: int) -> Backlog:
        """See `EventStore.backlog`."""
        with self._store.reading("look for events") as connection:
            if connection is None:
                return Backlog()
            due = self._due(connection, limit + 1, waiting=True)
        open_events = [(envelope, record) for envelope, record, _ in due[:limit]]
        return Backlog.count(open_events, self._store.now(), more=len(due) > limit)

    def peek(self) -> Peek:
        """See `EventStore.peek`. Here claims are at hand, so it looks at all of a page."""
        with self._store.reading("look for events") as connection:
            due = self._due(connection, _PEEKED + 1, waiting=True) if connection is not None else []
        by_event: dict[str, list[tuple[Envelope, ClaimRecord | None]]] = {}
        for envelope, record, _ in due[:_PEEKED]:
            by_event.setdefault(envelope["id"], []).append((envelope, record))
        now = self._store.now()
        left = [(opened[0][0]["type"], Backlog.count(opened, now)) for opened in by_event.values()]
        return Peek.of(left, more=len(due) > _PEEKED)

    def _due(
        self, connection: sqlite3.Connection, limit: int, *, waiting: bool = False
    ) -> list[tuple[Envelope, ClaimRecord | None, str]]:
        """With `waiting`, those of a later time or another worker as well."""
        ranked: list[tuple[tuple[Any, ...], Envelope, ClaimRecord | None, str]] = []
        for subscription in self._subscriptions:
            for envelope, record in self._due_for(connection, subscription, limit, waiting):
                rank = (
                    -envelope["priority"],
                    -subscription.priority,
                    envelope["created_at"],
                    envelope["id"],
                    subscription.handler_id,
                )
                ranked.append((rank, envelope, record, subscription.handler_id))
        ranked.sort(key=lambda item: item[0])
        return [(envelope, record, handler) for _, envelope, record, handler in ranked[:limit]]

    def _due_for(
        self, connection: sqlite3.Connection, subscription: Subscription, limit: int, waiting: bool
    ) -> list[tuple[Envelope, ClaimRecord | None]]:
        """Malformed ones are set aside, and do not take the places of others."""
        now = timestamp(self._store.now())
        types = sorted(subscription.event_types)
        order, order_values = _order(subscription)
        # Of events that belong together one counts, whenever it is due: the one that somebody has,
        # else the oldest.
        place = (
            f"row_number() OVER (PARTITION BY {order} "
            "ORDER BY coalesce(c.lease_until, '') > ? DESC, e.created_at, e.id)"
        )
        aside = self._aside.setdefault(subscription.handler_id, set())
        while True:
            set_aside = len(aside)
            rows = connection.execute(
                f"SELECT seq, id, envelope, {_CLAIMED} FROM ("
                f"SELECT e.seq, e.id, e.envelope, e.priority, e.created_at, {CLAIM}, "
                f"{order} AS line, {place if order_values else 1} AS place "
                "FROM events AS e LEFT JOIN event_claims AS c "
                "ON c.namespace = e.namespace AND c.event_id = e.id AND c.handler_id = ? "
                f"WHERE e.namespace = ? AND e.seq > ? AND e.type IN ({_marks(types)}) "
                "AND c.ack_at IS NULL AND c.dead_lettered_at IS NULL "
                f"AND coalesce({_TARGET}, ?) = ? "
                "AND e.seq NOT IN (SELECT value FROM json_each(?))) "
                "WHERE ? OR ((line IS NULL OR place = 1) "
                "AND (lease_until IS NULL OR (lease_until <= ? AND available_at <= ?))) "
                "ORDER BY priority DESC, created_at, id LIMIT ?",
                (
                    *order_values,
                    *((*order_values, now) if order_values else ()),
                    subscription.handler_id,
                    self._namespace,
                    self._position(connection, subscription),
                    *types,
                    subscription.handler_id,
                    subscription.handler_id,
                    to_json(sorted(aside)),
                    waiting,
                    now,
                    now,
                    limit,
                ),
            ).fetchall()
            due = [
                event
                for seq, event_id, text, *columns in rows
                if (event := self._parsed(aside, seq, event_id, text, columns)) is not None
            ]
            if len(aside) == set_aside:
                return due

    def _parsed(
        self, aside: set[int], seq: int, event_id: Any, text: Any, columns: Sequence[Any]
    ) -> tuple[Envelope, ClaimRecord | None] | None:
        try:
            envelope = parse_envelope(text, self._namespace, event_id)
            record = record_of(columns, self._namespace) if columns[0] is not None else None
        except IntegrityError as error:
            aside.add(seq)
            self._set_aside(error)
            return None
        return envelope, record

    def _set_aside(self, error: IntegrityError) -> None:
        """Something is malformed: say so once, count it, and go on with the others."""
        if error.key not in self._malformed:
            self._malformed.add(error.key)
            log.warning("set aside (`onto events show --malformed` lists such): %s", error)

    @property
    def malformed(self) -> int:
        return len(self._malformed)

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
        claims = [failure.claim for failure in failures]
        return self._settle("release events", claims, records.released(failures, now, self._policy))

    def give_back(self, claims: Sequence[Claim]) -> None:
        now = self._store.now()
        self._settle("give back events", claims, lambda c: records.give_back(c.record, now))

    def let_go(self, claims: Sequence[Claim]) -> None:
        for claim in claims:
            claim.settled = True

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
            f"SELECT {CLAIM} FROM event_claims AS c "
            "WHERE namespace = ? AND event_id = ? AND handler_id = ?",
            (self._namespace, claim.event_id, claim.handler_id),
        ).fetchone()
        try:
            return record_of(row, self._namespace) if row else None
        except IntegrityError as error:
            self._set_aside(error)
            return None  # no longer ours, whosever it is

    def _write(self, connection: sqlite3.Connection, record: ClaimRecord) -> None:
        values = record.as_dict()
        connection.execute(
            f"INSERT OR REPLACE INTO event_claims (namespace, {', '.join(COLUMNS)}) "
            f"VALUES (?, {', '.join('?' * len(COLUMNS))})",
            (self._namespace, *(values[name] for name in COLUMNS)),
        )

    def _bury(
        self, connection: sqlite3.Connection, envelope: Envelope, record: ClaimRecord
    ) -> None:
        letter = envelopes.dead_letter(self._namespace, envelope, record)
        told = envelopes.dead_letter_event(letter, self._policy.max_chain_depth)
        if told is not None:
            event_tables.insert_events(connection, [told], timestamp(self._store.now()))
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
        if row is None:
            return 0
        try:
            return parse_position(connection, row[0], self._namespace, subscription.handler_id)
        except IntegrityError as error:
            self._set_aside(error)
            return 0  # from the beginning: claims tell what is finished

    def _advance(self, connection: sqlite3.Connection) -> None:
        """Move positions up to the first event that is not finished."""
        for subscription in self._subscriptions:
            position = self._position(connection, subscription)
            types = sorted(subscription.event_types)
            aside = self._aside.get(subscription.handler_id, set())
            rows = connection.execute(
                "SELECT e.seq FROM events AS e LEFT JOIN event_claims AS c "
                "ON c.namespace = e.namespace AND c.event_id = e.id AND c.handler_id = ? "
                f"WHERE e.namespace = ? AND e.seq > ? AND e.type IN ({_marks(types)}) "
                "AND c.ack_at IS NULL AND c.dead_lettered_at IS NULL "
                f"AND coalesce({_TARGET}, ?) = ? ORDER BY e.seq LIMIT ?",
                (
                    subscription.handler_id,
                    self._namespace,
                    position,
                    *types,
                    subscription.handler_id,
                    subscription.handler_id,
                    len(aside) + 1,
                ),
            ).fetchall()
            first = next((seq for (seq,) in rows if seq not in aside), None)
            (last,) = connection.execute("SELECT coalesce(MAX(seq), 0) FROM events").fetchone()
            reached = first - 1 if first is not None else last
            if reached > position:
                connection.execute(
                    "INSERT INTO event_positions VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
                    "types = excluded.types, seq = excluded.seq",
                    (self._namespace, subscription.handler_id, _types(subscription), reached),
                )

    def next_due(self) -> datetime | None:
        with self._store.reading("look for events") as connection:
            if connection is None:
                return None
            if any(s.ordering_keys for s in self._subscriptions) and self._due(connection, 1):
                return self._store.now()  # its turn has come, as the one before it is finished
            handlers = [subscription.handler_id for subscription in self._subscriptions]
            rows = connection.execute(
                "SELECT MAX(lease_until, available_at) AS due FROM event_claims "
                f"WHERE namespace = ? AND handler_id IN ({_marks(handlers)}) "
                "AND ack_at IS NULL AND dead_lettered_at IS NULL "
                "AND typeof(lease_until) = 'text' AND typeof(available_at) = 'text' "
                "ORDER BY due LIMIT ?",
                (self._namespace, *handlers, _LOOKED_AT),
            ).fetchall()
        for (due,) in rows:
            with suppress(ValueError):  # malformed: not for this to say
                return require_moment({"due": due}, "due")
        return None

    @property
    def shares(self) -> bool:
        """Claims are made one after the other, so nothing need be divided."""
        return False

    def keep_up(self) -> None:
        return

    def save(self) -> None:
        """Positions are kept with every claim."""
        return


def _marks(values: Sequence[str]) -> str:
    return ", ".join("?" * len(values))


def _order(subscription: Subscription) -> tuple[str, Sequence[str]]:
    """What events have in common that must not overtake one another, as SQL: as
    `Subscription.order_of` tells."""
    keys = sorted(subscription.ordering_keys.items())
    if not keys:
        return "NULL", ()
    cases = " ".join(
        f"WHEN ? THEN json_extract(e.envelope, '$.payload.{field}')" for _, field in keys
    )
    case = f"CASE WHEN json_valid(e.envelope) THEN CASE e.type {cases} END END"
    return case, [event_type for event_type, _ in keys]


def _types(subscription: Subscription) -> str:
    return to_json(sorted(subscription.event_types))


def from_row(text: Any, *, key: str) -> dict[str, Any]:
    """A JSON object in a column."""
    if not isinstance(text, str):
        raise IntegrityError(f"{key} is not valid JSON", key=key)
    return from_json(text.encode(errors="surrogatepass"), key=key)


def parse_envelope(text: Any, namespace: str, event_id: Any) -> Envelope:
    key = f"events ({namespace}, {event_id})"
    return records.parse_envelope(from_row(text, key=key), namespace, key=key, name=event_id)


def record_of(row: Sequence[Any], namespace: str) -> ClaimRecord:
    raw = dict(zip(COLUMNS, row, strict=True))
    key = f"event_claims ({namespace}, {raw['event_id']}, {raw['handler_id']})"
    return ClaimRecord.parse(raw, key=key)


def parse_position(
    connection: sqlite3.Connection, seq: Any, namespace: str, handler_id: str
) -> int:
    """A position that lies beyond every number given so far would hide what is yet to come."""
    last = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'events'").fetchone()
    key = f"event_positions ({namespace}, {handler_id})"
    with parsing(key, "position"):
        return require_int({"seq": seq}, "seq", maximum=last[0] if last is not None else 0)
