"""What the dispatcher and the commands ask of an event store, whatever it keeps events in.

Delivery is at least once: an event goes to one worker at a time for each handler, and to another
one when the first lets its lease run out. A stale worker cannot ack, release or extend. Where the
handler commits, the ack is part of the commit, and the work is published exactly once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol, TypeVar

from storage_engine.events.records import ClaimRecord, Envelope
from storage_engine.repository.protocol import Ack

T = TypeVar("T")
R_co = TypeVar("R_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Subscription:
    """One handler as the store sees it."""

    handler_id: str
    event_types: frozenset[str]
    priority: int = 100


@dataclass(slots=True, eq=False)
class Claim:
    """A claim that this worker holds, or held: look at `lost`."""

    namespace: str
    envelope: Envelope
    record: ClaimRecord
    suspect: bool = False  # handle it alone
    etag: str = ""
    lost: bool = False
    settled: bool = False  # acked, released or given back: no more to extend
    guard: threading.Lock = field(default_factory=threading.Lock, repr=False)
    entry: Any = None  # the store's own

    @property
    def event_id(self) -> str:
        return self.record.event_id

    @property
    def handler_id(self) -> str:
        return self.record.handler_id

    def as_ack(self) -> Ack:
        """For the commit that handles the event."""
        record = self.record
        return Ack(
            namespace=self.namespace,
            event_id=record.event_id,
            handler_id=record.handler_id,
            token=record.token,
            since=record.head_commit,
        )


@dataclass(frozen=True, slots=True)
class Failure:
    """A claim whose handler failed. Without `retry` it is dead at once."""

    claim: Claim
    error: str
    retry: bool = True


class Consumer(Protocol):
    """Claims events for some handlers of one worker. One thread claims; any may settle."""

    suspects: bool
    """Whether the last claim saw a suspect one that is due."""

    def claim(self, limit: int, *, whole: bool = False, ahead: bool = False) -> list[Claim]:
        """Up to `limit` events that are due, by priority. A suspect one, whose handler may be
        killing its process, comes alone.

        whole:  look everywhere a late arrival may be, now rather than within seconds
        ahead:  others are still being handled: prepare the next claim too, and give out no
                suspect one
        """

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
    """A worker as others see it."""

    namespace: str
    session_id: str
    started_at: datetime
    last_heartbeat: datetime
    metadata: Mapping[str, Any]
    is_dead: bool


@dataclass(frozen=True, slots=True)
class NamespaceInfo:
    """`sessions` are alive; the dead ones are counted apart."""

    namespace: str
    events: int
    sessions: int
    dead_sessions: int
    dead_letters: int


@dataclass(frozen=True, slots=True)
class EventInfo:
    """An event and what its handlers made of it."""

    envelope: Envelope
    status: str  # dead_lettered, acked, claimed or pending
    claims: Sequence[ClaimRecord]


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


class Pending(Protocol[R_co]):
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

    def background(self, work: Callable[[], T]) -> Pending[T]:
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

    def register_session(
        self, namespace: str, session_id: str, metadata: Mapping[str, Any]
    ) -> None: ...

    def heartbeat(self, namespace: str, session_id: str) -> None:
        """Refresh; a session that is not there is registered again, without metadata."""

    def end_session(self, namespace: str, session_id: str) -> None: ...

    def list_sessions(self, namespace: str, session_ttl_ms: int) -> list[WorkerSession]: ...

    def list_namespaces(self, session_ttl_ms: int) -> list[NamespaceInfo]: ...

    def list_events(
        self, namespace: str, limit: int, *, status: str | None = None, type: str | None = None
    ) -> list[EventInfo]:
        """The latest events, newest first."""

    def list_dead_letters(
        self, namespace: str, limit: int, *, handler_id: str | None = None
    ) -> list[DeadLetter]:
        """The latest dead letters, newest first."""

    def inspect_event(self, event_id: str, namespace: str | None = None) -> list[EventInfo]:
        """The event of that id, in one namespace or wherever it is."""

    def replay_event(self, namespace: str, event_id: str) -> Envelope | None:
        """Enqueue a copy with a new id and lineage, for all handlers; None if it is not there."""

    def redrive(self, letter: DeadLetter) -> Envelope | None:
        """Enqueue a copy for the handler that gave up, and end the dead letter; None when another
        has done so."""

    def cleanup_events(self, namespace: str, before: datetime, *, apply: bool = True) -> int:
        """Delete events enqueued before then, with their claims; how many events."""
