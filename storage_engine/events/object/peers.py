"""The workers of one namespace, as one of them sees the others, and who takes which event.

No service knows the members: a worker keeps its session object fresh, so a listing of those tells
who lives. An event goes to the worker that ranks highest for it, by a hash of both: all of them
come to the same answer without asking, and when one comes or goes, only its own part changes hands.
Views differ for a while; then two try for the same event, and its claim decides as ever. So all of
this saves requests and promises nothing: what a worker does not get to is taken by others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from datetime import datetime, timedelta

from storage_engine.commitlog import layout
from storage_engine.commitlog.records import from_json
from storage_engine.errors import IntegrityError
from storage_engine.events.protocol import WorkerSession
from storage_engine.objectstore.protocol import ObjectNotFound, ObjectStore
from storage_engine.process import is_gone

_STALLED = timedelta(seconds=30)  # for so long one that leaves events lying has no part


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

    def meet(self, session_id: str) -> None:
        """A claim of this worker stands."""
        if session_id not in self._met:
            self._met.add(session_id)
            self._stranger |= session_id != self._session_id and session_id not in self._sessions

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

    def is_next(self, name: str, handler_id: str, owner: str) -> bool:
        """Whether this worker would take the event if that one were not there."""
        members = [member for member in self._by_handler[handler_id] if member != owner]
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
