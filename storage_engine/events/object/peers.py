"""The workers of one namespace, as one of them sees the others, and who takes which event.

No service knows the members: a worker keeps its session object fresh, so a listing of those tells
who lives. An event goes to the worker that ranks highest for it, by a hash of both: all of them
come to the same answer without asking, and when one comes or goes, only its own part changes hands.
Views differ for a while; then two try for the same event, and its claim decides as ever. So all of
this saves requests and promises nothing: what a worker does not get to is taken by others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from storage_engine.commitlog import layout
from storage_engine.commitlog.records import from_json
from storage_engine.errors import IntegrityError
from storage_engine.events.protocol import WorkerSession
from storage_engine.objectstore.protocol import ObjectNotFound, ObjectStore
from storage_engine.process import is_gone

if TYPE_CHECKING:
    from storage_engine.events.object.pending_events import PendingEvent

_RECENT = timedelta(seconds=5)
_KEPT = 5  # claim limits: so much a worker has claimed, or has finished and not yet told of
_STALLED = timedelta(seconds=30)  # for so long one that leaves events lying has no part
_PROBED = 3  # events of a worker that finishes nothing: does it hold them, or leave them lying?


class Peers:
    """Who works here. Nobody else does until `refresh` was called."""

    def __init__(
        self,
        store: ObjectStore,
        namespace: str,
        session_id: str,
        handlers: Iterable[str],
        session_ttl: timedelta,
    ) -> None:
        self._store = store
        self._namespace = namespace
        self._session_id = session_id
        self._handlers = frozenset(handlers)
        self._ttl = session_ttl
        self._sessions: dict[str, WorkerSession | None] = {}  # each is read once
        self._members = {session_id: self._handlers}
        self._stalled: dict[str, datetime] = {}
        self._progress: dict[str, datetime] = {}
        self._refreshed_at: datetime | None = None
        self._met: set[str] = set()
        self._stranger = False
        self._revived = False
        self._by_handler: dict[str, list[str]] = {}
        self._hashes: dict[str, hashlib.blake2b] = {}
        self._rank()

    @property
    def alone(self) -> bool:
        return len(self._members) == 1

    @property
    def has_stranger(self) -> bool:
        """Whether a claim of a worker was met that is not known here."""
        return self._stranger and self._refreshed_at is not None

    def meet(self, session_id: str, active_at: datetime) -> None:
        """A claim of this worker stands, which it made or ended then."""
        if session_id in self._stalled and self._store.now() - active_at < _RECENT:
            del self._stalled[session_id]  # it goes on: only word of it has not come
            self._progress[session_id] = self._store.now()
            self._revived = True
        if session_id not in self._met:
            self._met.add(session_id)
            self._stranger |= session_id != self._session_id and session_id not in self._sessions

    def welcome(self) -> bool:
        """Give their part back to those that were met at work. Whether there were any."""
        revived, self._revived = self._revived, False
        return revived and self._rank()

    def is_alive(self, session_id: str) -> bool:
        """Whether another worker can be expected to see to its own claims."""
        return (
            session_id in self._members
            and session_id not in self._stalled
            and session_id != self._session_id
        )

    def keep_up(self) -> bool:
        """`refresh` as often as a worker says that it lives."""
        return self.refresh(self._ttl / 3)

    def refresh(self, interval: timedelta = timedelta(seconds=1)) -> bool:
        """See who is there, at most so often: a listing, and each new session once. Whether
        somebody takes other events than before."""
        now = self._store.now()
        if self._refreshed_at is not None and now - self._refreshed_at < interval:
            return False
        self._refreshed_at, self._stranger = now, False
        fresh = {
            layout.last_segment(info.key): info.key
            for info in self._store.list(layout.event_sessions(self._namespace))
            if info.modified >= now - self._ttl
        }
        new = [name for name in fresh if name not in self._sessions and name != self._session_id]
        sessions = self._store.parallel.map(self._read, [fresh[name] for name in new])
        self._sessions.update(zip(new, sessions, strict=True))
        self._progress.update((name, now) for name in new)
        self._members = {self._session_id: self._handlers}
        for name in fresh:
            session = self._sessions.get(name)
            if session is not None and not is_gone(session.process):
                self._members[name] = session.handlers & self._handlers
        self._stalled = {name: until for name, until in self._stalled.items() if until > now}
        return self._rank()

    def _read(self, key: str) -> WorkerSession | None:
        """None for one that has gone, or cannot be read: it takes no part."""
        try:
            raw = from_json(self._store.get(key).data, key=key)
            return WorkerSession.parse(
                raw, self._namespace, key=key, alive_since=self._store.now() - self._ttl
            )
        except (ObjectNotFound, IntegrityError):
            return None

    # -- progress -----------------------------------------------------------------------------

    def note_progress(self, session_ids: Iterable[str]) -> None:
        """They have finished something."""
        now = self._store.now()
        self._progress.update((session_id, now) for session_id in session_ids)

    def progress(self, session_id: str) -> datetime | None:
        """When a worker was last seen to finish something, or to come."""
        return self._progress.get(session_id)

    def stall(self, session_ids: Iterable[str]) -> bool:
        """These leave events lying: others take their part for a while."""
        until = self._store.now() + _STALLED
        self._stalled.update((name, until) for name in session_ids if name != self._session_id)
        return self._rank()

    # -- who takes what -----------------------------------------------------------------------

    def owner(self, name: str, handler_id: str) -> str:
        """The worker that takes the event of this name for a handler."""
        members = self._by_handler[handler_id]
        return max(members, key=lambda member: self._score(member, name))

    def is_next(self, name: str, handler_id: str, without: Collection[str]) -> bool:
        """Whether this worker would take the event if those were not there."""
        members = [member for member in self._by_handler[handler_id] if member not in without]
        best = max(members, key=lambda member: self._score(member, name), default=None)
        return best == self._session_id

    def owns(self, name: str, handler_id: str) -> bool:
        return self.alone or self.owner(name, handler_id) == self._session_id

    def _score(self, member: str, name: str) -> bytes:
        score = self._hashes[member].copy()
        score.update(name.encode())
        return score.digest()

    def _rank(self) -> bool:
        """For each handler, the workers that take part; whether that has changed."""
        before = self._by_handler
        self._by_handler = {
            handler_id: [
                name
                for name, handlers in sorted(self._members.items())
                if handler_id in handlers and name not in self._stalled
            ]
            for handler_id in self._handlers
        }
        for name in self._members:
            if name not in self._hashes:
                self._hashes[name] = hashlib.blake2b(name.encode(), digest_size=8)
        return self._by_handler != before


@dataclass(frozen=True, slots=True)
class _Probe:
    """Events of a worker that has finished nothing for a while, tried before all of them are."""

    at: datetime
    events: Sequence[PendingEvent]

    @property
    def refused(self) -> bool:
        return not any(event.claimed for event in self.events)


class EventsOfOthers:
    """The events that one worker leaves to others, each for a while."""

    def __init__(self, store: ObjectStore, peers: Peers | None) -> None:
        """Without `peers` none is."""
        self._store = store
        self._peers = peers
        self._events: dict[str, PendingEvent] = {}  # by key
        self._probes: dict[str, _Probe] = {}  # by worker, until it has finished something

    def __len__(self) -> int:
        return len(self._events)

    def leave(self, event: PendingEvent) -> bool:
        """Leave an event to the worker that is to take it, if that is another one for all of its
        handlers, and others have not been given it in vain."""
        peers, name = self._peers, event.event_id
        event.owner = None
        if peers is None or peers.alone or event.passed_on > 1:
            return False
        if any(peers.owns(name, handler_id) for handler_id in event.open):
            return False
        event.owner = peers.owner(name, min(event.open))
        event.left_at = event.left_at or self._store.now()
        self._events[event.key] = event
        return True

    def take_all(self) -> list[PendingEvent]:
        events, self._events = list(self._events.values()), {}
        return events

    def note_finished(self, events: Sequence[PendingEvent]) -> None:
        """Handlers of these are finished, by whoever was to take them."""
        owners = {event.owner for event in events if event.owner is not None}
        if self._peers is not None:
            self._peers.note_progress(owners)
        for owner in owners:
            self._probes.pop(owner, None)
        for event in events:
            if not event.open:
                self._events.pop(event.key, None)

    def overdue(self, patience: timedelta) -> list[PendingEvent]:
        """Those of workers that have finished nothing for so long."""
        if self._peers is None:
            return []
        before = self._store.now() - patience
        seen = {e.owner: self._peers.progress(e.owner) for e in self._events.values() if e.owner}
        return [
            event
            for event in self._events.values()
            if event.owner is not None
            and all(at is None or at <= before for at in (event.left_at, seen[event.owner]))
        ]

    def probe(self, patience: timedelta) -> list[PendingEvent]:
        """A few of the overdue ones of each worker whose were not tried yet: the last that it would
        come to, of those that would be ours without it. One that holds even these has claimed the
        others too, and is only slow to finish them, as when it waits for its turn to commit."""
        by_owner: dict[str, list[PendingEvent]] = {}
        for event in sorted(self.overdue(patience)):
            if event.owner is not None:
                by_owner.setdefault(event.owner, []).append(event)
        probed: list[PendingEvent] = []
        for owner in by_owner.keys() - self._probes.keys():
            ours = [
                event
                for event in by_owner[owner]
                if self._peers is not None
                and self._peers.is_next(event.event_id, min(event.open), by_owner)
            ]
            self._probes[owner] = _Probe(self._store.now(), ours[-_PROBED:])
            probed += ours[-_PROBED:]
        for event in probed:
            event.passed_on = 2
            del self._events[event.key]
        return probed

    def pass_on(self, patience: timedelta, *, probed: bool) -> bool:
        """The next ones in line should take the overdue ones, and if those do not get to them
        either, whoever finds out. `probed`: only where a worker was found to leave them lying, or
        holds what was tried of them and has had the time once more. Whether there are any."""
        before = self._store.now() - patience
        events = self.overdue(patience)
        owners = {event.owner for event in events if event.owner is not None}
        if probed:
            owners = {
                owner
                for owner, probe in self._probes.items()
                if probe.at <= before or not probe.refused
            }
            events = [event for event in events if event.owner in owners]
        for event in events:
            event.passed_on += 1
            event.left_at = None
        if events and self._peers is not None:
            self._peers.stall(owners)
            self._probes = {o: probe for o, probe in self._probes.items() if o not in owners}
        return bool(events)

    def take_some(self, count: int, patience: timedelta) -> list[PendingEvent]:
        """Those that others have had for so long, the last that they would come to, and not what
        they have claimed or will next: first those that would be ours if their worker were not
        there."""
        now, peers = self._store.now(), self._peers
        ages: dict[str, timedelta] = {}
        by_owner: dict[str | None, list[PendingEvent]] = {}
        for event in sorted(self._events.values()):
            by_owner.setdefault(event.owner, []).append(event)
            ages[event.key] = now - (event.left_at or now)
        waiting = [
            event
            for events in by_owner.values()
            for event in events[_KEPT * count :]
            if ages[event.key] >= patience
        ]
        ours = [
            event
            for event in waiting
            if peers is not None
            and event.owner is not None
            and peers.is_next(event.event_id, min(event.open), {event.owner})
        ]
        longer = [event for event in waiting if ages[event.key] >= 2 * patience]
        taken = sorted(ours or longer)[-count:]
        for event in taken:
            event.passed_on = 2
            del self._events[event.key]
        return taken
