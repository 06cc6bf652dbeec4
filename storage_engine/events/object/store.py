"""The event bus on an object store: one JSON object per event, claim, dead letter and session.

Enqueueing is one PUT of a unique key. What workers do is in `consumer`; here are the rest
of the bus and its administration, which may list and read a lot.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from storage_engine.commitlog import layout
from storage_engine.commitlog.chain import Chain
from storage_engine.commitlog.json_object import write_conditionally
from storage_engine.commitlog.records import from_json, parse_timestamp, timestamp, to_json
from storage_engine.errors import IntegrityError
from storage_engine.events import envelopes
from storage_engine.events.carried import CarriedEvent
from storage_engine.events.object import carried, reader
from storage_engine.events.object.claims import ObjectClaims, StoredClaim
from storage_engine.events.object.consumer import ObjectConsumer
from storage_engine.events.object.pending_events import PendingEvent, PendingEvents
from storage_engine.events.object.positions import project_outbox
from storage_engine.events.protocol import (
    Backlog,
    DeadLetter,
    EventInfo,
    MalformedObject,
    NamespaceInfo,
    OpenEvent,
    Peek,
    Subscription,
    WorkerSession,
)
from storage_engine.events.records import ClaimRecord, Envelope, Policy
from storage_engine.objectstore.parallel import Background
from storage_engine.objectstore.protocol import (
    ObjectInfo,
    ObjectStore,
    PreconditionFailed,
)
from storage_engine.repository.object.outbox import create_event, put_events

log = logging.getLogger(__name__)

T = TypeVar("T")

_PEEKED = (8, 16, 40)  # events that a peek reads, one after the other, until one is due


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
        events = [opened for _, opened in self._opened(claims, pending.read(limit))]
        return Backlog.count(events, self._store.now(), more=pending.unread > 0)

    def peek(self, namespace: str, subscriptions: Sequence[Subscription]) -> Peek:
        """The log is asked only where nothing under `events/` is due."""
        pending = PendingEvents(self._store, self._chain, namespace, subscriptions)
        claims = ObjectClaims(self._store, namespace, self._policy)
        whole = pending.glance()
        left = self._look_at(claims, pending.read_some(_PEEKED[0]))
        if not any(event.due for _, event in left):
            pending.glance_at_log()
            for count in _PEEKED[1:]:
                left += self._look_at(claims, pending.read_some(count))
                if any(event.due for _, event in left):
                    break
        return Peek.of(
            left, unread=pending.unread, oldest_unread=pending.oldest_unread, more=not whole
        )

    def _look_at(
        self, claims: ObjectClaims, events: Sequence[PendingEvent]
    ) -> list[tuple[str, Backlog]]:
        """What is left to do of each event, where something is, with its type."""
        by_event: dict[str, list[OpenEvent]] = {}
        for event, opened in self._opened(claims, events):
            by_event.setdefault(event.event_id, []).append(opened)
        now = self._store.now()
        left = [(opened[0][0]["type"], Backlog.count(opened, now)) for opened in by_event.values()]
        return [(name, event) for name, event in left if event.due or event.waiting]

    def _opened(
        self, claims: ObjectClaims, events: Sequence[PendingEvent]
    ) -> list[tuple[PendingEvent, OpenEvent]]:
        """Events with the claim of each handler that may have yet to finish them."""
        asked = [
            (event, event.envelope, handler_id)
            for event in events
            if event.envelope is not None
            for handler_id in sorted(event.open)
        ]
        opened = self._store.parallel.gather(
            [partial(claims.open_event, envelope, handler_id) for _, envelope, handler_id in asked]
        )
        return [
            (event, claim)
            for (event, _, _), claim in zip(asked, opened, strict=True)
            if claim is not None
        ]

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

    def heartbeat(
        self, namespace: str, session_id: str, metadata: Mapping[str, Any] | None = None
    ) -> None:
        key = layout.event_session(namespace, session_id)
        stored = reader.get(self._store, key)
        if stored is None:
            self.register_session(namespace, session_id, metadata or {})
            return
        try:
            raw = from_json(stored.data, key=key)
            WorkerSession.parse(raw, namespace, key=key, alive_since=self._store.now())
        except IntegrityError as error:
            log.warning("a worker registers again: %s", error)
            self.register_session(namespace, session_id, metadata or {})
            return
        write_id = layout.new_write_id()
        body = {**raw, "last_heartbeat": timestamp(self._store.now()), "write_id": write_id}
        write_conditionally(self._store, key, to_json(body), write_id=write_id, etag=stored.etag)

    def end_session(self, namespace: str, session_id: str) -> None:
        self._store.delete_many([layout.event_session(namespace, session_id)])

    def list_sessions(self, namespace: str, session_ttl_ms: int) -> list[WorkerSession]:
        modified = {
            info.key: info.modified for info in self._store.list(layout.event_sessions(namespace))
        }
        alive_since = self._store.now() - timedelta(milliseconds=session_ttl_ms)
        workers = []
        parse = partial(reader.parse_session, namespace, alive_since)
        for key, session in reader.parsed(self._store, list(modified), parse):
            if isinstance(session, IntegrityError):
                at, name = modified[key], layout.last_segment(key)
                dead = at < alive_since
                workers.append(WorkerSession(namespace, name, at, at, {}, dead, str(session)))
            else:
                workers.append(session)
        return sorted(workers, key=lambda session: session.started_at)

    # -- looking ------------------------------------------------------------------------------

    def list_namespaces(self, session_ttl_ms: int) -> list[NamespaceInfo]:
        listed = list(self._store.list(layout.EVENTS))
        events = _count(listed, layout.is_event)
        oldest: dict[str | None, datetime] = {}
        for info in listed:
            sent = layout.event_moment(info.key) if layout.is_event(info.key) else None
            if sent is not None:
                namespace_key = layout.namespace_of(info.key)
                oldest[namespace_key] = min(oldest.get(namespace_key, sent), sent)
        sessions = _count(self._store.list(layout.SESSIONS))
        letters = _count(self._store.list(layout.DEAD_LETTERS))
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
                    oldest=oldest.get(namespace),
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
        for start in range(0, len(keys), reader.PAGE):
            wanted = [
                envelope
                for envelope in reader.well_formed(
                    self._store, keys[start : start + reader.PAGE], reader.parse_event
                )
                if type is None or envelope["type"] == type
            ]
            for info in self._infos(namespace, wanted):
                if status is None or info.status == status:
                    infos.append(info)
                    if len(infos) == limit:
                        return infos
        return infos

    def list_malformed(self, namespace: str, limit: int) -> list[MalformedObject]:
        return list(islice(reader.malformed(self._store, namespace), limit))

    def list_dead_letters(
        self, namespace: str, limit: int, *, handler_id: str | None = None
    ) -> list[DeadLetter]:
        listed = [
            info
            for info in self._store.list(layout.dead_letters(namespace))
            if handler_id is None or layout.is_dead_letter_of(info.key, handler_id)
        ]
        listed.sort(key=lambda info: info.modified, reverse=True)
        letters: list[DeadLetter] = []
        while listed and len(letters) < limit:
            # With all that were written at the same moment as the last one.
            count = limit - len(letters)
            while count < len(listed) and listed[count].modified == listed[count - 1].modified:
                count += 1
            keys, listed = [info.key for info in listed[:count]], listed[count:]
            parse = partial(reader.parse_letter, namespace)
            letters += reader.well_formed(self._store, keys, parse)
        return sorted(letters, key=lambda letter: letter.failed_at, reverse=True)[:limit]

    def count_dead_letters(self, namespace: str) -> dict[str, int]:
        listed = self._store.list(layout.dead_letters(namespace))
        return dict(Counter(layout.last_segment(info.key) for info in listed))

    def inspect_event(self, event_id: str, namespace: str | None = None) -> list[EventInfo]:
        infos: list[EventInfo] = []
        for where, keys in self._keys_of(event_id, namespace).items():
            infos += self._infos(where, self._newest(keys))
        return infos

    def _newest(self, keys: Sequence[str]) -> list[Envelope]:
        """The event of these keys; none if it is gone, IntegrityError if nobody can read it."""
        error: IntegrityError | None = None
        for _, envelope in reader.parsed(
            self._store, sorted(keys, reverse=True), reader.parse_event
        ):
            if not isinstance(envelope, IntegrityError):
                return [envelope]
            error = error or envelope
        if error is not None:
            raise error
        return []

    def _infos(self, namespace: str, events: Sequence[Envelope]) -> list[EventInfo]:
        now = self._store.now()
        claims = self._store.parallel.map(
            lambda envelope: self._claims_of(namespace, envelope["id"]), events
        )
        return [
            envelopes.event_info(
                envelope,
                [claim for claim in claimed if not isinstance(claim, IntegrityError)],
                now,
                [
                    MalformedObject.of("claim", claim)
                    for claim in claimed
                    if isinstance(claim, IntegrityError)
                ],
            )
            for envelope, claimed in zip(events, claims, strict=True)
        ]

    def _claims_of(self, namespace: str, event_id: str) -> list[ClaimRecord | IntegrityError]:
        keys = [info.key for info in self._store.list(layout.claims(namespace, event_id))]
        return [
            claim
            for _, claim in reader.parsed(self._store, keys, partial(reader.parse_claim, namespace))
        ]

    # -- doing again --------------------------------------------------------------------------

    def replay_event(self, namespace: str, event_id: str) -> Envelope | None:
        keys = self._keys_of(event_id, namespace).get(namespace, [])
        for envelope in self._newest(keys):
            copy = envelopes.replayed(envelope, self._store.now())
            self.enqueue([copy])
            return copy
        return None

    def redrive(self, letter: DeadLetter) -> Envelope | None:
        """The claim says first which event carries on, so that a second attempt sends the same."""
        claims = ObjectClaims(self._store, letter.namespace, self._policy)
        letter_key = layout.dead_letter(letter.namespace, letter.event_id, letter.handler_id)
        stored, stands = self._store.parallel.both(
            partial(reader.get, self._store, letter_key),
            partial(_read_claim, claims, letter),
        )
        whole = envelopes.with_letter_event(letter, self._event(letter))
        if stored is None or whole.event is None:
            return None
        # Without a claim to say it, the letter itself makes a second attempt send the same.
        name = (letter.namespace, letter.event_id, letter.handler_id, stored.etag)
        event_id = envelopes.derived_id("redriven", *name)
        if stands is not None:
            if stands.record.redriven_as:
                event_id = stands.record.redriven_as
            else:
                moved = replace(stands.record, redriven_as=event_id)
                outcome = claims.write(moved, stands.etag)
                if not isinstance(outcome, StoredClaim):
                    return None
        copy = envelopes.redriven(whole, event_id, self._store.now())
        self.enqueue([copy])
        with suppress(PreconditionFailed):  # another redrive went on from the same letter
            self._store.delete_if_match(letter_key, stored.etag)
        return copy

    def _event(self, letter: DeadLetter) -> Envelope | None:
        if letter.event is not None:
            return letter.event
        keys = self._keys_of(letter.event_id, letter.namespace).get(letter.namespace, [])
        return next(iter(self._newest(keys)), None)

    # -- going along with a copy --------------------------------------------------------------

    def carried(self) -> Iterator[CarriedEvent]:
        return carried.carried(self._store, self._chain)

    def adopt(self, events: Sequence[CarriedEvent]) -> int:
        return carried.adopt(self._store, self._policy, events)

    # -- cleaning up --------------------------------------------------------------------------

    def cleanup_events(self, namespace: str, before: datetime, *, apply: bool = True) -> int:
        """Events go before their claims, or they would be handled again; the outbox goes before
        everything, or the log would bring them back. Claims without an event go too."""
        if not apply:
            return len(self._split(namespace, before)[0])
        project_outbox(self._store, self._chain, namespace)
        claims = [info.key for info in self._store.list(layout.claims(namespace))]
        doomed, kept = self._split(namespace, before)
        self._store.delete_many(doomed)
        names = {layout.event_name(key) for key in kept}
        self._store.delete_many([key for key in claims if layout.claim_event(key) not in names])
        return len(doomed)

    def _split(self, namespace: str, before: datetime) -> tuple[list[str], list[str]]:
        """Keys from before, and the others; one that carries no time is as old as its object."""
        end = f"{layout.events(namespace)}{layout.event_time(before)}"
        doomed: list[str] = []
        kept: list[str] = []
        for info in self._store.list(layout.events(namespace)):
            if layout.is_beside_events(info.key):
                continue
            old = info.key < end if layout.is_event(info.key) else info.modified < before
            (doomed if old else kept).append(info.key)
        return doomed, kept

    # -- objects ------------------------------------------------------------------------------

    def _event_keys(self, namespace: str) -> list[str]:
        keys = []
        for info in self._store.list(layout.events(namespace)):
            if layout.is_beside_events(info.key):
                break
            if layout.is_event(info.key):
                keys.append(info.key)
        return keys

    def _keys_of(self, event_id: str, namespace: str | None) -> dict[str, list[str]]:
        """Keys of an event by namespace: a copy may have been written again, later."""
        by_namespace: dict[str, list[str]] = {}
        name = layout.segment(event_id)
        prefix = layout.events(namespace) if namespace is not None else layout.EVENTS
        for info in self._store.list(prefix):
            where = layout.namespace_of(info.key)
            if where is not None and layout.event_name(info.key) == name:
                by_namespace.setdefault(where, []).append(info.key)
        return by_namespace


def _read_claim(claims: ObjectClaims, letter: DeadLetter) -> StoredClaim | None:
    """None too where it cannot be read: a person has asked for the letter to be sent again."""
    try:
        return claims.read(letter.event_id, letter.handler_id)
    except IntegrityError as error:
        log.warning("a letter is sent again without its claim: %s", error)
        return None


def _count(
    listed: Iterable[ObjectInfo], counts: Callable[[str], bool] = lambda _: True
) -> dict[str, int]:
    counts_by_namespace: dict[str, int] = {}
    for info in listed:
        namespace = layout.namespace_of(info.key)
        if namespace is not None:
            before = counts_by_namespace.get(namespace, 0)
            counts_by_namespace[namespace] = before + counts(info.key)
    return counts_by_namespace
