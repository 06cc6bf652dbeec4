"""Objects of the bus as they are looked at, each parsed by its kind; which of them are malformed.

Whoever lists objects of others must expect anything: one that is not what it should be is left out
with a warning, and told of by `malformed`. It never keeps the others from being read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from storage_engine.commitlog import layout
from storage_engine.commitlog.records import from_json
from storage_engine.errors import IntegrityError
from storage_engine.events import envelopes
from storage_engine.events.object.pending_events import check_event_key
from storage_engine.events.object.positions import parse_position, parse_projected
from storage_engine.events.protocol import DeadLetter, MalformedObject, WorkerSession
from storage_engine.events.records import ClaimRecord, Envelope
from storage_engine.objectstore.protocol import ObjectNotFound, ObjectStore, StoredObject

log = logging.getLogger(__name__)

T = TypeVar("T")
Parse = Callable[[dict[str, Any], str], T]  # of a JSON object and its key; or an IntegrityError
PAGE = 100  # objects that are read together


def parsed(
    store: ObjectStore, keys: Sequence[str], parse: Parse[T]
) -> list[tuple[str, T | IntegrityError]]:
    """Those that are still there, in order, or what is wrong with them."""
    values: list[tuple[str, T | IntegrityError]] = []
    stored = store.parallel.map(partial(get, store), keys)
    for key, item in zip(keys, stored, strict=True):
        if item is None:
            continue
        try:
            values.append((key, parse(from_json(item.data, key=key), key)))
        except IntegrityError as error:
            values.append((key, error))
    return values


def get(store: ObjectStore, key: str) -> StoredObject | None:
    try:
        return store.get(key)
    except ObjectNotFound:
        return None


def well_formed(store: ObjectStore, keys: Sequence[str], parse: Parse[T]) -> list[T]:
    """Those that are still there and can be read, in order."""
    values: list[T] = []
    for _, value in parsed(store, keys, parse):
        if isinstance(value, IntegrityError):
            log.warning("left out (`onto events show --malformed` lists such): %s", value)
        else:
            values.append(value)
    return values


def malformed(store: ObjectStore, namespace: str) -> Iterator[MalformedObject]:
    """By reading every object of the namespace, a page at a time."""
    now = store.now()
    kinds: list[tuple[str, str, Parse[Any]]] = [
        ("event", layout.events(namespace), parse_event),
        ("claim", layout.claims(namespace), partial(parse_claim, namespace)),
        ("dead letter", layout.dead_letters(namespace), partial(parse_letter, namespace)),
        ("session", layout.event_sessions(namespace), partial(parse_session, namespace, now)),
        ("position", layout.positions(namespace), partial(parse_position, namespace, now)),
    ]
    for kind, prefix, parse in kinds:
        keys = (info.key for info in store.list(prefix))
        if kind == "event":
            keys = (key for key in keys if not layout.is_beside_events(key))
        yield from _malformed(store, kind, keys, parse)
    yield from _malformed(store, "projection", iter([layout.projected(namespace)]), parse_projected)


def _malformed(
    store: ObjectStore, kind: str, keys: Iterator[str], parse: Parse[Any]
) -> Iterator[MalformedObject]:
    while page := list(islice(keys, PAGE)):
        for _, value in parsed(store, page, parse):
            if isinstance(value, IntegrityError):
                yield MalformedObject.of(kind, value)


def parse_event(raw: Mapping[str, Any], key: str) -> Envelope:
    name, namespace = check_event_key(key), layout.namespace_of(key) or ""
    return envelopes.parse_envelope(raw, namespace, key=key, name=name)


def parse_claim(namespace: str, raw: Mapping[str, Any], key: str) -> ClaimRecord:
    record = ClaimRecord.parse(raw, key=key)
    _check_key(key, layout.claim(namespace, record.event_id, record.handler_id), "claim")
    return record


def parse_letter(namespace: str, raw: Mapping[str, Any], key: str) -> DeadLetter:
    letter = envelopes.parse_letter(raw, namespace, key=key)
    expected = layout.dead_letter(namespace, letter.event_id, letter.handler_id)
    _check_key(key, expected, "dead letter")
    return letter


def parse_session(
    namespace: str, alive_since: datetime, raw: Mapping[str, Any], key: str
) -> WorkerSession:
    return WorkerSession.parse(raw, namespace, key=key, alive_since=alive_since)


def _check_key(key: str, expected: str, what: str) -> None:
    if key != expected:
        raise IntegrityError(f"{key} is not a valid {what}: it belongs at {expected}", key=key)
