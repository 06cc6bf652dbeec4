"""The outbox of a namespace: which commits' events are all under `events/`, and bringing out more.

`_projected.json` only saves work: whatever it says, events are created and never replaced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from storage_engine.commitlog import layout
from storage_engine.commitlog.chain import Chain
from storage_engine.commitlog.conditional import write_conditionally
from storage_engine.commitlog.records import Head, from_json, to_json
from storage_engine.events.records import Envelope
from storage_engine.objectstore.protocol import ObjectNotFound, ObjectStore
from storage_engine.repository.object.outbox import create, outbox_events


@dataclass(frozen=True, slots=True)
class Projection:
    """Up to which commit a namespace's events were all projected."""

    commit_id: int = 0
    etag: str | None = None


def read_projected(store: ObjectStore, namespace: str, log_id: str) -> Projection:
    key = layout.projected(namespace)
    try:
        stored = store.get(key)
    except ObjectNotFound:
        return Projection()
    raw: Mapping[str, Any] = from_json(stored.data, key=key)
    commit_id = raw.get("commit_id")
    same = raw.get("log_id") == log_id and isinstance(commit_id, int)
    return Projection(commit_id if same and isinstance(commit_id, int) else 0, stored.etag)


def write_projected(store: ObjectStore, namespace: str, head: Head, before: Projection) -> None:
    """Say so, unless another did: it only saves work, so losing is fine."""
    if head.commit_id <= before.commit_id:
        return
    write_id = layout.new_write_id()
    body = {"commit_id": head.commit_id, "log_id": head.log_id, "write_id": write_id}
    key = layout.projected(namespace)
    write_conditionally(store, key, to_json(body), write_id=write_id, etag=before.etag)


def project(store: ObjectStore, missing: Sequence[tuple[str, Envelope]]) -> None:
    """Create the objects of events that commits carry, where they are not there."""
    store.parallel.gather([partial(create, store, key, envelope) for key, envelope in missing])


def project_outbox(store: ObjectStore, chain: Chain, namespace: str) -> None:
    """Bring out everything that commits have sent to a namespace so far."""
    head = chain.read_head().head
    projected = read_projected(store, namespace, head.log_id)
    missing = [
        (key, envelope)
        for _, manifest in chain.stretch(head.manifest_path, above=projected.commit_id)
        for key, envelope in outbox_events(manifest)
        if envelope["namespace"] == namespace
    ]
    project(store, missing)
    write_projected(store, namespace, head, projected)
