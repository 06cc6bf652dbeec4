"""The outbox of a namespace: which commits' events are all under `events/`, and bringing out more.

`_projected.json` only saves work: whatever it says, events are created and never replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from storage_engine.commitlog import layout
from storage_engine.commitlog.chain import Chain
from storage_engine.commitlog.json_object import JsonVersion, rewrite
from storage_engine.commitlog.records import Head, from_json, to_json
from storage_engine.events.records import Envelope
from storage_engine.objectstore.protocol import ObjectNotFound, ObjectStore
from storage_engine.repository.object.outbox import create, outbox_events


def read_projected(store: ObjectStore, namespace: str, log_id: str) -> JsonVersion[int]:
    """Up to which commit a namespace's events were all projected."""
    key = layout.projected(namespace)
    try:
        stored = store.get(key)
    except ObjectNotFound:
        return JsonVersion(0)
    return JsonVersion(_parse(log_id, key, stored.data), stored.etag)


def write_projected(
    store: ObjectStore, namespace: str, head: Head, before: JsonVersion[int]
) -> None:
    """Say so, unless another did: it only saves work, so losing is fine."""
    rewrite(
        store,
        layout.projected(namespace),
        before,
        lambda commit_id: head.commit_id if head.commit_id > commit_id else None,
        parse=partial(_parse, head.log_id),
        encode=lambda commit_id, write_id: to_json(
            {"commit_id": commit_id, "log_id": head.log_id, "write_id": write_id}
        ),
        losses=1,
    )


def _parse(log_id: str, key: str, data: bytes | None) -> int:
    if data is None:
        return 0
    raw = from_json(data, key=key)
    commit_id = raw.get("commit_id")
    return commit_id if raw.get("log_id") == log_id and isinstance(commit_id, int) else 0


def project(store: ObjectStore, missing: Sequence[tuple[str, Envelope]]) -> None:
    """Create the objects of events that commits carry, where they are not there."""
    store.parallel.gather([partial(create, store, key, envelope) for key, envelope in missing])


def project_outbox(store: ObjectStore, chain: Chain, namespace: str) -> None:
    """Bring out everything that commits have sent to a namespace so far."""
    head = chain.read_head().head
    projected = read_projected(store, namespace, head.log_id)
    missing = [
        (key, envelope)
        for _, manifest in chain.stretch(head.link, above=projected.value)
        for key, envelope in outbox_events(manifest)
        if envelope["namespace"] == namespace
    ]
    project(store, missing)
    write_projected(store, namespace, head, projected)
