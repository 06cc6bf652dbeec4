"""The objects of events: their keys, and writing them so that consumers find them.

An event of a commit rides in the manifest and exists from the CAS on. Its object under `events/` is
a projection: the key follows from the manifest alone and the object is only ever created, so the
committing process and anyone who finds it missing can write it, at any time and in any number.

An event without a commit has nothing but its object, and consumers look for late arrivals only
HOLD_BACK behind the store's clock. Between taking the time for the key and the write, a process may
be paused for minutes. So whoever has written such an event looks at the clock again; one that took
longer than ON_ITS_WAY is written once more, under the time of then. It keeps its id, by which it is
claimed: however many objects an event has, no handler gets it twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from storage_engine.commitlog import layout
from storage_engine.commitlog.json_object import ATTEMPTS, StillUnknown
from storage_engine.commitlog.records import Manifest, parse_timestamp, to_json
from storage_engine.errors import StorageBackendError
from storage_engine.objectstore.protocol import (
    ConditionalConflict,
    ObjectStore,
    OutcomeUnknown,
    PreconditionFailed,
)

log = logging.getLogger(__name__)

TOLERANCE = timedelta(seconds=5)  # an event's own time makes its key if it is so near the store's
CLOCK_ERROR = timedelta(minutes=2)  # of a process's idea of the store's time, each way
ON_ITS_WAY = timedelta(minutes=1)  # from taking the time of a key to the store's answer
HOLD_BACK = 2 * CLOCK_ERROR + ON_ITS_WAY  # for the producer's clock and the consumer's
TIMES = 8  # an event is written before its sender is told that it does not get there


def key_time(created_at: datetime, enqueued_at: datetime) -> datetime:
    """The time in an event's key: its own, or that of enqueueing when the two are far apart."""
    return created_at if abs(created_at - enqueued_at) <= TOLERANCE else enqueued_at


def event_key(envelope: Mapping[str, Any], enqueued_at: datetime) -> str:
    moment = key_time(parse_timestamp(envelope["created_at"]), enqueued_at)
    return layout.event(envelope["namespace"], moment, envelope["id"])


def outbox_events(manifest: Manifest) -> list[tuple[str, Mapping[str, Any]]]:
    """The commit's events with the keys of their objects."""
    committed_at = parse_timestamp(manifest.created_at)
    return [(event_key(envelope, committed_at), envelope) for envelope in manifest.events]


def projections(store: ObjectStore, manifest: Manifest) -> list[Callable[[], object]]:
    """One write per event; they need nothing of one another."""
    return [partial(create, store, key, envelope) for key, envelope in outbox_events(manifest)]


def create(store: ObjectStore, key: str, envelope: Mapping[str, Any]) -> bool:
    """Write the event's object unless it is there; whoever wrote it, it says the same. Whether
    this was the write that did it, as far as the store's answers tell."""
    data = to_json(envelope)
    failure: Exception | None = None
    for _ in range(ATTEMPTS):
        try:
            store.put_if_absent(key, data, write_id=envelope["id"])
        except PreconditionFailed:
            return False
        except (ConditionalConflict, OutcomeUnknown) as answer:
            failure = answer
            store.sleep(0.05)
        else:
            return True
    raise StillUnknown(key) from failure


# -- without a commit: in time, or again ----------------------------------------------------------


def put_events(store: ObjectStore, envelopes: Sequence[Mapping[str, Any]]) -> None:
    """Send events, each under the time at which its own request goes out."""
    store.parallel.gather([partial(_put_event, store, envelope) for envelope in envelopes])


def create_event(store: ObjectStore, moment: datetime, envelope: Mapping[str, Any]) -> bool:
    """Send an event under a given time unless it is there; whether it was not. The object stays
    even if it came late, as it tells others that the event was sent."""
    key = layout.event(envelope["namespace"], moment, envelope["id"])
    created = create(store, key, envelope)
    if is_late(store, moment):
        put_events(store, [envelope])
    return created


def is_late(store: ObjectStore, moment: datetime) -> bool:
    """Whether an event that is written now under that time may be passed over."""
    return store.now() - moment > ON_ITS_WAY


def too_late(envelope: Mapping[str, Any]) -> StorageBackendError:
    return StorageBackendError(
        f"event {envelope['id']} ({envelope['type']}) did not reach the store in time "
        f"{TIMES} times: each request took longer than {ON_ITS_WAY}; send it again",
        operation="enqueue event",
        retryable=True,
    )


def remove_late(store: ObjectStore, keys: Sequence[str]) -> None:
    """Delete what was written too late, now that the event is there in time. Only tidies up."""
    if not keys:
        return
    try:
        store.delete_many(keys)
    except StorageBackendError as error:
        log.info("an event that came too late stays beside its copy: %s", error)


def _put_event(store: ObjectStore, envelope: Mapping[str, Any]) -> None:
    created_at, data = parse_timestamp(envelope["created_at"]), to_json(envelope)
    late: list[str] = []
    for _ in range(TIMES):
        moment = key_time(created_at, store.now())
        key = layout.event(envelope["namespace"], moment, envelope["id"])
        store.put(key, data)
        if not is_late(store, moment):
            remove_late(store, [earlier for earlier in late if earlier != key])
            return
        late.append(key)
    raise too_late(envelope)
