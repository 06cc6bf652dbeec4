"""Events of an object store that go along with a copy, and those of a copy that arrive there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial

from storage_engine.commitlog import layout, state
from storage_engine.commitlog.chain import Chain
from storage_engine.commitlog.records import Head, parse_timestamp
from storage_engine.errors import IntegrityError
from storage_engine.events.carried import CarriedEvent, handlers_of, judged, left_letters
from storage_engine.events.object import reader
from storage_engine.events.object.claims import ObjectClaims
from storage_engine.events.object.positions import read_projected, sent_events
from storage_engine.events.protocol import DeadLetter
from storage_engine.events.records import ClaimRecord, Envelope, Policy
from storage_engine.objectstore.protocol import ObjectStore
from storage_engine.repository.object import outbox

_TOGETHER = 200  # events that are written at once

Acked = set[tuple[str, str, str]]  # namespace, event, handler


def carried(store: ObjectStore, chain: Chain) -> Iterator[CarriedEvent]:
    """Of all namespaces, in the order of arrival. Writes nothing: what commits have sent and
    nobody has projected yet is taken from the log."""
    head = chain.read_head().head
    acked = state.acked_since(chain, head, 0)
    listed = {layout.namespace_of(info.key) for info in store.list(layout.EVENTS)}
    letters = {layout.namespace_of(info.key) for info in store.list(layout.DEAD_LETTERS)}
    sent = {
        envelope.get("namespace")
        for _, manifest in state.carriers(chain, head, "events", above=0)
        for envelope in manifest.events
    }
    for namespace in sorted({name for name in listed | letters | sent if isinstance(name, str)}):
        yield from _of_namespace(store, chain, head, namespace, acked)


def _of_namespace(
    store: ObjectStore, chain: Chain, head: Head, namespace: str, acked: Acked
) -> Iterator[CarriedEvent]:
    keys = _event_keys(store, chain, head, namespace)
    claims = _claims(store, namespace, acked)
    letters: dict[str, list[DeadLetter]] = {}
    letter_keys = [info.key for info in store.list(layout.dead_letters(namespace))]
    parse = partial(reader.parse_letter, namespace)
    for letter in reader.well_formed(store, letter_keys, parse):
        letters.setdefault(letter.event_id, []).append(letter)
    events = []
    for moment, envelope in keys:
        ended = tuple(r for r in claims.get(envelope["id"], ()) if r.finished)
        events.append(CarriedEvent(envelope, moment, ended, tuple(letters.get(envelope["id"], ()))))
    takers = handlers_of(
        (envelope["type"], record.handler_id)
        for _, envelope in keys
        for record in claims.get(envelope["id"], ())
    )
    yield from judged(events, takers)
    yield from left_letters(letters, events)


def _event_keys(
    store: ObjectStore, chain: Chain, head: Head, namespace: str
) -> list[tuple[datetime, Envelope]]:
    """Events of a namespace, each once, with the time of arrival."""
    names: dict[str | None, str] = {}
    for info in store.list(layout.events(namespace)):
        if layout.is_event(info.key):
            names.setdefault(layout.event_name(info.key), info.key)
    listed = sorted(names.values())
    events: dict[str, tuple[datetime, Envelope]] = {}
    for key, envelope in zip(listed, _read(store, listed), strict=True):
        if envelope is not None:
            created = parse_timestamp(envelope["created_at"])
            events[envelope["id"]] = layout.event_moment(key) or created, envelope
    projected = read_projected(store, chain, namespace, head)
    for link, manifest in state.carriers(chain, head, "events", above=projected.value):
        for event in sent_events(manifest, link.path, namespace):
            if not isinstance(event, IntegrityError) and event[1]["id"] not in events:
                at = parse_timestamp(manifest.created_at)
                events[event[1]["id"]] = layout.event_moment(event[0]) or at, event[1]
    return sorted(events.values(), key=lambda item: item[0])


def _read(store: ObjectStore, keys: Sequence[str]) -> list[Envelope | None]:
    envelopes: list[Envelope | None] = []
    for start in range(0, len(keys), reader.PAGE):
        page = keys[start : start + reader.PAGE]
        parsed = dict(reader.parsed(store, page, reader.parse_event))
        for key in page:
            envelope = parsed.get(key)
            envelopes.append(envelope if not isinstance(envelope, IntegrityError) else None)
    return envelopes


def _claims(
    store: ObjectStore, namespace: str, acked: Acked
) -> Mapping[str, Sequence[ClaimRecord]]:
    """By event. A claim whose ack is in the log alone has ended, too."""
    claims: dict[str, list[ClaimRecord]] = {}
    keys = [info.key for info in store.list(layout.claims(namespace))]
    parse = partial(reader.parse_claim, namespace)
    for start in range(0, len(keys), reader.PAGE):
        for record in reader.well_formed(store, keys[start : start + reader.PAGE], parse):
            ended = (namespace, record.event_id, record.handler_id) in acked
            claims.setdefault(record.event_id, []).append(
                replace(record, ack_at=store.now()) if ended and not record.finished else record
            )
    return claims


def adopt(store: ObjectStore, policy: Policy, events: Sequence[CarriedEvent]) -> int:
    """Put events of another storage on this bus, unless they are there; how many were not. What
    is there learns which handlers have finished it meanwhile."""
    there: dict[str, set[str | None]] = {}
    worked: set[str] = set()  # namespaces whose handlers have looked before
    for namespace in {event.envelope["namespace"] for event in events}:
        keys = [info.key for info in store.list(layout.events(namespace))]
        there[namespace] = {layout.event_name(key) for key in keys if layout.is_event(key)}
        if any(key.startswith(layout.positions(namespace)) for key in keys):
            worked.add(namespace)
    new = 0
    for start in range(0, len(events), _TOGETHER):
        page = []
        for event in events[start : start + _TOGETHER]:
            namespace, event_id = event.name
            if not event.done or layout.segment(event_id) in there[namespace]:
                page.append(event)
        # Claims first: an event that is seen without them would be run again.
        store.parallel.gather([partial(_adopt_claims, store, policy, event) for event in page])
        arriving = [
            event
            for event in page
            if event.pending and layout.segment(event.name[1]) not in there[event.name[0]]
        ]
        store.parallel.gather(
            [
                partial(_adopt_event, store, event, late=event.envelope["namespace"] in worked)
                for event in arriving
            ]
        )
        new += len(arriving)
    return new


def _adopt_claims(store: ObjectStore, policy: Policy, event: CarriedEvent) -> None:
    claims = ObjectClaims(store, event.envelope["namespace"], policy)
    for record in event.finished:
        claims.write(record, None)  # one that is there stays
    for letter in event.letters:
        key = layout.dead_letter(letter.namespace, letter.event_id, letter.handler_id)
        outbox.create(store, key, {**letter.as_dict(), "id": letter.event_id})


def _adopt_event(store: ObjectStore, event: CarriedEvent, *, late: bool) -> None:
    """Under its own time, so that the order stays; where handlers are past that, they are told
    once more under the time of now."""
    if late:
        outbox.create_event(store, event.enqueued_at, event.envelope)
    else:
        namespace, event_id = event.name
        key = layout.event(namespace, event.enqueued_at, event_id)
        outbox.create(store, key, event.envelope)
