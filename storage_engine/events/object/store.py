"""The event bus on an object store: one JSON object per event, claim, dead letter and session.

Enqueueing is one PUT of a unique key. What workers do is in `consumer`; here are the rest
of the bus and its administration, which may list and read a lot.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any, TypeVar

from storage_engine.commitlog import layout
from storage_engine.commitlog.chain import Chain
from storage_engine.commitlog.conditional import write_conditionally
from storage_engine.commitlog.records import from_json, parse_timestamp, timestamp, to_json
from storage_engine.events import envelopes
from storage_engine.events.object.claims import ObjectClaims, StoredClaim
from storage_engine.events.object.consumer import ObjectConsumer
from storage_engine.events.object.outbox_projection import project_outbox
from storage_engine.events.object.pending_events import PendingEvents
from storage_engine.events.protocol import (
    Backlog,
    DeadLetter,
    EventInfo,
    NamespaceInfo,
    Subscription,
    WorkerSession,
)
from storage_engine.events.records import ClaimRecord, Envelope, Policy
from storage_engine.objectstore.parallel import Background
from storage_engine.objectstore.protocol import (
    ObjectInfo,
    ObjectNotFound,
    ObjectStore,
    PreconditionFailed,
    StoredObject,
)
from storage_engine.repository.object.outbox import create_event, put_events

T = TypeVar("T")
_PAGE = 100  # events that are read together


class ObjectEventStore:
    """See `EventStore`."""

    def __init__(self, store: ObjectStore, chain: Chain, policy: Policy) -> None:
        self._store = store
        self._chain = chain
        self._policy = policy

    @property
    def timers(self) -> bool:
        return self._store.timers

    def now(self) -> datetime:
        return self._store.now()

    def sleep(self, seconds: float) -> None:
        self._store.sleep(seconds)

    def background(self, work: Callable[[], T]) -> Background[T]:
        return self._store.parallel.start(work)

    # -- events -------------------------------------------------------------------------------

    def enqueue(self, envelopes: Sequence[Envelope]) -> None:
        put_events(self._store, envelopes)

    def enqueue_once(self, envelope: Envelope) -> bool:
        return create_event(self._store, parse_timestamp(envelope["created_at"]), envelope)

    def consumer(
        self, namespace: str, subscriptions: Sequence[Subscription], session_id: str
    ) -> ObjectConsumer:
        claims = ObjectClaims(self._store, namespace, self._policy)
        return ObjectConsumer(self._store, self._chain, claims, subscriptions, session_id)

    def backlog(self, namespace: str, subscriptions: Sequence[Subscription], limit: int) -> Backlog:
        """From where the handlers' positions are, as a worker would begin."""
        pending = PendingEvents(self._store, self._chain, namespace, subscriptions)
        claims = ObjectClaims(self._store, namespace, self._policy)
        pending.look(whole=True)
        events = self._store.parallel.gather(
            [
                partial(claims.open_event, event.envelope, handler_id)
                for event in pending.read(limit)
                if event.envelope is not None
                for handler_id in sorted(event.open)
            ]
        )
        return Backlog.count(events, self._store.now(), more=pending.unread > 0)

    # -- sessions -----------------------------------------------------------------------------

    def register_session(
        self, namespace: str, session_id: str, metadata: Mapping[str, Any]
    ) -> None:
        now = timestamp(self._store.now())
        self._store.put(
            layout.event_session(namespace, session_id),
            to_json(
                {
                    "session_id": session_id,
                    "namespace": namespace,
                    "started_at": now,
                    "last_heartbeat": now,
                    "metadata": dict(metadata),
                    "write_id": layout.new_write_id(),
                }
            ),
        )

    def heartbeat(self, namespace: str, session_id: str) -> None:
        key = layout.event_session(namespace, session_id)
        stored = self._get(key)
        if stored is None:
            self.register_session(namespace, session_id, {})
            return
        write_id = layout.new_write_id()
        body = {
            **from_json(stored.data, key=key),
            "last_heartbeat": timestamp(self._store.now()),
            "write_id": write_id,
        }
        write_conditionally(self._store, key, to_json(body), write_id=write_id, etag=stored.etag)

    def end_session(self, namespace: str, session_id: str) -> None:
        self._store.delete_many([layout.event_session(namespace, session_id)])

    def list_sessions(self, namespace: str, session_ttl_ms: int) -> list[WorkerSession]:
        keys = [info.key for info in self._store.list(layout.event_sessions(namespace))]
        now, ttl = self._store.now(), timedelta(milliseconds=session_ttl_ms)
        workers = []
        for raw in self._documents(keys):
            beat = parse_timestamp(raw["last_heartbeat"])
            workers.append(
                WorkerSession(
                    namespace=namespace,
                    session_id=raw["session_id"],
                    started_at=parse_timestamp(raw["started_at"]),
                    last_heartbeat=beat,
                    metadata=raw.get("metadata") or {},
                    is_dead=now - beat > ttl,
                )
            )
        return sorted(workers, key=lambda session: session.started_at)

    # -- looking ------------------------------------------------------------------------------

    def list_namespaces(self, session_ttl_ms: int) -> list[NamespaceInfo]:
        events = _count(self._store.list(layout.EVENTS), layout.is_event)
        sessions = _count(self._store.list(layout.SESSIONS), lambda _: True)
        letters = _count(self._store.list(layout.DEAD_LETTERS), lambda _: True)
        namespaces = []
        for namespace in sorted({*events, *sessions}):
            workers = (
                self.list_sessions(namespace, session_ttl_ms) if sessions.get(namespace) else []
            )
            dead = sum(session.is_dead for session in workers)
            namespaces.append(
                NamespaceInfo(
                    namespace=namespace,
                    events=events.get(namespace, 0),
                    sessions=len(workers) - dead,
                    dead_sessions=dead,
                    dead_letters=letters.get(namespace, 0),
                )
            )
        return namespaces

    def list_events(
        self, namespace: str, limit: int, *, status: str | None = None, type: str | None = None
    ) -> list[EventInfo]:
        # One that was sent again may have several objects.
        newest = {layout.event_name(key): key for key in self._event_keys(namespace)}
        keys = sorted(newest.values(), reverse=True)
        infos: list[EventInfo] = []
        for start in range(0, len(keys), _PAGE):
            read = self._documents(keys[start : start + _PAGE])
            wanted = [e for e in read if type is None or e["type"] == type]
            for info in self._infos(namespace, wanted):
                if status is None or info.status == status:
                    infos.append(info)
                    if len(infos) == limit:
                        return infos
        return infos

    def list_dead_letters(
        self, namespace: str, limit: int, *, handler_id: str | None = None
    ) -> list[DeadLetter]:
        keys = [info.key for info in self._store.list(layout.dead_letters(namespace))]
        if handler_id is not None:
            keys = [key for key in keys if layout.is_dead_letter_of(key, handler_id)]
        letters = [envelopes.letter_of(raw, namespace) for raw in self._documents(keys)]
        return sorted(letters, key=lambda letter: letter.failed_at, reverse=True)[:limit]

    def inspect_event(self, event_id: str, namespace: str | None = None) -> list[EventInfo]:
        infos: list[EventInfo] = []
        for where, keys in self._keys_of(event_id, namespace).items():
            infos += self._infos(where, self._documents(keys[:1]))
        return infos

    def _infos(self, namespace: str, events: Sequence[Envelope]) -> list[EventInfo]:
        now = self._store.now()
        claims = self._store.parallel.map(
            lambda envelope: self._claims_of(namespace, envelope["id"]), events
        )
        return [
            envelopes.event_info(envelope, claimed, now)
            for envelope, claimed in zip(events, claims, strict=True)
        ]

    def _claims_of(self, namespace: str, event_id: str) -> list[ClaimRecord]:
        keys = [info.key for info in self._store.list(layout.claims(namespace, event_id))]
        stored = [(key, self._get(key)) for key in keys]
        return [
            ClaimRecord.parse(from_json(item.data, key=key), key=key)
            for key, item in stored
            if item is not None
        ]

    # -- doing again --------------------------------------------------------------------------

    def replay_event(self, namespace: str, event_id: str) -> Envelope | None:
        keys = self._keys_of(event_id, namespace).get(namespace, [])
        for envelope in self._documents(keys[:1]):
            copy = envelopes.replayed(envelope, self._store.now())
            self.enqueue([copy])
            return copy
        return None

    def redrive(self, letter: DeadLetter) -> Envelope | None:
        """The claim says first which event carries on, so that a second attempt sends the same."""
        claims = ObjectClaims(self._store, letter.namespace, self._policy)
        letter_key = layout.dead_letter(letter.namespace, letter.event_id, letter.handler_id)
        stored, stands = self._store.parallel.both(
            partial(self._get, letter_key),
            partial(claims.read, letter.event_id, letter.handler_id),
        )
        if stored is None:
            return None
        event_id = str(uuid.uuid4())
        if stands is not None:
            if stands.record.redriven_as:
                event_id = stands.record.redriven_as
            else:
                moved = replace(stands.record, redriven_as=event_id)
                outcome = claims.write(moved, stands.etag)
                if not isinstance(outcome, StoredClaim):
                    return None
        whole = envelopes.with_letter_event(letter, self._event(letter))
        copy = None
        if whole.event is not None:
            copy = envelopes.redriven(whole, event_id, self._store.now())
            self.enqueue([copy])
        with suppress(PreconditionFailed):  # another redrive went on from the same letter
            self._store.delete_if_match(letter_key, stored.etag)
        return copy

    def _event(self, letter: DeadLetter) -> Envelope | None:
        if letter.event is not None:
            return letter.event
        keys = self._keys_of(letter.event_id, letter.namespace).get(letter.namespace, [])
        return next(iter(self._documents(keys[:1])), None)

    # -- cleaning up --------------------------------------------------------------------------

    def cleanup_events(self, namespace: str, before: datetime, *, apply: bool = True) -> int:
        """Events go before their claims, or they would be handled again; the outbox goes before
        everything, or the log would bring them back. Claims without an event go too."""
        end = f"{layout.events(namespace)}{layout.event_time(before)}"
        if not apply:
            return sum(key < end for key in self._event_keys(namespace))
        project_outbox(self._store, self._chain, namespace)
        claims = [info.key for info in self._store.list(layout.claims(namespace))]
        keys = self._event_keys(namespace)
        doomed = [key for key in keys if key < end]
        self._store.delete_many(doomed)
        kept = {layout.event_name(key) for key in keys if key >= end}
        self._store.delete_many([key for key in claims if layout.claim_event(key) not in kept])
        return len(doomed)

    # -- objects ------------------------------------------------------------------------------

    def _event_keys(self, namespace: str) -> list[str]:
        prefix = layout.events(namespace)
        keys = []
        for info in self._store.list(prefix):
            if not layout.is_event(info.key):
                break
            keys.append(info.key)
        return keys

    def _keys_of(self, event_id: str, namespace: str | None) -> dict[str, list[str]]:
        """Keys of an event by namespace: a copy may have been written again, later."""
        by_namespace: dict[str, list[str]] = {}
        name = layout.segment(event_id)
        prefix = layout.events(namespace) if namespace is not None else layout.EVENTS
        for info in self._store.list(prefix):
            if layout.is_event(info.key) and layout.event_name(info.key) == name:
                by_namespace.setdefault(layout.namespace_of(info.key), []).append(info.key)
        return by_namespace

    def _get(self, key: str) -> StoredObject | None:
        try:
            return self._store.get(key)
        except ObjectNotFound:
            return None

    def _documents(self, keys: Sequence[str]) -> list[dict[str, Any]]:
        """Those that are still there, in order."""
        stored = self._store.parallel.map(self._get, keys)
        return [
            from_json(item.data, key=key)
            for key, item in zip(keys, stored, strict=True)
            if item is not None
        ]


def _count(listed: Iterable[ObjectInfo], counts: Callable[[str], bool]) -> dict[str, int]:
    counts_by_namespace: dict[str, int] = {}
    for info in listed:
        namespace = layout.namespace_of(info.key)
        counts_by_namespace[namespace] = counts_by_namespace.get(namespace, 0) + counts(info.key)
    return counts_by_namespace
