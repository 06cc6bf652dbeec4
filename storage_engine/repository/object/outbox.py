"""The outbox: events that ride in a manifest, brought out to where consumers look for them.

An event of a commit exists from the CAS on. Its object under `events/` is a projection: the key
follows from the manifest alone and the object is only ever created, so the committing process
and anyone who finds it missing can write it, at any time and in any number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from storage_engine.commitlog import layout
from storage_engine.commitlog.conditional import ATTEMPTS, StillUnknown
from storage_engine.commitlog.records import Manifest, parse_timestamp, to_json
from storage_engine.objectstore.protocol import (
    ConditionalConflict,
    ObjectStore,
    OutcomeUnknown,
    PreconditionFailed,
)

# An event's own time makes its key if it is near the store's; consumers list by key, and look
# back only so far for late arrivals.
TOLERANCE = timedelta(seconds=5)


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
