"""What the dispatcher and the commands ask of an event store, whatever it keeps events in.

Delivery is at least once: an event goes to one worker at a time for each handler, and to another
one when the first lets its lease run out. A stale worker cannot ack, release or extend. Where the
handler commits, the ack is part of the commit, and the work is published exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from storage_engine.commitlog.parsing import optional_object, parsing, require_text
from storage_engine.commitlog.records import parse_timestamp
from storage_engine.errors import IntegrityError
from storage_engine.events.records import (
    Claim,
    ClaimRecord,
    Envelope,
    Failure,
    Policy,
    require_moment,
)
from storage_engine.model.canonical import dumps

if TYPE_CHECKING:
    from storage_engine.config import OntologiaConfig
    from storage_engine.events.carried import CarriedEvent
    from storage_engine.repository.protocol import Repository

T = TypeVar("T")
R_co = TypeVar("R_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Subscription:
    """One handler as the store sees it."""

    handler_id: str
    event_types: frozenset[str]
    priority: int = 100
    # Of event types whose events are to be handled in order: the field that tells which of them
    # belong together.
    ordering_keys: Mapping[str, str] = field(default_factory=dict, hash=False)

    def order_of(self, envelope: Envelope) -> str | None:
        """What an event has in common with those that it must not overtake; None if nothing."""
        name = self.ordering_keys.get(envelope["type"])
        value = None if name is None else envelope["payload"].get(name)
        return None if value is None else dumps(value)


class Consumer(Protocol):
    """Claims events for some handlers of one worker. One thread claims; any may settle."""

    suspects: bool
    """Whether the last claim saw a suspect one that is due."""

    @property
    def malformed(self) -> int:
        """How many events were set aside, as they or their claims cannot be read."""

    def claim(self, limit: int, *, whole: bool = False, ahead: bool = False) -> list[Claim]:
        """Up to `limit` events that are due, by priority. A suspect one, whose handler may be
        killing its process, comes alone. One that has an order (`Subscription.order_of`) comes
        when all before it that are known here, by time, are finished.

        whole:  look everywhere a late arrival may be, now rather than within seconds
        ahead:  others are still being handled: prepare the next claim too, and give out no
                suspect one
        """

    @property
    def shares(self) -> bool:
        """Whether events are left to other workers: what those do not get to is claimed here, but
        not yet."""

    def keep_up(self) -> None:
        """See who else works here, and exchange with them what is finished, at most every few
        seconds. Nothing is divided before it was called once. Any thread may."""

    def ack(self, claims: Sequence[Claim]) -> list[bool]:
        """End claims for good; False where the claim was lost."""

    def release(self, failures: Sequence[Failure]) -> list[ClaimRecord | None]:
        """Let failed ones be tried again later, or die; None where the claim was lost."""

    def give_back(self, claims: Sequence[Claim]) -> None:
        """Let others have unhandled ones at once."""

    def let_go(self, claims: Sequence[Claim]) -> None:
        """Touch them no more: how they ended is seen when their leases have run out."""

    def extend(self, claims: Sequence[Claim]) -> list[bool]:
        """Renew leases; False where the claim was lost."""

    def next_due(self) -> datetime | None:
        """When an event that is known and not due becomes due, as far as can be told."""

    def save(self) -> None:
        """Keep how far the handlers have come, for the next worker. Advisory."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """An event that a handler gave up on."""

    namespace: str
    event_id: str
    handler_id: str
    failed_at: str
    attempts: int
    last_error: str | None
    event_type: str
    event: Envelope | None = None

    def as_dict(self) -> dict[str, Any]:
        return {
            "event_id": self.event_id,
            "handler_id": self.handler_id,
            "namespace": self.namespace,
            "failed_at": self.failed_at,
            "attempts": self.attempts,
            "last_error": self.last_error,
            "event_type": self.event_type,
            "event": dict(self.event) if self.event is not None else None,
        }


@dataclass(frozen=True, slots=True)
class WorkerSession:
    """A worker as others see it. One whose record is `malformed` is judged by when that was
    written, as far as the store tells."""

    namespace: str
    session_id: str
    started_at: datetime
    last_heartbeat: datetime
    metadata: Mapping[str, Any]
    is_dead: bool
    malformed: str | None = None

    @property
    def handlers(self) -> frozenset[str]:
        """The handlers that it runs, as far as it says."""
        named = self.metadata.get("handlers")
        return frozenset(map(str, named)) if isinstance(named, list) else frozenset()

    @property
    def process(self) -> Mapping[str, Any]:
        """Which process it is, as `process.identity` tells; empty if it does not say."""
        process = self.metadata.get("process")
        return process if isinstance(process, Mapping) else {}

    @classmethod
    def parse(
        cls, raw: Mapping[str, Any], namespace: str, *, key: str, alive_since: datetime
    ) -> Self:
        """From what is stored; alive with a heartbeat at or after that time."""
        with parsing(key, "worker session"):
            beat = require_moment(raw, "last_heartbeat")
            return cls(
                namespace=namespace,
                session_id=require_text(raw, "session_id"),
                started_at=require_moment(raw, "started_at"),
                last_heartbeat=beat,
                metadata=optional_object(raw, "metadata") or {},
                is_dead=beat < alive_since,
            )


@dataclass(frozen=True, slots=True)
class MalformedObject:
    """An object (a row) of the bus that is not what it should be: it is set aside, and others go
    on."""

    kind: str  # event, claim, dead letter, session, position or projection
    key: str
    error: str

    @classmethod
    def of(cls, kind: str, error: IntegrityError) -> Self:
        return cls(kind, error.key or "", str(error))


@dataclass(frozen=True, slots=True)
class NamespaceInfo:
    """`sessions` are alive; the dead ones are counted apart. `oldest` is when the oldest event
    that is kept was sent, handled or not."""

    namespace: str
    events: int
    sessions: int
    dead_sessions: int
    dead_letters: int
    oldest: datetime | None = None


@dataclass(frozen=True, slots=True)
class EventInfo:
    """An event and what its handlers made of it."""

    envelope: Envelope
    status: str  # dead_lettered, acked, claimed or pending
    claims: Sequence[ClaimRecord]
    malformed: Sequence[MalformedObject] = ()  # claims that cannot be read


OpenEvent = tuple[Envelope, ClaimRecord | None]  # an event, and a handler's claim on it


@dataclass(frozen=True, slots=True)
class Backlog:
    """What some handlers have yet to do, at a glance. One event counts once for each handler.

    due:       could be claimed now
    waiting:   a worker has it, or its next attempt is not due yet
    oldest:    when the oldest of all these was created
    next_due:  when the first of the waiting ones becomes due, if nothing happens before
    more:      there are more than were looked at
    """

    due: int = 0
    waiting: int = 0
    oldest: datetime | None = None
    next_due: datetime | None = None
    more: bool = False

    @classmethod
    def count(cls, events: Iterable[OpenEvent], now: datetime, *, more: bool = False) -> Self:
        """Of what is not finished; finished claims among it are passed over."""
        due = waiting = 0
        oldest: datetime | None = None
        next_due: datetime | None = None
        for envelope, record in events:
            if record is not None and record.finished:
                continue
            created = parse_timestamp(envelope["created_at"])
            oldest = created if oldest is None else min(oldest, created)
            if record is None or record.not_before <= now:
                due += 1
            else:
                waiting += 1
                next_due = min(next_due or record.not_before, record.not_before)
        return cls(due, waiting, oldest, next_due, more)


@dataclass(frozen=True, slots=True)
class TypePeek:
    """Of the events of one type that a peek has read: how many are left to do, and since when."""

    events: int
    oldest: datetime | None


@dataclass(frozen=True, slots=True)
class Peek:
    """Whether handlers have something to do, how much and since when, as far as a page of names
    and a few events tell. One event counts once, however many handlers have yet to finish it.

    pending:    events that may be left to do, by their names
    more:       there are more names than were listed
    oldest:     when the oldest of them was sent, by its name
    looked_at:  how many of them were read, with the claims on them
    due:        of these: could be claimed now
    waiting:    of these: a worker has it, or its next attempt is not due yet
    next_due:   when the first of the waiting ones becomes due, if nothing happens before
    by_type:    of those looked at, what is left of each type
    """

    pending: int = 0
    more: bool = False
    oldest: datetime | None = None
    looked_at: int = 0
    due: int = 0
    waiting: int = 0
    next_due: datetime | None = None
    by_type: Mapping[str, TypePeek] = field(default_factory=dict)

    @property
    def is_exact(self) -> bool:
        """Whether everything that is left to do was looked at."""
        return not self.more and self.looked_at == self.pending

    @classmethod
    def of(
        cls,
        events: Sequence[tuple[str, Backlog]],
        *,
        unread: int = 0,
        oldest_unread: datetime | None = None,
        more: bool = False,
    ) -> Self:
        """From what is left to do of each event that was read, by type, and those that were not."""
        left = [backlog for _, backlog in events]
        moments = [event.oldest for event in left if event.oldest is not None]
        if oldest_unread is not None:
            moments.append(oldest_unread)
        return cls(
            pending=len(left) + unread,
            more=more,
            oldest=min(moments, default=None),
            looked_at=len(left),
            due=sum(event.due > 0 for event in left),
            waiting=sum(event.due == 0 for event in left),
            next_due=min((e.next_due for e in left if e.next_due is not None), default=None),
            by_type={
                name: TypePeek(
                    sum(event_type == name for event_type, _ in events),
                    min(
                        (e.oldest for of, e in events if of == name and e.oldest is not None),
                        default=None,
                    ),
                )
                for name in sorted({event_type for event_type, _ in events})
            },
        )


class BackgroundWork(Protocol[R_co]):
    """Work that goes on, or has ended."""

    @property
    def done(self) -> bool: ...

    def wait(self) -> R_co: ...


class EventStore(Protocol):
    """The bus of one storage."""

    def now(self) -> datetime:
        """The clock by which leases are judged."""

    def sleep(self, seconds: float) -> None: ...

    @property
    def timers(self) -> bool:
        """Whether time passes by itself, so that threads may wait for it."""

    def background(self, work: Callable[[], T]) -> BackgroundWork[T]:
        """Do something beside the handlers, where that gains anything."""

    def enqueue(self, envelopes: Sequence[Envelope]) -> None:
        """Put events on the bus, outside any commit. Putting one again changes nothing."""

    def enqueue_once(self, envelope: Envelope) -> bool:
        """Put an event on the bus under its own time, unless it is there; whether it was new."""

    def consumer(
        self, namespace: str, subscriptions: Sequence[Subscription], session_id: str
    ) -> Consumer: ...

    def backlog(self, namespace: str, subscriptions: Sequence[Subscription], limit: int) -> Backlog:
        """Look at what handlers have yet to do, the oldest `limit` events of it. Claims nothing,
        and keeps nothing from being claimed."""

    def peek(self, namespace: str, subscriptions: Sequence[Subscription]) -> Peek:
        """See whether handlers have something to do: a page of names, and few events, however
        many there are. Reading ends with the first that is due; of many that wait it reads the
        oldest, the newest and some in between, other ones each time. Claims nothing."""

    def register_session(
        self, namespace: str, session_id: str, metadata: Mapping[str, Any]
    ) -> None: ...

    def heartbeat(
        self, namespace: str, session_id: str, metadata: Mapping[str, Any] | None = None
    ) -> None:
        """Refresh; a session that is not there is registered again, with this metadata."""

    def end_session(self, namespace: str, session_id: str) -> None: ...

    def list_sessions(self, namespace: str, session_ttl_ms: int) -> list[WorkerSession]: ...

    def list_namespaces(self, session_ttl_ms: int) -> list[NamespaceInfo]: ...

    def list_events(
        self, namespace: str, limit: int, *, status: str | None = None, type: str | None = None
    ) -> list[EventInfo]:
        """The latest events, newest first."""

    def list_malformed(self, namespace: str, limit: int) -> list[MalformedObject]:
        """What is not as it should be, of every kind. Reads everything in the namespace."""

    def list_dead_letters(
        self, namespace: str, limit: int, *, handler_id: str | None = None
    ) -> list[DeadLetter]:
        """The latest dead letters, newest first; not many more are read than asked for."""

    def count_dead_letters(self, namespace: str) -> dict[str, int]:
        """How many there are of each handler, by their names; none is read."""

    def inspect_event(self, event_id: str, namespace: str | None = None) -> list[EventInfo]:
        """The event of that id, in one namespace or wherever it is."""

    def replay_event(self, namespace: str, event_id: str) -> Envelope | None:
        """Enqueue a copy with a new id and lineage, for all handlers; None if it is not there."""

    def redrive(self, letter: DeadLetter) -> Envelope | None:
        """Enqueue a copy for the handler that gave up, and end the dead letter; None when another
        has done so."""

    def carried(self) -> Iterator[CarriedEvent]:
        """What of all namespaces goes along when the storage is copied, in order of arrival."""

    def adopt(self, events: Sequence[CarriedEvent]) -> int:
        """Take over events of another storage, unless they are there; how many were not. Those
        that are there learn which handlers have finished them."""

    def cleanup_events(self, namespace: str, before: datetime, *, apply: bool = True) -> int:
        """Delete events enqueued before then, with their claims; how many events."""


def open_event_store(repository: Repository, config: OntologiaConfig) -> EventStore:
    """The bus that shares the repository's store; it lives as long as the repository does."""
    policy = Policy.of(config)
    if (objects := repository.objects) is not None:
        from storage_engine.events.object.store import ObjectEventStore

        return ObjectEventStore(objects.store.bulk, objects.chain, policy)
    from storage_engine.events.sqlite.store import SqliteEventStore

    database = repository.database
    assert database is not None, "a storage is one or the other"
    return SqliteEventStore(database, policy)
